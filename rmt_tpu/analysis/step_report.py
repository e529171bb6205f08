"""Reports on the estimated cost of train steps, as Markdown tables and a picture."""

import dataclasses
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rmt_tpu.analysis.step_cost import PARTS, StepCost
from rmt_tpu.estimator import MODELS

Figure = Callable[[StepCost], float]


@dataclasses.dataclass(frozen=True)
class _Column:
    """A column of the cost table, with the cycles of one step or a ratio of cycles.

    The column is a ratio if `over`, the cost to divide by, is not None.
    """

    title: str
    cost: StepCost
    over: StepCost | None = None

    def cell(self, figure: Figure) -> str:
        if self.over is None:
            return f"{figure(self.cost):.1f}"
        below = figure(self.over)
        return f"{figure(self.cost) / below:.2f}" if below else "-"


def step_table(costs: Sequence[StepCost]) -> str:
    """Return a Markdown table of the cycles of each part of a train step, in millions.

    There is a column for each model and chip, and a column per chip with the ratio of the first two
    models. The rows for the whole step show every cost model. All other rows show the best guess.
    """
    columns = []
    for target in dict.fromkeys(cost.target for cost in costs):
        here = [cost for cost in costs if cost.target == target]
        columns += [_Column(f"{cost.preset}, {target}", cost) for cost in here]
        if len(here) > 1:
            columns.append(_Column(f"{here[0].preset} / {here[1].preset}", *here[:2]))
    lines = [
        f"| million cycles | {' | '.join(column.title for column in columns)} |",
        f"|---{'|---' * len(columns)}|",
    ]

    def line(name: str, figure: Figure) -> None:
        lines.append(f"| {name} | {' | '.join(column.cell(figure) for column in columns)} |")

    for part in PARTS:
        line(part, lambda cost, part=part: cost.parts[part] / 1e6)
    for name in MODELS:
        line(f"**whole step, {name}**", lambda cost, name=name: cost.by_model[name] / 1e6)
    line("without attention", lambda cost: (cost.cycles - cost.parts["attention"]) / 1e6)
    line("in Pallas kernels", lambda cost: sum(cost.kernel_parts.values()) / 1e6)
    line("in moves inside loops", lambda cost: cost.moves[1] / 1e6)
    line("moves inside loops, calls", lambda cost: cost.moves[0])
    line("moves inside loops, GB", lambda cost: cost.moves[2] / 1e9)
    line("HBM traffic, GB", lambda cost: cost.hbm_bytes / 1e9)
    line("HBM traffic at peak bandwidth, million cycles", lambda cost: cost.hbm_cycles / 1e6)
    line("milliseconds", lambda cost: cost.seconds * 1e3)
    line("temporary memory, GB", lambda cost: cost.temporary_bytes / 1e9)
    return "\n".join(lines) + "\n" + "".join(f"\n{note}\n" for note in _notes(costs))


def ratios(costs: Sequence[StepCost]) -> list[dict[str, Any]]:
    """Return the first model's cycles divided by the second's, per chip and cost model."""
    found = []
    for target in dict.fromkeys(cost.target for cost in costs):
        here = [cost for cost in costs if cost.target == target]
        if len(here) > 1:
            first, second = here[:2]
            by_model = {name: first.by_model[name] / second.by_model[name] for name in MODELS}
            found.append(
                {
                    "target": target,
                    "presets": [first.preset, second.preset],
                    "by_model": by_model,
                    "least": min(by_model.values()),
                    "most": max(by_model.values()),
                }
            )
    return found


def model_lines() -> str:
    """Return Markdown lines that describe the cost models."""
    what = {name: model.__doc__.removeprefix("Return ") for name, model in MODELS.items()}
    return "".join(f"- {name}: {words}\n" for name, words in what.items())


def _notes(costs: Sequence[StepCost]) -> list[str]:
    notes = []
    if unknown := sum(cost.unknown_loops for cost in costs):
        notes.append(f"{unknown} loops of unknown length count once, or as their kernels declare.")
    for cost in costs:
        if cost.unscheduled:
            names = ", ".join(cost.unscheduled)
            notes.append(
                f"{cost.preset}, {cost.target}: the compiler wrote no schedule of {names}; their "
                "time is underestimated, by their memory traffic alone."
            )
    return notes


def largest_table(cost: StepCost, count: int = 25) -> str:
    """Return a Markdown table of a step's `count` most expensive instructions."""
    lines = [
        "| million cycles | calls | part | instruction | result | |",
        "|---|---|---|---|---|---|",
    ]
    for row in cost.rows[:count]:
        kind = "move: " if row.moves else "kernel: " if row.kernel else ""
        lines.append(
            f"| {row.cycles / 1e6:.2f} | {row.calls} | {row.part} | {row.name} | {row.result} "
            f"| {kind}{row.what} |"
        )
    return "\n".join(lines) + "\n"


def draw_steps(costs: Sequence[StepCost], path: str | Path, note: str) -> None:
    """Draw the time of a step in milliseconds as one bar per model and chip.

    Bars are stacked by part. An error bar shows the range over all cost models.
    """
    from matplotlib.figure import Figure

    width = max(6, 2.5 + 1.3 * len(costs))
    figure = Figure(figsize=(width, 5), layout="constrained")
    axes = figure.subplots()
    names = [f"{cost.preset}\n{cost.target}" for cost in costs]
    bottom = [0.0] * len(costs)
    for i, part in enumerate(PARTS):
        heights = [cost.parts[part] / cost.clock * 1e3 for cost in costs]
        axes.bar(range(len(costs)), heights, 0.7, bottom=bottom, label=part, color=f"C{i}")
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    spans = [[value / cost.clock * 1e3 for value in cost.by_model.values()] for cost in costs]
    for i, span in enumerate(spans):
        ends = axes.plot([i, i], [min(span), max(span)], "k_-", linewidth=1)
    ends[0].set_label("range over the cost models")
    axes.set_xticks(range(len(costs)), names, fontsize=8)
    axes.set(ylabel="milliseconds per step, estimated")
    axes.grid(axis="y", alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", fontsize=8)
    # About 18 letters of this size fit in an inch. A width of 15 leaves a margin.
    figure.supxlabel(textwrap.fill(note, round(15 * width)), fontsize=7)
    figure.savefig(path, dpi=150)
