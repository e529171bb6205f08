"""Causal attention over short sequences on TPUs, without transposes in HBM.

Tokens are in the lanes, so a head's queries, keys and values are [D, N] tiles. Per head, the kernel
computes `S^T = K^T Q`, a softmax over rows, and `O = V P^T`. The memory order of the arrays is
either

- "size_major", [B, D, P, N], the order in which the key-vector kernels write;
- "head_major", [B, P, D, N], the order in which a projection writes.

In one grid step, a whole sequence with all heads is in VMEM. The logits are computed for one block
of queries at a time, and only for the key blocks that contain visible keys.

For T tokens in sequences of length N, with H heads of size D and E bytes per entry, the forward
kernel takes `2 T N H D` FLOPs (causal) and moves `4 E T H D` bytes; the backward kernel takes `5 T
N H D` FLOPs and moves `8 E T H D` bytes.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels import operand, tuned
from pallas_kernels.arguments import StackSlice
from pallas_kernels.call import LANES, largest_divisor, round_up, software_pipeline, tpu_call
from pallas_kernels.causal_attention.interface import (
    AttentionOperands,
    Cap,
    ResultsAndCotangent,
    Rows,
    kernel_logits,
    through_cap,
)
from pallas_kernels.causal_attention.mosaic_tpu_rows import VIEWED, Layout
from pallas_kernels.products import LOG2_E, MASKED, dot, dot_columns, dot_rows
from pallas_kernels.target import target

_SUBLANES = 8
# `_TOGETHER`: maximum number of heads per loop iteration. `_AHEAD`: number of blocks of logits that
# are computed in advance.
_TOGETHER, _AHEAD = 4, 2


class _WholeCall(NamedTuple):
    """The static parameters of the whole-sequence kernel."""

    heads: int
    size: int
    length: int
    dtype: jnp.dtype
    rows: Rows
    alibi: bool
    segments: bool
    queries: int  # The number of queries per block.
    window: int | None
    cap: Cap | None

    def seen(self, start: int) -> slice:
        """Return the keys, in whole tiles, that some query of the block at `start` sees."""
        first = 0 if self.window is None else max(0, start - self.window + 1)
        return slice(first // LANES * LANES, start + self.queries)

    @property
    def logits(self) -> int:
        """The number of logits that are computed for one head."""
        if self.window is None:
            return self.length**2 // 2
        seen = (self.seen(start) for start in range(0, self.length, self.queries))
        return self.queries * sum(keys.stop - keys.start for keys in seen)

    @property
    def packed(self) -> int:
        """The number of heads whose rows share 32-bit words."""
        return self.layout(1).packed if self.rows == "size_major" else 1

    @property
    def direct(self) -> bool:
        """Whether kernels read heads directly from the inputs, in tiles of 128 tokens."""
        return self.rows == "size_major" and self.layout(self.heads).direct

    def layout(self, vectors: int) -> Layout:
        """Return the layout of a size-major array with `vectors` data vectors per token."""
        return Layout(vectors, self.size, self.length, self.dtype)


def fits(qkv: Any, rows: Rows, cap: Cap | None = None) -> bool:
    """Return whether the kernels support `qkv`, which must have as many query as key heads."""
    _, N, P, D = qkv.shape
    if N % LANES or (rows == "size_major" and qkv.dtype == jnp.bfloat16 and P % 2):
        return False
    need = _vmem_bytes(P // 3, D, N, jnp.dtype(qkv.dtype).itemsize, cap is not None)
    return need <= target().vmem_limit


def _vmem_bytes(heads: int, size: int, length: int, itemsize: int, capped: bool) -> int:
    """Estimate the backward kernel's VMEM in bytes.

    VMEM holds double-buffered blocks, scratch, and some logits. With a soft cap, it also holds the
    tanh of the logits that are computed in advance.
    """
    row = round_up(heads, 8) * size * length * itemsize
    return 2 * 8 * row + 8 * row + (22 if capped else 16) * length * LANES * 4


def attention_forward(
    operands: AttentionOperands, *, rows: Rows, queries: int | None = None, interpret: bool = False
) -> tuple[Float[Array, "*count B N H D"], Float[Array, "B N H"]]:
    """Return the attention output, and each softmax's log-sum-exp in float32."""
    call = _call_of("attention_forward", operands, rows, queries)
    B, H, D, N = operands.qkv.shape[0], call.heads, call.size, call.length
    inputs = _shared_inputs(call, operands)
    outputs = {
        "out": (_out_shape(call, B, H), _block(call, H)),
        "log_sums": (jax.ShapeDtypeStruct((B, H, N), jnp.float32), _of_sums(call)),
    }
    options = {}
    if operands.to is not None:
        outputs["out"], slot = _of_slot(call, operands.to, H)
        inputs["stack"] = operand.anywhere(outputs["out"][0])
        options = {"aliased": {"stack": "out"}, "prefetch": slot}
    scratch = _scratch(call, {"out": H}, qkv=3 * H)
    flops, size = 4 * B * call.logits * H * D, 4 * B * N * H * D * call.dtype.itemsize
    result = _run(
        _forward_kernel,
        "attention_forward",
        call,
        B,
        inputs,
        outputs,
        scratch,
        flops,
        size,
        interpret,
        **options,
    )
    return tokens_first(result["out"], rows), result["log_sums"].swapaxes(1, 2)


