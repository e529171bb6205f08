"""TPU kernels of depth attention over residual matrices, which need no transposes around them.

The key-vector kernels leave residuals in the memory layout [B, V K, T], with tokens in the lanes.
The bank, the array [N, B, T, K, V] of all sources, then has the layout [N, B, V K, T]. The kernels
of this module use it directly. The kernels of `mosaic_tpu`, which have D in the lanes, would need
two transposes of every array.

- `partial` keeps one tile of every source in VMEM. Each source is a separate operand. An empty
  source moves almost no bytes, because it has the same block at every grid step. If the sources do
  not fit, they are processed in parts. The result for the earlier parts is the `prior` of the next
  part, and is rounded to the sources' dtype. Sites are processed in parts too. With D = 4096 in
  bfloat16, a part has 11 sources and 4 sites on v5e, v5p and v6e, and 3 sources and 1 site on v4.
- `partial_backward` consists of two kernels. The first computes <d_mixed, v> and the logits for all
  sources v. The second uses these to compute the gradient of one source at a time.
- `merge` supports no norm, because the op that reads from the mix normalises it.

The costs for S sites, T tokens, N active sources, E bytes per entry and D = K V are:

    op                FLOPs         bytes moved to or from HBM
    partial           4 S N T D     E (N + S) T D
    partial_backward  10 S N T D    E (3 N + 2 S) T D, and E N T D more to accumulate
    merge                           E 3 T D
    merge_backward                  E 6 T D

The logits and the products with `d_logit` are computed on the matrix unit. The vector unit computes
the rest: `2 S N T D` operations for the mix in `partial`, and `4 S N T D` for <d_mixed, v> and for
the sums of weighted `d_mixed` in `partial_backward`. Operations whose number does not depend on S
come in addition.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels import operand
from pallas_kernels.call import LANES, nbytes, tpu_call
from pallas_kernels.depth_attention import mosaic_tpu_matrices_kernels as kernels
from pallas_kernels.depth_attention.interface import (
    Merge,
    MergeCotangents,
    MergeGradients,
    Partial,
    PartialCotangents,
)
from pallas_kernels.depth_attention.mosaic_tpu_kernels import pieces
from pallas_kernels.depth_attention.mosaic_tpu_matrices_kernels import MatricesCall
from pallas_kernels.target import target

# Maximum VMEM for double-buffered blocks, in units of 1/60 of the VMEM limit. The compiler uses the
# rest.
_BUDGET = 44
# Maximum VMEM for the blocks of `merge_backward`, in units of 1/60 of the VMEM limit. This kernel
# has six arrays and cannot be split into parts.
_LARGEST = 52
# Maximum number of sources per kernel. Each source is a separate operand, and the loop over sources
# is unrolled.
_MOST_SOURCES = 16
# Maximum number of sites per kernel. The sums of all sites for one step must fit in registers.
_MOST_SITES = 8


def unsupported(op: str, operands: Partial | Merge, *others: Any) -> str | None:
    """Return a one-line reason why the kernels do not support these operands, or None."""
    floats = [
        a for a in jax.tree.leaves((operands, others)) if jnp.issubdtype(a.dtype, jnp.floating)
    ]
    if any(a.dtype not in (jnp.bfloat16, jnp.float32) for a in floats):
        return "arrays that are neither bfloat16 nor float32"
    merges = isinstance(operands, Merge)
    residuals = operands.current if merges else operands.sources
    T, K, V = residuals.shape[-3:]
    if merges and operands.norm_gain is not None:
        return "norm_gain for matrices (legal: None, because the store's read applies the norm)"
    if T < LANES:
        return f"a sequence of {T} tokens (legal: at least {LANES})"
    if K * V % LANES:
        return f"matrices of {K} x {V} entries (legal: a multiple of {LANES} in total)"
    # The largest kernel, `merge_backward`, has two blocks of each of six arrays. Two of these have
    # the dtype of the mixes.
    mixed = operands.mixed if merges else residuals
    need = 8 * _block(K * V, residuals.dtype) + 4 * _block(K * V, mixed.dtype)
    if need > target().vmem_part(_LARGEST):
        return f"matrices of {K} x {V} entries: {LANES} tokens do not fit in VMEM"
    return None


def partial(
    operands: Partial, *, epsilon: int | float, interpret: bool = False
) -> tuple[Float[Array, "S B T K V"], Float[Array, "S B T"]]:
    """Return each site's mix (a weighted sum of the sources) and log-sum-exp (see `interface`).

    For S sites, N sources and T tokens, and D = K V entries of E bytes per source, the kernel takes
    `4 S N T D` FLOPs and moves `E (N + S) T D` bytes.
    """
    queries, sources, count, prior = operands
    N, B, T, K, V = sources.shape
    bank, rows = tokens_last(sources), columns(queries)
    of_prior = None if prior is None else prior[0].dtype
    most, sites = _parts(N, queries.shape[0], K * V, sources.dtype, of_prior)
    by_batch = lambda x: jnp.swapaxes(x, 0, 1)
    mixed, log_sums = [], []
    for s in range(0, queries.shape[0], sites):
        of_sites = slice(s, s + sites)
        q, part = rows[of_sites], None
        call = MatricesCall(N, len(q), B, T, K * V, sources.dtype.name, epsilon, interpret)
        if prior is not None:
            part = (tokens_last(prior[0][of_sites]), by_batch(prior[1][of_sites]))
        for first in range(0, N, most):
            of_part = dataclasses.replace(call, N=min(most, N - first))
            part = _partial(of_part, q, bank, first, count, part)
        mixed.append(part[0])
        log_sums.append(by_batch(part[1]))
    return tokens_first(_joined(mixed), K, V), _joined(log_sums)


def _partial(call: MatricesCall, queries, bank, first, count, prior):
    """Run the kernel for `partial` on `call.N` rows of the bank, starting at row `first`.

    The arrays have the kernels' layout, with tokens last.
    """
    N, S, B, T, D = call.N, call.S, call.batch, call.tokens, call.size
    of_sites, per_site = _of_sites(call), _per_token(call, S)
    inputs = _each_source(call, bank, first)
    inputs["queries"] = operand.constant(query_rows(call, queries))
    if prior is not None:
        inputs |= {"prior": (prior[0], of_sites), "prior_log_sums": (prior[1], per_site)}
    outputs = {
        "mixed": (jax.ShapeDtypeStruct((S, B, D, T), bank.dtype), of_sites),
        "log_sums": (jax.ShapeDtypeStruct((B, S, T), jnp.float32), per_site),
    }
    scratch = {
        "logits": pltpu.VMEM((N, S, LANES), jnp.float32),
        "weights": pltpu.VMEM((N + 1, S, LANES), jnp.float32),
    }
    moved = N + S + (0 if prior is None else S)
    out = _over_tiles(
        call, kernels.partial, "partial", inputs, outputs, scratch, moved, count - first
    )
    return out["mixed"], out["log_sums"]


def _over_tiles(call: MatricesCall, kernel, name, inputs, outputs, scratch, moved, count):
    """Run a kernel in which a grid step processes one tile of tokens of all sources.

    Args:
      call: the static parameters.
      kernel, name, inputs, outputs, scratch: as in `tpu_call`.
      moved: the number of source-sized arrays that are moved to or from HBM.
      count: the number of active sources.
    """
    tokens = call.batch * call.tokens
    return tpu_call(
        functools.partial(kernel, call=call),
        f"depth_attention_matrices_{name}",
        inputs,
        outputs,
        scratch,
        grid=(call.batch, call.tiles),
        semantics=("parallel", "parallel"),
        flops=4 * call.S * call.N * tokens * call.size,
        moved=moved * tokens * call.size * jnp.dtype(call.dtype).itemsize,
        transcendentals=call.S * call.N * tokens,
        prefetch={"count": jnp.clip(count, 0, call.N).reshape(1)},
        interpret=call.interpret,
    )


def partial_backward(
    operands: Partial,
    cotangents: PartialCotangents,
    *,
    epsilon: int | float,
    interpret: bool = False,
) -> tuple[Float[Array, "S K V"], Float[Array, "N B T K V"]]:
    """Return the gradients of `partial` with respect to queries and sources (see `interface`).

    For S sites, N sources and T tokens, and D = K V entries of E bytes per source, the two kernels
    take `10 S N T D` FLOPs and move `E (3 N + 2 S) T D` bytes. They move `E N T D` more to add the
    sources' gradients to `accumulate`.
    """
    queries, sources, count, _ = operands
    log_sums, delta, d_mixed, accumulate = cotangents
    N, B, T, K, V = sources.shape
    bank, rows = tokens_last(sources), columns(queries)
    added = None if accumulate is None else tokens_last(accumulate.astype(sources.dtype))
    d_rows = tokens_last(d_mixed.astype(sources.dtype))
    most, sites = _parts(N, queries.shape[0], K * V, sources.dtype)
    d_queries = []
    for s in range(0, queries.shape[0], sites):
        of_sites = slice(s, s + sites)
        q, d = rows[of_sites], d_rows[of_sites]
        call = MatricesCall(N, len(q), B, T, K * V, sources.dtype.name, epsilon, interpret)
        measured = []
        for first in range(0, N, most):
            part = dataclasses.replace(call, N=min(most, N - first))
            measured.append(_measure(part, q, bank, first, count, d))
        measured = jax.tree.map(lambda *parts: _joined(parts, axis=1), *measured)
        of_delta = None if delta is None else delta[of_sites]
        weighed = _weigh(call, count, *measured, log_sums[of_sites], of_delta)
        d_query, added = _partial_backward(call, q, bank, count, weighed, d, added)
        d_queries.append(d_query)
    d_queries = _joined(d_queries).reshape(-1, V, K)
    return jnp.swapaxes(d_queries, 1, 2), tokens_first(added, K, V)


def _measure(call: MatricesCall, queries, bank, first, count, d_mixed):
    """Compute the values that the gradients need, for `call.N` sources from row `first` on.

    Returns:
      The logits [B, N, S, T], the inner products <d_mixed, v> [B, N, S, T], and rstd [B, N, 1, T].
    """
    inputs = _each_source(call, bank, first)
    inputs |= {
        "queries": operand.constant(query_rows(call, queries)),
        "d_mixed": (d_mixed, _of_sites(call)),
    }
    shape = lambda rows: (call.batch, call.N, rows, call.tokens)
    per_source = lambda rows: (
        jax.ShapeDtypeStruct(shape(rows), jnp.float32),
        pl.BlockSpec((1, call.N, rows, LANES), lambda b, t, *_: (b, 0, 0, t)),
    )
    outputs = {"logits": per_source(call.S), "g": per_source(call.S), "rstd": per_source(1)}
    moved = call.N + call.S
    out = _over_tiles(call, kernels.measure, "measure", inputs, outputs, {}, moved, count - first)
    return out["logits"], out["g"], out["rstd"]


def _weigh(call: MatricesCall, count, logits, g, rstd, log_sums, delta):
    """Compute the coefficients in the sources' gradients, for each token and site.

    The gradient of a source is `weights` times d_mixed, plus `d_products` times the queries, minus
    `shrink` times the source itself. See `interface` for the equations.
    """
    active = jnp.arange(call.N)[:, None, None] < count
    by_token = lambda x: jnp.swapaxes(x, 0, 1)[:, None].astype(jnp.float32)
    logits, g, rstd = (jnp.where(active, x, 0) for x in (logits, g, rstd))
    weights = jnp.where(active, jnp.exp(logits - by_token(log_sums)), 0)
    total = jnp.sum(weights * g, axis=1, keepdims=True)
    total = total if delta is None else total + by_token(delta)
    d_logits = jnp.where(active, weights * (g - total), 0)
    shrink = jnp.sum(d_logits * logits, axis=2, keepdims=True) * jnp.square(rstd) / call.size
    return {"weights": weights, "d_products": d_logits * rstd, "shrink": shrink}


def _partial_backward(call: MatricesCall, queries, bank, count, of_sources, d_mixed, added):
    N, S, D = call.N, call.S, call.size

    def row(c, j, n, count):
        """Return the block index for the gradient of source n.

        Without `accumulate`, zeros are written to empty rows. With it, empty rows are neither read
        nor written: their block index is that of the last active row.
        """
        last = N - 1 if added is None else jnp.maximum(count[0] - 1, 0)
        b, t = call.tile(c, j)
        return jnp.minimum(n, last), b, 0, t

    def read(c, j, n, count):
        b, t = call.tile(c, j)
        return jnp.minimum(n, jnp.maximum(count[0] - 1, 0)), b, 0, t

    def sites(c, j, *_):
        b, t = call.tile(c, j)
        return 0, b, 0, t

    def per_source(c, j, n, *_):
        b, t = call.tile(c, j)
        return b, n, 0, t

    block = (1, 1, D, LANES)
    inputs = {
        "query_columns": operand.constant(query_columns(call, queries)),
        "sources": (bank, pl.BlockSpec(block, read)),
        "d_mixed": (d_mixed, pl.BlockSpec((S, 1, D, LANES), sites)),
    }
    for name, x in of_sources.items():
        inputs[name] = (x, pl.BlockSpec((1, 1, x.shape[2], LANES), per_source))
    if added is not None:
        inputs["accumulate"] = (added, pl.BlockSpec(block, row))
    out = tpu_call(
        functools.partial(kernels.partial_backward, call=call),
        "depth_attention_matrices_partial_backward",
        inputs,
        {"d_queries": query_sums(call, call.cores), "d_sources": (bank, pl.BlockSpec(block, row))},
        {},
        grid=(call.cores, call.tiles_each, N),
        semantics=("parallel", "arbitrary", "arbitrary"),
        flops=6 * S * bank.size,
        moved=((2 if added is None else 3) * N + S) * nbytes(bank[0]),
        aliased={} if added is None else {"accumulate": "d_sources"},
        prefetch={"count": count.reshape(1)},
        interpret=call.interpret,
    )
    return query_gradient(call, out["d_queries"]), out["d_sources"]


def merge(
    operands: Merge,
    *,
    norm: None,
    epsilon: int | float,
    norm_epsilon: int | float,
    interpret: bool = False,
) -> Float[Array, "B T K V"]:
    """Return one site's mix after the running sum of a block is added (see `interface`).

    For T tokens with D = K V entries of E bytes, the kernel moves `E 3 T D` bytes.
    """
    K, V = operands.query.shape
    call = merge_call(operands.current, epsilon, interpret)
    inputs = merge_inputs(call, _tile_of(call), operands)
    tile = inputs["current"][1]
    out = tpu_call(
        functools.partial(kernels.merge, call=call),
        "depth_attention_matrices_merge",
        inputs,
        {"h": (inputs["current"][0], tile)},
        {},
        grid=(call.cores, call.tiles_each),
        semantics=("parallel", "parallel"),
        flops=8 * operands.current.size,
        moved=3 * nbytes(operands.current),
        prefetch={"site": operands.site.reshape(1)},
        interpret=interpret,
    )
    return tokens_first(out["h"], K, V)


def merge_backward(
    operands: Merge,
    cotangents: MergeCotangents,
    *,
    norm: None,
    epsilon: int | float,
    norm_epsilon: int | float,
    interpret: bool = False,
) -> MergeGradients:
    """Return the gradients of `merge` with respect to its operands, as `interface` defines.

    For T tokens with D = K V entries of E bytes, the kernel moves `E 6 T D` bytes.
    """
    current = operands.current
    call = merge_call(current, epsilon, interpret)
    inputs, outputs = merge_backward_operands(
        call, _tile_of(call), call.cores, operands, cotangents
    )
    out = tpu_call(
        functools.partial(kernels.merge_backward, call=call),
        "depth_attention_matrices_merge_backward",
        inputs | {"d_h": (tokens_last(cotangents.z), inputs["current"][1])},
        outputs,
        {},
        grid=(call.cores, call.tiles_each),
        semantics=("parallel", "arbitrary"),
        flops=20 * current.size,
        moved=6 * nbytes(current),
        aliased=MERGE_ALIASED,
        prefetch={"site": operands.site.reshape(1)},
        interpret=interpret,
    )
    return merge_gradients(call, operands, out)


def merge_call(
    current: Float[Array, "B T K V"], epsilon: int | float, interpret: bool
) -> MatricesCall:
    """Return the static parameters of a merge with the running sum `current`."""
    B, T, K, V = current.shape
    return MatricesCall(0, 1, B, T, K * V, current.dtype.name, epsilon, interpret)


def _tile_of(call: MatricesCall):
    def index(c, j, *_):
        b, t = call.tile(c, j)
        return b, 0, t

    return index


def merge_inputs(call: MatricesCall, index: Callable[..., Any], operands: Merge) -> dict[str, Any]:
    """Return the inputs of a merge kernel, except the index of the site, which is prefetched.

    `index` is the index map of the block specs: it maps a grid step to a block of [B, rows, T].
    """
    D, lanes = call.size, call.lanes

    tile = pl.BlockSpec((1, D, lanes), index)
    return {
        "active": operand.in_smem(operands.active.reshape(1).astype(jnp.int32)),
        "queries": operand.constant(query_rows(call, columns(operands.query[None]))),
        "log_sums": (operands.log_sums[:, None], pl.BlockSpec((1, 1, lanes), index)),
        "mixed": (tokens_last(operands.mixed), operand.of_stack(tile)),
        "current": (tokens_last(operands.current), tile),
    }


def merge_backward_operands(
    call: MatricesCall,
    index: Callable[..., Any],
    cores: int,
    operands: Merge,
    cotangents: MergeCotangents,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the input and output operands of a merge's backward kernel.

    The returned inputs do not include the cotangent of h. `index` is as in `merge_inputs`, and
    `cores` as in `query_sums`.
    """
    inputs = merge_inputs(call, index, operands)
    current = inputs["current"]
    inputs |= {
        "query_columns": operand.constant(query_columns(call, columns(operands.query[None]))),
        "d_mixed_in": _whole_tiles(call, tokens_last(cotangents.mixed)),
        "d_current_in": (tokens_last(cotangents.current.astype(call.dtype)), current[1]),
    }
    d_log_sums = jax.ShapeDtypeStruct((call.batch, 1, call.tokens), jnp.float32)
    return inputs, {
        "d_query": query_sums(call, cores),
        "d_mixed": (inputs["d_mixed_in"][0], inputs["mixed"][1]),
        "d_current": current,
        "d_log_sums": (d_log_sums, inputs["log_sums"][1]),
    }


