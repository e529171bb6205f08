"""Residual matrices as vectors, for implementations that know only these: [.., K, V] is [.., D].

Arrays have two token axes, `[.., B, T]`, and two of a matrix. The last axes, two and two, are so
made one and one: of queries [S, K, V] and of logarithms of sums [S, B, T] alike.
"""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.depth_attention.interface import MergeGradients


class OfVectors:
    """An implementation for vectors, as one for matrices: see `interface`."""

    def __init__(self, module: ModuleType):
        self._module = module

    def partial(self, queries, sources, count, prior, **options):
        out = self._module.partial(*_flat((queries, sources, count, prior)), **options)
        mixed = (queries.shape[0], *sources.shape[1:])
        return out[0].reshape(mixed), out[1].reshape(mixed[:-2])

    def partial_backward(self, queries, sources, *others, **options):
        args = _flat((queries, sources, *others))
        out = self._module.partial_backward(*args, **options)
        return out[0].reshape(queries.shape), out[1].reshape(sources.shape)

    def merge(self, query, mixed, log_sums, site, current, *others, **options):
        args = _flat((query, mixed, log_sums, site, current, *others))
        return self._module.merge(*args, **options).reshape(current.shape)

    def merge_backward(self, query, mixed, log_sums, site, current, *others, **options):
        args = _flat((query, mixed, log_sums, site, current, *others))
        g = self._module.merge_backward(*args, **options)
        like = MergeGradients(query, mixed, log_sums, current, None)
        return jax.tree.map(lambda x, y: x.reshape(y.shape), g, like)

    def unsupported(self, op: str, *args: Any) -> str | None:
        return self._module.unsupported(op, *_flat(args))

    def wins(self, op: str, *args: Any) -> bool:
        return self._module.wins(op, *_flat(args))


def _flat(args):
    return jax.tree.map(_as_vectors, args)


def _as_vectors(x: Array) -> Array:
    shape = jnp.shape(x)
    if len(shape) < 2:
        return x
    pairs = shape[len(shape) % 2 :]
    merged = (a * b for a, b in zip(pairs[::2], pairs[1::2], strict=True))
    return x.reshape(*shape[: len(shape) % 2], *merged)
