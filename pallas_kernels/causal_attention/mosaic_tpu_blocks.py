"""Causal attention of any length on TPU: a grid over blocks of queries and keys, online softmax.

Tokens lie in the lanes, [B, heads, D, N]: `S^T = K^T Q`, a softmax over rows, `O = V P^T`. The grid
goes over the rows of the batch, heads of keys, and pairs of a block of queries and a block of keys
it sees: a list that is known when the program is traced, so that nothing above the diagonal is
copied or computed. A head of keys comes with all its heads of queries (Ainslie et al. 2023).

Forward, a pair's weights are of the largest logit so far, and what was summed before is scaled when
a larger one comes (Milakov and Gimelshein 2018; Dao et al. 2022). Backward, pairs go key block by
key block: the gradients of a key block's keys and values are summed over its queries, and those of
all queries are kept in VMEM until their last key block; where they do not fit, the queries go in
spans. Weights are made again from the log sums: five products a pair in place of the seven of two
kernels.

Masks are applied to the pairs that need them alone: on the diagonal, or of several segments; pairs
whose segments have no number in common are not computed.

For T queries that see N keys each on average, H heads of size D, blocks of b queries and E bytes an
entry: the forward kernel takes `4 T N H D` FLOPs and `2 E T D (H + G N / b)` bytes, the backward
`10 T N H D` and about twice the bytes.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import tuned
from pallas_kernels.call import LANES, VMEM_LIMIT, divisors, round_up, tpu_call, widen
from pallas_kernels.causal_attention.interface import Segments
from pallas_kernels.causal_attention.products import LOG2_E, MASKED, dot, dot_columns, dot_rows

# What a pair is, in bits: the first or the last of its block (of queries forward, of keys
# backward), with keys that some of its queries are before, the first in which its queries are done.
_FIRST, _LAST, _MASKED, _DONE = 1, 2, 4, 8
# Of what the backward kernel keeps of all queries of a span.
_KEPT_BYTES = 32 * 2**20
# Tokens of a block, and what an entry of its logits costs beside those of the best. Entries of the
# logits of a step's heads, about.
_BLOCKS = {1024: 1.0, 512: 1.04, 256: 1.5, 128: 2.5}
_ENTRIES = 2**21


class Blocks(NamedTuple):
    """Tokens of a block of `queries` and of `keys`, multiples of 128; `heads` of keys at a time."""

    queries: int
    keys: int
    heads: int


class _Call(NamedTuple):
    """What a kernel is compiled for; lengths are whole blocks."""

    heads: int  # of queries
    kv_heads: int
    size: int
    value_size: int
    queries: int
    keys: int
    dtype: jnp.dtype
    alibi: bool
    segments: bool
    offset: int | None  # query i is at position `offset + i`; None sees all keys
    blocks: Blocks

    @property
    def each(self) -> int:
        """Heads of queries for one of keys."""
        return self.heads // self.kv_heads


class Heads(NamedTuple):
    """Rows of an array [B, rows, size, N], from `first` on."""

    array: Array
    first: int = 0


class Given(NamedTuple):
    """What is attended with.

    Attributes:
      q, k, v: [B, rows, D, N] each, or all rows of one array; N is whole blocks.
      heads: of queries, and of keys.
      scale: of the logits.
      slopes: of ALiBi.
      segments: of queries and of keys; they see those of the same number.
      offset: position of the first query among the keys, each of which sees what is not behind it;
        None sees all keys.
      shift: what ALiBi takes for that position, and may be known on the device alone.
    """

    q: Heads
    k: Heads
    v: Heads
    heads: tuple[int, int]
    scale: Any
    slopes: Float[Array, " H"] | None = None
    segments: Segments | None = None
    offset: int | None = 0
    shift: Any = None


def attention_forward(
    given: Given, *, blocks: Blocks, interpret: bool | pltpu.InterpretParams = False
) -> tuple[Float[Array, "B H Dv Nq"], Float[Array, "B H 1 Nq"]]:
    """`softmax(scale q.k - slope (i - j)) v`, and the log of each softmax's sum in float32.

    Queries that see no key have a sum whose log is below all others, so that their output counts
    for nothing where parts of keys are added by their sums.
    """
    call = _call_of(given, blocks)
    B, step_heads = given.q.array.shape[0], blocks.heads * call.each
    tables = _tables(call, by_keys=False)
    inputs = _inputs(call, given)
    outputs = {
        "out": (_shape(B, call, call.value_size), _of_queries(call, call.value_size)),
        "log_sums": (_shape(B, call, 1, jnp.float32), _of_queries(call, 1)),
    }
    row = pltpu.VMEM((step_heads, 1, blocks.queries), jnp.float32)
    scratch = {
        "largest": row,
        "total": row,
        "sum": pltpu.VMEM((step_heads, call.value_size, blocks.queries), jnp.float32),
    }
    out = _run(_forward_kernel, "attention_blocks_forward", call, tables, inputs, outputs, scratch,
               2, interpret)  # fmt: skip
    return out["out"], out["log_sums"]


def attention_backward(
    given: Given,
    log_sums: Float[Array, "B H 1 Nq"],
    delta: Float[Array, "B H 1 Nq"],
    d_out: Float[Array, "B H Dv Nq"],
    *,
    blocks: Blocks,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float[Array, "B H D Nq"], Float[Array, "B G D Nk"], Float[Array, "B G Dv Nk"]]:
    """Cotangents of q, k and v. With weights p: `ds = p (d_out v - delta)`.

    Args:
      delta: `sum(out d_out)` of each softmax.
    """
    q, (heads, kv_heads), segments = given.q, given.heads, given.segments
    length, keys = q.array.shape[3], given.k.array.shape[3]
    size = span(blocks, heads // kv_heads, q.array.shape[2])
    later = lambda position, start: None if position is None else position + start
    d_q, sums = [], []
    for start in range(0, length, size):
        part = slice(start, min(start + size, length))
        of_queries = [x[..., part] for x in (log_sums, delta, d_out)]
        own = given._replace(
            q=q if size >= length else Heads(q.array[:, q.first :][:, :heads, :, part]),
            segments=segments and (segments[0][:, part], segments[1]),
            offset=later(given.offset, start),
            shift=later(given.shift, start),
        )
        of_span = _span_backward(own, *of_queries, blocks, interpret)
        d_q.append(of_span[0])
        missing = keys - of_span[1].shape[3]
        sums.append([jnp.pad(x, [(0, 0)] * 3 + [(0, missing)]) for x in of_span[1:]])
    if len(d_q) == 1:
        return (*d_q, *sums[0])
    add = lambda *parts: sum(x.astype(jnp.float32) for x in parts).astype(parts[0].dtype)
    return jnp.concatenate(d_q, axis=3), *jax.tree.map(add, *sums)


def _span_backward(given: Given, log_sums, delta, d_out, blocks, interpret):
    """The same, of queries that fit."""
    call = _call_of(given, blocks)
    B, step_heads = given.q.array.shape[0], blocks.heads * call.each
    tables = _tables(call, by_keys=True)
    inputs = _inputs(call, given)
    inputs |= {
        "d_out": (d_out, _of_queries(call, call.value_size)),
        "log_sums": (log_sums, _of_queries(call, 1)),
        "delta": (delta, _of_queries(call, 1)),
    }
    outputs = {
        "d_q": (_shape(B, call, call.size), _of_queries(call, call.size, "done")),
        "d_k": (_shape_of_keys(B, call, call.size), _of_keys(call, call.size)),
        "d_v": (_shape_of_keys(B, call, call.value_size), _of_keys(call, call.value_size)),
    }
    kept = (call.queries // blocks.queries, step_heads, call.size, blocks.queries)
    scratch = {
        "d_q_sum": pltpu.VMEM(kept, jnp.float32),
        "d_k_sum": pltpu.VMEM((blocks.heads, call.size, blocks.keys), jnp.float32),
        "d_v_sum": pltpu.VMEM((blocks.heads, call.value_size, blocks.keys), jnp.float32),
    }
    out = _run(_backward_kernel, "attention_blocks_backward", call, tables, inputs, outputs,
               scratch, 5, interpret)  # fmt: skip
    return out["d_q"], out["d_k"], out["d_v"]


def span(blocks: Blocks, each: int, size: int) -> int:
    """Queries that the backward kernel can have at a time, in whole blocks.

    Args:
      blocks: how the work is cut.
      each: heads of queries for one of keys.
      size: of a head.
    """
    kept = blocks.heads * each * size * blocks.queries * 4
    return blocks.queries * max(1, _KEPT_BYTES // kept)


def default_blocks(
    kernel: str, N: int, *, heads: int, kv_heads: int, size: int, **others: Any
) -> Blocks:
    """By rule; `others` of the key do not matter."""

    def cost(tokens: int) -> float:
        count = -(-N // tokens)
        return _BLOCKS[tokens] * tokens**2 * count * (count + 1)

    each = heads // kv_heads
    tokens = min((t for t in _BLOCKS if each * t**2 <= _ENTRIES), key=cost, default=min(_BLOCKS))
    # Work on one head hides another's waiting; and all queries should fit, if they can.
    fitting = [n for n in divisors(kv_heads) if n * each * tokens**2 <= _ENTRIES]
    kept = [n for n in fitting if span(Blocks(tokens, tokens, n), each, size) >= N]
    return Blocks(tokens, tokens, max(kept or [1]))


def _refused(kernel: str, key: dict[str, tuned.Value], tokens: int, blocks: Blocks) -> str | None:
    queries, keys, heads = blocks
    if queries % LANES or keys % LANES or max(queries, keys) % min(queries, keys):
        return f"blocks of {queries} queries and {keys} keys"
    if key["kv_heads"] % heads:
        groups = key["kv_heads"]
        return f"{heads} heads at a time, of {groups}"
    each, size = key["heads"] // key["kv_heads"], key["size"]
    need = _vmem_bytes(blocks, each, size, jnp.dtype(key["dtype"]).itemsize, tokens)
    return f"{need >> 20} MiB of VMEM" if need > VMEM_LIMIT else None


def _vmem_bytes(blocks: Blocks, each: int, size: int, itemsize: int, length: int) -> int:
    """Of the backward kernel, about: blocks in two buffers, sums, and some logits."""
    queries, keys = (blocks.heads * n * size for n in (each * blocks.queries, blocks.keys))
    moved = 2 * itemsize * (3 * queries + 4 * keys)
    kept = 4 * queries * -(-min(length, span(blocks, each, size)) // blocks.queries)
    return moved + kept + 8 * keys + 4 * 4 * blocks.queries * blocks.keys


KERNELS = tuned.register(
    "tpu",
    ("attention_blocks_forward", "attention_blocks_backward"),
    Blocks,
    ("heads", "kv_heads", "size", "dtype", "alibi", "segments"),
    _refused,
)


# The kernels ---------------------------------------------------------------------------------


def _forward_kernel(call: _Call, ref):
    at = _Pair(ref)
    heads = range(call.blocks.heads * call.each)

    @pl.when(at.is_(_FIRST))
    def _():
        ref["largest"][...] = jnp.full_like(ref["largest"], MASKED)
        ref["total"][...] = jnp.zeros_like(ref["total"])
        ref["sum"][...] = jnp.zeros_like(ref["sum"])

    def attend(masked: bool):
        visible = _visible(call, ref, at) if masked else None
        for head in heads:
            v = ref["v"][0, head // call.each]
            logits = _logits(call, ref, at, head, visible)
            before = ref["largest"][head]
            largest = jnp.maximum(before, jnp.max(logits, axis=0, keepdims=True))
            weights = jnp.exp2(logits - largest)
            shrink = jnp.exp2(before - largest)
            total = jnp.sum(weights, axis=0, keepdims=True)
            ref["largest"][head] = largest
            ref["total"][head] = ref["total"][head] * shrink + total
            mixed = dot(v, weights.astype(call.dtype))
            ref["sum"][head] = ref["sum"][head] * shrink + mixed

    _where_seen(call, ref, at, attend)

    @pl.when(at.is_(_LAST))
    def _():
        for head in heads:
            # Where no block was seen, the output is 0.
            total = jnp.maximum(ref["total"][head], jnp.finfo(jnp.float32).tiny)
            ref["out"][0, head] = (ref["sum"][head] / total).astype(call.dtype)
            largest = ref["largest"][head] - _left_out(call, ref, at, head)
            ref["log_sums"][0, head] = largest / LOG2_E + jnp.log(total)


def _backward_kernel(call: _Call, ref):
    at = _Pair(ref)
    scale = ref["scalars"][0]

    @pl.when(at.step == 0)
    def _():
        ref["d_q_sum"][...] = jnp.zeros_like(ref["d_q_sum"])

    @pl.when(at.is_(_FIRST))
    def _():
        ref["d_k_sum"][...] = jnp.zeros_like(ref["d_k_sum"])
        ref["d_v_sum"][...] = jnp.zeros_like(ref["d_v_sum"])

    def attend(masked: bool):
        visible = _visible(call, ref, at) if masked else None
        for head in range(call.blocks.heads * call.each):
            own = head // call.each
            q, k, v = ref["q"][0, head], ref["k"][0, own], ref["v"][0, own]
            d_out = ref["d_out"][0, head]
            log_sums = ref["log_sums"][0, head] * LOG2_E + _left_out(call, ref, at, head)
            weights = jnp.exp2(_logits(call, ref, at, head, visible) - log_sums)
            d_logits = weights * (dot_rows(v, d_out) - ref["delta"][0, head])
            d_logits = d_logits.astype(call.dtype)
            ref["d_v_sum"][own] += dot_columns(d_out, weights.astype(call.dtype))
            ref["d_k_sum"][own] += dot_columns(q, d_logits)
            ref["d_q_sum"][at.query_block, head] += dot(k, d_logits)

    _where_seen(call, ref, at, attend)

    @pl.when(at.is_(_LAST))
    def _():
        ref["d_k"][0] = (ref["d_k_sum"][...] * scale).astype(call.dtype)
        ref["d_v"][0] = ref["d_v_sum"][...].astype(call.dtype)

    @pl.when(at.is_(_DONE))
    def _():
        ref["d_q"][0] = (ref["d_q_sum"][at.query_block] * scale).astype(call.dtype)


class _Pair:
    """The grid's step: blocks of queries and of keys, and what they are."""

    def __init__(self, ref):
        self.group, self.step = pl.program_id(1), pl.program_id(2)
        self.kind = ref["kinds"][self.step]
        self.query_block, self.key_block = ref["queries"][self.step], ref["keys"][self.step]

    def is_(self, bit: int):
        return (self.kind & bit) != 0


