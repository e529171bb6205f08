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
_LARGEST = 4 * 2**30  # in bytes; a row has about 300
# Seconds between additions to a file in a bucket, and between attempts after a failure.
_APPEND_SECONDS = 30.0


class MetricsWriter:
    """A writer that appends to `<workdir>/metrics.jsonl`, and to `<workdir>/tensorboard` if wanted.

    A row is one JSON object with its `step`; numbers that are not finite become null. If a step has
    several rows, later values replace earlier ones. Rows of `first_step` and later, which an
    earlier start left, are dropped. In a bucket, a thread adds the rows of half a minute at a time,
    and `flush` adds all rows at once.

    No method raises an error because a file cannot be written. The error is reported once, and the
    rows are kept and written when the file can be written again.

    Args:
      workdir: the run folder.
      first_step: the first step that will be written.
      board: whether to write for TensorBoard.
      report: called with one line about a file that cannot be written, from any thread.
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
        """Write one row; on a local disk it survives the process once this returns."""
        finite = {k: v if math.isfinite(v) else None for k, v in values.items()}
        self._rows.add((json.dumps({"step": step} | finite) + "\n").encode())
        if self._board:
            self._board.add(tensorboard.scalars(step, values))
        if self._thread is None:
            self._append(soon=True)

    def flush(self) -> None:
        """Append all rows to the files, or at least try to, before returning; from any thread."""
        self._append(soon=False)

    def close(self) -> None:
        """Write the remaining rows and end the thread."""
        self._closed.set()
        if self._thread:
            self._thread.join()
        # Do not wait again for a bucket that has just failed to answer for minutes.
        self._append(soon=self._thread is not None)

    def _append(self, *, soon: bool) -> None:
        for file in (self._rows, self._board):
            if file and not (soon and file.waits()):
                file.append()

    def _append_now_and_then(self) -> None:
        while not self._closed.wait(_APPEND_SECONDS):
            self._append(soon=True)


class _Growing:
    """A file that only grows, with the data that still has to be appended."""

    def __init__(self, folder: Folder, name: str, report: Callable[[str], None]):
        self._folder, self._name, self._report = folder, name, report
        self._lacks: list[bytes] = []
        self._lock, self._appending = threading.Lock(), threading.Lock()
        self._try_again = -math.inf

    def add(self, data: bytes) -> None:
        with self._lock:
            self._lacks.append(data)

    def waits(self) -> bool:
        """Return whether an attempt has just failed."""
        return time.monotonic() < self._try_again

    def append(self) -> None:
        """Append the pending data to the file."""
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
    """Return the run's rows in the order of steps, one for each step.

    If a step has several rows, values of later ones replace earlier ones. Lines that are not rows,
    which a power cut may leave, are skipped and counted.

    Args:
      workdir: the run folder.
      report: called with one line that says how many lines were skipped.

    Raises:
      Fault: the file cannot be read.
    """
    folder = open_folder(workdir)
    rows: dict[int, Row] = {}
    found = folder.read(FILE, limit=_LARGEST)
    lines = found.data.split(b"\n") if found else [b""]
    bad = []
    for number, line in enumerate(lines[:-1], 1):  # a line without a newline is still being written
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
    """Return the row in a line, or None if it is not a row."""
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
    """Return the steps and values of one metric, where it was written and is finite."""
    points = [(int(row["step"]), row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _drop_from(folder: Folder, first_step: int, report: Callable[[str], None]) -> None:
    """Drop the rows of steps that will be done again, and a last line without a newline.

    The run has gone back to before these steps, and nothing else shows that the rows are of weights
    that no longer exist. A killed process may leave half a line, and the next row must not be
    appended to it.
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
