"""The result page of an experiment's plan, with its tables."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rmt_tpu.analysis.sweep import SweepRow, best, name_of
from rmt_tpu.config import RunConfig, overrides
from rmt_tpu.errors import RunError
from rmt_tpu.experiments import pictures
from rmt_tpu.experiments.outcomes import (
    ArmOutcome,
    Estimate,
    by_system,
    differences,
    estimate,
    fit,
    holm,
    paired_test,
    share_of_tokens,
)
from rmt_tpu.experiments.plan import RATE, Arm, Page, Plan, geometric_mean
from rmt_tpu.tables import markdown


def page(
    plan: Plan, seeds: Sequence[int], outcomes: Sequence[ArmOutcome], rows: Sequence[SweepRow]
) -> Page:
    """Return the result page of an experiment's plan whose runs have finished.

    Args:
      plan: the plan.
      seeds: the seeds of the arms' runs.
      outcomes: the results of the plan's arms (models); empty if the plan has only searches.
      rows: the results of the plan's searches; `SweepRow.variant` is the name of the search.
    """
    parts = list(plan.notes)
    if outcomes:
        parts += [arms_table(outcomes, seeds, bold=not plan.registered)]
    if plan.registered:
        parts += [tests_table(plan, outcomes), _TESTS]
    if plan.fits:
        parts += [_FITS, fits_table(outcomes)]
    if rows:
        parts += ["Search (mean held-out loss over the search's seeds; the best point is used):"]
        parts += [searches_table(rows)]
    numbers = {
        "arms": [_numbers(o, seeds) for o in outcomes],
        "searches": [asdict(row) for row in rows],
    }
    text = "\n\n".join(part.rstrip("\n") for part in parts) + "\n"
    if outcomes:
        draw = lambda: pictures.draw(plan, outcomes)
    else:
        draw = lambda: pictures.draw_searches(rows)
    return Page(text, numbers, {"results.png": draw})


_FITS = (
    "Fits of `loss = a x^b`, one per seed, with mean and interval over seeds. The last two "
    "columns: how many times the FLOPs (or weights outside of embeddings) of a system's largest "
    "model the first system would need for the same loss, by the first system's fit. The first "
    "system's own row shows how far that fit is from its own largest model."
)


_TESTS = (
    "Tests of differences that were chosen before training, with p by Student's t over pairs, "
    "adjusted over all tests (Holm), including tests without a result. A difference with an "
    "adjusted p below 0.05 counts as different from 0. All other differences are exploratory. "
    "Deviation: the standard deviation of a paired difference. Detectable: the true difference "
    "that a single test at 5% finds with a probability of 0.8, with this number of pairs and this "
    "deviation."
)


def tests_table(plan: Plan, outcomes: Sequence[ArmOutcome]) -> str:
    """Return a Markdown table with one row per test that was chosen before training."""
    by_name = {o.arm.name: o for o in outcomes}
    tests = {}
    for name in plan.registered:
        tested = by_name[name]
        found = differences(tested, by_name[tested.arm.against])
        tests[name] = paired_test(found) if len(found) > 1 else None
    # In Holm's procedure, a test without a result counts as a test with p = 1.
    adjusted = holm([1.0 if test is None else test.p for test in tests.values()])
    lines = ["tested | minus | difference | deviation | p | adjusted | detectable"]
    for (name, test), p in zip(tests.items(), adjusted, strict=True):
        if test is None:
            none = "none (diverged, or only one seed)"
            lines.append(f"{name} | {by_name[name].arm.against} | {none} | | | |")
            continue
        difference = f"**{test.estimate}**" if p < 0.05 else str(test.estimate)
        lines.append(
            f"{name} | {by_name[name].arm.against} | {difference} | {test.deviation:.4f} "
            f"| {test.p:.2g} | {p:.2g} | {test.detectable:.4f}"
        )
    return markdown(lines) + "\n"


def arms_table(outcomes: Sequence[ArmOutcome], seeds: Sequence[int], *, bold: bool = True) -> str:
    """Return a Markdown table of results with one row per arm (model).

    If `bold` is set, differences in loss whose 95% interval excludes 0 are bold.
    """
    printed = any(o.arm.paper is not None for o in outcomes)
    by_name = {o.arm.name: o for o in outcomes}
    head = ["arm", "weights", "FLOPs", "tokens", "rate", "held-out loss", "minus", "difference",
            "share of tokens, FLOPs"]  # fmt: skip
    lines = [head + ["paper"] * printed]
    for o in outcomes:
        cells = [
            o.arm.name,
            f"{o.weights:,}",
            f"{o.flops:.3g}",
            f"{o.tokens:,}",
            _rates(o.arm.config),
            _losses(o),
            *_against(o, by_name.get(o.arm.against), bold),
        ]
        if printed:
            cells.append("" if o.arm.paper is None else f"{o.arm.paper:.3f}")
        lines.append(cells)
    caption = (
        f"Held-out loss: mean (least..most) over seeds {_seeds_of(outcomes, seeds)}, nats per "
        "token. "
    )
    caption += (
        "Difference: between runs of the same seed, with a 95% interval"
        + ("; **bold** if it excludes 0. " if bold else ". ")
        + "Weights: outside of embeddings. Share of tokens, FLOPs: the share of the other arm's "
        "tokens, and of its FLOPs, after which this arm reaches the other's final loss."
    )
    return f"{markdown(lines)}\n\n{caption}\n"


def _seeds_of(outcomes: Sequence[ArmOutcome], seeds: Sequence[int]) -> str:
    """Return the seeds as text, and for arms with fewer seeds theirs and the arms' names."""
    fewer: dict[tuple[int, ...], list[str]] = {}
    for o in outcomes:
        if (own := tuple(seeds[: o.arm.num_seeds])) != tuple(seeds):
            fewer.setdefault(own, []).append(o.arm.name)
    text = ", ".join(map(str, seeds))
    for own, names in fewer.items():
        text += f" ({', '.join(names)}: only {', '.join(map(str, own))})"
    return text


