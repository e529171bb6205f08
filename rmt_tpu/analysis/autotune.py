"""Tuning of kernels: a search for the fastest block sizes of each kernel.

A candidate is one choice of a kernel's block sizes. Every candidate is logged. The best one is
written to a table, from which programs read their block sizes.
"""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import rmt_tpu
from pallas_kernels import tuned
from pallas_kernels.target import lowering_for
from rmt_tpu import kernel_tables
from rmt_tpu.errors import RunError, UsageError
from rmt_tpu.estimator import versions
from rmt_tpu.estimator.search import Rating, Refusal, SearchResult, Timing, Trial, search
from rmt_tpu.estimator.spaces import SPACES, Problem
from rmt_tpu.estimator.tuning import RATING
from rmt_tpu.storage import open_parent, writable_file

RateCandidate = Callable[[Problem, tuned.Blocks], Rating | Refusal]
TimeCandidates = Callable[[Problem, Sequence[tuned.Blocks]], Mapping[tuned.Blocks, Timing]]
# The fates of candidates that another search tries again.
_RETRIED = ("time limit", "failed")


class TuningOutcome(NamedTuple):
    """The result of tuning one kernel.

    Attributes:
      problem: the kernel, with the device kind and the array sizes that it was tuned for.
      result: the result of the search, or None if the kernel was skipped.
      entry: the kernel's entry in the table, from this search or an earlier one. None means that
        programs use the block sizes that the default rule computes.
      note: a message if the kernel was skipped, or if its entry comes from an earlier search.
    """

    problem: Problem
    result: SearchResult | None
    entry: tuned.Entry | None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Tuner:
    """A tuner, which searches for kernels' block sizes and writes them to a table.

    Attributes:
      out: the path of the table, local or gs://.
      log: the log of all trials (candidates with their outcomes).
      rate: a function that compiles a candidate and rates it.
      timer: a function that times candidates on a device, or None without a device.
      top: the number of candidates per kernel to time, in addition to the default block sizes.
      refresh: whether to tune kernels again if they already have an entry in the table.
      progress: a function that is called with a line of text per candidate.
      clock: a function that returns the current time in seconds.
    """

    out: str
    log: "TrialLog"
    rate: RateCandidate
    timer: TimeCandidates | None = None
    top: int = 5
    refresh: bool = False
    progress: Callable[[str], None] = lambda line: None
    clock: Callable[[], float] = time.monotonic

    def run(self, problems: Sequence[Problem], seconds: float) -> Iterator[TuningOutcome]:
        """Tune the kernels within a time budget of `seconds`, and yield the outcome of each.

        The remaining time is divided equally among the remaining kernels. A kernel's result is in
        the table before its outcome is yielded.

        Raises:
          RunError: the table cannot be written.
        """
        end = self.clock() + seconds
        for number, problem in enumerate(problems):
            now = self.clock()
            yield self.tune(problem, now + (end - now) / (len(problems) - number))

    def tune(self, problem: Problem, until: float) -> TuningOutcome:
        """Search for one kernel's block sizes, at most until the clock shows `until` seconds."""
        found = self._table_entry(problem)
        if found is not None and not self.refresh:
            old = "" if dict(found.versions) == _versions() else " (other versions; see --refresh)"
            return TuningOutcome(problem, None, found, f"already in the table{old}")
        candidates = problem.candidates()
        known = self.log.known(problem)
        tried = set(known)
        look = self._look_up(problem)

        def log(*trials: Trial) -> None:
            self.log.write(problem, *trials)
            tried.update(trial.blocks for trial in trials)
            self.progress(_progress_line(problem, trials, len(tried), len(candidates)))

        result = search(
            candidates,
            lambda blocks: self.rate(problem, blocks),
            fields=tuned.fields,
            grows=SPACES[problem.platform, problem.kernel].grows,
            clock=self.clock,
            until=until,
            log=log,
            known=known,
            time=self.timer and (lambda chosen: self.timer(problem, chosen)),
            top=self.top,
            used=look.chosen,
        )
        return TuningOutcome(problem, result, self._recorded(problem, result, look))

    def _recorded(
        self, problem: Problem, result: SearchResult, look: tuned.Look
    ) -> tuned.Entry | None:
        """Write the result of a search to the table; return its entry, or None if it needs none.

        The default block sizes need an entry if a table lists others. A table's measurement does
        not give way to an estimate, unless it is in this table and `refresh` is set.
        """
        entry = _entry(problem, result)
        if result.measured and not result.best.seconds:
            # The default failed, so an earlier entry must not keep the kernel in use.
            kernel_tables.remove(self.out, entry)
            return None
        # A measured entry for a GPU also says whether the kernel is faster than plain JAX.
        measured_on_gpu = result.measured and problem.platform == "cuda"
        worth = result.best.blocks != result.default.blocks or measured_on_gpu
        if not worth and result.default.time is not None:
            listed = look.chosen != result.default.blocks
            replaceable = result.measured or look.source != "measured"
            table = kernel_tables.read(self.out)
            worth = (listed and replaceable) or table.without(entry) != table
        if not worth:
            return None
        kernel_tables.add(self.out, [entry])
        return entry

    def _look_up(self, problem: Problem) -> tuned.Look:
        """Return the look-up of the block sizes that programs use with this table, so far."""
        kernel, table = problem.tuned_kernel, kernel_tables.read(self.out)
        # An entry of another version would cause the advice to run this search.
        current = tuple(e for e in table.entries if e.kernel_version == kernel.version)
        table = dataclasses.replace(table, entries=current)
        with lowering_for(problem.device), tuned.tuned(table), tuned.collecting() as looks:
            tuned.look_up(kernel, dict(problem.key), problem.tokens, problem.default())
        return looks[0]

    def _table_entry(self, problem: Problem) -> tuned.Entry | None:
        """Return the table's entry for the current version of the problem's kernel, or None.

        If candidates can be timed, an estimated entry does not count.
        """
        identity = problem.entry(problem.default(), "heuristic").identity
        for entry in kernel_tables.read(self.out).entries:
            if entry.identity == identity and entry.kernel_version == problem.tuned_kernel.version:
                measured = entry.source == "measured" or self.timer is None
                return entry if measured else None
        return None


