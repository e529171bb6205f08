"""Norms over the last axis, with a gain and an optional bias."""

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
    bias: Float[Array, " D"] | None = None,
) -> Float[Array, "*tokens D"]:
    """Return `gain * x / sqrt(mean(x^2) + epsilon)`, plus a bias if there is one, in `dtype`.

    With "layernorm", the mean of x is first subtracted from x. Statistics are computed in at least
    float32. For bfloat16 input, a layernorm computes the variance as `mean(x^2) - mean(x)^2`, which
    needs one pass over x. This loses precision if the mean is far larger than the standard
    deviation. The loss is harmless, because bfloat16 cannot represent such input precisely.
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
    x = x * jax.lax.rsqrt(square + epsilon) * gain
    return (x if bias is None else x + bias).astype(dtype)
