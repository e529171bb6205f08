"""Files of a run for people, in addition to its checkpoints; no failure here ends the run."""

import contextlib
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax

from rmt_tpu.distributed import processes
from rmt_tpu.errors import DivergedError, UsageError, one_line
from rmt_tpu.runs import tensorboard
from rmt_tpu.runs.environment import describe
from rmt_tpu.runs.metrics import FILE, MetricsWriter
from rmt_tpu.runs.plots import plot_loss
from rmt_tpu.storage import Folder

SAMPLES, STARTS, COMPLETE = "samples.txt", "starts.jsonl", "complete.json"
DIVERGED = "diverged.txt"  # says why the loss of the run diverged
_OLD_METRICS = "metrics.old.jsonl"
_HEADING = re.compile(r"^== step (\d+) ==$", re.MULTILINE)


class SideFiles:
    """Metrics, TensorBoard's files, the loss curve, samples of text, and a list of starts.

    If something cannot be made or written, one line is printed, once, and the run goes on. The
    first process writes. On the others every method does nothing, except `sample`, in which all
    take part.

    Args:
      folder: the run folder.
      step: the step that the run goes on from.
      board: "auto", "on" or "off", see `wants_board`.
      say: prints a line.
    """

    def __init__(self, folder: Folder, step: int, board: str, say: Callable[[str], None]):
        self._folder, self._say = folder, say
        self._told: set[str] = set()
        self._metrics = None
        if processes.is_first():
            self._metrics = MetricsWriter(
                folder, first_step=step + 1, board=wants_board(board), report=self._tell
            )
            with self._harmless(f"{folder}/{STARTS} is not written"):
                start = json.dumps({"from_step": step} | describe())
                folder.append(STARTS, f"{start}\n".encode())
            with self._harmless(f"what came after step {step} is not forgotten"):
                self._forget_samples(step)
                if (done := self._completed()) is not None and done > step:
                    folder.delete(COMPLETE)

    def __enter__(self) -> "SideFiles":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._metrics:
            self._metrics.close()
            if isinstance(error, DivergedError):
                with self._harmless(f"{self._folder}/{DIVERGED} is not written"):
                    self._folder.write(DIVERGED, f"{error}\n".encode())

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write a row of metrics."""
        if self._metrics:
            self._metrics.write(step, values)

    def flush(self) -> None:
        """Append all rows to the files, or at least try to, before returning; from any thread."""
        if self._metrics:
            self._metrics.flush()

    def draw(self) -> None:
        """Draw the loss so far."""
        if self._metrics:
            with self._harmless("the loss curve is not drawn"):
                self._metrics.flush()
                self._say(f"loss curve: {plot_loss(self._folder, report=self._tell)}")

    def sample(self, step: int, make: Callable[[], str | None]) -> None:
        """Append the text that `make` returns, on the first process, to `samples.txt`."""
        with self._harmless("no sample of text"):
            if (text := make()) is not None:
                self._say(f"sample after {step} steps ({self._folder}/{SAMPLES}):\n{text}")
                self._folder.append(SAMPLES, f"== step {step} ==\n{text}\n".encode())

    @contextlib.contextmanager
    def profile(self) -> Iterator[None]:
        """Trace into `profile/`, via a local folder, because the profiler writes to no bucket."""
        with tempfile.TemporaryDirectory() as scratch:
            jax.profiler.start_trace(scratch)
            try:
                yield
            finally:
                jax.profiler.stop_trace()
            with self._harmless(f"{self._folder}/profile is not written"):
                for path in sorted(p for p in Path(scratch).rglob("*") if p.is_file()):
                    name = path.relative_to(scratch).as_posix()
                    self._folder.write(f"profile/{name}", path.read_bytes())

    def is_complete(self, steps: int) -> bool:
        """Return whether `complete` was called for `steps` steps, the same on all processes."""
        found = False
        if processes.is_first():
            with self._harmless(f"{self._folder}/{COMPLETE} is passed over"):
                found = self._completed() == steps
        return processes.from_first(found, "the last step")

    def complete(self, step: int) -> None:
        """Note that the last evaluation and sample are done."""
        if processes.is_first():
            with self._harmless(f"{self._folder}/{COMPLETE} is not written"):
                done = json.dumps({"step": step, "time": time.time()})
                self._folder.write(COMPLETE, f"{done}\n".encode())

    def _completed(self) -> int | None:
        """Return the step that `complete` was called for, or None."""
        found = self._folder.read(COMPLETE)
        return found and json.loads(found.data)["step"]

    def _forget_samples(self, step: int) -> None:
        """Drop the samples of later steps, which will be made again."""
        found = self._folder.read(SAMPLES)
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
        """Print one line about any error in the body, of storage, matplotlib or the device."""
        try:
            yield
        except Exception as error:
            self._tell(f"note: {what}: {one_line(error)[:300]}; the run goes on")

    def _tell(self, note: str) -> None:
        if note not in self._told:
            self._told.add(note)
            self._say(note)


def wants_board(choice: str) -> bool:
    """Return whether to write for TensorBoard: "auto" does if tensorboardX is installed.

    Raises:
      UsageError: `choice` is "on", and tensorboardX is not installed.
    """
    if choice == "on" and not tensorboard.is_installed():
        raise UsageError(
            "--tensorboard=on needs tensorboardX: pip install 'rmt_tpu[tensorboard]'; legal "
            "without it: auto, off"
        )
    return choice != "off" and tensorboard.is_installed()


def set_aside(folder: Folder) -> None:
    """Move the metrics of a start that left no checkpoint to `metrics.old.jsonl`."""
    if (found := folder.read(FILE)) is not None:
        folder.write(_OLD_METRICS, found.data)
        folder.delete(FILE)
