"""The protocols of stores and mixers: what schedules and mixers call.

A *store* holds what was written. An `Invertible` store can take a write back, a `Stepwise` store
offers each step of its writes and reads separately, a `Keeping` store has rows larger than what is
written to them, and a `Merging` store reads what attention over depth mixes. A *mixer* is
`Carried`, by a state that goes from site to site, or `Banked`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Shaped

from pallas_kernels import Slot, Statistics
from rmt_tpu.layers.data_vectors import Read
from rmt_tpu.layers.stacks import Index

# A row is what a store holds of each token. A bank is a stack of rows.
Row = Float[Array, "batch seq *shape"]
Bank = Float[Array, "_ batch seq *shape"]
# The output of a core or of the embedding. If it has heads, its tokens may be others than the
# residual's on this device.
Written = Float[Array, "_ y_seq vectors size"]
# The parameters with which the site after a core writes its output.
Writer = Float[Array, "..."] | nnx.Param | None


@runtime_checkable
class Store(Protocol):
    """The residual of one token, and how it is written and read.

    Attributes:
      dtype: the dtype in which the residual is held.
      compute_dtype: the dtype of what is read.
    """

    dtype: DTypeLike
    compute_dtype: DTypeLike

    def start(
        self,
        tokens: Float[Array, "batch seq vectors size"],
        positions: Float[Array, "batch_or_1 seq vectors size"] | None,
    ) -> tuple[Float[Array, "group seq *shape"], Float[Array, "batch seq vectors size"]]:
        """Return the residual before the first write, and what is written first."""

    def hold(self, residual: Float[Array, "group seq *shape"]) -> Shaped[Array, "group seq *shape"]:
        """Return the residual in the dtype in which it is carried."""

    def write(
        self, residual: Float[Array, "group seq *shape"], y: Written, writer: Writer
    ) -> Float[Array, "group seq *shape"]:
        """Return the residual with y added to it."""

    def read(
        self, residual: Float[Array, "group seq *shape"], site: nnx.Module, dtype: DTypeLike
    ) -> Read:
        """Return what a site reads of the residual, through its norm."""

    def add_and_read(
        self, residual: Shaped[Array, "group seq *shape"], y: Written, site: nnx.Module
    ) -> tuple[Shaped[Array, "group seq *shape"], Read]:
        """Write y and then read, at one site, a residual in the dtype in which it is held."""


@runtime_checkable
class Invertible(Store, Protocol):
    """A store that can rebuild the residual before a write from the residual after it."""

    def add_and_read_with_statistics(
        self, residual: Shaped[Array, "group seq *shape"], y: Slot, site: nnx.Module
    ) -> tuple[Shaped[Array, "group seq *shape"], Read, Statistics]:
        """Do what `add_and_read` does, and also return the norm's statistics."""

    def read_again(
        self,
        residual: Shaped[Array, "group seq *shape"],
        site: nnx.Module,
        statistics: Statistics,
        dtype: DTypeLike,
    ) -> Read:
        """Read again what `add_and_read` read of the residual that it left.

        `statistics` are the norm's statistics of that read.
        """

    def undo(
        self,
        residual: Shaped[Array, "group seq *shape"],
        y: Slot,
        site: nnx.Module,
        z: Read,
        statistics: Statistics,
        d_residual: Float[Array, "group seq *shape"],
        d_z: Read,
        before: tuple[nnx.Module, Statistics] | None = None,
    ) -> tuple[
        Shaped[Array, "group seq *shape"],
        Float[Array, "group seq *shape"],
        Written,
        dict[str, Any],
        Read | None,
    ]:
        """Rebuild the residual that `add_and_read` was given, and return cotangents.

        Args:
          residual: the residual that `add_and_read` left.
          y: what it wrote.
          site: the site.
          z: what it read.
          statistics: the norm's statistics.
          d_residual: the cotangent of the residual that it left.
          d_z: the cotangent of z.
          before: the site before and its norm's statistics, if the rebuilt residual is to be read
            for it.

        Returns:
          The rebuilt residual, the cotangents of residual, y and site, and what the site before
          read of the rebuilt residual (None without `before`).
        """