MERGE_ALIASED = {"d_current_in": "d_current", "d_mixed_in": "d_mixed"}


def merge_gradients(call: MatricesCall, operands: Merge, out: dict[str, Array]) -> MergeGradients:
    """Convert the outputs of a merge's backward kernel to gradients in the model's layout."""
    K, V = operands.query.shape
    return MergeGradients(
        query=query_gradient(call, out["d_query"]).reshape(V, K).T,
        mixed=tokens_first(out["d_mixed"][..., : call.tokens], K, V),
        log_sums=out["d_log_sums"][:, 0],
        current=tokens_first(out["d_current"], K, V),
        norm_gain=None,
    )


# Tiling: split of sources and sites into parts ------------------------------------------------


def _parts(N: int, S: int, D: int, dtype, of_prior=None) -> tuple[int, int]:
    """Return the numbers of sources and of sites per kernel call.

    The blocks of one call fit in VMEM. All calls have about the same numbers. `dtype` is that of
    the sources, and `of_prior` that of the prior's mixes, if there is a prior.
    """
    one = _block(D, dtype)
    blocks = target().vmem_part(_BUDGET) // (2 * one)
    # Each site has a block of its mix, and one of a prior, as wide as one or two sources.
    of_site = 1 + max(1, (_block(D, of_prior) if of_prior is not None else one) // one)
    sites = min(_MOST_SITES, max(1, blocks // (1 + of_site)))
    sites = -(-S // -(-S // sites))
    sources = max(1, min(_MOST_SOURCES, blocks - of_site * sites))
    return -(-N // -(-N // sources)), sites


def _block(D: int, dtype) -> int:
    """Return the number of bytes of one source for a tile of 128 tokens."""
    return D * LANES * jnp.dtype(dtype).itemsize


def _joined(parts, axis=0):
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)


# Block specs ----------------------------------------------------------------------------------


def _each_source(call: MatricesCall, bank, first):
    """Return `call.N` operands, one per source: the rows of the bank from row `first` on."""

    def row(i, b, t, count):
        """Return the block index for row i of the bank; it is constant if the row is empty.

        A block whose index does not change is copied only once.
        """
        active = i < count[0]
        return first + i, jnp.where(active, b, 0), 0, jnp.where(active, t, 0)

    spec = lambda i: pl.BlockSpec((1, 1, call.size, LANES), functools.partial(row, i))
    return {f"source_{i:02}": (bank, spec(i)) for i in range(call.N)}


def _of_sites(call: MatricesCall):
    """Return the block spec for a tile of an array [S, B, D, T]."""
    return pl.BlockSpec((call.S, 1, call.size, LANES), lambda b, t, *_: (0, b, 0, t))


def _per_token(call: MatricesCall, rows: int):
    """Return the block spec for a tile of an array [B, rows, T]."""
    return pl.BlockSpec((1, rows, LANES), lambda b, t, *_: (b, 0, t))


# Layout of the kernels' operands --------------------------------------------------------------


def tokens_last(x):
    """Transpose [.., B, T, K, V] to [.., B, V K, T].

    XLA stores these arrays in that order (see the module's docstring), so no data is moved.
    """
    *lead, T, K, V = x.shape
    axes = (*range(len(lead)), len(lead) + 2, len(lead) + 1, len(lead))
    return jnp.transpose(x, axes).reshape(*lead, V * K, T)


def tokens_first(x, K: int, V: int):
    """Transpose [.., B, V K, T] to [.., B, T, K, V], the inverse of `tokens_last`."""
    *lead, _, T = x.shape
    axes = (*range(len(lead)), len(lead) + 2, len(lead) + 1, len(lead))
    return jnp.transpose(x.reshape(*lead, V, K, T), axes)


def _whole_tiles(call: MatricesCall, x):
    """Return the operand for an input [.., T] whose buffer an output overwrites.

    In the interpreter, T is padded to whole tiles, because it can alias only whole tiles.
    """
    missing = call.tiles * call.lanes - x.shape[-1] if call.interpret else 0
    x = jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, missing),)) if missing else x
    return operand.anywhere(x)


def columns(queries):
    """Transpose queries [S, K, V] to [S, V K], in float32."""
    return jnp.swapaxes(queries, 1, 2).reshape(queries.shape[0], -1).astype(jnp.float32)


def query_rows(call: MatricesCall, queries):
    """Return queries [S, V K] as the left operands of matrix products with chunks of a source.

    The result is [chunks, query_rows, rows]. For bfloat16 sources, each query is split into three
    bfloat16 terms ("pieces"), which are separate rows along `query_rows`.
    """
    rows = pieces(queries) if call.narrow else [queries]
    rows = _padded(call, rows).reshape(call.query_rows, call.chunks, call.rows)
    return jnp.swapaxes(rows, 0, 1)


def query_columns(call: MatricesCall, queries):
    """Return queries [S, V K] as the left operands of a product in the sources' gradients.

    The result is [chunks, rows, query_rows]; see `_query_gradients`.
    """
    rows = [queries]
    if call.narrow:
        q1, q2, _ = pieces(queries)
        rows = [q1, q2, q1]
    columns = _padded(call, rows).T
    return columns.reshape(call.chunks, call.rows, call.query_rows)


def _padded(call: MatricesCall, rows):
    rows = jnp.concatenate(rows)
    return jnp.pad(rows.astype(call.dtype), ((0, call.query_rows - rows.shape[0]), (0, 0)))


def query_sums(call: MatricesCall, cores: int):
    """Return the output for the queries' gradients, with one sum over tokens per core.

    `cores` is the size of the grid's first dimension.
    """
    shape = (cores, call.chunks, call.query_rows, call.rows)
    spec = pl.BlockSpec((None, *shape[1:]), lambda c, *_: (c, 0, 0, 0))
    return jax.ShapeDtypeStruct(shape, jnp.float32), spec


def query_gradient(call: MatricesCall, sums):
    """Sum the queries' gradients over cores and bfloat16 pieces, and return [S, V K]."""
    S = call.S
    sums = jnp.swapaxes(jnp.sum(sums, axis=0), 0, 1).reshape(call.query_rows, call.size)
    if call.narrow:
        return sums[2 * S : 3 * S] + sums[S : 2 * S] + sums[:S]
    return sums[:S]
