"""The page of what was trained: its tables."""

import math
from collections.abc import Sequence
from dataclasses import asdict

from rmt_tpu.analysis.sweep import Row, best
from rmt_tpu.config import RunConfig
from rmt_tpu.experiments import pictures
from rmt_tpu.experiments import plan as plans
from rmt_tpu.experiments.outcomes import (
    Estimate,
    Outcome,
    by_system,
    differences,
    estimate,
    fit,
    share_of_tokens,
)
from rmt_tpu.experiments.plan import Page, Plan

_RATE = "train.optimizer.learning_rate"


def page(
    plan: Plan, seeds: Sequence[int], outcomes: Sequence[Outcome], rows: Sequence[Row]
) -> Page:
    """Of complete runs.

    Args:
      plan: what was trained.
      seeds: of each arm's runs.
      outcomes: of its arms.
      rows: of its searches; `variant` is the system.
    """
    parts = [*plan.notes, arms_table(outcomes, seeds)]
    if plan.fits:
        parts += [_FITS, fits_table(outcomes)]
    if rows:
        parts += ["Searched rates (held-out loss of the first seed; the best is taken):"]
        parts += [rates_table(rows)]
    numbers = {
        "arms": [_numbers(o, seeds) for o in outcomes],
        "searches": [asdict(row) for row in rows],
    }
    text = "\n\n".join(part.rstrip("\n") for part in parts) + "\n"
    return Page(text, numbers, {"results.png": lambda: pictures.draw(plan, outcomes)})


_FITS = (
    "`loss = a x^b`, of each seed by itself, mean and interval over seeds. The last columns: how "
    "many times the FLOPs, or weights outside of embeddings, of its largest model the first "
    "system would need for that model's loss, by the first system's fit; its own row says how far "
    "that fit is from its own largest model."
)


def arms_table(outcomes: Sequence[Outcome], seeds: Sequence[int]) -> str:
    """A row an arm."""
    printed = any(o.arm.paper is not None for o in outcomes)
    by_name = {o.arm.name: o for o in outcomes}
    head = ["arm", "weights", "FLOPs", "tokens", "rate", "held out", "minus", "difference",
            "tokens, FLOPs to its loss"]  # fmt: skip
    lines = ["| " + " | ".join(head + ["the paper"] * printed) + " |"]
    lines.append("|---" * (len(head) + printed) + "|")
    for o in outcomes:
        cells = [
            o.arm.name,
            f"{o.weights:,}",
            f"{o.flops:.3g}",
            f"{o.tokens:,}",
            f"{o.arm.config.train.optimizer.learning_rate:.3g}",
            _losses(o),
            *_against(o, by_name.get(o.arm.against)),
        ]
        if printed:
            cells.append("" if o.arm.paper is None else f"{o.arm.paper:.3f}")
        lines.append("| " + " | ".join(cells) + " |")
    said = f"Held out: mean (least..most) over seeds {', '.join(map(str, seeds))}, nats a token. "
    said += (
        "Difference: of the same seeds, with an interval of 95%; **bold** where that leaves out 0. "
        "Weights: outside of embeddings. Last: the share of the other's tokens, and of its FLOPs, "
        "at which its final loss is reached."
    )
    return "\n".join([*lines, "", said]) + "\n"


def _losses(o: Outcome) -> str:
    known = [loss for loss in o.losses if loss is not None]
    if not o.complete:
        return f"diverged, {len(o.losses) - len(known)} of {len(o.losses)}"
    return (
        f"{o.mean:.4f}" if len(known) == 1 else f"{o.mean:.4f} ({min(known):.4f}..{max(known):.4f})"
    )


def _against(o: Outcome, other: Outcome | None) -> list[str]:
    found = differences(o, other) if other else []
    if not found:
        return [other.arm.name if other else "", "", ""]
    of = estimate(found)
    difference = f"**{of}**" if of.sure else str(of)
    share = share_of_tokens(o, other)
    if share is None:
        return [other.arm.name, difference, "not reached"]
    flops = share * other.tokens / o.tokens * o.flops / other.flops
    return [other.arm.name, difference, f"{share:.0%}, {flops:.0%}"]


def fits_table(outcomes: Sequence[Outcome]) -> str:
    """Exponents of each system, and what the first system needs for the loss of its largest."""
    systems = by_system(outcomes)
    first = next(iter(systems))
    lines = [
        "| system | exponent of FLOPs | exponent of weights | FLOPs that the first would need | "
        "weights |",
        "|---|---|---|---|---|",
    ]
    fits = {name: {x: fit(of, x) for x in ("flops", "weights")} for name, of in systems.items()}
    for name, of in systems.items():
        cells = [name]
        for x in ("flops", "weights"):
            found = fits[name][x]
            cells.append(_plain(estimate(found.slopes)) if found else "")
        for x in ("flops", "weights"):
            base, largest = fits[first][x], of[-1]
            if base is None or not largest.complete:
                cells.append("")
                continue
            needed = [
                math.log(other / getattr(largest, x)) for other in base.reaching(largest.losses)
            ]
            mean, half = estimate(needed)
            ends = (
                ""
                if math.isnan(half)
                else f" ({math.exp(mean - half):.2f}..{math.exp(mean + half):.2f})"
            )
            cells.append(f"{math.exp(mean):.2f} times{ends}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _plain(of: Estimate) -> str:
    return f"{of.mean:.4f}" + ("" if math.isnan(of.half) else f" ± {of.half:.4f}")


def rates_table(rows: Sequence[Row]) -> str:
    """A row a system, a column a rate."""
    rates = list(dict.fromkeys(row.point[_RATE] for row in rows))
    lines = ["| system | " + " | ".join(f"{rate:.3g}" for rate in rates) + " |"]
    lines.append("|---" * (len(rates) + 1) + "|")
    for system in dict.fromkeys(row.variant for row in rows):
        of = {row.point[_RATE]: row for row in rows if row.variant == system}
        taken = best(list(of.values()))[0].point[_RATE]
        cells = []
        for rate in rates:
            loss = of[rate].loss
            text = f"{loss:.4f}" if math.isfinite(loss) else "diverged"
            cells.append(f"**{text}**" if rate == taken else text)
        lines.append(f"| {system} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def with_best_rate(config: RunConfig, rows: Sequence[Row]) -> RunConfig:
    """The run at the rate that is best among the rows of its system."""
    return plans.with_rate(config, best(list(rows))[0].point[_RATE])


def _numbers(o: Outcome, seeds: Sequence[int]) -> dict:
    return {
        "name": o.arm.name, "system": o.arm.system, "against": o.arm.against, "x": o.arm.x,
        "parameters": o.parameters, "weights": o.weights, "tokens": o.tokens, "flops": o.flops,
        "learning_rate": o.arm.config.train.optimizer.learning_rate,
        "seeds": list(seeds), "held_out_losses": list(o.losses), "paper": o.arm.paper,
    }  # fmt: skip
