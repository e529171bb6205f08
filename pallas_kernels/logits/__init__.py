"""Logits, with the log-sum-exp and the target's logit for each token, which a loss needs.

Implementations: "xla" (plain JAX, on any platform), "mosaic_tpu" (a TPU kernel) and "pallas" (the
kernel if there is one for the platform, else plain JAX). The default, None, uses the kernel on TPUs
for bfloat16, because XLA would read all logits a second time to sum them. The op cannot be
differentiated, because the loss computes its own gradient (`rmt_tpu/training/loss.py`).
"""

import functools
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
    """Compute the logits `multiplier * x W_U`, and each row's log-sum-exp and target logit.

    Logits are at least float32. The op takes `2 tokens width vocab` FLOPs.

    Args:
      x: the input of the unembedding.
      kernel: W_U, in x's dtype.
      targets: the target's token id per row, in any integer dtype. If an id is vocab or more, the
        row's target logit (`chosen`) is 0.
      multiplier: the factor by which the logits are multiplied.
      implementation: None chooses the fastest one for the platform that the program is lowered for.

    Raises:
      UnsupportedImplementation: a named implementation is unknown or does not support this call.
      ValueError: shapes or dtypes do not fit.
      TypeError: the op is differentiated with an implementation other than "xla".
    """
    check_array("x", x, "tokens width")
    check_array("kernel", kernel, "width vocab")
    if kernel.shape[0] != x.shape[1] or kernel.dtype != x.dtype:
        raise ValueError(
            f"kernel {kernel.dtype}{list(kernel.shape)} does not fit x {x.dtype}{list(x.shape)}: "
            "kernel [width, vocab] and x [tokens, width] must have the same width and dtype"
        )
    if targets.shape != x.shape[:1] or not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(
            f"targets is {targets.dtype}{list(targets.shape)}, but must be {len(x)} integers, "
            "one per row of x"
        )
    # A narrow dtype cannot hold the numbers of all words, with which the ids are compared.
    if targets.dtype.itemsize < 4:
        targets = targets.astype(jnp.int32)
    run = functools.partial(_IMPLEMENTATIONS.run, implementation, "logits")
    return run(x, kernel, targets, multiplier=multiplier)
