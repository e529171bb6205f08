"""What a task gives, with its error, and how far two models are apart on the same documents."""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float

Told = Literal["share", "perplexity", "bits"]


@dataclass(frozen=True)
class Metric:
    """A ratio of sums over documents, `rate = sum(total) / sum(weight)`, and what is told of it.

    Attributes:
      name: as the harness has it.
      unit: that it is per.
      told: the rate itself; its exponential, of nats; or it divided by ln 2.
      total: of each document.
      weight: of each document; ones for a mean.
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
        """How much each document moves the rate."""
        return (self.total - self.rate * self.weight) / math.fsum(self.weight)

    @property
    def value(self) -> float:
        if self.told == "perplexity":
            return math.exp(min(self.rate, 700.0))  # the largest float is e^709
        return self.rate / math.log(2) if self.told == "bits" else self.rate

    @property
    def error(self) -> float | None:
        """The standard error of the value, as far as documents are drawn at random; of one: None.

        Of a mean it is that of the mean; of the others it is to first order.
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
    """Of one model's rate from another's, on the same documents: shares, or nats.

    Attributes:
      value: one less the other.
      error: the standard error of the differences of documents.
      unpaired: what it would be of other documents for each.
      p: how likely so large a difference is, where there is none: of answers that are right or
        wrong by McNemar's exact test, of others by the normal distribution.
    """

    value: float
    error: float | None
    unpaired: float | None
    p: float | None


def difference(one: Metric, other: Metric) -> Difference:
    """Of two models' metrics of the same documents.

    Raises:
      ValueError: they are of other documents.
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
