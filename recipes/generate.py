"""Generate text with a trained decoder, streamed to the terminal or for a file of prompts.

    python -m recipes.generate --workdir=runs/rmt-tiny --prompt="def main("
    python -m recipes.generate --workdir=runs/rmt-tiny --prompts=in.jsonl --output=out.jsonl

With --mesh, the weights, the caches and the tokens of a prompt are sharded over devices: rows along
the mesh axes `data` and `fsdp`, tokens and heads along `key`, `sequence` and `tensor`. A file of
prompts has one prompt per line, or, if its name ends in .jsonl, one object with the key "prompt"
per line. A line of JSON is written to --output for each finished sample. An interrupted command
resumes when it is repeated.
"""

import contextlib
import dataclasses
import sys
import time

from absl import flags

from recipes import program, trained
from rmt_tpu import memory
from rmt_tpu.errors import UsageError, about_flag, arguments_as_flags, of_flag

trained.define_source_flags()
trained.define_mesh_flag()
_PROMPT = flags.DEFINE_string("prompt", "", "text to go on from")
_PROMPTS = flags.DEFINE_string("prompts", None, "a file of prompts, local or gs://")
_OUTPUT = flags.DEFINE_string("output", None, "a .jsonl file to add to, local or gs://")
_NUM_SAMPLES = flags.DEFINE_integer("num_samples", 1, "of each prompt of a file", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "texts at a time", lower_bound=1)
_LOGPROBS = flags.DEFINE_bool("logprobs", False, "--output has tokens and their log-probabilities")
_STOP = flags.DEFINE_multi_string("stop", [], "a text ends before this; may be given often")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "divides the logits; 0 is greedy")
_TOP_K = flags.DEFINE_integer("top_k", 0, "only the k likeliest tokens; 0 is all")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "only the likeliest tokens that reach this probability")
_MIN_P = flags.DEFINE_float("min_p", 0.0, "only tokens so likely, times the likeliest; 0 is all")
_REPETITION_PENALTY = flags.DEFINE_float(
    "repetition_penalty", 1.0, "makes tokens that were there less likely; 1 does not"
)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 256, "to generate at most")
_SEED = flags.DEFINE_integer("seed", 0, "of the draws; samples of a file have this and those above")


def main() -> int:
    """Generate text for the prompt or the file of prompts in the flags, and return 0."""
    _check_flags()
    from rmt_tpu.generation import Sampling

    try:
        sampling = Sampling(
            temperature=_TEMPERATURE.value,
            top_k=_TOP_K.value,
            top_p=_TOP_P.value,
            min_p=_MIN_P.value,
            repetition_penalty=_REPETITION_PENALTY.value,
            max_tokens=_MAX_TOKENS.value,
            seed=_SEED.value,
        )
    except UsageError as error:
        raise UsageError(str(error).replace("Sampling.", "--")) from None
    if _PROMPTS.value is not None:
        return _file(sampling)
    return _one(*_load(), sampling)


def _load():
    """Load the run's model, with weights cast to the compute dtype, and its tokenizer."""
    import rmt_tpu
    from rmt_tpu.generation import cast_once

    with arguments_as_flags():
        given = flags.FLAGS.step, flags.FLAGS.mesh
        decoder, tokenizer = rmt_tpu.load(trained.source(), given[0], mesh=given[1])
    trained.tell_start(tokenizer)
    return cast_once(decoder), tokenizer


def _check_flags() -> None:
    trained.check_mesh()
    trained.source()
    if (_PROMPTS.value is None) != (_OUTPUT.value is None):
        raise UsageError("--prompts and --output go together: what is read, and what is written")
    if _PROMPTS.value is not None and _PROMPT.value:
        raise UsageError("give either --prompt or --prompts")
    if _PROMPTS.value is None and (_NUM_SAMPLES.value > 1 or _LOGPROBS.value):
        name = "num_samples" if _NUM_SAMPLES.value > 1 else "logprobs"
        raise UsageError(f"--{name} is for a file of --prompts")


