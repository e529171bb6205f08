"""FLOPs of matrix products in a compiled program, which XLA represents as convolutions on TPUs."""

import math
import re

import numpy as np

from rmt_tpu.estimator.hlo import Array, Instruction, Module

_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")


def matmul_flops(module: Module, computation: str, instruction: Instruction) -> int:
    """Return the FLOPs of all matrix products in an instruction or its fusion; 0 if it has none."""
    scope = module.computations[computation]
    if instruction.opcode == "fusion":
        called = instruction.called["calls"]
        inside = module.computations[called].values()
        return sum(matmul_flops(module, called, i) for i in inside)
    if instruction.opcode not in ("convolution", "dot"):
        return 0
    left, right = (scope[name].arrays[0] for name in instruction.operands[:2])
    if instruction.opcode == "dot":
        axes = _CONTRACTED.search(instruction.attributes).group(1)
        contracted = math.prod(left.shape[int(axis)] for axis in axes.split(",") if axis)
        return 2 * math.prod(instruction.arrays[0].shape) * contracted
    return _convolution(instruction, left, right)


def _convolution(instruction: Instruction, left: Array, right: Array) -> int:
    labels = _LABELS.search(instruction.attributes).groups()
    shapes = (left.shape, right.shape, instruction.arrays[0].shape)
    x, kernel, out = (
        dict(zip(names, s, strict=True)) for names, s in zip(labels, shapes, strict=True)
    )
    written = _WINDOW.search(instruction.attributes)
    window = dict(field.split("=") for field in written.group(1).split()) if written else {}
    flops = 2 * out["b"] * out["f"] * kernel["i"]
    for axis in range(sum(name.isdigit() for name in labels[2])):
        name = str(axis)
        flops *= _pairs(axis, window, x[name], kernel[name], out[name])
    return flops


def _pairs(axis: int, window: dict[str, str], size: int, taps: int, out: int) -> int:
    """Count the multiplications along a spatial axis of a convolution, except those with padding.

    Each multiplication belongs to one kernel entry (tap) and one output entry.
    """

    def of(field: str, default: str) -> list[int]:
        values = window[field].split("x")[axis] if field in window else default
        return [int(n) for n in values.split("_")]

    (stride,), (low, _) = of("stride", "1"), of("pad", "0_0")
    (spread,), (gap,) = of("lhs_dilate", "1"), of("rhs_dilate", "1")
    pairs = 0
    for tap in range(taps):
        at = np.arange(out) * stride + tap * gap - low
        pairs += int(np.sum((at % spread == 0) & (at >= 0) & (at < size * spread)))
    return pairs
