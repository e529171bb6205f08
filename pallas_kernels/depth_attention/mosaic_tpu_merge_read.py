"""TPU kernels for `merge_read`: phase two over residual matrices, and the read from its mix.

There is one kernel for the forward pass and one for the backward pass. The mix `h = mixed + p
(current - mixed)` exists only in VMEM, one tile at a time. It is computed as in
`mosaic_tpu_matrices`, and then normalised and read as in the key-vector kernels. The backward pass
computes h again, and also keeps the cotangent of h in VMEM.

Let there be T tokens with E bytes per entry. The forward pass takes `2 T P K V` FLOPs and moves
`E T V (2 K + P)` bytes. The backward pass takes `4 T P K V` FLOPs and moves `E T V (5 K + P)`
bytes. Separate kernels for the merge and the read would move `E T V (4 K + P)` and
`E T V (8 K + P)` bytes, without the recomputation of h. They are used for matrices that are too
large for this module.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, DTypeLike, Float

from pallas_kernels.arguments import Norm
from pallas_kernels.call import nbytes, tpu_call
from pallas_kernels.depth_attention import mosaic_tpu_matrices as matrices
from pallas_kernels.depth_attention import mosaic_tpu_matrices_kernels as kernels
from pallas_kernels.depth_attention.interface import (
    Merge,
    MergeCotangents,
    MergeGradients,
    MergeRead,
)
from pallas_kernels.depth_attention.merge_read_in_two import SeparateMergeRead
from pallas_kernels.depth_attention.mosaic_tpu_matrices_kernels import MatricesCall
from pallas_kernels.key_vector import mosaic_tpu as key_vector
from pallas_kernels.key_vector import mosaic_tpu_kernels as read_kernels
from pallas_kernels.key_vector.block_sizes import BlockSizes, Sizes, of_slab, sublanes
from pallas_kernels.key_vector.interface import SiteBackward, SiteOperands, Statistics
from pallas_kernels.key_vector.mosaic_tpu_call import KeyVectorKernelCall, Walk
from pallas_kernels.key_vector.mosaic_tpu_keys import (
    gradient_outputs,
    read_gradients,
    read_operands,
)
from pallas_kernels.target import target

# Maximum VMEM for blocks and scratch, in units of 1/60 of the VMEM limit. The compiler uses the
# rest.
_BUDGET = 46
# The fallback if `_read` finds no tile that fits: the merge and the read run as separate kernels.
_SEPARATE = SeparateMergeRead(matrices, key_vector)


def unsupported(
    op: str, operands: MergeRead, *others: Any, dtype: DTypeLike | None = None
) -> str | None:
    """Return a one-line reason why the kernels do not support these operands, or None.

    `dtype` is the dtype of the vectors that `merge_read` retrieves.
    """
    # `_read` may find no tile that fits, so separate kernels must serve the call too.
    if why := matrices.unsupported("merge", operands.merge, *others):
        return why
    site = SiteOperands(operands.merge.current, None, None, *operands[1:])
    if op == "merge_read":
        return key_vector.unsupported("forward", site, dtype=dtype)
    statistics, cotangents = others
    return key_vector.unsupported("backward", SiteBackward(site, statistics, None, cotangents.z))


def merge_read(
    operands: MergeRead,
    *,
    norm: Norm,
    epsilon: int | float,
    norm_epsilon: int | float,
    dtype: DTypeLike,
    interpret: bool = False,
) -> tuple[Float[Array, "B T P V"], Statistics]:
    """Add the running sum to one site's mix, and read vectors from the mix (see `interface`).

    For T tokens with K x V entries of E bytes and P read vectors, the kernel takes `2 T P K V`
    FLOPs and moves `E T V (2 K + P)` bytes.
    """
    of_merge, norm_gain, read_keys = operands
    current = of_merge.current
    call = matrices.merge_call(current, epsilon, interpret)
    read = _read("forward", call, of_merge, read_keys, dtype, norm, norm_epsilon)
    if read is None:
        options = {"norm_epsilon": norm_epsilon, "dtype": dtype, "interpret": interpret}
        return _SEPARATE.merge_read(operands, norm=norm, epsilon=epsilon, **options)
    call = dataclasses.replace(call, lanes=read.blocks.tokens)
    s, lanes, B, T = read.sizes, call.lanes, call.batch, call.tokens
    index = lambda b, t, *_: (b, 0, t)
    of_read, scratch = read_operands(read, norm_gain, read_keys)
    inputs = matrices.merge_inputs(call, index, of_merge) | of_read
    outputs = {
        "retrieved": (
            jax.ShapeDtypeStruct((B, s.V, s.P, T), s.data_dtype),
            pl.BlockSpec((1, s.V, s.P, lanes), lambda b, t, *_: (b, 0, 0, t)),
        ),
        "statistics": (
            jax.ShapeDtypeStruct((B, 2, T), jnp.float32),
            pl.BlockSpec((1, 2, lanes), index),
        ),
    }
    out = tpu_call(
        functools.partial(_forward_kernel, call=call, read=read),
        "depth_attention_matrices_merge_read",
        inputs,
        outputs,
        scratch | {"h": pltpu.VMEM((1, s.V, s.K, lanes), current.dtype)},
        # The body of the key-vector kernel needs a third grid dimension, for slabs (ranges of V).
        # Here there is only one slab.
        grid=(B, call.tiles, 1),
        semantics=("parallel", "parallel", "arbitrary"),
        flops=2 * B * T * call.size * s.P,
        moved=2 * nbytes(current) + nbytes(outputs["retrieved"][0]),
        prefetch={"site": of_merge.site.reshape(1)},
        interpret=interpret,
    )
    retrieved = jnp.transpose(out["retrieved"], (0, 3, 2, 1)).astype(dtype)
    return retrieved, Statistics(out["statistics"])


def merge_read_backward(
    operands: MergeRead,
    statistics: Statistics,
    cotangents: MergeCotangents,
    *,
    norm: Norm,
    epsilon: int | float,
    interpret: bool = False,
) -> tuple[MergeGradients, Float[Array, "P K"]]:
    """Return the gradients of `merge_read`, as `interface` defines.

    For T tokens with K x V entries of E bytes and P read vectors, the kernel takes `4 T P K V`
    FLOPs and moves `E T V (5 K + P)` bytes.
    """
    of_merge, norm_gain, read_keys = operands
    current, d_retrieved = of_merge.current, cotangents.z
    call = matrices.merge_call(current, epsilon, interpret)
    dtype = d_retrieved.dtype
    read = _read("backward", call, of_merge, read_keys, dtype, norm, 0.0)
    if read is None:
        options = {"norm": norm, "epsilon": epsilon, "interpret": interpret}
        return _SEPARATE.merge_read_backward(operands, statistics, cotangents, **options)
    call = dataclasses.replace(call, lanes=read.blocks.tokens)
    s, lanes, B, T = read.sizes, call.lanes, call.batch, call.tokens
    walk = Walk.over(B, call.tiles)

    def index(c, v, i, j, *_):
        b, t = walk.tile(c, i, j)
        return b, 0, t

    def vectors(c, v, i, j, *_):
        b, t = walk.tile(c, i, j)
        return b, 0, 0, t

    inputs, outputs = matrices.merge_backward_operands(
        call, index, walk.cores, of_merge, cotangents
    )
    of_read, scratch = read_operands(read, norm_gain, read_keys)
    inputs |= of_read | {
        "statistics": (statistics.both, pl.BlockSpec((1, 2, lanes), index)),
        "d_retrieved": (
            jnp.transpose(d_retrieved, (0, 3, 2, 1)),
            pl.BlockSpec((1, s.V, s.P, lanes), vectors),
        ),
    }
    scratch |= {k: pltpu.VMEM((1, s.V, s.K, lanes), current.dtype) for k in ("h", "d_h")}
    scratch["d_scaled"] = pltpu.VMEM((1, s.V, s.P_padded, lanes), s.data_dtype)
    if read.blocks.keep:
        scratch["a"] = pltpu.VMEM((s.V, s.K, lanes), jnp.float32)
    out = tpu_call(
        functools.partial(_backward_kernel, call=call, read=read, walk=walk),
        "depth_attention_matrices_merge_read_backward",
        inputs,
        outputs | gradient_outputs(read, walk.cores),
        scratch,
        grid=(walk.cores, 1, walk.batches, walk.tiles_each),
        semantics=("parallel", "arbitrary", "arbitrary", "arbitrary"),
        flops=4 * B * T * call.size * s.P,
        moved=5 * nbytes(current) + nbytes(d_retrieved),
        aliased=matrices.MERGE_ALIASED,
        prefetch={"site": of_merge.site.reshape(1)},
        interpret=interpret,
    )
    d_gain, d_keys = read_gradients(read, out)
    return matrices.merge_gradients(call, of_merge, out)._replace(norm_gain=d_gain), d_keys


# Kernel bodies --------------------------------------------------------------------------------


def _forward_kernel(inputs, outputs, scratch, *, call: MatricesCall, read: KeyVectorKernelCall):
    h = scratch["h"]
    _mix(call, read, inputs, h)
    of_read = {"residual": h, "gain": inputs["gain"], "read_keys": inputs["read_keys"]}
    read_kernels.forward(of_read, outputs, scratch, call=read)


def _backward_kernel(
    inputs, outputs, scratch, *, call: MatricesCall, read: KeyVectorKernelCall, walk: Walk
):
    c, _, i, j = (pl.program_id(axis) for axis in range(4))
    h, d_h = scratch["h"], scratch["d_h"]

    @pl.when((i == 0) & (j == 0))
    def _():
        outputs["d_query"][...] = jnp.zeros_like(outputs["d_query"])

    shared = _mix(call, read, inputs, h)
    of_read = {name: inputs[name] for name in ("statistics", "d_retrieved", "gain", "read_keys")}
    of_read["residual"] = h
    gradients = {name: outputs[name] for name in ("d_gain", "d_read_keys")} | {"d_residual": d_h}
    tail = walk.tail(call.tokens, call.lanes)
    read_kernels.backward(of_read, gradients, scratch, call=read, tail=tail)
    exists = kernels.existing_of(call, walk.tile(c, i, j)[1])
    d_h = d_h.reshape(call.size, call.lanes)
    kernels.differentiate_merge(call, inputs, outputs, d_h, shared, exists)


def _mix(call: MatricesCall, read: KeyVectorKernelCall, inputs, h):
    """Compute the mix of one tile; write it to `h` [1, V, K, lanes], the layout of a residual."""
    step = math.gcd(read.sizes.K, kernels.STEP)
    of_v = np.int32(read.sizes.K // step)

    def write(i, value):
        first = pl.multiple_of(jax.lax.rem(i, of_v) * step, step)
        h[0, jax.lax.div(i, of_v), pl.ds(first, step)] = value.astype(h.dtype)

    return kernels.mix(call, inputs, write, step)


# Tiling: choice of the tile size --------------------------------------------------------------


def _read(
    op, call: MatricesCall, of_merge: Merge, read_keys, dtype, norm, epsilon
) -> KeyVectorKernelCall | None:
    """Return the parameters of the read from the mix, with the largest tile that fits in VMEM.

    Returns None if no tile fits.
    """
    current, mixed = of_merge.current, of_merge.mixed
    K, V = current.shape[2:]
    compute = "bfloat16" if dtype == jnp.bfloat16 else "float32"
    s = Sizes(K, V, 0, read_keys.shape[0], current.dtype.name, compute)
    # The kernel needs K rows that fill whole register tiles.
    if K % sublanes(s.residual_dtype):
        return None
    for lanes in (512, 256, 128):
        blocks = of_slab(s, lanes, V) if lanes <= call.tokens else None
        if blocks is None:
            continue
        for keep in (True, False) if op == "backward" else (False,):
            blocks = dataclasses.replace(blocks, keep=keep)
            if _vmem_bytes(op, s, blocks, mixed.dtype) <= target().vmem_part(_BUDGET):
                if call.interpret:  # Unrolled loops compile slowly in the interpreter.
                    blocks = dataclasses.replace(blocks, store_unroll=1, read_unroll=1)
                return KeyVectorKernelCall(s, blocks, norm, epsilon, call.interpret)
    return None


def _vmem_bytes(op: str, s: Sizes, blocks: BlockSizes, mixed: DTypeLike) -> int:
    """Estimate the VMEM of a grid step, in bytes.

    Blocks that the pipeline copies count twice, because they are double-buffered. `mixed` is the
    dtype of the mixes, whose rows may be wider than those of the running sum.
    """
    size = s.K * s.V * blocks.tokens
    row, of_mixed = (size * jnp.dtype(x).itemsize for x in (s.residual_dtype, mixed))
    vectors = s.V * s.P_padded * blocks.tokens * jnp.dtype(s.data_dtype).itemsize
    if op == "forward":
        return 3 * row + 2 * of_mixed + 2 * vectors
    return 8 * row + 4 * of_mixed + 3 * vectors + (4 * size if blocks.keep else 0)
