"""The protocols of stores and mixers: the methods that schedules call.

A *store* defines the format of a token's residual, and how the residual is written and read. A
`ReversibleStore` can also undo a write. A `StepwiseStore` also offers the steps of a write and of a
read. A *mixer* forms a sublayer's input from earlier outputs. A *site* is the place before a
sublayer, or before the unembedding, where the residual is written and read. A `StateMixer` passes a
state from site to site. With a `BankMixer`, sites read the rows of a *bank*, a stack of earlier
residuals.
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

# A bank is a stack of rows. A row has one residual per token, such as the sum of a few outputs.
Row = Float[Array, "batch seq *shape"]
Bank = Float[Array, "_ batch seq *shape"]
# In shapes, `seq` counts a device's own tokens. For an output with heads, `seq_or_gathered` counts
# the tokens of all devices along the mesh axis `tensor`; otherwise it equals `seq`. `key_batch` is
# the batch of all devices along the mesh axis `key`, which shards D_k.
#
# The output of a core (an attention or feed-forward sublayer) or of the embedding.
Written = Float[Array, "_ seq_or_gathered vectors size"]
# The parameters for writing the output of a core. They belong to the site after the core.
Writer = Float[Array, "..."] | nnx.Param | None


@runtime_checkable
class Store(Protocol):
    """A kind of residual, with the methods that write and read it.

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
    ) -> tuple[Float[Array, "key_batch seq *shape"], Float[Array, "batch seq vectors size"]]:
        """Return the residual before the first write, and the data vectors that are written first.

        `tokens` and `positions` are embeddings; `positions` is None if positions are not learned.
        """

    def hold(
        self, residual: Float[Array, "key_batch seq *shape"]
    ) -> Shaped[Array, "key_batch seq *shape"]:
        """Return the residual in the dtype (and padded width) that layers pass on."""

    def write(
        self, residual: Float[Array, "key_batch seq *shape"], y: Written, writer: Writer
    ) -> Float[Array, "key_batch seq *shape"]:
        """Return the residual with the output y added to it.

        `writer` has the parameters of the write.
        """

    def read(
        self, residual: Float[Array, "key_batch seq *shape"], site: nnx.Module, dtype: DTypeLike
    ) -> Read:
        """Apply the site's norm to the residual, and return the input of the site's sublayer."""

    def read_groups(
        self,
        residuals: Sequence[Float[Array, "key_batch seq *shape"]],
        site: nnx.Module,
        dtype: DTypeLike,
    ) -> Read:
        """Return the input of attention, with queries, keys and values from different residuals.

        `residuals` has one residual for each of these groups of heads. The site's norm is applied
        to each residual. The core must read heads only.
        """

    def add_and_read(
        self, residual: Shaped[Array, "key_batch seq *shape"], y: Written, site: nnx.Module
    ) -> tuple[Shaped[Array, "key_batch seq *shape"], Read]:
        """Write the output y at one site, and then read the new residual there.

        Both residuals are in the dtype that `hold` returns.
        """

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

        The site attends to the sealed rows (the rows of complete blocks), whose partial
        softmax is given. If `active`, it also attends to the running sum of the current block.

        Args:
          sealed: three values: for all sites, the softmax-weighted means of the sealed rows; this
            site's log-sum-exp over these rows; and this site's index.
          current: the running sum.
          query: the site's query, shaped like a row.
          site: the site with the parameters of the norm and of the read.
          active: whether the site attends to the running sum.
          epsilon: the epsilon of the norm that is applied to the keys of attention over depth.

        Returns:
          The means and the running sum, which later sites must use in place of the arguments; and
          the input of the next core.
        """


@runtime_checkable
class ReversibleStore(Store, Protocol):
    """A store that can rebuild the residual before a write from the residual after it.

    The residual is larger than a sublayer's output, so schedules keep the outputs and rebuild the
    residuals. The methods here, and `add_and_read`, also accept a slice of a stack of sites in
    place of a site. Kernels then read the site's parameters directly from the stack.
    """

    def reads_stacks(self, residual: Shaped[Array, "key_batch seq *shape"]) -> bool:
        """Return whether `add_and_read` should receive a `StackSlice` as its site while decoding.

        A kernel for few tokens then reads the site's parameters directly from the stacks.
        """

    def add_and_read_with_statistics(
        self,
        residual: Shaped[Array, "key_batch seq *shape"],
        y: StackSlice,
        site: nnx.Module | StackSlice,
    ) -> tuple[Shaped[Array, "key_batch seq *shape"], Read, Statistics]:
        """Write y and read as `add_and_read` does, and also return the statistics of the norm."""

    def read_again(
        self,
        residual: Shaped[Array, "key_batch seq *shape"],
        site: nnx.Module | StackSlice,
        statistics: Statistics,
        dtype: DTypeLike,
    ) -> Read:
        """Repeat the read that `add_and_read` did, from the residual that it returned.

        `statistics` are the norm's statistics from that read.
        """

    def undo(
        self,
        residual: Shaped[Array, "key_batch seq *shape"],
        y: StackSlice,
        site: nnx.Module | StackSlice,
        z: Read,
        statistics: Statistics,
        cotangents: tuple[Float[Array, "key_batch seq *shape"], Read],
        before: tuple[nnx.Module | StackSlice, Statistics] | None = None,
    ) -> tuple[
        Shaped[Array, "key_batch seq *shape"],
        Float[Array, "key_batch seq *shape"],
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
          statistics: the statistics of the norm in the read.
          cotangents: the cotangents of the results of `add_and_read`: of the residual and of z.
          before: the preceding site, and the statistics of the norm in its read. If given, the
            rebuilt residual is also read for the preceding site.

        Returns:
          The rebuilt residual; the cotangents of the rebuilt residual, of y and of the site's
          parameters; and the preceding site's read of the rebuilt residual (None without `before`).
        """

    def write_saved(
        self,
        residual: Float[Array, "key_batch seq *shape"],
        y: StackSlice,
        writer: Array,
        *,
        empty: Array | bool,
        in_place: bool = True,
    ) -> Float[Array, "key_batch seq *shape"]:
        """Return the residual with a saved output y written to it.

        The result is the same as that of `write`. If `empty` is true, the residual counts as zeros,
        regardless of its entries. With `in_place`, the result may overwrite the residual in memory.
        JAX cannot differentiate this method; see `write_saved_backward`.
        """

    def write_saved_backward(
        self, y: StackSlice, writer: Array, d_residual: Float[Array, "key_batch seq *shape"]
    ) -> tuple[Written, Array]:
        """Return the cotangents of y and of the writer.

        `d_residual` is the cotangent of the result of `write_saved`.
        """


