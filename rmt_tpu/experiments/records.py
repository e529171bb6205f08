"""Records of finished runs, read from their folders or from a file with one JSON line per run.

The file is small and can be kept with the code. The same command on another machine then trains
only the remaining runs. A line identifies its run by a digest. The digest covers the training text,
and all config values that affect results and differ from their defaults. A config field that is
added later, with a default that changes nothing, does not change the digest. A line also has the
software versions and the commit of the run.
"""

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from rmt_tpu.analysis import sweep
from rmt_tpu.config import RunConfig, resume_rule
from rmt_tpu.errors import RunError
from rmt_tpu.runs.environment import describe
from rmt_tpu.runs.metrics import read_metrics, series
from rmt_tpu.storage import Fault, Folder
from rmt_tpu.training import depth_rate
from rmt_tpu.training.run import resolve_auto

# These config paths may change when a run is resumed. They still belong to the digest, because they
# determine how much text the loss is measured on.
_MEASURED = ("train.eval_tokens", "train.eval_batches")
# Maps config paths to values that digests leave out although they are not the defaults. These were
# the defaults of fields that are None now, so that each run chooses a value for its devices.
_FORMER_DEFAULTS = {"train.accumulate": 1}
WAITS = (0.3, 1.0, 3.0)  # The seconds between attempts to append to a file on gs://.


class Record(NamedTuple):
    """The held-out losses of a finished run, in nats per token.

    Attributes:
      steps: the steps at which the loss was measured.
      losses: the loss at each of `steps`.
      loss: the loss at the last step, or None for a run that diverged.
    """

    steps: list[int]
    losses: list[float]
    loss: float | None


def read_record(folder: Folder) -> Record:
    """Read the record of a settled (complete or diverged) run from its folder."""
    return Record(*series(read_metrics(folder), "eval/loss"), sweep.held_out_loss(folder))


class Records:
    """A file with the records of finished runs, which can be found by their configs.

    Args:
      folder: the folder that contains the file.
      name: the name of the file, which need not exist yet.
      text: the checksum of the training tokens, which is part of every digest.

    Raises:
      RunError: a line cannot be read.
    """

    def __init__(self, folder: Folder, name: str, text: int):
        self._folder, self._name, self._text = folder, name, text
        self._found: dict[str, Record] = {}
        self._texts: set[int] = set()
        self.read()

    def read(self) -> None:
        """Read the file again, because other processes may have added to it.

        Raises:
          RunError: a line cannot be read.
        """
        found = self._folder.read(self._name)
        content = b"" if found is None else found.data
        self._is_cut = bool(content) and not content.endswith(b"\n")
        for number, line in enumerate(content.splitlines(), 1):
            try:
                digest, record, read_text = _parsed(line)
            except (ValueError, KeyError, TypeError):
                raise RunError(
                    f"{self._folder}/{self._name} line {number} is not the outcome of a run; "
                    "legal: lines that recipes.experiment wrote, one per run"
                ) from None
            self._found[digest] = record
            self._texts.add(read_text)

    @property
    def has_only_other_texts(self) -> bool:
        """Whether the file has records, all of them of runs that read another text."""
        return bool(self._texts) and self._text not in self._texts

    def find(self, config: RunConfig, grows_from: int | None = None) -> Record | None:
        """Return the record of a run, or None if the file has no record of it.

        Args:
          config: the config of the run.
          grows_from: the key size D_k at the start of a run whose residual grows; see `Arm`.
        """
        return self._found.get(self._digest(config, grows_from))

    def add(
        self, label: str, config: RunConfig, record: Record, grows_from: int | None = None
    ) -> None:
        """Append the record of a run to the file; retry if another process is writing to it.

        Raises:
          RunError: the file cannot be written.
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
        self._texts.add(self._text)
        content = b"\n" * self._is_cut + f"{json.dumps(line)}\n".encode()
        self._is_cut = False
        for seconds in WAITS:
            with contextlib.suppress(Fault):
                return self._folder.append(self._name, content)
            time.sleep(seconds)
        self._folder.append(self._name, content)

    def _digest(self, config: RunConfig, grows_from: int | None) -> str:
        config = resolve_auto(config)
        values = {
            path: value
            for path, value in _changed(config)
            if (path in _MEASURED or resume_rule(config, path) != "free")
            and not (path in _FORMER_DEFAULTS and value == _FORMER_DEFAULTS[path])
        }
        # If `train.depth_rate` is null, a rule selects the factors. The digest includes the result.
        identity = [values, depth_rate.factors(config), self._text, grows_from]
        identity = json.dumps(identity, sort_keys=True)
        return hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()


def _parsed(line: bytes) -> tuple[str, Record, int]:
    """Parse a line of the file into the run's digest and record, and its text's checksum."""
    value = json.loads(line)
    loss = value["loss"]
    losses = list(map(float, value["losses"]))
    record = Record(list(map(int, value["steps"])), losses, loss if loss is None else float(loss))
    return str(value["digest"]), record, int(value["text"])


def _changed(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and JSON value of each `kind` and of each field with a non-default value."""
    if hasattr(config, "kind"):
        yield f"{prefix}kind", config.kind
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value == _default(field):
            continue
        if dataclasses.is_dataclass(value):
            yield from _changed(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", _to_json(value)


def _to_json(value: Any) -> Any:
    """Return a config value as JSON; nested configs leave out fields that equal their defaults."""
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    return dict(_changed(value)) if dataclasses.is_dataclass(value) else value


def _default(field: dataclasses.Field) -> Any:
    """Return a config field's default; without a default, a value that no field can equal."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
