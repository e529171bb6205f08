"""Soft caps on logits."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def soft_capped(x: Float[Array, "*shape"], cap: float | None) -> Float[Array, "*shape"]:
    """Return `cap * tanh(x / cap)`, which is between -cap and cap; return x if `cap` is None."""
    return x if cap is None else cap * jnp.tanh(x / cap)
