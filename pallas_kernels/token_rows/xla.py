"""Sums of rows by XLA: a row of zeros for a choice that has none, and all choices added up."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def sums(
    rows: Float[Array, "rows width"],
    order: Int[Array, " rows"],
    places: Int[Array, " choices"],
    *,
    each: int,
) -> Float[Array, "tokens width"]:
    """See the package."""
    # First choices, then second ones: tiles are then added up as they are, and not row by row.
    own = jnp.take(rows, places.reshape(-1, each).T, axis=0, mode="fill", fill_value=0)
    return jnp.sum(own, axis=0, dtype=jnp.promote_types(rows.dtype, jnp.float32)).astype(rows.dtype)
