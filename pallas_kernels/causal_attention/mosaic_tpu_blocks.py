"""Blockwise causal attention for any length on TPUs, with an online softmax.

Tokens are in the lanes, and a head is [D, N]: `S^T = K^T Q`, a softmax over rows, `O = V P^T`. The
grid runs over batch rows, key heads, and pairs of a query block and a key block. The list of pairs
is static (`mosaic_tpu_pairs`) and omits pairs in which no query sees a key. If the list does not
fit in SMEM, the queries are divided into several ranges ("spans"), one per kernel call. A key head
is processed together with all its query heads (Ainslie et al. 2023).

The memory order is either "head_major", [B, heads, D, N], or "size_major", [B, D, P, N]. The
key-vector kernels write the latter. It requires queries, keys and values of equal length in one
array. Heads are extracted once from a size-major block, and stay in VMEM for all pairs that contain
the block.

In the forward pass, weights are relative to the largest logit so far. When a larger logit is found,
earlier sums are rescaled (Milakov and Gimelshein 2018; Dao et al. 2022). In the backward pass,
pairs are ordered by key block. The gradients of all queries of a span stay in VMEM until their last
key block is processed. This also limits the length of a span. Weights are recomputed from the
log-sum-exps. The backward pass takes five matrix products per pair. Separate kernels for the
gradients of queries and of keys would take seven.

A pair is processed in tiles (`mosaic_tpu_masks.Tile`): a few queries with all their keys in the
forward pass, and a few keys with all their queries in the backward pass. The logits of a tile are
computed before the weights of the preceding tile, so that the matrix units and the vector units
work at the same time. On the diagonal, tiles contain only what some query sees.

Masks are applied only where they are needed: on the diagonal, at the end of a window, and in pairs
with several segments. Pairs whose ranges of segment ids do not overlap are skipped.

Let T queries see N keys each on average. With H query heads and G key heads of size D, blocks of b
queries, and E bytes per entry, the forward kernel takes `4 T N H D` FLOPs and moves `2 E T D (H + G
N / b)` bytes. The backward kernel takes `10 T N H D` FLOPs and moves about twice the bytes.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import operand
from pallas_kernels.call import LANES, round_up, software_pipeline, tpu_call, widen
from pallas_kernels.causal_attention import mosaic_tpu_pairs as pairs
from pallas_kernels.causal_attention import mosaic_tpu_rows as of_rows
from pallas_kernels.causal_attention.block_sizes import TABLES, Blocks, KernelWork
from pallas_kernels.causal_attention.interface import (
    Cap,
    Rows,
    Segments,
    kernel_logits,
    through_cap,
)
from pallas_kernels.causal_attention.mosaic_tpu_masks import (
    BlockPair,
    Mask,
    Tile,
    apply_mask,
    where_seen,
)
from pallas_kernels.causal_attention.mosaic_tpu_rows import Layout
from pallas_kernels.products import LOG2_E, MASKED, dot, dot_columns, dot_rows
from pallas_kernels.target import target


class _BlocksCall(NamedTuple):
    """The static parameters of a kernel; `queries` and `keys` are multiples of the block sizes."""

    work: KernelWork
    queries: int
    keys: int
    alibi: bool
    segments: bool
    offset: int | None  # The first query's position; None if every query sees all keys.
    by_keys: bool  # Whether pairs are ordered by key block, as in the backward pass.
    window: int | None = None  # Query i sees key j only if `i - j < window`.
    cap: Cap | None = None

    blocks = property(lambda self: self.work.blocks)
    dtype = property(lambda self: self.work.dtype)
    size = property(lambda self: self.work.size)
    value_size = property(lambda self: self.work.value_size)
    heads = property(lambda self: self.work.heads)
    kv_heads = property(lambda self: self.work.kv_heads)
    each = property(lambda self: self.work.each)
    step = property(lambda self: self.work.step)

    @property
    def size_major(self) -> bool:
        return self.work.rows == "size_major"

    @property
    def late_scale(self) -> bool:
        """Whether the forward pass scales logits only after it subtracts their maximum.

        They are then stored once less, which saves time on chips whose matrix units have 128 rows.
        ALiBi and a cap need scaled logits.
        """
        unscaled = self.cap is None and not self.alibi
        return target().chip.unit == LANES and unscaled and not self.by_keys

    @property
    def slots(self) -> int:
        """The number of blocks that keep their extracted heads in VMEM: see `KernelWork.slots`."""
        return self.work.slots(self.queries, by_keys=self.by_keys)

    @property
    def layout(self) -> Layout:
        """The layout of a size-major block of queries, of keys, of values, or of all three."""
        return Layout(self.work.block_rows, self.size, self.blocks.queries, self.dtype)

    @property
    def layout_out(self) -> Layout:
        return self.layout._replace(rows=self.step * self.each)

    @property
    def tables(self) -> list[str]:
        """The names of the tables that map grid steps to blocks, in Pallas's argument order."""
        others = ["fetched"] if self.size_major else ["done"] * self.by_keys
        return sorted(["keys", "kinds", "queries", *others])