def _rates(config: RunConfig) -> str:
    factor = config.train.depth_rate
    rate = f"{config.train.optimizer.learning_rate:.3g}"
    return rate if factor is None else f"{rate}, x{factor:.3g} over depth"


def _losses(o: ArmOutcome) -> str:
    known = [loss for loss in o.losses if loss is not None]
    if not o.complete:
        return f"diverged: {len(o.losses) - len(known)} of {len(o.losses)}"
    return (
        f"{o.mean:.4f}" if len(known) == 1 else f"{o.mean:.4f} ({min(known):.4f}..{max(known):.4f})"
    )


def _against(o: ArmOutcome, other: ArmOutcome | None, bold: bool) -> list[str]:
    found = differences(o, other) if other else []
    if not found:
        return [other.arm.name if other else "", "", ""]
    mean = estimate(found)
    difference = f"**{mean}**" if bold and mean.excludes_zero else str(mean)
    if any(len(tokens) < 2 for tokens, _ in o.curves):
        return [other.arm.name, difference, ""]
    share = share_of_tokens(o, other)
    if share is None:
        return [other.arm.name, difference, "not reached"]
    flops = share * other.tokens / o.tokens * o.flops / other.flops
    return [other.arm.name, difference, f"{share:.0%}, {flops:.0%}"]


def fits_table(outcomes: Sequence[ArmOutcome]) -> str:
    """Return a Markdown table of the exponents of each system's power laws.

    The last columns are the FLOPs and weights with which the first system reaches the loss of the
    row's largest model, according to its own power laws.
    """
    systems = by_system(outcomes)
    first = next(iter(systems))
    lines = [
        "system | exponent of FLOPs | exponent of weights | FLOPs the first system would need | "
        "weights it would need"
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
            own = math.log(getattr(largest, x))
            needed = [other - own for other in base.reaching(largest.losses)]
            if not all(map(math.isfinite, needed)):
                cells.append("no size would do")
                continue
            mean, half = estimate(needed)
            ends = "" if math.isnan(half) else f" ({_times(mean - half)}..{_times(mean + half)})"
            cells.append(f"{_times(mean)} times{ends}")
        lines.append(cells)
    return markdown(lines) + "\n"


def _times(log: float) -> str:
    return f"{math.exp(log):.2f}" if log < math.log(1e6) else "over 1e6"


def _plain(value: Estimate) -> str:
    return f"{value.mean:.4f}" + ("" if math.isnan(value.half) else f" ± {value.half:.4f}")


def searches_table(rows: Sequence[SweepRow]) -> str:
    """Return a Markdown table of the losses of searches, with one column per learning rate.

    Each search has one row per combination of its other values. The best point of a search is
    marked if its rate is the lowest or the highest that was tried.
    """
    rates = sorted({row.point[RATE] for row in rows})
    lines = [["search", *(f"{rate:.3g}" for rate in rates)]]
    of_search: dict[str, list[SweepRow]] = {}
    for row in rows:
        of_search.setdefault(row.variant, []).append(row)
    for name, search_rows in of_search.items():
        (best_row,) = best(search_rows)
        own_rates = [row.point[RATE] for row in search_rows]
        at_edge = best_row.point[RATE] in (min(own_rates), max(own_rates))
        besides: dict[str, dict[float, SweepRow]] = {}
        for row in search_rows:
            others = {path: value for path, value in row.point.items() if path != RATE}
            besides.setdefault(name_of(others), {})[row.point[RATE]] = row
        for beside, at in besides.items():
            cells = []
            for rate in rates:
                row = at.get(rate)
                loss = math.nan if row is None else row.loss
                text = f"{loss:.4f}" if math.isfinite(loss) else "diverged"
                if row == best_row:
                    text = f"**{text}**" + " (edge)" * at_edge
                cells.append("" if row is None else text)
            lines.append([", ".join(filter(None, (name, beside))), *cells])
    return markdown(lines) + "\n"


def with_best(
    config: RunConfig, plan: Plan, arm: Arm, rows: Mapping[str, Sequence[SweepRow]]
) -> RunConfig:
    """Return an arm's run config with the values of the best point of its search.

    If the arm uses several searches, it gets the geometric mean of their best points.

    Raises:
      RunError: every point of a search diverged.
    """
    best_rows = {name: best(rows[name])[0] for name in plan.searches_of(arm)}
    for name, row in best_rows.items():
        if not math.isfinite(row.loss):
            raise RunError(
                f"every point of the search {name} diverged, so {arm.name} has no learning rate"
            )
    found = [row.point for row in best_rows.values()]
    return overrides.apply(config, geometric_mean(found)) if found else config


def _numbers(o: ArmOutcome, seeds: Sequence[int]) -> dict:
    return {
        "name": o.arm.name, "system": o.arm.system, "against": o.arm.against, "x": o.arm.x,
        "parameters": o.parameters, "weights": o.weights, "tokens": o.tokens, "flops": o.flops,
        "learning_rate": o.arm.config.train.optimizer.learning_rate,
        "depth_rate": o.arm.config.train.depth_rate,
        "seeds": list(seeds[: o.arm.num_seeds]), "held_out_losses": list(o.losses),
        "paper": o.arm.paper,
    }  # fmt: skip
