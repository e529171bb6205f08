"""How far what a device computed is from its equations, and how far it may be.

An error is measured against the size of its row, the last axis of an array (or last axes, of at
least 16 entries together): one that is confined to rows of small values counts as much as one in
the large. The size of a row is its largest value, and at least a sixteenth of the largest row's, or
a quarter where rows may cancel: the gradient of a query that sees one key is nothing but what was
rounded on the way to it. Beside the largest error there is the root mean square of all, over that
of what is wanted, with a narrower bound: few errors of rounding are as large as they can be.

Bounds follow from the dtype of the inputs and the length of a sum. An entry of bfloat16 is off by
at most 2^-8 of itself when it is rounded. A result is rounded once, and up to five factors of it
before, some of millions of entries all to one side: 6 * 2^-8 of a row, and 2 * 2^-8 of the root
mean square. Float32 rounds by 2^-24, at each of the n terms of a sum to either side: 4 sqrt(n)
2^-24, and eight times as much for exponentials and for products that a device makes of several of
bfloat16.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from rmt_tpu.analysis.device_case import Arrays, Case

# The unit roundoffs of bfloat16 and float32.
_NARROW, _WIDE = 2.0**-8, 2.0**-24
_OF_ROW, _OF_MEAN = 6.0, 2.0
_FLOOR, _FLOOR_OF_CANCELLED = 1 / 16, 1 / 4
_ROW = 16  # entries, at least
_BLOCK = 2**22  # entries that are compared at a time
MEAN = " (rms)"  # behind a name: of the root mean square


class Error(NamedTuple):
    """Of an array: the largest, over the size of its row; and the root mean square, over that."""

    largest: float
    mean: float


def compare(
    case: Case, inputs: Arrays, got: Arrays, want: Arrays
) -> tuple[dict[str, float], dict[str, float]]:
    """Differences and their bounds by name, those of root mean squares as "name (rms)".

    Of what has to be the same to the bit, the largest number of steps. NaN where one of two arrays
    has what is not a number, or another shape.
    """
    differences, bounds = {}, {}
    for name, x in got.items():
        if name in case.exact:
            first = np.asarray(inputs[case.exact[name]], np.float64)
            differences[name] = float(np.max(np.abs(np.asarray(x, np.float64) - first), initial=0))
            bounds[name] = 0.0
            continue
        found = error(x, want[name], cancels=name in case.cancels)
        most = bound(inputs, wide=name in case.wide)
        differences |= {name: found.largest, name + MEAN: found.mean}
        bounds |= {name: most.largest, name + MEAN: most.mean}
    return differences, bounds


def bound(inputs: Mapping[str, Any], *, wide: bool = False) -> Error:
    """What is legal of a result of these inputs; `wide` if nothing of it is rounded to theirs."""
    if not wide and any(x.dtype in (jnp.bfloat16, jnp.float16) for x in inputs.values()):
        return Error(_OF_ROW * _NARROW, _OF_MEAN * _NARROW)
    # No sum is longer than all of an array but its last axis, or this.
    length = max(max(x.size // max(x.shape[-1], 1), *x.shape) for x in inputs.values() if x.ndim)
    most = 32 * math.sqrt(max(length, 1)) * _WIDE
    return Error(most, most / 2)


def error(got: Any, want: Any, *, cancels: bool = False) -> Error:
    """How far an array is from what is wanted; the values themselves where that is zero.

    NaN if one of the two has what is no number, and where the shapes differ.
    """
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape:
        return Error(math.nan, math.nan)
    if not want.size:
        return Error(0.0, 0.0)
    row, axes = 1, list(want.shape)
    while axes and row < _ROW:
        row *= axes.pop()
    got, want = got.reshape(-1, row), want.reshape(-1, row)
    each = max(1, _BLOCK // row)
    sizes, errors, squares = [], [], np.zeros(2)
    for first in range(0, len(want), each):
        wanted = want[first : first + each].astype(np.float64)
        off = got[first : first + each].astype(np.float64) - wanted
        sizes.append(np.max(np.abs(wanted), axis=1))
        errors.append(np.max(np.abs(off), axis=1))
        squares += np.sum(off**2), np.sum(wanted**2)
    size, off = np.concatenate(sizes), np.concatenate(errors)
    floor = (_FLOOR_OF_CANCELLED if cancels else _FLOOR) * (np.max(size) or 1.0)
    mean = math.sqrt(squares[0] / (squares[1] or 1.0))
    return Error(float(np.max(off / np.maximum(size, floor))), mean)
