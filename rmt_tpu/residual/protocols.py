"""What a mixer that keeps a bank of rows must have, as `rmt_tpu.execution.banked` asks for it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from flax import nnx
from jaxtyping import Array, Float

from rmt_tpu.layers.data_vectors import Read
from rmt_tpu.layers.stacks import Index


class Grouping(NamedTuple):
    """How the layers of a stack go in groups.

    Attributes:
      layers: of a group; the last one may have fewer.
      closed: whether a group is one whole block, from an empty running sum to a sealed row.
      open: whether a group may begin or end with a running sum that is not empty.
      rows: how many rows a group of so many sublayers takes from the bank, from `first_row` on:
        those that it seals, or 1 if it is closed.
    """

    layers: int
    closed: bool
    open: bool
    rows: Callable[[int], int]


class At(NamedTuple):
    """Where in depth a read or a write is.

    Attributes:
      sublayer: how many are before it.
      group: the same of the first one of its group.
    """

    sublayer: Index
    group: Index


class Banked(Protocol):
    """A mixer whose sites read rows of a bank.

    Attributes:
      num_rows: of a bank, the embedding's among them.
      keeps_sum: whether a running sum goes on from layer to layer.
    """

    num_rows: int
    keeps_sum: bool

    def grouping(self, first: int, period: int, repeat: int) -> Grouping:
        """Of a stack with `first` sublayers before it, and a period of so many."""

    def first_row(self, sublayer: Index) -> Index:
        """The row that is open when a group begins: its own rows count from there."""

    def scores(self, sites: Sequence[Sequence[nnx.Module]]) -> Float[Array, "sublayers *scored"]:
        """What the sites of all sublayers score with, in the order of depth.

        `sites` are of each stack those of its period, stacked over repeats.
        """

    def prior(
        self,
        scores: Float[Array, "sites *scored"],
        bank: Float[Array, "rows batch seq *shape"],
        count: Index,
    ) -> Any:
        """Phase one: what the first `count` rows give to each site of a group."""

    def prior_backward(
        self,
        scores: Float[Array, "sites *scored"],
        bank: Float[Array, "rows batch seq *shape"],
        count: Index,
        prior: Any,
        d_prior: Any,
        d_bank: Float[Array, "rows batch seq *shape"],
    ) -> tuple[Float[Array, "sites *scored"], Float[Array, "rows batch seq *shape"]]:
        """Cotangents of what `prior` was given, that of the bank added to `d_bank`."""

    def read(
        self,
        store: nnx.Module,
        site: nnx.Module,
        score: Float[Array, "*scored"],
        prior: Any,
        rows: Float[Array, "own_rows batch seq *shape"] | None,
        current: Float[Array, "batch seq *shape"],
        at: At,
    ) -> tuple[Any, Float[Array, "batch seq *shape"], Read]:
        """Phase two at one site: prior and running sum as passed on, and what the core gets.

        `rows` are those of the group, of which the sealed ones count; None where it is closed.
        """

    def seal(
        self,
        site: nnx.Module,
        rows: Float[Array, "own_rows batch seq *shape"] | None,
        current: Float[Array, "batch seq *shape"],
        at: At,
    ) -> tuple[Float[Array, "own_rows batch seq *shape"] | None, Float[Array, "batch seq *shape"]]:
        """After the sublayer's write: rows and running sum; a row that is complete is put there.

        `site` is the one before the sublayer.
        """

    def final(
        self,
        store: nnx.Module,
        bank: Float[Array, "rows batch seq *shape"],
        final_site: nnx.Module,
    ) -> Read:
        """What the unembedding gets: the last mix, over all rows."""
