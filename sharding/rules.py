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


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sequences of a batch over every data axis."""
    return NamedSharding(mesh, PartitionSpec(RULES["batch"]))


def check_batch_size(mesh: Mesh, batch_size: int, *, parts: int = 1) -> None:
    """Raises MeshError unless each of `parts` of a batch divides over every data axis."""
    devices = math.prod(mesh.shape[axis] for axis in RULES["batch"])
    divisor = devices * parts
    if batch_size % divisor:
        below = batch_size // divisor * divisor
        legal = f"{below} or {below + divisor}" if below else f"{divisor}"
        split = f" in each of {parts} accumulated parts" if parts > 1 else ""
        raise MeshError(
            f"--batch_size={batch_size} is not divisible over the {devices} devices of mesh axes "
            f"{' x '.join(RULES['batch'])}{split}; nearest legal: {legal}"
        )


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