def _one(decoder, tokenizer, sampling) -> int:
    """Generate one text, and print it to the terminal while it is generated."""
    from rmt_tpu.generation import fitting_tokens, generate

    with about_flag("prompt", "the text has"):
        prompt_tokens = len(tokenizer.begun(tokenizer.encode(_PROMPT.value)))
    room = fitting_tokens(decoder.config, prompt_tokens, sampling.max_tokens)
    if room < sampling.max_tokens:
        print(
            f"note: {room} of --max_tokens={sampling.max_tokens} fit the model's positions",
            file=sys.stderr,
        )
    print(_PROMPT.value, end="", flush=True)
    with memory.told_if_out("less is taken with a smaller --max_tokens or a shorter --prompt"):
        for piece in generate(decoder, tokenizer, _PROMPT.value, sampling, stop=_STOP.value):
            print(piece, end="", flush=True)
    print()
    return 0


def _file(sampling) -> int:
    """Generate samples for a file of prompts, and write a line of JSON for each sample."""
    from rmt_tpu.generation import files

    with of_flag("prompts"):
        prompts = files.read_prompts(_PROMPTS.value)
    with of_flag("output"):
        output = files.Output(_OUTPUT.value)
    done = files.check_same(output, prompts, sampling)
    samples = _NUM_SAMPLES.value
    left = [
        (number, sample)
        for number in range(len(prompts))
        for sample in range(samples)
        if (number, sample) not in done
    ]
    print(f"{len(prompts) * samples} texts, {len(left)} to be written", file=sys.stderr)
    if not left:
        return 0
    from rmt_tpu.generation import complete, fitting_tokens

    trained.check_rows("batch_size", _BATCH_SIZE.value)
    decoder, tokenizer = _load()
    for number in sorted({number for number, _ in left}):  # check all before writing
        try:
            tokens = tokenizer.begun(tokenizer.encode(prompts[number]))
            fitting_tokens(decoder.config, len(tokens), 1)
        except UsageError as error:
            what = str(error).removeprefix("--prompt ")
            raise UsageError(f"--prompts: prompt {number + 1} {what}") from None
    given = (
        (
            prompts[number],
            dataclasses.replace(sampling, seed=(sampling.seed + number * samples + sample) % 2**32),
        )
        for number, sample in left
    )
    progress = _Progress(len(left))
    with memory.told_if_out("less is taken with a smaller --batch_size or --max_tokens"):
        stream = complete(decoder, tokenizer, given, stop=_STOP.value, slots=_BATCH_SIZE.value)
        with contextlib.closing(stream):
            for one in stream:
                number, sample = left[one.number]
                line = {"number": number, "sample": sample, "prompt": prompts[number]}
                line |= {"text": one.text, "finish": one.finish} | dataclasses.asdict(sampling)
                if _LOGPROBS.value:
                    line |= {"tokens": one.tokens, "logprobs": one.log_probabilities}
                output.add(line)
                progress.add(len(one.tokens))
    progress.tell()
    return 0


class _Progress:
    """The progress on a file of prompts, printed to standard error every few seconds."""

    def __init__(self, count: int):
        self.count, self.texts, self.tokens = count, 0, 0
        self.started = self.told = time.monotonic()

    def add(self, tokens: int) -> None:
        self.texts, self.tokens = self.texts + 1, self.tokens + tokens
        if time.monotonic() - self.told > 5 and self.texts < self.count:
            self.tell()

    def tell(self) -> None:
        self.told = time.monotonic()
        rate = self.tokens / (self.told - self.started)
        print(f"{self.texts} of {self.count} texts, {rate:,.0f} tokens/s", file=sys.stderr)


def run() -> None:
    """Run `main` as a program; `rmt-generate` calls this function."""
    program.start(main, only_printed=True)


if __name__ == "__main__":
    run()
