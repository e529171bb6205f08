"""Norms over the last axis, with a gain and no bias."""

import functools
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
    """Return `gain * x / sqrt(mean(x^2) + epsilon)` in `dtype`; "layernorm" first centres x.

    Statistics are computed in at least float32. For a layernorm of bfloat16 input, the mean and the
    mean square come from a single pass over x. The variance is their difference
    `mean(x^2) - mean(x)^2`, which can lose precision in float32. This is harmless: where the mean
    is large enough for such a loss, bfloat16's 8 significant bits cannot represent a spread around
    the mean anyway.
    """
    narrow = x.dtype == jnp.bfloat16
    mean = functools.partial(jnp.mean, axis=-1, keepdims=True)
    x = x.astype(jnp.result_type(x, jnp.float32))
    if norm == "rmsnorm":
        square = mean(jnp.square(x))
    elif narrow:
        centre = mean(x)
        square = jnp.maximum(mean(jnp.square(x)) - jnp.square(centre), 0)
        x = x - centre
    else:
        x = x - mean(x)
        square = mean(jnp.square(x))
    return (x * jax.lax.rsqrt(square + epsilon) * gain).astype(dtype)
