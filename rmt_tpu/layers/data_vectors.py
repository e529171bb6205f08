"""Conversion between a token's data vectors and one long vector.

Numbers at the same place in every data vector lie together: entry `i * vectors + r` is entry i of
vector r. The residual matrix's kernels lay their data out in this order, so that on a TPU neither
conversion moves anything. To the weights on either side the order is only a numbering of their
rows.
"""

from typing import Literal, NamedTuple

from jaxtyping import Array, Float

import sharding


class HeadsLayout(NamedTuple):
    """The layout of the heads that a store reads and writes.

    Attributes:
      rows: the order of heads in memory; see `pallas_kernels.causal_attention`.
      projected: axes of the mesh over which each device projects only its own heads, for the tokens
        of all devices of these axes.
    """

    rows: Literal["size_major", "head_major"]
    projected: tuple[str, ...] = ()

    @property
    def swapped(self) -> tuple[str, ...]:
        """Axes over which devices exchange all heads of own tokens for own heads of all tokens."""
        return tuple(axis for axis in sharding.token_axes() if axis not in self.projected)

    @property
    def divided(self) -> tuple[str, ...]:
        """The axes over which heads are divided after the exchange."""
        return self.projected + self.swapped


class Read(NamedTuple):
    """The input z that a site has read for a core; parts that the core does not read are None.

    Attributes:
      heads: vectors of head size, the port's groups one after the other.
      whole: the residual as the store reads it whole: [..., 1, D] of a vector store, [..., R, D_v]
        of a matrix store.
    """

    heads: Float[Array, "batch seq vectors head_dim"] | None = None
    whole: Float[Array, "batch seq vectors size"] | None = None


def concatenate(x: Float[Array, "*tokens vectors size"]) -> Float[Array, "*tokens width"]:
    """Concatenate all data vectors of a token to one vector of `width = size * vectors` numbers."""
    vectors, size = x.shape[-2:]  # not reshaped to -1, which cannot be inferred for an empty batch
    return x.swapaxes(-1, -2).reshape(*x.shape[:-2], vectors * size)


def separate(
    x: Float[Array, "*tokens width"], vectors: int
) -> Float[Array, "*tokens vectors size"]:
    """Undo `concatenate`."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // vectors, vectors).swapaxes(-1, -2)
