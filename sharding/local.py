"""Functions that run on each device's own part of a batch: kernels cannot be partitioned for them.

The mesh is the one in context (`on_mesh`), so that a model needs no mesh passed through it. Without
one, or on a single device, everything here is a plain call.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec

from sharding.rules import RULES


@contextlib.contextmanager
def on_mesh(mesh: Mesh) -> Iterator[None]:
    """`over_batch` divides over this mesh while a function is traced."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield


def over_batch(
    function: Callable[..., Any], batched: Any, shared: Any = (), *, axis: int = 0
) -> Any:
    """`function(batched, shared)`, each device on its own part of the batch.

    Args:
      function: maps a batch's rows to rows; every array it returns has the batch's axis at `axis`,
        or one of size 1 there if it is this device's part of a sum over the batch (see `add_up`).
      batched: tree of arrays with the batch's axis at `axis`.
      shared: tree of arrays that every device gets whole; gradients with respect to them are
        summed over the devices.
      axis: where the batch's axis is.

    Raises:
      ValueError: the batch does not divide over the devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    auto = [
        a for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto
    ]
    axes = tuple(a for a in RULES["batch"] if a in auto and mesh.shape[a] > 1)
    if not axes:
        return function(batched, shared)
    rows, whole = PartitionSpec(*(None,) * axis, axes), PartitionSpec()
    # check_vma off: kernels do not declare over which axes their outputs vary.
    return jax.shard_map(
        function, in_specs=(rows, whole), out_specs=rows, axis_names=set(auto), check_vma=False
    )(batched, shared)


def add_up(parts: Any, *, axis: int = 0) -> Any:
    """What `over_batch` returned as parts of sums (one part a device, along `axis`), added."""
    return jax.tree.map(lambda part: jnp.sum(part, axis=axis), parts)
