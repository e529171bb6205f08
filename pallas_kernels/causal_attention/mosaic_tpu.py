"""Causal attention on TPUs, with the faster of two kernels.

The kernel of `mosaic_tpu_whole` is for short sequences. One grid step processes a whole sequence.
In the kernel of `mosaic_tpu_blocks`, a grid step processes one block of queries and one block of
keys. Both kernels support both memory orders, "size_major" [B, D, P, N] and "head_major" [B, P, D,
N]. There are two cases in which the blockwise kernel does not support "size_major": the number of
bfloat16 heads is odd, or the gradients of all queries do not fit in VMEM. XLA then transposes the
arrays.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels import tuned
from pallas_kernels.arguments import read_slices, write_slice
from pallas_kernels.call import LANES, round_up
from pallas_kernels.causal_attention import block_sizes, mosaic_tpu_whole
from pallas_kernels.causal_attention import mosaic_tpu_blocks as by_blocks
from pallas_kernels.causal_attention.block_sizes import Blocks, KernelWork
from pallas_kernels.causal_attention.interface import (
    AttentionOperands,
    KeysAndValues,
    PartOperands,
    ResultsAndCotangent,
    Rows,
)
from pallas_kernels.causal_attention.mosaic_tpu_whole import tokens_first, tokens_last

# Maximum length for which the whole-sequence kernel is faster than the blockwise kernel.
_WHOLE = 1024
# The log-sum-exp of padded queries. All of their weights are then 0, also with negative slopes,
# whose logits grow with the distance.
_NO_WEIGHT = 1e30


def unsupported(
    op: str,
    operands: AttentionOperands | PartOperands,
    *results: ResultsAndCotangent,
    kv_heads: int | None = None,
) -> str | None:
    """Return a one-line reason if the kernels do not support these operands, else None.

    `kv_heads` is the number of key heads, if one array contains queries, keys and values. None
    means as many as there are query heads.
    """
    if isinstance(operands, PartOperands):
        queries, keys = operands.q.shape[1], operands.keys_and_values[0].shape[1]
        if queries % LANES or keys % LANES:
            return f"parts of {queries} queries and {keys} keys (legal: multiples of {LANES})"
    qkv = operands[0]
    if qkv.dtype not in (jnp.bfloat16, jnp.float32):
        return f"data vectors of {qkv.dtype} (legal: bfloat16 or float32)"
    for size in (x.shape[3] for x in jax.tree.leaves((qkv, operands.kv))):
        if size % 8:
            return f"heads of size {size} (legal: multiples of 8)"
    heads, kv_heads = _heads(operands, kv_heads)
    key = _key(operands, (heads, kv_heads), "head_major")
    blocks = block_sizes.default_blocks(
        "attention_blocks_backward", qkv.shape[1], **key, **_of_logits(operands)
    )
    if not _fits(operands, key, blocks):
        each = heads // kv_heads
        return (
            f"{each} query heads of size {key['size']} per key head: a block does not fit in VMEM"
        )
    return None


def _heads(operands: AttentionOperands | PartOperands, kv_heads: int | None) -> tuple[int, int]:
    """Return the numbers of query heads and of key heads.

    If one array contains queries, keys and values, its shape does not state both numbers, and
    `kv_heads` is needed: see `unsupported`.
    """
    if isinstance(operands, PartOperands):
        return operands.q.shape[2], operands.keys_and_values[0].shape[2]
    rows = operands.qkv.shape[2]
    if operands.kv is not None:
        return rows, operands.kv[0].shape[2]
    kv_heads = rows // 3 if kv_heads is None else kv_heads
    return rows - 2 * kv_heads, kv_heads


def attention_forward(
    operands: AttentionOperands,
    *,
    kv_heads: int,
    rows: Rows = "size_major",
    blocks: Blocks | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float[Array, "*count B N H Dv"], Float[Array, "B N H"]]:
    """Return the attention output and each softmax's log-sum-exp, as `interface.py` specifies.

    If `blocks` is given, the blockwise kernel runs with these block sizes. If it is None, this
    function chooses the kernel and its block sizes.
    """
    if blocks is None and _fits_whole(operands, kv_heads, rows):
        # This kernel writes only to a stack of its own dtype.
        to = operands.to
        direct = to is None or to.dtype == operands.qkv.dtype
        operands = operands if direct else operands._replace(to=None)
        out, log_sums = mosaic_tpu_whole.attention_forward(operands, rows=rows, interpret=interpret)
        return (out if direct else write_slice(out, to)), log_sums
    padded = _PaddedOperands("attention_blocks_forward", operands, kv_heads, rows, blocks)
    out, log_sums = by_blocks.attention_forward(
        padded.operands, blocks=padded.blocks, interpret=interpret
    )
    return write_slice(padded.tokens_first(out), operands.to), padded.sums_first(log_sums)


def attention_backward(
    operands: AttentionOperands,
    results: ResultsAndCotangent,
    *,
    kv_heads: int,
    rows: Rows = "size_major",
    blocks: Blocks | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float[Array, "B N P D"], KeysAndValues | None]:
    """Return the cotangents of qkv and kv, as `interface.py` specifies.

    If `blocks` is given, the blockwise kernel runs with these block sizes. If it is None, this
    function chooses the kernel and its block sizes.
    """
    results = results._replace(d_out=results.d_out.astype(operands.qkv.dtype))
    if blocks is None and _fits_whole(operands, kv_heads, rows):
        if results.out.dtype != operands.qkv.dtype:
            out = read_slices(results.out).astype(operands.qkv.dtype)
            results = results._replace(out=out)
        return mosaic_tpu_whole.attention_backward(
            operands, results, rows=rows, interpret=interpret
        ), None
    results = read_slices(results)
    padded = _PaddedOperands("attention_blocks_backward", operands, kv_heads, rows, blocks)
    log_sums = padded.sums_last(results.log_sums, padding=_NO_WEIGHT)
    d_out = padded.tokens_last(results.d_out)
    options = {"blocks": padded.blocks, "interpret": interpret}
    if padded.rows == "size_major":
        out = padded.tokens_last(results.out.astype(operands.qkv.dtype))
        of_queries = log_sums, out, d_out
        d_qkv = by_blocks.attention_backward_of_rows(padded.operands, *of_queries, **options)
        return padded.tokens_first(d_qkv), None
    of_queries = log_sums, padded.sums_last(_delta(results)), d_out
    gradients = by_blocks.attention_backward(padded.operands, *of_queries, **options)
    if operands.kv is None:
        return padded.tokens_first(jnp.concatenate(gradients, axis=1)), None
    d_q, *d_kv = map(padded.tokens_first, gradients)
    return d_q, tuple(d_kv)


def part_forward(
    operands: PartOperands, *, interpret: bool = False
) -> tuple[Float[Array, "B Q H Dv"], Float[Array, "B Q H"]]:
    """Attend from one part of a sequence to another, as `interface.py` specifies."""
    of_part, blocks = _part("attention_blocks_forward", operands)
    out, sums = by_blocks.attention_forward(of_part, blocks=blocks, interpret=interpret)
    return tokens_first(out, "head_major"), sums[:, :, 0].swapaxes(1, 2)


def part_backward(
    operands: PartOperands, results: ResultsAndCotangent, *, interpret: bool = False
) -> tuple[Float[Array, "B Q H D"], Float[Array, "B K P D"] | KeysAndValues]:
    """Return the cotangents of `part_forward`'s q and kv, as `interface.py` specifies."""
    # The caller adds up the gradients of several parts, which must not be rounded before.
    of_part, blocks = _part("attention_blocks_backward", operands, with_gradients=True)
    results = results._replace(d_out=results.d_out.astype(operands.q.dtype))
    sums = (x.swapaxes(1, 2)[:, :, None] for x in (results.log_sums, _delta(results)))
    d_out = tokens_last(results.d_out, "head_major")
    options = {"blocks": blocks, "interpret": interpret}
    d_q, d_k, d_v = by_blocks.attention_backward(of_part, *sums, d_out, **options)
    gradients = (tokens_first(x.astype(jnp.float32), "head_major") for x in (d_q, d_k, d_v))
    d_q, *d_kv = gradients
    return d_q, operands.like_kv(*d_kv)


