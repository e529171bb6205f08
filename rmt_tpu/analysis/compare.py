"""Comparisons of runs that trained on the same tokens, as a table and a picture."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rmt_tpu import cost as resources
from rmt_tpu import tables
from rmt_tpu.config import ModelConfig, RunConfig
from rmt_tpu.runs.metrics import read_metrics, series
from rmt_tpu.runs.plots import line_style, save_picture
from rmt_tpu.runs.side_files import DIVERGED
from rmt_tpu.runs.workdir import read_config
from rmt_tpu.storage import Folder, Location, open_folder

# Maximum number of loss curves in one picture; more would hide each other.
_CURVES_IN_ONE = 4


@dataclass(frozen=True)
class RunResult:
    """The cost and the losses of one training run.

    Losses are in nats per token. FLOPs include the forward and backward passes. `residual_size` is
    the number of entries in a token's residual. `seconds` is the mean time of the recorded training
    steps, times the number of steps. `train_loss` is the mean training loss over the last tenth of
    the steps. `held_out_loss` is NaN if the loss after the last step was not finite.
    """

    name: str
    seed: int
    parameters: int
    residual_size: int
    tokens: int
    flops: int
    seconds: float
    train_loss: float
    held_out_loss: float


def run_result(name: str, workdir: Location) -> RunResult:
    """Read the cost and the losses of a settled run from its folder.

    The losses of a run that diverged are NaN. Metrics after the last step of the run are ignored.
    They come from an earlier config with more steps.
    """
    config = read_config(workdir)
    rows = [row for row in read_metrics(workdir) if row["step"] <= config.train.steps]
    _, losses = series(rows, "train/loss")
    measured, held_out = series(rows, "eval/loss")
    _, step_seconds = series(rows, "throughput/step_seconds")
    diverged = open_folder(workdir).read(DIVERGED) is not None
    tail = [math.nan] if diverged else losses[-max(1, len(losses) // 10) :]
    tokens = config.train.steps * config.train.batch_size * config.data.seq_len
    return RunResult(
        name=name,
        seed=config.train.seed,
        parameters=sum(resources.parameters(config.model).values()),
        residual_size=config.model.residual_size,
        tokens=tokens,
        flops=resources.train_flops(
            resources.flops_per_token(config.model, config.data.seq_len), tokens
        ),
        # A row has the time of its own step. With a `log_every`, other steps have no rows, and the
        # last step has one even if fewer steps lie before it.
        seconds=_mean(step_seconds or [0.0]) * config.train.steps,
        train_loss=sum(tail) / len(tail),
        # A loss that was not finite has no row in the series.
        held_out_loss=held_out[-1] if measured[-1:] == [config.train.steps] else math.nan,
    )


def write_comparison(
    runs: dict[str, list[Location]], folder: Location, *, by_loss: bool = False
) -> str:
    """Compare settled runs, write the results to files, and return the Markdown table.

    The files are comparison.png, comparison.md and comparison.json. With more than four systems,
    comparison.png shows the final losses, and curves.png shows the loss curves.

    Args:
      runs: maps the name of each system to its run folders, one per seed; all systems have the same
        seeds.
      folder: the folder to write to.
      by_loss: whether to sort the systems by held-out loss, best first.
    """
    results = {name: [run_result(name, w) for w in workdirs] for name, workdirs in runs.items()}
    if by_loss:
        order = sorted(runs, key=lambda name: _rank(results[name]))
        runs = {name: runs[name] for name in order}
        results = {name: results[name] for name in order}
    text = markdown(results) + "\n" + notes({n: read_config(w[0]) for n, w in runs.items()})
    folder = open_folder(folder)
    folder.write("comparison.md", text.encode())
    rows = [asdict(r) for runs_of_system in results.values() for r in runs_of_system]
    for row in rows:
        losses = ("train_loss", "held_out_loss")
        row |= {name: None for name in losses if math.isnan(row[name])}
    folder.write("comparison.json", (json.dumps(rows, indent=2) + "\n").encode())
    _draw(runs, results, folder)
    return text


# The table -----------------------------------------------------------------------------------


def markdown(results: dict[str, list[RunResult]]) -> str:
    """Return a Markdown table with one row per system, and a line about the seeds."""
    lines = [
        "preset | parameters | residual | tokens | FLOPs | seconds | train loss | held-out loss"
    ]
    for name, runs in results.items():
        r = runs[0]
        lines.append(
            f"{name} | {r.parameters:,} | {r.residual_size:,} | {r.tokens:,} | {r.flops:.3g} | "
            f"{_mean([r.seconds for r in runs]):.1f} | {_spread([r.train_loss for r in runs])} | "
            f"{_spread([r.held_out_loss for r in runs])}"
        )
    seeds = [r.seed for r in next(iter(results.values()))]
    text = tables.markdown(lines) + "\n"
    if len(seeds) > 1:
        text += (
            f"\nMean (min..max) over seeds {', '.join(map(str, seeds))}; seconds: mean. A seed "
            "determines the initial parameters, the order of the text and its held-out part.\n"
        )
    return text


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _rank(runs: Sequence[RunResult]) -> float:
    """Return the mean held-out loss, or infinity if a loss is not finite."""
    mean = _mean([run.held_out_loss for run in runs])
    return math.inf if math.isnan(mean) else mean


def _spread(values: Sequence[float]) -> str:
    mean = f"{_mean(values):.4f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.4f}..{max(values):.4f})"


def notes(configs: dict[str, RunConfig]) -> str:
    """Return a Markdown list of how the configs differ; equal configs share a line."""
    systems: dict[str, list[str]] = {}
    for name, config in configs.items():
        systems.setdefault(_note(config.model), []).append(name)
    exempt = ", ".join(next(iter(configs.values())).train.optimizer.decay_exclude)
    lines = [
        "Differences in addition to the system (unless noted, weights are drawn with a standard "
        "deviation of init_std / sqrt(fan in), and weight decay applies except to the roles "
        f"{exempt or '(none)'}):",
        "",
        *(f"- {', '.join(names)}: {note}." for note, names in systems.items()),
    ]
    return "\n".join(lines) + "\n"


def _note(config: ModelConfig) -> str:
    starts = config.store.note if config.mixer.adds_up else ""
    return "; ".join(filter(None, [starts, config.mixer.note]))


# The picture ---------------------------------------------------------------------------------


def over_seeds(
    workdirs: Sequence[Location], metric: str
) -> tuple[list[int], list[float], list[float], list[float]]:
    """Return the mean, minimum and maximum of a metric over runs.

    The first result is the steps at which all runs recorded the metric.
    """
    curves = [dict(zip(*series(read_metrics(w), metric), strict=True)) for w in workdirs]
    steps = sorted(set.intersection(*map(set, curves)))
    at_steps = [[curve[step] for curve in curves] for step in steps]
    return steps, list(map(_mean, at_steps)), list(map(min, at_steps)), list(map(max, at_steps))


def _draw(
    runs: dict[str, list[Location]], results: dict[str, list[RunResult]], folder: Folder
) -> None:
    if len(runs) <= _CURVES_IN_ONE:
        _draw_curves(runs, folder)
    else:
        draw_results(results, folder)
        _draw_each_curve(runs, folder)


def draw_results(results: dict[str, list[RunResult]], folder: Folder) -> str:
    """Draw comparison.png for many systems: final losses and training FLOPs."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    mean = {name: _mean([r.held_out_loss for r in runs]) for name, runs in results.items()}
    names = sorted(results, key=lambda name: _rank(results[name]))
    rows = range(len(names))
    figure = Figure(figsize=(10, 1.4 + 0.32 * len(names)), layout="constrained")
    by_loss, by_flops = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    for row, name in enumerate(names):
        losses = [r.held_out_loss for r in results[name]]
        by_loss.plot([min(losses), max(losses)], [row, row], color="0.75", linewidth=3, zorder=1)
        by_loss.plot(losses, [row] * len(losses), "o", color="C0", markersize=5, alpha=0.7)
        by_loss.plot(mean[name], row, "|", color="black", markersize=14, markeredgewidth=2)
        by_loss.annotate(
            f"{mean[name]:.3f}", (max(losses), row), (6, 0), textcoords="offset points",
            va="center", fontsize=8,
        )  # fmt: skip
    by_flops.barh(rows, [results[name][0].flops for name in names], 0.6, color="0.7")
    by_loss.set_yticks(rows, names)
    # The call inverts the y axis of both panels, because they share it.
    by_loss.invert_yaxis()
    by_loss.margins(x=0.12)
    seeds = "; dots: seeds, bar: their mean" if len(results[names[0]]) > 1 else ""
    by_loss.set(xlabel=f"held-out loss at the end (nats per token){seeds}")
    by_flops.set(xlabel="training FLOPs (analytic)")
    by_flops.xaxis.set_major_formatter(EngFormatter())
    for axes in (by_loss, by_flops):
        axes.grid(axis="x", alpha=0.3)
        axes.tick_params(axis="y", length=0)
    figure.suptitle(
        f"{results[names[0]][0].tokens:,} tokens each, the best system first", fontsize=10
    )
    return save_picture(figure, folder, "comparison.png")


