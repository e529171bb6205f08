"""Portable implementation of the key-vector ops: plain JAX that XLA fuses well on every platform.

Three choices keep the traffic of the large residual low:
- The statistics are computed from the stored residual in the same pass that stores it.
- XLA fuses the norm and the gain into the read, so no normalised copy is written.
- The backward pass needs only the stored residual and two numbers per token.

For T = 8192 tokens, K = V = 64, R = 16 and P = 48 in bfloat16, a forward op takes 4.3 GFLOP and
moves at least 201 MB. The TPU compiler turns the op into two fusions that move 268 MB, because the
second one reads the stored residual again.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int, Int16

from pallas_kernels.arguments import Norm, check_array, check_fraction_bits, read_slices
from pallas_kernels.key_vector.interface import (
    FRACTION_BITS,
    LEAST_STEPS,
    Gradients,
    Means,
    SiteBackward,
    SiteOperands,
    SiteResults,
    Statistics,
)

_LARGEST = 2**15 - 1


class _StoredResidual(NamedTuple):
    """A residual after a store.

    Attributes:
      residual: the residual in its own dtype.
      values: the same numbers in at least float32, in units of X.
      in_range: a mask of the tokens whose int16 residual did not overflow, or None if overflow is
        not checked.
    """

    residual: Array
    values: Array
    in_range: Array | None


def forward(
    site: SiteOperands,
    statistics: Statistics | None = None,
    empty: Bool[Array, ""] | bool = False,
    *,
    norm: Norm = "rmsnorm",
    epsilon: float = 0.0,
    dtype: DTypeLike | None = None,
    scale: bool = True,
    in_place: bool = True,
    fraction_bits: int = FRACTION_BITS,
) -> SiteResults:
    """Write to a residual matrix, normalise it and read from it, as `interface` defines."""
    site, statistics = read_slices((site, statistics))
    residual, store_keys, data, gain, read_keys = site
    options = (gain, read_keys, norm, epsilon, dtype or data.dtype, scale, fraction_bits)
    if not site.stores:
        values = _values(residual, _accumulator(residual, dtype), fraction_bits)
        if statistics is not None:
            factors = statistics.mean, statistics.rstd
            return SiteResults(None, _retrieved(values, *factors, gain, read_keys, dtype))
        shift = jnp.mean(values[..., 0], axis=-1)
        return SiteResults(None, *_read(_StoredResidual(residual, values, None), shift, *options))
    if empty is not False:
        residual = jnp.where(empty, 0, residual)
    stored = _store(residual, store_keys, data, fraction_bits)
    if not site.reads:
        return SiteResults(stored.residual)
    # The shift, a number near the mean, is computed from a slice of the inputs. Computing the shift
    # from the stored residual would need another pass over the residual.
    first = _store(residual[..., :1], store_keys, data[..., :1], fraction_bits).values
    return SiteResults(stored.residual, *_read(stored, jnp.mean(first, axis=(-2, -1)), *options))


def at_layer(
    site: SiteOperands,
    layer: Int[Array, ""],
    *,
    norm: Norm,
    epsilon: int | float,
    size_major: tuple[bool, bool] = (False, False),
) -> tuple[Float[Array, "T K V"], Float[Array, "T P V"]]:
    """Compute a site (store, norm and read) for T tokens, with one layer of stacked parameters.

    The residual of `site` is [T, K, V] and the data are [T, R, V]. The keys and the gain have an
    additional first axis for the layers.
    """
    of_layer = lambda x: jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)
    residual, store_keys, data, *of_read = site
    one = SiteOperands(
        residual[:, None], of_layer(store_keys), data[:, None], *map(of_layer, of_read)
    )
    out = forward(one, norm=norm, epsilon=epsilon)
    return out.residual[:, 0], out.retrieved[:, 0]


def backward(
    operands: SiteBackward,
    *,
    norm: Norm = "rmsnorm",
    rebuild: bool = False,
    fraction_bits: int = FRACTION_BITS,
) -> Gradients:
    """Return the cotangents of a write and a read, as `interface` defines."""
    site, statistics, d_residual, d_retrieved, means, again, _ = read_slices(operands)
    residual, store_keys, data, *_ = site
    if not site.reads:
        wide = jnp.promote_types(jnp.float32, data.dtype)
        precision = None if data.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
        dot = functools.partial(jnp.einsum, precision=precision, preferred_element_type=wide)
        d_keys = dot("bnrv,bnkv->rk", data, d_residual)
        d_data = dot("rk,bnkv->bnrv", store_keys.astype(wide), d_residual.astype(wide))
        return Gradients(d_residual, d_data.astype(data.dtype), d_keys, None, None)
    of_norm = (site, statistics, d_retrieved, means)
    through_norm, *of_read = _norm_backward(*of_norm, norm=norm, fraction_bits=fraction_bits)
    if not site.stores:
        return Gradients(through_norm.astype(residual.dtype), None, None, *of_read)
    d_stored = d_residual.astype(through_norm.dtype) + through_norm
    rounded = d_stored.astype(data.dtype)
    d_data = _einsum("rk,bnkv->bnrv", store_keys.astype(data.dtype), rounded).astype(data.dtype)
    rebuilt = _undo_write(residual, store_keys, data, fraction_bits) if rebuild else None
    reread = None
    if again is not None:
        values = _values(rebuilt, _accumulator(rebuilt, data.dtype), fraction_bits)
        factors = again.statistics.mean, again.statistics.rstd
        reread = _retrieved(values, *factors, again.gain, again.read_keys, data.dtype)
    return Gradients(
        d_stored.astype(d_residual.dtype),
        d_data,
        _einsum("bnrv,bnkv->rk", data, rounded),
        *of_read,
        rebuilt,
        reread,
    )


def to_fixed_point(
    residual: Float[Array, "*shape"], fraction_bits: int = FRACTION_BITS
) -> Int16[Array, "*shape"]:
    """Convert an array to the int16 fixed-point format of residuals.

    Values are rounded to a multiple of `2^-fraction_bits`, and clipped if they overflow. A NaN
    becomes -2^15, and no other value does. If a store leaves such a number as it is, or lowers it,
    what is read after the store is NaN for the whole token. A store that raises the number, and a
    read without a store, do not notice it.

    Raises:
      ValueError: the array is not one of floats, or `fraction_bits` is not legal.
    """
    check_array("residual", residual, "...")
    check_fraction_bits(fraction_bits)
    steps = jnp.round(2.0**fraction_bits * residual.astype(_accumulator(residual, residual.dtype)))
    steps = jnp.where(jnp.isnan(steps), -_LARGEST - 1, jnp.clip(steps, -_LARGEST, _LARGEST))
    return steps.astype(jnp.int16)


def _norm_backward(
    site: SiteOperands,
    statistics: Statistics,
    d_retrieved: Float[Array, "B N P V"],
    means: Means | None,
    *,
    norm: Norm,
    fraction_bits: int,
) -> tuple[Float[Array, "B N K V"], Float[Array, "K V"], Float[Array, "P K"]]:
    """Return the cotangents of a read's residual, gain and read keys, in at least float32."""
    residual, _, _, gain, read_keys = site
    dtype = d_retrieved.dtype
    accumulator = _accumulator(residual, dtype)
    both = statistics.both.astype(accumulator)[..., None, None]
    mean, rstd = both[:, 0], both[:, 1]
    n = (_values(residual, accumulator, fraction_bits) - mean) * rstd
    gain = gain.astype(accumulator)
    # `d_scaled` is rounded to the data's dtype to save memory traffic: two passes read this array,
    # and in float32 it would be the largest array.
    d_scaled = _einsum("pk,bnpv->bnkv", read_keys.astype(dtype), d_retrieved).astype(dtype)
    a = d_scaled * gain
    mean_a, mean_an = means or (None, None)

    def mean_of(values, mean):
        if mean is None:
            return jnp.mean(values, axis=(-2, -1), keepdims=True)
        return mean[:, :, None, None].astype(accumulator)

    through_norm = a - n * mean_of(a * n, mean_an)
    if norm == "layernorm":
        through_norm = through_norm - mean_of(a, mean_a)
    d_gain = jnp.sum(d_scaled * n, axis=(0, 1))
    d_read_keys = _einsum("bnpv,bnkv->pk", d_retrieved, (n * gain).astype(dtype))
    return rstd * through_norm, d_gain, d_read_keys


