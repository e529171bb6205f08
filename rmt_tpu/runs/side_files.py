"""Files that a run writes for people, such as metrics and plots.

A failure to write one of them never stops the run.
"""

import contextlib
import json
import math
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from rmt_tpu.config import RunConfig
from rmt_tpu.distributed import processes
from rmt_tpu.errors import DivergedError, RunError, one_line
from rmt_tpu.runs import trackers
from rmt_tpu.runs.environment import describe
from rmt_tpu.runs.metrics import FILE, LARGEST, MetricsWriter
from rmt_tpu.runs.plots import LOSS_CURVE, plot_loss
from rmt_tpu.storage import Folder

SAMPLES, STARTS, COMPLETE = "samples.txt", "starts.jsonl", "complete.json"
# The file has one line for each time that the run went back to a checkpoint after a loss spike.
SPIKES = "spikes.jsonl"
# The file has the error message of a run whose loss diverged.
DIVERGED = "diverged.txt"
_OLD_METRICS = "metrics.old.jsonl"
_HEADING = re.compile(r"^== step (\d+) ==$", re.MULTILINE)


class Restart(Exception):
    """An exception that ends a run, which then begins again in the same process."""


class SideFiles:
    """A writer of a run's metrics, loss curve, text samples and list of starts.

    It also sends the metrics, the loss curve and the samples to the run's trackers.

    If a file cannot be written, one line is printed once, and the run continues. Only the first
    process writes files. On other processes the methods do nothing, except `sample`, which all
    processes must call.

    Args:
      folder: the run folder.
      step: the step from which the run starts or resumes.
      config: the run's config, whose trackers are used.
      log: a function that prints a line.

    Raises:
      UsageError: the package of a tracker is not installed.
    """

    def __init__(self, folder: Folder, step: int, config: RunConfig, log: Callable[[str], None]):
        self._folder, self._config, self._log = folder, config, log
        self._reported: set[str] = set()
        self._metrics, self._trackers = None, trackers.Trackers({}, log)
        if processes.is_first():
            self._metrics = MetricsWriter(folder, first_step=step + 1, report=self._report_once)
            names = trackers.wanted(config.train)
            self._trackers = trackers.open_trackers(names, folder, step + 1, log, self._report_once)
            self._trackers.config(config)
            with self._harmless(f"{folder}/{STARTS} cannot be written"):
                start = json.dumps({"from_step": step} | describe())
                folder.append(STARTS, f"{start}\n".encode())
            # If this file of a later step stayed, the run would skip its last evaluation.
            with self._harmless(f"{folder}/{COMPLETE} cannot be deleted"):
                done = _completed(folder)
                if done is not None and not done.get("step", math.inf) <= step:
                    folder.delete(COMPLETE)
            with self._harmless(f"the samples after step {step} cannot be deleted"):
                self._delete_samples_after(step)

    def __enter__(self) -> "SideFiles":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._metrics:
            self._metrics.close()
            self._trackers.close(failed=error is not None and not isinstance(error, Restart))
            if isinstance(error, DivergedError):
                with self._harmless(f"{self._folder}/{DIVERGED} cannot be written"):
                    self._folder.write(DIVERGED, f"{error}\n".encode())

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of a step, a mapping from name to value, as one row."""
        if self._metrics:
            self._metrics.write(step, values)
            self._trackers.metrics(step, values)

    def flush(self) -> None:
        """Append all pending rows to the files if they can be written; any thread may call this."""
        if self._metrics:
            self._metrics.flush()
            self._trackers.flush()

    def draw(self, step: int) -> None:
        """Plot the losses up to `step`, and print the location of the plot."""
        if self._metrics:
            with self._harmless("the loss curve cannot be drawn"):
                self._metrics.flush()
                self._log(f"loss curve: {plot_loss(self._folder, report=self._report_once)}")
                if self._trackers and (found := self._folder.read(LOSS_CURVE)):
                    self._trackers.picture(step, "loss", found.data)

    def sample(self, step: int, make: Callable[[], str | None]) -> None:
        """Call `make`, and append its text to `samples.txt`; only the first process gets a text."""
        with self._harmless("no text sample"):
            if (text := make()) is not None:
                self._log(f"sample after {step} steps ({self._folder}/{SAMPLES}):\n{text}")
                self._trackers.text(step, "sample", text)
                self._folder.append(SAMPLES, f"== step {step} ==\n{text}\n".encode())

    @contextlib.contextmanager
    def profile(self) -> Iterator[None]:
        """Profile the `with` body and write the trace to `profile/` in the run folder.

        The trace is first written to a local folder, because the profiler cannot write to a bucket.
        """
        with tempfile.TemporaryDirectory() as scratch:
            jax.profiler.start_trace(scratch)
            try:
                yield
            finally:
                jax.profiler.stop_trace()
            with self._harmless(f"{self._folder}/profile cannot be written"):
                for path in sorted(p for p in Path(scratch).rglob("*") if p.is_file()):
                    name = path.relative_to(scratch).as_posix()
                    self._folder.write(f"profile/{name}", path.read_bytes())

    def write_spike(self, spike: Mapping[str, str | int]) -> None:
        """Append a line to `spikes.jsonl` about a spike that sends the run back to a checkpoint."""
        if processes.is_first():
            with self._harmless(f"{self._folder}/{SPIKES} cannot be written"):
                line = json.dumps({"time": time.time(), **spike})
                self._folder.append(SPIKES, f"{line}\n".encode())

    def is_complete(self, steps: int) -> bool:
        """Return, on all processes, whether the run was recorded as complete at step `steps`."""
        found = False
        if processes.is_first():
            with self._harmless(f"{self._folder}/{COMPLETE} is ignored"):
                found = is_complete(self._folder, self._config, steps)
        return processes.from_first(found, "the last step")

    def complete(self, step: int) -> None:
        """Record in a file that the final evaluation and sample after `step` are done.

        If rows of metrics cannot be written, the file is not written either. When the command is
        repeated, the run then evaluates its last step again, and writes these rows.
        """
        if self._metrics:
            with self._harmless(f"{self._folder}/{COMPLETE} cannot be written"):
                if not self._metrics.flush():
                    raise RunError(f"the last rows of {FILE} are not written yet")
                done = {"step": step, "time": time.time()} | _measured(self._config)
                self._folder.write(COMPLETE, f"{json.dumps(done)}\n".encode())

    def _delete_samples_after(self, step: int) -> None:
        """Delete the text samples of steps after `step`, because the run repeats these steps."""
        found = self._folder.read(SAMPLES, limit=LARGEST)
        if found is None:
            return
        before = found.data.decode(errors="replace")
        _, *parts = _HEADING.split(before)
        kept = "".join(
            f"== step {number} =={text}"
            for number, text in zip(parts[::2], parts[1::2], strict=True)
            if int(number) <= step
        )
        if not kept:
            self._folder.delete(SAMPLES)
        elif kept != before:
            self._folder.write(SAMPLES, kept.encode())

    @contextlib.contextmanager
    def _harmless(self, what: str) -> Iterator[None]:
        """Suppress any error in the `with` body; print what failed, and why, on one line."""
        try:
            yield
        except Exception as error:
            self._report_once(f"note: {what}: {one_line(error)[:300]}; the run continues")

    def _report_once(self, note: str) -> None:
        if note not in self._reported:
            self._reported.add(note)
            self._log(note)


def is_complete(folder: Folder, config: RunConfig, steps: int) -> bool:
    """Return whether the run in a folder was recorded as complete at step `steps`.

    It is not complete if it was evaluated on another amount of held-out text than its config asks
    for.
    """
    wanted = {"step": steps} | _measured(config)
    done = _completed(folder)
    # Records from before 2026-11-30 have the step alone.
    return bool(done) and {**wanted, **done}.items() >= wanted.items()


def _measured(config: RunConfig) -> dict[str, Any]:
    """Return the fields of the config that determine how much text an evaluation uses."""
    return {name: getattr(config.train, name) for name in ("eval_tokens", "eval_batches")}


def _completed(folder: Folder) -> dict[str, Any] | None:
    """Return what the file that records a complete run states; {} if it is damaged."""
    if (found := folder.read(COMPLETE)) is None:
        return None
    try:
        done = json.loads(found.data)
    except (ValueError, RecursionError):
        return {}
    return done if isinstance(done, dict) and type(done.get("step")) is int else {}


def archive_metrics(folder: Folder) -> None:
    """Rename the metrics of an earlier start that saved no checkpoint to `metrics.old.jsonl`.

    The list of tracked runs is deleted, so that trackers record the restarted run as a new one.
    """
    folder.delete(trackers.FILE)
    if (found := folder.read(FILE, limit=LARGEST)) is not None:
        folder.write(_OLD_METRICS, found.data)
        folder.delete(FILE)
