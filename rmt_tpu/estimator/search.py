"""Search for a kernel's block sizes: compile candidates, rank them, time the best, accept one.

This module neither compiles nor times: functions for that are passed in, and so is the clock. The
default rule's blocks are always the first candidate, and win every tie. The next candidate is
always the one most similar to the best so far: of some hundred candidates of a kernel, each of
which takes the compiler seconds, about twenty lead to the best.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

Blocks = Any
# The gains that an estimate and a measurement need before they are believed.
ESTIMATED_GAIN = 0.05
MEASURED_GAIN = 0.02
SPREADS = 3
# Candidates whose estimates are this close count as equal.
_TIE = 0.01
# A candidate whose estimate is within this factor of the best may be the fastest on a device.
_HOPEFUL = 1.3

Fate = Literal[
    "compiled",  # and rated
    "unrated",  # compiled, but it cannot be rated
    "no room",  # needs more on-chip memory than there is
    "skipped",  # larger than a candidate that had no room
    "no faster",  # not compiled: its bytes alone take as long as the best
    "time limit",
    "failed",
    "wrong",  # gives other results than plain JAX
    "timed",
]


class Rating(NamedTuple):
    """A compiler's rating of a candidate.

    Attributes:
      seconds: the estimated seconds of a call; None if nothing is known.
      on_chip: the bytes of on-chip memory that it takes.
      words: how the rating was computed.
      floor: the seconds of moving the bytes that any blocks have to move; 0 if they are not known.
    """

    seconds: float | None
    on_chip: int = 0
    words: str = ""
    floor: float = 0.0


class Refusal(NamedTuple):
    """The reason why a candidate did not compile."""

    fate: Fate
    why: str


class Timing(NamedTuple):
    """The timing of a candidate on a device: the seconds of calls, or why it must not be used."""

    seconds: tuple[float, ...] = ()
    wrong: str = ""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One candidate and its outcome.

    Attributes:
      blocks: the candidate.
      fate: see `Fate`.
      why: the reason, in words.
      estimate: the compiler's estimate of a call's seconds; None if there is none.
      on_chip: bytes of on-chip memory, which decide ties.
      floor: the floor of the estimate, see `Rating`.
      seconds: the seconds of calls on a device.
    """

    blocks: Blocks
    fate: Fate
    why: str = ""
    estimate: float | None = None
    on_chip: int = 0
    floor: float = 0.0
    seconds: tuple[float, ...] = ()

    @property
    def is_bound(self) -> bool:
        """Whether no blocks can be estimated clearly faster, because bytes alone take as long."""
        return self.estimate is not None and self.estimate * (1 - ESTIMATED_GAIN) < self.floor

    @property
    def time(self) -> float | None:
        """The measured time, or else the estimate."""
        return statistics.median(self.seconds) if self.seconds else self.estimate


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of one search.

    Attributes:
      default: the trial of the rule's blocks.
      best: the trial whose blocks are to be used; the default if nothing is clearly faster.
      trials: all trials, in order.
      left: how many candidates were not tried. Without a device, the search ends when no candidate
        that differs from the best in one field is better; or the time was over.
      measured: whether times are measured on a device.
      plain: the seconds of plain JAX on the device.
      late: whether the time was over before the search ended.
    """

    default: Trial
    best: Trial
    trials: tuple[Trial, ...]
    left: int
    measured: bool
    plain: tuple[float, ...] = ()
    late: bool = False

    @property
    def beats_plain(self) -> bool:
        """Whether the best is clearly faster than plain JAX."""
        if not (self.best.seconds and self.plain):
            return False
        noise = max(MEASURED_GAIN, SPREADS * spread(self.plain))
        return self.best.time <= statistics.median(self.plain) * (1 - noise)

    @property
    def gain(self) -> float | None:
        """The best's gain over the default, 0.1 for a tenth less time; None without times."""
        if not self.default.time or not self.best.time:
            return None
        return 1 - self.best.time / self.default.time

    @property
    def spread(self) -> float:
        """The spread of the default's own times."""
        return spread(self.default.seconds)


def spread(seconds: Sequence[float]) -> float:
    """Return the distance between the quartiles, divided by the median."""
    if len(seconds) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(seconds, n=4)
    return (high - low) / middle


