"""Portable implementation of depth attention in plain JAX, which XLA fuses on any platform.

Inner products with sources are written as multiplications and sums, not as matrix products. XLA
then writes no float32 copy of the sources, and the logits are float32 on every platform. The
forward pass reads the sources twice (for the logits and for the mix), and the backward pass reads
them three times.

With a `key_axis`, D is sharded over that mesh axis. Inner products and mean squares are then sums
over devices. Each pass sums them in one float32 all-reduce.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.arguments import Norm
from pallas_kernels.depth_attention.interface import (
    Merge,
    MergeAt,
    MergeCotangents,
    MergeGradients,
    Partial,
    PartialCotangents,
    wide,
)
from pallas_kernels.depth_attention.reference import normalize


def _products(queries, sources):
    """Return `<query, v>` [S, N, T] and `<v, v>` [N, T], summed over this device's slice of D."""
    values = wide(sources)
    products = jnp.sum(wide(queries)[:, None, None] * values, axis=-1)
    return products, jnp.sum(jnp.square(values), axis=-1)


def _over_devices(key_axis, *parts):
    """Sum each of several arrays [.., T] over the devices of `key_axis`, in one all-reduce."""
    if key_axis is None:
        return parts
    rows = [part.reshape(math.prod(part.shape[:-1]), part.shape[-1]) for part in parts]
    sums = jax.lax.psum(jnp.concatenate(rows), key_axis)
    ends = np.cumsum([row.shape[0] for row in rows])[:-1]
    return [s.reshape(p.shape) for s, p in zip(jnp.split(sums, ends), parts, strict=True)]


def _scores(products, squares, D, count, epsilon):
    """Return logits [S, N, T] and rstd [N, T]; empty rows have a logit of -inf and an rstd of 0."""
    active = (jnp.arange(squares.shape[0]) < count)[:, None]
    rstd = jax.lax.rsqrt(squares / D + epsilon)
    return jnp.where(active, products * rstd, -jnp.inf), jnp.where(active, rstd, 0)


def _total_size(D: int, key_axis: str | None) -> int:
    return D if key_axis is None else D * jax.lax.axis_size(key_axis)


def _weights(logits, log_sums):
    """Return the softmax weights `exp(logit - log_sum)` [S, N, T], which are 0 for empty rows."""
    return jnp.where(logits == -jnp.inf, 0, jnp.exp(logits - log_sums[:, None]))


def _active_values(sources, count):
    active = jnp.arange(sources.shape[0]) < count
    return wide(jnp.where(active[:, None, None], sources, 0))


def partial(
    operands: Partial,
    *,
    epsilon: int | float,
    key_axis: str | None = None,
) -> tuple[Float[Array, "S T D"], Float[Array, "S T"]]:
    """Return each site's mix (a weighted sum of the sources) and log-sum-exp (see `interface`).

    For S sites, N sources of D entries and T tokens, the logits and the mixes each take `2 S N T D`
    FLOPs.
    """
    queries, sources, count, prior = operands
    products, squares = _over_devices(key_axis, *_products(queries, sources))
    D = _total_size(sources.shape[-1], key_axis)
    logits, _ = _scores(products, squares, D, count, epsilon)
    log_sums = jax.nn.logsumexp(logits, axis=1)
    if prior is not None:
        log_sums = jnp.logaddexp(log_sums, prior[1])
    weights = _weights(logits, log_sums)
    values = _active_values(sources, count)
    # Add the terms of the mix in a loop, because `jnp.sum` over them is ten times slower on a CPU.
    mixed = sum(weights[:, n][..., None] * values[n] for n in range(values.shape[0]))
    if prior is not None:
        mixed = mixed + prior_weights(prior[1], log_sums)[..., None] * wide(prior[0])
    return mixed.astype(sources.dtype), log_sums


def prior_weights(prior_log_sums: Array, log_sums: Array) -> Array:
    """Return the softmax weight [S, T] of a prior, a mix of other sources."""
    return jnp.where(prior_log_sums == -jnp.inf, 0, jnp.exp(prior_log_sums - log_sums))


