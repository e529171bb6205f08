"""GPU kernels of depth attention, in Pallas Triton, for compute capability 8.0 and above.

All kernels are bound by memory bandwidth, so each source is read from memory only once. A program
keeps all D entries of a token's source in registers, and computes an online softmax over the
sources. The costs for S sites, T tokens and N active sources are:

    op                FLOPs                elements moved to or from memory
    partial           (4 S + 2) N T D      (N + S) T D
    partial_backward  (9 S + 4) N T D      (2 N + S) T D, and N T D more to accumulate
    merge             20 T D               3 T D
    merge_backward    40 T D               6 T D

If the accumulators for S sites do not fit in registers, `partial` divides the sites between several
programs per token. These run at the same time and share the sources through the cache. The backward
pass then consists of two kernels, which move (3 N + 2 S) T D elements. The first computes the
logits, which need whole sources. The second processes parts of D and reads the sources again. If
the accumulators fit, the backward pass is a single kernel. It reads a token's sources twice, the
second time from the cache.

Gradients of parameters are summed in registers over a group of tokens, and then over the groups in
a fixed order. There are no atomics, so results are bitwise reproducible.

Products, statistics and sums are float32 and do not use tensor cores. Sources of up to 8192 entries
cause no register spills; longer sources cause some.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, DTypeLike, Float

from pallas_kernels import tuned
from pallas_kernels.arguments import Norm
from pallas_kernels.call import gpu_call, is_power_of_2
from pallas_kernels.depth_attention.interface import (
    Merge,
    MergeCotangents,
    MergeGradients,
    Partial,
    PartialCotangents,
)
from pallas_kernels.depth_attention.triton_gpu_kernels import (
    GpuCall,
    backward_kernel,
    gradients_kernel,
    merge_backward_kernel,
    merge_kernel,
    padded,
    partial_kernel,
    scores_kernel,
)
from pallas_kernels.triton import no_triton

_DTYPES = (jnp.bfloat16, jnp.float32)
# Maximum number of sites per call of a backward kernel. With more sites, the kernel is called
# several times, and the calls add up the gradients.
MOST_SITES = 16
_MOST_SIZE = 16384


class Blocks(NamedTuple):
    """The block sizes and launch parameters of a depth-attention GPU kernel.

    Attributes:
      rows: the number of sources per tile, a power of two.
      sites: the number of sites per program. Their accumulators are in registers, and the program
        reads each source once for all of them.
      tokens: the number of tokens per program, which it processes one at a time.
      columns: the number of entries along D per tile, a power of two. Only the tiles of a backward
        kernel can have fewer entries than D.
      warps: the number of warps (of 32 threads) per program.
      ahead: the number of tiles that are prefetched while another is processed, at least 1.
    """

    rows: int
    sites: int
    tokens: int
    columns: int
    warps: int
    ahead: int = 1


def unsupported(op: str, operands: Partial | Merge, *others) -> str | None:
    """Return a one-line reason why the kernels do not support these operands, or None."""
    if why := no_triton():
        return why
    if isinstance(operands, Merge) and operands.norm_gain is None:
        return "a merge without a norm"
    if isinstance(operands, Merge):
        arrays = [operands.mixed, operands.current, *jax.tree.leaves(others)]
    else:
        arrays = [operands.sources, *(x for s in others for x in (s.d_mixed, s.accumulate))]
    for array in (x for x in arrays if x is not None):
        if array.dtype not in _DTYPES:
            return f"an array is {array.dtype}, not bfloat16 or float32"
        if 0 in array.shape:
            return f"an array of shape {array.shape} is empty"
        if array.shape[-1] > _MOST_SIZE:
            return f"sources of {array.shape[-1]} entries are longer than {_MOST_SIZE}"
    return None


def wins(op: str, operands: Partial | Merge, *others) -> bool:
    """Return whether a table lists the op's kernel as the fastest for these operands."""
    if unsupported(op, operands, *others) is not None:
        return False
    if isinstance(operands, Merge):
        (N, S), (T, D), dtype = (1, 1), operands.current.shape, operands.current.dtype
    else:
        (N, T, D), dtype = operands.sources.shape, operands.sources.dtype
        S = min(operands.queries.shape[0], MOST_SITES)
    name = {
        "partial_backward": "backward" if fits(S, D) else "gradients",
    }.get(op, op)
    key = {"N": N, "S": S, "D": D, "dtype": dtype.name}
    return tuned.winner(KERNELS[f"depth_attention_{name}"], key, T) == "triton"