@runtime_checkable
class StepwiseStore(Store, Protocol):
    """The store of vectors, which also offers the steps of a write and of a read as methods.

    Mixers that run on vectors alone use these methods.
    """

    def write_term(self, y: Written, writer: Writer) -> Row:
        """Return the term that a write of the output y adds to the residual."""

    def apply_norm(self, residual: Row, site: nnx.Module, dtype: DTypeLike) -> Row:
        """Return the residual after the site's norm, the first step of a read."""

    def project(self, x: Row, site: nnx.Module) -> Read:
        """Return the input of the site's sublayer, the last step of a read.

        x is the result of `apply_norm`.
        """

    def decode_params(self, queries: Float[Array, "repeat scored"], site: nnx.Module) -> Array:
        """Return the parameters that a site needs in `decode_merge_and_read`, for all layers.

        `site` is stacked over the layers. `queries` has the site's query in each layer, already
        multiplied by the gain of the norm that is applied to keys.
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

        `parameters` is the site's slice of the result of `decode_params`, which the kernel reads
        directly from the stack. `sealed` has the log-sum-exp of every site, not only of this one.
        """


@runtime_checkable
class StateMixer(Protocol):
    """A mixer that passes a state, such as the residual, from site to site.

    A mixer forms a sublayer's input from earlier outputs. A site is the place before a sublayer.
    """

    def start(
        self, store: Store, state: Float[Array, "key_batch seq *shape"], y: Written
    ) -> tuple[Any, Written]:
        """Return the mixer's state before the first write, and the output that is written first.

        `state` and `y` are the results of `Store.start`.
        """

    def advance(
        self, store: Store, state: Any, y: Written, site: nnx.Module, index: Index
    ) -> tuple[Any, Read]:
        """Write the preceding output y at a site, and read the input of the site's core.

        Args:
          store: the residual's store.
          state: the mixer's state.
          y: the output of the preceding core, or the embedding.
          site: the site. A mixer of the reversible schedule must also accept a `StackSlice`
            of a stack of sites, and pass the slice on to the store.
          index: the number of sublayers before the site.

        Returns:
          The new state, and the input of the site's core.
        """


