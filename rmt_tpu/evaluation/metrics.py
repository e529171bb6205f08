"""Metrics of a task with their errors, and differences of two models on the same documents."""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float

Told = Literal["share", "perplexity", "bits"]


@dataclass(frozen=True)
class Metric:
    """A ratio of sums over documents, `rate = sum(total) / sum(weight)`, and how it is reported.

    Attributes:
      name: the harness's name of the metric.
      unit: the unit that the rate is per.
      told: how the rate is reported: "share" as it is, "perplexity" as the exponential of nats,
        "bits" divided by ln 2.
      total: the numerator of each document.
      weight: the denominator of each document; ones for a mean.
    """

    name: str
    unit: str
    told: Told
    total: Float[np.ndarray, " documents"]
    weight: Float[np.ndarray, " documents"]

    @property
    def rate(self) -> float:
        return float(math.fsum(self.total) / math.fsum(self.weight))

    @property
    def influence(self) -> Float[np.ndarray, " documents"]:
        """The amount by which each document moves the rate."""
        return (self.total - self.rate * self.weight) / math.fsum(self.weight)

    @property
    def value(self) -> float:
        if self.told == "perplexity":
            return math.exp(min(self.rate, 700.0))  # the largest float is e^709
        return self.rate / math.log(2) if self.told == "bits" else self.rate

    @property
    def error(self) -> float | None:
        """The standard error of the value for randomly drawn documents; None for one document.

        It is exact for a mean, and to first order otherwise.
        """
        error = _error(self.influence)
        if error is None:
            return None
        slope = {"share": 1.0, "perplexity": self.value, "bits": 1 / math.log(2)}[self.told]
        return slope * error

    def json(self) -> dict[str, Any]:
        return {"value": self.value, "stderr": self.error, "unit": self.unit}


def _error(influence: Float[np.ndarray, " documents"]) -> float | None:
    count = len(influence)
    if count < 2:
        return None
    return math.sqrt(count / (count - 1) * math.fsum(np.square(influence)))


class Difference(NamedTuple):
    """The difference of two models' rates on the same documents, in shares or nats.

    Attributes:
      value: the rate of one model less the rate of the other.
      error: the standard error, from the differences of documents.
      unpaired: the standard error if each model had documents of its own.
      p: how likely so large a difference is if there is none: by McNemar's exact test for answers
        that are right or wrong, by the normal distribution for others.
    """

    value: float
    error: float | None
    unpaired: float | None
    p: float | None


def difference(one: Metric, other: Metric) -> Difference:
    """Return the difference of two models' metrics on the same documents.

    Raises:
      ValueError: the metrics are of different documents.
    """
    if one.name != other.name or len(one.total) != len(other.total):
        raise ValueError("two models are compared by the same metric of the same documents")
    error = _error(one.influence - other.influence)
    apart = [_error(m.influence) for m in (one, other)]
    unpaired = None if error is None else math.hypot(*apart)
    value = one.rate - other.rate
    return Difference(value, error, unpaired, _p(one, other, value, error))


def _p(one: Metric, other: Metric, value: float, error: float | None) -> float | None:
    from scipy import stats

    if one.told == "share":
        better = int(np.sum(one.total > other.total))
        worse = int(np.sum(one.total < other.total))
        if better + worse == 0:
            return 1.0
        return float(stats.binomtest(better, better + worse).pvalue)
    if not error:
        return None
    return float(2 * stats.norm.sf(abs(value) / error))
