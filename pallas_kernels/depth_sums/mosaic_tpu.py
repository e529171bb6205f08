"""TPU kernels for weighted sums over depth, which read every source from HBM once for all sums.

Arrays keep the model's layout [.., T, D], with D in the lanes. A grid step processes one tile of
tokens. It copies the tile of every active source to VMEM, while the previous tile is computed. The
sums of a group of tokens are in registers while a loop adds one source after the other. The
backward pass adds each source's gradient to the tile of `accumulate`.

The costs for S sums, T tokens, N active sources and E bytes per entry are:

    op             FLOPs       bytes moved to or from HBM
    sums           2 S N T D   E (N + S) T D
    sums_backward  4 S N T D   E (3 N + S) T D

All arithmetic is on the vector unit, in float32.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import operand
from pallas_kernels.call import LANES, round_up, tpu_call, widen
from pallas_kernels.depth_attention.mosaic_tpu_tiles import (
    GROUP,
    BlockSizes,
    Tile,
    TiledCall,
    copy_rows,
    each_group,
    fold_lanes,
    group_rows,
)
from pallas_kernels.target import target

# The maximum of `_vmem_bytes`, in units of 1/60 of the VMEM limit.
_BUDGET = 54
# The numbers of tokens per tile to choose from.
_TILES = 128, 64, 32, 16
# The number of entries along D that are computed at a time. The sums of four ways then fit in
# registers.
_STEP = 256


@dataclasses.dataclass(frozen=True)
class SumsCall(TiledCall):
    """The static parameters of a kernel for weighted sums, constant during tracing.

    Attributes:
      N, S: the number of rows in the bank of sources, and the number of sums.
      tokens: the number of tokens.
      width: D, the number of entries of a source.
      blocks: the block sizes.
      interpret: whether the kernel is interpreted.
    """

    N: int
    S: int
    tokens: int
    width: int
    blocks: BlockSizes
    interpret: bool

    @property
    def columns(self) -> int:
        """The number of lanes with a weight for each source and sum, a multiple of 128."""
        return round_up(self.N * self.S, LANES)

    def tile(self, core, j):
        """Return the index of the tile that a core processes in its step j."""
        return core * self.tiles_each + j


def unsupported(op: str, weights: Any, sources: Any, *others: Any) -> str | None:
    """Return a one-line reason why the kernels do not support these operands, or None."""
    dtypes = [x.dtype for x in (sources, *others) if jnp.issubdtype(x.dtype, jnp.floating)]
    if any(dtype not in (jnp.bfloat16, jnp.float32) for dtype in dtypes):
        return "arrays that are neither bfloat16 nor float32"
    if sources.ndim != 3:
        return f"sources of {sources.ndim - 2} axes (legal: vectors)"
    T, D = sources.shape[1:]
    if D % LANES or T % GROUP:
        return f"D={D} with {T} tokens (legal: multiples of {LANES} and of {GROUP})"
    if _tile(op, weights, sources) is None:
        return f"N={len(sources)}, S={len(weights)}, D={D}: {GROUP} tokens do not fit in VMEM"
    return None


def wins(op: str, weights: Any, sources: Any, *others: Any) -> bool:
    """Return whether the kernel is faster than plain JAX: not for the tokens of a decode step."""
    return sources.shape[1] >= _TILES[0]


def sums(
    weights: Float[Array, "S N T"],
    sources: Float[Array, "N T D"],
    count: Int[Array, ""],
    *,
    dtype: str,
    interpret: bool = False,
) -> Float[Array, "S T D"]:
    """Return the sums, in `dtype`; see the docstring of `depth_sums`.

    For S sums, N sources and T tokens, with D entries of E bytes per source, the kernel takes
    `2 S N T D` FLOPs and moves `E (N + S) T D` bytes.
    """
    call = _call_of("sums", weights, sources, interpret)
    out = _run(
        call,
        _sums_kernel,
        "depth_sums",
        _inputs(call, weights, sources, count),
        {"sums": (jax.ShapeDtypeStruct((call.S, *sources.shape[1:]), dtype), _of_sums(call))},
        _scratch(call, sources),
        flops=2 * call.S * sources.size,
    )
    return out["sums"]


def sums_backward(
    weights: Float[Array, "S N T"],
    sources: Float[Array, "N T D"],
    count: Int[Array, ""],
    d_sums: Float[Array, "S T D"],
    accumulate: Float[Array, "N T D"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "S N T"], Float[Array, "N T D"]]:
    """Return the gradients of the weights, and `accumulate` plus the gradients of the sources.

    The equations are in `xla.sums_backward`. For S sums, N sources and T tokens, with D entries of
    E bytes per source, the kernel takes `4 S N T D` FLOPs and moves `E (3 N + S) T D` bytes.
    """
    call = _call_of("sums_backward", weights, sources, interpret)
    inputs = _inputs(call, weights, sources, count) | {
        "d_sums": (d_sums, _of_sums(call)),
        "accumulate": operand.anywhere(accumulate),
    }
    tile = pltpu.VMEM((2, call.N, call.blocks.tokens, call.width), accumulate.dtype)
    scratch = _scratch(call, sources) | {
        "d_sources": tile,
        "d_columns": _columns(call),
        "read_added": pltpu.SemaphoreType.DMA((2,)),
        "written": pltpu.SemaphoreType.DMA((2,)),
    }
    out = _run(
        call,
        _backward_kernel,
        "depth_sums_backward",
        inputs,
        {
            "d_weights": (jax.ShapeDtypeStruct((call.tokens, call.columns), jnp.float32),)
            + inputs["weights"][1:],
            "d_sources": inputs["accumulate"],
        },
        scratch,
        flops=4 * call.S * sources.size,
        aliased={"accumulate": "d_sources"},
    )
    of_rows = out["d_weights"][:, : call.N * call.S].reshape(-1, call.N, call.S)
    return jnp.transpose(of_rows, (2, 1, 0)), out["d_sources"]


# Kernel bodies --------------------------------------------------------------------------------


def _sums_kernel(inputs, outputs, scratch, *, call: SumsCall):
    """Compute the sums of one tile of tokens."""
    count, tile, bank = inputs["count"][0], Tile(call), scratch["sources"]
    read = functools.partial(copy_rows, call, inputs["sources"], bank, scratch["read"], count)

    @pl.when(tile.first)
    def _():
        read(tile.at(0), 0, "start")

    @pl.when(~tile.last)
    def _():
        read(tile.at(1), 1 - tile.slot, "start")

    columns = scratch["columns"]
    _spread(call, count, inputs["weights"], columns)
    read(tile.at(0), tile.slot, "wait")
    values = bank.at[tile.slot]

    def add_up(group):
        rows = group_rows(group)
        for lanes in call.lane_blocks:
            width = lanes.stop - lanes.start

            def add(i, sums, lanes=lanes, width=width):
                x = values[i, rows, lanes].astype(jnp.float32)
                weight = lambda s: widen(columns[i, s, rows], width)
                return tuple(total + weight(s) * x for s, total in enumerate(sums))

            zeros = (jnp.zeros((GROUP, width), jnp.float32),) * call.S
            for s, total in enumerate(_over_sources(count, add, zeros)):
                outputs["sums"][s, rows, lanes] = total.astype(outputs["sums"].dtype)

    each_group(call, add_up)


def _backward_kernel(inputs, outputs, scratch, *, call: SumsCall):
    """Compute the gradients of the weights and of the sources for one tile of tokens."""
    count, tile = inputs["count"][0], Tile(call)
    bank, d_bank, d_sums = scratch["sources"], scratch["d_sources"], inputs["d_sums"]
    copy = functools.partial(copy_rows, call)
    read = functools.partial(copy, inputs["sources"], bank, scratch["read"], count)
    added = inputs["accumulate"], d_bank, scratch["read_added"], count
    read_added = functools.partial(copy, *added)
    written = outputs["d_sources"], d_bank, scratch["written"], count
    write = functools.partial(copy, *written, out=True)

    @pl.when(tile.first)
    def _():
        read(tile.at(0), 0, "start")
        read_added(tile.at(0), 0, "start")

    @pl.when(~tile.last)
    def _():
        read(tile.at(1), 1 - tile.slot, "start")

    # The buffer of the previous tile receives the next one when its gradients are in HBM.
    @pl.when(~tile.first)
    def _():
        write(tile.at(-1), 1 - tile.slot, "wait")

    @pl.when(~tile.last)
    def _():
        read_added(tile.at(1), 1 - tile.slot, "start")

    columns, d_columns = scratch["columns"], scratch["d_columns"]
    _spread(call, count, inputs["weights"], columns)
    read(tile.at(0), tile.slot, "wait")
    read_added(tile.at(0), tile.slot, "wait")
    values, d_values = bank.at[tile.slot], d_bank.at[tile.slot]

    def differentiate(group):
        rows = group_rows(group)
        for lanes in call.lane_blocks:
            d = [d_sums[s, rows, lanes].astype(jnp.float32) for s in range(call.S)]

            def of_source(i, _, lanes=lanes, d=d):
                x = values[i, rows, lanes].astype(jnp.float32)
                total = d_values[i, rows, lanes].astype(jnp.float32)
                for s in range(call.S):
                    total = total + widen(columns[i, s, rows], x.shape[1]) * d[s]
                    product = fold_lanes(d[s] * x)
                    place = d_columns.at[i, s, rows]
                    place[...] = product if lanes.start == 0 else place[...] + product
                d_values[i, rows, lanes] = total.astype(d_values.dtype)
                return _

            _over_sources(count, of_source, 0)

    each_group(call, differentiate)
    write(tile.at(0), tile.slot, "start")
    _gather(call, count, d_columns, outputs["d_weights"])

    @pl.when(tile.last)
    def _():
        write(tile.at(0), tile.slot, "wait")


def _over_sources(count, body, carry):
    """Run `carry = body(i, carry)` for each source i, two at a time to hide the loads' latency."""
    pair = lambda k, carry: body(2 * k + 1, body(2 * k, carry))
    pairs = jax.lax.div(count, 2)
    return jax.lax.fori_loop(2 * pairs, count, body, jax.lax.fori_loop(0, pairs, pair, carry))


