"""Products of groups of rows with one matrix per group, with XLA's own op (`ragged_dot_general`).

On a CPU, XLA computes a dense product for each group. On a TPU, XLA has a kernel for the products,
but not for the gradient of the matrices (in JAX 0.10).
"""

import jax
import jax.numpy as jnp
from jax.lax import RaggedDotDimensionNumbers
from jaxtyping import Array, Float, Int


def product(
    rows: Float[Array, "M _"],
    matrices: Float[Array, "G K N"],
    sizes: Int[Array, " G"],
    *,
    alignment: int = 1,
    transposed: bool = False,
) -> Float[Array, "M _"]:
    """Multiply each row by the matrix of its group, as `pallas_kernels.grouped_matmul` defines."""
    return _ragged(rows, matrices, sizes, ((1,), (2 if transposed else 1,)), groups=[0])


def of_matrices(
    rows: Float[Array, "M K"],
    d_products: Float[Array, "M N"],
    sizes: Int[Array, " G"],
    *,
    alignment: int = 1,
) -> Float[Array, "G K N"]:
    """Return the cotangents of the matrices, as `pallas_kernels.grouped_matmul` defines."""
    return _ragged(rows, d_products, sizes, ((0,), (0,)), groups=[])


def _ragged(a, b, sizes, contracting, groups):
    dtype = jnp.promote_types(a.dtype, jnp.float32)
    numbers = RaggedDotDimensionNumbers((contracting, ((), ())), [0], groups)
    product = jax.lax.ragged_dot_general(a, b, sizes, numbers, preferred_element_type=dtype)
    return product.astype(a.dtype)
