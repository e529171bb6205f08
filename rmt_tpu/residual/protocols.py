"""The protocols of stores and mixers, which schedules and mixers rely on.

A *store* defines a token's residual, and how outputs are written to it and inputs read from it. A
`ReversibleStore` can also undo a write. A `VectorStore` also offers the steps of a write and of a
read. A *mixer* is either `StateMixer`, if it passes a
state from site to site, or `BankMixer`, if its sites read the rows of a bank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Shaped

from pallas_kernels import StackSlice, Statistics
from rmt_tpu.layers.data_vectors import Read
from rmt_tpu.layers.stacks import Index

# A row is a residual of every token, such as the sum of the outputs of a few sublayers. A bank is a
# stack of rows.
Row = Float[Array, "batch seq *shape"]
Bank = Float[Array, "_ batch seq *shape"]
# The output of a core or of the embedding. If it has heads, it may cover other tokens than the
# residual on this device.
Written = Float[Array, "_ y_seq vectors size"]
# The parameters of the site after a core, with which the core's output is written.
Writer = Float[Array, "..."] | nnx.Param | None


@runtime_checkable
class Store(Protocol):
    """A kind of residual, and how it is written and read.

    Attributes:
      dtype: the dtype in which the residual is stored.
      compute_dtype: the dtype of data that is read from the residual.
    """

    dtype: DTypeLike
    compute_dtype: DTypeLike

    def start(
        self,
        tokens: Float[Array, "batch seq vectors size"],
        positions: Float[Array, "batch_or_1 seq vectors size"] | None,
    ) -> tuple[Float[Array, "group seq *shape"], Float[Array, "batch seq vectors size"]]:
        """Return the residual before the first write, and the data vectors to write first."""

    def hold(self, residual: Float[Array, "group seq *shape"]) -> Shaped[Array, "group seq *shape"]:
        """Return the residual in the dtype in which layers pass it on."""

    def write(
        self, residual: Float[Array, "group seq *shape"], y: Written, writer: Writer
    ) -> Float[Array, "group seq *shape"]:
        """Return the residual with y added to it."""

    def read(
        self, residual: Float[Array, "group seq *shape"], site: nnx.Module, dtype: DTypeLike
    ) -> Read:
        """Apply the site's norm to the residual, and return what the site reads."""

    def add_and_read(
        self, residual: Shaped[Array, "group seq *shape"], y: Written, site: nnx.Module
    ) -> tuple[Shaped[Array, "group seq *shape"], Read]:
        """Write y and then read at one site; the residual is in the store's dtype."""

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
        """Finish one site's attention over depth (phase two), and read the result.

        Only attention over depth with blocks of more than one sublayer calls this method.

        The site attends to the rows of complete blocks (the sealed rows), whose partial softmax is
        given, and, if `active`, to the running sum of the current block.

        Args:
          sealed: the softmax-weighted means of the sealed rows for all sites, this site's
            log-sum-exp over these rows, and this site's index.
          current: the running sum.
          query: the site's query, shaped like a row.
          site: the site.
          active: whether the running sum is a source.
          epsilon: the epsilon of the keys' norm.

        Returns:
          The means and the running sum for later use, as `pallas_kernels.depth_attention_merge`
          returns them, and the input of the next core.
        """


@runtime_checkable
class ReversibleStore(Store, Protocol):
    """A store that can rebuild the residual before a write from the residual after it.

    A residual is larger than a sublayer's output, so schedules keep the outputs instead.

    Its methods, and `add_and_read`, also accept a slice of a stack of sites in place of a site.
    """

    def reads_stacks(self, residual: Shaped[Array, "group seq *shape"]) -> bool:
        """Return whether `add_and_read` should receive a `StackSlice` as its site while decoding.

        Its kernel for a few tokens then reads the site's parameters directly from the stacks.
        """

    def add_and_read_with_statistics(
        self,
        residual: Shaped[Array, "group seq *shape"],
        y: StackSlice,
        site: nnx.Module | StackSlice,
    ) -> tuple[Shaped[Array, "group seq *shape"], Read, Statistics]:
        """Write and read as `add_and_read` does, and also return the norm's statistics."""

    def read_again(
        self,
        residual: Shaped[Array, "group seq *shape"],
        site: nnx.Module | StackSlice,
        statistics: Statistics,
        dtype: DTypeLike,
    ) -> Read:
        """Repeat the read that `add_and_read` did, from the residual that it returned.

        `statistics` are the norm's statistics from that read.
        """

    def undo(
        self,
        residual: Shaped[Array, "group seq *shape"],
        y: StackSlice,
        site: nnx.Module | StackSlice,
        z: Read,
        statistics: Statistics,
        cotangents: tuple[Float[Array, "group seq *shape"], Read],
        before: tuple[nnx.Module | StackSlice, Statistics] | None = None,
    ) -> tuple[
        Shaped[Array, "group seq *shape"],
        Float[Array, "group seq *shape"],
        Written,
        dict[str, Any],
        Read | None,
    ]:
        """Rebuild the residual before `add_and_read`, and return cotangents.

        Args:
          residual: the residual that `add_and_read` returned.
          y: the output that `add_and_read` wrote.
          site: the site of the write and the read.
          z: the result of the read.
          statistics: the norm's statistics.
          cotangents: the cotangents of the results of `add_and_read`: of the residual and of z.
          before: the preceding site and its norm's statistics, if the rebuilt residual should also
            be read for that site.

        Returns:
          The rebuilt residual; the cotangents of the rebuilt residual, of y and of the site's
          parameters; and the preceding site's read of the rebuilt residual (None without `before`).
        """

    def write_saved(
        self,
        residual: Float[Array, "group seq *shape"],
        y: StackSlice,
        writer: Array,
        *,
        empty: Array | bool,
        in_place: bool = True,
    ) -> Float[Array, "group seq *shape"]:
        """Return the residual with a kept output y written to it, as `write` does.

        If `empty` is true, the residual is taken as zeros. With `in_place`, the result may
        overwrite the residual. This method is not differentiable; see `write_saved_backward`.
        """

    def write_saved_backward(
        self, y: StackSlice, writer: Array, d_residual: Float[Array, "group seq *shape"]
    ) -> tuple[Written, Array]:
        """Return the cotangents of y and of the writer, given the cotangent of the residual."""


