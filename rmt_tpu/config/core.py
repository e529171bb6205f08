"""Base classes for the configs of cores, and the ports that connect cores to the residual.

A core is the computation of one sublayer, such as attention. A site is the place in the model where
a core reads its input from the residual and writes its output to it. A port describes the vectors
that are read or written there.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from rmt_tpu.config.checks import Checked, Size
from rmt_tpu.errors import UsageError


class Port(NamedTuple):
    """The vectors that a core reads from the residual or writes to it.

    Attributes:
      heads: number of vectors in each group. The queries form one group, for example, and the keys
        another. A vector store has one projection matrix per group. A matrix store has one key
        vector per vector.
      head_dim: size of each vector in these groups.
      residual: whether the port includes the data vectors, which represent the whole residual.
        There is one data vector of size D in a vector store, and there are R of size D_v in a
        matrix store. Without `heads`, the port has only data vectors.
      normed: whether the residual is normed before it is read.
    """

    heads: tuple[int, ...] = ()
    head_dim: int = 0
    residual: bool = False
    normed: bool = True

    def vectors(self, rank: int) -> int:
        """Return the number of vectors, if `rank` (R) data vectors represent the residual."""
        return sum(self.heads) + self.residual * rank


RESIDUAL_PORT = Port(residual=True)
# The norm of a sublayer can be applied to the input of its core, to the output, or to both.
Normed = Literal["input", "output", "both"]


class Softmax(NamedTuple):
    """The sizes of a core's softmax attention over all earlier tokens.

    Kernels can compute such attention.

    Attributes:
      heads, kv_heads: number of query heads, and number of key and value heads.
      size, value_size: size of each query and key, and size of each value.
      alibi: whether logits have the biases of ALiBi, which decrease with the distance of tokens.
      window: the number of tokens that each token attends to, including itself; None means all
        earlier ones.
      cap: the soft cap on logits, or None.
    """

    heads: int
    kv_heads: int
    size: int
    value_size: int
    alibi: bool = False
    window: int | None = None
    cap: float | None = None


class Computes(Checked):
    """The base class for the configs of cores, which are the functions of sublayers.

    Attributes:
      aux: names of the scalars that the core returns in addition to its output; see
        `rmt_tpu.cores.core`.
      by_ring: whether the core supports ring attention. A sequence can then be sharded over more
        devices than the core has heads.
    """

    aux: ClassVar[tuple[str, ...]] = ()
    by_ring: ClassVar[bool] = True

    @property
    def softmax(self) -> Softmax | None:
        """The softmax attention of the core, or None if the core has no such attention."""
        return None

    def kept_numbers(self, width: int, *, rebuilt: bool = False) -> int | None:
        """Return how many numbers per token a core keeps with its products; None if not known.

        The numbers have the compute dtype. The residual does not count.

        Args:
          width: D, the size of the residual that a core with an output projection adds to.
          rebuilt: whether the residual is rebuilt (remat "reversible_dots"). What the core writes
            is then kept as well, and does not count here.
        """
        return None

    def sharing_heads(self, devices: int) -> "Computes":
        """Return an equivalent core whose key and value heads can be sharded over `devices`.

        Heads are copied if there are too few. A core without such heads is returned unchanged.
        """
        return self

    def active_parameters(self, width: int, read_width: int) -> int:
        """Return the number of parameters that one token uses.

        These are all parameters, except in a mixture of experts.
        """
        return self.parameters(width, read_width)


def check_situ(core: Any) -> None:
    """Raise UsageError if a core sets bounds for SiTU, but has a different activation function."""
    for name in ("situ_beta", "situ_linear_beta"):
        default, value = getattr(type(core), name), getattr(core, name)
        if core.activation != "situ" and value != default:
            raise UsageError(
                f"{type(core).__name__}.{name}={value} requires activation='situ', not "
                f"{core.activation!r}; set activation=situ, or set {name}={default}"
            )


@dataclass(frozen=True)
class Heads(Computes):
    """A core with `num_heads` (H) heads of size `head_dim` (D_h); each head writes one vector."""

    num_heads: Size
    head_dim: Size

    @property
    def writes(self) -> Port:
        """The vectors that the core writes to the residual: one per head."""
        return Port(heads=(self.num_heads,), head_dim=self.head_dim)

    @property
    def query_dim(self) -> int:
        """Size of each query and each key."""
        return self.head_dim

    @property
    def divided_heads(self) -> dict[str, int]:
        """A dict from config field to number of heads.

        It has an entry for each number that must be divisible by the number of devices. If several
        devices share a sequence, each computes an equal part of the heads.
        """
        return {"num_heads": self.num_heads}
