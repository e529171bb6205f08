"""The metrics of a run, which are saved as rows of `metrics.jsonl` in the run folder."""

import json
import math
from collections.abc import Callable, Mapping

from absl import logging

from rmt_tpu.runs.appended import AppendedFile
from rmt_tpu.storage import Fault, Folder, Location, open_folder

Row = dict[str, int | float | None]

FILE = "metrics.jsonl"
# The maximum size of a file to which a run appends, in bytes. A row of metrics has about 300 bytes.
LARGEST = 4 * 2**30


class MetricsWriter:
    """A writer of metrics to `<workdir>/metrics.jsonl`.

    A row is a JSON object with its `step`. Numbers that are not finite are written as null. If a
    step has several rows, values in later rows replace those in earlier rows. Rows that an earlier
    start wrote for `first_step` and later steps are deleted. `AppendedFile` describes when rows are
    written, and what happens if the file cannot be written.

    Args:
      workdir: the run folder.
      first_step: the first step that will be written.
      report: a callback that receives a one-line message if the file cannot be written; it may be
        called from any thread.
    """

    def __init__(
        self,
        workdir: Location,
        *,
        first_step: int,
        report: Callable[[str], None] = logging.warning,
    ):
        folder = open_folder(workdir)
        _delete_rows_from(folder, first_step, report)
        self._rows = AppendedFile(folder, FILE, report)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write one row of metrics; on a local disk, the row is in the file when this returns."""
        finite = {k: v if math.isfinite(v) else None for k, v in values.items()}
        self._rows.add((json.dumps({"step": step} | finite) + "\n").encode())

    def flush(self) -> bool:
        """Append all pending rows to the file if it can be written; any thread may call this.

        Returns:
          Whether all rows that were written before this call are in the file.
        """
        return self._rows.flush()

    def close(self) -> None:
        """Write the remaining rows and stop the thread."""
        self._rows.close()


def read_metrics(
    workdir: Location, *, report: Callable[[str], None] = logging.warning
) -> list[Row]:
    """Read the run's metrics, and return one row per step, sorted by step.

    If a step has several rows, values in later rows replace those in earlier rows. Lines that are
    not rows are skipped; a power cut, for example, may damage a line.

    Args:
      workdir: the run folder.
      report: a callback that receives a one-line message if lines were skipped.

    Raises:
      Fault: the file cannot be read.
    """
    folder = open_folder(workdir)
    rows: dict[int, Row] = {}
    found = folder.read(FILE, limit=LARGEST)
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
    """Delete the metrics of `first_step` and later steps, and the last line if it is incomplete.

    The run resumes before `first_step` and repeats these steps, so the old rows would belong to
    weights that no longer exist. A killed process may leave a line without its newline, and the
    next row must not be appended to that line.
    """
    try:
        if (found := folder.read(FILE, limit=LARGEST)) is None:
            return
        lines = [line + b"\n" for line in found.data.split(b"\n")[:-1]]
        remaining = b"".join(
            line for line in lines if (row := _parsed(line)) is None or row["step"] < first_step
        )
        if remaining != found.data:
            folder.write(FILE, remaining)
    except Fault as fault:
        report(f"note: {fault}; the run continues")
