"""A reference implementation of grouped products, which copies a group's matrix for each row."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def grouped_matmul(
    rows: Float[Array, "M K"], matrices: Float[Array, "G K N"], sizes: Int[Array, " G"]
) -> Float[Array, "M N"]:
    """Compute `rows[m] @ matrices[g]` for each row m of group g, with sums in at least float32.

    The products of rows that belong to no group are 0.
    """
    ends = jnp.cumsum(sizes)
    group = jnp.searchsorted(ends, jnp.arange(len(rows)), side="right")
    dtype = jnp.promote_types(rows.dtype, jnp.float32)
    own = matrices[jnp.minimum(group, len(matrices) - 1)]
    products = jnp.einsum("mk,mkn->mn", rows, own, preferred_element_type=dtype)
    return jnp.where((group < len(matrices))[:, None], products, 0).astype(rows.dtype)
