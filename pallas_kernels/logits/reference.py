"""A reference implementation of logits and their sums, written directly from the definition."""

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
    """Compute logits in at least float32; sums overflow if a logit exceeds about 88."""
    wide = lambda a: a.astype(jnp.promote_types(a.dtype, jnp.float32))
    values = multiplier * (wide(x) @ wide(kernel))
    log_sums = jnp.log(jnp.sum(jnp.exp(values), axis=1))
    return Logits(values, log_sums, values[jnp.arange(len(x)), targets])