def partial_backward(
    operands: Partial,
    cotangents: PartialCotangents,
    *,
    epsilon: int | float,
    key_axis: str | None = None,
) -> tuple[Float[Array, "S D"], Float[Array, "N T D"]]:
    """Return the gradients of `partial` with respect to queries and sources (see `interface`).

    With a `key_axis`, the operand `delta` is this device's term of a sum over devices.
    """
    queries, sources, count, _ = operands
    log_sums, delta, d_mixed, accumulate = cotangents
    values, d_mixed = _active_values(sources, count), wide(d_mixed)
    parts = (*_products(queries, sources), jnp.sum(d_mixed[:, None] * values, axis=-1))
    parts += () if delta is None else (delta,)
    products, squares, g, *delta = _over_devices(key_axis, *parts)
    D = _total_size(sources.shape[-1], key_axis)
    logits, rstd = _scores(products, squares, D, count, epsilon)
    weights = _weights(logits, log_sums)
    subtracted = jnp.sum(weights * g, axis=1)
    subtracted = sum(delta, start=subtracted)
    d_logits = weights * (g - subtracted[:, None])
    d_products = d_logits * rstd
    d_queries = jnp.einsum("snt,ntd->sd", d_products, values, precision="highest")
    # `shrink` is rstd^2 / D * sum_s d_logit * logit, where the -inf logits of empty rows count as
    # 0.
    finite = jnp.where(logits == -jnp.inf, 0, logits)
    shrink = jnp.square(rstd) * jnp.sum(d_logits * finite, axis=0) / D
    queries = wide(queries)
    d_sources = sum(
        weights[i][..., None] * d_mixed[i] + d_products[i][..., None] * queries[i]
        for i in range(queries.shape[0])
    )
    d_sources = d_sources - shrink[..., None] * values
    if accumulate is not None:
        d_sources = d_sources + wide(accumulate)
    return d_queries, d_sources.astype(sources.dtype)


def _merged(query, mixed, log_sums, current, active, epsilon):
    mixed, current = wide(mixed), wide(current)
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(current), axis=-1) + epsilon)
    logits = jnp.sum(current * wide(query), axis=-1) * rstd
    p = jnp.where(active, jax.nn.sigmoid(logits - log_sums), 0)[:, None]
    return mixed + p * (current - mixed)


def merge(
    operands: Merge,
    *,
    norm: Norm | None,
    epsilon: int | float,
    norm_epsilon: int | float,
) -> Float[Array, "T D"]:
    """Return z, one site's mix after the running sum is added and normalised (see `interface`).

    For T tokens, the op moves at least `3 T D` elements: it reads `current` and one row of `mixed`,
    and writes z.
    """
    query, mixed, log_sums, site, current, active, norm_gain = operands
    h = _merged(query, mixed[site], log_sums, current, active, epsilon)
    return normalize(h, norm_gain, norm=norm, epsilon=norm_epsilon).astype(current.dtype)


def merge_at(
    operands: MergeAt,
    *,
    norm: Norm,
    epsilon: int | float,
    norm_epsilon: int | float,
) -> Float[Array, "T D"]:
    """Compute `merge` for a few tokens, with parameters read from the stack of all layers."""
    parameters, layer, mixed, log_sums, site, current, active = operands
    query, gain = jax.lax.dynamic_index_in_dim(parameters, layer, keepdims=False)
    one = Merge(query, mixed, log_sums[site], site, current, active, gain)
    return merge(one, norm=norm, epsilon=epsilon, norm_epsilon=norm_epsilon)


def merge_backward(
    operands: Merge,
    cotangents: MergeCotangents,
    *,
    norm: Norm | None,
    epsilon: int | float,
    norm_epsilon: int | float,
) -> MergeGradients:
    """Return the gradients of `merge` with respect to its operands, as `interface` defines."""
    query, mixed, log_sums, site, current, active, norm_gain = operands

    def forward(query, mixed, log_sums, current, norm_gain):
        h = _merged(query, mixed, log_sums, current, active, epsilon)
        return normalize(h, norm_gain, norm=norm, epsilon=norm_epsilon)

    inputs = (query, wide(mixed[site]), log_sums, wide(current), norm_gain)
    h, pullback = jax.vjp(forward, *inputs)
    g = MergeGradients(*pullback(cotangents.z.astype(h.dtype)))
    row = g.mixed.astype(mixed.dtype)
    return g._replace(
        mixed=jax.lax.dynamic_update_index_in_dim(cotangents.mixed, row, site, 0),
        current=(g.current + wide(cotangents.current)).astype(current.dtype),
    )