def attention_backward(
    operands: AttentionOperands,
    results: ResultsAndCotangent,
    *,
    rows: Rows,
    queries: int | None = None,
    interpret: bool = False,
) -> Float[Array, "B N P D"]:
    """Return the cotangent of qkv: the queries, keys and values in one array."""
    call = _call_of("attention_backward", operands, rows, queries)
    B, H, D, N = operands.qkv.shape[0], call.heads, call.size, call.length
    inputs = _shared_inputs(call, operands)
    d_out = tokens_last(results.d_out.astype(call.dtype), rows)
    if isinstance(results.out, StackSlice):
        out, slot = _of_slot(call, results.out, H)
    else:
        out, slot = (tokens_last(results.out, rows), _block(call, H)), {}
    inputs |= _read(call, "out", *out) | _read(call, "d_out", d_out, _block(call, H))
    inputs["log_sums"] = (results.log_sums.swapaxes(1, 2), _of_sums(call))
    outputs = {"d_qkv": (_out_shape(call, B, 3 * H), _block(call, 3 * H))}
    scratch = _scratch(call, {"qkv": 3 * H}, out=H, d_out=H)
    flops, size = 10 * B * call.logits * H * D, 8 * B * N * H * D * call.dtype.itemsize
    result = _run(
        _backward_kernel,
        "attention_backward",
        call,
        B,
        inputs,
        outputs,
        scratch,
        flops,
        size,
        interpret,
        prefetch=slot,
    )
    return tokens_first(result["d_qkv"], rows)


# Functions that run inside the kernels -------------------------------------------------------


def _forward_kernel(call: _WholeCall, ref):
    _fetch(call, ref, "qkv", 3 * call.heads)

    def attend(groups):
        heads = _each_head(call, groups, *(("qkv", part) for part in range(3)), ref=ref)
        outs, log_sums = ([[] for _ in heads] for _ in range(2))

        def logits(unit):
            n, start = unit
            head, q, k, _ = heads[n]
            return _logits(call, ref, head, q, k, start)[0]

        def mix(unit, logits):
            n, start = unit
            *_, v = heads[n]
            largest = jnp.max(logits, axis=0, keepdims=True)
            weights = jnp.exp2(logits - largest)
            total = jnp.sum(weights, axis=0, keepdims=True)
            outs[n].append(dot(v[:, call.seen(start)], weights.astype(call.dtype)) / total)
            log_sums[n].append(largest / LOG2_E + jnp.log(total))

        software_pipeline(_units(call, heads), logits, mix, _AHEAD)
        _write_each_head(call, ref, "out", 0, groups, [jnp.concatenate(x, axis=1) for x in outs])
        for (head, *_), parts in zip(heads, log_sums, strict=True):
            # Write whole rows, because Mosaic cannot write a part of a row at a dynamic offset.
            ref["log_sums"][0, pl.ds(head, 1)] = jnp.concatenate(parts, axis=1)

    _for_each_group(call, ref, attend)
    _deliver(call, ref, "out", "out", call.heads)