def _store(residual, store_keys, data, fraction_bits) -> _StoredResidual:
    written = _written(residual, store_keys, data, fraction_bits)
    if residual.dtype != jnp.int16:
        stored = (residual.astype(written.dtype) + written).astype(residual.dtype)
        return _StoredResidual(stored, stored.astype(written.dtype), None)
    total = residual.astype(jnp.int32) + written
    in_range = jnp.all(jnp.abs(total) <= _LARGEST, axis=(-2, -1))
    stored = jnp.clip(total, -_LARGEST, _LARGEST).astype(jnp.int16)
    values = _values(stored, _accumulator(residual, data.dtype), fraction_bits)
    return _StoredResidual(stored, values, in_range)


def _undo_write(residual, store_keys, data, fraction_bits):
    written = _written(residual, store_keys, data, fraction_bits)
    wide = jnp.int32 if residual.dtype == jnp.int16 else written.dtype
    return (residual.astype(wide) - written).astype(residual.dtype)


def _written(residual, store_keys, data, fraction_bits):
    """Compute the write `sum_r w_r (x) y_r`, with w the store keys and y the data.

    For an int16 residual, the result is in units of the fixed-point step, rounded to the nearest
    integer, as int32.
    """
    written = _einsum("rk,bnrv->bnkv", store_keys.astype(data.dtype), data)
    if residual.dtype != jnp.int16:
        return written
    # The number of fixed-point steps is clipped, because converting a float that overflows int32
    # is undefined.
    steps = jnp.clip(jnp.round(2.0**fraction_bits * written), -(2.0**24), 2.0**24)
    # A NaN must be detected too. Integers have no NaN, so a NaN becomes a number that overflows
    # int16.
    return jnp.where(jnp.isnan(steps), 2**24, steps).astype(jnp.int32)


