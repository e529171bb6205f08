"""Pictures in the run folder."""

import io
from collections.abc import Callable
from typing import Any

from absl import logging

from rmt_tpu.storage import Folder, Location, open_folder
from rmt_tpu.training.metrics import read_metrics, series


def plot_loss(workdir: Location, *, report: Callable[[str], None] = logging.warning) -> str:
    """Draws training and held-out loss against steps; returns the picture's path or url.

    Args:
      workdir: the run folder.
      report: see `read_metrics`.
    """
    from matplotlib.figure import Figure

    folder = open_folder(workdir)
    rows = read_metrics(folder, report=report)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*series(rows, "train/loss"), color="tab:blue", linewidth=1, label="train")
    axes.plot(*series(rows, "eval/loss"), "o-", color="tab:orange", label="held out")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=folder.name)
    axes.grid(alpha=0.3)
    axes.legend()
    return save_picture(figure, folder, "plots/loss.png")


def save_picture(figure, folder: Folder, name: str) -> str:
    """Writes a matplotlib figure as PNG; returns its path or url."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    folder.write(name, content.getvalue())
    return f"{folder}/{name}"


def line_style(index: int) -> dict[str, Any]:
    """Of the n-th curve of a picture: one that is told from 40 others."""
    markers, lines = "os^Dv", ("-", "--", "-.", ":")
    return {
        "color": f"C{index % 10}",
        "linestyle": lines[index // 10 % len(lines)],
        "marker": markers[index % len(markers)],
    }
