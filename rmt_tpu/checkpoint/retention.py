"""Rules for which checkpoints to keep, and the deletion of all others."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rmt_tpu.checkpoint.manifest import ATTEMPT, COMMIT_LIMIT, Commit
from rmt_tpu.errors import UsageError
from rmt_tpu.storage import Fault, Folder

# The number of requests about different steps that are sent at the same time.
_AT_ONCE = 16
_Answer = TypeVar("_Answer")


@dataclasses.dataclass(frozen=True)
class Retention:
    """Rules for which committed steps to keep; one rule is enough to keep a step.

    Attributes:
      last: number of the latest steps to keep; at least 1.
      every: steps divisible by this number are kept; 0 disables the rule.
      best: number of steps with the lowest losses to keep; 0 disables the rule. Steps saved without
        a loss do not count.
    """

    last: int = 3
    every: int = 0
    best: int = 0

    def __post_init__(self):
        if self.last < 1:
            raise UsageError(f"last={self.last} checkpoints cannot be kept; legal: at least 1")
        for name, value in (("every", self.every), ("best", self.best)):
            if value < 0:
                raise UsageError(f"{name}={value} must not be negative; legal: at least 0")

    def retained_steps(self, losses: Mapping[int, float | None]) -> set[int]:
        """Return the committed steps that the rules keep.

        Args:
          losses: maps each committed step to its loss, or to None if its loss is unknown.
        """
        steps = sorted(losses)
        retained = set(steps[-self.last :])
        if self.every:
            retained |= {step for step in steps if step % self.every == 0}
        # If losses are equal, prefer the later step, which was trained on more tokens.
        rated = sorted((loss, -step) for step, loss in losses.items() if loss is not None)
        return retained | {-step for _, step in rated[: self.best]}


def checkpoint_entries(folder: Folder) -> dict[int, set[str]]:
    """Return the names of the files and folders of each step's checkpoint.

    They are COMMIT, and one folder per attempt to save the step.

    Raises:
      Fault: the folder cannot be listed.
    """
    return _entries(folder, folder.names())


def _entries(folder: Folder, names: Iterable[str]) -> dict[int, set[str]]:
    steps = []
    for name in names:
        step = name.removesuffix("/")
        # Accept a step only under its canonical name: 7, but not 007.
        if name.endswith("/") and step.isascii() and step.isdecimal() and step == str(int(step)):
            steps.append(int(step))
    listed = _ask_for_each(lambda step: folder.names(str(step)), steps)
    kept = {
        step: {name.removesuffix("/") for name in inside if _is_entry(name)}
        for step, inside in listed.items()
    }
    return {step: entries for step, entries in kept.items() if entries}


def _ask_for_each(ask: Callable[[int], _Answer], steps: Sequence[int]) -> dict[int, _Answer]:
    """Call `ask` for all steps in parallel, and return the answers by step.

    A request to a bucket takes tens of milliseconds.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        try:
            answers = [pool.submit(ask, step) for step in steps]
        # Threads cannot be started while the interpreter exits, when the last save may still be
        # running. Ask for one step after the other then.
        except RuntimeError:
            return {step: ask(step) for step in steps}
        return {step: answer.result() for step, answer in zip(steps, answers, strict=True)}


def committed(folder: Folder) -> list[int]:
    """Return the committed steps in ascending order, except those that `go_back` is deleting.

    Raises:
      Fault: the folder cannot be listed, or its BACK file cannot be read.
    """
    names = folder.names()
    last, found = _last_step(folder, names), _entries(folder, names)
    is_one = lambda step: "COMMIT" in found[step] and (last is None or step <= last)
    return sorted(filter(is_one, found))


# The file of this name states the last valid step while later steps are being deleted.
_BACK = "BACK"