def _draw_each_curve(runs: dict[str, list[Location]], folder: Folder) -> None:
    """Draw curves.png: one panel per system, with the other systems' losses in grey."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    columns = 4
    figure = Figure(figsize=(12, 2.2 * -(-len(runs) // columns)), layout="constrained")
    panels = figure.subplots(-(-len(runs) // columns), columns, sharex=True, sharey=True)
    curves = {}
    for name, workdirs in runs.items():
        config = read_config(workdirs[0])
        steps, mean, least, most = over_seeds(workdirs, "eval/loss")
        per_step = config.train.batch_size * config.data.seq_len
        curves[name] = [step * per_step for step in steps], mean, least, most
    for axes, (name, (tokens, mean, least, most)) in zip(panels.flat, curves.items(), strict=False):
        for other_tokens, other_losses, *_ in curves.values():
            axes.plot(other_tokens, other_losses, color="0.85", linewidth=0.8, zorder=1)
        axes.fill_between(tokens, least, most, color="C0", alpha=0.2, linewidth=0)
        axes.plot(tokens, mean, "C0o-", markersize=3, linewidth=1.5)
        axes.set_title(name, fontsize=9)
        axes.xaxis.set_major_formatter(EngFormatter())
    for axes in panels.flat[len(runs) :]:
        axes.set_axis_off()
    # Cut off the steep fall in the first steps: it looks the same for all systems and would take up
    # most of the height.
    top = max((mean[0] for _, mean, *_ in curves.values() if mean), default=10.0)
    panels.flat[0].set_ylim(top=top + 0.5)
    figure.supxlabel("tokens (band: min to max over seeds; grey: the other systems)", fontsize=9)
    figure.supylabel("held-out loss", fontsize=9)
    save_picture(figure, folder, "curves.png")


def _draw_curves(runs: dict[str, list[Location]], folder: Folder) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(13, 5), layout="constrained")
    by_tokens, by_flops = figure.subplots(1, 2, sharey=True)
    first_held_out = []
    for index, (name, workdirs) in enumerate(runs.items()):
        config, style = read_config(workdirs[0]), line_style(index)
        per_step = config.train.batch_size * config.data.seq_len
        flops = resources.train_flops(
            resources.flops_per_token(config.model, config.data.seq_len), 1
        )
        steps, mean, least, most = over_seeds(workdirs, "eval/loss")
        first_held_out += mean[:1]
        for axes, scale in ((by_tokens, per_step), (by_flops, per_step * flops)):
            scaled = [step * scale for step in steps]
            axes.plot(scaled, mean, label=name, linewidth=1.3, markersize=4, **style)
            if len(workdirs) > 1:
                axes.fill_between(
                    scaled, least, most, color=style["color"], alpha=0.15, linewidth=0
                )
            steps_taken, losses, *_ = over_seeds(workdirs, "train/loss")
            scaled = [step * scale for step in steps_taken]
            axes.plot(scaled, losses, color=style["color"], alpha=0.35, linewidth=1)
    by_tokens.set(xlabel="tokens", ylabel="loss (nats per token)")
    by_flops.set(xlabel="training FLOPs (analytic, without embedding lookups)")
    # Cut off the steep fall in the first steps: it looks the same for all systems and would take up
    # most of the height.
    by_tokens.set_ylim(top=max(first_held_out, default=10.0) + 0.5)
    for axes in (by_tokens, by_flops):
        axes.xaxis.set_major_formatter(EngFormatter())
        axes.grid(alpha=0.3)
    notes = ["line: held-out loss"]
    notes += ["band: min to max over seeds"] if len(next(iter(runs.values()))) > 1 else []
    notes += ["faint: train loss"]
    handles, labels = by_tokens.get_legend_handles_labels()
    figure.legend(handles, labels, title="\n".join(notes), loc="outside right upper")
    save_picture(figure, folder, "comparison.png")
