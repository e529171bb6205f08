"""Construction of device meshes from text such as "data=2,fsdp=4".

On TPUs, the arrangement of devices follows the network between them.
"""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from sharding.errors import MeshError, divisors
from sharding.spec import AXES, parse_mesh

# The mesh axes that may span several slices of a TPU pod, in order of preference. Other axes stay
# within a slice, because the network between slices is slow.
_BETWEEN_SLICES = ("data", "stage", "fsdp")


def make_mesh(spec: str, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return a mesh with all axes of `AXES`; axes that are not in `spec` have size 1.

    TPU devices are arranged by their physical coordinates. With several slices, the axis `data`
    spans slices. If its size is less than the number of slices, `stage` and then `fsdp` span slices
    too.

    Args:
      spec: comma-separated `axis=size` items; one size may be -1, which means all remaining
        devices.
      devices: the devices to arrange; None means all devices.

    Raises:
      MeshError: an axis is unknown or given twice, the product of the sizes is not the number of
        devices, or no axis can span the slices.
    """
    devices = jax.devices() if devices is None else devices
    shape = tuple(mesh_sizes(spec, len(devices)).values())
    # With Auto axes, the compiler partitions code that is outside of per-device functions (see
    # `per_device`).
    return Mesh(_grid(spec, shape, devices), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def mesh_sizes(spec: str, count: int) -> dict[str, int]:
    """Return a dict from each axis of `AXES`, in their order, to its size on `count` devices.

    Args:
      spec: the mesh as text, as in `make_mesh`.
      count: the number of devices.

    Raises:
      MeshError: an axis is unknown or given twice, or the product of the sizes is not the number of
        devices.
    """
    sizes = parse_mesh(spec)
    fixed = math.prod(size for size in sizes.values() if size != -1)
    fills = [axis for axis, size in sizes.items() if size == -1]
    if fills and count % fixed == 0:
        sizes[fills[0]] = count // fixed
    elif fills or fixed != count:
        raise MeshError(
            f"--mesh={spec!r} needs {fixed} devices{' or a multiple' if fills else ''}, but there "
            f"are {count}; legal sizes of an axis: {divisors(count)}, or -1 for all devices that "
            "are left"
        )
    return {axis: sizes.get(axis, 1) for axis in AXES}


def _grid(spec: str, shape: tuple[int, ...], devices: Sequence[jax.Device]) -> np.ndarray:
    """Return the devices as an array in the mesh's shape."""
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
            f"--mesh={spec!r} cannot be divided over {slices} slices; legal: the size of "
            f"{' or '.join(_BETWEEN_SLICES)} is a multiple of {slices}"
        )
    within = tuple(size // between[axis] for axis, size in zip(AXES, shape, strict=True))
    return mesh_utils.create_hybrid_device_mesh(
        within, tuple(between.values()), devices, allow_split_physical_axes=True
    )
