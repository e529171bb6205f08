"""Causal attention on TPU: a whole sequence at a time where that is faster, else blocks of it.

The first reads and writes rows in either order; blocks have the tokens of a head side by side
("head_major"), so that in the other order XLA moves rows before and after them.
"""

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import tuned
from pallas_kernels.call import LANES, round_up
from pallas_kernels.causal_attention import mosaic_tpu_blocks as by_blocks
from pallas_kernels.causal_attention import mosaic_tpu_whole as whole
from pallas_kernels.causal_attention.mosaic_tpu_whole import Rows, tokens_first, tokens_last

# Sequences up to which a step with all of one, and half of its logits masked, is faster.
_WHOLE = 1024


def unsupported(
    op: str, qkv: Any, *others: Any, kv_heads: int | None = None, rows: Rows = "size_major"
) -> str | None:
    """Why the kernels cannot serve the named op with these arrays, in a line; None if they can."""
    lengths = (qkv.shape[1], others[0].shape[1]) if op.startswith("part_") else ()
    if any(length % LANES for length in lengths):
        return f"parts of {lengths[0]} queries and {lengths[1]} keys (multiples of {LANES})"
    if qkv.dtype not in (jnp.bfloat16, jnp.float32):
        return f"data vectors of {qkv.dtype} (bfloat16 or float32)"
    if qkv.shape[3] % 8:
        return f"heads of size {qkv.shape[3]} (multiples of 8)"
    return None


