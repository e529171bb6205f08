"""What trained arms reached, compared seed by seed, and fits with intervals.

A seed also picks the text that is held out, so that losses of different seeds differ by more than
systems do: systems are compared seed by seed. Intervals are of 95%, of the mean over seeds, by
Student's t.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rmt_tpu import cost
from rmt_tpu.analysis.sweep import held_out_loss
from rmt_tpu.experiments import plan as plans
from rmt_tpu.experiments.plan import Arm
from rmt_tpu.storage import Folder
from rmt_tpu.training.metrics import read_metrics, series


class Estimate(NamedTuple):
    """A mean over seeds and half of its interval; the half of one seed is not a number."""

    mean: float
    half: float

    def __str__(self) -> str:
        return f"{self.mean:+.4f}" + ("" if math.isnan(self.half) else f" ± {self.half:.4f}")

    @property
    def sure(self) -> bool:
        """Whether the interval leaves out 0."""
        return abs(self.mean) > self.half


def estimate(values: Sequence[float]) -> Estimate:
    """Of one value a seed."""
    from scipy import stats

    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, math.nan)
    half = stats.t.ppf(0.975, count - 1) * np.std(values, ddof=1) / math.sqrt(count)
    return Estimate(mean, float(half))


@dataclass(frozen=True)
class Outcome:
    """What the runs of an arm reached.

    Attributes:
      arm: with the rate that it had.
      parameters, weights: all of them, and those outside of embedding and unembedding.
      flops, tokens: of training one.
      losses: held out, at the end, in nats a token, a seed; None where the run diverged.
      curves: of each seed, tokens and held-out losses at them.
    """

    arm: Arm
    parameters: int
    weights: int
    tokens: int
    flops: float
    losses: tuple[float | None, ...]
    curves: tuple[tuple[list[int], list[float]], ...]

    @property
    def mean(self) -> float:
        """Of the losses."""
        return math.fsum(self.losses) / len(self.losses)

    @property
    def complete(self) -> bool:
        """Whether no run diverged."""
        return None not in self.losses


def outcome(arm: Arm, folders: Sequence[Folder]) -> Outcome:
    """Of complete runs, a folder a seed."""
    counted = cost.parameters(arm.config.model)
    total = sum(counted.values())
    per_step = arm.config.train.batch_size * arm.config.data.seq_len
    curves = [series(read_metrics(folder), "eval/loss") for folder in folders]
    return Outcome(
        arm,
        total,
        total - counted["embedding"] - counted["unembedding"],
        plans.tokens(arm.config),
        plans.flops(arm.config),
        tuple(map(held_out_loss, folders)),
        tuple(([step * per_step for step in steps], losses) for steps, losses in curves),
    )


def differences(one: Outcome, other: Outcome) -> list[float]:
    """Losses of `one` minus those of `other`, seed by seed; empty if a run diverged."""
    if not (one.complete and other.complete):
        return []
    return [a - b for a, b in zip(one.losses, other.losses, strict=True)]


def share_of_tokens(one: Outcome, other: Outcome) -> float | None:
    """Of the tokens that `other` read, what `one` needs for its loss (Table 3 of the RMT paper).

    Between evaluations by straight lines over log tokens; the mean over seeds. None if a seed does
    not get there.
    """
    shares = []
    for (tokens, losses), goal in zip(one.curves, other.losses, strict=True):
        below = [i for i, loss in enumerate(losses) if goal is not None and loss <= goal]
        if not below or not one.complete:
            return None
        last = below[0]
        reached = tokens[last]
        if last:
            high, low = losses[last - 1], losses[last]
            part = (high - goal) / (high - low)
            before = math.log(tokens[last - 1])
            reached = math.exp(before + part * (math.log(tokens[last]) - before))
        shares.append(reached / other.tokens)
    return math.fsum(shares) / len(shares)


# Fits -----------------------------------------------------------------------------------------


class Fit(NamedTuple):
    """`loss = exp(intercept) * x^slope`, of each seed."""

    slopes: list[float]
    intercepts: list[float]

    def at(self, x: int | float) -> list[float]:
        """The loss there, of each seed."""
        return [
            math.exp(b + a * math.log(x))
            for a, b in zip(self.slopes, self.intercepts, strict=True)
        ]  # fmt: skip

    def reaching(self, losses: Sequence[float]) -> list[float]:
        """Where each seed's fit has its loss."""
        return [
            math.exp((math.log(loss) - b) / a)
            for loss, a, b in zip(losses, self.slopes, self.intercepts, strict=True)
        ]


def fit(outcomes: Sequence[Outcome], x: str) -> Fit | None:
    """By least squares over logarithms, of each seed by itself; None of fewer than three points.

    Args:
      outcomes: of one system.
      x: a field of Outcome, "flops" or "weights".
    """
    outcomes = [o for o in outcomes if o.complete]
    if len(outcomes) < 3:
        return None
    at, each = np.log([getattr(o, x) for o in outcomes]), [o.losses for o in outcomes]
    lines = [np.polyfit(at, np.log(losses), 1) for losses in zip(*each, strict=False)]
    return Fit([float(a) for a, _ in lines], [float(b) for _, b in lines])


def by_system(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """In the order in which they come."""
    found: dict[str, list[Outcome]] = {}
    for o in outcomes:
        found.setdefault(o.arm.system, []).append(o)
    return found
