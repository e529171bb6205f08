"""Functions that read prompt files, and write generated texts to an output file."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from rmt_tpu.errors import RunError, UsageError
from rmt_tpu.generation.sampling import Sampling
from rmt_tpu.storage import Folder, open_parent


def read_prompts(location: str) -> list[str]:
    """Read the prompts in a file, which may be local or on gs://.

    In a .jsonl file, each line is a JSON object with a "prompt" field. In any other file, each line
    is a prompt.

    Raises:
      UsageError: the file does not exist or is not UTF-8, or a line of a .jsonl file has no prompt.
    """
    folder, name = _split(location)
    file = folder.read(name, limit=2**30)
    if file is None:
        raise UsageError(f"{location} does not exist; legal: a file with prompts")
    try:
        lines = file.data.decode().splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(f"{location} is not UTF-8: {error.reason} at byte {error.start}") from None
    if not name.endswith(".jsonl"):
        return lines
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError):
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
      UsageError: the file cannot be written, or it has JSON lines without a number, which another
        command wrote.
    """

    def __init__(self, location: str):
        self.location = location
        self._folder, self._name = _split(location)
        self._folder.check(write=True)
        file = self._folder.read(self._name, limit=2**32)
        text = file.data.decode(errors="replace") if file else ""
        # If an interrupted run left an incomplete last line, the next line must begin on a new
        # line.
        self._broken = text[text.rfind("\n") + 1 :] != ""
        self.lines = list(self._parsed(text[: text.rfind("\n") + 1]))

    def add(self, *lines: dict[str, Any]) -> None:
        """Append all lines in a single write."""
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        if self._broken:
            text, self._broken = "\n" + text, False
        self._folder.append(self._name, text.encode())

    def _parsed(self, text: str) -> Iterator[dict[str, Any]]:
        for number, line in enumerate(text.splitlines(), 1):
            try:
                value = json.loads(line)
            except ValueError:
                continue  # An interrupted run left this line incomplete.
            if not isinstance(value, dict) or "number" not in value:
                raise UsageError(
                    f"{self.location}:{number} is not a line that this command writes; legal: "
                    "another file"
                )
            yield value


def check_same(output: Output, prompts: list[str], sampling: Sampling) -> set[tuple]:
    """Return which samples the output already has, as pairs (prompt number, sample number).

    Raises:
      RunError: the existing lines were made from other prompts or with other settings.
    """
    done, settings = set(), dataclasses.asdict(sampling)
    for line in output.lines:
        number = line["number"]
        same_prompt = number < len(prompts) and prompts[number] == line.get("prompt")
        # Lines of an older version may lack a new setting. Their texts have its default value.
        line_settings = {name: line.get(name, getattr(Sampling, name)) for name in settings}
        if not same_prompt or line_settings != settings:
            raise RunError(
                f"{output.location} has continuations of other prompts, or was written with other "
                "flags; name another --output"
            )
        done.add((number, line.get("sample")))
    return done


def _split(location: str) -> tuple[Folder, str]:
    folder, name = open_parent(location)
    if not name:
        raise UsageError(
            f"{location!r} does not name a file; legal: a path that ends with a file name"
        )
    return folder, name