def search(
    candidates: Sequence[Blocks],
    compile: Callable[[Blocks], Rating | Refusal],
    *,
    fields: Callable[[Blocks], Mapping[str, Any]],
    grows: Iterable[str],
    clock: Callable[[], float],
    until: float,
    log: Callable[..., None] = lambda *trials: None,
    known: Mapping[Blocks, Trial] | None = None,
    time: Callable[[Sequence[Blocks]], Mapping[Blocks | None, Timing]] | None = None,
    top: int = 5,
) -> Result:
    """Compile candidates one by one, and time the best on a device, if there is one.

    Args:
      candidates: the candidates, with the rule's blocks first.
      compile: compiles a candidate, and returns its rating or refusal.
      fields: returns the fields of a candidate, by name.
      grows: the names of fields with which a program needs more on-chip memory.
      clock: returns the time, in seconds.
      until: the time on the clock after which no other candidate is begun; the first one always is.
      log: is called with every trial once it is known, or with several; again with one that is
        timed.
      known: trials of an earlier search, which are not compiled again.
      time: times candidates on a device; `wrong` results are not used. The key None stands for
        plain JAX.
      top: how many candidates are timed in addition to the default.
    """
    known, grows = known or {}, tuple(grows)
    # A device may prefer a candidate that an estimate rules out; and the time of the rule's blocks
    # is always needed.
    anew = candidates if time is not None else candidates[:1]
    ruled_out = {b for b in anew if b in known and known[b].fate == "no faster"}
    trials = {b: known[b] for b in candidates if b in known and b not in ruled_out}
    untried = [blocks for blocks in candidates if blocks not in trials]
    blocks, late = candidates[0], False
    while untried:
        if blocks in untried:
            trials[blocks] = _tried(blocks, compile, fields, grows, trials.values())
            log(trials[blocks])
            untried.remove(blocks)
            continue
        taken = _accepted(trials[candidates[0]], trials.values(), ESTIMATED_GAIN)
        if time is None and taken.is_bound:
            why = f"any blocks move bytes for {taken.floor * 1e6:.1f} us"
            bound = [Trial(each, "no faster", why) for each in untried]
            trials |= {trial.blocks: trial for trial in bound}
            log(*bound)
            break
        best = _fastest(trials[candidates[0]], trials.values())
        like = functools.partial(unlike, fields(best.blocks))
        blocks = min(untried, key=lambda each: like(fields(each)))
        alike = like(fields(blocks))[0] <= 1 or best.estimate is None
        if time is None and not alike:
            break
        if late := clock() >= until:
            break
    left = len(candidates) - len(trials)
    default = trials[candidates[0]]
    if time is None:
        best = _accepted(default, trials.values(), ESTIMATED_GAIN)
        return Result(default, best, tuple(trials.values()), left, False, late=late)
    chosen = hopeful(default, trials.values(), top)
    timings = dict(time([trial.blocks for trial in chosen]))
    plain = timings.pop(None, Timing()).seconds
    for blocks, timing in timings.items():
        fate = "wrong" if timing.wrong else "timed"
        trials[blocks] = dataclasses.replace(
            trials[blocks], fate=fate, why=timing.wrong, seconds=tuple(timing.seconds)
        )
        log(trials[blocks])
    default = trials[candidates[0]]
    timed = [trial for trial in trials.values() if trial.fate == "timed"]
    threshold = max(MEASURED_GAIN, SPREADS * spread(default.seconds))
    best = _accepted(default, timed, threshold)
    return Result(default, best, tuple(trials.values()), left, True, tuple(plain), late)


def hopeful(default: Trial, trials: Iterable[Trial], top: int) -> list[Trial]:
    """Return the trials worth timing: the default, and the `top` others that may be the fastest."""
    others = [t for t in trials if t.fate in ("compiled", "unrated", "timed") and t != default]
    rated = sorted((t for t in others if t.estimate is not None), key=lambda t: t.estimate)
    near = [t for t in rated if t.estimate <= _HOPEFUL * rated[0].estimate]
    return [default, *(near or others)[:top]]


def unlike(best: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[int, float]:
    """Return how many fields differ, and by how many powers of two in total."""
    pairs = [(int(best[name]), int(other[name])) for name in best]
    return sum(a != b for a, b in pairs), sum(abs(math.log2((b + 1) / (a + 1))) for a, b in pairs)


def _fastest(default: Trial, trials: Iterable[Trial]) -> Trial:
    """Return the trial with the least estimate; the default, if there is none."""
    rated = [trial for trial in trials if trial.estimate is not None]
    return min(rated, key=lambda trial: trial.estimate, default=default)


def _tried(blocks, compile, fields, grows, before: Iterable[Trial]) -> Trial:
    for trial in before:
        if trial.fate == "no room" and _contains(fields(blocks), fields(trial.blocks), grows):
            return Trial(blocks, "skipped", f"larger than {dict(fields(trial.blocks))}")
    outcome = compile(blocks)
    if isinstance(outcome, Refusal):
        return Trial(blocks, outcome.fate, outcome.why)
    fate = "unrated" if outcome.seconds is None else "compiled"
    return Trial(blocks, fate, outcome.words, outcome.seconds, outcome.on_chip, outcome.floor)


def _contains(larger: Mapping[str, Any], smaller: Mapping[str, Any], grows: tuple) -> bool:
    return all(
        larger[name] >= smaller[name] if name in grows else larger[name] == smaller[name]
        for name in larger
    )


def _accepted(default: Trial, trials: Iterable[Trial], threshold: float) -> Trial:
    """Return the fastest trial if it is clearly faster than the default, else the default.

    Of equally fast trials, the one with the least on-chip memory is used.
    """
    rated = [trial for trial in trials if trial.time is not None and trial.fate != "wrong"]
    if not rated:
        return default
    fastest = min(trial.time for trial in rated)
    equal = [trial for trial in rated if trial.time <= fastest * (1 + _TIE)]
    best = min(equal, key=lambda trial: (trial.on_chip, trial.time))
    if default.time is None or default.fate == "wrong":
        return best
    return best if best.time <= default.time * (1 - threshold) else default
