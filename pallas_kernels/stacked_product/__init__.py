"""Products of a few rows with the matrices of one layer, which is selected from a stack.

This op is for decoding, where each step multiplies one row per sequence by every weight. Most of
the time is spent reading the weights. The kernel multiplies while it reads. XLA copies all of a
layer's weights to VMEM before it starts to multiply.

Implementations: "xla" (a slice and a matrix product, on any platform), "mosaic_tpu" (a TPU kernel)
and "pallas" (the kernel if the platform has one, or else plain JAX). The default, None, uses the
kernel on TPUs. Only "xla" is differentiable.

An implementation is a module with these functions:

    product(rows, matrices, layer) -> `rows @ matrices[layer, p]` for every p, joined along N
    unsupported(op, rows, matrices, layer) -> None if the implementation supports these operands, or
        else the reason in one line
"""

import functools
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments import check_array, check_stack
from pallas_kernels.platform import Implementations
from pallas_kernels.stacked_product import mosaic_tpu, xla
from pallas_kernels.stacked_product.mosaic_tpu import MOST_ROWS

__all__ = ["MOST_ROWS", "product_at"]

Implementation = Literal["xla", "mosaic_tpu", "pallas"]
_IMPLEMENTATIONS = Implementations(
    xla, {"mosaic_tpu": mosaic_tpu}, by_default=("tpu",), name="stacked_product"
)


def product_at(
    layer: int | Int[Array, ""],
    rows: Float[Array, "T K"],
    matrices: Float[Array, "L P K N"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "T P*N"]:
    """Compute `rows @ matrices[layer, p]` for each of the P matrices of a layer, joined along N.

    The op takes `2 T P K N` FLOPs, and moves at least the `P K N` numbers of the layer's matrices.
    Sums are at least float32.

    Args:
      layer: the index of the layer, from 0 to L - 1.
      rows: the left operand; the kernel supports at most MOST_ROWS rows.
      matrices: the matrices of all layers. They are cast to the rows' dtype.
      implementation: the implementation; None means the fastest one for the target platform.

    Returns:
      The products in the rows' dtype.

    Raises:
      UnsupportedImplementation: a named implementation is unknown or does not support this call.
      ValueError: shapes or dtypes do not fit.
      TypeError: the op is differentiated, although a kernel may compute it.
    """
    check_array("rows", rows, "T K")
    check_array("matrices", matrices, "L P K N")
    check_stack("matrices", matrices, "L P K N")
    if matrices.shape[2] != rows.shape[1]:
        raise ValueError(
            f"shapes do not fit: rows [T, K] is {list(rows.shape)}, and matrices [L, P, K, N] is "
            f"{list(matrices.shape)}; both must have the same K"
        )
    run = functools.partial(_IMPLEMENTATIONS.run, implementation, "product")
    return run(rows, matrices, jnp.asarray(layer, jnp.int32))
