"""The place of a site in a model, and the ports on its two sides."""

from typing import NamedTuple

from jaxtyping import Array, Int

from rmt_tpu.config import Port


class Place(NamedTuple):
    """The place of a site.

    Attributes:
      index: the number of sublayers before the site; traced within a stack.
      within: the number of sublayers before it in its layer of two: 0 where a layer begins, 1 in
        its middle.
      writes: the port of the core before the site, or of the embedding.
      reads: the port of the core after the site, or of the unembedding.
      last: whether the unembedding is what reads.
    """

    index: Int[Array, ""] | int
    within: int
    writes: Port
    reads: Port
    last: bool = False
