"""Data vectors as one long vector, and back.

Numbers of the same place in every data vector lie together: entry `i * vectors + r` is entry i of
vector r. The residual matrix's kernels lay their data out in this order, so that on a TPU neither
step moves anything; to the weights on either side the order is only a numbering of their rows.
"""

from typing import Literal, NamedTuple

from jaxtyping import Array, Float

import sharding


class HeadsLayout(NamedTuple):
    """How a store's reads and writes of heads lie.

    Attributes:
      rows: their order in memory; see `pallas_kernels.causal_attention`.
      projected: axes of the mesh over which a device reads its own heads, of the tokens of all.
    """

    rows: Literal["size_major", "head_major"]
    projected: tuple[str, ...] = ()

    @property
    def swapped(self) -> tuple[str, ...]:
        """Axes over which a device swaps all heads of its own tokens for own heads of all."""
        return tuple(axis for axis in sharding.token_axes() if axis not in self.projected)

    @property
    def divided(self) -> tuple[str, ...]:
        """Axes over which heads then are divided."""
        return self.projected + self.swapped


class Read(NamedTuple):
    """What a site has read for a core (z), as the core's port asks; None where it does not.

    Attributes:
      heads: vectors of head size, the port's groups one after the other.
      whole: the store's own: [..., 1, D] of a vector, [..., R, D_v] of a matrix.
    """

    heads: Float[Array, "batch seq vectors head_dim"] | None = None
    whole: Float[Array, "batch seq vectors size"] | None = None


def concatenate(x: Float[Array, "*tokens vectors size"]) -> Float[Array, "*tokens width"]:
    """All data vectors of a token as one of `width = size * vectors`."""
    vectors, size = x.shape[-2:]  # and not -1, which an empty batch does not tell
    return x.swapaxes(-1, -2).reshape(*x.shape[:-2], vectors * size)


def separate(
    x: Float[Array, "*tokens width"], vectors: int
) -> Float[Array, "*tokens vectors size"]:
    """`concatenate` undone."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // vectors, vectors).swapaxes(-1, -2)
