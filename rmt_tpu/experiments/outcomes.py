"""Results of trained arms (models of an experiment), with comparisons, tests and fits.

Systems can be compared seed by seed. Runs with the same seed read the same text in the same order,
and all weights that they have in common start with the same values. Intervals are 95% confidence
intervals of the mean over seeds, by Student's t.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rmt_tpu import cost
from rmt_tpu.experiments import plan as plans
from rmt_tpu.experiments.plan import Arm
from rmt_tpu.experiments.records import Record


class Estimate(NamedTuple):
    """A mean over seeds, with the half-width of its 95% interval (NaN for a single seed)."""

    mean: float
    half: float

    def __str__(self) -> str:
        return f"{self.mean:+.4f}" + ("" if math.isnan(self.half) else f" ± {self.half:.4f}")

    @property
    def excludes_zero(self) -> bool:
        """Whether the 95% interval of the mean excludes 0."""
        return abs(self.mean) > self.half


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of `values`, one per seed, with the half-width of its 95% interval."""
    from scipy import stats

    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, math.nan)
    half = stats.t.ppf(0.975, count - 1) * np.std(values, ddof=1) / math.sqrt(count)
    return Estimate(mean, float(half))


@dataclass(frozen=True)
class ArmOutcome:
    """The results of an arm (a model of an experiment) over its runs, one per seed.

    Attributes:
      arm: the arm (model of an experiment), with the learning rate that its runs used.
      parameters, weights: the number of all parameters, and the number of parameters outside of
        the embedding and unembedding.
      flops, tokens: the training FLOPs and the training tokens per run.
      losses: the final held-out loss of each seed's run, in nats per token; None for a diverged
        run.
      curves: for each seed, the numbers of tokens at the evaluations, and the held-out losses.
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
        """The mean over seeds of the final held-out loss, in nats per token."""
        return math.fsum(self.losses) / len(self.losses)

    @property
    def complete(self) -> bool:
        """Whether the runs of all seeds finished without divergence."""
        return None not in self.losses


def arm_outcome(arm: Arm, records: Sequence[Record]) -> ArmOutcome:
    """Return the outcome of an arm (a model) from the records of its runs, one per seed."""
    counted = cost.parameters(arm.config.model)
    total = sum(counted.values())
    per_step = arm.config.train.batch_size * arm.config.data.seq_len
    return ArmOutcome(
        arm,
        total,
        total - counted["embedding"] - counted["unembedding"],
        plans.tokens(arm.config),
        plans.flops(arm.config),
        tuple(record.loss for record in records),
        tuple(([step * per_step for step in r.steps], r.losses) for r in records),
    )


def differences(outcome: ArmOutcome, base: ArmOutcome) -> list[float]:
    """Return the final losses of an arm minus those of the arm `base`, seed by seed.

    The list is empty if a run of either arm diverged. If one arm has fewer seeds, only these are
    compared. They must be the first seeds of the other arm.
    """
    if not (outcome.complete and base.complete):
        return []
    return [a - b for a, b in zip(outcome.losses, base.losses, strict=False)]


class PairedTest(NamedTuple):
    """A two-sided paired t-test of whether the mean difference is 0.

    Attributes:
      estimate: the mean difference with its interval.
      deviation: the estimated standard deviation of the differences.
      p: the p-value.
      detectable: the true difference that a test with this number of pairs detects with a power of
        0.8, at the 5% level.
    """

    estimate: Estimate
    deviation: float
    p: float
    detectable: float


def paired_test(found: Sequence[float]) -> PairedTest:
    """Test whether the mean of two or more paired differences is 0."""
    from scipy import optimize, stats

    count, mean = len(found), estimate(found)
    s = float(np.std(found, ddof=1))
    freedom, edge = count - 1, stats.t.ppf(0.975, count - 1)
    # The maximum avoids a division by 0 if all differences are equal.
    t = abs(mean.mean) / max(s / math.sqrt(count), 1e-300)
    p = float(2 * stats.t.sf(t, freedom)) if mean.mean else 1.0

    def lacks(shift: float) -> float:
        """Return the test's power minus 0.8 if the true mean is `shift` standard errors from 0."""
        # The other tail of the distribution is negligible: its probability is at most about 1e-6.
        return stats.nct.sf(edge, freedom, shift) - 0.8

    detectable = optimize.brentq(lacks, 0.0, 100.0) * s / math.sqrt(count)
    return PairedTest(mean, s, p, float(detectable))