@runtime_checkable
class Stepwise(Store, Protocol):
    """A store that offers each step of a write and of a read separately."""

    def written(self, y: Written, writer: Writer) -> Row:
        """Return what a write adds to the residual."""

    def norm_of(self, residual: Row, site: nnx.Module, dtype: DTypeLike) -> Row:
        """Return the normed residual, the first step of a read."""

    def project(self, x: Row, site: nnx.Module) -> Read:
        """Return what is read of the normed residual, the second step of a read."""


@runtime_checkable
class Keeping(Store, Protocol):
    """A store whose rows are larger than what is written to them; a schedule keeps the writes."""

    def write_kept(
        self,
        residual: Float[Array, "group seq *shape"],
        y: Slot,
        writer: Array,
        *,
        empty: Array | bool,
        in_place: bool = True,
    ) -> Float[Array, "group seq *shape"]:
        """Return the residual with a kept y written to it, as `write` does.

        An empty residual counts as zeros. With `in_place`, the result may overwrite the residual.
        This method has no gradient.
        """

    def write_kept_backward(
        self, y: Slot, writer: Array, d_residual: Float[Array, "group seq *shape"]
    ) -> tuple[Written, Array]:
        """Return the cotangents of y and of the writer."""


@runtime_checkable
class Merging(Store, Protocol):
    """A store whose read includes the second phase of attention over depth."""

    def merge_and_read(
        self,
        sealed: tuple[Float[Array, "sites batch seq *shape"], Float[Array, "batch seq"], Index],
        current: Row,
        query: Float[Array, "*shape"],
        site: nnx.Module,
        *,
        active: Array,
        epsilon: int | float,
    ) -> tuple[Float[Array, "sites batch seq *shape"], Row, Read]:
        """Return what a site reads of the mix of sealed rows and, if `active`, of the running sum.

        Args:
          sealed: the mixes of the rows for all sites, the logarithm of the softmax's sum of this
            site, and the number of this site.
          current: the running sum.
          query: the site's query, of a row's shape.
          site: the site.
          active: whether the running sum is a source.
          epsilon: the epsilon of the keys' norm.

        Returns:
          The mixes and the running sum for later use, as `pallas_kernels.depth_attention_merge`
          returns them, and what the site reads.
        """


@runtime_checkable
class MergingFew(Merging, Protocol):
    """A merging store with kernels for a few tokens, which read parameters from a stack."""

    def merging(self, queries: Float[Array, "repeat scored"], site: nnx.Module) -> Array:
        """Return the parameters of a site in all repeats, from which `merge_few` takes one slice.

        `site` is stacked over the repeats. `queries` include the gain of the keys' norm.
        """

    def merge_few(
        self,
        sealed: tuple[
            Float[Array, "sites batch seq *shape"], Float[Array, "sites batch seq"], Index
        ],
        current: Row,
        site: nnx.Module,
        *,
        active: Array,
        epsilon: int | float,
    ) -> Read:
        """Do what `merge_and_read` does for a few tokens.

        The kernels take the site's slice of the stacked parameters themselves. `sealed` has the
        sums of all sites. The site's `stacked` says which slice is its own.
        """


@runtime_checkable
class Carried(Protocol):
    """A mixer that carries a state from site to site."""

    def start(
        self, store: Store, state: Float[Array, "group seq *shape"], y: Written
    ) -> tuple[Any, Written]:
        """Return the state before the first write, and that write.

        `state` and `y` are what `Store.start` returns.
        """

    def advance(
        self, store: Store, state: Any, y: Written, site: nnx.Module, index: Index
    ) -> tuple[Any, Read]:
        """Write y and read at a site; return the new state and what is read.

        `index` is the number of sublayers before the site.
        """


class Grouping(NamedTuple):
    """The division of the layers of a stack into groups.

    Attributes:
      layers: the layers of a group; the last group may have fewer.
      closed: whether a group is one whole block, from an empty running sum to a sealed row.
      open: whether a group may begin or end with a running sum that is not empty.
      rows: a function from the sublayers of a group to the rows that it takes from the bank, from
        `first_row` on: those that it seals, or 1 if the group is closed.
    """

    layers: int
    closed: bool
    open: bool
    rows: Callable[[int], int]


class At(NamedTuple):
    """The place of a read or a write in depth.

    Attributes:
      sublayer: the number of sublayers before it.
      group: the number of sublayers before the first one of its group.
    """

    sublayer: Index
    group: Index


