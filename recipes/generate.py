"""Write text with a trained decoder, token by token.

python -m recipes.generate --workdir=runs/rmt-tiny --prompt="def main("
"""

import sys

from absl import flags

from recipes import program
from rmt_tpu import memory
from rmt_tpu.errors import UsageError, about_flag, arguments_as_flags

_WORKDIR = flags.DEFINE_string(
    "workdir", None, "a run folder of recipes.train, local or gs://", required=True
)
_STEP = flags.DEFINE_integer("step", None, "of the checkpoint; default the last good one")
_PROMPT = flags.DEFINE_string("prompt", "", "text to go on from")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "divides the logits; 0 is greedy")
_TOP_K = flags.DEFINE_integer("top_k", 0, "only the k likeliest tokens; 0 is all")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "only the likeliest tokens that reach this probability")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 256, "to generate at most")
_SEED = flags.DEFINE_integer("seed", 0, "of the draws")


def main() -> int:
    import rmt_tpu
    from rmt_tpu.generation import Sampling, fitting_tokens, generate

    try:
        sampling = Sampling(
            temperature=_TEMPERATURE.value,
            top_k=_TOP_K.value,
            top_p=_TOP_P.value,
            max_tokens=_MAX_TOKENS.value,
            seed=_SEED.value,
        )
    except UsageError as error:
        raise UsageError(str(error).replace("Sampling.", "--")) from None
    with arguments_as_flags():
        decoder, tokenizer = rmt_tpu.load(_WORKDIR.value, _STEP.value)
    with about_flag("prompt", "the text has"):
        prompt_tokens = 1 + len(tokenizer.encode(_PROMPT.value))
    room = fitting_tokens(decoder.config, prompt_tokens, sampling.max_tokens)
    if room < sampling.max_tokens:
        print(
            f"note: {room} of --max_tokens={sampling.max_tokens} fit the model's positions",
            file=sys.stderr,
        )
    print(_PROMPT.value, end="", flush=True)
    with memory.told_if_out("less is taken with a smaller --max_tokens or a shorter --prompt"):
        for piece in generate(decoder, tokenizer, _PROMPT.value, sampling):
            print(piece, end="", flush=True)
    print()
    return 0


def run() -> None:
    program.start(main)


if __name__ == "__main__":
    run()
