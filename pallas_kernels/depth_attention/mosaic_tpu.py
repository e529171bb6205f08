"""TPU kernels of depth attention for vectors, which read every source from HBM only once.

Arrays keep the model's layout [.., T, D], with D in the lanes, so nothing is transposed. A grid
step loads one tile of tokens of all active sources to VMEM. It computes the logits, the softmax and
the mix from this tile.

- The logits and the mixes are matrix products. For small S, their time does not depend on S. For
  bfloat16 sources, queries and weights are split into bfloat16 terms ("pieces"). Logits are then as
  exact as in float32, and weights have up to 16 bits.
- The backward pass computes the logits and <d_mixed, v_i> in one matrix product. The gradient of a
  source is another matrix product, plus a multiple of the source itself.
- Empty rows of sources (rows from `count` onwards) are not read. If gradients are accumulated,
  empty rows are not written either.

The costs for S sites, T tokens, N active sources and E bytes per entry are:

    op                FLOPs         bytes moved to or from HBM
    partial           4 S N T D     E (N + S) T D
    partial_backward  10 S N T D    E (2 N + S) T D, and E N T D more to accumulate
    merge                           E 3 T D
    merge_backward                  E 6 T D

D is padded to a multiple of 128 and T to a multiple of 16; padding costs a copy.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels import operand, tuned
from pallas_kernels.arguments import Norm
from pallas_kernels.call import LANES, round_up, tpu_call
from pallas_kernels.depth_attention import mosaic_tpu_decode
from pallas_kernels.depth_attention import mosaic_tpu_kernels as kernels
from pallas_kernels.depth_attention import mosaic_tpu_merge_kernels as merge_kernels
from pallas_kernels.depth_attention.interface import (
    Merge,
    MergeCotangents,
    MergeGradients,
    Partial,
    PartialCotangents,
)
from pallas_kernels.depth_attention.mosaic_tpu_kernels import (
    GROUP,
    BlockSizes,
    VectorsCall,
    pieces,
)
from pallas_kernels.platform import UnsupportedImplementation
from pallas_kernels.target import target

# The maximum of `vmem_bytes`, in units of 1/60 of the VMEM limit. It is less than 60 because
# `vmem_bytes` does not count all of the compiler's temporaries.
_BUDGET = 54
# At least this many bytes of VMEM are left to these temporaries. On chips with little VMEM, such as
# v4, this is the tighter limit.
_TEMPORARIES = 4 * 2**20
# With at most this many sources and few sites, latency dominates, because a kernel computes little
# per group of tokens. More groups are therefore unrolled into one loop body.
_FEW_SOURCES = 4
# Names of chips with enough registers to unroll eight groups of tokens for 3 to 8 sites.
_NEWER = ("tpu_v6_lite", "tpu7x")
_NAME = "depth_attention_"


def partial(
    operands: Partial,
    *,
    epsilon: int | float,
    block_sizes: BlockSizes | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "S T D"], Float[Array, "S T"]]:
    """Return each site's mix (a weighted sum of the sources) and log-sum-exp (see `interface`).

    For S sites, N sources and T tokens, and D entries of E bytes per source, the kernel takes
    `4 S N T D` FLOPs and moves `E (N + S) T D` bytes.
    """
    if block_sizes is None and mosaic_tpu_decode.serves(operands):
        return mosaic_tpu_decode.partial(operands, epsilon=epsilon, interpret=interpret)
    queries, sources, count, prior = operands
    call = _call_of("partial", operands, epsilon, block_sizes, interpret)
    N, S, T = call.N, call.S, call.tokens
    tile = _by_tile(call)
    inputs = {
        "count": operand.in_smem(count),
        "queries": operand.constant(_queries(call, queries)),
        "sources": operand.anywhere(_aligned(sources)),
    }
    if prior is not None:
        inputs["prior"] = (_aligned(prior[0]), tile(S))
        inputs["prior_log_sums"] = _tiled(call, prior[1])
    outputs = {
        "mixed": (
            jax.ShapeDtypeStruct((S, round_up(T, GROUP), call.width), sources.dtype),
            tile(S),
        ),
        "log_sums": _tiled(call, None),
    }
    scratch = _score_scratch(call)
    if prior is not None:
        scratch["prior_weights"] = pltpu.VMEM((call.groups, S, GROUP, LANES), jnp.float32)
    out = _run(
        call,
        functools.partial(kernels.partial, call=call),
        "depth_attention_partial",
        inputs,
        outputs,
        scratch,
        flops=4 * S * N * T * call.size,
        interpret=interpret,
    )
    tokens, size = sources.shape[1:]
    return out["mixed"][:, :tokens, :size], _untiled(out["log_sums"])[:, :tokens]


def partial_backward(
    operands: Partial,
    cotangents: PartialCotangents,
    *,
    epsilon: int | float,
    block_sizes: BlockSizes | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "S D"], Float[Array, "N T D"]]:
    """Return the gradients of `partial` with respect to queries and sources (see `interface`).

    For S sites, N sources and T tokens, and D entries of E bytes per source, the kernel takes
    `10 S N T D` FLOPs and moves `E (2 N + S) T D` bytes. It moves `E N T D` more to add the
    sources' gradients to `accumulate`.
    """
    queries, sources, count, _ = operands
    log_sums, delta, d_mixed, accumulate = cotangents
    call = _call_of("partial_backward", operands, epsilon, block_sizes, interpret)
    N, S, T = call.N, call.S, call.tokens
    tile = _by_tile(call)
    right_queries, shrink_rows = _right_rows(call, queries)
    inputs = {
        "count": operand.in_smem(count),
        "queries": operand.constant(_queries(call, queries)),
        "queries_again": operand.constant(right_queries),
        "shrink_rows": operand.constant(shrink_rows),
        "sources": operand.anywhere(_aligned(sources)),
        "log_sums": _tiled(call, log_sums),
        "d_mixed": (_aligned(d_mixed.astype(sources.dtype)), tile(S)),
    }
    if delta is not None:
        inputs["delta"] = _tiled(call, delta)
    if accumulate is not None:
        inputs["accumulate"] = operand.anywhere(_aligned(accumulate.astype(sources.dtype)))
    rows = (call.query_rows, call.width)
    outputs = {
        "d_queries": (
            jax.ShapeDtypeStruct((call.cores, *rows), jnp.float32),
            pl.BlockSpec((1, *rows), lambda c, j, *_: (c, 0, 0)),
        ),
        "d_sources": inputs["sources"],
    }
    lanes = [n * GROUP for _, n in call.chunks]
    scratch = {
        "sources": _bank(call),
        "d_sources": _bank(call),
        "logits": [pltpu.VMEM((call.groups, S, n), jnp.float32) for n in lanes],
        "rstd": [pltpu.VMEM((call.groups, 1, n), jnp.float32) for n in lanes],
        "g": [pltpu.VMEM((call.groups, S * GROUP, n), jnp.float32) for n in lanes],
        "left": [pltpu.VMEM((call.groups, n, call.left_rows), sources.dtype) for n in lanes],
        "d_products": [pltpu.VMEM((call.groups, call.query_rows, n), sources.dtype) for n in lanes],
        "read": pltpu.SemaphoreType.DMA((2,)),
        "written": pltpu.SemaphoreType.DMA((2,)),
    }
    if accumulate is not None:
        scratch["read_added"] = pltpu.SemaphoreType.DMA((2,))
    out = _run(
        call,
        functools.partial(kernels.partial_backward, call=call),
        "depth_attention_partial_backward",
        inputs,
        outputs,
        scratch,
        flops=10 * S * N * T * call.size,
        interpret=interpret,
        aliased={"accumulate": "d_sources"} if accumulate is not None else {},
    )
    d_queries = jnp.sum(out["d_queries"], axis=0)
    if call.narrow:
        d_queries = d_queries[2 * S : 3 * S] + d_queries[S : 2 * S] + d_queries[:S]
    tokens, size = sources.shape[1:]
    return d_queries[:S, :size], out["d_sources"][:, :tokens, :size]


def merge(
    operands: Merge,
    *,
    norm: Norm | None,
    epsilon: int | float,
    norm_epsilon: int | float,
    block_sizes: BlockSizes | None = None,
    interpret: bool = False,
) -> Float[Array, "T D"]:
    """Return z, one site's mix after the running sum is added and normalised (see `interface`).

    For T tokens with D entries of E bytes, the kernel moves `E 3 T D` bytes and takes about
    `15 T D` FLOPs.
    """
    options = {"norm": norm, "epsilon": epsilon, "norm_epsilon": norm_epsilon}
    call = _merge_call("merge", operands, block_sizes, interpret, **options)
    token, inputs = _by_token(call), _merge_inputs(call, operands)
    out = _run(
        call,
        functools.partial(merge_kernels.merge, call=call),
        "depth_attention_merge",
        inputs,
        {"z": (inputs["current"][0], token)},
        _rows_scratch(call, "h"),
        flops=15 * operands.current.size,
        interpret=interpret,
        prefetch={"site": operands.site.reshape(1)},
    )
    return out["z"][: call.tokens, : call.size]


def merge_backward(
    operands: Merge,
    cotangents: MergeCotangents,
    *,
    norm: Norm | None,
    epsilon: int | float,
    norm_epsilon: int | float,
    block_sizes: BlockSizes | None = None,
    interpret: bool = False,
) -> MergeGradients:
    """Return the gradients of `merge` with respect to its operands, as `interface` defines.

    For T tokens with D entries of E bytes, the kernel moves `E 6 T D` bytes and takes about
    `40 T D` FLOPs.
    """
    options = {"norm": norm, "epsilon": epsilon, "norm_epsilon": norm_epsilon}
    call = _merge_call("merge_backward", operands, block_sizes, interpret, **options)
    token, of_site, current = _by_token(call), _by_site(call), operands.current
    inputs = _merge_inputs(call, operands) | {
        "d_z": (_padded_width(call, cotangents.z), token),
        "d_mixed_in": operand.anywhere(_padded_width(call, cotangents.mixed)),
        "d_current_in": (_padded_width(call, cotangents.current.astype(current.dtype)), token),
    }
    of_parameter = (
        jax.ShapeDtypeStruct((call.cores, 8, call.width), jnp.float32),
        pl.BlockSpec((1, 8, call.width), lambda c, j, *_: (c, 0, 0)),
    )
    outputs = {
        "d_query": of_parameter,
        **({} if norm is None else {"d_norm_gain": of_parameter}),
        "d_mixed": (inputs["d_mixed_in"][0], of_site),
        "d_current": (inputs["current"][0], token),
        "d_log_sums": _tiled(call, None),
    }
    out = _run(
        call,
        functools.partial(merge_kernels.merge_backward, call=call),
        "depth_attention_merge_backward",
        inputs,
        outputs,
        _rows_scratch(call, "h", "difference", *(() if norm is None else ("a",))),
        flops=40 * current.size,
        interpret=interpret,
        aliased={"d_current_in": "d_current", "d_mixed_in": "d_mixed"},
        prefetch={"site": operands.site.reshape(1)},
    )
    T, D = current.shape
    of_gain = None if norm is None else jnp.sum(out["d_norm_gain"], axis=(0, 1))[:D]
    return MergeGradients(
        query=jnp.sum(out["d_query"], axis=(0, 1))[:D],
        mixed=out["d_mixed"][:, :T, :D],
        log_sums=_untiled(out["d_log_sums"])[0, :T],
        current=out["d_current"][:T, :D],
        norm_gain=of_gain,
    )


def unsupported(op: str, operands: Partial | Merge, *others: Any) -> str | None:
    """Return a one-line reason why the kernels do not support these operands, or None."""
    floats = [
        a for a in jax.tree.leaves((operands, others)) if jnp.issubdtype(a.dtype, jnp.floating)
    ]
    if any(a.dtype not in (jnp.bfloat16, jnp.float32) for a in floats):
        return "arrays that are neither bfloat16 nor float32"
    if isinstance(operands, Merge):
        T, D = operands.current.shape
        if default_block_sizes(op, 0, 1, T, D, "float32") is None:
            return f"D={D}: {GROUP} tokens do not fit in VMEM"
        return None
    queries, sources = operands[:2]
    S, (N, T, D) = queries.shape[0], sources.shape
    if default_block_sizes(op, N, S, T, D, sources.dtype.name, _wide_prior(operands)) is None:
        return f"N={N}, S={S}, D={D}: {GROUP} tokens of all sources do not fit in VMEM"
    return None


# Tiling: choice of block sizes ----------------------------------------------------------------


def _call_of(op, operands: Partial, epsilon, blocks, interpret) -> VectorsCall:
    queries, sources = operands[:2]
    S, (N, T, D) = queries.shape[0], sources.shape
    sizes, wide = (N, S, T, D, sources.dtype.name), _wide_prior(operands)
    if blocks is None and wide:  # Tuned tables are for a prior in the sources' dtype.
        blocks = default_block_sizes(op, *sizes, wide)
    elif blocks is None:
        blocks = choose_block_sizes(op, *sizes)
    blocks = _fitted(blocks, op, operands, interpret)
    tokens = round_up(T, GROUP)
    width = round_up(D, LANES)
    return VectorsCall(N, S, tokens, D, width, sources.dtype.name, epsilon, blocks, interpret)


def _wide_prior(operands: Partial) -> str | None:
    """Return the dtype of the prior's mixes if it is wider than the sources', or else None."""
    if operands.prior is None:
        return None
    of_prior, of_sources = operands.prior[0].dtype, operands.sources.dtype
    return of_prior.name if of_prior.itemsize > of_sources.itemsize else None


def _fitted(
    blocks: BlockSizes | None, op: str, operands: Partial | Merge, interpret: bool
) -> BlockSizes:
    """Return `blocks` with at most T tokens per tile, rounded up to whole groups.

    The interpreter does not unroll loops, to save compile time.

    Raises:
      UnsupportedImplementation: `blocks` is None, because no block sizes fit in VMEM.
    """
    if blocks is None:
        reason = unsupported(op, operands)
        raise UnsupportedImplementation(
            f"no TPU kernel of {_NAME}{op} supports this call: {reason}; use 'xla'"
        )
    T = operands.current.shape[0] if isinstance(operands, Merge) else operands.sources.shape[1]
    unroll = 1 if interpret else blocks.unroll
    return dataclasses.replace(blocks, tokens=min(blocks.tokens, round_up(T, GROUP)), unroll=unroll)


def _merge_call(
    op, operands: Merge, blocks, interpret, *, norm, epsilon, norm_epsilon
) -> VectorsCall:
    T, D = operands.current.shape
    blocks = blocks or choose_block_sizes(op, 0, 1, T, D, "float32")
    blocks = _fitted(blocks, op, operands, interpret)
    width = round_up(D, LANES)
    dtype = operands.current.dtype.name
    call = VectorsCall(0, 1, T, D, width, dtype, epsilon, blocks, interpret)
    return dataclasses.replace(call, norm=norm, norm_epsilon=norm_epsilon)


def _merge_inputs(call: VectorsCall, operands: Merge):
    gain = operands.norm_gain
    return {
        "active": operand.in_smem(operands.active.reshape(1).astype(jnp.int32)),
        "query": operand.constant(_parameter(call, operands.query)),
        **({} if gain is None else {"norm_gain": operand.constant(_parameter(call, gain))}),
        "log_sums": _tiled(call, operands.log_sums[None]),
        "mixed": (_padded_width(call, operands.mixed), _by_site(call)),
        "current": (_padded_width(call, operands.current), _by_token(call)),
    }


def _rows_scratch(call: VectorsCall, *names: str):
    shape = (call.blocks.tokens, call.width)
    return {name: pltpu.VMEM(shape, jnp.float32) for name in names}


def _score_scratch(call: VectorsCall):
    """Return the shapes of the scratch buffers for the computation of the sources' weights."""
    products = [call.mixed_by_product(n) for _, n in call.chunks]
    rows = call.S * GROUP * call.weight_pieces
    scratch = {
        "sources": pltpu.VMEM((2, call.N, call.blocks.tokens, call.width), call.dtype),
        "read": pltpu.SemaphoreType.DMA((2,)),
        "logits": [
            pltpu.VMEM((call.groups, call.S, n * GROUP), jnp.float32) for _, n in call.chunks
        ],
        "weights": [
            pltpu.VMEM((call.groups, rows, max(p, 1) * GROUP), call.dtype) for p in products
        ],
        "columns": [
            pltpu.VMEM((call.groups, max(n - p, 1), call.S, GROUP, LANES), jnp.float32)
            for (_, n), p in zip(call.chunks, products, strict=True)
        ],
    }
    if len(call.chunks) > 1:
        sums = (call.groups, call.S, GROUP, call.width)
        scratch["sums"] = pltpu.VMEM(sums, jnp.float32)
    return scratch


