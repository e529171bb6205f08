"""Norms over the last axis, with a gain and no bias."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float


def normalize(
    x: Float[Array, "*tokens D"],
    gain: Float[Array, " D"],
    *,
    norm: Literal["layernorm", "rmsnorm"],
    epsilon: float,
    dtype: DTypeLike,
) -> Float[Array, "*tokens D"]:
    """`gain * x / sqrt(mean(x^2) + epsilon)`, of `x - mean(x)` for layernorm, in `dtype`.

    Statistics are at least float32.
    """
    x = x.astype(jnp.result_type(x, jnp.float32))
    if norm == "layernorm":
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)
    return (x * gain).astype(dtype)
