"""Functions that build and gather arrays sharded over the devices of several processes."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import Int64

import sharding

_Batch = TypeVar("_Batch")  # A `data.Batch`, or another tree of arrays of equal shape.


def put_batch(
    read: Callable[[Int64[np.ndarray, " rows"]], _Batch],
    shape: tuple[int, int],
    batch_sharding: jax.sharding.Sharding,
) -> _Batch:
    """Build a sharded batch on the devices, reading only the rows that this process needs.

    Args:
      read: a function that returns the rows of the batch with the given ascending row numbers.
      shape: shape of the whole batch, [batch, seq].
      batch_sharding: sharding of every array in the batch.

    Returns:
      The batch as sharded jax arrays.
    """
    indices = batch_sharding.addressable_devices_indices_map(shape)
    own = {row for index in indices.values() for row in range(*index[0].indices(shape[0]))}
    numbers = np.array(sorted(own), np.int64)
    batch = read(numbers)

    def put(leaf: np.ndarray) -> jax.Array:
        def part(index: tuple[slice, slice]) -> np.ndarray:
            start, stop = np.searchsorted(numbers, index[0].indices(shape[0])[:2])
            return leaf[start:stop, index[1]]

        return jax.make_array_from_callback(shape, batch_sharding, part)

    return jax.tree.map(put, batch)


def on_one_device(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """Return a tree of sharded arrays as whole arrays on the first device of this process.

    All processes must call this function. Arrays are gathered one after the other, so that no other
    device holds more than one whole array at a time.
    """
    if mesh.size == 1:
        return jax.tree.map(lambda x: x.addressable_data(0), tree)
    whole = _replicate(mesh)
    return jax.tree.map(lambda x: whole(x).addressable_data(0), tree)


@functools.cache
def _replicate(mesh: jax.sharding.Mesh) -> Callable[[jax.Array], jax.Array]:
    """Return a jitted function that replicates an array, cached by mesh to compile only once."""
    return jax.jit(lambda x: x, out_shardings=sharding.replicated(mesh))
