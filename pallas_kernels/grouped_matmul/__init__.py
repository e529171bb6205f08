"""Products of groups of rows with one matrix per group, for mixture-of-experts layers.

The rows are sorted by group, and `sizes` contains the number of rows of each group. Rows after the
last group belong to no group.

Implementations: "xla" (`jax.lax.ragged_dot`, on any platform), "mosaic_tpu" (TPU kernels),
"triton" (GPU kernels) and "pallas" (the kernels on platforms that have them, else plain
JAX). The default, None, uses the kernels, because XLA's own op is slow in JAX 0.10. Its products on
GPUs, and its gradients of the matrices on TPUs, cost as much as if every row were in every group.

An implementation is a module with these functions:

    product(rows, matrices, sizes, *, alignment=1, transposed=False) -> `rows[m] @ matrices[g]` for
        each row m of group g. If `transposed`, `matrices[g] @ rows[m]`: the cotangents of the rows,
        given the cotangents of the products as `rows`.
    of_matrices(rows, d_products, sizes, *, alignment=1) -> the cotangents of the matrices
        [G, K, N]: for each group, the sum of the outer products of its rows and their cotangents
    unsupported(op, rows, other, sizes, *, alignment=1, transposed=False) -> a one-line reason why
        the implementation does not support these operands, or None
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments import check_array
from pallas_kernels.grouped_matmul import mosaic_tpu, triton_gpu, xla
from pallas_kernels.platform import Implementations, reverse_mode
from pallas_kernels.target import target

__all__ = ["grouped_matmul", "row_alignment"]

Implementation = Literal["xla", "mosaic_tpu", "triton", "pallas"]


def row_alignment(rows: int, groups: int) -> int:
    """Return the best `alignment` for `grouped_matmul`.

    It is 1 on GPUs and CPUs. On TPUs, a caller can add rows to each group, such as rows of zeros,
    so that the size of every group is a multiple of this number, and pass the number to the op.
    Otherwise, the op copies all rows to do so.

    Args:
      rows: the number of rows in all groups.
      groups: the number of groups.
    """
    return mosaic_tpu.best_tile(rows, groups) if target().on_tpu else 1


@reverse_mode
def grouped_matmul(
    rows: Float[Array, "M K"],
    matrices: Float[Array, "G K N"],
    sizes: Int[Array, " G"],
    *,
    alignment: int = 1,
    implementation: Implementation | None = None,
) -> Float[Array, "M N"]:
    """Compute `rows[m] @ matrices[g]` for every row m of every group g.

    The op takes `2 M K N` FLOPs, and its backward pass takes twice as many. Sums are at least
    float32.

    Args:
      rows: the rows of group 0, followed by the rows of group 1, and so on.
      matrices: one matrix per group, in the rows' dtype.
      sizes: the number of rows of each group, of any integer dtype. The sum is at most M.
      alignment: a number of which the caller knows that every size is a multiple. Results are wrong
        if one is not. `row_alignment` returns the best number.
      implementation: None chooses the fastest one for the platform that the program is lowered for.

    Returns:
      The products in the rows' dtype. For rows that belong to no group, the products and the
      gradients may have any values, including NaN.

    Raises:
      UnsupportedImplementation: a named implementation is unknown or does not support this call.
      ValueError: shapes or dtypes do not fit, or the alignment is below 1.
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
    if alignment < 1:
        raise ValueError(f"alignment is {alignment}, but must be at least 1")
    call = _Call(implementation, alignment)
    return _grouped_matmul(call, rows, matrices, sizes.astype(jnp.int32))


_IMPLEMENTATIONS = Implementations(
    xla,
    {"mosaic_tpu": mosaic_tpu, "triton": triton_gpu},
    by_default=("tpu", "cuda"),
    name="grouped_matmul",
    deciding=("alignment", "transposed"),
)


class _Call(NamedTuple):
    """The static parameters of a call, constant during tracing."""

    implementation: str | None
    alignment: int


def _run(call: _Call, op: str, *operands, **options):
    options |= {"alignment": call.alignment}
    return _IMPLEMENTATIONS.run(call.implementation, op, *operands, **options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_matmul(call, rows, matrices, sizes):
    return _run(call, "product", rows, matrices, sizes)


def _forward(call, rows, matrices, sizes):
    return _grouped_matmul(call, rows, matrices, sizes), (rows, matrices, sizes)


def _backward(call, saved, d_products):
    rows, matrices, sizes = saved
    run = functools.partial(_run, call)
    d_rows = run("product", d_products, matrices, sizes, transposed=True)
    return d_rows, run("of_matrices", rows, d_products, sizes), None


_grouped_matmul.defvjp(_forward, _backward)
