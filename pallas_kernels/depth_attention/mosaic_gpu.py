"""GPU kernels of depth attention, in Pallas Mosaic GPU, for compute capabilities 9.0 and 10.0.

A program is one warpgroup. It processes a sequence of tokens, one at a time. The copy engine
fetches a token's vectors to shared memory and writes the results. Each vector therefore moves
between global memory and the chip once. With more than MOST_SITES sites, or if the vectors of all
sites do not fit in shared memory, the kernel runs several times, and each run reads all sources.
The costs for S sites, T tokens and N active sources of D entries are:

    op                FLOPs                elements moved to or from memory
    partial           (4 S + 2) N T D      (N + S) T D
    partial_backward  (9 S + 4) N T D      (2 N + S) T D, and more to accumulate: N T D
    merge             20 T D               3 T D
    merge_backward    40 T D               6 T D

`merge_backward` also copies the cotangents of the other sites, unless XLA can overwrite them.

Gradients of parameters are summed over a program's tokens, and then over programs in a fixed order.
There are no atomics, so results are bitwise reproducible. All sums are float32, and no kernel uses
tensor cores.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.arguments import Norm
from pallas_kernels.depth_attention.interface import (
    Merge,
    MergeCotangents,
    MergeGradients,
    Partial,
    PartialCotangents,
)
from pallas_kernels.depth_attention.mosaic_gpu_kernels import (
    Sizes,
    backward_merge_scratch,
    backward_scratch,
    merge_backward_kernel,
    merge_kernel,
    merge_scratch,
    partial_backward_kernel,
    partial_kernel,
    partial_scratch,
)
from pallas_kernels.mosaic_gpu import (
    mosaic_gpu_call,
    multiprocessors,
    no_mosaic_gpu,
    resident_programs,
)

_DTYPES = (jnp.bfloat16, jnp.float32)
# The maximum number of sites of a call. The kernels' code grows with the number of sites.
MOST_SITES = 16
# The maximum number of rows that the copy engine copies at once.
_MOST_ROWS = 256
# The number of tokens whose vectors a program of `merge` keeps at a time.
_MERGE_STAGES = 3


def unsupported(op: str, operands: Partial | Merge, *others) -> str | None:
    """Return a one-line reason why the kernels do not support these operands, or None."""
    if why := no_mosaic_gpu(90, 100):
        return why
    if isinstance(operands, Merge):
        first, arrays = operands.current, [operands.mixed, *jax.tree.leaves(others)]
    else:
        first, arrays = operands.sources, [x for s in others for x in (s.d_mixed, s.accumulate)]
        arrays += [] if operands.prior is None else [operands.prior[0]]
    if first.dtype not in _DTYPES:
        return f"the arrays are {first.dtype}, not bfloat16 or float32"
    for array in (x for x in arrays if x is not None):
        if array.dtype != first.dtype:
            return f"arrays of {first.dtype} and of {array.dtype}"
    if 0 in first.shape or (isinstance(operands, Partial) and 0 in operands.queries.shape):
        return f"an array of shape {first.shape} is empty, or there is no site"
    sizes = Sizes(1, 1, 1, first.shape[-1], 0.0)
    if sizes.columns * first.dtype.itemsize % 16 or sizes.rows > _MOST_ROWS:
        least = 16 // first.dtype.itemsize
        return (
            f"sources of {sizes.D} entries (legal: multiples of {least} up to {_MOST_ROWS} times "
            "their greatest common divisor with 64)"
        )
    if isinstance(operands, Merge):
        scratch = backward_merge_scratch(sizes._replace(norm="rmsnorm"), _MERGE_STAGES, first.dtype)
        if not resident_programs(scratch):
            return f"vectors of {sizes.D} entries do not fit in shared memory"
    elif not _sites(op, operands, *others):
        return f"{len(operands.sources)} sources of {sizes.D} entries do not fit in shared memory"
    return None


def _scratch(op: str, sizes: Sizes, stages: int, operands: Partial, *others) -> dict[str, Any]:
    """Return the scratch buffers of the kernel of `partial` or `partial_backward`."""
    dtype = operands.sources.dtype
    if op == "partial":
        return partial_scratch(sizes, stages, dtype)
    return backward_scratch(sizes, stages, dtype, others[0].accumulate is not None)


def _sites(op: str, operands: Partial, *others) -> int:
    """Return the number of sites of each kernel call; 0 if not even one site's buffers fit.

    The sites are divided evenly between as few calls as possible.
    """
    N, T, D = operands.sources.shape
    S = operands.queries.shape[0]
    for calls in range(pl.cdiv(S, MOST_SITES), S + 1):
        each, of_call = pl.cdiv(S, calls), others
        if calls > 1:
            # The later calls add to the gradients of the earlier ones.
            of_call = [c._replace(accumulate=operands.sources) for c in others]
        scratch = _scratch(op, Sizes(N, each, T, D, 0.0), 1, operands, *of_call)
        if resident_programs(scratch):
            return each
    return 0


def launch(sizes: Sizes, scratch_of: Callable[[int], dict[str, Any]]) -> tuple[int, int]:
    """Return the number of programs, and the number of tokens whose vectors a program keeps.

    Programs that share a multiprocessor hide each other's waits. Its registers suffice for four. If
    there is memory left, a program fetches its next token early.
    """
    programs = min(4, resident_programs(scratch_of(1)))
    stages = 2 if resident_programs(scratch_of(2)) >= programs else 1
    return min(sizes.T, programs * multiprocessors()), stages


# The ops: the calls of the kernels --------------------------------------------------------------


def partial(
    operands: Partial, *, epsilon: int | float, interpret: bool = False
) -> tuple[Float[Array, "S T D"], Float[Array, "S T"]]:
    """Return each site's mix (a weighted sum of the sources) and log-sum-exp (see `interface`).

    For S sites, N sources of D entries and T tokens, the kernel takes `(4 S + 2) N T D` FLOPs and
    moves `(N + S) T D` elements. It moves `S T D` more if there is a `prior`.
    """
    most = _sites("partial", operands)
    parts = [_partial(part, epsilon, interpret) for part in _of_some_sites(operands, most)]
    return tuple(jnp.concatenate(part) for part in zip(*parts, strict=True))


def _of_some_sites(operands, most):
    """Divide the operands into parts with at most `most` sites each."""
    queries, sources, count, prior = operands
    for first in range(0, queries.shape[0], most):
        part = slice(first, first + most)
        of_prior = None if prior is None else (prior[0][part], prior[1][part])
        yield Partial(queries[part], sources, count, of_prior)


def _partial(operands, epsilon, interpret):
    queries, sources, count, prior = operands
    sizes = Sizes(len(sources), len(queries), *sources.shape[1:], float(epsilon))
    inputs = {
        "queries": _padded(sizes, queries),
        "sources": _rows(sizes, sources),
        "count": _scalar(count),
    }
    if prior is not None:
        inputs |= {"prior_mixed": _rows(sizes, prior[0]), "prior_log_sums": _float32(prior[1])}
    scratch = functools.partial(_scratch, "partial", sizes, operands=operands)
    programs, stages = launch(sizes, scratch)
    out = mosaic_gpu_call(
        functools.partial(partial_kernel, sizes, stages),
        "depth_attention_partial",
        inputs,
        {
            "mixed": _vectors(sizes, sources.dtype, sizes.S, sizes.T),
            "log_sums": jax.ShapeDtypeStruct((sizes.S, sizes.T), jnp.float32),
        },
        scratch(stages),
        programs=programs,
        interpret=interpret,
    )
    return out["mixed"].reshape(sizes.S, sizes.T, sizes.D), out["log_sums"]


def partial_backward(
    operands: Partial,
    cotangents: PartialCotangents,
    *,
    epsilon: int | float,
    interpret: bool = False,
) -> tuple[Float[Array, "S D"], Float[Array, "N T D"]]:
    """Return the gradients of `partial` with respect to queries and sources (see `interface`).

    For S sites, N sources of D entries and T tokens, the kernel takes `(9 S + 4) N T D` FLOPs and
    moves `(2 N + S) T D` elements. It moves `N T D` more to add the sources' gradients to
    `accumulate`. If the vectors of all sites do not fit in shared memory, the kernel runs several
    times and adds up the gradients.
    """
    most = _sites("partial_backward", operands, cotangents)
    log_sums, delta, d_mixed, accumulate = cotangents
    d_queries = []
    for i, part in enumerate(_of_some_sites(operands, most)):
        sites = slice(i * most, i * most + most)
        of_delta = None if delta is None else delta[sites]
        of_sites = PartialCotangents(log_sums[sites], of_delta, d_mixed[sites], accumulate)
        d_query, accumulate = _partial_backward(part, of_sites, epsilon, interpret)
        d_queries.append(d_query)
    return jnp.concatenate(d_queries), accumulate


def _partial_backward(operands, cotangents, epsilon, interpret):
    queries, sources, count, _ = operands
    log_sums, delta, d_mixed, accumulate = cotangents
    sizes = Sizes(len(sources), len(queries), *sources.shape[1:], float(epsilon))
    inputs = {
        "queries": _padded(sizes, queries),
        "sources": _rows(sizes, sources),
        "count": _scalar(count),
        "log_sums": _float32(log_sums),
        "d_mixed": _rows(sizes, d_mixed),
    }
    inputs |= {} if delta is None else {"delta": _float32(delta)}
    inputs |= {} if accumulate is None else {"accumulate": _rows(sizes, accumulate)}
    scratch = lambda stages: _scratch("partial_backward", sizes, stages, operands, cotangents)
    programs, stages = launch(sizes, scratch)
    out = mosaic_gpu_call(
        functools.partial(partial_backward_kernel, sizes, stages),
        "depth_attention_backward",
        inputs,
        {
            "d_queries": jax.ShapeDtypeStruct((programs, sizes.S, *sizes.shape), jnp.float32),
            "d_sources": _vectors(sizes, sources.dtype, sizes.N, sizes.T),
        },
        scratch(stages),
        programs=programs,
        interpret=interpret,
    )
    return _summed(sizes, out["d_queries"]), out["d_sources"].reshape(sources.shape)


def merge(
    operands: Merge,
    *,
    norm: Norm | None,
    epsilon: int | float,
    norm_epsilon: int | float,
    interpret: bool = False,
) -> Float[Array, "T D"]:
    """Return z, one site's mix after the running sum is added and normalised (see `interface`).

    For T tokens with D entries, the kernel takes about `20 T D` FLOPs and moves `3 T D` elements.
    """
    current = operands.current
    sizes = Sizes(1, 1, *current.shape, float(epsilon), norm, float(norm_epsilon))
    scratch = merge_scratch(sizes, _MERGE_STAGES, current.dtype)
    out = mosaic_gpu_call(
        functools.partial(merge_kernel, sizes, _MERGE_STAGES),
        "depth_attention_merge",
        _merge_inputs(sizes, operands),
        {"z": _vectors(sizes, current.dtype, sizes.T)},
        scratch,
        programs=merge_programs(sizes, scratch),
        interpret=interpret,
    )
    return out["z"].reshape(current.shape)


def merge_backward(
    operands: Merge,
    cotangents: MergeCotangents,
    *,
    norm: Norm | None,
    epsilon: int | float,
    norm_epsilon: int | float,
    interpret: bool = False,
) -> MergeGradients:
    """Return the gradients of `merge` with respect to its operands, as `interface` defines.

    For T tokens with D entries, the kernel takes about `40 T D` FLOPs and moves `6 T D` elements.
    XLA then writes the gradient of the mix to its row of the cotangents.
    """
    d_z, d_mixed, d_current = cotangents
    current = operands.current
    sizes = Sizes(1, 1, *current.shape, float(epsilon), norm, float(norm_epsilon))
    scratch = backward_merge_scratch(sizes, _MERGE_STAGES, current.dtype)
    programs = merge_programs(sizes, scratch)
    vectors = _vectors(sizes, current.dtype, sizes.T)
    sums = jax.ShapeDtypeStruct((programs, *sizes.shape), jnp.float32)
    out = mosaic_gpu_call(
        functools.partial(merge_backward_kernel, sizes, _MERGE_STAGES),
        "depth_attention_merge_backward",
        _merge_inputs(sizes, operands)
        | {"d_z": _rows(sizes, d_z), "d_current": _rows(sizes, d_current)},
        {
            "d_query": sums,
            **({} if norm is None else {"d_norm_gain": sums}),
            "new_d_mixed": vectors,
            "d_log_sums": jax.ShapeDtypeStruct((sizes.T,), jnp.float32),
            "new_d_current": vectors,
        },
        scratch,
        programs=programs,
        interpret=interpret,
    )
    row = out["new_d_mixed"].reshape(current.shape)
    return MergeGradients(
        query=_summed(sizes, out["d_query"]),
        mixed=jax.lax.dynamic_update_index_in_dim(d_mixed, row, operands.site, 0),
        log_sums=out["d_log_sums"],
        current=out["new_d_current"].reshape(current.shape),
        norm_gain=None if norm is None else _summed(sizes, out["d_norm_gain"]),
    )


def merge_programs(sizes: Sizes, scratch: dict[str, Any]) -> int:
    """Return the number of programs of a merge: at most four for each multiprocessor."""
    return min(sizes.T, multiprocessors() * min(4, resident_programs(scratch)))


def _merge_inputs(sizes, operands):
    inputs = {
        "query": _padded(sizes, operands.query),
        "mixed": _rows(sizes, operands.mixed),
        "log_sums": _float32(operands.log_sums),
        "site": _scalar(operands.site),
        "current": _rows(sizes, operands.current),
        "active": _scalar(operands.active),
    }
    if operands.norm_gain is None:
        return inputs
    return inputs | {"norm_gain": _padded(sizes, operands.norm_gain)}


# The forms of the operands ----------------------------------------------------------------------


def _rows(sizes, x):
    """Reshape vectors [.., D] to [.., rows, columns]."""
    return x.reshape(*x.shape[:-1], sizes.rows, sizes.columns)


def _vectors(sizes, dtype, *lead: int):
    return jax.ShapeDtypeStruct((*lead, sizes.rows, sizes.columns), dtype)


def _padded(sizes, x):
    """Pad parameters [.., D] with zeros, in float32, to the form that vectors have on chip."""
    padding = math.prod(sizes.shape) - sizes.D
    x = jnp.pad(_float32(x), ((0, 0),) * (x.ndim - 1) + ((0, padding),))
    return x.reshape(*x.shape[:-1], *sizes.shape)


def _summed(sizes, partial_sums):
    """Sum over the programs, and undo `_padded`."""
    total = jnp.sum(partial_sums, axis=0)
    return total.reshape(*total.shape[:-2], -1)[..., : sizes.D]


def _float32(x: Array) -> Array:
    return x.astype(jnp.float32)


def _scalar(value: Array) -> Array:
    return value.astype(jnp.int32).reshape(1)