def _where_seen(call: _Call, ref, at: _Pair, attend) -> None:
    """`attend(masked)` once, or not at all where no query sees a key."""
    some, every = call.offset is not None, _all_masked(call)
    if call.segments:
        of = lambda name, block: (ref[name][0, 0, 2 * block + end] for end in range(2))
        q_low, q_high = of("query_ranges", at.query_block)
        k_low, k_high = of("key_ranges", at.key_block)
        seen = (k_low <= q_high) & (q_low <= k_high)
        alike = (q_low == q_high) & (k_low == k_high) & ~at.is_(_MASKED)
        pl.when(seen & alike)(functools.partial(attend, False))
        pl.when(seen & ~alike)(functools.partial(attend, True))
    elif not some or every:
        attend(every)
    else:
        pl.when(at.is_(_MASKED))(functools.partial(attend, True))
        pl.when(~at.is_(_MASKED))(functools.partial(attend, False))


def _logits(call: _Call, ref, at: _Pair, head: int, visible):
    """Of the pair, [keys, queries], times log2(e), less what `_left_out` gives."""
    bq, bk, _ = call.blocks
    q, k = ref["q"][0, head], ref["k"][0, head // call.each]
    logits = dot_rows(k, q) * (ref["scalars"][0] * LOG2_E)
    first_key, first_query = at.key_block * bk, at.query_block * bq
    iota = functools.partial(jax.lax.broadcasted_iota, jnp.int32)
    if call.alibi:
        slope = _slope(call, ref, at, head)
        # Float32 is exact to 2^24, and int32 products are slow.
        between = first_key.astype(jnp.float32) - first_query.astype(jnp.float32)
        between = between - ref["scalars"][1]
        if _is_exact(call):
            distance = (iota((bk, bq), 0) - iota((bk, bq), 1)).astype(jnp.float32) + between
            logits += slope * distance
        else:
            column = iota((bk, LANES), 0).astype(jnp.float32) + between
            logits += widen(slope * column, bq)
    return logits if visible is None else jnp.where(visible, logits, MASKED)


def _visible(call: _Call, ref, at: _Pair):
    """Which of the pair's keys which queries see."""
    bq, bk, _ = call.blocks
    iota = functools.partial(jax.lax.broadcasted_iota, jnp.int32)
    visible = None
    if call.offset is not None:
        # Where it is known, so is which logits are masked, and these are not computed.
        behind = {
            call.offset + i * bq - j * bk
            for i in range(call.queries // bq)
            for j in range(_seen(call, i))
            if _is_masked(call, i, j)
        }
        between = call.offset + at.query_block * bq - at.key_block * bk
        visible = iota((bk, bq), 0) - iota((bk, bq), 1)
        visible = visible <= (between if len(behind) != 1 or call.segments else behind.pop())
    if call.segments:
        column = jnp.broadcast_to(ref["key_ids"][0], (LANES, bk)).T
        same = widen(column, bq) == ref["query_ids"][0]
        visible = same if visible is None else visible & same
    return visible


def _is_exact(call: _Call) -> bool:
    return call.dtype == jnp.float32


def _slope(call: _Call, ref, at: _Pair, head: int):
    first = at.group * (call.blocks.heads * call.each)
    return ref["slopes"][first + head] * LOG2_E


def _left_out(call: _Call, ref, at: _Pair, head: int):
    """What logits are too large by: a softmax over keys does not need ALiBi's share of the query.

    It is the slope times the place in the block, which in bfloat16 models is below what their
    weights are rounded by; others have it in the logits.
    """
    if not call.alibi or _is_exact(call):
        return 0.0
    place = jax.lax.broadcasted_iota(jnp.int32, (1, call.blocks.queries), 1)
    return _slope(call, ref, at, head) * place.astype(jnp.float32)


# Around the kernels --------------------------------------------------------------------------


def _call_of(given: Given, blocks: Blocks) -> _Call:
    (q, k, v), offset = (x.array for x in given[:3]), given.offset
    keys = k.shape[3]
    if offset is not None:  # no query sees what is behind the last
        seen = round_up(offset + q.shape[3], blocks.keys)
        keys = min(keys, seen)
    return _Call(
        *given.heads,
        size=q.shape[2],
        value_size=v.shape[2],
        queries=q.shape[3],
        keys=keys,
        dtype=q.dtype,
        alibi=given.slopes is not None,
        segments=given.segments is not None,
        offset=offset,
        blocks=blocks,
    )


def _seen(call: _Call, block: int) -> int:
    """Blocks of keys that a block of queries sees."""
    if call.offset is None:
        return call.keys // call.blocks.keys
    last = call.offset + (block + 1) * call.blocks.queries - 1
    return min(call.keys // call.blocks.keys, last // call.blocks.keys + 1)


def _is_masked(call: _Call, i: int, j: int) -> bool:
    if call.offset is None:
        return False
    return (j + 1) * call.blocks.keys - 1 > call.offset + i * call.blocks.queries


def _all_masked(call: _Call) -> bool:
    blocks = range(call.queries // call.blocks.queries)
    return all(_is_masked(call, i, j) for i in blocks for j in range(_seen(call, i)))


def _tables(call: _Call, *, by_keys: bool) -> dict[str, np.ndarray]:
    """Of each pair in the order of the grid: its blocks, what it is, and the last queries done."""
    seen = [_seen(call, i) for i in range(call.queries // call.blocks.queries)]
    pairs = [(i, j) for i, count in enumerate(seen) for j in range(count)]
    if by_keys:
        pairs.sort(key=lambda pair: pair[::-1])
    own = 1 if by_keys else 0
    kinds = []
    for n, (i, j) in enumerate(pairs):
        kind = _FIRST * (n == 0 or pairs[n - 1][own] != pairs[n][own])
        kind |= _LAST * (n == len(pairs) - 1 or pairs[n + 1][own] != pairs[n][own])
        kind |= _MASKED * _is_masked(call, i, j) | _DONE * (j == seen[i] - 1)
        kinds.append(kind)
    done, now = [], next(i for i, j in pairs if j == seen[i] - 1)
    for (i, _), kind in zip(pairs, kinds, strict=True):
        now = i if kind & _DONE else now
        done.append(now)
    queries, keys = zip(*pairs, strict=True)
    tables = {"queries": queries, "keys": keys, "kinds": kinds}
    tables |= {"done": done} if by_keys else {}
    return {name: np.array(values, np.int32) for name, values in tables.items()}


def _of_queries(call: _Call, size: int, table: str = "queries", first: int = 0) -> pl.BlockSpec:
    heads = call.blocks.heads * call.each
    index = lambda b, g, p, tables: (b, first // heads + g, 0, tables[table][p])
    return _spec((1, heads, size, call.blocks.queries), index)


def _of_keys(call: _Call, size: int, first: int = 0) -> pl.BlockSpec:
    heads = call.blocks.heads
    index = lambda b, g, p, tables: (b, first // heads + g, 0, tables["keys"][p])
    return _spec((1, heads, size, call.blocks.keys), index)


_TABLES = ("done", "keys", "kinds", "queries")


def _spec(shape, index) -> pl.BlockSpec:
    """`index(b, g, p, tables)` as Pallas calls it, with the tables one by one, in their order."""

    def by_name(b, g, p, *tables):
        names = [name for name in _TABLES if name != "done" or len(tables) == len(_TABLES)]
        return index(b, g, p, dict(zip(names, tables, strict=True)))

    return pl.BlockSpec(shape, by_name)


def _shape(B: int, call: _Call, size: int, dtype=None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((B, call.heads, size, call.queries), dtype or call.dtype)


def _shape_of_keys(B: int, call: _Call, size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((B, call.kv_heads, size, call.keys), call.dtype)


def _inputs(call: _Call, given: Given):
    in_smem = pl.BlockSpec(memory_space=pltpu.SMEM)
    q, k, v = given[:3]
    shift = (call.offset or 0) if given.shift is None else given.shift
    scalars = jnp.stack([jnp.asarray(x, jnp.float32).reshape(()) for x in (given.scale, shift)])
    inputs = {
        "q": (q.array, _of_queries(call, call.size, first=q.first)),
        "k": (k.array, _of_keys(call, call.size, first=k.first)),
        "v": (v.array, _of_keys(call, call.value_size, first=v.first)),
        "scalars": (scalars, in_smem),
    }
    if call.alibi:
        inputs["slopes"] = (given.slopes.astype(jnp.float32), in_smem)
    if call.segments:
        bq, bk, _ = call.blocks
        of_queries, of_keys = given.segments
        inputs |= {
            "query_ids": (
                of_queries[:, None],
                _spec((1, 1, bq), lambda b, g, p, tables: (b, 0, tables["queries"][p])),
            ),
            "key_ids": (
                of_keys[:, None],
                _spec((1, 1, bk), lambda b, g, p, tables: (b, 0, tables["keys"][p])),
            ),
            "query_ranges": _ranges(of_queries, bq),
            "key_ranges": _ranges(of_keys, bk),
        }
    return inputs


def _ranges(ids: Int[Array, "B N"], block: int) -> tuple[Int[Array, "B 1 n"], pl.BlockSpec]:
    """The least and the largest of each block, one after the other, a row's at a time."""
    blocks = ids.reshape(ids.shape[0], -1, block)
    ends = jnp.stack([blocks.min(axis=-1), blocks.max(axis=-1)], axis=-1)
    ends = ends.reshape(ids.shape[0], 1, -1)
    shape = (1, *ends.shape[1:])
    index = lambda b, *others: (b, 0, 0)
    return ends, pl.BlockSpec(shape, index, memory_space=pltpu.SMEM)


def _run(kernel, name, call, tables, inputs, outputs, scratch, products, interpret):
    batch = next(iter(outputs.values()))[0].shape[0]
    pairs = len(tables["kinds"])
    logits = batch * call.heads * pairs * call.blocks.queries * call.blocks.keys
    return tpu_call(
        lambda inputs, outputs, scratch: kernel(call, inputs | outputs | scratch),
        name,
        inputs,
        outputs,
        scratch,
        grid=(batch, call.kv_heads // call.blocks.heads, pairs),
        semantics=("parallel", "parallel", "arbitrary"),
        flops=2 * products * logits * call.size,
        transcendentals=logits,
        prefetch=tables,
        interpret=interpret,
    )