class HeadRows(NamedTuple):
    """Heads in an array [B, heads, size, N], starting at index `first` of the axis of heads."""

    array: Array
    first: int = 0


class BlockOperands(NamedTuple):
    """The operands of blockwise attention.

    Attributes:
      q, k, v: the heads of queries, keys and values, in arrays [B, heads, D, N] that may be the
        same array. N is a multiple of the block size.
      heads: the numbers of query heads and of key heads.
      scale: the factor by which `q . k` is multiplied.
      slopes: the slopes of ALiBi, or None.
      segments: the segments of the queries and of the keys. A query sees only keys in the same
        segment.
      offset: the position of the first query among the keys. A query sees no key after its own
        position. None means that queries see all keys.
      shift: the position of the first query for ALiBi, possibly traced; None means `offset`.
      rows: the memory order. With size-major rows, q, k and v are the same array [B, D, P, N], and
        offset is 0.
      window: query i sees key j only if `i - j < window`. The window may be negative; None means no
        limit.
      cap: the soft cap on `scale q.k`, or None.
      wide: whether the cotangents of q, and those of k and v, are float32, because the caller adds
        up several. Otherwise they have the dtype of q.
    """

    q: HeadRows
    k: HeadRows
    v: HeadRows
    heads: tuple[int, int]
    scale: Any
    slopes: Float[Array, " H"] | None = None
    segments: Segments | None = None
    offset: int | None = 0
    shift: Any = None
    rows: Rows = "head_major"
    window: int | None = None
    cap: Cap | None = None
    wide: tuple[bool, bool] = (False, False)


def attention_forward(
    operands: BlockOperands, *, blocks: Blocks, interpret: bool | pltpu.InterpretParams = False
) -> tuple[Float[Array, "B rows_or_Dv Dv_or_rows Nq"], Float[Array, "B H 1 Nq"]]:
    """Compute `softmax(scale q.k - slope (i - j)) v`, and each softmax's log-sum-exp in float32.

    The output has the memory order of the operands: [B, H, Dv, Nq], or [B, Dv, H, Nq]. A query that
    sees no key gets a log-sum-exp below all others. When its output is merged with others, it has
    weight 0.
    """
    spans = _spans(operands, blocks, by_keys=False)
    outs = [_span_forward(own, blocks, interpret) for _, own in spans]
    join = lambda *parts: jnp.concatenate(parts, axis=3)
    return outs[0] if len(outs) == 1 else jax.tree.map(join, *outs)


