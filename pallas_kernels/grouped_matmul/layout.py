"""Rows that are moved apart, so that the size of every group is a multiple of a number."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Spread(NamedTuple):
    """A layout of R rows, in which each of G groups is followed by rows of zeros.

    Attributes:
      sizes: the number of rows of each group, with its zeros.
      source: for each of the R rows, the row that it is copied from.
      used: whether it is copied; otherwise it is 0.
      places: for each of the M rows, the row that it is copied to; any row for those that belong to
        no group.
    """

    sizes: Int[Array, " G"]
    source: Int[Array, " R"]
    used: Bool[Array, " R"]
    places: Int[Array, " M"]

    def __call__(self, rows: Float[Array, "M K"]) -> Float[Array, "R K"]:
        """Move rows apart."""
        return jnp.where(self.used[:, None], rows[self.source], 0)

    def back(self, rows: Float[Array, "R K"]) -> Float[Array, "M K"]:
        """Move rows together again. Rows that belong to no group get any values."""
        return rows[self.places]


def spread(count: int, sizes: Int[Array, " G"], multiple: int) -> Spread:
    """Return the layout of `count` rows in which every group's size is a multiple of `multiple`."""
    wide = -(-sizes // multiple) * multiple
    ends, wide_ends = jnp.cumsum(sizes), jnp.cumsum(wide)
    shifts = (wide_ends - wide) - (ends - sizes)
    of = lambda at, ends: jnp.minimum(jnp.sum(at[:, None] >= ends, axis=1), len(sizes) - 1)
    rows = (count + min(count, len(sizes)) * (multiple - 1)) // multiple * multiple
    row = jnp.arange(max(rows, multiple))
    group = of(row, wide_ends)
    source = row - shifts[group]
    used = source < ends[group]
    row = jnp.arange(count)
    places = row + shifts[of(row, ends)]
    return Spread(wide, jnp.minimum(source, count - 1), used, jnp.minimum(places, rows - 1))