def _delta(results: ResultsAndCotangent) -> Float[Array, "B Q H"]:
    out, d_out = (x.astype(jnp.float32) for x in (results.out, results.d_out))
    return jnp.sum(out * d_out, axis=-1)


def _part(
    kernel: str, operands: PartOperands, *, with_gradients: bool = False
) -> tuple[by_blocks.BlockOperands, Blocks]:
    """Return the operands for the blockwise kernels, and block sizes that divide the lengths."""
    k, v = operands.keys_and_values
    heads, kv_heads = operands.q.shape[2], k.shape[2]
    key, wide = _key(operands, (heads, kv_heads), "head_major"), (False, False)
    blocks = _blocks(kernel, operands, key)
    if with_gradients:
        blocks, wide = _with_wide_gradients(operands, key, blocks)
    tokens = math.gcd(blocks.queries, blocks.keys, operands.q.shape[1], k.shape[1])
    if isinstance(operands.kv, tuple):
        kv = (by_blocks.HeadRows(tokens_last(x, "head_major")) for x in operands.kv)
    else:  # One array contains the keys, followed by the values.
        rows = tokens_last(operands.kv, "head_major")
        kv = by_blocks.HeadRows(rows), by_blocks.HeadRows(rows, kv_heads)
    of_part = by_blocks.BlockOperands(
        by_blocks.HeadRows(tokens_last(operands.q, "head_major")),
        *kv,
        (heads, kv_heads),
        operands.scale,
        operands.slopes,
        operands.segments,
        offset=None,
        shift=operands.shift,
        window=operands.window,
        cap=operands.cap,
        wide=wide,
    )
    return of_part, blocks._replace(queries=tokens, keys=tokens)


