"""Comparison of a device's results with expected values, and bounds on the differences.

An error is measured relative to the magnitude of its row, so that errors in rows of small values
count too. A row is the last axis of an array, or the last axes that have at least 16 entries
together. The magnitude of a row is its largest absolute value, but at least 1/16 of the largest
row's magnitude. If the terms of a row may cancel, it is at least 1/4 of that. For example, the
gradient of a query that sees only one key consists entirely of rounding errors.

The root mean square of all errors is measured relative to that of the expected values. It has a
tighter bound, because few rounding errors reach their maximum.

Bounds follow from the dtype of the inputs and the lengths of sums. Rounding to bfloat16 changes an
entry by at most 2^-8 of its value. A result is rounded once, and up to five of its factors have
been rounded before. Their errors may have the same sign. Therefore the bounds are 6 * 2^-8 of the
row's magnitude, and 2 * 2^-8 for the root mean square. In float32, each of the n terms of a sum is
rounded by up to 2^-24, up or down, so a bound of 4 sqrt(n) 2^-24 would be enough. The actual bound
is eight times as large, because of exponentials and of products that the device computes as several
bfloat16 products. The bound for the root mean square is half of this.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from rmt_tpu.analysis.device_case import Arrays, DeviceCase

# The unit roundoffs of bfloat16 and of float32.
_NARROW, _WIDE = 2.0**-8, 2.0**-24
_OF_ROW, _OF_MEAN = 6.0, 2.0
_FLOOR, _FLOOR_OF_CANCELLED = 1 / 16, 1 / 4
# Errors are measured by row, and a row has at least this number of entries.
_ROW = 16
# Arrays are compared in blocks of this number of entries, to limit memory.
BLOCK = 2**22
# This suffix of a result's name marks the root mean square of its errors.
MEAN = " (rms)"


class RelativeError(NamedTuple):
    """The error of an array, as two relative numbers.

    Attributes:
      largest: the maximum error, relative to the magnitude of its row.
      mean: the root mean square of the errors divided by that of the expected values.
    """

    largest: float
    mean: float


def compare(
    case: DeviceCase, inputs: Arrays, got: Arrays, want: Arrays
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the differences of results from expected values, and the bounds on them.

    Both are dicts from name to number. Each result has a maximum difference, under its name, and a
    root mean square, under "name (rms)". For a result that must be exact, the difference is the
    maximum absolute difference of the stored numbers. A difference is NaN if one of the two arrays
    contains NaN or infinity, or if their shapes differ.
    """
    differences, bounds = {}, {}
    for name, x in got.items():
        if name in case.exact:
            first = np.asarray(inputs[case.exact[name]], np.float64)
            differences[name] = float(np.max(np.abs(np.asarray(x, np.float64) - first), initial=0))
            bounds[name] = 0.0
            continue
        found = error(x, want[name], cancels=name in case.cancels)
        limit = bound(inputs, wide=name in case.wide, narrow=case.narrow)
        differences |= {name: found.largest, name + MEAN: found.mean}
        bounds |= {name: limit.largest, name + MEAN: limit.mean}
    return differences, bounds


def bound(inputs: Mapping[str, Any], *, wide: bool = False, narrow: bool = False) -> RelativeError:
    """Return the bound on the error of results that are computed from `inputs`.

    With `wide`, all intermediate values are float32, whatever the dtype of the inputs. With
    `narrow`, some are not, even if all inputs are float32, because a result is narrower.
    """
    if not wide and (narrow or any(map(_is_narrow, inputs.values()))):
        return RelativeError(_OF_ROW * _NARROW, _OF_MEAN * _NARROW)
    # A sum goes over all axes but the last, or over a single axis. This is its maximum length.
    length = max(max(x.size // max(x.shape[-1], 1), *x.shape) for x in inputs.values() if x.ndim)
    limit = 32 * math.sqrt(max(length, 1)) * _WIDE
    return RelativeError(limit, limit / 2)


def _is_narrow(x: Any) -> bool:
    return x.dtype in (jnp.bfloat16, jnp.float16)


def error(got: Any, want: Any, *, cancels: bool = False) -> RelativeError:
    """Return the error of the array `got` relative to the array `want`.

    The error is NaN if one of the two arrays contains NaN or infinity, or if their shapes differ.
    With `cancels`, the terms of some rows may cancel (see the module's docstring).
    """
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape:
        return RelativeError(math.nan, math.nan)
    if not want.size:
        return RelativeError(0.0, 0.0)
    row, axes = 1, list(want.shape)
    while axes and row < _ROW:
        row *= axes.pop()
    got, want = got.reshape(-1, row), want.reshape(-1, row)
    rows_per_block = max(1, BLOCK // row)
    sizes, errors, squares = [], [], np.zeros(2)
    for first in range(0, len(want), rows_per_block):
        wanted = want[first : first + rows_per_block].astype(np.float64)
        difference = got[first : first + rows_per_block].astype(np.float64) - wanted
        sizes.append(np.max(np.abs(wanted), axis=1))
        errors.append(np.max(np.abs(difference), axis=1))
        squares += np.sum(difference**2), np.sum(wanted**2)
    size, largest = np.concatenate(sizes), np.concatenate(errors)
    floor = (_FLOOR_OF_CANCELLED if cancels else _FLOOR) * (np.max(size) or 1.0)
    mean = math.sqrt(squares[0] / (squares[1] or 1.0))
    return RelativeError(float(np.max(largest / np.maximum(size, floor))), mean)