def choose_block_sizes(op: str, N: int, S: int, T: int, D: int, dtype: str) -> BlockSizes | None:
    """Return the block sizes for the target device, from a table of tuned sizes or by default.

    Returns None if no block sizes fit in VMEM.
    """
    default = default_block_sizes(op, N, S, T, D, dtype)
    if default is None:
        return None
    key = {"N": N, "S": S, "D": D, "dtype": dtype}
    return tuned.look_up(KERNELS[_NAME + op], key, T, default)


def default_block_sizes(
    op: str, N: int, S: int, T: int, D: int, dtype: str, wide_prior: str | None = None
) -> BlockSizes | None:
    """Return the block sizes that the heuristic selects for the target device.

    Returns None if no block sizes fit in VMEM. `wide_prior` is as in `vmem_bytes`.
    """
    tokens = round_up(T, GROUP)
    # Groups of tokens in one loop body hide each other's latency. With less work per group, more
    # groups are needed.
    if op in ("merge", "merge_backward"):
        sizes, unroll = (256, 128, 64, 32, 16), 16
    elif S <= 2 and N <= _FEW_SOURCES:
        sizes, unroll = (256, 128, 96, 64, 48, 32, 16), 16
    else:
        sizes = (128, 96, 64, 48, 32, 16)
        # With many sites, registers run out and compilation becomes slow, so fewer groups are
        # unrolled. Newer chips have more registers.
        newer = target().slug in _NEWER
        unroll = 4 if op == "partial" and S > (8 if newer else 2) else 8
    budget = min(target().vmem_part(_BUDGET), target().vmem_limit - _TEMPORARIES)
    fitting = [
        BlockSizes(t, unroll=unroll, weight_pieces=2 if S <= 2 else 1)
        for t in sizes
        if vmem_bytes(op, N, S, D, dtype, min(t, tokens), wide_prior) <= budget
    ]
    # Prefer larger tiles, because they hide latency better. Prefer an even number of full tiles,
    # because two cores can share these.
    even = [b for b in fitting if tokens % (2 * b.tokens) == 0]
    return next(iter(even + fitting), None)