def _spread(call: SumsCall, count, weights, columns):
    """Copy each weight of a tile to all lanes of its token's row in `columns` [N, S, rows, 128]."""
    for i in range(call.N):

        @pl.when(i < count)
        def _(i=i):
            for s in range(call.S):
                lane = i * call.S + s
                columns[i, s] = jnp.broadcast_to(weights[:, lane : lane + 1], columns.shape[2:])


def _gather(call: SumsCall, count, columns, weights):
    """Sum `columns` [N, S, rows, 128] over lanes, and write each sum to the lane of its weight."""
    weights[...] = jnp.zeros_like(weights)
    for i in range(call.N):

        @pl.when(i < count)
        def _(i=i):
            for s in range(call.S):
                lane = i * call.S + s
                weights[:, lane : lane + 1] = jnp.sum(columns[i, s], axis=1, keepdims=True)


# Operands -------------------------------------------------------------------------------------


def _tile(op: str, weights: Any, sources: Any) -> int | None:
    """Return the number of tokens per tile, or None if no number fits in VMEM."""
    S, (N, T, D) = len(weights), sources.shape
    # Tiles are double-buffered. The sums may be wider than the sources.
    of_sources = (2 if op == "sums" else 4) * N * sources.dtype.itemsize + 2 * S * 4
    of_weights = (1 if op == "sums" else 2) * N * S * LANES + 4 * round_up(N * S, LANES)
    bytes_per_token = of_sources * D + of_weights * 4
    fitting = [t for t in _TILES if t * bytes_per_token <= target().vmem_part(_BUDGET)]
    # Prefer an even number of full tiles, which two cores can share.
    even = [t for t in fitting if T % (2 * t) == 0]
    return next(iter(even + fitting), None)


