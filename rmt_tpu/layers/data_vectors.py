"""Data vectors as one long vector, and back.

Numbers of the same place in every data vector lie together: entry `i * vectors + r` is entry i of
vector r. The residual matrix's kernels lay their data out in this order, so that on a TPU neither
step moves anything; to the weights on either side the order is only a numbering of their rows.
"""

from jaxtyping import Array, Float


def concatenate(x: Float[Array, "*tokens vectors size"]) -> Float[Array, "*tokens width"]:
    """All data vectors of a token as one of `width = size * vectors`."""
    vectors, size = x.shape[-2:]  # and not -1, which an empty batch does not tell
    return x.swapaxes(-1, -2).reshape(*x.shape[:-2], vectors * size)


def separate(
    x: Float[Array, "*tokens width"], vectors: int
) -> Float[Array, "*tokens vectors size"]:
    """`concatenate` undone."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // vectors, vectors).swapaxes(-1, -2)
