"""Causal attention over short sequences on TPU, in the layout of the key-vector kernels in place.

Tokens lie in the lanes, so a head's queries, keys and values are [D, N] tiles and everything is a
product over rows: `S^T = K^T Q`, a softmax over rows, `O = V P^T`. Nothing is transposed in HBM.
The order of rows is either

- "size_major", [B, D, P, N]: as the key-vector kernels write reads; heads are taken out in VMEM;
- "head_major", [B, P, D, N]: as a plain Transformer's projection writes.

One grid step holds a whole sequence in VMEM, all heads: logits exist for one block of queries of
one head at a time, and key blocks above the diagonal are never computed.

For T tokens in sequences of N, H heads of size D and E bytes an entry: the forward kernel takes
`2 T N H D` FLOPs (causal) and `4 E T H D` bytes, the backward `5 T N H D` and `8 E T H D`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels import operand, tuned
from pallas_kernels.arguments import Slot
from pallas_kernels.call import LANES, VMEM_LIMIT, largest_divisor, round_up, tpu_call
from pallas_kernels.causal_attention.interface import Attended, Attention, Rows
from pallas_kernels.causal_attention.mosaic_tpu_rows import Layout
from pallas_kernels.products import LOG2_E, MASKED, dot, dot_columns, dot_rows


class _Call(NamedTuple):
    """What a kernel is compiled for."""

    heads: int
    size: int
    length: int
    dtype: jnp.dtype
    rows: Rows
    alibi: bool
    segments: bool
    queries: int  # in a block

    @property
    def packed(self) -> int:
        """Heads that are fetched together."""
        return self.layout(1).packed if self.rows == "size_major" else 1

    def layout(self, vectors: int) -> Layout:
        """Of size-major rows."""
        return Layout(vectors, self.size, self.length, self.dtype)


def fits(qkv: Any, rows: Rows) -> bool:
    """Whether the kernels serve as many heads of keys as of queries in this array."""
    _, N, P, D = qkv.shape
    if N % LANES or (rows == "size_major" and qkv.dtype == jnp.bfloat16 and P % 2):
        return False
    return _vmem_bytes(P // 3, D, N, jnp.dtype(qkv.dtype).itemsize) <= VMEM_LIMIT


def _vmem_bytes(heads: int, size: int, length: int, itemsize: int) -> int:
    """Of the backward kernel: blocks in two buffers, scratch, and some logits."""
    row = round_up(heads, 8) * size * length * itemsize
    return 2 * 8 * row + 8 * row + 16 * length * LANES * 4


def attention_forward(
    given: Attention, *, rows: Rows, queries: int | None = None, interpret: bool = False
) -> tuple[Float[Array, "*count B N H D"], Float[Array, "B N H"]]:
    """The output, and the logarithm of each softmax's sum in float32."""
    call = _call_of("attention_forward", given, rows, queries)
    B, H, D, N = given.qkv.shape[0], call.heads, call.size, call.length
    inputs = _shared_inputs(call, given)
    of_sums = pl.BlockSpec((1, H, 1, N), lambda b, *_: (b, 0, 0, 0))
    outputs = {
        "out": (_out_shape(call, B, H), _block(call, H)),
        "log_sums": (jax.ShapeDtypeStruct((B, H, 1, N), jnp.float32), of_sums),
    }
    options = {}
    if given.to is not None:
        outputs["out"], slot = _of_slot(call, given.to, H)
        inputs["stack"] = operand.anywhere(outputs["out"][0])
        options = {"aliased": {"stack": "out"}, "prefetch": slot}
    scratch = {}
    if rows == "size_major":
        scratch = {
            "words_qkv": call.layout(3 * H).scratch,
            "words_out": call.layout(H).scratch,
        }
    flops, size = 2 * B * N * N * H * D, 4 * B * N * H * D * call.dtype.itemsize
    given_to_all = inputs, outputs, scratch, flops, size, interpret
    result = _run(_forward_kernel, "attention_forward", call, *given_to_all, **options)
    return tokens_first(result["out"], rows), result["log_sums"][:, :, 0].swapaxes(1, 2)