def go_back(folder: Folder, step: int) -> None:
    """Make a committed step the last one by deleting all later steps.

    First the file BACK is written, which names the last step. From then on, readers ignore all
    later steps. BACK is deleted after the COMMIT files of the later steps. If the process is killed
    before that, `finish_going_back` completes the deletion.

    Raises:
      Fault: something cannot be read, written or deleted.
    """
    folder.write(_BACK, json.dumps({"step": step}).encode())
    finish_going_back(folder)


def finish_going_back(folder: Folder) -> None:
    """Complete a deletion by `go_back` if it was interrupted.

    Raises:
      Fault: something cannot be read or deleted.
    """
    names = folder.names()
    if (last := _last_step(folder, names)) is None:
        return
    later = {step: entries for step, entries in _entries(folder, names).items() if step > last}
    for step in later:
        folder.delete(f"{step}/COMMIT")
    folder.delete(_BACK)
    for step, entries in later.items():
        delete_attempts(folder, step, entries - {"COMMIT"})


def _last_step(folder: Folder, names: list[str]) -> int | None:
    """Return the last step according to the file BACK, or None if there is no such file.

    Raises:
      Fault: the file BACK is damaged, or cannot be read.
    """
    if _BACK not in names:
        return None
    # Another process may have deleted the file since the folder was listed.
    if (found := folder.read(_BACK, limit=COMMIT_LIMIT)) is None:
        return None
    try:
        return int(json.loads(found.data)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise Fault(
            f"{folder}/{_BACK} is damaged: it contains no step; delete this file, and all steps "
            "after the one that the run should continue from"
        ) from None


def _is_entry(entry: str) -> bool:
    return entry == "COMMIT" or (entry.endswith("/") and bool(ATTEMPT.fullmatch(entry[:-1])))


def tidy(folder: Folder, saved: int, retention: Retention, damaged: Iterable[int]) -> None:
    """Delete the steps that the rules do not keep, and the folders of failed attempts.

    The step that was just saved is always kept.

    Args:
      folder: the folder of all steps.
      saved: the step just saved.
      retention: the rules for which steps are kept.
      damaged: the damaged steps, which the rules do not count. They are deleted if a later step is
        kept.

    Raises:
      Fault: something cannot be read or deleted.
    """
    found = checkpoint_entries(folder)
    complete = [step for step, entries in found.items() if "COMMIT" in entries]
    # COMMIT has the loss, and the name of the attempt that succeeded if there are several.
    unclear = [step for step in complete if retention.best or len(found[step]) > 2]
    commits = _ask_for_each(lambda step: _commit(folder, step), unclear)
    losses = {step: commit.loss if (commit := commits.get(step)) else None for step in complete}
    undamaged = {step: loss for step, loss in losses.items() if step not in damaged}
    retained = retention.retained_steps(undamaged) | {saved}
    # Another process may still be writing an attempt in the folder of the step that was just saved.
    # Delete nothing there.
    found.pop(saved, None)
    for step, entries in sorted(found.items()):
        unneeded = entries - {"COMMIT"}
        keep = step in retained or step > max(retained)
        if keep and step in losses:
            commit = commits.get(step)
            unneeded = unneeded - {commit.attempt} if commit else set()
        elif step in losses:
            # Delete COMMIT first. If the process is killed before the arrays are deleted, no reader
            # finds an incomplete step.
            folder.delete(f"{step}/COMMIT")
        if unneeded or not keep:
            delete_attempts(folder, step, unneeded)


def _commit(folder: Folder, step: int) -> Commit | None:
    """Return the content of a step's COMMIT, or None if it is damaged or missing."""
    found = folder.read(f"{step}/COMMIT", limit=COMMIT_LIMIT)
    try:
        return found and Commit.from_bytes(found.data)
    except Fault:
        return None


def delete_attempts(folder: Folder, step: int, attempts: Iterable[str]) -> None:
    """Delete the folders of attempts, and then the step's folder if it is empty."""
    for attempt in attempts:
        folder.delete_folder(f"{step}/{attempt}")
    if not folder.names(str(step)):
        folder.delete_folder(str(step))
