"""Search for a kernel's block sizes: compile candidates, rank them, time the best, accept one.

A candidate is one choice of block sizes. The functions that compile and time candidates are
arguments, and so is the clock. The first candidate is always the default block sizes, which a rule
computes from the sizes of the arrays. They win every tie. The next candidate is always the one that
is most similar to the best so far. A kernel may have several hundred candidates, and compiling one
takes seconds. In this order, about twenty compilations suffice to find the best.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

Blocks = Any
# A candidate is accepted if it saves at least this fraction of the default block sizes' time. A
# measured gain must also be at least SPREADS times the interquartile range of the default's times.
ESTIMATED_GAIN = 0.05
MEASURED_GAIN = 0.02
SPREADS = 3
# Candidates whose times differ by less than this fraction count as equally fast.
_TIE = 0.01
# A candidate is timed on a device only if its estimate is at most the best estimate times this
# factor.
_HOPEFUL = 1.3

Fate = Literal[
    "compiled",  # The candidate was compiled, and its time was estimated.
    "unrated",  # The candidate was compiled, but its time cannot be estimated.
    "no room",  # The candidate needs more on-chip memory than the chip has.
    "skipped",  # The candidate was not compiled: it is larger than a candidate with "no room".
    "no faster",  # The candidate was not compiled: its memory traffic alone is too slow.
    "time limit",
    "failed",  # The candidate did not compile, or it raised an error on the device.
    "wrong",  # The results of the candidate differ from those of plain JAX.
    "timed",
]


class Rating(NamedTuple):
    """The compiler's estimate of how fast a candidate (a choice of block sizes) is.

    Attributes:
      seconds: the estimated time of a call in seconds, or None if unknown.
      on_chip: the on-chip memory that the candidate needs, in bytes.
      words: an explanation of the rating.
      floor: a lower bound on the time in seconds: the time to move the bytes that every choice of
        block sizes must move. 0 if unknown.
    """

    seconds: float | None
    on_chip: int = 0
    words: str = ""
    floor: float = 0.0


class Refusal(NamedTuple):
    """The reason why a candidate did not compile, as a `Fate` and as text."""

    fate: Fate
    why: str


class Timing(NamedTuple):
    """The times of a candidate's calls in seconds, or why there are none.

    `wrong` says how the calls' results differ from those of plain JAX, and `failed` which error the
    candidate raised on the device.
    """

    seconds: tuple[float, ...] = ()
    wrong: str = ""
    failed: str = ""


@dataclasses.dataclass(frozen=True)
class Trial:
    """A candidate (a choice of block sizes) with the outcome of compiling and timing it.

    Attributes:
      blocks: the candidate's block sizes.
      fate: the outcome; see `Fate`.
      why: the reason for the outcome, as text.
      estimate: the compiler's estimate of the time of a call in seconds, or None.
      on_chip: the on-chip memory in bytes, which breaks ties between equally fast candidates.
      floor: the lower bound of the estimate, in seconds; see `Rating.floor`.
      seconds: the measured times of calls on a device, in seconds.
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
        """Whether memory traffic takes so long that no candidate can be clearly faster."""
        return self.estimate is not None and self.estimate * (1 - ESTIMATED_GAIN) < self.floor

    @property
    def time(self) -> float | None:
        """The measured time in seconds, or the estimate if there is no measurement.

        It is None if the results are wrong, or if the candidate failed, on a device or before.
        """
        if self.seconds:
            return statistics.median(self.seconds)
        return None if self.fate in ("wrong", "failed") else self.estimate


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """The result of one search for a kernel's block sizes.

    Attributes:
      default: the trial of the default block sizes.
      best: the trial to use; it is `default` if nothing is clearly faster.
      trials: all trials, in the order in which they were made.
      left: the number of candidates that were not tried. A search ends early when time runs out.
        Without a device, it also ends when no candidate that differs from the best in one block
        size is better.
      measured: whether the times were measured on a device, rather than estimated.
      plain: the times of the op in plain JAX on the device, in seconds.
      late: whether time ran out before the search was complete.
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
        """Whether the best trial is clearly faster than plain JAX."""
        if not (self.best.seconds and self.plain):
            return False
        noise = max(MEASURED_GAIN, SPREADS * spread(self.plain))
        return self.best.time <= statistics.median(self.plain) * (1 - noise)

    @property
    def gain(self) -> float | None:
        """The fraction of the default block sizes' time that the best trial saves, or None."""
        if not self.default.time or not self.best.time:
            return None
        return 1 - self.best.time / self.default.time

    @property
    def spread(self) -> float:
        """The relative interquartile range of the default block sizes' times."""
        return spread(self.default.seconds)