class Unstacked(NamedTuple):
    """One sublayer: its core, the site that reads for it, and the writer of its output."""

    site: nnx.Module
    core: Callable[[Read], Written]
    writer: Writer


@dataclass(frozen=True)
class DepthWeights:
    """The mean weights of sources.

    Attributes:
      sites: the readers: sublayers ("A1", "F1", "A2", ...) or layers, and the unembedding ("U").
      sources: what is read: the embedding ("E"), and sublayers, blocks or layers.
      mean: the mean weight by site and source; None where the site does not see the source.
      signed: whether weights may be negative.
    """

    sites: list[str]
    sources: list[str]
    mean: list[list[float | None]]
    signed: bool


@runtime_checkable
class Banked(Protocol):
    """A mixer whose sites read rows of a bank.

    Attributes:
      num_rows: the number of rows of a bank, including the embedding's.
      keeps_sum: whether a running sum goes on from layer to layer.
    """

    num_rows: int
    keeps_sum: bool

    def grouping(self, first: int, period: int, repeat: int) -> Grouping:
        """Return the grouping of a stack.

        Args:
          first: the number of sublayers before the stack.
          period: the number of sublayers of its period.
          repeat: the number of repeats of the period.
        """

    def first_row(self, sublayer: Index) -> Index:
        """Return the row that is open when a group begins, the first of the group's own rows."""

    def scores(self, sites: Sequence[Sequence[nnx.Module]]) -> Float[Array, "sublayers *scored"]:
        """Return what the sites of all sublayers score with, in the order of depth.

        `sites` has for each stack the sites of its period, stacked over repeats.
        """

    def prior(self, scores: Float[Array, "sites *scored"], bank: Bank, count: Index) -> Any:
        """Run phase one: return what the first `count` rows contribute to each site of a group."""

    def prior_backward(
        self,
        scores: Float[Array, "sites *scored"],
        bank: Bank,
        count: Index,
        prior: Any,
        d_prior: Any,
        d_bank: Bank,
    ) -> tuple[Float[Array, "sites *scored"], Bank]:
        """Return the cotangents of `scores` and, added to `d_bank`, of the bank."""

    def read(
        self,
        store: Store,
        site: nnx.Module,
        score: Float[Array, "*scored"],
        prior: Any,
        rows: Bank | None,
        current: Row,
        at: At,
    ) -> tuple[Any, Bank | None, Row, Read]:
        """Run phase two at one site.

        `rows` are the rows of the group, and only the sealed ones count; None where the group is
        closed.

        Returns:
          The prior, the rows and the running sum as they are passed on, and what the core reads.
        """

    def seal(
        self, site: nnx.Module, rows: Bank | None, current: Row, at: At
    ) -> tuple[Bank | None, Row]:
        """Return rows and running sum after the sublayer's write, a complete row put in place.

        `site` is the site before the sublayer.
        """

    def final(self, store: Store, bank: Bank, final_site: nnx.Module) -> Read:
        """Return what the unembedding reads: the last mix, over all rows."""

    # For analysis.

    def unrolled(
        self,
        store: Store,
        state: Float[Array, "group seq *shape"],
        y: Written,
        sublayers: Sequence[Unstacked],
        final_site: nnx.Module,
    ) -> tuple[Read, Sequence[Float[Array, "_ batch seq heads"]]]:
        """Run all layers one by one, as the equations say: without bank, groups or kernels.

        Returns:
          What the unembedding reads, and for each site the weights over depth of the sources that
          it sees, oldest first; no weights where they do not depend on tokens.
        """

    def depth_weights(
        self, names: Sequence[str], means: Sequence[Float[np.ndarray, " _"]]
    ) -> DepthWeights:
        """Return the weights over depth, given sublayers' names and the means of the weights.

        `means` has for each site the means of the weights that `unrolled` returns.
        """


@runtime_checkable
class FewTokens(Protocol):
    """A banked mixer whose sites, for a few tokens, take their parameters out of stacks."""

    def merging(
        self, store: Store, scores: Float[Array, "repeat period *scored"], stack: nnx.List
    ) -> tuple[Array, ...]:
        """Return, for each sublayer of a stack's period, the parameters of its site in all repeats.

        The result is () if sites take their parameters as usual. Otherwise a site's `stacked` names
        its slice.
        """
