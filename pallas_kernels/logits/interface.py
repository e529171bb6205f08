"""What implementations of logits have in common:

logits(x, kernel, targets, *, multiplier) -> Logits
unsupported(op, x, kernel, targets) -> why it cannot serve these, in a line, or None
"""

from typing import NamedTuple

from jaxtyping import Array, Float


class Logits(NamedTuple):
    """Of every token, at least float32.

    Attributes:
      values: the logits.
      log_sums: `log sum exp` of them.
      chosen: that of the target.
    """

    values: Float[Array, "tokens vocab"]
    log_sums: Float[Array, " tokens"]
    chosen: Float[Array, " tokens"]