def attention_forward(
    qkv: Float[Array, "B N P D"],
    *,
    scale: Float[Array, ""] | int | float,
    slopes: Float[Array, " H"] | None = None,
    segment_ids: Int[Array, "B N"] | None = None,
    kv_heads: int | None = None,
    rows: Rows = "size_major",
    blocks: by_blocks.Blocks | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B N H D"], Float[Array, "B N H"]]:
    """The output, and the logarithm of each softmax's sum in float32; by `blocks` if given."""
    masks = {"slopes": slopes, "segment_ids": segment_ids}
    if blocks is None and _is_whole(qkv, kv_heads, rows):
        return whole.attention_forward(qkv, scale=scale, rows=rows, interpret=interpret, **masks)
    cut = _Cut("attention_blocks_forward", qkv, kv_heads, blocks, **masks)
    out, log_sums = by_blocks.attention_forward(
        *cut.heads_of(qkv), scale=scale, slopes=slopes, interpret=interpret, **cut.shared
    )
    return cut.tokens_first(out), cut.sums_first(log_sums)


def attention_backward(
    qkv: Float[Array, "B N P D"],
    out: Float[Array, "B N H D"],
    log_sums: Float[Array, "B N H"],
    d_out: Float[Array, "B N H D"],
    *,
    scale: Float[Array, ""] | int | float,
    slopes: Float[Array, " H"] | None = None,
    segment_ids: Int[Array, "B N"] | None = None,
    kv_heads: int | None = None,
    rows: Rows = "size_major",
    blocks: by_blocks.Blocks | None = None,
    interpret: bool = False,
) -> Float[Array, "B N P D"]:
    """The cotangent of qkv. With weights p: `ds = p (d_out v - sum(out d_out))`."""
    masks = {"slopes": slopes, "segment_ids": segment_ids}
    d_out = d_out.astype(qkv.dtype)
    if blocks is None and _is_whole(qkv, kv_heads, rows):
        shared = dict(scale=scale, rows=rows, interpret=interpret, **masks)
        return whole.attention_backward(qkv, out, log_sums, d_out, **shared)
    cut = _Cut("attention_blocks_backward", qkv, kv_heads, blocks, **masks)
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    gradients = by_blocks.attention_backward(
        *cut.heads_of(qkv),
        cut.sums_last(log_sums),
        cut.sums_last(delta),
        cut.tokens_last(d_out),
        scale=scale,
        slopes=slopes,
        interpret=interpret,
        **cut.shared,
    )
    return cut.tokens_first(jnp.concatenate(gradients, axis=1))


def part_forward(
    q: Float[Array, "B Q H D"],
    kv: Float[Array, "B K P D"],
    scale: Float[Array, ""] | int | float,
    shift: Int[Array, ""] | int,
    slopes: Float[Array, " H"] | None,
    segments: tuple[Int[Array, "B Q"], Int[Array, "B K"]] | None,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B Q H D"], Float[Array, "B Q H"]]:
    """Attention to an earlier part of the sequence; see the portable form."""
    given, shared = _part("attention_blocks_forward", q, kv, slopes, segments)
    shared |= {"scale": scale, "shift": shift, "slopes": slopes, "interpret": interpret}
    out, sums = by_blocks.attention_forward(*given, **shared)
    return tokens_first(out, "head_major"), sums[:, :, 0].swapaxes(1, 2)


def part_backward(
    q: Float[Array, "B Q H D"],
    kv: Float[Array, "B K P D"],
    out: Float[Array, "B Q H D"],
    log_sums: Float[Array, "B Q H"],
    d_out: Float[Array, "B Q H D"],
    scale: Float[Array, ""] | int | float,
    shift: Int[Array, ""] | int,
    slopes: Float[Array, " H"] | None,
    segments: tuple[Int[Array, "B Q"], Int[Array, "B K"]] | None,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B Q H D"], Float[Array, "B K P D"]]:
    """Cotangents of q and kv; out and log sums are those of all parts."""
    given, shared = _part("attention_blocks_backward", q, kv, slopes, segments)
    shared |= {"scale": scale, "shift": shift, "slopes": slopes, "interpret": interpret}
    d_out = d_out.astype(q.dtype)
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    sums, delta = (x.swapaxes(1, 2)[:, :, None] for x in (log_sums, delta))
    d_out = tokens_last(d_out, "head_major")
    d_q, d_k, d_v = by_blocks.attention_backward(*given, sums, delta, d_out, **shared)
    # To be added up with those of other parts.
    gradients = (x.astype(jnp.float32) for x in (d_q, jnp.concatenate([d_k, d_v], axis=1)))
    return tuple(tokens_first(x, "head_major") for x in gradients)


def _part(kernel, q, kv, slopes, segments):
    """Arrays of the blocks' kernels, and what they are told; blocks divide both lengths."""
    heads, kv_heads = q.shape[2], kv.shape[2] // 2
    key = _key(heads, kv_heads, q, slopes, segments)
    blocks = _blocks(kernel, key, q.shape[1])
    tokens = math.gcd(blocks.queries, blocks.keys, q.shape[1], kv.shape[1])
    keys = tokens_last(kv, "head_major")
    given = [
        by_blocks.Heads(tokens_last(q, "head_major")),
        by_blocks.Heads(keys),
        by_blocks.Heads(keys, kv_heads),
    ]
    blocks = blocks._replace(queries=tokens, keys=tokens)
    shared = {"heads": (heads, kv_heads), "segments": segments, "offset": None, "blocks": blocks}
    return given, shared


def _key(heads, kv_heads, x, slopes, segments):
    """Of the table of blocks."""
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "size": x.shape[3],
        "dtype": jnp.dtype(x.dtype).name,
        "alibi": slopes is not None,
        "segments": segments is not None,
    }


def _blocks(kernel, key, length):
    default = by_blocks.default_blocks(kernel, length, **key)
    return tuned.look_up(KERNELS[kernel], key, length, default)


def _is_whole(qkv, kv_heads: int | None, rows: Rows) -> bool:
    alike = kv_heads is None or 3 * kv_heads == qkv.shape[2]
    return alike and qkv.shape[1] <= _WHOLE and whole.fits(qkv, rows)


class _Cut:
    """Arrays in the blocks' layout, of whole blocks: what fills the last is behind all queries."""

    def __init__(self, kernel, qkv, kv_heads, blocks, slopes, segment_ids):
        _, self.length, P, _ = qkv.shape
        kv_heads = P // 3 if kv_heads is None else kv_heads
        heads = P - 2 * kv_heads
        if blocks is None:
            key = _key(heads, kv_heads, qkv, slopes, segment_ids)
            blocks = _blocks(kernel, key, self.length)
        self._heads = heads, kv_heads
        self._missing = round_up(self.length, max(blocks.queries, blocks.keys)) - self.length
        ids = None if segment_ids is None else self._whole(segment_ids, axis=1)
        segments = None if ids is None else (ids, ids)
        self.shared = {"heads": self._heads, "segments": segments, "blocks": blocks}

    def heads_of(self, qkv) -> list[by_blocks.Heads]:
        """Queries, keys and values of one array."""
        (heads, kv_heads), array = self._heads, self.tokens_last(qkv)
        return [by_blocks.Heads(array, first) for first in (0, heads, heads + kv_heads)]

    def tokens_last(self, x: Float[Array, "B N R D"]) -> Float[Array, "B R D whole_N"]:
        return self._whole(tokens_last(x, "head_major"), axis=3)

    def tokens_first(self, x: Float[Array, "B R D whole_N"]) -> Float[Array, "B N R D"]:
        return tokens_first(x[..., : self.length], "head_major")

    def sums_last(self, x: Float[Array, "B N H"]) -> Float[Array, "B H 1 whole_N"]:
        return self._whole(x.swapaxes(1, 2)[:, :, None], axis=3)

    def sums_first(self, x: Float[Array, "B H 1 whole_N"]) -> Float[Array, "B N H"]:
        return x[:, :, 0, : self.length].swapaxes(1, 2)

    def _whole(self, x, axis: int):
        missing = [(0, self._missing if a == axis else 0) for a in range(x.ndim)]
        return jnp.pad(x, missing) if self._missing else x


KERNELS = whole.KERNELS | by_blocks.KERNELS