def vmem_bytes(
    op: str, N: int, S: int, D: int, dtype: str, tokens: int, wide_prior: str | None = None
) -> int:
    """Estimate the VMEM of a grid step, in bytes.

    Blocks that the pipeline copies count twice, because they are double-buffered. `wide_prior` is
    the dtype of the prior's mixes if it is wider than `dtype`; None means that it is not.
    """
    item = jnp.dtype(dtype).itemsize
    width = round_up(D, LANES)
    row, lanes = tokens * width, round_up(N, 8) * GROUP
    groups = tokens // GROUP
    rows = round_up(3 * S, GROUP)
    if op in ("merge", "merge_backward"):
        arrays, intermediates = (3, 1) if op == "merge" else (6, 3)
        return (2 * arrays * item + intermediates * 4) * row + 64 * width * 4
    if op == "partial":
        several = N > kernels.CHUNK
        scratch = groups * lanes * (4 * round_up(S, 8) + 32 * S * item)
        scratch += groups * S * GROUP * LANES * 4 + (S * row * 4 if several else 0)
        of_prior = jnp.dtype(wide_prior or dtype).itemsize
        return 2 * ((N + S) * item + S * of_prior) * row + scratch + rows * width * item
    left = round_up(2 * S * GROUP + rows + GROUP, LANES)
    scratch = groups * lanes * (4 * round_up(S + 8, 8) + 4 * S * GROUP + item * (left + rows))
    return 2 * (2 * N + S) * row * item + scratch + rows * width * (2 * item + 8)