def attention_backward(
    given: Attention,
    attended: Attended,
    *,
    rows: Rows,
    queries: int | None = None,
    interpret: bool = False,
) -> Float[Array, "B N P D"]:
    """The cotangent of qkv."""
    call = _call_of("attention_backward", given, rows, queries)
    B, H, D, N = given.qkv.shape[0], call.heads, call.size, call.length
    inputs = _shared_inputs(call, given)
    slot = {}
    if isinstance(attended.out, Slot):
        inputs["out"], slot = _of_slot(call, attended.out, H)
    else:
        inputs["out"] = (tokens_last(attended.out, rows), _block(call, H))
    inputs["d_out"] = (tokens_last(attended.d_out.astype(call.dtype), rows), _block(call, H))
    inputs["log_sums"] = (
        attended.log_sums.swapaxes(1, 2)[:, :, None],
        pl.BlockSpec((1, H, 1, N), lambda b, *_: (b, 0, 0, 0)),
    )
    outputs = {"d_qkv": (_out_shape(call, B, 3 * H), _block(call, 3 * H))}
    scratch = {}
    if rows == "size_major":
        scratch = {
            "words_qkv": call.layout(3 * H).scratch,
            "words_out": call.layout(H).scratch,
            "words_d_out": call.layout(H).scratch,
        }
    flops, size = 5 * B * N * N * H * D, 8 * B * N * H * D * call.dtype.itemsize
    result = _run(
        _backward_kernel,
        "attention_backward",
        call,
        inputs,
        outputs,
        scratch,
        flops,
        size,
        interpret,
        prefetch=slot,
    )
    return tokens_first(result["d_qkv"], rows)


# The kernels ---------------------------------------------------------------------------------


def _forward_kernel(call: _Call, ref):
    _fetch(call, ref, "qkv", 3 * call.heads)

    def attend(group):
        outs = []
        loaded = [_heads(call, ref, "qkv", part, group) for part in range(3)]
        for half in range(call.packed):
            q, k, v = (part[half] for part in loaded)
            head = group * call.packed + half
            blocks = []
            for start in range(0, call.length, call.queries):
                logits = _logits(call, ref, head, q, k, start)
                largest = jnp.max(logits, axis=0, keepdims=True)
                weights = jnp.exp2(logits - largest)
                total = jnp.sum(weights, axis=0, keepdims=True)
                end = start + call.queries
                blocks.append(dot(v[:, :end], weights.astype(call.dtype)) / total)
                log_sum = largest / LOG2_E + jnp.log(total)
                ref["log_sums"][0, head, :, start:end] = log_sum
            outs.append(jnp.concatenate(blocks, axis=1))
        _put_heads(call, ref, "out", 0, group, outs)

    _for_each_group(call, attend)
    _deliver(call, ref, "out", "out", call.heads)


