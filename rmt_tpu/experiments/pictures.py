"""Pictures of an experiment's results."""

import math
from collections.abc import Sequence

import numpy as np

from rmt_tpu.analysis.sweep import SweepRow
from rmt_tpu.experiments.outcomes import ArmOutcome, by_system, differences, estimate, fit
from rmt_tpu.experiments.plan import DEPTH_RATE, RATE, Plan
from rmt_tpu.runs.plots import line_style


def draw(plan: Plan, outcomes: Sequence[ArmOutcome]):
    """Draw the results of an experiment's plan, and return the figure.

    If the plan has fits, the figure shows losses by model size. If the plan varies one size, it
    shows losses over that size. Otherwise it shows differences between the plan's arms (models).
    """
    draw_form = _draw_ladder if plan.fits else (_draw_over_x if plan.x else _draw_differences)
    return draw_form(plan, outcomes)


def _draw_ladder(plan: Plan, outcomes: Sequence[ArmOutcome]):
    """Draw losses over FLOPs and weights with fits, and differences from the first system."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.8), layout="constrained")
    panels = figure.subplots(1, 3)
    by_name = {o.arm.name: o for o in outcomes}
    for index, (system, members) in enumerate(by_system(outcomes).items()):
        style, members = line_style(index), [o for o in members if o.complete]
        for axes, x in zip(panels, ("flops", "weights"), strict=False):
            at = [getattr(o, x) for o in members]
            axes.plot(at, [o.mean for o in members], label=system, **style | {"linestyle": "none"})
            if found := fit(members, x):
                ends = [min(at), max(at)]
                losses = [math.exp(np.mean(np.log(found.at(end)))) for end in ends]
                axes.plot(ends, losses, color=style["color"], linewidth=1)
        paired = [(o, differences(o, by_name[o.arm.against])) for o in members if o.arm.against]
        paired = [(o, estimate(found)) for o, found in paired if found]
        if paired:
            at, means = [o.flops for o, _ in paired], [e.mean for _, e in paired]
            halves = [0 if math.isnan(e.half) else e.half for _, e in paired]
            panels[2].errorbar(at, means, halves, capsize=3, label=system, **style)
    for axes, label in zip(
        panels, ("training FLOPs", "weights outside of embeddings"), strict=False
    ):
        axes.set(xlabel=label, ylabel="held-out loss, mean over seeds", xscale="log", yscale="log")
        axes.yaxis.set(major_formatter="{x:.2f}", minor_formatter="{x:.2f}")
    panels[2].axhline(0, color="0.5", linewidth=1)
    first = next(iter(by_system(outcomes)))
    panels[2].set(
        xlabel="training FLOPs",
        ylabel=f"held-out loss minus {first}'s, same size and seed",
        xscale="log",
    )
    panels[2].set_title("bars: 95% over seeds", fontsize=9)
    for axes in panels:
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8)
    return figure


def _draw_over_x(plan: Plan, outcomes: Sequence[ArmOutcome]):
    """Draw losses, differences and the paper's losses against the size that the plan varies.

    The size is `Arm.x`. A difference is the loss of an arm (a model) minus the loss of the arm that
    it is compared with.
    """
    from matplotlib.figure import Figure

    printed = [o for o in outcomes if o.arm.paper is not None and o.arm.x is not None]
    columns = 2 + bool(printed)
    figure = Figure(figsize=(5 * columns, 4.5), layout="constrained")
    panels = figure.subplots(1, columns)
    by_name = {o.arm.name: o for o in outcomes}
    sizes = sorted({o.arm.x for o in outcomes if o.arm.x is not None})
    for index, (system, members) in enumerate(by_system(outcomes).items()):
        members = sorted(
            (o for o in members if o.complete and o.arm.x is not None), key=lambda o: o.arm.x
        )
        style = line_style(index)
        for losses in zip(*(o.losses for o in members), strict=False):
            panels[0].plot([o.arm.x for o in members], losses, color=style["color"], alpha=0.3)
        if members:
            panels[0].plot(
                [o.arm.x for o in members], [o.mean for o in members], label=system, **style
            )
        paired = [(o, differences(o, by_name[o.arm.against])) for o in members if o.arm.against]
        paired = [(o.arm.x, estimate(found)) for o, found in paired if found]
        if paired:
            halves = [0 if math.isnan(e.half) else e.half for _, e in paired]
            at, means = [x for x, _ in paired], [e.mean for _, e in paired]
            panels[1].errorbar(at, means, halves, capsize=3, label=system, **style)
    named = list(dict.fromkeys(o.arm.against for o in outcomes if o.arm.against))
    panels[0].set(xlabel=plan.x, ylabel="held-out loss; faint: seeds")
    base = named[0] if len(named) == 1 else "its base"
    panels[1].set(xlabel=plan.x, ylabel=f"held-out loss minus {base}'s, same seed")
    panels[1].axhline(0, color="0.5", linewidth=1)
    panels[1].set_title("bars: 95% over seeds", fontsize=9)
    if printed:
        panels[2].plot(
            [o.arm.x for o in printed], [o.arm.paper for o in printed], "o-", color="0.3"
        )
        panels[2].set(xlabel=plan.x, ylabel="the paper's loss")
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{x:g}" for x in sizes])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    return figure


def _draw_differences(plan: Plan, outcomes: Sequence[ArmOutcome]):
    """Draw one row per arm (model): its loss difference, the interval, and the paper's value."""
    from matplotlib.figure import Figure

    by_name = {o.arm.name: o for o in outcomes}
    rows = [
        (o, estimate(found))
        for o in outcomes
        if o.arm.against and (found := differences(o, by_name[o.arm.against]))
    ]
    bases = {name: by_name[name] for name in dict.fromkeys(o.arm.against for o, _ in rows)}
    printed = [
        None if None in (o.arm.paper, bases[o.arm.against].arm.paper)
        else o.arm.paper - bases[o.arm.against].arm.paper
        for o, _ in rows
    ]  # fmt: skip
    columns = 1 + any(loss is not None for loss in printed)
    figure = Figure(figsize=(6 * columns, 1.4 + 0.34 * len(rows)), layout="constrained")
    panels = figure.subplots(1, columns, sharey=True, squeeze=False)[0]
    at = range(len(rows))
    halves = [0 if math.isnan(e.half) else e.half for _, e in rows]
    panels[0].errorbar([e.mean for _, e in rows], at, xerr=halves, fmt="o", capsize=3)
    panels[0].set_yticks(at, [o.arm.name for o, _ in rows])
    panels[0].invert_yaxis()
    panels[0].set(xlabel=f"held-out loss minus {', '.join(bases)}'s, same seed; bars: 95%")
    if columns > 1:
        known = [(loss, row) for loss, row in zip(printed, at, strict=True) if loss is not None]
        panels[1].plot(*zip(*known, strict=True), "D", color="0.3")
        panels[1].set(xlabel="the same difference between the paper's losses")
    for axes in panels:
        axes.axvline(0, color="0.5", linewidth=1)
        axes.grid(axis="x", alpha=0.3)
    return figure


def draw_searches(rows: Sequence[SweepRow]):
    """Draw the losses of each search over the rate factor, with one line per learning rate.

    A search without a rate factor has one point per learning rate, drawn at factor 1.
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row.variant for row in rows))
    figure = Figure(figsize=(4 * len(names), 4), layout="constrained")
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        members = [row for row in rows if row.variant == name]
        for index, rate in enumerate(dict.fromkeys(row.point[RATE] for row in members)):
            line = [row for row in members if row.point[RATE] == rate and math.isfinite(row.loss)]
            factors = [row.point.get(DEPTH_RATE, 1.0) for row in line]
            losses = [row.loss for row in line]
            axes.plot(factors, losses, label=f"rate {rate:.3g}", **line_style(index))
        axes.set(xlabel="rate factor over depth", ylabel="held-out loss", xscale="log")
        axes.set_title(name, fontsize=9)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return figure