def _refused(
    kernel: str, key: dict[str, tuned.Value], tokens: int, blocks: BlockSizes
) -> str | None:
    op = kernel.removeprefix(_NAME)
    rule = default_block_sizes(op, T=tokens, **key)
    # `lanes` and `weight_pieces` must have the values of the heuristic, because other values change
    # how results are rounded.
    same = rule and (blocks.lanes, blocks.weight_pieces) == (rule.lanes, rule.weight_pieces)
    if not same:
        return (
            f"lanes={blocks.lanes} and weight_pieces={blocks.weight_pieces}, which would change "
            "the rounding"
        )
    if blocks.tokens % GROUP:
        return f"tiles of {blocks.tokens} tokens (legal: multiples of {GROUP})"
    need, limit = vmem_bytes(op, tokens=blocks.tokens, **key), target().vmem_limit
    return f"{need >> 20} MiB of VMEM (the limit is {limit >> 20} MiB)" if need > limit else None


KERNELS = tuned.register(
    "tpu",
    [_NAME + op for op in ("partial", "partial_backward", "merge", "merge_backward")],
    BlockSizes,
    ("N", "S", "D", "dtype"),
    _refused,
)


# Layout of the kernels' operands --------------------------------------------------------------


def _queries(call: VectorsCall, queries):
    """Return the queries as the left operand of a matrix product.

    For bfloat16 operands, each query is split into three bfloat16 terms ("pieces"). The rows are
    then the first pieces of all queries, then all second pieces, then all third pieces.
    """
    rows = pieces(queries) if call.narrow else [queries]
    return _rows_padded(call, rows, call.query_rows)