def _key(
    operands: AttentionOperands | PartOperands, heads: tuple[int, int], rows: Rows
) -> dict[str, Any]:
    """Return the key under which tuning tables list block sizes."""
    return {
        "heads": heads[0],
        "kv_heads": heads[1],
        "size": operands[0].shape[3],
        "value_size": (
            operands[0] if operands.kv is None else jax.tree.leaves(operands.kv)[-1]
        ).shape[3],
        "dtype": jnp.dtype(operands[0].dtype).name,
        "rows": rows,
        "alibi": operands.slopes is not None,
        "segments": operands.segments is not None,
    }


def _blocks(kernel: str, operands: AttentionOperands | PartOperands, key: dict[str, Any]) -> Blocks:
    """Return the block sizes that a tuning table lists for the key, or else the default.

    Tables list block sizes only for attention without a window and without a soft cap.
    """
    tokens = operands[0].shape[1]
    default = block_sizes.default_blocks(kernel, tokens, **key, **_of_logits(operands))
    if operands.window is not None or operands.cap is not None:
        return default
    return tuned.look_up(KERNELS[kernel], key, tokens, default)


def _with_wide_gradients(
    operands: PartOperands, key: dict[str, Any], blocks: Blocks
) -> tuple[Blocks, tuple[bool, bool]]:
    """Return blocks for float32 gradients of a part, and which of the gradients are float32.

    All gradients are float32 if there are blocks that then fit in VMEM, and otherwise none is.
    `blocks` are those for gradients in the dtype of the queries. They are kept if they still fit.
    """
    kernel, tokens, wide = "attention_blocks_backward", operands.q.shape[1], (True, True)
    if not _fits(operands, key, blocks, wide):
        default = block_sizes.default_blocks(
            kernel, tokens, **key, **_of_logits(operands), wide=wide
        )
        if not _fits(operands, key, default, wide):
            return blocks, (False, False)
        blocks = default
    return blocks, wide


