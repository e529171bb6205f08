"""Reports on the cost of decode steps, as Markdown tables and a picture."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from rmt_tpu.analysis.decode import STEPS, DecodeRow
from rmt_tpu.analysis.step_cost import PARTS
from rmt_tpu.analysis.step_report import largest_table
from rmt_tpu.estimator import MODELS
from rmt_tpu.estimator.calibration import error_bar
from rmt_tpu.runs.plots import line_style
from rmt_tpu.tables import markdown, scaled

# Maps the name of each part of a decode step in `step_cost` to the name shown in reports.
_PARTS = {part: part for part in PARTS if part != "optimizer"} | {"loss": "unembedding"}


def text(rows: Sequence[DecodeRow], versions: str, largest: int = 0) -> str:
    """Return a Markdown report on decode steps, with one table per device.

    Args:
      rows: the results of decode steps, on all devices.
      versions: the versions of the software that produced the figures.
      largest: how many of the most expensive instructions to list for each estimated step.
    """
    parts = ["# Time of a decode step\n", *(f"{line}\n" for line in how(rows)), f"{versions}.\n"]
    parts += [_tables(device, device_rows) for device, device_rows in _by_device(rows)]
    for row in rows:
        if largest and row.cost is not None:
            case = ", ".join((*_case(row), row.device))
            title = f"## Most expensive instructions of {STEPS} steps: {case}"
            parts.append(f"{title}\n\n{largest_table(row.cost, largest)}")
    return "\n".join(parts)


def how(rows: Sequence[DecodeRow]) -> list[str]:
    """Return paragraphs on how decode steps were timed or estimated, and how accurately."""
    paragraphs = []
    if chips := list(dict.fromkeys(row.device for row in rows if not row.timed)):
        paragraphs += [
            f"Estimated, not measured: the time of one of {STEPS} steps that one dispatch runs, at "
            "least the time that the HBM traffic takes at full bandwidth. The range is over "
            f"{len(MODELS)} cost models. The most likely token is chosen.",
            error_bar(chips),
        ]
    if any(row.timed for row in rows):
        paragraphs.append(
            "Timed on this machine with random weights: median, least and most over repeats. Each "
            "repeat gives the median round of the engine's steps, which includes choosing tokens."
        )
    return paragraphs


def ratios(rows: Sequence[DecodeRow]) -> list[dict[str, Any]]:
    """Return the step time of each preset divided by that of the first preset.

    The ratios are listed by device and case.
    """
    found = []
    for row in rows:
        ratio = _over(row, rows)
        if ratio is not None and row.case.preset != rows[0].case.preset:
            case = row.case
            found.append(
                {
                    "device": row.device,
                    "presets": [case.preset, rows[0].case.preset],
                    "batch": case.batch,
                    "context": case.context,
                    "ratio": ratio,
                }
            )
    return found


def figure(rows: Sequence[DecodeRow], versions: str) -> Any:
    """Plot the times of decode steps, or their share of HBM bandwidth, over batch size.

    Each device has a panel, whose title says whether its steps were timed or estimated.
    """
    from matplotlib.figure import Figure

    devices = _by_device(rows)
    drawn = Figure(figsize=(max(6, 4.5 * len(devices)), 4.5), layout="constrained")
    panels = drawn.subplots(1, len(devices), squeeze=False, sharey=True)[0]
    known = all(row.of_bandwidth is not None for row in rows if row.seconds is not None)
    value = lambda row: row.of_bandwidth if known else row.seconds * 1e3
    several = len({row.case.context for row in rows}) > 1
    for axes, (device, device_rows) in zip(panels, devices, strict=True):
        curve = lambda row: (row.case.preset, row.case.context)
        done = sorted((row for row in device_rows if row.seconds is not None), key=curve)
        for number, ((preset, context), points) in enumerate(itertools.groupby(done, curve)):
            points = sorted(points, key=lambda row: row.case.batch)
            label = f"{preset}, {context:,}" if several else preset
            heights = [value(row) for row in points]
            axes.plot([p.case.batch for p in points], heights, label=label, **line_style(number))
        source = "timed" if device_rows[0].timed else "estimated"
        axes.set(xscale="log", xlabel="rows", title=f"{device}, {source}")
        axes.set_xticks(batches := sorted({row.case.batch for row in device_rows}), batches)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("share of HBM bandwidth" if known else "milliseconds per step")
    panels[0].set_ylim(0)
    legend = lambda axes: zip(*axes.get_legend_handles_labels(), strict=True)
    handles = {label: h for axes in panels for h, label in legend(axes)}
    drawn.legend(handles.values(), handles, loc="outside right upper", fontsize=8)
    drawn.supxlabel(versions, fontsize=7)
    return drawn


def _tables(device: str, rows: Sequence[DecodeRow]) -> str:
    first, timed = rows[0].case.preset, rows[0].timed
    several = any(row.case.preset != first for row in rows)
    estimated = [row for row in rows if row.cost is not None]
    titles = ["preset", "rows", "context", "least MB", "least ms", "ms", "share of bandwidth"]
    titles += [f"ms / {first}'s"] if several else []
    titles += ["least to most ms", "tokens/s", "weights and cache GB"]
    titles += [] if timed else ["temporary MB", "copies", "copies' MB"]
    cells = ([*_case(row), *_figures(row, rows, several)] for row in rows)
    lines = [f"## {device}", "", markdown([titles, *cells])]
    lines += [f"\n{', '.join(_case(row))}: {row.fault}." for row in rows if row.fault]
    if estimated:
        parts = [part for part in _PARTS if any(row.cost.parts[part] for row in estimated)]
        named = (f"{_PARTS[part]} ms" for part in parts)
        of_parts = [["preset", "rows", "context", *named]]
        for row in estimated:
            seconds = (row.cost.parts[part] / row.cost.clock / STEPS for part in parts)
            of_parts.append([*_case(row), *(f"{s * 1e3:.3f}" for s in seconds)])
        lines += ["", markdown(of_parts)]
    return "\n".join(lines) + "\n"


def _figures(row: DecodeRow, rows: Sequence[DecodeRow], several: bool) -> list[str]:
    bound, cost = row.least, row.cost
    cells = [f"{(bound.weights + bound.cache) / 1e6:,.0f}", scaled(row.least_seconds, 1e3, ".3f")]
    cells += [scaled(row.seconds, 1e3, ".3f"), scaled(row.of_bandwidth, 1, ".2f")]
    cells += [scaled(_over(row, rows), 1, ".2f")] if several else []
    cells.append(" to ".join(f"{s * 1e3:.3f}" for s in row.span) if row.span else "-")
    cells.append(scaled(row.seconds and row.case.batch / row.seconds, 1, ",.0f"))
    cells.append(f"{bound.held / 1e9:.2f}")
    if not row.timed:
        cells.append(scaled(cost and cost.temporary_bytes, 1e-6, ".1f"))
        calls, moved = row.copies
        cells += [f"{calls / STEPS:g}", f"{moved / STEPS / 1e6:,.0f}"] if cost else ["-", "-"]
    return cells


def _over(row: DecodeRow, rows: Iterable[DecodeRow]) -> float | None:
    """Return the time of a decode step divided by that of the first preset, or None if unknown."""
    rows = list(rows)
    same = lambda other: (other.device, other.case.batch, other.case.context)
    first = rows[0].case.preset
    first_rows = [o for o in rows if o.case.preset == first and same(o) == same(row)]
    if row.seconds is None or not first_rows or first_rows[0].seconds is None:
        return None
    return row.seconds / first_rows[0].seconds


def _by_device(rows: Sequence[DecodeRow]) -> list[tuple[str, list[DecodeRow]]]:
    devices = dict.fromkeys(row.device for row in rows)
    return [(device, [row for row in rows if row.device == device]) for device in devices]


def _case(row: DecodeRow) -> list[str]:
    return [row.case.preset, str(row.case.batch), f"{row.case.context:,}"]
