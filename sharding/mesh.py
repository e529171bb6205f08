"""Meshes from a text like "data=2,fsdp=4", laid out on the machine's own network."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

# From the outermost, which talk least, to the innermost, whose devices are each other's neighbours.
AXES = ("stage", "data", "fsdp", "key", "sequence", "tensor")
# Those that may span slices of a pod, whose network is slow, in the order in which they do.
_BETWEEN_SLICES = ("data", "stage", "fsdp")


class MeshError(ValueError):
    """A mesh, or a size on it, that cannot be; the message names the flag and what is legal."""


def make_mesh(spec: str, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with every axis of `AXES`, those that `spec` leaves out of size 1.

    Devices of a TPU are placed by their coordinates. With several slices, `data`, then `stage`,
    then `fsdp` run between them, as far as their sizes go.

    Args:
      spec: comma-separated `axis=size`; one size may be -1, which fills up to all devices.
      devices: to lay out; None is all there are.

    Raises:
      MeshError: an axis is unknown or given twice, the sizes do not make up the devices, or no
        axis can span the slices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = _parse(spec)
    fixed = math.prod(size for size in sizes.values() if size != -1)
    fills = [axis for axis, size in sizes.items() if size == -1]
    if len(fills) > 1:
        raise MeshError(f"--mesh={spec!r} has -1 on {' and '.join(fills)}; only one axis can fill")
    if fills and len(devices) % fixed == 0:
        sizes[fills[0]] = len(devices) // fixed
    elif fills or fixed != len(devices):
        divisors = [n for n in range(1, len(devices) + 1) if len(devices) % n == 0]
        raise MeshError(
            f"--mesh={spec!r} asks for {fixed} devices{' or a multiple' if fills else ''}, "
            f"and there are {len(devices)}; axis sizes can be {', '.join(map(str, divisors))}, "
            "or -1 to fill"
        )
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    # Auto: what lies outside the per-device code (see `per_device`) the compiler may partition.
    return Mesh(_grid(spec, shape, devices), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _parse(spec: str) -> dict[str, int]:
    sizes = {}
    for part in filter(None, spec.split(",")):
        axis, equals, text = part.partition("=")
        if axis not in AXES or axis in sizes:
            why = "is given twice" if axis in sizes else "is unknown"
            raise MeshError(f"--mesh={spec!r}: axis {axis!r} {why}; legal axes: {', '.join(AXES)}")
        if not equals or not text.lstrip("-").isdigit() or int(text) == 0 or int(text) < -1:
            raise MeshError(
                f"--mesh={spec!r}: {part!r} must be axis=size, the size at least 1 or -1"
            )
        sizes[axis] = int(text)
    return sizes


def _grid(spec: str, shape: tuple[int, ...], devices: Sequence[jax.Device]) -> np.ndarray:
    """The devices in the mesh's shape."""
    if devices[0].platform != "tpu" or len(devices) == 1:
        return np.asarray(devices).reshape(shape)
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    between, left = dict.fromkeys(AXES, 1), slices
    for axis in _BETWEEN_SLICES:
        between[axis] = math.gcd(left, shape[AXES.index(axis)])
        left //= between[axis]
    if left > 1:
        raise MeshError(
            f"--mesh={spec!r} cannot span {slices} slices: one of {', '.join(_BETWEEN_SLICES)} "
            f"must be a multiple of {slices}"
        )
    within = tuple(size // between[axis] for axis, size in zip(AXES, shape, strict=True))
    return mesh_utils.create_hybrid_device_mesh(
        within, tuple(between.values()), devices, allow_split_physical_axes=True
    )
