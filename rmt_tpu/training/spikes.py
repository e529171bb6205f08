"""Spikes of the gradient norm, and the decision to go back to the checkpoint before a spike.

A spike is a gradient norm that is many standard deviations above the mean of recent norms.
Chowdhery et al. (2022, PaLM, Section 5.1) restart from a checkpoint before a spike of the loss, and
leave out the data around it.
"""

import math
from typing import Any, NamedTuple

from rmt_tpu.runs.side_files import Restart

# Number of steps over which the spread of gradient norms is averaged, and number of steps before
# the spread is used.
_WINDOW, _FIRST = 200, 50
# Smallest standard deviation of the logarithm of the norm. Without this minimum, a change of a few
# percent could be a spike if norms are nearly constant.
_LEAST_DEVIATION = 0.05
_MOST_COUNTED = 4.0  # A norm counts as at most this many standard deviations from the mean.


class GoBack(Restart):
    """An exception for a run that goes back to its last checkpoint and leaves out some data.

    Attributes:
      windows_read: number of windows of training data that count as read after going back.
      restarts: how often the run has gone back, this time included. The checkpoint may be from
        before earlier restarts, so that its own number is too low.
      branch: the step to which the run last went back at the user's request, or None. The
        checkpoint may be from before the run went back, so that its own step is another.
    """

    def __init__(self, windows_read: int, restarts: int, branch: int | None):
        super().__init__()
        self.windows_read, self.restarts, self.branch = windows_read, restarts, branch


class Spread(NamedTuple):
    """The running mean and variance of the logarithm of the gradient norm.

    Attributes:
      mean, variance: the mean and variance of the logarithm, over about the last 200 steps.
      count: number of steps that were counted.
    """

    mean: float = 0.0
    variance: float = 0.0
    count: int = 0

    def deviations(self, norm: float) -> float | None:
        """Return by how many standard deviations the logarithm of `norm` is above the mean.

        The result is None if `norm` is not a positive finite number, or in the first 50 steps.
        """
        if self.count < _FIRST or not (math.isfinite(norm) and norm > 0):
            return None
        return (math.log(norm) - self.mean) / self._deviation

    def counting(self, norm: float) -> "Spread":
        """Return the spread after one more step; a spike counts as four standard deviations."""
        if not (math.isfinite(norm) and norm > 0):
            return self
        change = math.log(norm) - self.mean
        if self.count >= _FIRST:
            most = _MOST_COUNTED * self._deviation
            change = max(-most, min(most, change))
        weight = 1 / min(self.count + 1, _WINDOW)
        return Spread(
            self.mean + weight * change,
            (1 - weight) * (self.variance + weight * change**2),
            self.count + 1,
        )

    @property
    def _deviation(self) -> float:
        return max(math.sqrt(self.variance), _LEAST_DEVIATION)


class SpikeState(NamedTuple):
    """The part of a checkpoint that describes the gradient norms of a run.

    Attributes:
      spread: the spread of the gradient norms.
      restarts: how often the run has gone back to a checkpoint because of a spike.
    """

    spread: Spread = Spread()
    restarts: int = 0

    def meta(self) -> list[Any]:
        """Return the state as JSON values; see `of_meta`."""
        return [*self.spread, self.restarts]

    @classmethod
    def of_meta(cls, values: list[Any] | None) -> "SpikeState":
        """Return the state from metadata; `values` is None if an older checkpoint has no state."""
        return cls() if values is None else cls(Spread(*values[:3]), values[3])