def _fits(
    operands: AttentionOperands | PartOperands,
    key: dict[str, Any],
    blocks: Blocks,
    wide: tuple[bool, bool] = (False, False),
) -> bool:
    """Return whether the backward kernel fits in VMEM with these blocks of head-major arrays."""
    sizes = (key[name] for name in ("heads", "kv_heads", "size", "value_size"))
    capped = operands.cap is not None
    return KernelWork("head_major", *sizes, operands[0].dtype, blocks, capped, wide).fits


def _of_logits(operands: AttentionOperands | PartOperands) -> dict[str, Any]:
    """Return the arguments of `default_blocks` for the window and the soft cap.

    For attention to another part of a sequence, the returned window is None, because the real one
    may be negative.
    """
    window = None if isinstance(operands, PartOperands) else operands.window
    return {"window": window, "capped": operands.cap is not None}


def _fits_whole(operands: AttentionOperands, kv_heads: int, rows: Rows) -> bool:
    qkv = operands.qkv
    if operands.kv is not None:
        return False
    return (
        3 * kv_heads == qkv.shape[2]
        and qkv.shape[1] <= _WHOLE
        and mosaic_tpu_whole.fits(qkv, rows, operands.cap)
    )


class _PaddedOperands:
    """Operands in the layout of the blockwise kernels, padded at the end to whole blocks.

    No query sees the padding, because it is later than all queries.
    """

    def __init__(self, kernel: str, operands: AttentionOperands, kv_heads: int, rows: Rows, blocks):
        _, self.length, P, D = operands.qkv.shape
        heads = P if operands.kv is not None else P - 2 * kv_heads
        rows = "head_major" if operands.kv is not None else rows
        key = _key(operands, (heads, kv_heads), rows)
        of_logits = _of_logits(operands)
        default = blocks or block_sizes.default_blocks(kernel, self.length, **key, **of_logits)
        sizes = heads, kv_heads, D, key["value_size"]
        work = KernelWork(rows, *sizes, operands.qkv.dtype, default, of_logits["capped"])
        self.rows = rows if work.supports_rows(self.length) else "head_major"
        self.blocks = blocks or _blocks(kernel, operands, key | {"rows": self.rows})
        length = round_up(self.length, max(self.blocks.queries, self.blocks.keys))
        self._missing = length - self.length
        ids = operands.segment_ids
        ids = None if ids is None else self._padded(ids, axis=1)
        arrays = map(self.tokens_last, (operands.qkv, *(operands.kv or ())))
        arrays = [by_blocks.HeadRows(x) for x in arrays]
        if operands.kv is None:
            firsts = 0, heads, heads + kv_heads
            arrays = [arrays[0]._replace(first=first) for first in firsts]
        self.operands = by_blocks.BlockOperands(
            *arrays,
            (heads, kv_heads),
            operands.scale,
            operands.slopes,
            None if ids is None else (ids, ids),
            rows=self.rows,
            window=operands.window,
            cap=operands.cap,
        )

    def tokens_last(self, x: Float[Array, "B N R D"]) -> Float[Array, "B _ _ padded_N"]:
        return self._padded(tokens_last(x, self.rows), axis=3)

    def tokens_first(self, x: Float[Array, "B _ _ padded_N"]) -> Float[Array, "B N R D"]:
        return tokens_first(x[..., : self.length], self.rows)

    def sums_last(
        self, x: Float[Array, "B N H"], padding: float = 0.0
    ) -> Float[Array, "B H 1 padded_N"]:
        return self._padded(x.swapaxes(1, 2)[:, :, None], axis=3, padding=padding)

    def sums_first(self, x: Float[Array, "B H 1 padded_N"]) -> Float[Array, "B N H"]:
        return x[:, :, 0, : self.length].swapaxes(1, 2)

    def _padded(self, x, axis: int, padding: float = 0.0):
        missing = [(0, self._missing if a == axis else 0) for a in range(x.ndim)]
        return jnp.pad(x, missing, constant_values=padding) if self._missing else x


KERNELS = mosaic_tpu_whole.KERNELS | block_sizes.KERNELS