def _span_forward(operands: BlockOperands, blocks, interpret):
    """Compute `attention_forward` for a span of queries whose tables of pairs fit in SMEM."""
    call = _call_of(operands, blocks, by_keys=False)
    B, heads = operands.q.array.shape[0], call.step * call.each
    inputs = _inputs(call, operands)
    outputs = {"log_sums": (_shape(B, call, 1, jnp.float32), _of_queries(call, 1))}
    row = pltpu.VMEM((heads, 1, blocks.queries), jnp.float32)
    scratch = {
        "largest": row,
        "total": row,
        "sum": pltpu.VMEM((heads, call.value_size, blocks.queries), jnp.float32),
    }
    if call.size_major:
        shape = jax.ShapeDtypeStruct((B, call.size, call.heads, call.queries), call.dtype)
        outputs["rows_out"] = shape, _of_out(call, "queries")
        scratch |= of_rows.scratch(call, q=1, k=call.slots, v=call.slots, out=1)
    else:
        outputs["out"] = _shape(B, call, call.value_size), _of_queries(call, call.value_size)
    out = _run(_forward_kernel, "attention_blocks_forward", call, inputs, outputs, scratch,
               call.size + call.value_size, interpret)  # fmt: skip
    return out["rows_out" if call.size_major else "out"], out["log_sums"]


def attention_backward(
    operands: BlockOperands,
    log_sums: Float[Array, "B H 1 Nq"],
    delta: Float[Array, "B H 1 Nq"],
    d_out: Float[Array, "B H Dv Nq"],
    *,
    blocks: Blocks,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float[Array, "B H D Nq"], Float[Array, "B G D Nk"], Float[Array, "B G Dv Nk"]]:
    """Return the cotangents of q, k and v, in the dtypes that `operands.wide` states.

    With logits s and weights p, the cotangent of the logits is `ds = p (d_out v - delta)`.

    Args:
      operands: the operands of the forward pass.
      log_sums: each softmax's log-sum-exp.
      delta: for each softmax, `sum(out d_out)` over the entries of the output vector.
      d_out: the cotangent of the output.
      blocks, interpret: as in `attention_forward`.
    """
    keys, d_q, sums = operands.k.array.shape[3], [], []
    for part, own in _spans(operands, blocks, by_keys=True):
        own, first = _without_unseen_keys(own, blocks)
        of_queries = [x[..., part] for x in (log_sums, delta, d_out)]
        of_span = _span_backward(own, *of_queries, blocks, interpret)
        d_q.append(of_span[0])
        missing = first, keys - first - of_span[1].shape[3]
        sums.append([jnp.pad(x, [(0, 0)] * 3 + [missing]) for x in of_span[1:]])
    if len(d_q) == 1:
        return (*d_q, *sums[0])
    dtype = jnp.float32 if operands.wide[1] else operands.q.array.dtype
    add = lambda *parts: sum(x.astype(jnp.float32) for x in parts).astype(dtype)
    return jnp.concatenate(d_q, axis=3), *jax.tree.map(add, *sums)


