"""Sums of rows in plain JAX: all choices are added up, and a choice without a row counts as 0."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def sums(
    rows: Float[Array, "rows width"],
    order: Int[Array, " rows"],
    places: Int[Array, " choices"],
    *,
    each: int,
) -> Float[Array, "tokens width"]:
    """Compute each token's sum of rows, as specified in `pallas_kernels.token_rows`."""
    # Make the axis of a token's choices the first axis, so that the sum adds whole tiles and not
    # single rows.
    own = jnp.take(rows, places.reshape(-1, each).T, axis=0, mode="fill", fill_value=0)
    return jnp.sum(own, axis=0, dtype=jnp.promote_types(rows.dtype, jnp.float32)).astype(rows.dtype)
