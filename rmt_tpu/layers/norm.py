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
    """Return `gain * x / sqrt(mean(x^2) + epsilon)` in `dtype`, with x centred for layernorm.

    Statistics are at least float32. For layernorm over bfloat16, the mean and the mean square come
    from one pass over x, although their difference can cancel. The cancellation in float32 does no
    harm: where the mean is large enough to cause it, bfloat16's 8 bits hold no spread around that
    mean.
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
