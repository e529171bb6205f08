"""Which steps stay, and how the others and the rests of dead attempts go."""

import dataclasses
import json
from collections.abc import Iterable, Mapping

from rmt_tpu.checkpoint.manifest import ATTEMPT, COMMIT_LIMIT, Commit
from rmt_tpu.errors import UsageError
from rmt_tpu.storage import Fault, Folder


@dataclasses.dataclass(frozen=True)
class Retention:
    """Which committed steps are kept: each that one of the rules names.

    Attributes:
      last: as many of the last steps; at least 1.
      every: each step that is divisible by it; 0 is none.
      best: as many steps of the lowest loss, of those that were saved with one; 0 is none.
    """

    last: int = 3
    every: int = 0
    best: int = 0

    def __post_init__(self):
        if self.last < 1:
            raise UsageError(f"the last {self.last} checkpoints cannot be kept; legal: at least 1")
        for name, value in (("every", self.every), ("best", self.best)):
            if value < 0:
                raise UsageError(f"{name}={value} checkpoints cannot be kept; legal: at least 0")

    def kept(self, losses: Mapping[int, float | None]) -> set[int]:
        """Which of some steps stay.

        Args:
          losses: of each step, or None.
        """
        steps = sorted(losses)
        kept = set(steps[-self.last :])
        if self.every:
            kept |= {step for step in steps if step % self.every == 0}
        # Of equal ones the later: it has seen more.
        rated = sorted((loss, -step) for step, loss in losses.items() if loss is not None)
        return kept | {-step for _, step in rated[: self.best]}


def committed_and_attempts(folder: Folder) -> dict[int, set[str]]:
    """Maps each step to which of its entries are a checkpoint's: COMMIT and attempts.

    Raises:
      Fault: the folder cannot be listed.
    """
    return _entries(folder, folder.names())


def _entries(folder: Folder, names: Iterable[str]) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for name in names:
        step = name.removesuffix("/")
        # Folders of the very name that a step has: not 007.
        if not (name.endswith("/") and step.isascii() and step.isdecimal()):
            continue
        if step == str(int(step)):
            ours = {entry.removesuffix("/") for entry in folder.names(step) if _is_ours(entry)}
            if ours:
                found[int(step)] = ours
    return found


def committed(folder: Folder) -> list[int]:
    """The committed steps, ascending, without those that a run has gone back from.

    Raises:
      Fault: the folder cannot be listed, or what it says of going back cannot be read.
    """
    names = folder.names()
    last, found = _last_step(folder, names), _entries(folder, names)
    is_one = lambda step: "COMMIT" in found[step] and (last is None or step <= last)
    return sorted(filter(is_one, found))


# Names the last step that counts, while the COMMITs of later ones are deleted.
_BACK = "BACK"


def go_back(folder: Folder, step: int) -> None:
    """Makes a committed step the last one: later ones are deleted.

    They are gone for every reader at once, by a file that says so, and which goes when their
    COMMITs have gone. Where this is killed in between, `finish_going_back` does the rest.

    Raises:
      Fault: something cannot be read, written or deleted.
    """
    folder.write(_BACK, json.dumps({"step": step}).encode())
    finish_going_back(folder)


def finish_going_back(folder: Folder) -> None:
    """Deletes the steps after the one that `go_back` was last called for, if any are left.

    Raises:
      Fault: something cannot be read or deleted.
    """
    names = folder.names()
    if (last := _last_step(folder, names)) is None:
        return
    later = {step: ours for step, ours in _entries(folder, names).items() if step > last}
    for step in later:
        folder.delete(f"{step}/COMMIT")
    folder.delete(_BACK)
    for step, entries in later.items():
        delete_attempts(folder, step, entries - {"COMMIT"})


def _last_step(folder: Folder, names: list[str]) -> int | None:
    """What `go_back` has left, if it has not come to its end."""
    if _BACK not in names:
        return None
    if (found := folder.read(_BACK, limit=COMMIT_LIMIT)) is None:  # it has just gone
        return None
    try:
        return int(json.loads(found.data)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise Fault(
            f"{folder}/{_BACK} is damaged: it says no step; delete it, and the later steps"
        ) from None


def _is_ours(entry: str) -> bool:
    return entry == "COMMIT" or (entry.endswith("/") and bool(ATTEMPT.fullmatch(entry[:-1])))


def tidy(folder: Folder, saved: int, retention: Retention, damaged: Iterable[int]) -> None:
    """Deletes the steps that are not kept, and the attempts that no COMMIT names.

    A step below the kept ones stays if it is the one just saved: a run may go back in time.

    Args:
      folder: of all steps.
      saved: the step just saved.
      retention: says which steps stay.
      damaged: steps that do not count as kept ones, and go once a newer step is good.

    Raises:
      Fault: something cannot be read or deleted.
    """
    found = committed_and_attempts(folder)
    commits = {
        step: _commit(folder, step) for step, entries in found.items() if "COMMIT" in entries
    }
    losses = {step: commit and commit.loss for step, commit in commits.items()}
    kept = retention.kept({s: loss for s, loss in losses.items() if s not in damaged}) | {saved}
    # Another writer's attempt at the step just saved may still be alive.
    found.pop(saved, None)
    for step, entries in sorted(found.items()):
        dead = entries - {"COMMIT"}
        keep = step in kept or step > max(kept)
        if keep and step in commits:
            commit = commits[step]
            dead = dead - {commit.attempt} if commit else set()
        elif step in commits:
            # COMMIT goes first, so that a kill in between leaves no half step behind it.
            folder.delete(f"{step}/COMMIT")
        if dead or not keep:
            delete_attempts(folder, step, dead)


def _commit(folder: Folder, step: int) -> Commit | None:
    """None if it is damaged, or has just gone."""
    found = folder.read(f"{step}/COMMIT", limit=COMMIT_LIMIT)
    try:
        return found and Commit.from_bytes(found.data)
    except Fault:
        return None


def delete_attempts(folder: Folder, step: int, attempts: Iterable[str]) -> None:
    """Deletes some attempts at a step, and the step's folder if nothing else is in it."""
    for attempt in attempts:
        folder.delete_folder(f"{step}/{attempt}")
    if not folder.names(str(step)):
        folder.delete_folder(str(step))
