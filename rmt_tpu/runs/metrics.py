"""Metrics in the run folder, as rows in `metrics.jsonl` and as TensorBoard event files."""

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
_LARGEST = 4 * 2**30  # maximum size of the metrics file in bytes; a row has about 300 bytes
# Seconds between appends to a file in a bucket, and between retries after a failure.
_APPEND_SECONDS = 30.0


class MetricsWriter:
    """A writer of metrics to `<workdir>/metrics.jsonl` and, optionally, to TensorBoard event files.

    A row is a JSON object with its `step`. Numbers that are not finite are written as null. If a
    step has several rows, values in later rows replace those in earlier rows. Rows that an earlier
    start wrote for `first_step` and later steps are deleted. If the folder is in a bucket, a thread
    appends the new rows every half minute, and `flush` appends them immediately.

    No method raises an error if a file cannot be written. The error is reported once, and the rows
    are kept in memory until they can be written.

    Args:
      workdir: the run folder.
      first_step: the first step that will be written.
      board: whether to write TensorBoard event files.
      report: a function that is called with one line about a file that cannot be written, from any
        thread.
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
        self._rows, self._board = _AppendedFile(folder, FILE, report), None
        if board:
            self._board = _AppendedFile(folder, tensorboard.new_file(), report)
            self._board.add(tensorboard.header(first_step))
        self._closed, self._thread = threading.Event(), None
        _delete_rows_from(folder, first_step, report)
        if folder.local_path is None:
            self._thread = threading.Thread(
                target=self._append_periodically, name="metrics", daemon=True
            )
            self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write one row of metrics; on a local disk the file has the row when this returns."""
        finite = {k: v if math.isfinite(v) else None for k, v in values.items()}
        self._rows.add((json.dumps({"step": step} | finite) + "\n").encode())
        if self._board:
            self._board.add(tensorboard.scalars(step, values))
        if self._thread is None:
            self._append(unless_failed=True)

    def flush(self) -> None:
        """Append all pending rows to the files if they can be written; any thread may call this."""
        self._append(unless_failed=False)

    def close(self) -> None:
        """Write the remaining rows and stop the thread."""
        self._closed.set()
        if self._thread:
            self._thread.join()
        # For a bucket, skip a file whose last append has just failed: a retry may take minutes.
        self._append(unless_failed=self._thread is not None)

    def _append(self, *, unless_failed: bool) -> None:
        for file in (self._rows, self._board):
            if file and not (unless_failed and file.is_backing_off()):
                file.append()

    def _append_periodically(self) -> None:
        while not self._closed.wait(_APPEND_SECONDS):
            self._append(unless_failed=True)


class _AppendedFile:
    """A file to which rows are only appended, with the rows that are not yet in the file."""

    def __init__(self, folder: Folder, name: str, report: Callable[[str], None]):
        self._folder, self._name, self._report = folder, name, report
        self._pending: list[bytes] = []
        self._lock, self._appending = threading.Lock(), threading.Lock()
        self._retry_at = -math.inf

    def add(self, data: bytes) -> None:
        with self._lock:
            self._pending.append(data)

    def is_backing_off(self) -> bool:
        """Return whether the last append failed so recently that the next must still wait."""
        return time.monotonic() < self._retry_at

    def append(self) -> None:
        """Append the pending rows to the file, or keep them if the file cannot be written."""
        with self._appending:
            with self._lock:
                pending = list(self._pending)
            if not pending:
                return
            try:
                self._folder.append(self._name, b"".join(pending))
            except Fault as fault:
                if self._retry_at == -math.inf:
                    self._report(f"note: {fault}; the run continues, and retries this")
                self._retry_at = time.monotonic() + _APPEND_SECONDS
                return
            self._retry_at = -math.inf
            with self._lock:
                del self._pending[: len(pending)]


def read_metrics(
    workdir: Location, *, report: Callable[[str], None] = logging.warning
) -> list[Row]:
    """Read the run's metrics, and return one row per step in the order of steps.

    If a step has several rows, values in later rows replace those in earlier rows. Lines that are
    not rows, for example after a power cut, are skipped.

    Args:
      workdir: the run folder.
      report: a function that is called with one line about skipped lines, if there are any.

    Raises:
      Fault: the file cannot be read.
    """
    folder = open_folder(workdir)
    rows: dict[int, Row] = {}
    found = folder.read(FILE, limit=_LARGEST)
    lines = found.data.split(b"\n") if found else [b""]
    bad = []
    # Leave out what follows the last newline: it is empty or an incomplete row.
    for number, line in enumerate(lines[:-1], 1):
        row = _parsed(line)
        if row is None:
            bad.append(number)
        else:
            rows.setdefault(row["step"], {}).update(row)
    if bad:
        lines = "1 line is not a row" if len(bad) == 1 else f"{len(bad)} lines are not rows"
        report(f"note: {folder}/{FILE}: {lines} of metrics, the first is line {bad[0]}; skipped")
    return [rows[step] for step in sorted(rows)]


def _parsed(line: bytes) -> Row | None:
    """Return the row that a line contains, or None if the line is not a row."""
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
    """Return the steps and the values of one metric, leaving out rows that have no value for it."""
    points = [(int(row["step"]), row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _delete_rows_from(folder: Folder, first_step: int, report: Callable[[str], None]) -> None:
    """Delete the metrics of `first_step` and later steps, and a last line that has no newline.

    The run resumes before `first_step` and repeats these steps, so the old rows would belong to
    weights that no longer exist. A killed process may leave an incomplete line, to which the next
    row must not be appended.
    """
    try:
        if (found := folder.read(FILE, limit=_LARGEST)) is None:
            return
        lines = [line + b"\n" for line in found.data.split(b"\n")[:-1]]
        remaining = b"".join(
            line for line in lines if (row := _parsed(line)) is None or row["step"] < first_step
        )
        if remaining != found.data:
            folder.write(FILE, remaining)
    except Fault as fault:
        report(f"note: {fault}; the run continues")
