"""The result of comparing a new model with the plain model, which sums all outputs."""

from typing import NamedTuple


class PlainStart(NamedTuple):
    """Whether a new model equals the plain model with the same weights, and why.

    The plain model has the mixer `sum` and is otherwise equal to the new model.

    Attributes:
      same: True if the two models have the same logits, up to rounding and the norm's epsilon;
        False if they have other logits; None if this is not known.
      reason: the reason, as a clause for reports.
    """

    same: bool | None
    reason: str
