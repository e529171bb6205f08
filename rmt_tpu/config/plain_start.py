"""The statement whether a new model starts as another model with the same weights."""

from typing import NamedTuple


class PlainStart(NamedTuple):
    """Whether a new model starts as the plain model with the same weights, with the reason.

    The plain model has the mixer `sum` and is otherwise equal.

    Attributes:
      same: True if the two models have the same logits, up to rounding and the norm's epsilon;
        False if they have other logits; None if this is not known.
      reason: the reason, as a clause for reports.
    """

    same: bool | None
    reason: str