def _backward_kernel(call: _WholeCall, ref):
    _fetch(call, ref, "qkv", 3 * call.heads)
    _fetch(call, ref, "out", call.heads)
    _fetch(call, ref, "d_out", call.heads)
    scale = ref["scale"][0]

    def attend(groups):
        arrays = *(("qkv", part) for part in range(3)), ("out", 0), ("d_out", 0)
        heads = _each_head(call, groups, *arrays, ref=ref)
        zeros = jnp.zeros((call.size, call.length), jnp.float32)
        of_rows, d_q = [], [[] for _ in heads]
        d_k, d_v = ([zeros] * len(heads) for _ in range(2))

        def products(unit):
            n, start = unit
            head, q, k, v, _, d_out = heads[n]
            end = start + call.queries
            d_weights = dot_rows(v[:, call.seen(start)], d_out[:, start:end])
            return _logits(call, ref, head, q, k, start), d_weights

        def differentiate(unit, made):
            n, start = unit
            head, q, k, _, out, d_out = heads[n]
            ((logits, tanh), d_weights), end = made, start + call.queries
            if start == 0:
                products = out.astype(jnp.float32) * d_out.astype(jnp.float32)
                log_sums = ref["log_sums"][0, pl.ds(head, 1)] * LOG2_E
                of_rows.append((log_sums, jnp.sum(products, axis=0, keepdims=True)))
            log_sums, delta = (x[:, start:end] for x in of_rows[n])
            weights = jnp.exp2(logits - log_sums)
            d_logits = weights * (d_weights - delta) * scale
            d_logits = through_cap(d_logits, tanh).astype(call.dtype)
            seen = call.seen(start)
            d_q[n].append(dot(k[:, seen], d_logits))
            rest = ((0, 0), (seen.start, call.length - seen.stop))
            d_k[n] += jnp.pad(dot_columns(q[:, start:end], d_logits), rest)
            narrow = weights.astype(call.dtype)
            d_v[n] += jnp.pad(dot_columns(d_out[:, start:end], narrow), rest)

        software_pipeline(_units(call, heads), products, differentiate, _AHEAD)
        # The gradients overwrite the operands, which no later group of heads reads.
        gradients = [jnp.concatenate(x, axis=1) for x in d_q], d_k, d_v
        for part, gradient in enumerate(gradients):
            _write_each_head(call, ref, "d_qkv", part, groups, gradient)

    _for_each_group(call, ref, attend)
    _deliver(call, ref, "d_qkv", "qkv", 3 * call.heads)


def _units(call: _WholeCall, heads: list) -> list[tuple[int, int]]:
    """Return the pairs of the number of a head and the first query of a block of queries."""
    return [(n, start) for n in range(len(heads)) for start in range(0, call.length, call.queries)]


def _logits(call: _WholeCall, ref, head, q, k, start):
    """Return log2(e) times a block's logits, and the tanh that `kernel_logits` returns.

    The logits are [keys up to the diagonal, queries].
    """
    end, seen = start + call.queries, call.seen(start)
    products = dot_rows(k[:, seen], q[:, start:end])
    logits, tanh = kernel_logits(products, ref["scale"][0], call.cap)
    key = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0) + seen.start
    query = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) + start
    if call.alibi:
        slope = ref["slopes"][head] * LOG2_E
        logits += slope * (key - query).astype(jnp.float32)
    visible = key <= query
    if call.window is not None:
        visible = visible & (query - key < call.window)
    if call.segments:
        same = ref["segment_columns"][seen, :1] == ref["segment_rows"][0, :, start:end]
        visible = visible & same
    return jnp.where(visible, logits, MASKED), tanh


# Reading and writing the rows of heads -------------------------------------------------------


