"""A reference implementation of the sums of rows, which adds one choice's row after another."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def sums_of_rows(
    rows: Float[Array, "rows width"], places: Int[Array, " choices"], *, each: int
) -> Float[Array, "tokens width"]:
    """Return the sum of each token's rows, accumulated in float32 or wider.

    `places` is as in `rows_of_tokens`.
    """
    dtype = jnp.promote_types(rows.dtype, jnp.float32)
    total = jnp.zeros((len(places) // each, rows.shape[1]), dtype)
    has = (places < len(rows))[:, None]
    own = jnp.where(has, rows[jnp.minimum(places, len(rows) - 1)].astype(dtype), 0)
    return total.at[jnp.arange(len(places)) // each].add(own).astype(rows.dtype)