def check_table(out: str) -> None:
    """Check that a tuning table can be written to the path `out`.

    Raises:
      UsageError: the path cannot be written, or the file there is not a tuning table. The message
        begins with the path.
    """
    folder, name = open_parent(out)
    local = folder.local_path
    if not name or (local is not None and os.path.isdir(local / name)):
        raise UsageError(f"{out} is a folder; legal: the path of a JSON file")
    writable_file(out)
    try:
        table = kernel_tables.read(out)
    except RunError as error:
        raise UsageError(f"{out} cannot be read: {error}") from None
    if table.faults:
        raise UsageError(f"{table.faults[0]}; fix the file, or move it away")


def _entry(problem: Problem, result: SearchResult) -> tuned.Entry:
    times = lambda trial: trial.seconds or (trial.time,) * (trial.time is not None)
    return problem.entry(
        result.best.blocks,
        "measured" if result.measured else "estimated",
        implementation=_implementation(problem, result),
        seconds=times(result.best),
        default_seconds=times(result.default),
        default_blocks=tuned.items(tuned.fields(result.default.blocks)),
        versions=tuned.items(_versions()),
        date=time.strftime("%Y-%m-%d", time.gmtime()),
    )


def _implementation(problem: Problem, result: SearchResult) -> str | None:
    """Return the name of the fastest implementation on a GPU, or None on other devices.

    On a GPU, a kernel is used only where it is faster than plain JAX.
    """
    if problem.platform != "cuda" or not result.plain:
        return None
    return "triton" if result.beats_plain else "xla"


def _versions() -> dict[str, str]:
    return versions() | {"rmt_tpu": rmt_tpu.__version__}


def changed(default: tuned.Blocks, blocks: tuned.Blocks) -> str:
    """Return, as text, the block sizes that differ from the default ones, like "tokens=256"."""
    old, new = tuned.fields(default), tuned.fields(blocks)
    return " ".join(f"{name}={new[name]}" for name in new if new[name] != old[name]) or "default"


def _progress_line(problem: Problem, trials: Sequence[Trial], number: int, count: int) -> str:
    trial = trials[-1]
    seconds = "" if trial.time is None else f" {trial.time * 1e6:.1f} us"
    why = f" ({trial.why[:120]})" if trial.why else ""
    single = len(trials) == 1
    what = changed(problem.default(), trial.blocks) if single else f"{len(trials)} more"
    return (
        f"{problem.device}: {problem.name}: {number} of {count}, {what}: {trial.fate}{seconds}{why}"
    )


class TrialLog:
    """A log of tuning trials, stored next to the table with one line of JSON per trial.

    A trial is a candidate (a choice of block sizes) with its outcome.

    Args:
      out: the path of the table.
      resume: whether to reuse the trials in an existing log; if False, that log is deleted.

    Raises:
      RunError: the log cannot be read or written.
    """

    def __init__(self, out: str, resume: bool):
        self._folder, name = open_parent(out)
        self.name = f"{name}.log.jsonl"
        found = self._folder.read(self.name) if resume else None
        self._lines = list(_parsed(found.data)) if found else []
        if not resume:
            self._folder.delete(self.name)

    def known(self, problem: Problem) -> dict[tuned.Blocks, Trial]:
        """Return a kernel's logged trials with its current version and the current compiler.

        Measured times are left out, because they are comparable only within one run. Candidates
        that failed or took too long are left out as well, so that they are tried again: the next
        search may have a larger time limit, and an error may have been temporary.
        """
        head, found = _head(problem), {}
        for line in self._lines:
            if {name: line.get(name) for name in head} == head:
                # Ignore a line that was written by older code or edited by hand.
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    trial = _trial(problem, line)
                    found[trial.blocks] = trial
        return {b: trial for b, trial in found.items() if trial.fate not in _RETRIED}

    def write(self, problem: Problem, *trials: Trial) -> None:
        """Append the trials of a tuning problem to the log."""
        head, names = _head(problem), [f.name for f in dataclasses.fields(Trial)]
        lines = []
        for trial in trials:
            values = {name: getattr(trial, name) for name in names}
            line = head | values | {"blocks": tuned.fields(trial.blocks)}
            lines.append(json.dumps(line, sort_keys=True) + "\n")
        self._folder.append(self.name, "".join(lines).encode())


def _parsed(content: bytes) -> Iterator[dict[str, Any]]:
    """Yield the parsed lines of a log, without an incomplete last line."""
    for text in content.decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict):
                yield line


def _head(problem: Problem) -> dict[str, Any]:
    return {
        "device": problem.device,
        "kernel": problem.kernel,
        "kernel_version": problem.tuned_kernel.version,
        "key": dict(problem.key),
        "tokens": problem.tokens,
        "versions": versions(),
        "rating": RATING,
    }


def _trial(problem: Problem, line: Mapping[str, Any]) -> Trial:
    fate, estimate = line["fate"], line["estimate"]
    if fate in ("timed", "wrong"):
        fate = "unrated" if estimate is None else "compiled"
    return Trial(
        problem.tuned_kernel.build_blocks(line["blocks"]),
        fate,
        line["why"],
        None if estimate is None else float(estimate),
        int(line["on_chip"]),
        float(line["floor"]),
    )
