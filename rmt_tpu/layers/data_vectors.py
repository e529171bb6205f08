"""Conversion between a token's data vectors and one long vector that contains all of them.

Data vectors are the vectors that a layer reads from the residual and writes to it. Entry
`i * vectors + r` of the long vector is entry i of data vector r. The kernels for the residual
matrix keep data vectors in the same order, so neither conversion moves data on a TPU.
"""

from typing import Literal, NamedTuple

from jaxtyping import Array, Float

import sharding


class HeadsLayout(NamedTuple):
    """The layout of the heads that a store (the format of the residual) reads and writes.

    Attributes:
      rows: the order of heads in memory; see `pallas_kernels.causal_attention`.
      projected: the mesh axes over which the projections to and from heads are sharded by heads.
        Each device projects its own share of the heads, for the tokens of all devices along these
        axes.
    """

    rows: Literal["size_major", "head_major"]
    projected: tuple[str, ...] = ()

    @property
    def swapped(self) -> tuple[str, ...]:
        """The mesh axes over which devices exchange heads for tokens.

        Before the exchange, a device has all heads for its own tokens. After the exchange, the
        device has its own share of the heads for the tokens of all devices.
        """
        return tuple(axis for axis in sharding.token_axes() if axis not in self.projected)

    @property
    def divided(self) -> tuple[str, ...]:
        """The mesh axes over which heads are sharded after the exchange of heads for tokens."""
        return self.projected + self.swapped


class Read(NamedTuple):
    """The input z of a core (an attention or feed-forward sublayer), read from the residual.

    A part that the core does not use is None.

    Attributes:
      heads: vectors of head size, for example all queries, then all keys, then all values.
      residual: the vectors read without heads: [..., 1, D] from a vector store, or [..., R, D_v]
        from a matrix store.
    """

    heads: Float[Array, "batch seq vectors head_dim"] | None = None
    residual: Float[Array, "batch seq vectors size"] | None = None


def concatenate(x: Float[Array, "*tokens vectors size"]) -> Float[Array, "*tokens width"]:
    """Concatenate a token's data vectors into one vector of `width = size * vectors` numbers."""
    vectors, size = x.shape[-2:]  # The size -1 cannot be inferred for an empty batch.
    return x.swapaxes(-1, -2).reshape(*x.shape[:-2], vectors * size)


def separate(
    x: Float[Array, "*tokens width"], vectors: int
) -> Float[Array, "*tokens vectors size"]:
    """Split one long vector per token into its data vectors; the inverse of `concatenate`."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // vectors, vectors).swapaxes(-1, -2)