def _right_rows(call: VectorsCall, queries):
    """Return the right operands of two matrix products in the kernel of `partial_backward`.

    The left operand of both is `left`, which `_weigh_backward` computes.

    Returns:
      The queries' bfloat16 pieces, which the kernel appends to the rows of d_mixed; and an operand
      of ones and zeros whose product with `left` is the factor c of `_weigh_backward`.
    """
    if call.narrow:
        q1, q2, _ = pieces(queries)
        rows, shrinks = [q1, q2, q1], 3
    else:
        rows, shrinks = [queries], 1
    weights = call.S * GROUP * call.weight_pieces
    right_queries = _rows_padded(call, rows, call.left_rows - weights)
    first = weights + len(rows) * call.S
    row = jnp.arange(call.left_rows)[:, None]
    is_shrink = (row >= first) & (row < first + shrinks)
    shrink_rows = jnp.broadcast_to(is_shrink, (call.left_rows, LANES))
    return right_queries, shrink_rows.astype(right_queries.dtype)


def _rows_padded(call: VectorsCall, rows, total: int):
    rows = jnp.concatenate(rows, axis=0)
    missing = ((0, total - rows.shape[0]), (0, call.width - call.size))
    return jnp.pad(rows.astype(call.dtype), missing)


def _aligned(x):
    """Pad [.., T, D] so that T is a multiple of 16 and D of 128."""
    T, D = x.shape[-2:]
    missing = ((0, 0), (0, round_up(T, GROUP) - T), (0, round_up(D, LANES) - D))
    return jnp.pad(x, missing) if any(map(any, missing)) else x


