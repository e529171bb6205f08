"""What schedules and mixers ask of a store, and schedules of a mixer.

A *store* holds what was written; an `Invertible` one can take a write back, a `Stepwise` one gives
the steps of its writes and reads, and a `Merging` one reads what attention over depth mixes. A
*mixer* is `Carried`, by a state that goes from site to site, or `Banked`.
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

# A row is what a store holds of each token, and a bank has one after the other.
Row = Float[Array, "batch seq *shape"]
Bank = Float[Array, "_ batch seq *shape"]
# What a core or the embedding has produced; of heads, it may be of other tokens than the residual.
Written = Float[Array, "_ y_seq vectors size"]
# How it is written, of the site after it.
Writer = Float[Array, "..."] | nnx.Param | None


@runtime_checkable
class Store(Protocol):
    """What one token's residual is, and how it is written and read.

    Attributes:
      dtype: that it is held in.
      compute_dtype: of what is read.
    """

    dtype: DTypeLike
    compute_dtype: DTypeLike

    def start(
        self,
        tokens: Float[Array, "batch seq vectors size"],
        positions: Float[Array, "batch_or_1 seq vectors size"] | None,
    ) -> tuple[Float[Array, "group seq *shape"], Float[Array, "batch seq vectors size"]]:
        """The residual before the first write, and what that is to be."""

    def hold(self, residual: Float[Array, "group seq *shape"]) -> Shaped[Array, "group seq *shape"]:
        """The residual in the dtype it is carried in."""

    def write(
        self, residual: Float[Array, "group seq *shape"], y: Written, writer: Writer
    ) -> Float[Array, "group seq *shape"]:
        """The residual with y in it."""

    def read(
        self, residual: Float[Array, "group seq *shape"], site: nnx.Module, dtype: DTypeLike
    ) -> Read:
        """What a site reads of it, with its norm."""

    def add_and_read(
        self, residual: Shaped[Array, "group seq *shape"], y: Written, site: nnx.Module
    ) -> tuple[Shaped[Array, "group seq *shape"], Read]:
        """Both, at one site, of a residual that is held."""


@runtime_checkable
class Invertible(Store, Protocol):
    """A store whose residual before a write can be had from that after it."""

    def add_and_read_with_statistics(
        self, residual: Shaped[Array, "group seq *shape"], y: Slot, site: nnx.Module
    ) -> tuple[Shaped[Array, "group seq *shape"], Read, Statistics]:
        """`add_and_read`, and the norm's statistics."""

    def read_again(
        self,
        residual: Shaped[Array, "group seq *shape"],
        site: nnx.Module,
        statistics: Statistics,
        dtype: DTypeLike,
    ) -> Read:
        """What `add_and_read` has read of the residual that it left, from the norm's statistics."""

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
        """The residual that `add_and_read` was given, and cotangents of residual, y and site.

        And, given the site before with its norm's statistics, what that has read of the residual.
        """


@runtime_checkable
class Stepwise(Store, Protocol):
    """A store that gives each step of a write and of a read."""

    def written(self, y: Written, writer: Writer) -> Row:
        """What a write adds."""

    def norm_of(self, residual: Row, site: nnx.Module, dtype: DTypeLike) -> Row:
        """A read's first step."""

    def project(self, x: Row, site: nnx.Module) -> Read:
        """Its second."""


@runtime_checkable
class Keeping(Store, Protocol):
    """A store whose rows are larger than what is written to them, which a schedule then keeps."""

    def write_kept(
        self,
        residual: Float[Array, "group seq *shape"],
        y: Slot,
        writer: Array,
        *,
        empty: Array | bool,
        in_place: bool = True,
    ) -> Float[Array, "group seq *shape"]:
        """`write` of y where it is kept; a residual that is empty counts as zeros.

        `in_place` may write over the residual. It has no gradient.
        """

    def write_kept_backward(
        self, y: Slot, writer: Array, d_residual: Float[Array, "group seq *shape"]
    ) -> tuple[Written, Array]:
        """Cotangents of y and of the writer."""