def _read(
    stored: _StoredResidual, shift, gain, read_keys, norm, epsilon, dtype, scale, fraction_bits
):
    values, count = stored.values, gain.size
    # The statistics are computed from differences from a shift near the mean, because E[x^2] -
    # E[x]^2 would lose precision to cancellation if the mean is large.
    shift = shift if norm == "layernorm" else jnp.zeros_like(shift)
    shifted = values - shift[..., None, None]
    total = jnp.sum(shifted, axis=(-2, -1))
    squares = jnp.sum(jnp.square(shifted), axis=(-2, -1))
    above_shift = total / count if norm == "layernorm" else shift
    mean = above_shift + shift
    variance = jnp.maximum(squares / count - jnp.square(above_shift), 0)
    rstd = jax.lax.rsqrt(variance + epsilon)
    if stored.in_range is not None:
        rstd = jnp.where(stored.in_range, rstd, jnp.nan)
    if stored.residual.dtype == jnp.int16 and scale:
        rstd = jnp.where(variance >= least_variance(fraction_bits), rstd, jnp.nan)

    factors = mean, rstd if scale else None
    return _retrieved(values, *factors, gain, read_keys, dtype), Statistics.of(mean, rstd)


def _retrieved(values, mean, rstd, gain, read_keys, dtype):
    normalised = values - mean[..., None, None]
    if rstd is not None:
        normalised = normalised * rstd[..., None, None]
    scaled = (normalised * gain.astype(values.dtype)).astype(dtype)
    return _einsum("pk,bnkv->bnpv", read_keys.astype(dtype), scaled).astype(dtype)


def least_variance(fraction_bits: int) -> float:
    """Return the smallest legal variance of a token's int16 residual X, in the scale of X^2.

    If the variance is smaller, the token's retrieved vectors are NaN.
    """
    return (LEAST_STEPS / 2.0**fraction_bits) ** 2


def _values(residual, accumulator, fraction_bits):
    if residual.dtype == jnp.int16:
        return residual.astype(accumulator) / 2.0**fraction_bits
    return residual.astype(accumulator)


def _accumulator(residual, dtype) -> jnp.dtype:
    wide = jnp.promote_types(jnp.float32, dtype)
    return wide if residual.dtype == jnp.int16 else jnp.promote_types(wide, residual.dtype)


def _einsum(spec, *operands):
    """Compute an einsum that accumulates in at least float32.

    Float32 operands are multiplied at full precision.
    """
    narrow = all(operand.dtype == jnp.bfloat16 for operand in operands)
    return jnp.einsum(
        spec,
        *operands,
        precision=None if narrow else jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.promote_types(jnp.float32, jnp.result_type(*operands)),
    )
