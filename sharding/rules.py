"""One table from the logical axes of arrays to the axes of the mesh."""

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.mesh import MeshError

# Axes that are not here are whole on every device.
RULES = {
    "batch": ("data", "fsdp"),
    "embed": ("fsdp",),
}


def batch_sharding(mesh: Mesh, *, batch_size: int | None = None) -> NamedSharding:
    """Sequences of a batch over every data axis.

    Raises:
      MeshError: `batch_size` does not divide over them.
    """
    shards = math.prod(mesh.shape[axis] for axis in RULES["batch"])
    if batch_size is not None and batch_size % shards:
        below = batch_size // shards * shards
        legal = f"{below} or {below + shards}" if below else f"{shards}"
        raise MeshError(
            f"--batch_size={batch_size} (over accumulation steps) is not divisible by the "
            f"{shards} devices of mesh axes {' x '.join(RULES['batch'])}; nearest legal: {legal}"
        )
    return NamedSharding(mesh, PartitionSpec(RULES["batch"]))


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def parameter_shardings(mesh: Mesh, axes: Any, shapes: Any) -> Any:
    """Where each parameter lies.

    Args:
      mesh: from `make_mesh`.
      axes: a tree of tuples of logical axis names.
      shapes: the same tree, of things with a `shape`.

    Returns:
      The same tree, of shardings.

    Raises:
      MeshError: an axis does not divide over the mesh.
    """

    def place(names: tuple[str, ...], array: Any) -> NamedSharding:
        spec = [RULES.get(name) for name in names]
        for name, mesh_axes, size in zip(names, spec, array.shape, strict=True):
            shards = math.prod(mesh.shape[axis] for axis in mesh_axes or ())
            if size % shards:
                raise MeshError(
                    f"--mesh: axis {name!r} of size {size} is not divisible by "
                    f"{' x '.join(mesh_axes)} = {shards}"
                )
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree.map(place, axes, shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))
