"""The forward and backward passes of one stack of layers that reads rows of a bank.

`execution.banked` runs the stacks of a decoder one after the other, and explains what is kept.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

import sharding
from pallas_kernels import Slot
from pallas_kernels.platform import vary_alike
from rmt_tpu import config as cfg
from rmt_tpu.cores import Aux, Context
from rmt_tpu.cores.core import Index
from rmt_tpu.execution.banked_writes import AndKeep, Anew, FromKept, Write, write_kept
from rmt_tpu.layers import stacks
from rmt_tpu.residual.protocols import (
    At,
    Bank,
    Banked,
    Grouping,
    Keeping,
    Row,
    Store,
    Writer,
)


class Stacked(NamedTuple):
    """The arrays of a stack's layers, each with a leading axis over the stack's repeats.

    Attributes:
      layers: the parameters, as a pure dict.
      scores: the sites' parameters for scoring rows, [repeat, sublayers of the period, ...].
      after: the writer of each layer's last output, which belongs to the next site; None if a write
        needs no parameters.
      merging: the result of `FewTokens.merging` for each site; used in decoding only.
    """

    layers: Any
    scores: Array
    after: Array | None
    merging: tuple[Any, ...] = ()


class Kept(NamedTuple):
    """The arrays that a stack keeps for its backward pass; fields that are not needed are None.

    Attributes:
      layers: the running sum before each layer.
      groups: the running sum before each group, if it may be nonzero there.
      written: the output of each sublayer of a period in all repeats, kept instead of the sums.
      of_cores: what the cores' `pull_back` needs in addition to `written`, as a pair: for the
        layers of all full groups, and for the layers of the last partial group.
    """

    layers: Float[Array, "repeat batch seq *shape"] | None = None
    groups: Float[Array, "groups batch seq *shape"] | None = None
    written: tuple[Float[Array, "repeat own_batch own_seq _ size"], ...] | None = None
    of_cores: tuple[Any, Any] = (None, None)


def _of_layer(of_stack: Stacked, index: Index) -> Stacked:
    merging = tuple(stacks.Slice(x, index) for x in of_stack.merging)
    return stacks.at(of_stack._replace(merging=()), index)._replace(merging=merging)


class StackRunner:
    """The forward and backward passes of a stack, or of a part of a stack.

    Loops carry whole stacks of arrays and change one slice at a time, so that stacking needs no
    copies.

    Args:
      config, store, mixer: the decoder's config, store and mixer.
      graphdef: the graph of the stack's period.
      first: the number of sublayers before the stack.
      repeat: the number of times that the stack repeats its period.
      cores: the configs of the cores in a period.
    """

    def __init__(
        self,
        config: cfg.ModelConfig,
        store: Store,
        mixer: Banked,
        graphdef: nnx.GraphDef,
        first: int,
        repeat: int,
        cores: Sequence[cfg.Core],
    ):
        self.config, self.store, self.mixer = config, store, mixer
        self.graphdef, self.first, self.repeat = graphdef, first, repeat
        self.cores, self.period = cores, len(cores)
        self.grouping: Grouping = self.mixer.grouping(first, self.period, repeat)
        self.group = self.grouping.layers
        closed = self.mixer.keeps_sum and self.grouping.closed
        self.keeps_written = closed and config.remat == "full" and isinstance(store, Keeping)

    @property
    def end_row(self) -> int:
        """One more than the highest index of a bank row that any group takes."""
        ends = [0]
        for start in range(0, self.repeat, self.group):
            count = min(self.group, self.repeat - start)
            first_row = self.mixer.first_row(self.first + start * self.period)
            ends.append(first_row + self.grouping.rows(count * self.period))
        return max(ends)

    def forward(
        self,
        of_stack: Stacked,
        carry: tuple[Bank, Row, Aux],
        context: Context,
        caches: tuple | None,
        *,
        keep: bool = False,
        first: Index | None = None,
    ) -> tuple[tuple[Bank, Row, Aux], tuple | None, Kept]:
        """Run all layers of the stack.

        Args:
          of_stack: the arrays of the stack.
          carry: the bank, the running sum and the cores' summed scalars before the stack.
          context: the rule for which tokens may attend to which.
          caches: the caches of the stack's cores; None unless decoding.
          keep: whether to keep what the backward pass needs.
          first: the number of sublayers before this part of the stack; None means the number given
            to `__init__`.

        Returns:
          The carry after all layers, the caches after all layers, and the kept arrays.
        """
        bank, current, aux = carry
        kept = Kept()
        if keep and self.mixer.keeps_sum:
            empty = lambda count: jax.lax.empty((count, *current.shape), current.dtype)
            if self.keeps_written:
                kept = Kept(written=self._empty_written(current))
            elif self.config.remat == "full":
                kept = Kept(layers=empty(self.repeat))
            elif self.grouping.open:
                kept = Kept(groups=empty(-(-self.repeat // self.group)))

        def run(carry, start, layers, _):
            return self._group_forward(of_stack, context, carry, start, layers, first)

        goes_on = self.grouping.open or kept.written is not None
        carry = (bank, current if goes_on else None, caches, kept, aux)
        carry, of_cores = self._over_groups(run, carry, decoding=caches is not None)
        bank, ended, caches, kept, aux = carry
        kept = kept._replace(of_cores=of_cores)
        ended = ended if self.grouping.open else jnp.zeros_like(current)
        return (bank, ended, aux), caches, kept

    def _empty_written(self, residual: Row) -> tuple[Array, ...]:
        """Return uninitialised stacks for the outputs of a period's sublayers.

        A device stores complete outputs for its own tokens, even if the mesh shards the rows over
        `key`.
        """
        batch, seq = residual.shape[0] // sharding.axis_size("key"), residual.shape[1]
        rank, size = self.config.data_shape
        count = lambda port: sum(port.heads) + port.whole * rank
        shape = lambda core: (self.repeat, batch, seq, count(core.writes), size)
        dtype = self.store.compute_dtype
        return tuple(jax.lax.empty(shape(core), dtype) for core in self.cores)

    def backward(
        self,
        of_stack: Stacked,
        kept: Kept,
        bank: Bank,
        carry: tuple[Bank, Row],
        context: Context,
        d_aux: Aux,
        *,
        first: Index | None = None,
    ) -> tuple[tuple[Bank, Row], Stacked]:
        """Return the cotangents of the bank, the earlier running sum, and the parameters.

        Args:
          of_stack: the arrays of the stack.
          kept: what the forward pass kept.
          bank: the complete bank.
          carry: the cotangents of the bank and of the running sum after the stack.
          context: the rule for which tokens may attend to which.
          d_aux: the cotangents of the cores' summed scalars.
          first: the number of sublayers before this part of the stack; None means the number given
            to `__init__`.
        """

        def run(carry, start, layers, of_cores):
            given = (of_stack, kept, of_cores, bank, context, d_aux)
            return self._group_backward(*given, carry, start, layers, first), None

        d_bank, d_current = carry
        ended = d_current if self.grouping.open else None
        summed = None if kept.written is None else jnp.zeros(bank.shape[1:], bank.dtype)
        carry = (d_bank, ended, stacks.empty_like(of_stack), summed)
        carry, _ = self._over_groups(run, carry, kept.of_cores, reverse=True)
        d_bank, started, gradients, _ = carry
        return (d_bank, jnp.zeros_like(d_current) if started is None else started), gradients

    def _over_groups(
        self,
        run: Callable[[tuple, Index, int, Any], tuple[tuple, Any]],
        carry: tuple,
        given: tuple[Any, Any] = (None, None),
        *,
        reverse: bool = False,
        decoding: bool = False,
    ) -> tuple[tuple, tuple[Any, Any]]:
        """Compute `carry, out = run(carry, first layer, number of layers, given)` for each group.

        The last group may be smaller than the others. `given` and the result are pairs: the first
        entry is for all full groups (stacked if there are several), the second for the last partial
        group.
        """
        full, left = divmod(self.repeat, self.group)
        of_whole, of_last = given
        whole = last = None

        def scanned(carry, group):
            index, given = group
            return run(carry, index * self.group, self.group, given)

        if left and reverse:
            carry, last = run(carry, full * self.group, left, of_last)
        if full == 1:  # the first row is then static, and is 0 for a mixer without groups
            carry, whole = run(carry, 0, self.group, of_whole)
        else:
            groups = (jnp.arange(full), of_whole)
            carry = vary_alike((of_whole, carry))[1]
            carry, whole = jax.lax.scan(scanned, carry, groups, reverse=reverse)
        if left and not reverse:
            start = full * self.group
            if decoding:
                # The barrier hides the layer's index from XLA. With a constant index, XLA would
                # copy the weights of all layers to another layout. It would also keep a copy of
                # this layer's weights through all steps of a dispatch.
                start, carry = jax.lax.optimization_barrier((jnp.int32(start), carry))
            carry, last = run(carry, start, left, of_last)
        return carry, (whole, last)

    def _begin(
        self, of_stack: Stacked, bank: Bank, start: Index, layers: int, first: Index | None
    ) -> tuple[Index, Index, Any, Bank | None]:
        """Return what a group starts with: its first sublayer, first row, prior and rows.

        The prior is the result of phase one, and the rows are those that the group itself completes
        (None for a closed group).
        """
        at = (self.first if first is None else first) + start * self.period
        first_row = self.mixer.first_row(at)
        scores = _sites(stacks.run_of(of_stack.scores, start, layers))
        prior = self.mixer.prior(scores, bank, first_row)
        count = self.grouping.rows(layers * self.period)
        rows = None if self.grouping.closed else stacks.run_of(bank, first_row, count)
        return at, first_row, prior, rows

    def _group_forward(
        self,
        of_stack: Stacked,
        context: Context,
        carry: tuple[Bank, Row | None, tuple | None, Kept, Aux],
        start: Index,
        layers: int,
        first: Index | None,
    ) -> tuple[tuple[Bank, Row | None, tuple | None, Kept, Aux], Any]:
        bank, current, caches, kept, aux = carry
        at, first_row, prior, rows = self._begin(of_stack, bank, start, layers, first)
        if kept.groups is not None:
            kept = kept._replace(groups=stacks.put(kept.groups, current, start // self.group))
        if current is None:
            current = jnp.zeros(bank.shape[1:], bank.dtype)

        def run_layer(carry, offset):
            rows, current, caches, kept, aux = carry
            index = start + offset
            if kept.layers is not None:
                kept = kept._replace(layers=stacks.put(kept.layers, current, index))
            write = Anew(self.store, context, caches, index)
            if kept.written is not None:
                write = AndKeep(self.store, context, kept.written, index)
            given = (_of_layer(of_stack, index), at, offset, prior, rows, current, aux)
            _, rows, current, aux = self._layer(write, *given)
            if kept.written is not None:
                kept = kept._replace(written=tuple(write.written))
                return (rows, current, caches, kept, aux), tuple(write.saved)
            caches = None if caches is None else tuple(write.new)
            return (rows, current, caches, kept, aux), None

        goes_on = carry[1] is not None
        carry = vary_alike((of_stack, (rows, current, caches, kept, aux)))[1]
        carry, of_cores = jax.lax.scan(run_layer, carry, jnp.arange(layers))
        rows, current, caches, kept, aux = carry
        bank = stacks.put_run(bank, current[None] if rows is None else rows, first_row)
        return (bank, current if goes_on else None, caches, kept, aux), of_cores

    def _layer(
        self,
        write: Write,
        of_layer: Stacked,
        at: Index,
        offset: Index,
        prior: Any,
        rows: Bank | None,
        current: Row,
        aux: Aux,
    ) -> tuple[Any, Bank | None, Row, Aux]:
        """Run each sublayer of a layer: read, compute, write, and seal the row if it is complete.

        `at` is the number of sublayers before the group, and `offset` is the layer's index in the
        group.
        """
        layer = nnx.merge(self.graphdef, of_layer.layers)
        for one, stacked in zip(layer, of_layer.merging, strict=False):
            one.site.stacked = nnx.data(stacked)
        for k, one in enumerate(layer):
            place = At(at + offset * self.period + k, at)
            prior, rows, current, z = self.mixer.read(
                self.store, one.site, of_layer.scores[k], prior, rows, current, place
            )
            writer = _writer(layer, k, of_layer)
            current, aux = write(k, one.core, z, place, current, writer, aux)
            rows, current = self.mixer.seal(one.site, rows, current, place)
        return prior, rows, current, aux

    def _group_backward(
        self,
        of_stack: Stacked,
        kept: Kept,
        of_cores: Any,
        bank: Bank,
        context: Context,
        d_aux: Aux,
        carry: tuple[Bank, Row | None, Stacked, Row | None],
        start: Index,
        layers: int,
        first: Index | None,
    ) -> tuple[Bank, Row | None, Stacked, Row | None]:
        d_bank, d_current, gradients, summed = carry
        at, first_row, prior, rows = self._begin(of_stack, bank, start, layers, first)
        nothing, zeros = jnp.zeros(bank.shape[1:], bank.dtype), jax.tree.map(jnp.zeros_like, d_aux)
        sums, first_sum = kept.layers, start
        if sums is None and kept.written is None and self.mixer.keeps_sum:
            current = nothing
            if kept.groups is not None:
                current = stacks.at(kept.groups, start // self.group)
            given = (prior, rows, current, at, start, layers, zeros)
            sums = self._sums_again(of_stack, context, *given)
            first_sum = 0

        def undo_layer(carry, scanned):
            d_prior, d_rows, d_current, gradients, summed = carry
            offset, saved = scanned
            index = start + offset
            write = Anew(self.store, context)
            if kept.written is not None:
                write = FromKept(self.store, context, kept.written, saved, index)
                current = summed = self._sum_again(of_stack, kept.written, start, offset, summed)
            else:
                current = nothing if sums is None else stacks.at(sums, first_sum + offset)
                # Without the barrier, XLA would slice the stack again for each use.
                current = jax.lax.optimization_barrier(current)

            def forward(of_layer, prior, rows, current):
                return self._layer(write, of_layer, at, offset, prior, rows, current, zeros)

            _, pullback = jax.vjp(forward, stacks.at(of_stack, index), prior, rows, current)
            gradient, *cotangents = pullback((d_prior, d_rows, d_current, d_aux))
            return (*cotangents, stacks.put(gradients, gradient, index), summed), None

        d_rows = stacks.run_of(d_bank, first_row, self.grouping.rows(layers * self.period))
        # The only row of a closed group is the running sum at the group's end.
        ends = (d_rows, nothing if d_current is None else d_current)
        if self.grouping.closed:
            ends = (None, d_rows[0])
        carry = (stacks.empty_like(prior), *ends, gradients, summed)
        carry = vary_alike((of_stack, carry))[1]
        carry, _ = jax.lax.scan(undo_layer, carry, (jnp.arange(layers), of_cores), reverse=True)
        d_prior, d_rows, d_current, gradients, summed = carry
        if isinstance(first_row, int) and first_row == 0:
            d_bank = d_rows  # all rows belong to the group, which does not complete row 0
        scores = stacks.run_of(of_stack.scores, start, layers)
        d_scores, d_bank = self.mixer.prior_backward(
            _sites(scores), bank, first_row, prior, d_prior, d_bank
        )
        d_scores = d_scores.reshape(scores.shape) + stacks.run_of(gradients.scores, start, layers)
        gradients = gradients._replace(scores=stacks.put_run(gradients.scores, d_scores, start))
        return d_bank, d_current if self.grouping.open else None, gradients, summed

    def _sum_again(
        self, of_stack: Stacked, written: tuple, start: Index, offset: Index, summed: Row
    ) -> Row:
        """Rebuild the running sum before a layer of a closed group from the kept outputs.

        The result overwrites `summed`, an array with an earlier sum. For the group's first layer,
        where no site reads the sum, the result is `summed` itself.
        """

        def add(of_group, current):
            index = start + of_group
            of_layer = stacks.at(of_stack, index)
            layer = nnx.merge(self.graphdef, of_layer.layers)
            for k, stack in enumerate(written):
                place = At(of_group * self.period + k, 0)
                writer = _writer(layer, k, of_layer)
                current = write_kept(self.store, current, Slot(stack, index), writer, place)
            return current

        return jax.lax.fori_loop(0, offset, add, summed)

    def _sums_again(
        self,
        of_stack: Stacked,
        context: Context,
        prior: Any,
        rows: Bank | None,
        current: Row,
        at: Index,
        start: Index,
        layers: int,
        aux: Aux,
    ) -> Float[Array, "layers batch seq *shape"]:
        """Recompute the running sum before each layer of a group, by a second forward pass."""

        def run_layer(carry, offset):
            rows, current = carry
            given = (stacks.at(of_stack, start + offset), at, offset, prior, rows, current, aux)
            _, rows, after, _ = self._layer(Anew(self.store, context), *given)
            return (rows, after), current

        carry = vary_alike((of_stack, (rows, current)))[1]
        return jax.lax.scan(run_layer, carry, jnp.arange(layers))[1]


def _sites(scores: Float[Array, "layers period *scored"]) -> Float[Array, "sites *scored"]:
    """Merge the axes of layers and of sublayers per layer into a single axis of sites."""
    return scores.reshape(-1, *scores.shape[2:])


def _writer(layer: nnx.List, k: int, of_layer: Stacked) -> Writer:
    """Return the writer of sublayer k's output, which belongs to the site after the sublayer."""
    return layer[k + 1].site.writer if k + 1 < len(layer) else of_layer.after
