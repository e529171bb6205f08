"""Functions that read prompt files, and write generated texts to an output file."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rmt_tpu.errors import UsageError, shown
from rmt_tpu.generation.sampling import Sampling
from rmt_tpu.runs.presence import announce_writer
from rmt_tpu.storage import Fault, Folder, Found, open_parent, writable_file

# The beginning of each line of an `Output`, which is all that an interrupted line may have.
_BEGINNING = '{"number": '


def read_prompts(location: str) -> list[str]:
    """Read the prompts in a file, which may be local or on gs://.

    In a .jsonl file, each line is a JSON object with a "prompt" field. In any other file, each line
    is a prompt. A line ends with "\\n" or "\\r\\n", and may contain any other character. As in
    training text, a byte order mark and the blank lines of a .jsonl file are skipped.

    Raises:
      UsageError: the file does not exist, cannot be read or is not UTF-8, or a line of a .jsonl
        file has no prompt.
    """
    folder, name = _split(location)
    file = _read(folder, name, location, limit=2**30)
    if file is None:
        raise UsageError(f"{location} does not exist; legal: a file with prompts")
    try:
        lines = _lines(file.data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{location} is not UTF-8: {error.reason} at byte {error.start}") from None
    if not name.endswith(".jsonl"):
        return lines
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError, RecursionError):
            prompt = None
        if not isinstance(prompt, str):
            raise UsageError(
                f'{location}:{number} is not a JSON object with a text "prompt", like '
                '{"prompt": "text"}'
            )
        prompts.append(prompt)
    return prompts


class Output:
    """A JSON Lines file to which numbered results are appended, so that a rerun can skip them.

    The attribute `lines` has the results that were in the file when it was opened.

    Args:
      location: the path of the file, local or on gs://.

    Raises:
      UsageError: the file cannot be read, or it has lines that another command wrote: their
        "number" is missing or is not an integer of at least 0, or they are not JSON and do not
        begin like a line that was interrupted.
    """

    def __init__(self, location: str):
        self.location = location
        self._folder, self._name = _split(location)
        file = _read(self._folder, self._name, location, limit=2**32)
        text = file.data.decode(errors="replace") if file else ""
        # If an interrupted run left an incomplete last line, the next line must begin on a new
        # line.
        whole, last = text[: text.rfind("\n") + 1], text[text.rfind("\n") + 1 :]
        self._broken = last != ""
        self.lines = list(self._parsed(whole))
        try:
            # A last line that lacks only its end is complete.
            self.lines += self._parsed(last)
        except UsageError:
            raise self._foreign(whole.count("\n") + 1) from None

    def add(self, *lines: dict[str, Any]) -> None:
        """Append all lines in a single write."""
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        if self._broken:
            text, self._broken = "\n" + text, False
        self._folder.append(self._name, text.encode())

    def _parsed(self, text: str) -> Iterator[dict[str, Any]]:
        for number, line in enumerate(_lines(text), 1):
            try:
                value = json.loads(line)
            except RecursionError:
                value = None
            except ValueError:
                if _is_interrupted(line):
                    continue
                value = None
            if not isinstance(value, dict) or not _is_index(value.get("number")):
                raise self._foreign(number)
            yield value

    def _foreign(self, number: int) -> UsageError:
        return UsageError(
            f"{self.location}:{number} is not a line that this command writes; legal: another file"
        )


@contextlib.contextmanager
def open_output(location: str, log: Callable[[str], None]) -> Iterator[Output]:
    """Open a file of results, to which no other process appends during the `with` body.

    Args:
      location: the path of the file, local or on gs://.
      log: a function that prints a line.

    Raises:
      UsageError: see `Output`, or the file cannot be written, or another process on this host
        appends to the file; see `presence.announce_writer`. The message begins with `location`.
    """
    _split(location)  # This call raises an error if the location names no file.
    writable_file(location)
    with announce_writer(location, log):
        yield Output(location)


def text_settings(
    sampling: Sampling, stop: Sequence[str], model: str, num_samples: int
) -> dict[str, Any]:
    """Return what determines the samples of a prompt, as fields of each sample's line in a file.

    Args:
      sampling: the sampling settings.
      stop: the stop strings.
      model: an identifier of the model's weights; see `runs.loading.weights_name`.
      num_samples: the number of samples per prompt, on which the seed of each sample depends.
    """
    settings = {"stop": list(stop), "model": model, "num_samples": num_samples}
    return dataclasses.asdict(sampling) | settings


def check_same(
    output: Output,
    prompts: Sequence[str],
    settings: Mapping[str, Any],
    *,
    logprobs: bool = False,
) -> set[tuple[int, int]]:
    """Return which samples the output already has, as pairs (prompt number, sample number).

    Lines of an older version may lack settings. A missing field of `Sampling` had its default value
    when the line was written. Lines without "model", "stop" or "num_samples" count as lines of this
    model, of these stop strings and of this number of samples, because nothing is known about them.

    Args:
      output: the file with the existing lines.
      prompts: the prompts.
      settings: the settings of new samples, from `text_settings`.
      logprobs: whether lines of new samples have log-probabilities.

    Raises:
      UsageError: an existing line was made by another model, from another prompt or with other
        settings, only one of old and new lines has log-probabilities, another command wrote the
        line, or a sample has two lines. The message begins with the file's location.
    """
    done, defaults = set(), dict(settings) | dataclasses.asdict(Sampling())
    for line in output.lines:
        number, sample = line["number"], line.get("sample")
        if not _is_index(sample) or not isinstance(line.get("prompt"), str):
            raise UsageError(
                f"{output.location} has lines that are no samples of prompts; legal: another file"
            )
        for name, value in settings.items():
            if (old := line.get(name, defaults[name])) != value:
                what = "model" if name == "model" else f"--{name}"
                raise UsageError(
                    f"{output.location} has samples with {what}={shown(old)}, and this command has "
                    f"{shown(value)}; legal: the same {what}, or another file"
                )
        if ("logprobs" in line) != logprobs:
            old, new = ("without", "with") if logprobs else ("with", "without")
            raise UsageError(
                f"{output.location} has samples {old} --logprobs, and this command has new ones "
                f"{new} it; legal: the same flag, or another file"
            )
        if number >= len(prompts) or prompts[number] != line["prompt"]:
            raise UsageError(
                f"{output.location} has samples of other prompts, such as {shown(line['prompt'])}; "
                "legal: the same prompts, or another file"
            )
        if (number, sample) in done:
            raise UsageError(
                f'{output.location} has two lines with "number": {number} and "sample": {sample}; '
                "legal: a single line for each sample, or another file"
            )
        done.add((number, sample))
    return done


def is_same_file(one: str, other: str) -> bool:
    """Return whether two paths, local or on gs://, name the same file, whether it exists or not."""
    places = []
    for folder, name in map(_split, (one, other)):
        local = folder.local_path
        places.append(f"{folder.url}/{name}" if local is None else (local / name).resolve())
    return places[0] == places[1]


def _is_interrupted(line: str) -> bool:
    """Return whether a line that is not JSON can be the beginning of a line of an `Output`."""
    return line.startswith(_BEGINNING) or _BEGINNING.startswith(line)


def _is_index(value: object) -> bool:
    """Return whether a JSON value is an integer of at least 0, which True and False are not."""
    return type(value) is int and value >= 0


def _read(folder: Folder, name: str, location: str, limit: int) -> Found | None:
    """Read a file; a UsageError says that the file at `location` cannot be read."""
    try:
        return folder.read(name, limit=limit)
    except Fault as fault:
        reason = str(fault).removeprefix(f"{os.path.join(folder.url, name)}: ")
        raise UsageError(f"{location} cannot be read: {reason}") from None


def _lines(text: str) -> list[str]:
    """Return the lines of a text without their ends, which are "\\n" or "\\r\\n".

    `str.splitlines` would also split at characters such as U+2028, which a prompt, or a text in a
    line of JSON, may contain.
    """
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def _split(location: str) -> tuple[Folder, str]:
    folder, name = open_parent(location)
    if not name:
        raise UsageError(
            f"{location!r} does not name a file; legal: a path that ends with a file name"
        )
    return folder, name
