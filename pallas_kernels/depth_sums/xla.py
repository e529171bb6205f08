"""Weighted sums over depth in plain JAX.

Sums are accumulated in at least float32. Terms are added one by one, which is faster on a CPU than
a sum over a stacked array.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def sums(
    weights: Float[Array, "S N T"],
    sources: Float[Array, "N T *size"],
    count: Int[Array, ""],
    *,
    dtype: str,
) -> Float[Array, "S T *size"]:
    """Return the sums, in `dtype`; see the docstring of `depth_sums`."""
    totals = [0] * len(weights)
    for i in range(len(sources)):
        values = _values(sources, i, count)
        of_sums = _per_token(weights[:, i], values)
        totals = [total + w * values for total, w in zip(totals, of_sums, strict=True)]
    return jnp.stack(totals).astype(dtype)


def sums_backward(
    weights: Float[Array, "S N T"],
    sources: Float[Array, "N T *size"],
    count: Int[Array, ""],
    d_sums: Float[Array, "S T *size"],
    accumulate: Float[Array, "N T *size"],
) -> tuple[Float[Array, "S N T"], Float[Array, "N T *size"]]:
    """Return the gradients of the weights, and `accumulate` plus the gradients of the sources.

        d_weights[s, i] = <d_sums[s], sources[i]>      d_sources[i] = sum_s weights[s, i] d_sums[s]

    Both are 0 for rows from `count` onwards.
    """
    of_weights, of_sources = [], []
    axes = tuple(range(1, sources.ndim - 1))
    wide = jnp.result_type(sources, jnp.float32)
    for i in range(len(sources)):
        values = _values(sources, i, count)
        of_weights.append([jnp.sum(d.astype(wide) * values, axis=axes) for d in d_sums])
        of_sums = _per_token(weights[:, i], values)
        total = sum(w * d.astype(wide) for w, d in zip(of_sums, d_sums, strict=True))
        total = accumulate[i].astype(wide) + jnp.where(i < count, total, 0)
        of_sources.append(total.astype(accumulate.dtype))
    d_weights = jnp.stack([jnp.stack(of_sum) for of_sum in zip(*of_weights, strict=True)])
    return d_weights, jnp.stack(of_sources)


def _values(sources, i, count):
    """Return row i of the sources in at least float32, or zeros if the row is not a source."""
    values = jnp.where(i < count, sources[i], 0)
    return values.astype(jnp.result_type(values, jnp.float32))


def _per_token(weights, values):
    """Return the weights [S, T] in the dtype of `values` [T, *size], with an axis for each size."""
    return weights.astype(values.dtype).reshape(*weights.shape, *[1] * (values.ndim - 1))