def spread(seconds: Sequence[float]) -> float:
    """Return the interquartile range of `seconds` divided by its median."""
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
    used: Blocks | None = None,
) -> SearchResult:
    """Compile candidates one by one, time the best on a device if there is one, and accept one.

    Args:
      candidates: the candidates, with the default block sizes first.
      compile: a function that compiles a candidate, and returns its rating or a refusal.
      fields: a function that returns a candidate's block sizes, as a dict from name to size.
      grows: the names of the block sizes that increase the need for on-chip memory.
      clock: a function that returns the current time in seconds.
      until: the time on that clock after which no further candidate is started. The first candidate
        is always tried, and so is `used`.
      log: a function that is called with one or more trials when their outcomes are known. It is
        called again with trials that have been timed.
      known: trials of an earlier search, which are not repeated.
      time: a function that times candidates on a device, or None without a device. It returns a
        dict, in which plain JAX has the key None. A candidate with wrong results is not used. If
        the default block sizes fail, the dict has no other candidates, and the result is the
        default.
      top: the number of candidates to time in addition to the default.
      used: the block sizes that programs use so far. If they are a candidate that compiles, they
        are timed too, however slow their estimate is.
    """
    known, grows = known or {}, tuple(grows)
    # An earlier search may have ruled out candidates by an estimate. With a device, all of them are
    # tried again, because they may be fast there. Without one, only the default block sizes are
    # tried again, because their time is needed.
    retried = candidates if time is not None else candidates[:1]
    ruled_out = {b for b in retried if b in known and known[b].fate == "no faster"}
    trials = {b: known[b] for b in candidates if b in known and b not in ruled_out}
    untried = [blocks for blocks in candidates if blocks not in trials]
    blocks, late = candidates[0], False
    while untried:
        if blocks in untried:
            trials[blocks] = _tried(blocks, compile, fields, grows, trials.values())
            log(trials[blocks])
            untried.remove(blocks)
            continue
        if used in untried:
            blocks = used
            continue
        accepted = _accepted(trials[candidates[0]], trials.values(), ESTIMATED_GAIN)
        if time is None and accepted.is_bound:
            why = f"the memory traffic of any blocks takes {accepted.floor * 1e6:.1f} us"
            bound = [Trial(each, "no faster", why) for each in untried]
            trials |= {trial.blocks: trial for trial in bound}
            log(*bound)
            break
        best = _fastest(trials[candidates[0]], trials.values())
        like = functools.partial(distance, fields(best.blocks))
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
        return SearchResult(default, best, tuple(trials.values()), left, False, late=late)
    chosen = trials_to_time(default, trials.values(), top, used)
    plain = _time_trials(trials, time([trial.blocks for trial in chosen]), log)
    default = trials[candidates[0]]
    timed = [trial for trial in trials.values() if trial.fate == "timed"]
    threshold = max(MEASURED_GAIN, SPREADS * spread(default.seconds))
    best = _accepted(default, timed, threshold)
    return SearchResult(default, best, tuple(trials.values()), left, True, plain, late)


def _time_trials(
    trials: dict[Blocks, Trial], timings: Mapping[Blocks | None, Timing], log: Callable[..., None]
) -> tuple[float, ...]:
    """Replace the trials that were timed, log them, and return the times of plain JAX."""
    for blocks, timing in timings.items():
        if blocks is not None:
            trials[blocks] = _timed(trials[blocks], timing)
            log(trials[blocks])
    return tuple(timings.get(None, Timing()).seconds)


def _timed(trial: Trial, timing: Timing) -> Trial:
    """Return the trial with its times on a device, or with the fate "wrong" or "failed"."""
    fate = "wrong" if timing.wrong else "failed" if timing.failed else "timed"
    why = timing.wrong or timing.failed
    return dataclasses.replace(trial, fate=fate, why=why, seconds=tuple(timing.seconds))


def trials_to_time(
    default: Trial, trials: Iterable[Trial], top: int, used: Blocks | None = None
) -> list[Trial]:
    """Return the trials to time on a device: the default, up to `top` promising others, and `used`.

    Other than the promising trials, the trial of the block sizes `used` needs no good estimate.
    """
    others = [t for t in trials if t.fate in ("compiled", "unrated", "timed") and t != default]
    rated = sorted((t for t in others if t.estimate is not None), key=lambda t: t.estimate)
    near = [t for t in rated if t.estimate <= _HOPEFUL * rated[0].estimate]
    chosen = (near or others)[:top]
    return [default, *chosen, *(t for t in others if t.blocks == used and t not in chosen)]


def distance(best: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[int, float]:
    """Return how different the block sizes of two candidates are.

    The result is the number of sizes that differ, and the sum of the differences of their base-2
    logarithms.
    """
    pairs = [(int(best[name]), int(other[name])) for name in best]
    return sum(a != b for a, b in pairs), sum(abs(math.log2((b + 1) / (a + 1))) for a, b in pairs)


def _fastest(default: Trial, trials: Iterable[Trial]) -> Trial:
    """Return the trial with the lowest estimated time, or `default` if no trial has an estimate."""
    rated = [trial for trial in trials if trial.estimate is not None]
    return min(rated, key=lambda trial: trial.estimate, default=default)


def _tried(blocks, compile, fields, grows, earlier: Iterable[Trial]) -> Trial:
    for trial in earlier:
        if trial.fate == "no room" and _contains(fields(blocks), fields(trial.blocks), grows):
            return Trial(
                blocks,
                "skipped",
                f"larger than {dict(fields(trial.blocks))}, which did not fit",
            )
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
    """Return the fastest trial if it is clearly faster than the default block sizes, or `default`.

    Among equally fast trials that are clearly faster, the trial that needs the least on-chip memory
    is chosen.
    """
    most = math.inf if default.time is None else default.time * (1 - threshold)
    clear = [trial for trial in trials if trial.time is not None and trial.time <= most]
    if not clear:
        return default
    fastest = min(trial.time for trial in clear)
    equal = [trial for trial in clear if trial.time <= fastest * (1 + _TIE)]
    return min(equal, key=lambda trial: (trial.on_chip, trial.time))
