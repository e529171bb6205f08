"""Plain JAX causal attention, for where no kernel serves.

Two forms of it. `reference` has all logits of a block of queries in memory, which is few operations
for short sequences. Where all logits of a call are more than `online.LOGITS`, which is what a
block of `online` may have, that form takes its place: with 16 heads and one row past 1448 tokens.
"""

import math
from types import ModuleType
from typing import Any

from pallas_kernels.causal_attention import online, reference
from pallas_kernels.causal_attention.interface import Attended, Attention, Part


def chosen(*sizes: Any) -> ModuleType:
    """The module that attends, by the numbers of rows, heads, queries and keys.

    Sizes that `jax.export` knows by names alone cannot be cut into blocks: all logits are made.
    """
    if not all(isinstance(size, int) for size in sizes):
        return reference
    return online if math.prod(sizes) > online.LOGITS else reference


def attention_forward(given: Attention, *, kv_heads: int, **options: Any) -> Any:
    """See `interface`."""
    return _whole(given, kv_heads).attention_forward(given, kv_heads=kv_heads, **options)


def attention_backward(
    given: Attention, attended: Attended, *, kv_heads: int, **options: Any
) -> Any:
    """See `interface`."""
    run = _whole(given, kv_heads).attention_backward
    return run(given, attended, kv_heads=kv_heads, **options)


def part_forward(given: Part) -> Any:
    """See `interface`."""
    return _part(given).part_forward(given)


def part_backward(given: Part, attended: Attended) -> Any:
    """See `interface`."""
    return _part(given).part_backward(given, attended)


def _whole(given: Attention, kv_heads: int) -> ModuleType:
    rows, length, heads, _ = given.qkv.shape
    if given.kv is None:
        heads -= 2 * kv_heads
    return chosen(rows, heads, length, length)


def _part(given: Part) -> ModuleType:
    rows, queries, heads, _ = given.q.shape
    return chosen(rows, heads, queries, given.apart[0].shape[1])
