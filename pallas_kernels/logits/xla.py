"""Logits in plain JAX: a matrix product, followed by reductions over its result."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.logits.interface import Logits


def logits(
    x: Float[Array, "tokens width"],
    kernel: Float[Array, "width vocab"],
    targets: Int[Array, " tokens"],
    *,
    multiplier: int | float,
) -> Logits:
    """Compute the logits and their sums, as specified in `pallas_kernels.logits`."""
    dtype = jnp.result_type(x, jnp.float32)
    values = multiplier * jnp.einsum("tw,wv->tv", x, kernel, preferred_element_type=dtype)
    is_target = jax.lax.broadcasted_iota(targets.dtype, values.shape, 1) == targets[:, None]
    chosen = jnp.sum(jnp.where(is_target, values, 0), axis=1)
    return Logits(values, jax.nn.logsumexp(values, axis=1), chosen)
