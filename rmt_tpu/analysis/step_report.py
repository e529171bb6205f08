"""Reports on the estimated cost of train steps, as Markdown tables and a picture."""

import dataclasses
import hashlib
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rmt_tpu.analysis.step_cost import PARTS, StepCost
from rmt_tpu.estimator import MODELS
from rmt_tpu.tables import markdown

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
    lines = [["million cycles", *(column.title for column in columns)]]

    def line(name: str, figure: Figure) -> None:
        lines.append([name, *(column.cell(figure) for column in columns)])

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
    return markdown(lines) + "\n" + "".join(f"\n{note}\n" for note in _notes(costs))


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


def draw_steps(steps: Sequence[Mapping[str, Any]], path: str | Path, note: str) -> None:
    """Draw the time of a step in milliseconds as one bar per model and chip.

    Bars are stacked by part. An error bar shows the range over all cost models.

    Args:
      steps: the results of `StepCost.json`.
      path: the path of the PNG file, which is written.
      note: the text below the bars.
    """
    from matplotlib.figure import Figure

    width = max(6, 2.5 + 1.3 * len(steps))
    figure = Figure(figsize=(width, 5), layout="constrained")
    axes = figure.subplots()
    names = [f"{step['preset']}\n{step['target']}" for step in steps]
    bottom = [0.0] * len(steps)
    for i, part in enumerate(PARTS):
        heights = [step["parts"][part] / step["clock"] * 1e3 for step in steps]
        axes.bar(range(len(steps)), heights, 0.7, bottom=bottom, label=part, color=f"C{i}")
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    for i, step in enumerate(steps):
        span = [cycles / step["clock"] * 1e3 for cycles in step["cycles_by_model"].values()]
        ends = axes.plot([i, i], [min(span), max(span)], "k_-", linewidth=1)
    ends[0].set_label("range over the cost models")
    axes.set_xticks(range(len(steps)), names, fontsize=8)
    axes.set(ylabel="milliseconds per step, estimated")
    axes.grid(axis="y", alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", fontsize=8)
    # About 18 letters of this size fit in an inch. A width of 15 leaves a margin.
    figure.supxlabel(textwrap.fill(note, round(15 * width)), fontsize=7)
    figure.savefig(path, dpi=150, metadata={"Description": _digest(steps, note)})


def shows_steps(steps: Sequence[Mapping[str, Any]], path: Path, note: str) -> bool:
    """Return whether the file at `path` is what `draw_steps` draws of these steps."""
    return path.exists() and _digest(steps, note).encode() in path.read_bytes()


def _digest(steps: Sequence[Mapping[str, Any]], note: str) -> str:
    names = "preset", "target", "clock", "parts", "cycles_by_model"
    drawn = [[step[name] for name in names] for step in steps]
    return hashlib.sha256(json.dumps([drawn, note]).encode()).hexdigest()