def _backward_kernel(call: _Call, ref):
    _fetch(call, ref, "qkv", 3 * call.heads)
    _fetch(call, ref, "out", call.heads)
    _fetch(call, ref, "d_out", call.heads)
    scale = ref["scale"][0]

    def attend(group):
        loaded = [_heads(call, ref, "qkv", part, group) for part in range(3)]
        outs = _heads(call, ref, "out", 0, group)
        d_outs = _heads(call, ref, "d_out", 0, group)
        gradients = [[], [], []]
        for half in range(call.packed):
            q, k, v = (part[half] for part in loaded)
            out, d_out = outs[half], d_outs[half]
            head = group * call.packed + half
            products = out.astype(jnp.float32) * d_out.astype(jnp.float32)
            delta = jnp.sum(products, axis=0, keepdims=True)
            log_sums = ref["log_sums"][0, head] * LOG2_E
            d_q = []
            d_k = jnp.zeros((call.size, call.length), jnp.float32)
            d_v = jnp.zeros((call.size, call.length), jnp.float32)
            for start in range(0, call.length, call.queries):
                end = start + call.queries
                rest = ((0, 0), (0, call.length - end))
                logits = _logits(call, ref, head, q, k, start)
                weights = jnp.exp2(logits - log_sums[:, start:end])
                d_weights = dot_rows(v[:, :end], d_out[:, start:end])
                d_logits = weights * (d_weights - delta[:, start:end]) * scale
                d_logits = d_logits.astype(call.dtype)
                d_q.append(dot(k[:, :end], d_logits))
                d_k += jnp.pad(dot_columns(q[:, start:end], d_logits), rest)
                narrow = weights.astype(call.dtype)
                d_v += jnp.pad(dot_columns(d_out[:, start:end], narrow), rest)
            for part, gradient in enumerate((jnp.concatenate(d_q, axis=1), d_k, d_v)):
                gradients[part].append(gradient)
        # In place of what was read: no later group reads it.
        for part in range(3):
            _put_heads(call, ref, "d_qkv", part, group, gradients[part])

    _for_each_group(call, attend)
    _deliver(call, ref, "d_qkv", "qkv", 3 * call.heads)


def _logits(call: _Call, ref, head, q, k, start):
    """Of a block of queries, [keys up to the diagonal, queries], times log2(e)."""
    end = start + call.queries
    logits = dot_rows(k[:, :end], q[:, start:end]) * (ref["scale"][0] * LOG2_E)
    key = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0)
    query = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) + start
    if call.alibi:
        slope = ref["slopes"][head] * LOG2_E
        logits += slope * (key - query).astype(jnp.float32)
    visible = key <= query
    if call.segments:
        same = ref["segment_columns"][0, :end, :1] == ref["segment_rows"][0, :, start:end]
        visible = visible & same
    return jnp.where(visible, logits, MASKED)


# Rows of a head ------------------------------------------------------------------------------


