"""Metrics on disk: `metrics.jsonl`, TensorBoard if installed, and a picture of the loss."""

import importlib.util
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from rmt_tpu.errors import RunError

Row = dict[str, int | float | None]


class MetricsWriter:
    """Appends rows to `<workdir>/metrics.jsonl`, and to `<workdir>/tensorboard` if it can.

    A row is one JSON object with its `step`; numbers that are not finite are null. A resumed run
    may write a step's row again: the later row counts.
    """

    def __init__(self, workdir: str | Path, *, first_step: int):
        path = Path(workdir, "metrics.jsonl")
        _drop_torn_line(path)
        self._file = open(path, "a", encoding="utf-8")
        self._board = None
        if importlib.util.find_spec("tensorboardX"):
            from tensorboardX import SummaryWriter

            # purge_step: what an interrupted run wrote beyond its checkpoint is written again.
            folder = str(Path(workdir, "tensorboard"))
            self._board = SummaryWriter(folder, purge_step=first_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One row; it survives the process once this returns."""
        finite = {k: v if math.isfinite(v) else None for k, v in values.items()}
        self._file.write(json.dumps({"step": step} | finite) + "\n")
        self._file.flush()
        if self._board:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._file.close()
        if self._board:
            self._board.close()


def read_metrics(workdir: str | Path) -> list[Row]:
    """The run's rows in order of steps, one a step: values of later rows of a step win.

    Raises:
      RunError: a line is not a row; the message names it.
    """
    path = Path(workdir, "metrics.jsonl")
    rows: dict[int, Row] = {}
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
    for number, line in enumerate(
        lines[:-1], start=1
    ):  # what has no newline is still being written
        try:
            row = json.loads(line)
            rows.setdefault(row["step"], {}).update(row)
        except (ValueError, KeyError, TypeError):
            raise RunError(f"{path}:{number} is not a row of metrics: {line[:80]!r}") from None
    return [rows[step] for step in sorted(rows)]


def series(rows: list[Row], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, where it was written and finite."""
    points = [(int(row["step"]), row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def plot_loss(workdir: str | Path) -> Path:
    """Draws training and held-out loss against steps; returns the picture's path."""
    from matplotlib.figure import Figure

    rows = read_metrics(workdir)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*series(rows, "train/loss"), color="tab:blue", linewidth=1, label="train")
    axes.plot(*series(rows, "eval/loss"), "o-", color="tab:orange", label="held out")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=Path(workdir).resolve().name)
    axes.grid(alpha=0.3)
    axes.legend()
    path = Path(workdir, "plots", "loss.png")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


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