def _for_each_group(call: _WholeCall, ref, attend):
    """Run `attend(groups)` for all groups of heads, a few groups at a time.

    The heads of a group share 32-bit words. `attend` receives a list of groups, each as a pair of
    numbers whose sum is the group's index. The second number is known at compile time.
    """
    if call.segments:
        ids = jnp.broadcast_to(ref["segment_rows"][0], (_SUBLANES, call.length))
        ref["segment_columns"][...] = ids.T
    count = call.heads // call.packed
    together = largest_divisor(count, _TOGETHER // call.packed)
    each = VIEWED if call.direct else together

    def step(i, _):
        for start in range(0, each, together):
            attend([(i * each, start + n) for n in range(together)])
        return 0

    jax.lax.fori_loop(0, count // each, step, 0)


def _fetch(call: _WholeCall, ref, name: str, vectors: int):
    """Copy size-major rows to 32-bit words in scratch. Strided loads then read heads from there."""
    if call.rows == "size_major" and not call.direct:
        call.layout(vectors).fetch(ref[name].at[0], ref["words_" + name])


def _deliver(call: _WholeCall, ref, name: str, scratch: str, vectors: int):
    """Copy 32-bit words in scratch to a size-major output block."""
    if call.rows == "size_major":
        call.layout(vectors).deliver(ref["words_" + scratch], ref[name].at[0])


def _each_head(call: _WholeCall, groups, *arrays, ref) -> list[tuple]:
    """Return a tuple for each head in `groups`: its index, and its rows in each array.

    `arrays` are pairs (name, part), as in `_heads`. The rows in one array have the shape [D, N].
    """
    heads = []
    for group in groups:
        found = [_heads(call, ref, name, part, group) for name, part in arrays]
        first = sum(group) * call.packed
        heads += [(first + half, *own) for half, own in enumerate(zip(*found, strict=True))]
    return heads


def _heads(call: _WholeCall, ref, name: str, part: int, group):
    """Return the [D, N] arrays of a group of heads (those that share 32-bit words).

    `name` is the name of the input. `part` selects its queries (0), keys (1) or values (2).
    """
    first, n = part * (call.heads // call.packed) + group[0], group[1]
    if call.rows == "head_major":
        return [ref[name][0, first + n]]
    vectors = 3 * call.heads if name == "qkv" else call.heads
    layout = call.layout(vectors)
    if call.direct:
        blocks = [ref[f"{name}_{tile}"].at[0] for tile in range(call.length // LANES)]
        return layout.read_heads_of_tiles([layout.view(block, first) for block in blocks], n)
    return layout.read_heads(ref["words_" + name], first + n)


def _write_each_head(call: _WholeCall, ref, name: str, part: int, groups, heads):
    for i, group in enumerate(groups):
        own = heads[i * call.packed : (i + 1) * call.packed]
        _write_heads(call, ref, name, part, group, own)


def _write_heads(call: _WholeCall, ref, name: str, part: int, group, arrays):
    """Write a group's heads to the scratch of an output, the inverse of `_heads`.

    The output "d_qkv" uses the scratch of the input "qkv".
    """
    row = part * (call.heads // call.packed) + sum(group)
    if call.rows == "head_major":
        ref[name][0, row] = arrays[0].astype(call.dtype)
        return
    vectors = 3 * call.heads if name == "d_qkv" else call.heads
    scratch = ref["words_" + ("qkv" if name == "d_qkv" else name)]
    call.layout(vectors).write_heads(scratch, row, arrays)


# Functions that prepare and call the kernels -------------------------------------------------


def _divisor(length: int, most: int) -> int:
    """Return the largest multiple of LANES that divides `length` and is at most `most`."""
    return LANES * largest_divisor(length // LANES, most // LANES)


def _call_of(
    kernel: str, operands: AttentionOperands, rows: Rows, queries: int | None
) -> _WholeCall:
    N, P, D = operands.qkv.shape[1:]
    call = _WholeCall(
        heads=P // 3,
        size=D,
        length=N,
        dtype=operands.qkv.dtype,
        rows=rows,
        alibi=operands.slopes is not None,
        segments=operands.segment_ids is not None,
        queries=queries or default_blocks(kernel, N, operands.window).queries,
        window=operands.window,
        cap=operands.cap,
    )
    if queries is not None or operands.window is not None or operands.cap is not None:
        # Tuning tables have block sizes only for attention without a window and without a cap.
        return call
    key = {name: getattr(call, name) for name in KERNELS[kernel].key}
    key["dtype"] = jnp.dtype(call.dtype).name
    return call._replace(
        queries=tuned.look_up(KERNELS[kernel], key, N, default_blocks(kernel, N)).queries
    )


class WholeBlocks(NamedTuple):
    """The block size of the whole-sequence kernel.

    Attributes:
      queries: the number of queries of a head that are processed together.
    """

    queries: int


def default_blocks(kernel: str, N: int, window: int | None = None) -> WholeBlocks:
    """Return the block size that a fixed rule chooses for the target device."""
    # Larger blocks hide a matrix unit's latency; smaller blocks skip more of the masked logits.
    most = 512 if kernel == "attention_forward" and (window is None or window > 256) else 256
    return WholeBlocks(_divisor(N, most // 2 if target().chip.unit == LANES else most))


def _refused(
    kernel: str, key: dict[str, tuned.Value], tokens: int, blocks: WholeBlocks
) -> str | None:
    if blocks.queries % LANES or tokens % blocks.queries:
        return f"blocks of {blocks.queries} queries (legal: multiples of 128 that divide {tokens})"
    return None


KERNELS = tuned.register(
    "tpu",
    ("attention_forward", "attention_backward"),
    WholeBlocks,
    ("heads", "size", "dtype", "rows", "alibi", "segments"),
    _refused,
    version=2,
)


def _shared_inputs(call: _WholeCall, operands: AttentionOperands):
    N = call.length
    inputs = {"scale": operand.in_smem(jnp.asarray(operands.scale, jnp.float32))}
    if call.alibi:
        inputs["slopes"] = operand.in_smem(operands.slopes.astype(jnp.float32))
    if call.segments:
        of_row = pl.BlockSpec((1, 1, N), lambda b, *_: (b, 0, 0))
        inputs["segment_rows"] = (operands.segment_ids[:, None, :], of_row)
    qkv = tokens_last(operands.qkv, call.rows)
    return inputs | _read(call, "qkv", qkv, _block(call, 3 * call.heads))


def _read(call: _WholeCall, name: str, rows, block: pl.BlockSpec) -> dict[str, Any]:
    """Return the input `name` as kernel inputs: one per 128 tokens if `call.direct`, else one."""
    if not call.direct:
        return {name: (rows, block)}

    def spec(tile):
        index = lambda *ids: (*block.index_map(*ids)[:-1], tile)
        return pl.BlockSpec((*block.block_shape[:-1], LANES), index)

    return {f"{name}_{tile}": (rows, spec(tile)) for tile in range(call.length // LANES)}


def _scratch(call: _WholeCall, written: dict[str, int], **read: int) -> dict[str, Any]:
    """Return the scratch shapes, which include 32-bit words for size-major arrays.

    The arrays in `read` need no words if the kernel reads heads directly from them (`call.direct`).
    """
    scratch = {}
    if call.segments:
        scratch["segment_columns"] = pltpu.VMEM((call.length, _SUBLANES), jnp.int32)
    if call.rows == "size_major":
        vectors = written if call.direct else written | read
        scratch |= {f"words_{name}": call.layout(n).scratch for name, n in vectors.items()}
    return scratch


def tokens_last(x, rows: Rows):
    """Transpose [.., N, P, D] to the memory order of the kernels."""
    *lead, n, p, d = range(x.ndim)
    return x.transpose((*lead, d, p, n) if rows == "size_major" else (*lead, p, d, n))


def tokens_first(x, rows: Rows):
    """Transpose from the kernels' memory order to [.., N, P, D], the inverse of `tokens_last`."""
    *lead, a, b, n = range(x.ndim)
    return x.transpose((*lead, n, b, a) if rows == "size_major" else (*lead, n, a, b))


def _dims(call: _WholeCall, vectors: int) -> tuple[int, int, int]:
    if call.rows == "size_major":
        return (call.size, vectors, call.length)
    return (vectors, call.size, call.length)


def _block(call: _WholeCall, vectors: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, *_dims(call, vectors)), lambda b, *_: (b, 0, 0, 0))


def _of_sums(call: _WholeCall) -> pl.BlockSpec:
    return pl.BlockSpec((1, call.heads, call.length), lambda b, *_: (b, 0, 0))


def _of_slot(call: _WholeCall, slot: StackSlice, vectors: int):
    """Return a `StackSlice`'s operand (the stack and a block spec), and the arrays to prefetch.

    The only prefetched array is the index of the slice.
    """
    index = jnp.asarray(slot.index, jnp.int32).reshape(1)
    stack = tokens_last(slot.stack, call.rows), operand.of_stack(_block(call, vectors))
    return stack, {"slot": index}


def _out_shape(call: _WholeCall, batch: int, vectors: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((batch, *_dims(call, vectors)), call.dtype)


def _run(kernel, name, call, batch, inputs, outputs, scratch, flops, size, interpret, **options):
    return tpu_call(
        lambda inputs, outputs, scratch: kernel(call, inputs | outputs | scratch),
        name,
        inputs,
        outputs,
        scratch,
        grid=(batch,),
        semantics=("parallel",),
        flops=flops,
        moved=size,
        transcendentals=batch * call.heads * call.logits * (1 if call.cap is None else 2),
        interpret=interpret,
        **options,
    )