def _call_of(op: str, weights: Array, sources: Array, interpret: bool) -> SumsCall:
    N, T, D = sources.shape
    # Two groups of tokens per iteration are enough, because the loop over sources hides latency.
    blocks = BlockSizes(min(_tile(op, weights, sources), T), lanes=_STEP, unroll=2)
    return SumsCall(N, len(weights), T, D, blocks, interpret)


def _inputs(call: SumsCall, weights, sources, count) -> dict[str, Any]:
    """Return the inputs of both kernels. A token's weights are in the lanes of one row."""
    by_token = jnp.transpose(weights.astype(jnp.float32), (2, 1, 0)).reshape(call.tokens, -1)
    by_token = jnp.pad(by_token, ((0, 0), (0, call.columns - by_token.shape[1])))
    spec = pl.BlockSpec((call.blocks.tokens, call.columns), lambda c, j: (call.tile(c, j), 0))
    return {
        "count": operand.in_smem(jnp.clip(count, 0, call.N)),
        "sources": operand.anywhere(sources),
        "weights": (by_token, spec),
    }


def _of_sums(call: SumsCall) -> pl.BlockSpec:
    """Return the block spec for a tile of an array [S, T, D]."""
    shape = (call.S, call.blocks.tokens, call.width)
    return pl.BlockSpec(shape, lambda c, j: (0, call.tile(c, j), 0))


def _columns(call: SumsCall):
    return pltpu.VMEM((call.N, call.S, call.blocks.tokens, LANES), jnp.float32)


def _scratch(call: SumsCall, sources) -> dict[str, Any]:
    return {
        "sources": pltpu.VMEM((2, call.N, call.blocks.tokens, call.width), sources.dtype),
        "columns": _columns(call),
        "read": pltpu.SemaphoreType.DMA((2,)),
    }


def _run(call: SumsCall, kernel, name, inputs, outputs, scratch, *, flops, aliased=None):
    return tpu_call(
        functools.partial(kernel, call=call),
        name,
        inputs,
        outputs,
        scratch,
        grid=(call.cores, call.tiles_each),
        semantics=("parallel", "arbitrary"),
        flops=flops,
        aliased=aliased,
        interpret=call.interpret,
    )