class Grouping(NamedTuple):
    """The division of a stack's layers into groups, which the schedule for banks runs one by one.

    Attributes:
      layers: the number of layers per group; the last group may have fewer layers.
      closed: whether each group is exactly one block. Its running sum of outputs then starts empty
        and ends as a complete row.
      open: whether a group may start or end with a running sum that is not empty.
      rows: a function that returns how many rows of the bank a group writes, given the group's
        number of sublayers. The rows start at `first_row`. A closed group writes one row.
    """

    layers: int
    closed: bool
    open: bool
    rows: Callable[[int], int]


class DepthIndex(NamedTuple):
    """The position in depth of a read or a write of the residual.

    Attributes:
      sublayer: the number of sublayers before the read or write.
      group: the number of sublayers before the start of the current group.
    """

    sublayer: Index
    group: Index


class SingleSublayer(NamedTuple):
    """One sublayer of a model whose layers are not stacked.

    Attributes:
      site: the parameters for reading the sublayer's input.
      core: the function that the sublayer computes.
      writer: the parameters for writing the sublayer's output.
    """

    site: nnx.Module
    core: Callable[[Read], Written]
    writer: Writer


@dataclass(frozen=True)
class DepthWeights:
    """The weights of earlier outputs in each sublayer's input, averaged over tokens.

    Attributes:
      sites: the names of the readers: sublayers ("A1", "F1", "A2", ...) or layers, and the
        unembedding ("U").
      sources: the names of the outputs that are read: the embedding ("E"), and sublayers, blocks or
        layers.
      mean: the mean weight of each output for each reader; None if the reader cannot read the
        output.
      signed: whether weights may be negative.
    """

    sites: list[str]
    sources: list[str]
    mean: list[list[float | None]]
    signed: bool


