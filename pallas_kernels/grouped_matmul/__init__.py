"""Products of groups of rows with one matrix per group, for mixture-of-experts layers.

The rows are sorted by group, and `sizes` contains the number of rows of each group. Rows after the
last group belong to no group.

Implementations: "xla" (`jax.lax.ragged_dot`, on any platform), "mosaic_tpu" (JAX's megablox kernels
for TPUs), "triton" (GPU kernels) and "pallas" (the kernels on platforms that have them, else plain
JAX). The default, None, uses the kernels, because XLA's own op is slow in JAX 0.10. Its products on
GPUs, and its gradients of the matrices on TPUs, cost as much as if every row were in every group.

An implementation is a module with these functions:

    product(rows, matrices, sizes, *, transposed=False) -> `rows[m] @ matrices[g]` for each row m of
        group g. If `transposed`, `matrices[g] @ rows[m]`: the cotangents of the rows, given the
        cotangents of the products as `rows`.
    of_matrices(rows, d_products, sizes) -> the cotangents of the matrices [G, K, N]: for each
        group, the sum of the outer products of its rows and their cotangents
    unsupported(op, rows, other, sizes) -> a one-line reason why the implementation does not support
        these operands, or None
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments import check_array
from pallas_kernels.grouped_matmul import mosaic_tpu, triton_gpu, xla
from pallas_kernels.platform import Implementations, reverse_mode

__all__ = ["grouped_matmul"]

Implementation = Literal["xla", "mosaic_tpu", "triton", "pallas"]


@reverse_mode
def grouped_matmul(
    rows: Float[Array, "M K"],
    matrices: Float[Array, "G K N"],
    sizes: Int[Array, " G"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "M N"]:
    """Compute `rows[m] @ matrices[g]` for every row m of every group g.

    The op takes `2 M K N` FLOPs, and its backward pass takes twice as many. Sums are at least
    float32.

    Args:
      rows: the rows of group 0, followed by the rows of group 1, and so on.
      matrices: one matrix per group, in the rows' dtype.
      sizes: the number of rows of each group, of any integer dtype. The sum is at most M.
      implementation: None chooses the fastest one for the platform that the program is lowered for.

    Returns:
      The products in the rows' dtype. For rows that belong to no group, the products and the
      gradients may have any values, including NaN.

    Raises:
      UnsupportedImplementation: a named implementation is unknown or does not support this call.
      ValueError: shapes or dtypes do not fit.
      TypeError: the op is differentiated in forward mode.
    """
    check_array("rows", rows, "M K")
    check_array("matrices", matrices, "G K N")
    if matrices.shape[1] != rows.shape[1] or matrices.dtype != rows.dtype:
        raise ValueError(
            f"matrices {matrices.dtype}{list(matrices.shape)} do not fit rows {rows.dtype}"
            f"{list(rows.shape)}: matrices [G, K, N] and rows [M, K] must have the same K and dtype"
        )
    if sizes.shape != matrices.shape[:1] or not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise ValueError(
            f"sizes is {sizes.dtype}{list(sizes.shape)}, but must be {len(matrices)} integers, "
            "one per matrix"
        )
    return _grouped_matmul(implementation, rows, matrices, sizes.astype(jnp.int32))


_IMPLEMENTATIONS = Implementations(
    xla,
    {"mosaic_tpu": mosaic_tpu, "triton": triton_gpu},
    by_default=("tpu", "cuda"),
    name="grouped_matmul",
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_matmul(implementation, rows, matrices, sizes):
    return _IMPLEMENTATIONS.run(implementation, "product", rows, matrices, sizes)


def _forward(implementation, rows, matrices, sizes):
    return _grouped_matmul(implementation, rows, matrices, sizes), (rows, matrices, sizes)


def _backward(implementation, saved, d_products):
    rows, matrices, sizes = saved
    run = functools.partial(_IMPLEMENTATIONS.run, implementation)
    d_rows = run("product", d_products, matrices, sizes, transposed=True)
    return d_rows, run("of_matrices", rows, d_products, sizes), None


_grouped_matmul.defvjp(_forward, _backward)