@runtime_checkable
class VectorStore(Store, Protocol):
    """The store of vectors, which also offers the steps of a write and of a read as methods.

    Mixers that run on vectors alone use these methods.
    """

    def write_term(self, y: Written, writer: Writer) -> Row:
        """Return the term that writing y adds to the residual."""

    def apply_norm(self, residual: Row, site: nnx.Module, dtype: DTypeLike) -> Row:
        """Return the normed residual, which is the first step of a read."""

    def project(self, x: Row, site: nnx.Module) -> Read:
        """Return the site's read of an already normed residual, the second step of a read."""

    def decode_params(self, queries: Float[Array, "repeat scored"], site: nnx.Module) -> Array:
        """Return a site's parameters for all repeats of its stack, for `decode_merge_and_read`.

        `site` is stacked over the repeats. `queries` are already multiplied by the gain of the
        keys' norm.
        """

    def decode_merge_and_read(
        self,
        sealed: tuple[
            Float[Array, "sites batch seq *shape"], Float[Array, "sites batch seq"], Index
        ],
        current: Row,
        parameters: StackSlice,
        site: nnx.Module,
        *,
        active: Array,
        epsilon: int | float,
    ) -> Read:
        """Mix and read as `merge_and_read` does, for the few tokens of a decode step.

        `parameters` is the site's slice of the result of `decode_params`. The kernel reads the
        slice directly from the stack. `sealed` holds the log-sum-exp of all sites.
        """


@runtime_checkable
class StateMixer(Protocol):
    """A mixer that passes a state from site to site."""

    def start(
        self, store: Store, state: Float[Array, "group seq *shape"], y: Written
    ) -> tuple[Any, Written]:
        """Return the state before the first write, and the output to write first.

        `state` and `y` are the results of `Store.start`.
        """

    def advance(
        self, store: Store, state: Any, y: Written, site: nnx.Module, index: Index
    ) -> tuple[Any, Read]:
        """Write y and read at a site; return the new state and the core's input.

        `index` is the number of sublayers before the site. A mixer with `remat="reversible"` must
        also accept a `StackSlice` of a stack of sites, and pass it on to the store.
        """


class Grouping(NamedTuple):
    """The division of a stack's layers into groups, which a banked schedule processes one by one.

    Attributes:
      layers: the number of layers per group; the last group may have fewer.
      closed: whether each group is exactly one block, from an empty running sum to a complete row.
      open: whether a group may start or end with a running sum that is not empty.
      rows: a function from a group's number of sublayers to the number of rows that the group takes
        from the bank, starting at `first_row`: the rows that it completes, or 1 if the group is
        closed.
    """

    layers: int
    closed: bool
    open: bool
    rows: Callable[[int], int]


class DepthIndex(NamedTuple):
    """The place in depth of a read or a write.

    Attributes:
      sublayer: the number of sublayers before the read or write.
      group: the number of sublayers before the start of the current group.
    """

    sublayer: Index
    group: Index


class SingleSublayer(NamedTuple):
    """One sublayer: its core, the site before it, and the writer for its output."""

    site: nnx.Module
    core: Callable[[Read], Written]
    writer: Writer


