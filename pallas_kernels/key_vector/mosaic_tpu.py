"""TPU kernels of the key-vector ops, which read and write the residual in HBM only once.

Layout: inside the kernels, tokens are in the lanes, and V is the slowest axis after the batch:
residual [B, V, K, N], data [B, V, R, N], retrieved [B, V, P, N]. XLA itself gives this layout to a
[B, N, K, V] array that a loop carries, so the transposes around a kernel cost nothing. No array is
padded, no sum crosses lanes, and every matrix product contracts over rows.

- For each index v along V, the store and the read are matrix products with the keys. The matrix
  unit keeps the product's [rows, tokens] operand, and the few keys stream through it. Combining
  several v in one block-diagonal product would not be faster.
- The statistics are computed during the store. For each token, the kernel sums differences from a
  number near the mean, the shift s. This avoids cancellation if the mean is large.
- The read keys r are multiplied by the gain, `G[v] = r * gain[:, v]`, and rounded to the data's
  dtype. The norm is applied after the product: `z = rstd (G (X' - s) - (mean - s) sum_k G)`.

If a tile of tokens does not fit in VMEM, it is processed in slabs, which are ranges of v. The
backward pass then reads the residual twice. The forward pass only reads the keys `G` again for each
tile.

For T tokens with E bytes per entry, store_norm_retrieve takes `2 T (R + P) K V` FLOPs and moves
`E T V (2 K + R + P)` bytes to or from HBM. The backward pass takes `4 T (R + P) K V` FLOPs and
moves `E T V (3 K + 2 R + P)` bytes. Rebuilding the residual adds `2 T R K V` FLOPs and `E T K V`
bytes.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, DTypeLike

from pallas_kernels import operand
from pallas_kernels.arguments import Norm, StackSlice, read_slices
from pallas_kernels.call import LANES, tpu_call
from pallas_kernels.key_vector import mosaic_tpu_kernels, xla
from pallas_kernels.key_vector.block_sizes import (
    BlockSizes,
    Sizes,
    choose_block_sizes,
    default_block_sizes,
)
from pallas_kernels.key_vector.interface import (
    FRACTION_BITS,
    Gradients,
    Means,
    Reread,
    SiteBackward,
    SiteOperands,
    SiteResults,
    Statistics,
)
from pallas_kernels.key_vector.mosaic_tpu_call import KeyVectorKernelCall, Walk
from pallas_kernels.key_vector.mosaic_tpu_keys import (
    gradient_outputs,
    read_gradients,
    read_operands,
    store_operand,
)
from pallas_kernels.platform import UnsupportedImplementation


def unsupported(
    op: str,
    operands: SiteOperands | SiteBackward,
    *others: Any,
    dtype: DTypeLike | None = None,
) -> str | None:
    """Return a one-line reason why the kernels do not support these operands, or None.

    `dtype` is the dtype of the vectors that a site without a store retrieves. None means bfloat16
    if the residual is bfloat16, and else float32.
    """
    site, *others = operands if isinstance(operands, SiteBackward) else (operands, *others)
    # The backward pass of a store alone is not passed the residual. Its cotangent, which has the
    # same shape, is checked instead.
    residual = operands.d_residual if site.residual is None else site.residual
    arrays = jax.tree.leaves((site[1:], others), is_leaf=lambda x: isinstance(x, StackSlice))
    N, K = residual.shape[1:3]
    if residual.dtype not in (jnp.bfloat16, jnp.float32, jnp.int16):
        return f"a residual of {residual.dtype} (legal: bfloat16, float32 or int16)"
    if any(a.dtype not in (jnp.bfloat16, jnp.float32) for a in arrays if a.ndim):
        return "arrays that are neither bfloat16 nor float32"
    if dtype is not None and jnp.dtype(dtype).itemsize > 4:
        return f"retrieved vectors of {jnp.dtype(dtype)} (legal: floats of 16 or 32 bits)"
    if N < LANES:
        return f"a sequence of {N} tokens (legal: at least {LANES})"
    if K > 4096:
        return f"keys of {K} entries (legal: at most 4096)"
    if op == "backward" and site.reads:
        dtype = operands.d_retrieved.dtype
    dtype = _compute_dtype(residual.dtype if dtype is None else dtype)
    # `backward` does without the kernel for the operands `again` if they do not fit.
    sizes = _sizes_of(site, residual, dtype)
    whole = site.stores and site.reads
    needed = ("forward",)
    # A backward pass that processes V in slabs also runs a forward read, whose blocks must fit too.
    if op == "backward":
        needed = (*needed * site.reads, "rebuild" if whole else "backward")
    elif whole and residual.dtype == jnp.int16:
        # Undoing a write is exact only if it multiplies as the write did. The kernels therefore
        # serve both or neither.
        needed = ("forward", "rebuild")
    # Mosaic does not compile the other kernels' bfloat16 products of keys with a single entry.
    if K == 1 and sizes.data_dtype == "bfloat16" and needed[-1] != "forward":
        return "keys of one entry with bfloat16 data (legal: at least 2)"
    if any(default_block_sizes(each, sizes, N) is None for each in needed):
        return (
            f"K={K}, V={sizes.V}, R={sizes.R}, P={sizes.P}: a tile of tokens does not fit in VMEM"
        )
    return None


def forward(
    site: SiteOperands,
    statistics: Statistics | None = None,
    empty: Bool[Array, ""] | bool = False,
    *,
    norm: Norm = "rmsnorm",
    epsilon: int | float = 0.0,
    dtype: DTypeLike | None = None,
    scale: bool = True,
    in_place: bool = True,
    fraction_bits: int = FRACTION_BITS,
    block_sizes: BlockSizes | None = None,
    interpret: bool = False,
) -> SiteResults:
    """Write to a residual matrix, normalise it and read from it, as `interface` defines.

    For T tokens with K x V entries of E bytes, and R stored and P read vectors, the kernel takes
    `2 T (R + P) K V` FLOPs and moves `E T V (2 K + R + P)` bytes; a read alone moves
    `E T V (K + P)`. With `in_place`, the kernel overwrites the residual, which costs a copy if the
    caller still uses the old residual.
    """
    sizes = _sizes_of(site, site.residual, _compute_dtype(dtype))
    blocks = _blocks(block_sizes, "forward", sizes, site.residual, interpret)
    call = KeyVectorKernelCall(sizes, blocks, norm, epsilon, interpret, scale, fraction_bits)
    out = _forward(call, site, statistics, empty, in_place=in_place)
    return out if site.stores else out._replace(retrieved=out.retrieved.astype(dtype))


def backward(
    operands: SiteBackward,
    *,
    norm: Norm = "rmsnorm",
    rebuild: bool = False,
    fraction_bits: int = FRACTION_BITS,
    block_sizes: BlockSizes | None = None,
    interpret: bool = False,
) -> Gradients:
    """Return the cotangents of a write and a read, as `interface` defines.

    The gradients of the gain and of the read keys are computed from `dG[v] = sum dz n`, a sum over
    tokens. Here dz is the cotangent of the retrieved vectors, and n is norm(X').

    For T tokens with K x V entries of E bytes, and R stored and P read vectors, the pass takes
    `4 T (R + P) K V` FLOPs and moves `E T V (3 K + 2 R + P)` bytes; a read alone moves
    `E T V (2 K + P)` and a store alone `E T V (K + 2 R)`. Rebuilding the residual adds `2 T R K V`
    FLOPs and `E T K V` bytes, and reading A vectors from it adds `2 T A K V` FLOPs and `E T A V`
    bytes.

    """
    site = operands.site
    if site.residual is None:
        site = site._replace(residual=operands.d_residual)
    dtype = site.data.dtype if site.stores else operands.d_retrieved.dtype
    sizes = _sizes_of(site, site.residual, dtype, operands.again)
    op = "rebuild" if rebuild else "backward"
    again, N = operands.again, site.residual.shape[1]
    # If the vectors that `again` reads do not fit in VMEM too, plain JAX reads them afterwards.
    apart = again is not None and not (block_sizes or choose_block_sizes(op, sizes, N))
    if apart:
        operands, sizes = operands._replace(again=None), dataclasses.replace(sizes, A=0)
    blocks = _blocks(block_sizes, op, sizes, site.residual, interpret)
    call = KeyVectorKernelCall(sizes, blocks, norm, 0.0, interpret, fraction_bits=fraction_bits)
    operands = operands._replace(site=site)
    if operands.means is not None:
        call = dataclasses.replace(call, blocks=dataclasses.replace(call.blocks, keep=False))
    elif site.reads and call.slabs > 1:
        operands = operands._replace(means=_means(call, operands))
    g = _backward(call, rebuild, operands)
    if not apart:
        return g
    read = SiteOperands(g.rebuilt, gain=again.gain, read_keys=again.read_keys)
    options = {"norm": norm, "dtype": jnp.dtype(sizes.data_dtype), "fraction_bits": fraction_bits}
    return g._replace(retrieved=xla.forward(read, again.statistics, **options).retrieved)


def _compute_dtype(dtype: DTypeLike | None) -> DTypeLike:
    """Return the dtype in which the kernels read vectors that the caller wants in `dtype`."""
    return jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32


def _sizes_of(site: SiteOperands, residual, dtype, again: Reread | None = None) -> Sizes:
    """Return the `Sizes` for the operands of a site.

    `dtype` is the dtype of the retrieved vectors if the site stores nothing. Otherwise, the
    retrieved vectors have the data's dtype.
    """
    K, V = residual.shape[2:]
    R = site.store_keys.shape[0] if site.stores else 0
    P = site.read_keys.shape[0] if site.reads else 0
    data_dtype = site.data.dtype if site.stores else dtype
    A = 0 if again is None else again.read_keys.shape[0]
    return Sizes(K, V, R, P, residual.dtype.name, jnp.dtype(data_dtype).name, A)


def _blocks(requested: BlockSizes | None, op: str, sizes: Sizes, residual, interpret) -> BlockSizes:
    blocks = requested or choose_block_sizes(op, sizes, residual.shape[1])
    if blocks is None:
        raise UnsupportedImplementation(
            f"the TPU kernel does not support {sizes}: no block sizes fit in VMEM; use 'xla'"
        )
    if interpret:  # In the interpreter, unrolled loops compile slowly and run no faster.
        return dataclasses.replace(blocks, store_unroll=1, read_unroll=1)
    return blocks


def _forward(
    call: KeyVectorKernelCall,
    site: SiteOperands,
    statistics: Statistics | None = None,
    empty: Array | bool = False,
    *,
    in_place: bool = True,
) -> SiteResults:
    """Run the forward kernel for a store, a read or both, depending on the site's operands."""
    s, blocks = call.sizes, call.blocks
    residual, store_keys, data, gain, read_keys = site
    B, N = residual.shape[:2]
    stores, reads = site.stores, site.reads
    tokens, slab = blocks.tokens, blocks.slab
    slab_index = lambda b, n, v, *_: (b, v, 0, n)
    by_slab = functools.partial(_spec, tokens, slab, slab_index)
    whole = functools.partial(_spec, tokens, s.V, lambda b, n, v, *_: (b, 0, 0, n))
    token = pl.BlockSpec((1, 2, tokens), lambda b, n, v, *_: (b, 0, n))

    inputs = {"residual": (_tokens_last(residual), by_slab(s.K))}
    outputs, scratch = {}, {}
    if stores:
        of_store, scratch = _store_operands(call, by_slab, store_keys, data)
        inputs |= of_store
        outputs["residual"] = (inputs["residual"][0], by_slab(s.K))
        if empty is not False:
            inputs["empty"] = operand.in_smem(jnp.asarray(empty, jnp.int32))
        if s.keeps_operand:
            scratch["operand"] = pltpu.VMEM((1, slab, s.K, tokens), s.data_dtype)
    if reads:
        of_read, of_keys = read_operands(call, gain, read_keys)
        inputs, scratch = inputs | of_read, scratch | of_keys
        shape = jax.ShapeDtypeStruct((B, s.V, s.P, N), s.data_dtype)
        outputs["retrieved"] = (shape, whole(s.P))
        if statistics is not None:
            inputs["statistics"] = (statistics.both, token)
        else:
            outputs["statistics"] = (jax.ShapeDtypeStruct((B, 2, N), jnp.float32), token)
        if call.slabs > 1 and statistics is None:
            scratch["products"] = pltpu.VMEM((s.V, s.P_padded, tokens), jnp.float32)
            scratch["sums"] = pltpu.VMEM((3, tokens), jnp.float32)
            scratch["shift"] = pltpu.VMEM((1, tokens), jnp.float32)

    halves = ("key_vector_store", "key_vector_read", "key_vector_forward")
    out = tpu_call(
        functools.partial(mosaic_tpu_kernels.forward, call=call),
        halves[stores + 2 * reads - 1],
        inputs,
        outputs,
        scratch,
        grid=(B, -(-N // tokens), call.slabs),
        semantics=("parallel", "parallel", "arbitrary"),
        flops=2 * B * N * s.K * s.V * (s.R + s.P),
        aliased={"residual": "residual"} if stores and in_place else {},
        interpret=call.interpret,
    )
    stored = _tokens_first(out["residual"]) if stores else None
    if not reads:
        return SiteResults(stored)
    found = Statistics(out["statistics"]) if statistics is None else None
    return SiteResults(stored, _tokens_first(out["retrieved"]), found)


def _store_operands(call: KeyVectorKernelCall, by_slab, store_keys, data):
    """Return the inputs and the scratch shapes that a kernel needs for a store."""
    s, blocks = call.sizes, call.blocks
    inputs = {
        "store_keys": store_operand(call, store_keys),
        "data": (_tokens_last(data), by_slab(s.R)),
    }
    if s.R_padded == s.R:
        return inputs, {}
    padded_data = pltpu.VMEM((1, blocks.slab, s.R_padded, blocks.tokens), data.dtype)
    return inputs, {"data": padded_data}


def _backward(call: KeyVectorKernelCall, rebuild: bool, operands: SiteBackward) -> Gradients:
    site, statistics, d_residual, d_retrieved, means, again, _ = operands
    residual, store_keys, data, gain, read_keys = site
    s, blocks = call.sizes, call.blocks
    B, N = residual.shape[:2]
    tokens, slab = blocks.tokens, blocks.slab
    walk = Walk.over(B, -(-N // tokens))
    cores, tile = walk.cores, walk.tile

    def by_slab(rows):
        def index(c, v, i, j, *_):
            b, n = tile(c, i, j)
            return b, v, 0, n

        return _spec(tokens, slab, index, rows)

    def token_index(c, v, i, j, *_):
        b, n = tile(c, i, j)
        return b, 0, n

    token = pl.BlockSpec((1, 2, tokens), token_index)
    reads, stores = site.reads, site.stores
    inputs, outputs, scratch = {}, {}, {}
    if d_residual is not None:
        inputs["d_residual"] = (_tokens_last(d_residual), by_slab(s.K))
    if reads:
        of_read, scratch = read_operands(call, gain, read_keys)
        inputs |= of_read | {
            "residual": (_tokens_last(residual), by_slab(s.K)),
            "statistics": (statistics.both, token),
            "d_retrieved": (_tokens_last(d_retrieved), by_slab(s.P)),
        }
        d_residual = residual if d_residual is None else d_residual
        outputs = gradient_outputs(call, cores)
        outputs["d_residual"] = (_tokens_last(d_residual), by_slab(s.K))
        scratch["d_scaled"] = pltpu.VMEM((1, slab, s.P_padded, tokens), s.data_dtype)
        if blocks.keep:
            scratch["a"] = pltpu.VMEM((slab, s.K, tokens), jnp.float32)
    if means is not None:
        rows = [means.a, means.an] if call.centred else [means.an]
        spec = pl.BlockSpec((1, len(rows), tokens), token_index)
        inputs["means"] = (jnp.stack(rows, axis=1).astype(jnp.float32), spec)
    if stores:
        of_store, of_data = _store_operands(call, by_slab, store_keys, data)
        inputs, scratch = inputs | of_store, scratch | of_data
        outputs |= {
            "d_data": (jax.ShapeDtypeStruct((B, s.V, s.R, N), data.dtype), by_slab(s.R)),
            "d_store_keys": (
                jax.ShapeDtypeStruct((cores, s.R_padded, s.K), jnp.float32),
                pl.BlockSpec((1, s.R_padded, s.K), lambda c, *_: (c, 0, 0)),
            ),
        }
    if rebuild:
        outputs["rebuilt"] = (inputs["residual"][0], by_slab(s.K))
    if again is not None:
        of_read, of_keys = _reread_operands(call, again, token)
        inputs, scratch = inputs | of_read, scratch | of_keys
        shape = jax.ShapeDtypeStruct((B, s.V, s.A, N), s.data_dtype)
        outputs["retrieved"] = (shape, by_slab(s.A))
    aliased = {"residual": "rebuilt"} if rebuild else {}
    if reads and "d_residual" in inputs:
        aliased["d_residual"] = "d_residual"
    halves = ("key_vector_store_backward", "key_vector_read_backward", "key_vector_backward")
    out = tpu_call(
        functools.partial(mosaic_tpu_kernels.backward, call=call, tail=walk.tail(N, tokens)),
        halves[stores + 2 * reads - 1],
        inputs,
        outputs,
        scratch,
        grid=(cores, call.slabs, walk.batches, walk.tiles_each),
        semantics=("parallel", "arbitrary", "arbitrary", "arbitrary"),
        flops=B * N * s.K * s.V * (4 * (s.R + s.P) + 2 * (s.R * rebuild + s.A)),
        aliased=aliased,
        interpret=call.interpret,
    )
    gradients = _gradients_of(call, out)
    return gradients if reads else gradients._replace(residual=d_residual)


def _reread_operands(
    call: KeyVectorKernelCall, again: Reread, token: pl.BlockSpec
) -> tuple[dict, dict]:
    """Return the inputs and the scratch shapes for a read from the rebuilt residual."""
    of_read, of_keys = read_operands(call, again.gain, again.read_keys)
    of_read["statistics"] = (again.statistics.both, token)
    named = lambda operands: {f"{name}_again": x for name, x in operands.items()}
    return named(of_read), named(of_keys)


def _gradients_of(call: KeyVectorKernelCall, out: dict[str, Array]) -> Gradients:
    """Return the kernel's gradients in the layout of the op's arguments, with tokens first."""
    d_store_keys = d_gain = d_read_keys = None
    if "d_store_keys" in out:
        d_store_keys = jnp.sum(out["d_store_keys"], axis=0)[: call.sizes.R]
    if "d_residual" in out:
        d_gain, d_read_keys = read_gradients(call, out)
    first = lambda name: _tokens_first(out[name]) if name in out else None
    return Gradients(
        residual=first("d_residual"),
        data=first("d_data"),
        store_keys=d_store_keys,
        gain=d_gain,
        read_keys=d_read_keys,
        rebuilt=first("rebuilt"),
        retrieved=first("retrieved"),
    )


def _means(call: KeyVectorKernelCall, operands: SiteBackward) -> Means:
    """Compute the `Means` for a backward pass that processes V in slabs, before its kernel runs.

    `mean(a n)` equals `<dz, z> / (K V)`, where z are the retrieved vectors and dz is their
    cotangent. If the caller did not pass z, it is read from the residual here.
    """
    site, statistics, retrieved = operands.site, operands.statistics, operands.retrieved
    sizes = dataclasses.replace(call.sizes, R=0, A=0)
    if retrieved is None:
        blocks = _blocks(None, "forward", sizes, site.residual, call.interpret)
        read = dataclasses.replace(call, sizes=sizes, blocks=blocks)
        retrieved = _forward(read, site._replace(store_keys=None, data=None), statistics).retrieved
    dz = operands.d_retrieved.astype(jnp.float32)
    count = sizes.K * sizes.V
    mean_an = jnp.sum(dz * retrieved.astype(jnp.float32), axis=(2, 3)) / count
    if not call.centred:
        return Means(None, mean_an)
    gain, read_keys = (x.astype(jnp.float32) for x in read_slices(site[3:]))
    keys = read_keys[:, :, None] * gain
    sums = jnp.sum(keys.astype(sizes.data_dtype).astype(jnp.float32), axis=1)
    mean_a = jnp.einsum("bnpv,pv->bn", dz, sums) / count
    return Means(mean_a, mean_an)


# Block specs and layout -----------------------------------------------------------------------


def _spec(tokens: int, count: int, index, rows: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, count, rows, tokens), index)


def _tokens_last(x: Array | StackSlice) -> Array | StackSlice:
    """Transpose [B, N, rows, V] to [B, V, rows, N]."""
    if isinstance(x, StackSlice):
        return x._replace(stack=_tokens_last(x.stack))
    return jnp.swapaxes(x, -3, -1)


_tokens_first = _tokens_last
