"""Reports of kernel tuning, as a Markdown table, JSON values and a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pallas_kernels import tuned
from pallas_kernels.target import slug
from rmt_tpu.analysis.autotune import TuningOutcome, changed
from rmt_tpu.estimator import DEVICES
from rmt_tpu.estimator.calibration import error_bar
from rmt_tpu.tables import markdown


def table(done: Sequence[TuningOutcome]) -> str:
    """Return a Markdown table with one row per tuned kernel."""
    titles = "device | kernel | default us | best us | gain | spread | best blocks | source"
    return markdown([titles, *map(_cells, done)]) + "\n"


def _cells(outcome: TuningOutcome) -> list[str]:
    problem, result, entry, note = outcome
    if result is None:
        return [problem.device, problem.name, "", "", "", "", note, entry.source if entry else ""]
    source = "measured" if result.measured else "estimated"
    if problem.platform == "cuda" and not result.measured:
        source += " (bytes, warps, spills)"
    spread = f"{result.spread:.1%}" if result.default.seconds else "-"
    best = changed(result.default.blocks, result.best.blocks) if entry else "the default"
    if entry is not None and entry.implementation is not None:
        best += f" ({entry.implementation} is faster)"
    if entry is None and result.default.time is None:
        best, source = f"none: {result.default.fate}: {result.default.why[:80]}", "-"
    gain = "-" if result.gain is None else f"{result.gain:.1%}"
    times = [_us(result.default.time), _us(result.best.time)]
    return [problem.device, problem.name, *times, gain, spread, best, source]


def _us(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.1f}"


def summary(done: Sequence[TuningOutcome], out: str) -> str:
    """Return a summary of the tuning results as one or two lines of text."""
    searched = [outcome for outcome in done if outcome.result is not None]
    gained = [outcome for outcome in searched if _gained(outcome)]
    late = sum(outcome.result.late for outcome in searched)
    bound = sum(
        outcome.result.default.is_bound and not outcome.result.measured for outcome in searched
    )
    text = f"{len(gained)} of {len(searched)} kernels have better block sizes, in {out}"
    if not searched:
        text = f"{len(done)} of {len(done)} kernels were already in {out}"
    elif not gained:
        text = f"none of {len(searched)} kernels has block sizes clearly faster than the default"
    entries = [outcome.entry for outcome in searched if outcome.entry is not None]
    if plain := sum(entry.implementation == "xla" for entry in entries):
        text += f"; plain JAX is faster than {plain}, as {out} says"
    if unrated := sum(outcome.result.default.time is None for outcome in searched):
        text += f"; the default of {unrated} has no time (see the table)"
    if bound:
        text += (
            f"; {bound} are limited by memory traffic, so that only a measurement on a device can "
            "find better block sizes"
        )
    if late:
        text += f"; {late} searches were not finished within --budget_minutes"
    names = {slug(target.kind): name for name, target in DEVICES.items()}
    if estimated := [names[e.problem.device] for e in searched if not e.result.measured]:
        text += f"\n{error_bar(estimated)}"
    return text


def _gained(outcome: TuningOutcome) -> bool:
    """Return whether a search found block sizes that programs use in place of the default ones."""
    _, result, entry, _ = outcome
    if entry is None or entry.implementation == "xla":
        return False
    return result.best.blocks != result.default.blocks


def values(done: Sequence[TuningOutcome]) -> list[dict[str, Any]]:
    """Return the tuning results as JSON values, with one dict per kernel."""
    return [_values(outcome) for outcome in done]


def _values(outcome: TuningOutcome) -> dict[str, Any]:
    problem, result, entry, note = outcome
    found: dict[str, Any] = {
        "device": problem.device,
        "kernel": problem.kernel,
        "key": dict(problem.key),
        "tokens": problem.tokens,
        "entry": entry and entry.json(),
        "note": note,
    }
    if result is not None:
        found |= {
            "default": tuned.fields(result.default.blocks),
            "best": tuned.fields(result.best.blocks),
            "default_seconds": result.default.time,
            "best_seconds": result.best.time,
            "default_fate": result.default.fate,
            "default_why": result.default.why if result.default.time is None else "",
            "gain": result.gain,
            "spread": result.spread if result.default.seconds else None,
            "tried": sum(trial.fate != "no faster" for trial in result.trials),
            "no_faster": sum(trial.fate == "no faster" for trial in result.trials),
            "left": result.left,
        }
    return found


def draw(done: Sequence[TuningOutcome], path: Path) -> bool:
    """Draw how long each candidate takes, relative to the default block sizes.

    The picture has one row per kernel. If candidates were timed, it shows only those.

    Returns:
      False if there is nothing to draw.

    Raises:
      OSError: the picture cannot be written.
    """
    import matplotlib.pyplot as plt

    rows = [
        outcome for outcome in done if outcome.result is not None and outcome.result.default.time
    ]
    if not rows:
        return False
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.35 * len(rows)), layout="constrained")
    for place, (_, result, _, _) in enumerate(rows):
        shown = [t for t in result.trials if (t.seconds if result.measured else t.time)]
        over = [t.time / result.default.time for t in shown]
        axes.plot(over, [place] * len(over), "o", color="tab:gray", alpha=0.5, markersize=4)
        best = result.best.time / result.default.time
        axes.plot([best], [place], "D", color="tab:red", markersize=6)
    axes.axvline(1, color="black", linewidth=0.8)
    names = [f"{problem.device} {problem.kernel}" for problem, *_ in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    how = "measured" if rows[0].result.measured else "estimated"
    axes.set_xlabel(f"time of a candidate / time of the default, {how}; red: the chosen candidate")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True
