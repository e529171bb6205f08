"""Arrays that span the devices of several processes: how to make them and how to collect them."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import Int64

import sharding

_Batch = TypeVar("_Batch")  # A `data.Batch`, or any tree of arrays of the same shape.


def put_batch(
    read: Callable[[Int64[np.ndarray, " rows"]], _Batch],
    shape: tuple[int, int],
    batch_sharding: jax.sharding.Sharding,
) -> _Batch:
    """Put a batch on the devices; this process reads only the rows that its own devices hold.

    Args:
      read: returns the rows of the batch with the given numbers, which are ascending.
      shape: shape of the whole batch, [batch, seq].
      batch_sharding: sharding of each of the batch's arrays.

    Returns:
      The batch as jax arrays.
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
    """Return the whole arrays on this process's first device of the mesh; all processes call it.

    Arrays are collected one after the other, so that each of the other devices holds no more than
    one whole array at a time.
    """
    if mesh.size == 1:
        return jax.tree.map(lambda x: x.addressable_data(0), tree)
    whole = _replicate(mesh)
    return jax.tree.map(lambda x: whole(x).addressable_data(0), tree)


@functools.cache
def _replicate(mesh: jax.sharding.Mesh) -> Callable[[jax.Array], jax.Array]:
    """Return one function for each mesh, so that a second sample compiles nothing."""
    return jax.jit(lambda x: x, out_shardings=sharding.replicated(mesh))
