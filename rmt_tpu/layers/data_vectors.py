"""Data vectors as one long vector, and back.

Numbers of the same place in every data vector lie together: entry `i * vectors + r` is entry i of
vector r. The residual matrix's kernels lay their data out in this order, so that on a TPU neither
step moves anything; to the weights on either side the order is only a numbering of their rows.
"""

from typing import Literal, NamedTuple

from jaxtyping import Array, Float


class HeadsLayout(NamedTuple):
    """How a store's reads and writes of heads lie.

    Attributes:
      rows: their order in memory; see `pallas_kernels.causal_attention`.
      swapped: axes of the mesh over which a device has all heads of its own tokens, and swaps them
        for its own heads of all tokens.
      divided: axes over which heads then are divided.
    """

    rows: Literal["size_major", "head_major"]
    swapped: tuple[str, ...]
    divided: tuple[str, ...]


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
