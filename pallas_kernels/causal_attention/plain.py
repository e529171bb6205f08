"""Causal attention in plain JAX, for calls that no kernel supports.

There are two forms. `reference` holds all logits of a block of queries in memory, which takes few
operations for short sequences. A call with more than `online.LOGITS` logits uses `online` in its
place. With 16 heads and one batch row, this happens from 1449 tokens on.
"""

import math
from types import ModuleType
from typing import Any

from pallas_kernels.causal_attention import online, reference
from pallas_kernels.causal_attention.interface import Attended, Attention, Part


def chosen(*sizes: Any) -> ModuleType:
    """Return the module to use, given the numbers of batch rows, heads, queries and keys.

    With the symbolic sizes of `jax.export`, which cannot be divided into blocks, it is `reference`.
    """
    if not all(isinstance(size, int) for size in sizes):
        return reference
    return online if math.prod(sizes) > online.LOGITS else reference


def attention_forward(given: Attention, *, kv_heads: int, **options: Any) -> Any:
    """Compute `attention_forward` as specified in `interface`."""
    return _whole(given, kv_heads).attention_forward(given, kv_heads=kv_heads, **options)


def attention_backward(
    given: Attention, attended: Attended, *, kv_heads: int, **options: Any
) -> Any:
    """Compute `attention_backward` as specified in `interface`."""
    run = _whole(given, kv_heads).attention_backward
    return run(given, attended, kv_heads=kv_heads, **options)


def part_forward(given: Part) -> Any:
    """Compute `part_forward` as specified in `interface`."""
    return _part(given).part_forward(given)


def part_backward(given: Part, attended: Attended) -> Any:
    """Compute `part_backward` as specified in `interface`."""
    return _part(given).part_backward(given, attended)


def _whole(given: Attention, kv_heads: int) -> ModuleType:
    rows, length, heads, _ = given.qkv.shape
    if given.kv is None:
        heads -= 2 * kv_heads
    return chosen(rows, heads, length, length)


def _part(given: Part) -> ModuleType:
    rows, queries, heads, _ = given.q.shape
    return chosen(rows, heads, queries, given.apart[0].shape[1])