@dataclass(frozen=True)
class DepthWeights:
    """The weights that sites give to earlier outputs, averaged over tokens.

    Attributes:
      sites: the names of the readers: sublayers ("A1", "F1", "A2", ...) or layers, and the
        unembedding ("U").
      sources: the names of the outputs that are read: the embedding ("E"), and sublayers, blocks or
        layers.
      mean: the mean weight per site and source; None if the site does not see the source.
      signed: whether weights may be negative.
    """

    sites: list[str]
    sources: list[str]
    mean: list[list[float | None]]
    signed: bool


@runtime_checkable
class BankMixer(Protocol):
    """A mixer whose sites read the rows of a bank.

    A row holds the embedding or the output of one or more sublayers, and it is *sealed* when it is
    complete. Sites are processed in groups of layers. Phase one computes what the rows before a
    group contribute to all sites of the group. Phase two adds the group's own rows at each site.

    Attributes:
      num_rows: the number of rows in a bank, including the embedding's row.
      keeps_sum: whether a running sum is passed between layers.
    """

    num_rows: int
    keeps_sum: bool

    def grouping(self, first: int, period: int, repeat: int) -> Grouping:
        """Return the division of a stack of layers into groups.

        Args:
          first: the number of sublayers before the stack.
          period: the number of sublayers in the stack's repeated pattern.
          repeat: the number of times that the stack repeats its pattern.
        """

    def first_row(self, sublayer: Index) -> Index:
        """Return the first row that belongs to a group: the row in progress when the group starts.

        `sublayer` is the number of sublayers before the group.
        """

    def scores(self, sites: Sequence[Sequence[nnx.Module]]) -> Float[Array, "sublayers *scored"]:
        """Return each sublayer's parameters for scoring rows (such as its query), ordered by depth.

        `sites` holds, for each stack, the sites of its period, stacked over repeats.
        """

    def prior(self, scores: Float[Array, "sites *scored"], bank: Bank, count: Index) -> Any:
        """Run phase one: compute what the first `count` rows contribute to each site of a group."""

    def prior_backward(
        self,
        scores: Float[Array, "sites *scored"],
        bank: Bank,
        count: Index,
        prior: Any,
        d_prior: Any,
        d_bank: Bank,
    ) -> tuple[Float[Array, "sites *scored"], Bank]:
        """Return the cotangent of `scores`, and `d_bank` with the cotangent of the bank added."""

    def read(
        self,
        store: Store,
        site: nnx.Module,
        score: Float[Array, "*scored"] | StackSlice,
        prior: Any,
        rows: Bank | None,
        current: Row,
        at: DepthIndex,
    ) -> tuple[Any, Bank | None, Row, Read]:
        """Run phase two at one site: complete the mix with the group's own rows, and read it.

        Args:
          store: the residual's store.
          site: the site before the sublayer.
          score: the site's entry of `scores`, or the site's slice of the result of
            `StackedScores.decode_params`.
          prior: the result of phase one for the group.
          rows: the group's own rows (None for a closed group); rows that are not sealed yet are
            ignored.
          current: the running sum.
          at: the place of the read in depth.

        Returns:
          The prior, the rows and the running sum to pass on, and the core's input.
        """

    def seal(
        self, site: nnx.Module, rows: Bank | None, current: Row, at: DepthIndex
    ) -> tuple[Bank | None, Row]:
        """Return the rows and the running sum after a sublayer's write, sealing a complete row.

        `site` is the site before the sublayer.
        """

    def final(self, store: Store, bank: Bank, final_site: nnx.Module) -> Read:
        """Return the input of the unembedding: the final site's read of its mix of all rows."""

    # For analysis.

    def unrolled(
        self,
        store: Store,
        state: Float[Array, "group seq *shape"],
        y: Written,
        sublayers: Sequence[SingleSublayer],
        final_site: nnx.Module,
    ) -> tuple[Read, Sequence[Float[Array, "_ batch seq heads"]]]:
        """Run all layers one by one, directly as in the equations, without bank, groups or kernels.

        Returns:
          The input of the unembedding, and for each site the weights over depth of the sources that
          the site sees, oldest first. Mixers whose weights do not depend on tokens return no
          weights.
        """

    def depth_weights(
        self, names: Sequence[str], means: Sequence[Float[np.ndarray, " _"]]
    ) -> DepthWeights:
        """Return the weights over depth, given the sublayers' names and the mean weights.

        `means` holds, for each site, the means of the weights that `unrolled` returns.
        """


@runtime_checkable
class StackedScores(Protocol):
    """A banked mixer whose sites read their parameters from stacks when there are few tokens."""

    def decode_params(
        self, store: Store, scores: Float[Array, "repeat period *scored"], stack: nnx.List
    ) -> tuple[Array, ...]:
        """Return, for each sublayer of a stack's period, its site's parameters in all repeats.

        If the result is (), sites use their own parameters as usual. Otherwise `read` receives, in
        place of a site's score, the `StackSlice` with the site's parameters.
        """
