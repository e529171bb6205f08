"""Meshes from a text like "data=2,fsdp=4"."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp")


class MeshError(ValueError):
    """A mesh, or a size on it, that cannot be; the message names the flag and what is legal."""


def make_mesh(spec: str, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with every axis of `AXES`, those that `spec` leaves out of size 1.

    Args:
      spec: comma-separated `axis=size`; one size may be -1, which fills up to all devices.
      devices: to lay out; None is all there are.

    Raises:
      MeshError: an axis is unknown or given twice, or the sizes do not make up the devices.
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
    grid = np.asarray(devices).reshape(shape)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


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
