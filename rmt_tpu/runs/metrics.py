"""Metrics in the run folder: rows in `metrics.jsonl`, and the same for TensorBoard."""

import json
import math
import threading
import time
from collections.abc import Callable, Mapping

from absl import logging

from rmt_tpu.runs import tensorboard
from rmt_tpu.storage import Fault, Folder, Location, open_folder

Row = dict[str, int | float | None]

FILE = "metrics.jsonl"
_LARGEST = 4 * 2**30  # bytes; a row has some 300
# Between additions to a file in a bucket, and after a failure between tries.
_APPEND_SECONDS = 30.0


class MetricsWriter:
    """Appends rows to `<workdir>/metrics.jsonl`, and to `<workdir>/tensorboard` if that is wanted.

    A row is one JSON object with its `step`; numbers that are not finite are null. Of a step's
    rows the later counts; rows of `first_step` and after it, of a start that got further, are
    dropped. In a bucket, a thread adds the rows of
    half a minute at a time, and `flush` those that there are.

    Nothing here raises because a file cannot be written: that is told once, the rows are kept,
    and written when the file can be again.

    Args:
      workdir: the run folder.
      first_step: the first that will be written.
      board: whether to write for TensorBoard.
      report: is told in one line what cannot be written; called from any thread.
    """

    def __init__(
        self,
        workdir: Location,
        *,
        first_step: int,
        board: bool = False,
        report: Callable[[str], None] = logging.warning,
    ):
        folder = open_folder(workdir)
        self._rows, self._board = _Growing(folder, FILE, report), None
        if board:
            self._board = _Growing(folder, tensorboard.new_file(), report)
            self._board.add(tensorboard.header(first_step))
        self._closed, self._thread = threading.Event(), None
        _drop_from(folder, first_step, report)
        if folder.local_path is None:
            self._thread = threading.Thread(
                target=self._append_now_and_then, name="metrics", daemon=True
            )
            self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One row; on a local disk it survives the process once this returns."""
        finite = {k: v if math.isfinite(v) else None for k, v in values.items()}
        self._rows.add((json.dumps({"step": step} | finite) + "\n").encode())
        if self._board:
            self._board.add(tensorboard.scalars(step, values))
        if self._thread is None:
            self._append(soon=True)

    def flush(self) -> None:
        """Returns once all rows are in the file, or have been tried; from any thread."""
        self._append(soon=False)

    def close(self) -> None:
        """Writes what is left."""
        self._closed.set()
        if self._thread:
            self._thread.join()
        # A bucket that has just not answered for minutes is not waited for again.
        self._append(soon=self._thread is not None)

    def _append(self, *, soon: bool) -> None:
        for file in (self._rows, self._board):
            if file and not (soon and file.waits()):
                file.append()

    def _append_now_and_then(self) -> None:
        while not self._closed.wait(_APPEND_SECONDS):
            self._append(soon=True)


class _Growing:
    """A file that only grows, and what it lacks so far."""

    def __init__(self, folder: Folder, name: str, report: Callable[[str], None]):
        self._folder, self._name, self._report = folder, name, report
        self._lacks: list[bytes] = []
        self._lock, self._appending = threading.Lock(), threading.Lock()
        self._try_again = -math.inf

    def add(self, data: bytes) -> None:
        with self._lock:
            self._lacks.append(data)

    def waits(self) -> bool:
        """Whether it has just failed."""
        return time.monotonic() < self._try_again

    def append(self) -> None:
        """Appends what the file lacks."""
        with self._appending:
            with self._lock:
                lacks = list(self._lacks)
            if not lacks:
                return
            try:
                self._folder.append(self._name, b"".join(lacks))
            except Fault as fault:
                if self._try_again == -math.inf:
                    self._report(f"note: {fault}; the run goes on, and tries this again")
                self._try_again = time.monotonic() + _APPEND_SECONDS
                return
            self._try_again = -math.inf
            with self._lock:
                del self._lacks[: len(lacks)]


def read_metrics(
    workdir: Location, *, report: Callable[[str], None] = logging.warning
) -> list[Row]:
    """The run's rows in order of steps, one a step: values of later rows of a step win.

    Lines that are no rows, as a power cut may leave them, are passed over and counted.

    Args:
      workdir: the run folder.
      report: is told in one line how many lines were passed over.

    Raises:
      Fault: the file cannot be read.
    """
    folder = open_folder(workdir)
    rows: dict[int, Row] = {}
    found = folder.read(FILE, limit=_LARGEST)
    lines = found.data.split(b"\n") if found else [b""]
    bad = []
    for number, line in enumerate(lines[:-1], 1):  # what has no newline is still being written
        row = _parsed(line)
        if row is None:
            bad.append(number)
        else:
            rows.setdefault(row["step"], {}).update(row)
    if bad:
        lines = "1 line is no row" if len(bad) == 1 else f"{len(bad)} lines are no rows"
        report(
            f"note: {folder}/{FILE}: {lines} of metrics, the first is line {bad[0]}; passed over"
        )
    return [rows[step] for step in sorted(rows)]


def _parsed(line: bytes) -> Row | None:
    """A row, or None if the line is none."""
    try:
        row = json.loads(line.decode())
        if type(row["step"]) is int and 0 <= row["step"] < 2**53:
            known = [value for value in row.values() if value is not None]
            if all(type(value) in (int, float) and math.isfinite(value) for value in known):
                return row
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        pass
    return None


def series(rows: list[Row], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, where it was written and finite."""
    points = [(int(row["step"]), row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _drop_from(folder: Folder, first_step: int, report: Callable[[str], None]) -> None:
    """Leaves out rows of steps that are done again, and a last line without its end.

    The run has gone back behind them: nothing else says that they are of weights that no longer
    exist. A killed process may leave half a line, and what follows must not join it.
    """
    try:
        if (found := folder.read(FILE, limit=_LARGEST)) is None:
            return
        lines = [line + b"\n" for line in found.data.split(b"\n")[:-1]]
        kept = b"".join(
            line for line in lines if (row := _parsed(line)) is None or row["step"] < first_step
        )
        if kept != found.data:
            folder.write(FILE, kept)
    except Fault as fault:
        report(f"note: {fault}; the run goes on")
