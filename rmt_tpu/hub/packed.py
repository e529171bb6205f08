"""Matrices packed as MXFP4: 4-bit floats with one scale for each group of 32 adjacent columns.

A matrix `X.weight` [rows, columns] is stored as two tensors of bytes (the format
"mxfp4-pack-quantized" of compressed-tensors; OCP Microscaling Formats 1.0):

- `X.weight_packed` [rows, columns / 2]: two numbers per byte; the lower four bits are the even
  column's number. A number has a sign bit, two exponent bits and one mantissa bit (E2M1).
- `X.weight_scale` [rows, columns / 32]: each group's exponent e, for the factor `2^(e - 127)`
  (E8M0). The value 255 means NaN.

This module treats both tensors as arrays of groups. A group has 16 bytes in the first tensor and
one byte in the second, and the same index in both.

This module does not import JAX.
"""

import numpy as np
from jaxtyping import Float, UInt8

from rmt_tpu.hub.files import Region, View

GROUP = 32
GROUP_BYTES = GROUP // 2
GROWTH = 8  # a packed byte contains two numbers, which occupy 8 bytes in float32
SUFFIXES = ("_packed", "_scale")
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], np.float32)
# Lookup tables: the two numbers in each possible byte, and the factor of each exponent byte.
_PAIRS = np.stack([_VALUES[np.arange(256) % 16], _VALUES[np.arange(256) // 16]], axis=-1)
_FACTORS = np.float32([*np.ldexp(1.0, np.arange(255) - 127), np.nan])


def stored(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return a dict from name to shape, for the two tensors that store a packed matrix."""
    rows, columns = shape
    sizes = (columns // 2, columns // GROUP)
    return {f"{name}{suffix}": (rows, size) for suffix, size in zip(SUFFIXES, sizes, strict=True)}


def unpack(
    packed: UInt8[np.ndarray, "*groups 16"], scales: UInt8[np.ndarray, "*groups"]
) -> Float[np.ndarray, "*groups 32"]:
    """Unpack groups of packed bytes and their exponents to float32 numbers."""
    values = _PAIRS[packed].reshape(*packed.shape[:-1], GROUP)
    return values * _FACTORS[scales][..., None]


def views(view: View) -> tuple[View, View]:
    """Return views of the packed bytes and of the scales, as arrays of groups.

    `view` describes the unpacked matrix as if each number had one byte. Its first axis is the rows.
    """
    axis = _axis(view)
    shape = _replaced(view.shape, axis, view.shape[axis] // GROUP)
    strides = ([max(s * size // GROUP, size) for s in view.strides] for size in (GROUP_BYTES, 1))
    packed, scales = (View(0, shape, tuple(own)) for own in strides)
    return packed, scales


def of_groups(view: View, region: Region) -> Region:
    """Convert a region of matrix elements to the smallest region of groups that covers it."""
    axis = _axis(view)
    begin, end = region[axis]
    return _replaced(region, axis, (begin // GROUP, -(-end // GROUP)))


def range_of_scales(view: View, region: Region) -> tuple[int, int]:
    """Return the first byte and the number of bytes of a region of groups in the scale tensor."""
    strides = views(view)[1].strides
    begin = sum(start * stride for (start, _), stride in zip(region, strides, strict=True))
    last = sum((stop - 1) * stride for (_, stop), stride in zip(region, strides, strict=True))
    return begin, last - begin + 1


def values(
    view: View, region: Region, packed: UInt8[np.ndarray, " n"], scales: UInt8[np.ndarray, " m"]
) -> tuple[Region, Float[np.ndarray, "..."]]:
    """Unpack a region of groups; return the matrix region that it covers, and its numbers.

    Args:
      view: the matrix, as if each number had one byte.
      region: the region, in groups.
      packed, scales: the region's contiguous byte range in each of the two tensors.
    """
    axis, shape = _axis(view), [stop - start for start, stop in region]
    of_packed, of_scales = (own.strides for own in views(view))
    groups = np.ndarray([*shape, GROUP_BYTES], np.uint8, packed, strides=(*of_packed, 1))
    found = unpack(groups, np.ndarray(shape, np.uint8, scales, strides=of_scales))
    shape[axis] *= GROUP
    begin, end = region[axis]
    whole = _replaced(region, axis, (begin * GROUP, end * GROUP))
    return whole, np.moveaxis(found, -1, axis + 1).reshape(shape)


def _axis(view: View) -> int:
    """Return the axis of the columns, the first axis after the rows whose size is not 1."""
    return next(axis for axis, size in enumerate(view.shape) if axis and size > 1)


def _replaced(items: tuple, at: int, item: object) -> tuple:
    return (*items[:at], item, *items[at + 1 :])
