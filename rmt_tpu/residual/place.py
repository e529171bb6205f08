"""Where in a model a site is, and what is on its two sides."""

from typing import NamedTuple

from jaxtyping import Array, Int

from rmt_tpu.config import Port


class Place(NamedTuple):
    """Of a site.

    Attributes:
      index: how many sublayers are before it; traced within a stack.
      within: the same, within its layer of two sublayers: 0 where one begins, 1 in its middle.
      writes: of the core before it, or the embedding.
      reads: of the core after it, or the unembedding.
      last: whether that is the unembedding.
    """

    index: Int[Array, ""] | int
    within: int
    writes: Port
    reads: Port
    last: bool = False
