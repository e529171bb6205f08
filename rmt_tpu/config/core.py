"""Facts that every core's config states: its ports (how it reads and writes) and its costs."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from rmt_tpu.config.checks import Checked, Size


class Port(NamedTuple):
    """The vectors that a site reads for a core, or writes from it.

    Attributes:
      heads: number of vectors of size `head_dim` in each group, such as queries, keys, values. A
        vector store projects each group by a matrix; a matrix store has a key vector for each
        vector.
      head_dim: size of these vectors.
      whole: whether the port also has, or only has, the store's own data vectors: one of size D of
        a vector store, R of size D_v of a matrix store.
    """

    heads: tuple[int, ...] = ()
    head_dim: int = 0
    whole: bool = False


WHOLE = Port(whole=True)


class Softmax(NamedTuple):
    """A softmax over all earlier tokens, which attention kernels may compute.

    Attributes:
      heads, kv_heads: number of heads of queries, and of keys and values.
      size, value_size: size of a query or key, and of a value.
      alibi: whether logits fall with distance.
    """

    heads: int
    kv_heads: int
    size: int
    value_size: int
    alibi: bool = False


class Computes(Checked):
    """Properties of a core's config other than its fields, ports and costs, with their defaults.

    Attributes:
      aux: names of the scalars that the core returns in addition to its output; see
        `rmt_tpu.cores.core`.
      by_ring: whether more devices can share a sequence than the core has heads.
    """

    aux: ClassVar[tuple[str, ...]] = ()
    by_ring: ClassVar[bool] = True

    @property
    def softmax(self) -> Softmax | None:
        """The softmax attention of the core, or None if it has none."""
        return None

    def sharing_heads(self, devices: int) -> "Computes":
        """Return the core with copies of key heads, if that many devices have to share them."""
        return self

    def active_parameters(self, width: int, read_width: int) -> int:
        """Return the number of parameters that every token uses: all, except for experts."""
        return self.parameters(width, read_width)


@dataclass(frozen=True)
class Heads(Computes):
    """A core with `num_heads` (H) heads of size `head_dim` (D_h); each head writes one vector."""

    num_heads: Size
    head_dim: Size

    @property
    def writes(self) -> Port:
        """One vector for each head."""
        return Port(heads=(self.num_heads,), head_dim=self.head_dim)

    @property
    def query_dim(self) -> int:
        """Size of a query, and of a key."""
        return self.head_dim

    @property
    def divided_heads(self) -> dict[str, int]:
        """Numbers of heads, by field, that are divided among the devices that share tokens."""
        return {"num_heads": self.num_heads}
