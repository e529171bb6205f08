"""Arrays over the devices of several processes: put there by all, brought back to one device."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import Int64

import sharding

_Batch = TypeVar("_Batch")  # a `data.Batch`, or any tree of arrays like its


def put_batch(
    read: Callable[[Int64[np.ndarray, " rows"]], _Batch],
    shape: tuple[int, int],
    batch_sharding: jax.sharding.Sharding,
) -> _Batch:
    """A batch on the devices, of which this process reads only the rows that its devices hold.

    Args:
      read: the given rows of the batch, whose numbers are ascending.
      shape: of the whole batch, [batch, seq].
      batch_sharding: of each of its arrays.

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
    """The arrays whole, on this process's first device of the mesh; all processes call it.

    One array after the other, so that a device beside the first holds no more than one whole.
    """
    if mesh.size == 1:
        return jax.tree.map(lambda x: x.addressable_data(0), tree)
    whole = _replicate(mesh)
    return jax.tree.map(lambda x: whole(x).addressable_data(0), tree)


@functools.cache
def _replicate(mesh: jax.sharding.Mesh) -> Callable[[jax.Array], jax.Array]:
    """One function a mesh, so that a second sample compiles nothing."""
    return jax.jit(lambda x: x, out_shardings=sharding.replicated(mesh))