@runtime_checkable
class BankMixer(Protocol):
    """A mixer whose sites read the rows of a bank.

    A bank is a stack of rows. A row contains the embedding or the output of one or more sublayers,
    and is *sealed* when it is complete. Layers run in groups. Phase one computes what the rows
    before a group contribute to the inputs of all the group's sites. Phase two adds, at each site,
    what the group's own rows contribute.

    Attributes:
      num_rows: the number of rows in a bank, including the embedding's row.
      keeps_sum: whether layers pass on a running sum of outputs, which is not a row yet.
      embedding_row: the index of the row that contains the embedding: the first or the last row.
    """

    num_rows: int
    keeps_sum: bool
    embedding_row: int

    def embedding(self, row: Row) -> Row:
        """Return the embedding in the form that sites read."""

    def grouping(self, first: int, period: int, repeat: int) -> Grouping:
        """Return the division of a stack of layers into groups.

        Args:
          first: the number of sublayers before the stack.
          period: the number of sublayers in the stack's repeated pattern.
          repeat: the number of times that the stack repeats its pattern.
        """

    def row(self, sublayer: Index) -> Index:
        """Return the index of the bank row to which the output of a sublayer belongs.

        `sublayer` is the number of sublayers before it.
        """

    def first_row(self, sublayer: Index) -> Index:
        """Return the index of the first of the rows that phase two reads in a group of layers.

        `sublayer` is the number of sublayers before the group.
        """

    def scores(self, sites: Sequence[Sequence[nnx.Module]]) -> Float[Array, "sublayers *scored"]:
        """Return each site's parameters for scoring rows, such as its query, ordered by depth.

        `sites` has, for each stack of layers, the sites of the stack's period (its repeated
        pattern of sublayers), stacked over repeats.
        """

    def prior(self, scores: Float[Array, "sites *scored"], bank: Bank, count: Index) -> Any:
        """Run phase one: compute what the first `count` rows contribute to each site of a group.

        `scores` are the scoring parameters of the group's sites.
        """

    def initial_cotangent(self, prior: Any, d_bank: Bank) -> Any:
        """Return the initial cotangent of the result of phase one, before any site's backward pass.

        Arrays to which every site adds must be zeros. Arrays in which exactly one site writes each
        slice may be uninitialised. If phase one returns the bank itself, this is `d_bank`, the
        cotangent of the bank from the groups after this one; `prior_backward` then returns what the
        sites have added to it.
        """

    def prior_backward(
        self,
        scores: Float[Array, "sites *scored"],
        bank: Bank,
        count: Index,
        prior: Any,
        d_prior: Any,
        d_bank: Bank,
    ) -> tuple[Float[Array, "sites *scored"], Bank]:
        """Run the backward pass of phase one (`prior`), from the cotangent `d_prior` of its result.

        Returns:
          The cotangent of `scores`; and `d_bank`, an earlier cotangent of the bank, with the
          cotangent from phase one added.
        """

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
        """Run phase two at one site: mix in the group's own rows, and read the result.

        Args:
          store: the residual's store.
          site: the site before the sublayer.
          score: the site's entry of `scores`, or the site's slice of the result of
            `StackedScores.decode_params`.
          prior: the result of phase one for the group.
          rows: the group's own rows (None for a closed group), of which only sealed rows count.
          current: the running sum of outputs that is not a row yet.
          at: the position of the read in depth.

        Returns:
          The prior, the rows and the running sum to pass on, and the core's input.
        """

    def seal(
        self, site: nnx.Module, rows: Bank | None, current: Row, at: DepthIndex
    ) -> tuple[Bank | None, Row]:
        """Store the running sum as a row if the row is complete, after a sublayer's write.

        Args:
          site: the site before the sublayer.
          rows: the group's own rows; None for a closed group.
          current: the running sum after the write.
          at: the position of the sublayer in depth.

        Returns:
          The rows and the running sum for the next sublayer.
        """

    def final(self, store: Store, bank: Bank, final_site: nnx.Module) -> Read:
        """Return the input of the unembedding, which the final site computes from all rows."""

    # The methods below are used for analysis only, not by schedules.

    def unrolled(
        self,
        store: Store,
        state: Float[Array, "key_batch seq *shape"],
        y: Written,
        sublayers: Sequence[SingleSublayer],
        final_site: nnx.Module,
    ) -> tuple[Read, Sequence[Float[Array, "_ batch seq heads"]]]:
        """Run all layers one by one, as in the equations, without a bank, groups or kernels.

        Returns:
          The input of the unembedding; and for each site the weights of the earlier outputs that
          the site reads, oldest output first. Mixers whose weights do not depend on tokens return
          no weights.
        """

    def depth_weights(
        self, names: Sequence[str], means: Sequence[Float[np.ndarray, " _"]]
    ) -> DepthWeights:
        """Return the mean weight that each sublayer's input gives to each earlier output.

        Args:
          names: the names of the sublayers.
          means: for each site, the means over tokens of the weights that `unrolled` returns.
        """


@runtime_checkable
class StackedScores(Protocol):
    """A `BankMixer` whose sites can read their parameters from stacked arrays in decode steps."""

    def decode_params(
        self, store: Store, scores: Float[Array, "repeat period *scored"], stack: nnx.List
    ) -> tuple[Array, ...]:
        """Return the parameters for `read` in decode steps, for each site in a stack's period.

        The parameters of a site are stacked over layers, and `read` receives a `StackSlice` of
        them. If the result is (), `read` receives a site's entry of `scores`, as in training.
        """
