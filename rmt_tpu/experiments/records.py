"""Reads what ended runs reached, from their folders or from a file with one JSON line a run.

The file is small and can be kept with the code, so that the same command on another machine trains
only what is left. A line knows its run by a digest of the text and of all in the config that
changes a number; it says with which versions and commit the run was made.
"""

import contextlib
import hashlib
import json
import time
from typing import Any, NamedTuple

from rmt_tpu.analysis import sweep
from rmt_tpu.config import RunConfig, overrides, resume_rule
from rmt_tpu.errors import RunError
from rmt_tpu.runs.environment import describe
from rmt_tpu.runs.metrics import read_metrics, series
from rmt_tpu.storage import Fault, Folder
from rmt_tpu.training import depth_rate
from rmt_tpu.training.run import resolved

# What a resumed run may change freely, and yet says how much text its loss is of.
_MEASURED = ("train.eval_tokens", "train.eval_batches")
_WAITS = (0.3, 1.0, 3.0)  # seconds; a bucket's file has one writer at a time


class Record(NamedTuple):
    """Held-out losses of an ended run, in nats a token.

    Attributes:
      steps: at which they were taken.
      losses: as many.
      loss: at the last step; None of a run that diverged.
    """

    steps: list[int]
    losses: list[float]
    loss: float | None


def of_folder(folder: Folder) -> Record:
    """Reads the record of a settled run from its folder."""
    return Record(*series(read_metrics(folder), "eval/loss"), sweep.held_out_loss(folder))


class Records:
    """The records in a file, by the runs that they are of.

    Args:
      folder: that the file is in.
      name: of the file, which need not be there.
      text: checksum of the tokens that are trained on.

    Raises:
      RunError: a line cannot be read.
    """

    def __init__(self, folder: Folder, name: str, text: int):
        self._folder, self._name, self._text = folder, name, text
        self._found: dict[str, Record] = {}
        self.read()

    def read(self) -> None:
        """Reads the file again, to which other processes may have added.

        Raises:
          RunError: a line cannot be read.
        """
        found = self._folder.read(self._name)
        content = b"" if found is None else found.data
        self._is_cut = bool(content) and not content.endswith(b"\n")
        for number, line in enumerate(content.splitlines(), 1):
            try:
                digest, record = _parsed(line)
            except (ValueError, KeyError, TypeError):
                raise RunError(
                    f"{self._folder}/{self._name} line {number} is no outcome of a run; legal: "
                    "lines that recipes.experiment wrote, one a run"
                ) from None
            self._found[digest] = record

    def find(self, config: RunConfig, grows_from: int | None = None) -> Record | None:
        """Returns the record of a run, or None.

        Args:
          config: of the run.
          grows_from: see `plan.Arm`.
        """
        return self._found.get(self._digest(config, grows_from))

    def add(
        self, label: str, config: RunConfig, record: Record, grows_from: int | None = None
    ) -> None:
        """Appends a line; where another process does so at this moment, after it.

        Raises:
          RunError: the file cannot be written to.
        """
        known = describe()
        line = {
            "run": label,
            "digest": self._digest(config, grows_from),
            "seed": config.train.seed,
            **record._asdict(),
            "text": self._text,
            "time": known["time"],
            "commit": known["git_commit"],
            "versions": known["versions"],
        }
        self._found[line["digest"]] = record
        content = b"\n" * self._is_cut + f"{json.dumps(line)}\n".encode()
        self._is_cut = False
        for seconds in _WAITS:
            with contextlib.suppress(Fault):
                return self._folder.append(self._name, content)
            time.sleep(seconds)
        self._folder.append(self._name, content)

    def _digest(self, config: RunConfig, grows_from: int | None) -> str:
        config = resolved(config)
        values = {
            path: value
            for path, value in _leaves(overrides.to_json(config))
            if path in _MEASURED or resume_rule(config, path) != "free"
        }
        # Of what is null in the config and follows from a rule, the rule's numbers.
        told = [values, depth_rate.factors(config), self._text, grows_from]
        told = json.dumps(told, sort_keys=True)
        return hashlib.blake2b(told.encode(), digest_size=12).hexdigest()


def _parsed(line: bytes) -> tuple[str, Record]:
    """Reads the digest of a line's run, and its record."""
    value = json.loads(line)
    loss = value["loss"]
    losses = list(map(float, value["losses"]))
    record = Record(list(map(int, value["steps"])), losses, loss if loss is None else float(loss))
    return str(value["digest"]), record


def _leaves(values: dict[str, Any], before: str = "") -> list[tuple[str, Any]]:
    found = []
    for name, value in values.items():
        inner = _leaves(value, f"{before}{name}.") if isinstance(value, dict) else None
        found += inner or [(f"{before}{name}", value)]
    return found
