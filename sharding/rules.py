"""The table that maps logical axes of arrays to mesh axes, and the resulting shardings."""

import math
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from sharding.errors import MeshError, divisors, nearest_multiples

# Maps each logical axis to the mesh axes that shard the logical axis. Logical axes that are not in
# this table are not sharded. `batch`, `tokens` and `key` are also axes of activations: a matrix
# residual on a device has the device's slice of D_k, for the batch of all devices along `key`.
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
# The rules that apply while prompts are read into decoding caches. A batch may then have only one
# row, so the devices along `expert` and `key` shard the tokens instead of the rows.
CACHE_RULES = RULES | {
    "batch": ("data", "fsdp"),
    "tokens": ("expert", "key", "sequence", "tensor"),
}


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a batch, whose sequences are sharded over the mesh axes of `batch`."""
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
    """Check that a size divides evenly over `parts` and over the devices along a logical axis.

    Args:
      mesh: a mesh from `make_mesh`.
      name: the name of the flag or field that sets the size.
      size: the size to be divided.
      axis: the logical axis along which the size is sharded.
      parts: the number of equal parts that each device processes one after another.
      what: a name for the parts, used in the error message.
      rules: the table from logical axes to mesh axes.

    Raises:
      MeshError: the size does not divide evenly.
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


def check_keys(mesh: Mesh, has_keys: bool, undivided: str | None = None) -> None:
    """Raise MeshError if the mesh has a `key` axis, but D_k cannot be divided over it.

    Args:
      mesh: the mesh of devices.
      has_keys: whether the residual has keys to shard.
      undivided: the mixer's option that needs all of D_k on each device, with an example of a
        legal value, like "num_heads=2; legal: num_heads=1"; None if there is none.
    """
    if mesh.shape["key"] > 1 and not has_keys:
        raise MeshError(
            f"--mesh: key={mesh.shape['key']} divides D_k, which a vector store does not have; "
            "legal: key=1, or a model with a matrix store, such as the presets rmt-*"
        )
    if mesh.shape["key"] > 1 and undivided is not None:
        raise MeshError(
            f"--mesh: key={mesh.shape['key']} divides D_k, which model.mixer does not support with "
            f"{undivided}, or key=1"
        )


def check_experts(mesh: Mesh, has_experts: bool) -> None:
    """Raise MeshError if the mesh has an `expert` axis but the model has no experts to shard."""
    if mesh.shape["expert"] > 1 and not has_experts:
        raise MeshError(
            f"--mesh: expert={mesh.shape['expert']} divides experts, which the model does not "
            "have; legal: expert=1, or a model with experts, such as the presets kimi-*"
        )


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that every device has in full."""
    return NamedSharding(mesh, PartitionSpec())


def parameter_specs(mesh: Mesh, axes: Any, shapes: Any) -> Any:
    """Return a PartitionSpec for each parameter: the mesh axes over which it is sharded.

    Args:
      mesh: a mesh from `make_mesh`.
      axes: a tree whose leaves are tuples of logical axis names.
      shapes: a tree with the same structure, whose leaves have a `shape`.

    Returns:
      A tree of PartitionSpecs with the same structure.

    Raises:
      MeshError: an axis does not divide evenly over the mesh.
    """

    def place(names: tuple[str, ...], array: Any) -> PartitionSpec:
        spec = [RULES.get(name) for name in names]
        for name, mesh_axes, size in zip(names, spec, array.shape, strict=True):
            shards = math.prod(mesh.shape[axis] for axis in mesh_axes or ())
            if size % shards:
                over = " x ".join(mesh_axes)
                raise MeshError(
                    f"--mesh: {over}={shards} does not divide the parameter axis {name!r} of "
                    f"size {size}; legal: {divisors(size)}"
                )
        return PartitionSpec(*spec)

    return jax.tree.map(place, axes, shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))


def used_axes(mesh: Mesh, spec: Iterable[Any]) -> PartitionSpec:
    """Return a PartitionSpec with only the mesh axes that have more than one device.

    Two specs with the same effect are then equal. Otherwise a program's results and its arguments
    could differ in axes of size 1, and JAX would compile the program once for each spec.
    """
    tuples = ((names,) if isinstance(names, str) else names or () for names in spec)
    used = [tuple(name for name in names if mesh.shape[name] > 1) for names in tuples]
    while used and not used[-1]:
        used.pop()
    return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in used))


def unused_axes(mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> tuple[str, ...]:
    """Return the mesh axes with more than one device that do not shard an array with this spec."""
    used = {a for entry in spec for a in (entry if isinstance(entry, tuple) else (entry,))}
    return tuple(a for a in mesh.axis_names if mesh.shape[a] > 1 and a not in used)
