"""Products of rows with a matrix for each group of rows, which experts compute of their tokens.

Rows lie group by group, and `sizes` gives the number of rows of each group; rows after the last
group belong to no group. Implementations: "xla" (`jax.lax.ragged_dot`, on any platform),
"mosaic_tpu" (JAX's megablox kernels), "triton" (GPUs) and "pallas" (the kernels where there are
any). The default, None, uses the kernels: in JAX 0.10, XLA's gradient of the matrices on TPUs, and
all of its products on GPUs, are as dense as if every row were in every group. An implementation has

    product(rows, matrices, sizes, *, transposed=False) -> `rows[m] @ matrices[g]`, or transposed
        `matrices[g] @ rows[m]`, which gives the gradient of rows [M, K] from that of products
    of_matrices(rows, d_products, sizes) -> the gradient of the matrices [G, K, N]: each group's sum
        of outer products of its rows
    unsupported(op, rows, other, sizes) -> why it cannot serve these, in a line, or None
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
    """Compute `rows[m] @ matrices[g]` for every row m of a group g, in the rows' dtype.

    The op takes `2 M K N` FLOPs, and its gradient twice as many. Sums are at least float32.

    Args:
      rows: the rows of group 0, then of group 1, and so on.
      matrices: the groups' matrices, in the rows' dtype.
      sizes: the numbers of rows of the groups, of any integer dtype; their sum is at most M.
      implementation: None picks the best one for the platform that the program is lowered for.

    Returns:
      The products. Rows of no group, and their gradient, may be anything, NaN included.

    Raises:
      UnsupportedImplementation: a named implementation is unknown or cannot serve this call.
      ValueError: shapes or dtypes do not fit.
      TypeError: the op is differentiated in forward mode.
    """
    check_array("rows", rows, "M K")
    check_array("matrices", matrices, "G K N")
    if matrices.shape[1] != rows.shape[1] or matrices.dtype != rows.dtype:
        raise ValueError(
            f"matrices {matrices.dtype}{list(matrices.shape)} do not fit rows {rows.dtype}"
            f"{list(rows.shape)}: K and the dtype must be the same"
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
