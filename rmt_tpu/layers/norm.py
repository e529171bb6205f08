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
    """`gain * x / sqrt(mean(x^2) + epsilon)`, of `x - mean(x)` for layernorm, in `dtype`.

    Statistics are at least float32. Those of layernorm over bfloat16 are sums of one pass, for with
    its 8 bits a mean that float32's squares would cancel by has no spread left beside it.
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