def _for_each_group(call: _Call, attend):
    def step(group, _):
        attend(group)
        return 0

    jax.lax.fori_loop(0, call.heads // call.packed, step, 0)


def _fetch(call: _Call, ref, name: str, vectors: int):
    """Size-major rows into scratch as words, where strided loads can reach them."""
    if call.rows == "size_major":
        call.layout(vectors).fetch(ref[name].at[0], ref["words_" + name])


def _deliver(call: _Call, ref, name: str, scratch: str, vectors: int):
    """Scratch into a size-major output block."""
    if call.rows == "size_major":
        call.layout(vectors).deliver(ref["words_" + scratch], ref[name].at[0])


def _heads(call: _Call, ref, name: str, part: int, group):
    """The [D, N] arrays of a group's heads; parts are queries, keys and values."""
    row = part * (call.heads // call.packed) + group
    if call.rows == "head_major":
        return [ref[name][0, row]]
    vectors = 3 * call.heads if name == "qkv" else call.heads
    return call.layout(vectors).take(ref["words_" + name], row)


def _put_heads(call: _Call, ref, name: str, part: int, group, arrays):
    """The inverse, into an output's scratch; "d_qkv" shares that of qkv."""
    row = part * (call.heads // call.packed) + group
    if call.rows == "head_major":
        ref[name][0, row] = arrays[0].astype(call.dtype)
        return
    vectors = 3 * call.heads if name == "d_qkv" else call.heads
    scratch = ref["words_" + ("qkv" if name == "d_qkv" else name)]
    call.layout(vectors).put(scratch, row, arrays)


# Around the kernels --------------------------------------------------------------------------


def _divisor(length: int, most: int) -> int:
    """The largest multiple of LANES up to `most` that divides the length."""
    return LANES * largest_divisor(length // LANES, most // LANES)


def _call_of(kernel: str, given: Attention, rows: Rows, queries: int | None) -> _Call:
    N, P, D = given.qkv.shape[1:]
    call = _Call(
        heads=P // 3,
        size=D,
        length=N,
        dtype=given.qkv.dtype,
        rows=rows,
        alibi=given.slopes is not None,
        segments=given.segment_ids is not None,
        queries=queries or default_blocks(kernel, N).queries,
    )
    if queries is not None:
        return call
    key = {name: getattr(call, name) for name in KERNELS[kernel].key}
    key["dtype"] = jnp.dtype(call.dtype).name
    return call._replace(
        queries=tuned.look_up(KERNELS[kernel], key, N, default_blocks(kernel, N)).queries
    )


class Blocks(NamedTuple):
    """`queries`: of a head that are attended with at a time."""

    queries: int


def default_blocks(kernel: str, N: int) -> Blocks:
    """By rule."""
    # Fewer, longer products hide the matrix unit's latency better than skipping masked blocks pays.
    return Blocks(_divisor(N, 512 if kernel == "attention_forward" else 256))


def _refused(kernel: str, key: dict[str, tuned.Value], tokens: int, blocks: Blocks) -> str | None:
    if blocks.queries % LANES or tokens % blocks.queries:
        return f"blocks of {blocks.queries} queries, of {tokens}"
    return None


KERNELS = tuned.register(
    "tpu",
    ("attention_forward", "attention_backward"),
    Blocks,
    ("heads", "size", "dtype", "rows", "alibi", "segments"),
    _refused,
)


def _shared_inputs(call: _Call, given: Attention):
    N = call.length
    inputs = {"scale": operand.in_smem(jnp.asarray(given.scale, jnp.float32))}
    if call.alibi:
        inputs["slopes"] = operand.in_smem(given.slopes.astype(jnp.float32))
    if call.segments:
        ids = given.segment_ids
        columns = jnp.broadcast_to(ids[:, :, None], (*ids.shape, LANES))
        of_row = lambda b, *_: (b, 0, 0)
        inputs["segment_rows"] = (ids[:, None, :], pl.BlockSpec((1, 1, N), of_row))
        inputs["segment_columns"] = (columns, pl.BlockSpec((1, N, LANES), of_row))
    return inputs | {"qkv": (tokens_last(given.qkv, call.rows), _block(call, 3 * call.heads))}


def tokens_last(x, rows: Rows):
    """[.., N, P, D] as the kernels have it."""
    *lead, n, p, d = range(x.ndim)
    return x.transpose((*lead, d, p, n) if rows == "size_major" else (*lead, p, d, n))


def tokens_first(x, rows: Rows):
    """`tokens_last` undone."""
    *lead, a, b, n = range(x.ndim)
    return x.transpose((*lead, n, b, a) if rows == "size_major" else (*lead, n, a, b))


def _dims(call: _Call, vectors: int) -> tuple[int, int, int]:
    if call.rows == "size_major":
        return (call.size, vectors, call.length)
    return (vectors, call.size, call.length)


def _block(call: _Call, vectors: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, *_dims(call, vectors)), lambda b, *_: (b, 0, 0, 0))


def _of_slot(call: _Call, slot: Slot, vectors: int):
    """A slot's stack in its blocks, and what these are chosen by."""
    index = jnp.asarray(slot.index, jnp.int32).reshape(1)
    stack = tokens_last(slot.stack, call.rows), operand.of_stack(_block(call, vectors))
    return stack, {"slot": index}


def _out_shape(call: _Call, batch: int, vectors: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((batch, *_dims(call, vectors)), call.dtype)


def _run(kernel, name, call, inputs, outputs, scratch, flops, size, interpret, **options):
    batch = inputs["qkv"][0].shape[0]
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
        transcendentals=batch * call.heads * call.length**2 // 2,
        interpret=interpret,
        **options,
    )