def holm(ps: Sequence[float]) -> list[float]:
    """Return p-values adjusted for multiple tests by Holm's procedure (Holm 1979).

    If adjusted p-values below 5% are called significant, then the probability of one or more false
    positives is at most 5%.
    """
    adjusted, running_max = [0.0] * len(ps), 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        running_max = max(running_max, min(1.0, (len(ps) - rank) * ps[index]))
        adjusted[index] = running_max
    return adjusted


def share_of_tokens(outcome: ArmOutcome, base: ArmOutcome) -> float | None:
    """Return the fraction of the tokens of `base` that `outcome` needs for the same final loss.

    Table 3 of the RMT paper reports this fraction. Losses between evaluations are interpolated
    linearly in log(tokens). The result is a mean over seeds. It is None if a run does not reach the
    loss.
    """
    shares = []
    for (tokens, losses), goal in zip(outcome.curves, base.losses, strict=False):
        below = [i for i, loss in enumerate(losses) if goal is not None and loss <= goal]
        if not below or not outcome.complete:
            return None
        last = below[0]
        reached = tokens[last]
        if last:
            high, low = losses[last - 1], losses[last]
            part = (high - goal) / (high - low)
            before = math.log(tokens[last - 1])
            reached = math.exp(before + part * (math.log(tokens[last]) - before))
        shares.append(reached / base.tokens)
    return math.fsum(shares) / len(shares)


# Fitting power laws ---------------------------------------------------------------------------


class Fit(NamedTuple):
    """Power laws `loss = exp(intercept) * x^slope`, one fitted to each seed's runs."""

    slopes: list[float]
    intercepts: list[float]

    def at(self, x: int | float) -> list[float]:
        """Return the loss that the fit of each seed predicts at `x`."""
        return [
            math.exp(b + a * math.log(x))
            for a, b in zip(self.slopes, self.intercepts, strict=True)
        ]  # fmt: skip

    def reaching(self, losses: Sequence[float]) -> list[float]:
        """Return, for each seed, the log of the x at which its fit predicts its loss in `losses`.

        The result is infinite if a fit does not predict a lower loss for a larger x. If there are
        fewer losses than fits, or fewer fits than losses, the result has only the first seeds. The
        fewer must be those of the first seeds.
        """
        return [
            (math.log(loss) - b) / a if a < 0 else math.inf
            for loss, a, b in zip(losses, self.slopes, self.intercepts, strict=False)
        ]


def fit(outcomes: Sequence[ArmOutcome], x: str) -> Fit | None:
    """Fit a power law to each seed's losses, by least squares on logarithms.

    Return None if there are fewer than three points. Outcomes with a run that diverged are left
    out. If some of the others have fewer seeds, only these are fitted.

    Args:
      outcomes: the outcomes of one system at several sizes.
      x: the field of ArmOutcome to fit over: "flops" or "weights".
    """
    outcomes = [o for o in outcomes if o.complete]
    if len(outcomes) < 3:
        return None
    at, losses_of_arms = np.log([getattr(o, x) for o in outcomes]), [o.losses for o in outcomes]
    lines = [np.polyfit(at, np.log(losses), 1) for losses in zip(*losses_of_arms, strict=False)]
    return Fit([float(a) for a, _ in lines], [float(b) for _, b in lines])


def by_system(outcomes: Sequence[ArmOutcome]) -> dict[str, list[ArmOutcome]]:
    """Group outcomes by system (kind of residual), in the order of first occurrence."""
    found: dict[str, list[ArmOutcome]] = {}
    for o in outcomes:
        found.setdefault(o.arm.system, []).append(o)
    return found
