"""What the config of any core says: what it reads of the residual and writes (ports), and costs."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from rmt_tpu.config.checks import Checked, Size


class Port(NamedTuple):
    """What a site has to read for a core, or to write of it.

    Attributes:
      heads: numbers of data vectors of size `head_dim`, group by group, like queries, keys, values;
        a vector store projects each group by a matrix, a matrix store has a key vector for each.
      head_dim: their size.
      whole: whether also, or only, the store's own data vectors: one of size D of a vector store,
        R of size D_v of a matrix store.
    """

    heads: tuple[int, ...] = ()
    head_dim: int = 0
    whole: bool = False


WHOLE = Port(whole=True)


class Softmax(NamedTuple):
    """A softmax over all earlier tokens, which kernels of attention may serve.

    Attributes:
      heads, kv_heads: of queries, and of keys and values.
      size, value_size: entries of a query or key, and of a value.
      alibi: whether logits fall with distance.
    """

    heads: int
    kv_heads: int
    size: int
    value_size: int
    alibi: bool = False


class Computes(Checked):
    """What a core's config may say of it, beside its fields, ports and costs.

    Attributes:
      aux: names of the scalars that it gives beside what it writes; see `rmt_tpu.cores.core`.
      by_ring: whether more devices can share a sequence than it has heads.
    """

    aux: ClassVar[tuple[str, ...]] = ()
    by_ring: ClassVar[bool] = True

    @property
    def softmax(self) -> Softmax | None:
        """The attention of a core that has one."""
        return None

    def sharing_heads(self, devices: int) -> "Computes":
        """The same core, where so many devices have copies of heads of keys that they share."""
        return self

    def active_parameters(self, width: int, read_width: int) -> int:
        """Of a core's parameters, those that every token meets: all, but of experts."""
        return self.parameters(width, read_width)


@dataclass(frozen=True)
class Heads(Computes):
    """A core of `num_heads` (H) heads of size `head_dim` (D_h), each of which writes one vector."""

    num_heads: Size
    head_dim: Size

    @property
    def writes(self) -> Port:
        """One vector a head."""
        return Port(heads=(self.num_heads,), head_dim=self.head_dim)

    @property
    def query_dim(self) -> int:
        """Of a query, and of a key."""
        return self.head_dim

    @property
    def divided_heads(self) -> dict[str, int]:
        """By field, the heads that devices divide where they share tokens."""
        return {"num_heads": self.num_heads}
