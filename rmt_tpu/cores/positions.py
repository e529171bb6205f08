"""Position encodings within attention: ALiBi (Press et al. 2022) and RoPE (Su et al. 2021)."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from rmt_tpu import config as cfg


def alibi_slopes(num_heads: int) -> Float[Array, " heads"]:
    """Return the slope `2^(-8 (h + 1) / num_heads)` for each head h.

    `num_heads` need not be a power of two.
    """
    heads = jnp.arange(1, num_heads + 1, dtype=jnp.float32)
    return 2.0 ** (-8.0 * heads / num_heads)


def rope_frequencies(rope: cfg.Rope, dims: int, dtype: DTypeLike) -> Float[Array, " pairs"]:
    """Return the rotation frequency of each of the `dims / 2` pairs of numbers, in radians.

    The frequency of pair i is `base^(-2 i / dims)`, changed by `rope.scaling` if that is set (see
    `config.Llama3Scaling`, `config.LinearScaling` and `config.YarnScaling`).
    """
    half = dims // 2
    frequencies = rope.base ** (-jnp.arange(half, dtype=dtype) / half)
    match rope.scaling:
        case cfg.Llama3Scaling(factor=factor, low=low, high=high, original_length=length):
            turns = length * frequencies / (2 * jnp.pi)
            unscaled_share = jnp.clip((turns - low) / (high - low), 0, 1)
            frequencies = frequencies * (unscaled_share + (1 - unscaled_share) / factor)
        case cfg.LinearScaling(factor=factor):
            frequencies = frequencies / factor
        case cfg.YarnScaling(factor=factor) as yarn:
            first, last = _yarn_range(rope.base, dims, yarn)
            scaled_share = jnp.clip((jnp.arange(half, dtype=dtype) - first) / (last - first), 0, 1)
            frequencies = frequencies * (1 - scaled_share + scaled_share / factor)
    return frequencies


def _yarn_range(base: float, dims: int, yarn: cfg.YarnScaling) -> tuple[float, float]:
    """Return the bounds of the frequency indices at which YaRN interpolates.

    Frequencies up to the first bound are unchanged. From the second bound on, they are divided by
    the factor.
    """
    index = lambda turns: (
        dims * math.log(yarn.original_length / (2 * math.pi * turns)) / (2 * math.log(base))
    )
    first, last = index(yarn.fast), index(yarn.slow)
    if yarn.whole:
        first, last = math.floor(first), math.ceil(last)
    first, last = float(max(first, 0)), float(min(last, dims - 1))
    return first, last if last != first else last + 0.001


def rotate(
    x: Float[Array, "batch seq heads head_dim"],
    positions: Int[Array, "batch_or_1 seq"],
    rope: cfg.Rope,
) -> Float[Array, "batch seq heads head_dim"]:
    """Apply RoPE: rotate pairs (x_i, x_{i + dims / 2}) by the angle `position * frequency_i`.

    If `rope.dims` is set, only the first `rope.dims` numbers of each head are rotated. Otherwise
    all numbers are rotated. YaRN also multiplies the rotated numbers by a constant.
    """
    dims = x.shape[-1] if rope.dims is None else rope.dims
    if dims < x.shape[-1]:
        rotated = rotate(x[..., :dims], positions, rope)
        return jnp.concatenate([rotated, x[..., dims:]], axis=-1)
    half = dims // 2
    dtype = jnp.result_type(x, jnp.float32)
    angles = positions[:, :, None, None] * rope_frequencies(rope, dims, dtype)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if isinstance(rope.scaling, cfg.YarnScaling):
        cos, sin = (x * rope.scaling.multiplier for x in (cos, sin))
    first, second = x[..., :half].astype(dtype), x[..., half:].astype(dtype)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def rotate_first(
    x: Float[Array, "batch seq vectors head_dim"],
    positions: Int[Array, "batch_or_1 seq"],
    *,
    heads: int,
    rope: cfg.Rope,
) -> Float[Array, "batch seq vectors head_dim"]:
    """Apply `rotate` to the first `heads` vectors of each token; other vectors stay unchanged.

    The vectors are changed in place, and so are their cotangents in the backward pass. Splitting
    and concatenating the vectors would make a TPU write all of them three times. Forward-mode
    differentiation is not supported.
    """
    return _rotate_first(x, positions, heads, rope)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _rotate_first(x, positions, heads, rope):
    rotated = rotate(x[:, :, :heads, : rope.dims], positions, rope)
    return jax.lax.dynamic_update_slice(x, rotated, (0, 0, 0, 0))


def _rotate_forward(x, positions, heads, rope):
    return _rotate_first(x, positions, heads, rope), positions


def _rotate_backward(heads, rope, positions, d_x):
    return _rotate_first(d_x, -positions, heads, rope), None


_rotate_first.defvjp(_rotate_forward, _rotate_backward)