@runtime_checkable
class Merging(Store, Protocol):
    """A store whose read takes in the second phase of attention over depth."""

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
        """What a site reads of the mix of sealed rows and, where it is active, the running sum.

        `sealed` is what all sites have of the rows, the logarithm of the softmax's sum of this one
        and its number; `query` is of a row's shape, `epsilon` of the keys' norm. Gives the mixes
        and the sum for later use too, as `pallas_kernels.depth_attention_merge`.
        """


@runtime_checkable
class MergingFew(Merging, Protocol):
    """One with kernels for a few tokens, which take a site's parameters out of a stack."""

    def merging(self, queries: Float[Array, "repeat scored"], site: nnx.Module) -> Array:
        """What `merge_few` takes of a site in all repeats.

        `site` is stacked over the repeats, `queries` have the gain of the keys' norm.
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
        """`merge_and_read` of a few tokens, by kernels that take the site's slice themselves.

        `sealed` has the sums of all sites; the site's `stacked` says which slice is its own.
        """


@runtime_checkable
class Carried(Protocol):
    """A mixer that carries a state from site to site."""

    def start(
        self, store: Store, state: Float[Array, "group seq *shape"], y: Written
    ) -> tuple[Any, Written]:
        """Its state before the first write, and that write, from what `Store.start` gives."""

    def advance(
        self, store: Store, state: Any, y: Written, site: nnx.Module, index: Index
    ) -> tuple[Any, Read]:
        """At a site with `index` sublayers before it: the state with y in it, and what is read."""


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


class Unstacked(NamedTuple):
    """One sublayer: `core` between the site that reads for it and the writer of what it gives."""

    site: nnx.Module
    core: Callable[[Read], Written]
    writer: Writer


@dataclass(frozen=True)
class DepthWeights:
    """Mean weights of sources.

    Attributes:
      sites: who reads: sublayers ("A1", "F1", "A2", ...) and the unembedding ("U"), or layers.
      sources: what is read: the embedding ("E"), and sublayers, blocks or layers.
      mean: by site and source; None where the site does not see the source.
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

    def prior(self, scores: Float[Array, "sites *scored"], bank: Bank, count: Index) -> Any:
        """Phase one: what the first `count` rows give to each site of a group."""

    def prior_backward(
        self,
        scores: Float[Array, "sites *scored"],
        bank: Bank,
        count: Index,
        prior: Any,
        d_prior: Any,
        d_bank: Bank,
    ) -> tuple[Float[Array, "sites *scored"], Bank]:
        """Cotangents of what `prior` was given, that of the bank added to `d_bank`."""

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
        """Phase two at one site: prior, rows and running sum as passed on, and what the core gets.

        `rows` are those of the group, of which the sealed ones count; None where it is closed.
        """

    def seal(
        self, site: nnx.Module, rows: Bank | None, current: Row, at: At
    ) -> tuple[Bank | None, Row]:
        """After the sublayer's write: rows and running sum; a row that is complete is put there.

        `site` is the one before the sublayer.
        """

    def final(self, store: Store, bank: Bank, final_site: nnx.Module) -> Read:
        """What the unembedding gets: the last mix, over all rows."""

    # For analysis.

    def unrolled(
        self,
        store: Store,
        state: Float[Array, "group seq *shape"],
        y: Written,
        sublayers: Sequence[Unstacked],
        final_site: nnx.Module,
    ) -> tuple[Read, Sequence[Float[Array, "_ batch seq heads"]]]:
        """All layers one by one, as the equations say: no bank, no groups, no kernels.

        Also the weights over depth of each site, of the sources that it sees, oldest first; none
        where weights are not of tokens.
        """

    def depth_weights(
        self, names: Sequence[str], means: Sequence[Float[np.ndarray, " _"]]
    ) -> DepthWeights:
        """The weights over depth, from the names of sublayers and the means of `unrolled`'s."""


@runtime_checkable
class FewTokens(Protocol):
    """A banked mixer whose sites, for a few tokens, take their parameters out of stacks."""

    def merging(
        self, store: Store, scores: Float[Array, "repeat period *scored"], stack: nnx.List
    ) -> tuple[Array, ...]:
        """Of each sublayer of a stack's period, in all repeats; () if sites take them as else.

        A site whose sublayer has some is told of its slice by its `stacked`.
        """
