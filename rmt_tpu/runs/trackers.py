"""Trackers, which show a run while it trains: TensorBoard and Weights & Biases.

A tracker is a class with the methods of `Tracker`. A tracker that fails is reported once and is
then left out; it never ends the run.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rmt_tpu.config import RunConfig, TrainConfig, overrides
from rmt_tpu.errors import UsageError, one_line
from rmt_tpu.runs import tensorboard, weights_and_biases
from rmt_tpu.storage import Folder

# The file maps the name of a tracker to the id under which the tracker records this run.
FILE = "trackers.json"


class Tracker(Protocol):
    """An object that records the values of a run. Any method may raise any exception."""

    def config(self, config: Mapping[str, Any]) -> None:
        """Record the run's config, as JSON values."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record metrics of a step, given as a mapping from name to value.

        The method may be called several times for the same step.
        """

    def picture(self, step: int, name: str, png: bytes) -> None:
        """Record a picture that shows the run after a step."""

    def text(self, step: int, name: str, text: str) -> None:
        """Record a text, such as a sample after a step."""

    def flush(self) -> None:
        """Write all pending records; any thread may call this method."""

    def close(self, failed: bool) -> None:
        """End the recording; `failed` is whether the run failed with an error."""


class Trackers:
    """All trackers of a run as one object, which drops each tracker that fails.

    Args:
      makers: maps the name of each tracker to the function that makes the tracker.
      report: a callback that receives a one-line message if a tracker fails.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Tracker]], report: Callable[[str], None]):
        self._report = report
        self._trackers: dict[str, Tracker] = {}
        for name, make in makers.items():
            try:
                self._trackers[name] = make()
            except Exception as error:
                self._failed(name, error)

    def __bool__(self) -> bool:
        return bool(self._trackers)

    def config(self, config: RunConfig) -> None:
        """Record the run's config."""
        values = overrides.to_json(config)
        self._each(lambda tracker: tracker.config(values))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record metrics of a step, given as a mapping from name to value."""
        self._each(lambda tracker: tracker.metrics(step, values))

    def picture(self, step: int, name: str, png: bytes) -> None:
        """Record a picture in PNG format that shows the run after a step."""
        self._each(lambda tracker: tracker.picture(step, name, png))

    def text(self, step: int, name: str, text: str) -> None:
        """Record a text of a step."""
        self._each(lambda tracker: tracker.text(step, name, text))

    def flush(self) -> None:
        """Write all pending records; any thread may call this method."""
        self._each(lambda tracker: tracker.flush())

    def close(self, *, failed: bool) -> None:
        """End the recording; `failed` is whether the run failed with an error."""
        self._each(lambda tracker: tracker.close(failed))
        self._trackers = {}

    def _each(self, do: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                do(tracker)
            except Exception as error:
                # Another thread may already have dropped the tracker.
                if self._trackers.pop(name, None) is not None:
                    self._failed(name, error)

    def _failed(self, name: str, error: Exception) -> None:
        why = one_line(error)[:300]
        self._report(f"note: the tracker {name} has failed: {why}; the run continues without it")


def open_trackers(
    names: tuple[str, ...],
    folder: Folder,
    first_step: int,
    log: Callable[[str], None],
    report: Callable[[str], None],
) -> Trackers:
    """Return the trackers of a run that starts or resumes.

    If the run resumes, its tracked run from earlier starts is continued. The file `trackers.json`
    in the run folder has the id of the tracked run.

    Args:
      names: names of trackers, from `wanted`.
      folder: the run folder.
      first_step: the first step that will be recorded.
      log: a function that prints a line.
      report: a callback that receives a one-line message about a failure; it may be called from any
        thread.
    """
    makers = {
        "tensorboard": lambda: tensorboard.TensorBoard(folder, first_step, report),
        "wandb": lambda: weights_and_biases.WeightsAndBiases(folder, _tracked(folder), log),
    }
    return Trackers({name: makers[name] for name in names}, report)


def _tracked(folder: Folder) -> str:
    """Return the run's id in Weights & Biases; if the folder has no id, create one there."""
    found = folder.read(FILE)
    known = json.loads(found.data) if found else {}
    if "wandb" not in known:
        known["wandb"] = weights_and_biases.new_id()
        folder.write(FILE, (json.dumps(known) + "\n").encode())
    return known["wandb"]


def wanted(train: TrainConfig) -> tuple[str, ...]:
    """Return the names of the trackers that a config selects.

    TensorBoard is selected if `tracker` names it or if `tensorboard` is "on". It is also selected
    if `tensorboard` is "auto" and tensorboardX is installed.

    Raises:
      UsageError: the package of a tracker is not installed.
    """
    board = {"auto": tensorboard.is_installed(), "on": True, "off": False}[train.tensorboard]
    names = train.tracker_names
    if board and "tensorboard" not in names:
        names = ("tensorboard", *names)
    if "tensorboard" in names and not tensorboard.is_installed():
        flag, change = f"--tracker={train.tracker}", "remove tensorboard from --tracker"
        if train.tensorboard == "on":
            flag, change = "--tensorboard=on", "set --tensorboard=auto or --tensorboard=off"
        raise UsageError(
            f"{flag} needs tensorboardX: pip install 'rmt_tpu[tensorboard]', or {change}"
        )
    if "wandb" in names and not weights_and_biases.is_installed():
        raise UsageError(
            f"--tracker={train.tracker} needs wandb: pip install 'rmt_tpu[wandb]', or remove wandb "
            "from --tracker"
        )
    return names
