"""Generate text with a trained decoder, for one prompt or for a file of prompts.

    python -m recipes.generate --workdir=runs/rmt-tiny --prompt="def main("
    python -m recipes.generate --workdir=runs/rmt-tiny --prompts=in.jsonl --output=out.jsonl

A file of prompts has one prompt per line. If its name ends in .jsonl, each line is an object with
the key "prompt". Each finished sample adds a line of JSON to --output. An interrupted command
resumes when it is repeated. A file with samples of another model, of other prompts or of other
sampling flags is refused. With --mesh, weights, caches and prompts are sharded over devices: rows
along the mesh axes `data` and `fsdp`, tokens and heads along `key`, `sequence` and `tensor`.
"""

import contextlib
import dataclasses
import sys
import time
from functools import partial
from typing import Any

from absl import flags

from recipes import interrupts, program, trained
from rmt_tpu import memory
from rmt_tpu.errors import UsageError, about_flag, arguments_as_flags, flag_errors

trained.define_source_flags()
trained.define_mesh_flag()
_PROMPT = flags.DEFINE_string("prompt", "", "text to continue")
_PROMPTS = flags.DEFINE_string("prompts", None, "file of prompts, local or gs://")
_OUTPUT = flags.DEFINE_string(
    "output", None, ".jsonl file to which samples are appended, local or gs://"
)
_NUM_SAMPLES = flags.DEFINE_integer(
    "num_samples", 1, "number of samples per prompt, with --prompts", lower_bound=1
)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 8, "number of texts to generate at the same time, with --prompts", lower_bound=1
)
_LOGPROBS = flags.DEFINE_bool(
    "logprobs", False, "also write tokens and their log-probabilities to --output"
)
_STOP = flags.DEFINE_multi_string(
    "stop", [], "text that ends a sample; the sample does not contain it"
)
_TEMPERATURE = flags.DEFINE_float(
    "temperature", 0.8, "divisor of the logits; 0 always selects the likeliest token"
)
_TOP_K = flags.DEFINE_integer("top_k", 0, "sample from the k most likely tokens; 0 means all")
_TOP_P = flags.DEFINE_float(
    "top_p", 1.0, "sample from the most likely tokens whose probabilities sum to this value"
)
_MIN_P = flags.DEFINE_float(
    "min_p", 0.0, "sample from tokens with at least this fraction of the highest probability"
)
_REPETITION_PENALTY = flags.DEFINE_float(
    "repetition_penalty",
    1.0,
    "a value above 1 makes tokens that have occurred less likely; 1 means no penalty",
)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 256, "maximum number of tokens to generate")
_SEED = flags.DEFINE_integer(
    "seed", 0, "seed of the sampling; samples of a file use this seed and the following ones"
)


@interrupts.terminated()
def main() -> int:
    """Generate text for --prompt, or samples for the file --prompts, and return 0."""
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
        message = str(error).replace("Sampling.", "--")
        raise UsageError(message) from None
    if _PROMPTS.value is not None:
        return _generate_file(sampling)
    decoder, tokenizer, _ = _load()
    return _generate_one(decoder, tokenizer, sampling)


def _load():
    """Return the decoder, with weights cast to the compute dtype, its tokenizer and its step."""
    from rmt_tpu.generation import cast_once
    from rmt_tpu.runs.loading import load_step

    with arguments_as_flags():
        loaded = load_step(trained.source(), flags.FLAGS.step, mesh=flags.FLAGS.mesh)
    trained.note_missing_start(loaded.tokenizer)
    return cast_once(loaded.decoder), loaded.tokenizer, loaded.step


def _check_flags() -> None:
    trained.check_mesh()
    trained.source()
    if (_PROMPTS.value is None) != (_OUTPUT.value is None):
        raise UsageError("--prompts and --output, the file for the samples, must be given together")
    if _PROMPTS.value is not None and _PROMPT.value:
        raise UsageError("give either --prompt or --prompts")
    from rmt_tpu.data.tokenizer import utf8

    for stop in _STOP.value:
        with about_flag("stop", "the text has"):
            utf8(stop)
    if _PROMPTS.value is None:
        for flag in (_NUM_SAMPLES, _BATCH_SIZE, _LOGPROBS):
            if flag.value != flag.default:
                raise UsageError(f"--{flag.name} needs --prompts, a file of prompts")


def _generate_one(decoder, tokenizer, sampling) -> int:
    """Generate one text, and print it to the terminal while it is generated."""
    from rmt_tpu.generation import fitting_tokens, generate

    with about_flag("prompt", "the text has"):
        prompt_tokens = len(tokenizer.with_bos(tokenizer.encode(_PROMPT.value)))
    room = fitting_tokens(decoder.config, prompt_tokens, sampling.max_tokens)
    if room < sampling.max_tokens:
        print(
            f"note: only {room} of --max_tokens={sampling.max_tokens} fit in the model's positions",
            file=sys.stderr,
        )
    print(_PROMPT.value, end="", flush=True)
    with memory.report_out_of_memory("use a smaller --max_tokens or a shorter --prompt"):
        for piece in generate(decoder, tokenizer, _PROMPT.value, sampling, stop=_STOP.value):
            print(piece, end="", flush=True)
    print()
    return 0