def attention_backward_of_rows(
    operands: BlockOperands,
    log_sums: Float[Array, "B H 1 N"],
    out: Float[Array, "B D H N"],
    d_out: Float[Array, "B D H N"],
    *,
    blocks: Blocks,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "B D P N"]:
    """Return the cotangent of queries, keys and values in one size-major array.

    `KernelWork.supports_rows` states whether the kernels support such an array.
    """
    call = _call_of(operands, blocks, by_keys=True)
    B, rows = operands.q.array.shape[0], operands.q.array.shape[2]
    inputs = _inputs(call, operands) | {
        "log_sums": (log_sums, _of_queries(call, 1)),
        "rows_out": (out, _of_out(call, "fetched")),
        "rows_d_out": (d_out, _of_out(call, "fetched")),
    }
    shape = (B, call.size, call.work.parts, rows // call.work.parts, call.keys)
    index = lambda b, g, p, tables: (b, 0, 0, g, tables["keys"][p])
    block = (1, call.size, call.work.parts, call.layout.rows, blocks.keys)
    outputs = {"d_qkv": (jax.ShapeDtypeStruct(shape, call.dtype), _spec(call, block, index))}
    delta = (call.slots, call.step * call.each, 1, blocks.queries)
    scratch = _gradient_sums(call) | {"delta": pltpu.VMEM(delta, jnp.float32)}
    scratch |= of_rows.scratch(call, q=call.slots, k=1, v=1, d_out=call.slots)
    found = _run(_backward_kernel, "attention_blocks_backward", call, inputs, outputs, scratch,
                 3 * call.size + 2 * call.value_size, interpret)  # fmt: skip
    return found["d_qkv"].reshape(B, call.size, rows, call.keys)


def _span_backward(operands: BlockOperands, log_sums, delta, d_out, blocks, interpret):
    """Compute `attention_backward` for a span of queries whose gradients fit in VMEM."""
    call = _call_of(operands, blocks, by_keys=True)
    B = operands.q.array.shape[0]
    inputs = _inputs(call, operands) | {
        "d_out": (d_out, _of_queries(call, call.value_size)),
        "log_sums": (log_sums, _of_queries(call, 1)),
        "delta": (delta, _of_queries(call, 1)),
    }
    d_q = _shape(B, call, call.size, call.work.gradients[0])
    outputs = {
        "d_q": (d_q, _of_queries(call, call.size, "done")),
        "d_k": (_shape_of_d_keys(B, call, call.size), _of_keys(call, call.size)),
        "d_v": (_shape_of_d_keys(B, call, call.value_size), _of_keys(call, call.value_size)),
    }
    out = _run(_backward_kernel, "attention_blocks_backward", call, inputs, outputs,
               _gradient_sums(call), 3 * call.size + 2 * call.value_size, interpret)  # fmt: skip
    return out["d_q"], out["d_k"], out["d_v"]


# Functions that run inside the kernels -------------------------------------------------------


def _forward_kernel(call: _BlocksCall, ref):
    at = BlockPair(ref)
    ref = _with_heads(call, ref, at)

    @pl.when(at.is_(pairs.FIRST))
    def _():
        ref["largest"][...] = jnp.full_like(ref["largest"], MASKED)
        ref["total"][...] = jnp.zeros_like(ref["total"])
        ref["sum"][...] = jnp.zeros_like(ref["sum"])

    unit = ref["scalars"][3] if call.late_scale else 1.0

    def attend(heads, mask: Mask):
        def logits(tile: Tile):
            return [_logits(call, ref, at, part, mask)[0] for part in tile.parts]

        def mix(tile: Tile, logits):
            here = tile.of_queries[1:]
            largest = previous = ref["largest"][here]
            for of_part in logits:
                largest = jnp.maximum(largest, jnp.max(of_part, axis=0, keepdims=True))
            shrink = jnp.exp2((previous - largest) * unit)
            total, mixed = ref["total"][here] * shrink, ref["sum"][here] * shrink
            for part, of_part in zip(tile.parts, logits, strict=True):
                weights = jnp.exp2((of_part - largest) * unit)
                total += jnp.sum(weights, axis=0, keepdims=True)
                mixed += dot(ref["v"][part.of_keys], weights.astype(call.dtype))
            ref["largest"][here], ref["total"][here], ref["sum"][here] = largest, total, mixed

        software_pipeline(mask.by_queries(call, heads), logits, mix)

    where_seen(call, ref, at, functools.partial(_in_parts, call, attend))

    @pl.when(at.is_(pairs.LAST))
    def _():
        for head in range(call.step * call.each):
            # `total`, the sum of the weights, is 0 for a query that saw no key. The lower limit
            # prevents a division by 0, so the output of such a query is 0 and not NaN.
            total = jnp.maximum(ref["total"][head], jnp.finfo(jnp.float32).tiny)
            ref["out"][0, head] = (ref["sum"][head] / total).astype(call.dtype)
            whole = Tile(head, head, slice(None), slice(None))
            largest = ref["largest"][head] * unit - _left_out(call, ref, at, whole)
            largest = jnp.maximum(largest, jnp.finfo(jnp.float32).min)
            ref["log_sums"][0, head] = largest / LOG2_E + jnp.log(total)
        if call.size_major:
            of_rows.write_out(call.layout_out, ref)


def _backward_kernel(call: _BlocksCall, ref):
    at = BlockPair(ref)
    ref = _with_heads(call, ref, at)
    scale = ref["scalars"][0]

    @pl.when(at.step == 0)
    def _():
        ref["d_q_sum"][...] = jnp.zeros_like(ref["d_q_sum"])

    @pl.when(at.is_(pairs.FIRST))
    def _():
        ref["d_k_sum"][...] = jnp.zeros_like(ref["d_k_sum"])
        ref["d_v_sum"][...] = jnp.zeros_like(ref["d_v_sum"])

    def attend(heads, mask: Mask):
        def products(tile: Tile):
            return _logits(call, ref, at, tile, mask)

        def differentiate(tile: Tile, made):
            logits, tanh = made
            here, of_keys = tile.of_queries, tile.of_keys[1:]
            log_sums = ref["log_sums"][here] * LOG2_E + _left_out(call, ref, at, tile)
            weights = jnp.exp2(logits - log_sums)
            d_weights = dot_rows(ref["v"][tile.of_keys], ref["d_out"][tile.of_queries])
            d_logits = weights * (d_weights - ref["delta"][here])
            d_logits = through_cap(d_logits, tanh).astype(call.dtype)
            ref["d_v_sum"][of_keys] += dot_columns(ref["d_out"][here], weights.astype(call.dtype))
            ref["d_k_sum"][of_keys] += dot_columns(ref["q"][here], d_logits)
            ref["d_q_sum"][at.query_block, *here[1:]] += dot(ref["k"][tile.of_keys], d_logits)

        software_pipeline(mask.by_keys(call, heads), products, differentiate)

    where_seen(call, ref, at, functools.partial(_in_parts, call, attend))

    if call.size_major:

        @pl.when(at.is_(pairs.LAST))
        def _():
            d_q = ref["d_q_sum"].at[at.key_block]
            of_rows.write_gradients(call, ref, d_q, scale)

        return

    @pl.when(at.is_(pairs.LAST))
    def _():
        ref["d_k"][0] = (ref["d_k_sum"][...] * scale).astype(ref["d_k"].dtype)
        ref["d_v"][0] = ref["d_v_sum"][...].astype(ref["d_v"].dtype)

    @pl.when(at.is_(pairs.DONE))
    def _():
        ref["d_q"][0] = (ref["d_q_sum"][at.query_block] * scale).astype(ref["d_q"].dtype)


def _with_heads(call: _BlocksCall, ref, at: BlockPair):
    """Extract heads from size-major blocks, if they are not yet in scratch, and return all refs."""
    if not call.size_major:
        return ref
    own, others, slot = ("q",), ("k", "v"), at.key_block
    if call.by_keys:
        own, others, slot = ("k", "v"), ("q", "d_out", "delta"), at.query_block
    slot = slot if call.slots > 1 else 0
    ref = ref | {name: ref[name].at[pl.ds(slot, 1)] for name in others}
    pl.when(at.is_(pairs.FIRST))(lambda: of_rows.extract_heads(call, ref, own))
    pl.when(at.is_(pairs.NEW))(lambda: of_rows.extract_heads(call, ref, others))
    return ref


def _in_parts(call: _BlocksCall, attend, mask: Mask) -> None:
    """Run `attend` for all heads of the grid step, `blocks.heads` key heads at a time."""
    count, each = call.blocks.heads, call.each

    def part(n, _):
        owns = [n * count + own for own in range(count)]
        attend([(own * each + i, own) for own in owns for i in range(each)], mask)
        return 0

    if call.step == count:
        part(0, 0)
    else:
        jax.lax.fori_loop(0, call.step // count, part, 0)


def _logits(call: _BlocksCall, ref, at: BlockPair, tile: Tile, mask: Mask):
    """Return a tile's logits [keys, queries], and the tanh that `kernel_logits` returns.

    The logits are log2(e) times those of the softmax, plus `_left_out`. With `late_scale`, the
    caller still has to multiply them by the last of `_scalars`.
    """
    bq, bk, _ = call.blocks
    q, k = ref["q"][tile.of_queries], ref["k"][tile.of_keys]
    if call.late_scale:
        q = (q.astype(jnp.float32) * ref["scalars"][2]).astype(q.dtype)
        logits, tanh = dot_rows(k, q), None
    else:
        logits, tanh = kernel_logits(dot_rows(k, q), ref["scalars"][0], call.cap)
    if call.alibi:
        iota = functools.partial(jax.lax.broadcasted_iota, jnp.int32)
        slope = _slope(call, ref, at, tile.head)
        # Distances are float32, which is exact up to 2^24, because int32 products are slow.
        first_key = (at.key_block * bk + tile.keys.start).astype(jnp.float32)
        between = first_key - (at.query_block * bq).astype(jnp.float32) - ref["scalars"][1]
        if _is_exact(call):
            distance = iota(logits.shape, 0) - iota(logits.shape, 1) - tile.queries.start
            logits += slope * (distance.astype(jnp.float32) + between)
        else:
            column = iota((logits.shape[0], LANES), 0).astype(jnp.float32) + between
            logits += widen(slope * column, logits.shape[1])
    return apply_mask(call, ref, at, tile, mask, logits), tanh


def _is_exact(call: _BlocksCall) -> bool:
    return call.dtype == jnp.float32


def _slope(call: _BlocksCall, ref, at: BlockPair, head):
    first = at.group * (call.step * call.each)
    return ref["slopes"][first + head] * LOG2_E


def _left_out(call: _BlocksCall, ref, at: BlockPair, tile: Tile):
    """Return the amount by which the logits are too large: a part of ALiBi that `_logits` omits.

    The omitted part is the slope times the query's index in its block. It depends only on the
    query, so it does not change a softmax over keys. Float32 kernels omit nothing, because larger
    logits have larger rounding errors.
    """
    if not call.alibi or _is_exact(call):
        return 0.0
    start, stop, _ = tile.queries.indices(call.blocks.queries)
    place = jax.lax.broadcasted_iota(jnp.int32, (1, stop - start), 1) + start
    return _slope(call, ref, at, tile.head) * place.astype(jnp.float32)


# Functions that prepare and call the kernels -------------------------------------------------


def _call_of(operands: BlockOperands, blocks: Blocks, *, by_keys: bool) -> _BlocksCall:
    (q, k, v), offset = (x.array for x in operands[:3]), operands.offset
    axis = 1 if operands.rows == "size_major" else 2
    keys = k.shape[3]
    if offset is not None:  # Keys after the last query are left out, because no query sees them.
        seen = round_up(offset + q.shape[3], blocks.keys)
        keys = min(keys, seen)
    sizes = *operands.heads, q.shape[axis], v.shape[axis], q.dtype
    work = KernelWork(operands.rows, *sizes, blocks, operands.cap is not None, operands.wide)
    return _BlocksCall(
        work,
        queries=q.shape[3],
        keys=keys,
        alibi=operands.slopes is not None,
        segments=operands.segments is not None,
        offset=offset,
        by_keys=by_keys,
        window=operands.window,
        cap=operands.cap,
    )


def _spans(
    operands: BlockOperands, blocks: Blocks, *, by_keys: bool
) -> Iterator[tuple[slice, BlockOperands]]:
    """Yield the ranges of queries ("spans") that one kernel call can process, with their operands.

    The tables of a span's pairs fit in SMEM. In the backward pass (`by_keys`), the gradients of its
    queries fit in VMEM. Size-major arrays are always one span: see `KernelWork.supports_rows`.
    """
    q, (heads, _), segments = operands.q, operands.heads, operands.segments
    call = _call_of(operands, blocks, by_keys=by_keys)
    size, length = call.queries, call.queries
    if not call.size_major:
        most_pairs = TABLES // (4 * len(call.tables))
        if pairs.count(call) > most_pairs:
            size = blocks.queries * max(1, most_pairs // (call.keys // blocks.keys))
        size = min(size, call.work.span) if by_keys else size
    wide = operands.wide
    if size < length:  # Spans' gradients of keys are summed, in float32 if this shortens no span.
        summed = call.work._replace(wide=(wide[0], True))
        wide = summed.wide if summed.span >= size and summed.fits else wide
    later = lambda position, start: None if position is None else position + start
    for start in range(0, length, size):
        part = slice(start, min(start + size, length))
        own = operands._replace(
            q=q if size >= length else HeadRows(q.array[:, q.first :][:, :heads, :, part]),
            segments=segments and (segments[0][:, part], segments[1]),
            offset=later(operands.offset, start),
            shift=later(operands.shift, start),
            window=later(operands.window, -start),
            wide=wide,
        )
        yield part, own


def _without_unseen_keys(operands: BlockOperands, blocks: Blocks) -> tuple[BlockOperands, int]:
    """Remove the key blocks that are before the windows of all queries.

    At least one key block is kept. Returns the head-major operands, and the number of removed keys.
    """
    first, keys, window = 0, operands.k.array.shape[3], operands.window
    if window is not None:
        first = min(max(0, 1 - window), keys - blocks.keys) // blocks.keys * blocks.keys
    if first == 0:
        return operands, 0
    earlier = lambda position: None if position is None else position - first
    cut = lambda x: HeadRows(x.array[:, x.first :][:, : operands.heads[1], :, first:])
    own = operands._replace(
        k=cut(operands.k),
        v=cut(operands.v),
        segments=operands.segments and (operands.segments[0], operands.segments[1][:, first:]),
        offset=earlier(operands.offset),
        shift=earlier(operands.shift),
        window=window + first,
    )
    return own, first


def _of_queries(
    call: _BlocksCall, size: int, table: str = "queries", first: int = 0
) -> pl.BlockSpec:
    heads = call.step * call.each
    index = lambda b, g, p, tables: (b, first // heads + g, 0, tables[table][p])
    return _spec(call, (1, heads, size, call.blocks.queries), index)


def _of_keys(call: _BlocksCall, size: int, first: int = 0) -> pl.BlockSpec:
    heads = call.step
    index = lambda b, g, p, tables: (b, first // heads + g, 0, tables["keys"][p])
    return _spec(call, (1, heads, size, call.blocks.keys), index)


def _of_out(call: _BlocksCall, table: str) -> pl.BlockSpec:
    """Return the block spec for a size-major block of the output or of its cotangent."""
    layout = call.layout_out
    index = lambda b, g, p, tables: (b, 0, g, tables[table][p])
    return _spec(call, (1, layout.size, layout.rows, layout.tokens), index)


def _of_rows(call: _BlocksCall, part: int, table: str) -> pl.BlockSpec:
    """Return the block spec for a size-major block of queries, keys or values, or of all three."""
    layout = call.layout
    index = lambda b, g, p, tables: (b, 0, part, g, tables[table][p])
    return _spec(call, (1, layout.size, 1, layout.rows, layout.tokens), index)


def _spec(call: _BlocksCall, shape, index) -> pl.BlockSpec:
    """Return a block spec; `index(b, g, p, tables)` receives the prefetched tables as a dict."""

    def by_name(b, g, p, *tables):
        return index(b, g, p, dict(zip(call.tables, tables, strict=True)))

    return pl.BlockSpec(shape, by_name)


def _gradient_sums(call: _BlocksCall) -> dict[str, Any]:
    (bq, bk, _), step = call.blocks, call.step
    of_queries = call.queries // bq, step * call.each, call.size, bq
    return {
        "d_q_sum": pltpu.VMEM(of_queries, jnp.float32),
        "d_k_sum": pltpu.VMEM((step, call.size, bk), jnp.float32),
        "d_v_sum": pltpu.VMEM((step, call.value_size, bk), jnp.float32),
    }


def _shape(B: int, call: _BlocksCall, size: int, dtype=None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((B, call.heads, size, call.queries), dtype or call.dtype)


def _shape_of_d_keys(B: int, call: _BlocksCall, size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((B, call.kv_heads, size, call.keys), call.work.gradients[1])


def _inputs(call: _BlocksCall, operands: BlockOperands):
    q, k, v = operands[:3]
    shift = (call.offset or 0) if operands.shift is None else operands.shift
    inputs = {"scalars": operand.in_smem(_scalars(operands.scale, shift))}
    if call.size_major:
        B, D, _, N = q.array.shape
        parts = q.array.reshape(B, D, call.work.parts, -1, N)
        tables = {"q": "queries", "k": "keys", "v": "keys"}
        for name in ("q",) if call.by_keys else ("k", "v"):
            tables[name] = "fetched"
        for part, name in enumerate(("q", "k", "v")[: max(2, call.work.parts)]):
            part = part if call.work.parts == 3 else 0
            inputs["rows_" + name] = parts, _of_rows(call, part, tables[name])
    else:
        inputs |= {
            "q": (q.array, _of_queries(call, call.size, first=q.first)),
            "k": (k.array, _of_keys(call, call.size, first=k.first)),
            "v": (v.array, _of_keys(call, call.value_size, first=v.first)),
        }
    if call.alibi:
        inputs["slopes"] = operand.in_smem(operands.slopes.astype(jnp.float32))
    if call.segments:
        bq, bk, _ = call.blocks
        of_queries, of_keys = operands.segments
        inputs |= {
            "query_ids": (
                of_queries[:, None],
                _spec(call, (1, 1, bq), lambda b, g, p, tables: (b, 0, tables["queries"][p])),
            ),
            "key_ids": (
                of_keys[:, None],
                _spec(call, (1, 1, bk), lambda b, g, p, tables: (b, 0, tables["keys"][p])),
            ),
            "query_ranges": _ranges(of_queries, bq),
            "key_ranges": _ranges(of_keys, bk),
        }
    return inputs


def _scalars(scale, shift) -> Float[Array, "4"]:
    """Return the scale, the shift, and two factors whose product is log2(e) times the scale.

    The first factor is a power of two, with the sign of the scale, so that products with it are
    exact. The second is from 1 to 2.
    """
    scale, shift = (jnp.asarray(x, jnp.float32).reshape(()) for x in (scale, shift))
    product = scale * LOG2_E
    # The sign and the exponent of a float32 are its first nine bits.
    bits = jax.lax.bitcast_convert_type(product, jnp.int32) & jnp.int32(-(2**23))
    power = jax.lax.bitcast_convert_type(bits, jnp.float32)
    rest = jnp.where(power == 0, 1, product / jnp.where(power == 0, 1, power))
    return jnp.stack([scale, shift, power, rest])


def _ranges(ids: Int[Array, "B N"], block: int) -> tuple[Int[Array, "B 1 n"], pl.BlockSpec]:
    """Return the smallest and the largest segment id of each block of tokens, and a block spec.

    The two ids alternate along the last axis. The block spec selects one batch row.
    """
    blocks = ids.reshape(ids.shape[0], -1, block)
    ends = jnp.stack([blocks.min(axis=-1), blocks.max(axis=-1)], axis=-1)
    ends = ends.reshape(ids.shape[0], 1, -1)
    shape = (1, *ends.shape[1:])
    index = lambda b, *others: (b, 0, 0)
    return ends, pl.BlockSpec(shape, index, memory_space=pltpu.SMEM)


def _run(kernel, name, call, inputs, outputs, scratch, contracted, interpret):
    tables = pairs.tables(call)
    batch = next(iter(outputs.values()))[0].shape[0]
    count = len(tables["kinds"])
    logits = batch * call.heads * count * call.blocks.queries * call.blocks.keys
    return tpu_call(
        lambda inputs, outputs, scratch: kernel(call, inputs | outputs | scratch),
        name,
        inputs,
        outputs,
        scratch,
        grid=(batch, call.kv_heads // call.step, count),
        semantics=("parallel", "parallel", "arbitrary"),
        flops=2 * logits * contracted,
        transcendentals=logits * (1 if call.cap is None else 2),
        prefetch=tables,
        interpret=interpret,
    )
