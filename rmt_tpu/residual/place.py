"""The place of a site in a model."""

from typing import NamedTuple

from jaxtyping import Array, Int

from rmt_tpu.config import Port


class Place(NamedTuple):
    """The place of a site in the model: before a sublayer or before the unembedding.

    Attributes:
      index: the number of sublayers before the site; inside a stack it is a traced value.
      within: 0 if the site is at the start of a layer, and 1 if it is between a layer's two
        sublayers.
      writes: the port of the core before the site, or of the embedding.
      reads: the port of the core after the site, or of the unembedding.
      last: whether the site is the one before the unembedding.
      base_writes, base_reads: the same ports in muP's base model. None means that they are `writes`
        and `reads`, as without muP.
    """

    index: Int[Array, ""] | int
    within: int
    writes: Port
    reads: Port
    last: bool = False
    base_writes: Port | None = None
    base_reads: Port | None = None
