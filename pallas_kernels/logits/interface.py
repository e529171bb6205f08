"""The functions and results of every implementation of logits.

logits(x, kernel, targets, *, multiplier) -> Logits
unsupported(op, x, kernel, targets) -> why it cannot serve these, in a line, or None
"""

from typing import NamedTuple

from jaxtyping import Array, Float


class Logits(NamedTuple):
    """The logits of every token and two numbers of each row, at least float32.

    Attributes:
      values: the logits.
      log_sums: `log sum exp` of a token's logits.
      chosen: the logit of a token's target.
    """

    values: Float[Array, "tokens vocab"]
    log_sums: Float[Array, " tokens"]
    chosen: Float[Array, " tokens"]