def _bank(call: VectorsCall):
    """Return the shape of the double buffer for tiles of all N sources."""
    return pltpu.VMEM((2, call.N, call.blocks.tokens, call.width), call.dtype)


def _by_tile(call: VectorsCall):
    def spec(rows):
        index = lambda c, j, *_: (0, c * call.tiles_each + j, 0)
        return pl.BlockSpec((rows, call.blocks.tokens, call.width), index)

    return spec


def _padded_width(call: VectorsCall, x):
    """Pad [.., T, D] so that D is a multiple of 128.

    In the interpreter, T is padded to whole tiles too, because it can alias only whole tiles.
    """
    T, D = x.shape[-2:]
    tokens = max(T, call.tiles * call.blocks.tokens) if call.interpret else T
    missing = ((0, 0),) * (x.ndim - 2) + ((0, tokens - T), (0, call.width - D))
    return jnp.pad(x, missing) if any(map(any, missing)) else x


def _by_site(call: VectorsCall):
    """Return the block spec for a tile of the row of `mixed` that the prefetched `site` selects."""
    return operand.of_stack(_by_token(call))


def _by_token(call: VectorsCall):
    index = lambda c, j, *_: (c * call.tiles_each + j, 0)
    return pl.BlockSpec((call.blocks.tokens, call.width), index)


def _parameter(call: VectorsCall, x):
    """Broadcast a parameter [D] to [GROUP, D], because broadcasting is slow within a kernel."""
    row = jnp.pad(x.astype(jnp.float32), (0, call.width - call.size))
    return jnp.broadcast_to(row, (GROUP, call.width))


def _tiled(call: VectorsCall, x):
    """Convert x [S, T] to float32 tiles [tiles, S, tokens], and return the tiles and a block spec.

    If x is None, the operand is an output, and the shape of the tiles is returned in their place.
    """
    tokens = call.blocks.tokens
    shape = (call.tiles, call.S, tokens)
    spec = pl.BlockSpec((1, *shape[1:]), lambda c, j, *_: (c * call.tiles_each + j, 0, 0))
    if x is None:
        return jax.ShapeDtypeStruct(shape, jnp.float32), spec
    x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, call.tiles * tokens - x.shape[1])))
    return jnp.swapaxes(x.reshape(call.S, call.tiles, tokens), 0, 1), spec


def _untiled(x):
    return jnp.swapaxes(x, 0, 1).reshape(x.shape[1], -1)


# The kernel call ------------------------------------------------------------------------------


def _run(
    call, kernel, name, inputs, outputs, scratch, *, flops, interpret, aliased=None, prefetch=None
):
    return tpu_call(
        kernel,
        name,
        inputs,
        outputs,
        scratch,
        grid=(call.cores, call.tiles_each),
        semantics=("parallel", "arbitrary"),
        flops=flops,
        transcendentals=call.S * max(call.N, 1) * call.tokens,
        aliased=aliased,
        prefetch=prefetch,
        interpret=interpret,
    )
