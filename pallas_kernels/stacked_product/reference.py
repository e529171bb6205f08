"""A reference implementation of products with one layer's matrices.

The products are computed directly from their definition. For T rows of K numbers and P matrices
[K, N] with E bytes per number, the op takes `2 T P K N` FLOPs and moves
`E (T K + P K N + T P N)` bytes.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def product(
    rows: Float[Array, "T K"], matrices: Float[Array, "L P K N"], layer: Int[Array, ""]
) -> Float[Array, "T P*N"]:
    """Compute `rows @ matrices[layer, p]` for every p in at least float32, joined along N."""
    dtype = jnp.promote_types(rows.dtype, jnp.float32)
    own = matrices[layer].astype(rows.dtype).astype(dtype)
    products = jnp.einsum("tk,pkn->tpn", rows.astype(dtype), own)
    return products.reshape(len(rows), -1).astype(rows.dtype)
