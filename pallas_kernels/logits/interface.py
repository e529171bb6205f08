"""The functions that every implementation of logits provides, and their result.

logits(x, kernel, targets, *, multiplier) -> Logits
unsupported(op, x, kernel, targets) -> the reason in one line if the call is not supported, or None

The targets have at least 32 bits.
"""

from typing import NamedTuple

from jaxtyping import Array, Float


class Logits(NamedTuple):
    """The logits, with the log-sum-exp and the target's logit per token, in at least float32.

    Attributes:
      values: the logits.
      log_sums: `log sum exp` of each token's logits.
      chosen: the logit of each token's target.
    """

    values: Float[Array, "tokens vocab"]
    log_sums: Float[Array, " tokens"]
    chosen: Float[Array, " tokens"]
