"""One table from the logical axes of arrays to the axes of the mesh."""

import math
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from sharding.errors import MeshError, divisors, nearest_multiples

# Arrays are not divided along axes that are not in this table. `batch`, `tokens` and `key` are axes
# of activations too: a device's residual has its slice of D_k for the batch of all devices of
# `key`.
RULES = {
    "batch": ("data", "fsdp", "expert", "key"),
    "tokens": ("sequence", "tensor"),
    "layer": ("stage",),
    "key": ("key",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "ff": ("tensor",),
    "expert": ("expert",),
}
# The rules where tokens are read into caches. Rows may be few, or only one, so devices of `expert`
# and `key` have parts of the tokens instead.
CACHE_RULES = RULES | {
    "batch": ("data", "fsdp"),
    "tokens": ("expert", "key", "sequence", "tensor"),
}


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding that divides a batch's sequences over the axes of `batch`."""
    return NamedSharding(mesh, PartitionSpec(RULES["batch"]))


def check_divides(
    mesh: Mesh,
    name: str,
    size: int,
    axis: str,
    *,
    parts: int = 1,
    what: str = "accumulated parts",
    rules: dict[str, tuple[str, ...]] = RULES,
) -> None:
    """Check that each of `parts` of a size divides over a logical axis's devices.

    Args:
      mesh: a mesh from `make_mesh`.
      name: the name of the flag or field that gives the size.
      size: the size to be divided.
      axis: the logical axis.
      parts: the number of parts in which each device takes its share.
      what: the name of the parts, for the message.
      rules: the table of axes.

    Raises:
      MeshError: the size does not divide.
    """
    axes = [a for a in rules[axis] if mesh.shape[a] > 1]
    divisor = math.prod(mesh.shape[a] for a in axes) * parts
    if size % divisor == 0:
        return
    over = [f"mesh axes {' x '.join(f'{a}={mesh.shape[a]}' for a in axes)}"] if axes else []
    over += [f"{parts} {what}"] if parts > 1 else []
    raise MeshError(
        f"{name}={size} is not divisible over {' and '.join(over)}; nearest legal: "
        f"{nearest_multiples(size, divisor)}"
    )


def check_keys(mesh: Mesh, has_keys: bool) -> None:
    """Raise MeshError if devices of `key` would divide a residual that has no keys."""
    if mesh.shape["key"] > 1 and not has_keys:
        raise MeshError(
            f"--mesh: key={mesh.shape['key']} divides D_k, which a vector store does not have; "
            "legal: key=1, or a model with a matrix store, as rmt-*"
        )


def check_experts(mesh: Mesh, has_experts: bool) -> None:
    """Raise MeshError if devices of `expert` would have no experts to divide."""
    if mesh.shape["expert"] > 1 and not has_experts:
        raise MeshError(
            f"--mesh: expert={mesh.shape['expert']} divides experts, which the model does not "
            "have; legal: expert=1, or a model with experts, as kimi-*"
        )


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that is whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def parameter_specs(mesh: Mesh, axes: Any, shapes: Any) -> Any:
    """Return over which axes of the mesh each parameter is divided.

    Args:
      mesh: a mesh from `make_mesh`.
      axes: a tree of tuples of logical axis names.
      shapes: the same tree, of things with a `shape`.

    Returns:
      The same tree, of PartitionSpecs.

    Raises:
      MeshError: an axis does not divide over the mesh.
    """

    def place(names: tuple[str, ...], array: Any) -> PartitionSpec:
        spec = [RULES.get(name) for name in names]
        for name, mesh_axes, size in zip(names, spec, array.shape, strict=True):
            shards = math.prod(mesh.shape[axis] for axis in mesh_axes or ())
            if size % shards:
                over = " x ".join(mesh_axes)
                raise MeshError(
                    f"--mesh: {over}={shards} does not divide the parameters' axis {name!r} of "
                    f"size {size}; legal: {divisors(size)}"
                )
        return PartitionSpec(*spec)

    return jax.tree.map(place, axes, shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))


def used_axes(mesh: Mesh, spec: Iterable[Any]) -> PartitionSpec:
    """Return a PartitionSpec with only the axes that divide something.

    Each placement has one such spec. A program's results then have the same spec as an argument
    with the same placement. If specs differed in unused axes, programs would be compiled for each.
    """
    tuples = ((names,) if isinstance(names, str) else names or () for names in spec)
    used = [tuple(name for name in names if mesh.shape[name] > 1) for names in tuples]
    while used and not used[-1]:
        used.pop()
    return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in used))


def unused_axes(mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> tuple[str, ...]:
    """Return the axes of more than one device over which an array of this spec is not divided."""
    used = {a for entry in spec for a in (entry if isinstance(entry, tuple) else (entry,))}
    return tuple(a for a in mesh.axis_names if mesh.shape[a] > 1 and a not in used)
