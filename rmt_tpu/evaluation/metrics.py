"""Metrics with standard errors, and differences between two models on the same documents."""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float

Display = Literal["share", "perplexity", "bits"]


@dataclass(frozen=True)
class Metric:
    """A metric `rate = sum(total) / sum(weight)`, with sums over documents.

    Attributes:
      name: the name of the metric in lm-evaluation-harness.
      unit: the unit of the denominator, such as "word" or "byte".
      display: how the rate is reported: "share" reports the rate unchanged, "perplexity" reports
        exp(rate) of a rate in nats, and "bits" reports rate / ln 2.
      total: each document's term in the numerator.
      weight: each document's term in the denominator; 1 for a mean over documents.
    """

    name: str
    unit: str
    display: Display
    total: Float[np.ndarray, " documents"]
    weight: Float[np.ndarray, " documents"]

    @property
    def rate(self) -> float:
        """The ratio of the sums over documents."""
        return float(math.fsum(self.total) / math.fsum(self.weight))

    @property
    def influence(self) -> Float[np.ndarray, " documents"]:
        """The first-order effect of each document on the rate.

        The values of all documents sum to 0. The standard error is computed from these values.
        """
        return (self.total - self.rate * self.weight) / math.fsum(self.weight)

    @property
    def value(self) -> float:
        """The value in reports: the rate as a share, as a perplexity or in bits; see `display`."""
        if self.display == "perplexity":
            return math.exp(min(self.rate, 700.0))  # exp(710) would overflow a float.
        return self.rate / math.log(2) if self.display == "bits" else self.rate

    @property
    def error(self) -> float | None:
        """The standard error of the value over randomly drawn documents; None for one document.

        The error is exact for a mean over documents, and a first-order approximation otherwise.
        """
        error = _error(self.influence)
        if error is None:
            return None
        slope = {"share": 1.0, "perplexity": self.value, "bits": 1 / math.log(2)}[self.display]
        return slope * error

    def json(self) -> dict[str, Any]:
        """Return the value, its standard error and its unit as a JSON object."""
        return {"value": self.value, "stderr": self.error, "unit": self.unit}


def _error(influence: Float[np.ndarray, " documents"]) -> float | None:
    count = len(influence)
    if count < 2:
        return None
    return math.sqrt(count / (count - 1) * math.fsum(np.square(influence)))


class Difference(NamedTuple):
    """The difference between two models in one metric on the same documents.

    Attributes:
      value: the first model's value minus the second model's, as a share or in bits; for
        perplexities, the difference of the rates in nats.
      error: the paired standard error, computed from per-document differences; None for a single
        document, or if the documents are not the same.
      unpaired: the standard error that would result if the two models had independent documents;
        None for a single document.
      p: the two-sided p-value, by McNemar's exact test for answers that are right or wrong, and by
        Student's t-test for other metrics; None if neither applies.
    """

    value: float
    error: float | None
    unpaired: float | None
    p: float | None


def difference(first: Metric, second: Metric, *, paired: bool = True) -> Difference:
    """Return the difference between two models in one metric.

    Args:
      first, second: the metric of each model.
      paired: whether both metrics are over the same documents, in the same order. Otherwise the
        difference has no paired error and no p-value.

    Raises:
      ValueError: the metrics have different names, or different numbers of paired documents.
    """
    if first.name != second.name or (paired and len(first.total) != len(second.total)):
        raise ValueError(
            "two models can only be compared by the same metric over the same documents"
        )
    unit = math.log(2) if first.display == "bits" else 1.0
    value = (first.rate - second.rate) / unit
    errors = [_error(m.influence / unit) for m in (first, second)]
    unpaired = None if None in errors else math.hypot(*errors)
    if not paired:
        return Difference(value, None, unpaired, None)
    error = _error((first.influence - second.influence) / unit)
    return Difference(value, error, unpaired, _p(first, second, value, error))


def _p(first: Metric, second: Metric, value: float, error: float | None) -> float | None:
    from scipy import stats

    if first.display == "share":
        better = int(np.sum(first.total > second.total))
        worse = int(np.sum(first.total < second.total))
        if better + worse == 0:
            return 1.0
        return float(stats.binomtest(better, better + worse).pvalue)
    if not error:
        return None
    return float(2 * stats.t.sf(abs(value) / error, len(first.total) - 1))
