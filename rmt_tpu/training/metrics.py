"""Metrics in the run folder: `metrics.jsonl`, TensorBoard if installed, a picture of the loss."""

import importlib.util
import json
import math
import os
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

from rmt_tpu.errors import RunError
from rmt_tpu.storage import Fault, Location, open_folder

Row = dict[str, int | float | None]

FILE = "metrics.jsonl"
_LARGEST = 4 * 2**30  # bytes; a row has some 300
_APPEND_SECONDS = 30.0  # between additions to a file in a bucket


class MetricsWriter:
    """Appends rows to `<workdir>/metrics.jsonl`, and to `<workdir>/tensorboard` if it can.

    A row is one JSON object with its `step`; numbers that are not finite are null. A resumed run
    may write a step's row again: the later row counts. In a bucket, a thread adds the rows of
    half a minute at a time, and `flush` those that there are.
    """

    def __init__(self, workdir: Location, *, first_step: int):
        self._folder = open_folder(workdir)
        self._lines, self._lock = [], threading.Lock()
        self._appending = threading.Lock()
        self._closed = threading.Event()
        self._thread = None
        if self._folder.local_path is not None:
            _drop_torn_line(self._folder.local_path / FILE)
        else:
            self._thread = threading.Thread(
                target=self._append_now_and_then, name="metrics", daemon=True
            )
        self._board = None
        # In a bucket tensorboardX would write with another client, all of a file every time.
        self._scratch = tempfile.TemporaryDirectory() if self._thread else None
        self._sent: dict[str, int] = {}  # bytes of each of its files that are in the bucket
        if importlib.util.find_spec("tensorboardX"):
            from tensorboardX import SummaryWriter

            # purge_step: what an interrupted run wrote beyond its checkpoint is written again.
            board = self._scratch.name if self._scratch else self._folder.local_path / "tensorboard"
            self._board = SummaryWriter(str(board), purge_step=first_step)
        if self._thread:
            self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One row; on a local disk it survives the process once this returns."""
        finite = {k: v if math.isfinite(v) else None for k, v in values.items()}
        with self._lock:
            self._lines.append(json.dumps({"step": step} | finite) + "\n")
        if self._thread is None:
            self.flush()
        if self._board:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def flush(self) -> None:
        """Returns once all rows are in the file; may be called from any thread.

        Raises:
          Fault: they cannot be written; they are kept for the next time.
        """
        with self._appending:
            with self._lock:
                lines = list(self._lines)
            if lines:
                self._folder.append(FILE, "".join(lines).encode())
                with self._lock:
                    del self._lines[: len(lines)]
            self._send_board()

    def close(self) -> None:
        """Writes what is left.

        Raises:
          Fault: it cannot be written.
        """
        self._closed.set()
        if self._thread:
            self._thread.join()
        if self._board:
            self._board.close()
        try:
            self.flush()
        finally:
            if self._scratch:
                self._scratch.cleanup()

    def _send_board(self) -> None:
        """What TensorBoard's files have beyond what is in the bucket: they only grow."""
        if not (self._scratch and self._board):
            return
        if not self._closed.is_set():
            self._board.flush()
        for path in sorted(Path(self._scratch.name).iterdir()):
            with open(path, "rb") as file:
                file.seek(self._sent.get(path.name, 0))
                if new := file.read():
                    self._folder.append(f"tensorboard/{path.name}", new)
                    self._sent[path.name] = file.tell()

    def _append_now_and_then(self) -> None:
        while not self._closed.wait(_APPEND_SECONDS):
            try:
                self.flush()
            except Fault:
                continue  # the checkpoint's flush, or that of the end, tells


def read_metrics(workdir: Location) -> list[Row]:
    """The run's rows in order of steps, one a step: values of later rows of a step win.

    Raises:
      RunError: a line is not a row; the message names it.
    """
    folder = open_folder(workdir)
    rows: dict[int, Row] = {}
    found = folder.read(FILE, limit=_LARGEST)
    lines = found.data.decode().split("\n") if found else [""]
    for number, line in enumerate(
        lines[:-1], start=1
    ):  # what has no newline is still being written
        try:
            row = json.loads(line)
            rows.setdefault(row["step"], {}).update(row)
        except (ValueError, KeyError, TypeError):
            raise RunError(
                f"{folder}/{FILE}:{number} is not a row of metrics: {line[:80]!r}"
            ) from None
    return [rows[step] for step in sorted(rows)]


def series(rows: list[Row], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, where it was written and finite."""
    points = [(int(row["step"]), row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _drop_torn_line(path: Path) -> None:
    """A killed process may leave a line without its end; what follows it must not join it."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        content = file.read()
        keep = content.rfind(b"\n") + 1
        if keep < len(content):
            file.truncate(keep)
            os.fsync(file.fileno())
