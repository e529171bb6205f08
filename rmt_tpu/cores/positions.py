"""Positions that act within attention: ALiBi (Press et al. 2022) and RoPE (Su et al. 2021)."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def alibi_slopes(num_heads: int) -> Float[Array, " heads"]:
    """`2^(-8 (h + 1) / num_heads)` for head h, for any number of heads."""
    return 2.0 ** (-8.0 * jnp.arange(1, num_heads + 1) / num_heads)


def rotate(
    x: Float[Array, "batch seq heads head_dim"],
    positions: Int[Array, "batch_or_1 seq"],
    *,
    base: float,
    dims: int | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """RoPE: pairs (x_i, x_{i + dims / 2}) turned by `position * base^(-2 i / dims)`.

    Of the first `dims` numbers of a head, or of all; the others stay as they are.
    """
    if dims is not None and dims < x.shape[-1]:
        turned = rotate(x[..., :dims], positions, base=base)
        return jnp.concatenate([turned, x[..., dims:]], axis=-1)
    half = x.shape[-1] // 2
    dtype = jnp.result_type(x, jnp.float32)
    frequencies = base ** (-jnp.arange(half, dtype=dtype) / half)
    angles = positions[:, :, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half].astype(dtype), x[..., half:].astype(dtype)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def rotate_first(
    x: Float[Array, "batch seq vectors head_dim"],
    positions: Int[Array, "batch_or_1 seq"],
    *,
    heads: int,
    base: float,
    dims: int | None = None,
) -> Float[Array, "batch seq vectors head_dim"]:
    """`rotate` of the first `heads` vectors of a token; the others stay as they are.

    They are changed in place, and gradients are turned back in place: taken apart and put together
    again, a TPU would write all vectors three times. There is no forward mode.
    """
    return _rotate_first(x, positions, heads, base, dims)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _rotate_first(x, positions, heads, base, dims):
    dims = x.shape[-1] if dims is None else dims
    turned = rotate(x[:, :, :heads, :dims], positions, base=base)
    return jax.lax.dynamic_update_slice(x, turned, (0, 0, 0, 0))


def _rotate_forward(x, positions, *fixed):
    return _rotate_first(x, positions, *fixed), positions


def _rotate_backward(heads, base, dims, positions, d_x):
    return _rotate_first(d_x, -positions, heads, base, dims), None


_rotate_first.defvjp(_rotate_forward, _rotate_backward)
