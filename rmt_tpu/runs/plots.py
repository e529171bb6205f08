"""Functions that draw plots and save them in the run folder."""

import io
from collections.abc import Callable
from typing import Any

from absl import logging

from rmt_tpu.runs.metrics import read_metrics, series
from rmt_tpu.storage import Folder, Location, open_folder

LOSS_CURVE = "plots/loss.png"


def plot_loss(workdir: Location, *, report: Callable[[str], None] = logging.warning) -> str:
    """Plot the training loss and the held-out loss against the step; return the file's path or URL.

    For a model with experts, a second plot below shows the maximum expert load divided by the mean
    load.

    Args:
      workdir: the run folder.
      report: a callback that receives a one-line message if metrics cannot be read.
    """
    from matplotlib.figure import Figure

    folder = open_folder(workdir)
    rows = read_metrics(folder, report=report)
    loads = {
        "mean over layers": series(rows, "train/experts/max_load"),
        "worst layer": series(rows, "train/experts/worst_load"),
    }
    with_loads = any(steps for steps, _ in loads.values())
    figure = Figure(figsize=(8, 6.5 if with_loads else 4.5), layout="constrained")
    ratios = [2, 1] if with_loads else [1]
    axes, *below = figure.subplots(len(ratios), squeeze=False, height_ratios=ratios)[:, 0]
    axes.plot(*series(rows, "train/loss"), color="tab:blue", linewidth=1, label="train")
    axes.plot(*series(rows, "eval/loss"), "o-", color="tab:orange", label="held out")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=short(folder.name))
    axes.grid(alpha=0.3)
    axes.legend()
    for of_loads in below:
        for name, points in loads.items():
            of_loads.plot(*points, linewidth=1, label=name)
        of_loads.set(xlabel="step", ylabel="fullest expert / mean", ylim=(1, None))
        of_loads.grid(alpha=0.3)
        of_loads.legend()
    return save_picture(figure, folder, LOSS_CURVE)


def short(name: str) -> str:
    """Return a name, shortened in the middle to 59 characters if it has more than 60."""
    return name if len(name) <= 60 else f"{name[:28]}...{name[-28:]}"


def save_picture(figure, folder: Folder, name: str) -> str:
    """Save a matplotlib figure as PNG in a folder; return the file's path or URL."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    folder.write(name, content.getvalue())
    return f"{folder}/{name}"


def line_style(index: int) -> dict[str, Any]:
    """Return color, line style and marker for a curve.

    The combination is unique for each of the first 40 curves.
    """
    markers, lines = "os^Dv", ("-", "--", "-.", ":")
    return {
        "color": f"C{index % 10}",
        "linestyle": lines[index // 10 % len(lines)],
        "marker": markers[index % len(markers)],
    }