def _generate_file(sampling) -> int:
    """Generate samples for a file of prompts, and write a line of JSON for each sample."""
    from rmt_tpu.generation import files

    with flag_errors("prompts"):
        prompts = files.read_prompts(_PROMPTS.value)
    with contextlib.ExitStack() as stack:
        with flag_errors("output"):
            if files.is_same_file(_PROMPTS.value, _OUTPUT.value):
                raise UsageError(f"{_OUTPUT.value} is the file of --prompts; legal: another file")
            log = partial(print, file=sys.stderr)
            output = stack.enter_context(files.open_output(_OUTPUT.value, log))
        return _add_samples(output, prompts, sampling)


def _add_samples(output, prompts: list[str], sampling) -> int:
    """Generate the samples that the output lacks, and add a line of JSON for each to it."""
    from rmt_tpu.generation import files

    settings = _settings(sampling, flags.FLAGS.step)
    with flag_errors("output"):
        finished = files.check_same(output, prompts, settings, logprobs=_LOGPROBS.value)
    samples = _NUM_SAMPLES.value
    pending = [
        (number, sample)
        for number in range(len(prompts))
        for sample in range(samples)
        if (number, sample) not in finished
    ]
    print(f"{len(prompts) * samples} texts, {len(pending)} left to generate", file=sys.stderr)
    if not pending:
        return 0
    from rmt_tpu.generation import complete

    trained.check_rows("batch_size", _BATCH_SIZE.value)
    decoder, tokenizer, step = _load()
    # The loaded step may differ from the one above, because its arrays were damaged or training has
    # saved another one meanwhile.
    settings = _settings(sampling, step)
    with flag_errors("output"):
        files.check_same(output, prompts, settings, logprobs=_LOGPROBS.value)
    asked = {number: prompts[number] for number, _ in pending}
    _check_lengths(decoder, tokenizer, asked, sampling.max_tokens)
    requests = (
        (
            prompts[number],
            dataclasses.replace(sampling, seed=(sampling.seed + number * samples + sample) % 2**32),
        )
        for number, sample in pending
    )
    progress = _Progress(len(pending))
    with memory.report_out_of_memory("use a smaller --batch_size or --max_tokens"):
        stream = complete(decoder, tokenizer, requests, stop=_STOP.value, slots=_BATCH_SIZE.value)
        with contextlib.closing(stream):
            for completion in stream:
                number, sample = pending[completion.number]
                line = {"number": number, "sample": sample, "prompt": prompts[number]}
                line |= {"text": completion.text, "finish": completion.finish} | settings
                if _LOGPROBS.value:
                    line |= {"tokens": completion.tokens, "logprobs": completion.log_probabilities}
                output.add(line)
                progress.add(len(completion.tokens))
    progress.report()
    return 0


def _check_lengths(decoder, tokenizer, prompts: dict[int, str], max_tokens: int) -> None:
    """Check that prompts are short enough, and print a note if only a part of a text fits.

    This is called before any text is generated.

    Args:
      decoder, tokenizer: the model.
      prompts: maps the number of each prompt to the prompt.
      max_tokens: the value of --max_tokens.

    Raises:
      UsageError: a prompt leaves no room for a new token.
    """
    from rmt_tpu.generation import fitting_tokens

    rooms = []
    for number, prompt in prompts.items():
        try:
            tokens = tokenizer.with_bos(tokenizer.encode(prompt))
            rooms.append(fitting_tokens(decoder.config, len(tokens), max_tokens))
        except UsageError as error:
            reason = str(error).removeprefix("--prompt ")
            raise UsageError(f"--prompts: prompt {number + 1} {reason}") from None
    if cut := sum(room < max_tokens for room in rooms):
        print(
            f"note: only {min(rooms)} or more of --max_tokens={max_tokens} fit in the model's "
            f"positions after {cut} of {len(rooms)} prompts",
            file=sys.stderr,
        )


def _settings(sampling, step: int | None) -> dict[str, Any]:
    """Return what determines the samples of a prompt, with the weights of --step or the newest."""
    from rmt_tpu.generation import files
    from rmt_tpu.runs.loading import weights_name

    with arguments_as_flags():
        model = weights_name(trained.source(), step)
    return files.text_settings(sampling, _STOP.value, model, _NUM_SAMPLES.value)


class _Progress:
    """The progress on a file of prompts, printed to standard error every few seconds."""

    def __init__(self, count: int):
        self.count, self.texts, self.tokens = count, 0, 0
        self.started = self.reported = time.monotonic()

    def add(self, tokens: int) -> None:
        self.texts, self.tokens = self.texts + 1, self.tokens + tokens
        if time.monotonic() - self.reported > 5 and self.texts < self.count:
            self.report()

    def report(self) -> None:
        self.reported = time.monotonic()
        rate = self.tokens / (self.reported - self.started)
        print(f"{self.texts} of {self.count} texts, {rate:,.0f} tokens/s", file=sys.stderr)


def run() -> None:
    """Run `main` as a program; `rmt-generate` calls this function."""
    program.start(main, only_printed=True)


if __name__ == "__main__":
    run()
