"""Causal attention in plain JAX, for calls that no kernel supports.

Calls with more than `online.LOGITS` logits use the module `online`, which needs less memory. Other
calls use `reference`, which takes fewer operations. With 16 heads and one batch row, calls with
1449 tokens or more use `online`.
"""

import math
from types import ModuleType
from typing import Any

from pallas_kernels.causal_attention import online, reference
from pallas_kernels.causal_attention.interface import (
    AttentionOperands,
    PartOperands,
    ResultsAndCotangent,
)


def module_for(*sizes: Any) -> ModuleType:
    """Return the module to use, given the numbers of batch rows, heads, queries and keys.

    It is `reference` for the symbolic sizes of `jax.export`, which cannot be divided into blocks.
    """
    if not all(isinstance(size, int) for size in sizes):
        return reference
    return online if math.prod(sizes) > online.LOGITS else reference


def attention_forward(operands: AttentionOperands, *, kv_heads: int, **options: Any) -> Any:
    """Return the attention output and each softmax's log-sum-exp, as `interface.py` specifies."""
    return _module_of_sequence(operands, kv_heads).attention_forward(
        operands, kv_heads=kv_heads, **options
    )


def attention_backward(
    operands: AttentionOperands, results: ResultsAndCotangent, *, kv_heads: int, **options: Any
) -> Any:
    """Return the cotangents of qkv and kv, as `interface.py` specifies."""
    run = _module_of_sequence(operands, kv_heads).attention_backward
    return run(operands, results, kv_heads=kv_heads, **options)


def part_forward(operands: PartOperands) -> Any:
    """Attend from one part of a sequence to another, as `interface.py` specifies."""
    return _module_of_part(operands).part_forward(operands)


def part_backward(operands: PartOperands, results: ResultsAndCotangent) -> Any:
    """Return the cotangents of `part_forward`'s q and kv, as `interface.py` specifies."""
    return _module_of_part(operands).part_backward(operands, results)


def _module_of_sequence(operands: AttentionOperands, kv_heads: int) -> ModuleType:
    rows, length, heads, _ = operands.qkv.shape
    if operands.kv is None:
        heads -= 2 * kv_heads
    return module_for(rows, heads, length, length)


def _module_of_part(operands: PartOperands) -> ModuleType:
    rows, queries, heads, _ = operands.q.shape
    return module_for(rows, heads, queries, operands.keys_and_values[0].shape[1])
