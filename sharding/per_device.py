"""Functions that each device runs on its shards, and the exchanges between devices.

A train step's loss and gradients are one function that every device runs on its own shards
(`jax.shard_map`). Kernels therefore run unchanged, and the code states all communication.

No array is kept whole on several devices to be used the same way on each: devices have their own
tokens, their own slice of a sum, or their own columns of a matrix. JAX's own transposes are then
right (that of a gather is a scattered sum, and the other way round), and the gradient of a
parameter is the sum of the devices' gradients over the mesh axes that do not divide it.

Outside `per_device`, and over axes of one device, everything here does nothing.
"""

import contextvars
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import Array, Int, Shaped

from sharding.rules import RULES, unused_axes

Names = str | tuple[str, ...]
_WHOLE = PartitionSpec()
_token_axes = contextvars.ContextVar("token_axes", default=RULES["tokens"])


def per_device(
    function: Callable,
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    *,
    tokens: tuple[str, ...] = RULES["tokens"],
) -> Callable:
    """Return `function` of global arrays, which every device runs on its shards.

    `tokens` are the axes over which the function divides tokens, and what `token_axes` returns in
    it.
    """

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        before = _token_axes.set(tokens)
        try:
            return function(*args)
        finally:
            _token_axes.reset(before)

    # check_vma is off, because kernels do not declare over which axes their outputs vary.
    return jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def token_axes() -> tuple[str, ...]:
    """Return the axes over which the code being traced divides tokens, outermost first."""
    return _token_axes.get()


def axis_size(names: Names) -> int:
    """Return the number of devices along these axes of the mesh."""
    sizes = _sizes()
    return math.prod(sizes.get(name, 1) for name in _tuple(names))


def axis_index(names: Names) -> Int[Array, ""] | int:
    """Return this device's index along these axes; the first axis is the outermost."""
    used = _used(names)
    return jax.lax.axis_index(used) if used else 0


def own_part(x: Shaped[Array, "*shape"], names: Names, axis: int) -> Shaped[Array, "*part"]:
    """Return this device's part, along an axis, of an array that all devices of `names` have."""
    size = x.shape[axis] // axis_size(names)
    if size == x.shape[axis]:
        return x
    return jax.lax.dynamic_slice_in_dim(x, axis_index(names) * size, size, axis)


def gather(x: Shaped[Array, "*shape"], names: Names, axis: int) -> Shaped[Array, "*joined"]:
    """Concatenate the parts of all devices along `names` on an axis."""
    used = _used(names)
    return jax.lax.all_gather(x, used, axis=axis, tiled=True) if used else x


def scatter_sum(x: Shaped[Array, "*shape"], names: Names, axis: int) -> Shaped[Array, "*part"]:
    """Return this device's part, along an axis, of the sum over all devices along `names`."""
    used = _used(names)
    return jax.lax.psum_scatter(x, used, scatter_dimension=axis, tiled=True) if used else x


def total(x: Shaped[Array, "*shape"], names: Names) -> Shaped[Array, "*shape"]:
    """Return the sum over all devices along `names`, on each of them.

    What a device computes from the sum must be only its share of what all devices compute, because
    the cotangents of the sum are summed over devices.
    """
    used = _used(names)
    return jax.lax.psum(x, used) if used else x


def swap(
    x: Shaped[Array, "*shape"], names: Names, *, split: int, join: int
) -> Shaped[Array, "*other"]:
    """Exchange pieces among all devices: divided along `join` before, along `split` after."""
    used = _used(names)
    return jax.lax.all_to_all(x, used, split, join, tiled=True) if used else x


def add_up(tree: Any, specs: Any = _WHOLE) -> Any:
    """Sum arrays over all devices of the mesh, except over the axes that divide an array.

    Args:
      tree: a tree of arrays.
      specs: the PartitionSpec of all of them, or a tree of specs.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not _sizes():
        return tree

    def add_one(x: Array, spec: PartitionSpec) -> Array:
        names = unused_axes(mesh, spec)
        # The barrier is needed because XLA would otherwise sum in bfloat16 what was cast from
        # bfloat16.
        return jax.lax.psum(jax.lax.optimization_barrier(x), names) if names else x

    if isinstance(specs, PartitionSpec):
        return jax.tree.map(lambda x: add_one(x, specs), tree)
    return jax.tree.map(add_one, tree, specs)


def _tuple(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _used(names: Names) -> tuple[str, ...]:
    sizes = _sizes()
    return tuple(name for name in _tuple(names) if sizes.get(name, 1) > 1)


def _sizes() -> dict[str, int]:
    """Return the sizes of the axes over which the code being traced is per device."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name: mesh.shape[name] for name, kind in kinds if kind == AxisType.Manual}
