"""Adapter that runs implementations for vectors on residual matrices, by reshaping the arrays.

Matrices [.., B, T, K, V] become vectors [.., B T, K V]. In the same way, queries [S, K, V] become
[S, K V], and log-sum-exps [S, B, T] become [S, B T].
"""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.depth_attention.interface import (
    Merge,
    MergeCotangents,
    MergeGradients,
    Partial,
    PartialCotangents,
)


class MatricesAsVectors:
    """An implementation of depth attention for matrices that runs the ops for vectors.

    The methods have the arguments and results of the functions in `interface` with the same names.
    """

    def __init__(self, module: ModuleType):
        self._module = module

    def partial(self, operands: Partial, **options):
        """Flatten the matrices, and call `partial` of the implementation for vectors."""
        out = self._module.partial(_flat(operands), **options)
        mixed = (operands.queries.shape[0], *operands.sources.shape[1:])
        return out[0].reshape(mixed), out[1].reshape(mixed[:-2])

    def partial_backward(self, operands: Partial, cotangents: PartialCotangents, **options):
        """Flatten the matrices, and call `partial_backward` of the implementation for vectors."""
        out = self._module.partial_backward(_flat(operands), _flat(cotangents), **options)
        return out[0].reshape(operands.queries.shape), out[1].reshape(operands.sources.shape)

    def merge(self, operands: Merge, **options):
        """Flatten the matrices, and call `merge` of the implementation for vectors."""
        return self._module.merge(_flat(operands), **options).reshape(operands.current.shape)

    def merge_backward(self, operands: Merge, cotangents: MergeCotangents, **options):
        """Flatten the matrices, and call `merge_backward` of the implementation for vectors."""
        g = self._module.merge_backward(_flat(operands), _flat(cotangents), **options)
        like = MergeGradients(
            operands.query, operands.mixed, operands.log_sums, operands.current, None
        )
        return jax.tree.map(lambda x, y: x.reshape(y.shape), g, like)

    def unsupported(self, op: str, *operands: Any) -> str | None:
        """Return why the implementation for vectors does not support the call; None if it does."""
        return self._module.unsupported(op, *_flat(operands))

    def wins(self, op: str, *operands: Any) -> bool:
        """Return whether the implementation for vectors is preferred for the call."""
        return self._module.wins(op, *_flat(operands))


def _flat(args):
    return jax.tree.map(_as_vectors, args)


def _as_vectors(x: Array) -> Array:
    shape = jnp.shape(x)
    if len(shape) < 2:
        return x
    pairs = shape[len(shape) % 2 :]
    merged = (a * b for a, b in zip(pairs[::2], pairs[1::2], strict=True))
    return x.reshape(*shape[: len(shape) % 2], *merged)
