"""Logits with what a loss needs of each row: its log-sum and the logit of its target.

Implementations: "xla" (anywhere), "mosaic_tpu", "pallas" where there is a kernel. None takes the
kernel on TPUs for bfloat16: XLA reads all logits again for their sums. They are not differentiated:
a loss makes its gradient of them by itself (`rmt_tpu/training/loss.py`).
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments import check_array
from pallas_kernels.logits import mosaic_tpu, xla
from pallas_kernels.logits.interface import Logits
from pallas_kernels.platform import Implementations

__all__ = ["Logits", "logits_with_sums"]

Implementation = Literal["xla", "mosaic_tpu", "pallas"]
_IMPLEMENTATIONS = Implementations(xla, {"mosaic_tpu": mosaic_tpu}, by_default=(), name="logits")


def logits_with_sums(
    x: Float[Array, "tokens width"],
    kernel: Float[Array, "width vocab"],
    targets: Int[Array, " tokens"],
    *,
    multiplier: int | float = 1.0,
    implementation: Implementation | None = None,
) -> Logits:
    """`multiplier * x W_U`, at least float32, with `log sum exp` and the target's of each row.

    `2 tokens width vocab` FLOPs.

    Args:
      x: what the unembedding reads.
      kernel: W_U, of x's dtype.
      targets: below vocab; of another one `chosen` is 0.
      multiplier: of the logits.
      implementation: None picks what is best on the platform that the program is lowered for.

    Raises:
      UnsupportedImplementation: a named implementation is unknown or cannot serve this call.
      ValueError: shapes or dtypes do not fit.
      TypeError: it is differentiated, and not by implementation "xla".
    """
    check_array("x", x, "tokens width")
    check_array("kernel", kernel, "width vocab")
    if kernel.shape[0] != x.shape[1] or kernel.dtype != x.dtype:
        raise ValueError(
            f"kernel {kernel.dtype}{list(kernel.shape)} does not fit x {x.dtype}{list(x.shape)}: "
            "width and the dtype must be the same"
        )
    if targets.shape != x.shape[:1] or not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(
            f"targets is {targets.dtype}{list(targets.shape)}, and must be {len(x)} integers"
        )
    given = x, kernel, targets
    return _IMPLEMENTATIONS.run(implementation, "logits", *given, multiplier=multiplier)