def default_blocks(kernel: str, *, N: int, S: int, T: int, D: int, dtype: DTypeLike) -> Blocks:
    """Return block sizes that compile without register spills, by a fixed rule.

    A thread keeps 16 entries of a source in registers, or 8 if it also keeps vectors of several
    sites. Kernels that sum parameter gradients run about 1024 programs, each for a group of tokens.
    This fills current GPUs (up to about 150 multiprocessors), and leaves few partial sums to add.
    """
    width = padded(D)
    warps = lambda entries, most=16: min(most, max(1, width // (32 * entries)))
    group = lambda parts: min(32, max(1, T * parts // 1024))
    rows = 1 if width > 4096 else 2
    # With the same number of warps, the forward and the backward pass sum the terms of a logit in
    # the same order. Their logits are then bitwise equal.
    of_mix = warps(16 if S == 1 else 8)
    if kernel in ("depth_attention_partial", "depth_attention_scores"):
        groups = pl.cdiv(S, max(1, min(4, 16384 // width)))
        return Blocks(rows, pl.cdiv(S, groups), 1, width, of_mix)
    if kernel == "depth_attention_backward":
        return Blocks(rows, S, group(1), width, of_mix)
    if kernel == "depth_attention_gradients":
        # Each thread has the same entries of every row of a tile. Sums over rows therefore need no
        # communication between threads.
        part = min(width, 512 if S <= 8 else 256)
        entries = 4 if S <= 8 else 2
        return Blocks(1, S, group(pl.cdiv(D, part)), part, max(1, part // (32 * entries)), 3)
    if kernel == "depth_attention_merge_backward":
        return Blocks(1, 1, group(1), width, warps(8, most=8))
    return Blocks(1, 1, 1, width, warps(8))


# The ops: choice of block sizes and kernel calls ----------------------------------------------


def partial(
    operands: Partial,
    *,
    epsilon: int | float,
    block_sizes: Blocks | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "S T D"], Float[Array, "S T"]]:
    """Return each site's mix (a weighted sum of the sources) and log-sum-exp (see `interface`).

    For S sites, N sources of D entries and T tokens, the kernel takes `(4 S + 2) N T D` FLOPs and
    moves `(N + S) T D` elements. It moves `S T D` more if there is a `prior`.
    """
    queries, sources, count, prior = operands
    call = _call_of(queries, sources, epsilon)
    name = "depth_attention_partial"
    blocks = block_sizes or _blocks_of(call, name, sources)
    inputs = {
        "queries": queries.astype(jnp.float32),
        "sources": sources,
        "count": _scalar(count),
    }
    if prior is not None:
        inputs |= {"prior_mixed": prior[0], "prior_log_sums": prior[1].astype(jnp.float32)}
    outputs = {
        "mixed": jax.ShapeDtypeStruct((call.S, call.T, call.D), sources.dtype),
        "log_sums": jax.ShapeDtypeStruct((call.S, call.T), jnp.float32),
    }
    width = sources.dtype.itemsize
    out = gpu_call(
        functools.partial(partial_kernel, call, blocks),
        name,
        inputs,
        outputs,
        grid=(pl.cdiv(call.S, blocks.sites) * call.T,),
        warps=blocks.warps,
        flops=(4 * call.S + 2) * sources.size,
        moved=sources.nbytes + (1 if prior is None else 2) * outputs["mixed"].size * width,
        transcendentals=call.S * call.N * call.T,
        interpret=interpret,
    )
    return out["mixed"], out["log_sums"]


def partial_backward(
    operands: Partial,
    cotangents: PartialCotangents,
    *,
    epsilon: int | float,
    block_sizes: Blocks | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "S D"], Float[Array, "N T D"]]:
    """Return the gradients of `partial` with respect to queries and sources (see `interface`).

    For S sites, N sources of D entries and T tokens, the pass takes `(9 S + 4) N T D` FLOPs and
    moves `(2 N + S) T D` elements. It moves `N T D` more to add the sources' gradients to
    `accumulate`, and `(N + S) T D` more if the sites' vectors do not fit in registers.
    """
    queries, sources, count, _ = operands
    log_sums, delta, d_mixed, accumulate = cotangents
    if queries.shape[0] > MOST_SITES:
        parts = []
        for first in range(0, queries.shape[0], MOST_SITES):
            part = slice(first, first + MOST_SITES)
            of_delta = None if delta is None else delta[part]
            d_queries, accumulate = partial_backward(
                Partial(queries[part], sources, count),
                PartialCotangents(log_sums[part], of_delta, d_mixed[part], accumulate),
                epsilon=epsilon,
                block_sizes=block_sizes,
                interpret=interpret,
            )
            parts.append(d_queries)
        return jnp.concatenate(parts), accumulate
    call = _call_of(queries, sources, epsilon)
    N, S, T, D = call.N, call.S, call.T, call.D
    inputs = {
        "queries": queries.astype(jnp.float32),
        "sources": sources,
        "count": _scalar(count),
        "log_sums": log_sums.astype(jnp.float32),
        "d_mixed": d_mixed,
    }
    float32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    scores = {"rstd": float32(T, N), "logits": float32(S, T, N), "products": float32(S, T, N)}
    run = functools.partial(gpu_call, interpret=interpret)
    in_registers = block_sizes.columns >= D if block_sizes else fits(S, D)
    of_delta = {} if delta is None else {"delta": delta.astype(jnp.float32)}
    if in_registers:
        name, kernel, flops = "depth_attention_backward", backward_kernel, 9 * S + 4
        inputs |= of_delta
    else:
        name, kernel, flops = "depth_attention_scores", scores_kernel, 4 * S + 2
        blocks = _blocks_of(call, name, sources)
        out = run(
            functools.partial(kernel, call, blocks),
            name,
            inputs | of_delta,
            scores | {"totals": float32(S, T)},
            grid=(pl.cdiv(S, blocks.sites) * T,),
            warps=blocks.warps,
            flops=flops * sources.size,
            moved=sources.nbytes + d_mixed.nbytes,
            transcendentals=S * N * T,
        )
        inputs |= out
        scores = {}
        name, kernel, flops = "depth_attention_gradients", gradients_kernel, 5 * S + 2
    blocks = block_sizes or _blocks_of(call, name, sources)
    groups = pl.cdiv(T, blocks.tokens)
    if accumulate is not None:
        inputs["accumulate"] = accumulate.astype(sources.dtype)
    outputs = {
        "d_queries": float32(groups, S, D),
        "d_sources": jax.ShapeDtypeStruct(sources.shape, sources.dtype),
    }
    out = run(
        functools.partial(kernel, call, blocks),
        name,
        inputs,
        outputs | scores,
        grid=(groups * pl.cdiv(D, blocks.columns),),
        warps=blocks.warps,
        flops=flops * sources.size,
        moved=(2 if accumulate is None else 3) * sources.nbytes + d_mixed.nbytes,
        transcendentals=S * N * T,
        aliased={} if accumulate is None else {"accumulate": "d_sources"},
    )
    return jnp.sum(out["d_queries"], axis=0), out["d_sources"]


def merge(
    operands: Merge,
    *,
    norm: Norm,
    epsilon: int | float,
    norm_epsilon: int | float,
    block_sizes: Blocks | None = None,
    interpret: bool = False,
) -> Float[Array, "T D"]:
    """Return z, one site's mix after the running sum is added and normalised (see `interface`).

    For T tokens with D entries, the kernel takes about `20 T D` FLOPs and moves `3 T D` elements.
    """
    current = operands.current
    call = GpuCall(1, 1, *current.shape, float(epsilon), norm, float(norm_epsilon))
    name = "depth_attention_merge"
    blocks = block_sizes or _blocks_of(call, name, current)
    out = gpu_call(
        functools.partial(merge_kernel, call, blocks),
        name,
        _merge_inputs(operands),
        {"z": jax.ShapeDtypeStruct(current.shape, current.dtype)},
        grid=(pl.cdiv(call.T, blocks.tokens),),
        warps=blocks.warps,
        flops=20 * current.size,
        moved=3 * current.nbytes,
        transcendentals=call.T,
        interpret=interpret,
    )
    return out["z"]


def merge_backward(
    operands: Merge,
    cotangents: MergeCotangents,
    *,
    norm: Norm,
    epsilon: int | float,
    norm_epsilon: int | float,
    block_sizes: Blocks | None = None,
    interpret: bool = False,
) -> MergeGradients:
    """Return the gradients of `merge` with respect to its operands, as `interface` defines.

    For T tokens with D entries, the kernel takes about `40 T D` FLOPs and moves `6 T D` elements.
    """
    d_z, d_mixed, d_current = cotangents
    current = operands.current
    call = GpuCall(1, 1, *current.shape, float(epsilon), norm, float(norm_epsilon))
    name = "depth_attention_merge_backward"
    blocks = block_sizes or _blocks_of(call, name, current)
    groups = pl.cdiv(call.T, blocks.tokens)
    inputs = _merge_inputs(operands) | {"d_z": d_z, "d_mixed": d_mixed, "d_current": d_current}
    outputs = {
        "d_query": jax.ShapeDtypeStruct((groups, call.D), jnp.float32),
        "d_norm_gain": jax.ShapeDtypeStruct((groups, call.D), jnp.float32),
        "new_d_mixed": jax.ShapeDtypeStruct(d_mixed.shape, d_mixed.dtype),
        "d_log_sums": jax.ShapeDtypeStruct((call.T,), jnp.float32),
        "new_d_current": jax.ShapeDtypeStruct(d_current.shape, d_current.dtype),
    }
    out = gpu_call(
        functools.partial(merge_backward_kernel, call, blocks),
        name,
        inputs,
        outputs,
        grid=(groups,),
        warps=blocks.warps,
        flops=40 * current.size,
        moved=6 * current.nbytes,
        transcendentals=call.T,
        aliased={"d_mixed": "new_d_mixed", "d_current": "new_d_current"},
        interpret=interpret,
    )
    return MergeGradients(
        query=jnp.sum(out["d_query"], axis=0),
        mixed=out["new_d_mixed"],
        log_sums=out["d_log_sums"],
        current=out["new_d_current"],
        norm_gain=jnp.sum(out["d_norm_gain"], axis=0),
    )


def fits(S: int, D: int) -> bool:
    """Return whether the vectors of S sites fit in the registers of a program.

    They fit if each thread of a backward kernel has to keep at most 16 of their entries.
    """
    return S * max(8, padded(D) // 512) <= 16


def _call_of(queries, sources, epsilon) -> GpuCall:
    N, T, D = sources.shape
    return GpuCall(N, queries.shape[0], T, D, float(epsilon))


def _blocks_of(call: GpuCall, kernel: str, sources: Array) -> Blocks:
    key = {"N": call.N, "S": call.S, "D": call.D, "dtype": sources.dtype.name}
    return tuned.look_up(KERNELS[kernel], key, call.T, default_blocks(kernel, T=call.T, **key))


# These kernels must sum the terms of a logit in the same order, so that their logits are bitwise
# equal.
_ALIKE = ("depth_attention_partial", "depth_attention_scores", "depth_attention_backward")


def _refused(kernel: str, key: dict[str, tuned.Value], tokens: int, blocks: Blocks) -> str | None:
    rule, width = default_blocks(kernel, T=tokens, **key), padded(key["D"])
    if not (is_power_of_2(blocks.rows) and is_power_of_2(blocks.columns)):
        return f"tiles of {blocks.rows} x {blocks.columns} (legal: powers of 2)"
    if blocks.columns != width and kernel != "depth_attention_gradients":
        return f"tiles of {blocks.columns} columns (legal: {width})"
    if blocks.columns > width:
        return f"tiles of {blocks.columns} columns (legal: at most {width})"
    one_program = kernel in ("depth_attention_backward", "depth_attention_gradients")
    if blocks.sites > key["S"] or (one_program and blocks.sites != key["S"]):
        most = "" if one_program else "at most "
        return f"{blocks.sites} sites per program (legal: {most}{key['S']})"
    if not is_power_of_2(blocks.warps) or blocks.warps > 32 or blocks.ahead > 8:
        return (
            f"{blocks.warps} warps and {blocks.ahead} tiles loaded ahead (legal: a power of 2 up "
            "to 32, and at most 8)"
        )
    if kernel in _ALIKE and blocks.warps != rule.warps:
        return f"{blocks.warps} warps (legal: {rule.warps}, others would change the rounding)"
    if rule.tokens == 1 and blocks.tokens > 1:
        return f"{blocks.tokens} tokens per program (legal: 1)"
    return None


KERNELS = tuned.register(
    "cuda",
    (
        *_ALIKE,
        "depth_attention_gradients",
        "depth_attention_merge",
        "depth_attention_merge_backward",
    ),
    Blocks,
    ("N", "S", "D", "dtype"),
    _refused,
)


def _scalar(value: Array) -> Array:
    return value.astype(jnp.int32).reshape(1)


def _merge_inputs(operands: Merge):
    return operands._asdict() | {
        "query": operands.query.astype(jnp.float32),
        "log_sums": operands.log_sums.astype(jnp.float32),
        "site": _scalar(operands.site),
        "active": _scalar(operands.active),
        "norm_gain": operands.norm_gain.astype(jnp.float32),
    }
