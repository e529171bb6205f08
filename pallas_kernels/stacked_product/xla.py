"""Products with one layer's matrices in plain JAX: a slice of the stack and a matrix product."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def product(
    rows: Float[Array, "T K"], matrices: Float[Array, "L P K N"], layer: Int[Array, ""]
) -> Float[Array, "T P*N"]:
    """Compute the products, as specified in `pallas_kernels.stacked_product`."""
    own = jax.lax.dynamic_index_in_dim(matrices, layer, keepdims=False).astype(rows.dtype)
    return jnp.dot(rows, jnp.concatenate(list(own), axis=-1))
