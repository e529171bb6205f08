"""Functions that every device runs on its own shards, and communication between devices.

The loss and gradients of a train step are one function that every device runs on its own shards
(`jax.shard_map`). Kernels can therefore be used unchanged, and all communication is explicit in the
code.

No two devices repeat the same computation: each device has its own tokens, its own slice of a sum,
or its own columns of a matrix. JAX's transposes of collectives are therefore correct (the transpose
of a gather is a reduce-scatter, and vice versa). The gradient of a parameter is the sum of the
devices' gradients over the mesh axes that do not shard the parameter.

Outside of `per_device`, and over axes of size 1, the functions for communication return their
argument unchanged.
"""

import contextvars
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
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
    """Return a function of global arrays that runs `function` on each device's shards.

    `tokens` names the mesh axes over which tokens are sharded. `token_axes` returns these axes
    inside the function.
    """

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        before = _token_axes.set(tokens)
        try:
            return function(*args)
        finally:
            _token_axes.reset(before)

    # check_vma is off, because kernels do not declare the axes over which their outputs vary.
    return jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def token_axes() -> tuple[str, ...]:
    """Return the mesh axes that shard tokens in the code being traced, outermost first."""
    return _token_axes.get()


def axis_size(names: Names) -> int:
    """Return the product of the sizes of these mesh axes."""
    sizes = _sizes()
    return math.prod(sizes.get(name, 1) for name in _tuple(names))


def axis_index(names: Names) -> Int[Array, ""] | int:
    """Return this device's index along these mesh axes. The first axis is the outermost."""
    used = _used(names)
    return jax.lax.axis_index(used) if used else 0


def own_part(x: Shaped[Array, "*shape"], names: Names, axis: int) -> Shaped[Array, "*part"]:
    """Return this device's slice, along array axis `axis`, of an array that each device has whole.

    `names` are the mesh axes whose devices divide the array.
    """
    size = x.shape[axis] // axis_size(names)
    if size == x.shape[axis]:
        return x
    return jax.lax.dynamic_slice_in_dim(x, axis_index(names) * size, size, axis)


def gather(x: Shaped[Array, "*shape"], names: Names, axis: int) -> Shaped[Array, "*joined"]:
    """Return the parts of an array from all devices along mesh axes `names`, concatenated.

    The parts are concatenated along array axis `axis`.
    """
    used = _used(names)
    return jax.lax.all_gather(x, used, axis=axis, tiled=True) if used else x


def scatter_sum(x: Shaped[Array, "*shape"], names: Names, axis: int) -> Shaped[Array, "*part"]:
    """Return this device's slice, along array axis `axis`, of the sum over devices of `names`."""
    used = _used(names)
    return jax.lax.psum_scatter(x, used, scatter_dimension=axis, tiled=True) if used else x


def total(x: Shaped[Array, "*shape"], names: Names) -> Shaped[Array, "*shape"]:
    """Return the sum over all devices along `names`, on each of these devices.

    Each device must use the result only for its own share of the objective, because the backward
    pass adds the devices' cotangents of the result.
    """
    used = _used(names)
    return jax.lax.psum(x, used) if used else x


def swap(
    x: Shaped[Array, "*shape"], names: Names, *, split: int, join: int, parts_first: bool = False
) -> Shaped[Array, "*other"]:
    """Exchange parts among devices, so that sharding moves from axis `join` to axis `split`.

    Before the call, the devices along `names` have parts of x along array axis `join`; afterwards
    they have parts along array axis `split`.

    Args:
      x: the array.
      names: the mesh axes.
      split: the array axis that is divided afterwards.
      join: the array axis that is divided before.
      parts_first: whether the parts become the outermost array axis before they are sent, and until
        they have arrived. The result is the same. On TPUs each side then has one copy, and XLA is
        free to choose its layout.
    """
    used = _used(names)
    if not used or not parts_first:
        return jax.lax.all_to_all(x, used, split, join, tiled=True) if used else x
    x = x.reshape(*x.shape[:split], axis_size(used), -1, *x.shape[split + 1 :])
    x = jax.lax.all_to_all(jnp.moveaxis(x, split, 0), used, 0, 0, tiled=True)
    x = jnp.moveaxis(x, 0, join)
    return x.reshape(*x.shape[:join], -1, *x.shape[join + 2 :])


def add_up(tree: Any, specs: Any = _WHOLE) -> Any:
    """Sum each array over all devices of the mesh, except over the mesh axes that shard the array.

    Args:
      tree: a tree of arrays.
      specs: one PartitionSpec for all arrays, or a tree of specs.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not _sizes():
        return tree

    def add_one(x: Array, spec: PartitionSpec) -> Array:
        names = unused_axes(mesh, spec)
        # Without this optimization barrier, XLA would sum in bfloat16 where x was cast from
        # bfloat16 to float32.
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
    """Return the sizes of the mesh axes over which the code being traced runs per device."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name: mesh.shape[name] for name, kind in kinds if kind == AxisType.Manual}
