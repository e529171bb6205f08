"""The forward and backward passes of one stack of layers that reads rows of a bank.

A row of a bank contains one earlier output, or the sum of several. See `execution.banked`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

import sharding
from pallas_kernels import StackSlice
from pallas_kernels.platform import vary_alike
from rmt_tpu import config as cfg
from rmt_tpu.cores import Aux, Context
from rmt_tpu.cores.core import Index
from rmt_tpu.execution.banked_state import (
    BackwardCarry,
    ForwardCarry,
    Group,
    SavedStack,
    StackArrays,
)
from rmt_tpu.execution.banked_writes import (
    RunAndSaveCore,
    RunCore,
    UseSavedOutput,
    Write,
    write_saved,
)
from rmt_tpu.layers import stacks
from rmt_tpu.layers.kept import kept_by, recomputed, with_arguments, without_arguments
from rmt_tpu.layers.products import read_in_stacks, refer_to_stack
from rmt_tpu.residual.protocols import (
    Bank,
    BankMixer,
    DepthIndex,
    Grouping,
    ReversibleStore,
    Row,
    Store,
    Writer,
)


class StackRunner:
    """The forward and backward passes of a stack, or of a part of a stack.

    Loops carry complete stacks of arrays and change one slice at a time, which needs no copies.

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
        mixer: BankMixer,
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
        reversible = isinstance(store, ReversibleStore)
        # The names of what each layer keeps. This is None if the policy computes whole groups of
        # layers again.
        self.kept = kept_by(config.remat)
        self.saves_outputs = closed and self.kept is not None and reversible

    @property
    def end_row(self) -> int:
        """One more than the highest index of a bank row that any group of layers writes."""
        ends = [0]
        for start in range(0, self.repeat, self.group):
            count = min(self.group, self.repeat - start)
            first_row = self.mixer.first_row(self.first + start * self.period)
            ends.append(first_row + self.grouping.rows(count * self.period))
        return max(ends)

    def forward(
        self,
        arrays: StackArrays,
        carry: tuple[Bank, Row, Aux],
        context: Context,
        caches: tuple | None,
        *,
        keep: bool = False,
        first: Index | None = None,
    ) -> tuple[tuple[Bank, Row, Aux], tuple | None, SavedStack]:
        """Run all layers of the stack.

        Args:
          arrays: the arrays of the stack.
          carry: the bank, the running sum and the cores' summed scalars before the stack.
          context: the rule that determines which tokens may attend to which.
          caches: the caches of the stack's cores; None unless decoding.
          keep: whether to save what the backward pass needs.
          first: the number of sublayers before this part of the stack; None means the number given
            to `__init__`.

        Returns:
          The carry after all layers, the caches after all layers, and the saved arrays.
        """
        bank, current, aux = carry
        saved = SavedStack()
        if keep and self.mixer.keeps_sum:
            empty = lambda count: jax.lax.empty((count, *current.shape), current.dtype)
            if self.saves_outputs:
                saved = SavedStack(outputs=self._empty_outputs(current))
            elif self.kept is not None:
                saved = SavedStack(layer_sums=empty(self.repeat))
            elif self.grouping.open:
                saved = SavedStack(group_sums=empty(-(-self.repeat // self.group)))

        keeps_current = self.grouping.open or saved.outputs is not None
        running = ForwardCarry(bank, current if keeps_current else None, caches, saved, aux)
        if keep and self.kept is not None:
            empty_layers = self._empty_layers(arrays, context, running, first)
            running = running._replace(saved=saved._replace(layers=empty_layers))
        trees = {}

        def run(carry, start, layers):
            group = self._begin(arrays, carry.bank, start, layers, first)
            return self._group_forward(arrays, context, group, carry, keep, trees)

        running = self._over_groups(run, running, decoding=caches is not None)
        by_size = {size: jax.tree.unflatten(trees[size], running.saved.layers) for size in trees}
        saved = running.saved._replace(layers=by_size)
        ended = running.current if self.grouping.open else jnp.zeros_like(current)
        return (running.bank, ended, running.aux), running.caches, saved

    def _empty_outputs(self, residual: Row) -> tuple[Array, ...]:
        """Return uninitialised stacks for the outputs of a period's sublayers.

        Outputs are complete on each device, even if the mesh axis `key` shards the rows of the
        bank.
        """
        batch, seq = residual.shape[0] // sharding.axis_size("key"), residual.shape[1]
        rank, size = self.config.data_shape
        shape = lambda core: (self.repeat, batch, seq, core.writes.vectors(rank), size)
        dtype = self.store.compute_dtype
        return tuple(jax.lax.empty(shape(core), dtype) for core in self.cores)

    def _empty_layers(
        self, arrays: StackArrays, context: Context, carry: ForwardCarry, first: Index | None
    ) -> list[Array]:
        """Return uninitialised stacks for what the layers save.

        The loops write these stacks. If they returned what the layers save, XLA would copy it from
        the stacks of a group to those of all groups.
        """

        def saved_layer(carry: ForwardCarry, index: Index) -> list[Array]:
            group = self._begin(arrays, carry.bank, index, min(self.group, self.repeat), first)
            over_layers = self._enter(arrays, group, carry)
            run = self._layer_forward(arrays, context, group, keep=True)
            return jax.tree.leaves(run(over_layers, index)[1])

        return stacks.empty_for(saved_layer, self.repeat, carry, jnp.int32(0))

    def backward(
        self,
        arrays: StackArrays,
        saved: SavedStack,
        bank: Bank,
        carry: tuple[Bank, Row],
        context: Context,
        d_aux: Aux,
        *,
        first: Index | None = None,
    ) -> tuple[tuple[Bank, Row], StackArrays]:
        """Run all layers of the stack backwards.

        Args:
          arrays: the arrays of the stack.
          saved: what the forward pass saved.
          bank: the complete bank.
          carry: the cotangents of the bank and of the running sum after the stack.
          context: the rule that determines which tokens may attend to which.
          d_aux: the cotangents of the cores' summed scalars.
          first: the number of sublayers before this part of the stack; None means the number given
            to `__init__`.

        Returns:
          The cotangents of the bank and of the running sum before the stack; and the cotangents of
          the stack's arrays.
        """

        def run(carry, start, layers):
            group = self._begin(arrays, bank, start, layers, first)
            return self._group_backward(arrays, context, group, bank, saved, d_aux, carry)

        d_bank, d_current = carry
        ended = d_current if self.grouping.open else None
        summed = None if saved.outputs is None else jnp.zeros(bank.shape[1:], bank.dtype)
        d = BackwardCarry(d_bank, ended, stacks.empty_like(arrays), summed)
        d = self._over_groups(run, d, reverse=True)
        return (d.bank, jnp.zeros_like(d_current) if d.current is None else d.current), d.stack

    def _over_groups(
        self,
        run: Callable[[tuple, Index, int], tuple],
        carry: tuple,
        *,
        reverse: bool = False,
        decoding: bool = False,
    ) -> tuple:
        """Compute `carry = run(carry, first layer, number of layers)` for each group of layers.

        The last group is smaller if the number of layers is not a multiple of a group's.
        """
        full, left = divmod(self.repeat, self.group)
        if left and reverse:
            carry = run(carry, full * self.group, left)
        # A single group runs without a loop, so that its first row is a Python integer.
        if full == 1:
            carry = run(carry, 0, self.group)
        elif full:
            step = lambda carry, index: (run(carry, index * self.group, self.group), None)
            carry, _ = jax.lax.scan(step, vary_alike(carry), jnp.arange(full), reverse=reverse)
        if left and not reverse:
            start = full * self.group
            if decoding:
                # The barrier hides the layer's index from XLA. With a constant index, XLA would
                # copy the weights of all layers to a different layout, and would keep a copy of
                # this layer's weights through all decode steps of a program.
                start, carry = jax.lax.optimization_barrier((jnp.int32(start), carry))
            carry = run(carry, start, left)
        return carry

    def _begin(
        self, arrays: StackArrays, bank: Bank, start: Index, layers: int, first: Index | None
    ) -> Group:
        """Run phase one for a group of layers: read all earlier rows of the bank in one pass.

        `start` is the index of the group's first layer, `layers` the number of its layers, and
        `first` the number of sublayers before this part of the stack.
        """
        at = (self.first if first is None else first) + start * self.period
        first_row = self.mixer.first_row(at)
        scores = _sites(stacks.slice_range(arrays.scores, start, layers))
        prior = self.mixer.prior(scores, bank, first_row)
        count = self.grouping.rows(layers * self.period)
        rows = None if self.grouping.closed else stacks.slice_range(bank, first_row, count)
        return Group(start, layers, at, first_row, prior, rows)

    def _group_forward(
        self,
        arrays: StackArrays,
        context: Context,
        group: Group,
        carry: ForwardCarry,
        keep: bool,
        trees: dict[int, Any],
    ) -> ForwardCarry:
        """Run a group's layers, and return the new carry.

        `keep` is whether to save what the backward pass needs. The structure of what a layer saves
        is put into `trees`, under the number of layers of the group.
        """
        if carry.saved.group_sums is not None:
            index = group.start // self.group
            sums = stacks.update_at(carry.saved.group_sums, carry.current, index)
            carry = carry._replace(saved=carry.saved._replace(group_sums=sums))
        run_layer = self._layer_forward(arrays, context, group, keep)

        def run(over_layers, offset):
            (rows, current, caches, saved, aux), saved_layer = run_layer(over_layers, offset)
            if saved.layers is not None:
                leaves, trees[group.layers] = jax.tree.flatten(saved_layer)
                layers = stacks.update_at(saved.layers, leaves, group.start + offset)
                saved = saved._replace(layers=layers)
            return (rows, current, caches, saved, aux), None

        over_layers = self._enter(arrays, group, carry)
        over_layers, _ = jax.lax.scan(run, over_layers, jnp.arange(group.layers))
        rows, current, caches, saved, aux = over_layers
        bank = carry.bank
        bank = stacks.update_range(bank, current[None] if rows is None else rows, group.first_row)
        current = None if carry.current is None else current
        return ForwardCarry(bank, current, caches, saved, aux)

    def _enter(self, arrays: StackArrays, group: Group, carry: ForwardCarry) -> tuple:
        """Return the state before a group's first layer: its rows and most of the carry."""
        bank, current, caches, saved, aux = carry
        if current is None:
            current = jnp.zeros(bank.shape[1:], bank.dtype)
        return vary_alike((arrays, (group.rows, current, caches, saved, aux)))[1]

    def _layer_forward(
        self, arrays: StackArrays, context: Context, group: Group, keep: bool
    ) -> Callable[[tuple, Index], tuple[tuple, Any]]:
        """Return a function that runs a layer of a group.

        Its arguments are the state (see `_enter`) and the index of the layer in the group. It
        returns the new state, and what the layer saves besides outputs and sums.
        """

        def run_layer(carry, offset):
            rows, current, caches, saved, aux = carry
            index = group.start + offset
            if saved.layer_sums is not None:
                saved = saved._replace(
                    layer_sums=stacks.update_at(saved.layer_sums, current, index)
                )
            if keep and self.kept is not None and saved.outputs is None:
                layer = self._layer_of(functools.partial(RunCore, self.store), group)
                arguments = stacks.slice_at(arrays, index), group.prior, rows, current, aux
                others = offset, jnp.int32(group.at), context
                (_, rows, current, aux), pull_back = jax.vjp(
                    recomputed(layer, self.kept), *arguments, *others
                )
                # The backward pass has the arguments.
                return (rows, current, caches, saved, aux), without_arguments(pull_back)
            write = RunCore(self.store, context, caches, index)
            if saved.outputs is not None:
                write = RunAndSaveCore(self.store, context, saved.outputs, index, self.kept)
            in_stack = caches is not None and read_in_stacks(current)
            layer_arrays = arrays.of_layer(index, in_stack=in_stack)
            _, rows, current, aux = self._layer(
                write, layer_arrays, group.at, offset, group.prior, rows, current, aux
            )
            if saved.outputs is not None:
                saved = saved._replace(outputs=tuple(write.outputs))
                return (rows, current, caches, saved, aux), tuple(write.saved)
            caches = None if caches is None else tuple(write.new)
            return (rows, current, caches, saved, aux), None

        return run_layer

    def _layer_of(self, write_in: Callable[[Context], Write], group: Group) -> Callable:
        """Return `_layer` for a layer of a group, as a function of all arrays that it uses.

        The first five arguments are those with gradients: the layer's arrays, the result of phase
        one, the group's rows, the running sum, and the sums of the cores' scalars. Because the
        others are arguments, too, the forward pass need not save them.
        """

        def run(layer_arrays, prior, rows, current, aux, offset, at, context):
            # A Python integer stays one, so that slices at offsets computed from it are static.
            at = group.at if isinstance(group.at, int) else at
            write = write_in(context)
            return self._layer(write, layer_arrays, at, offset, prior, rows, current, aux)

        return run

    def _layer(
        self,
        write: Write,
        layer_arrays: StackArrays,
        at: Index,
        offset: Index,
        prior: Any,
        rows: Bank | None,
        current: Row,
        aux: Aux,
    ) -> tuple[Any, Bank | None, Row, Aux]:
        """Run one layer, and store each row of the bank that it completes.

        `at` is the number of sublayers before the group, and `offset` is the layer's index in the
        group. `prior` is the result of phase one, `rows` are the group's own rows, and `current` is
        the running sum.
        """
        layer = nnx.merge(self.graphdef, layer_arrays.layers)
        if layer_arrays.in_stack is not None:
            all_layers, index = layer_arrays.in_stack
            refer_to_stack(layer, nnx.merge(self.graphdef, all_layers), index)
        in_place = self.grouping.closed and layer_arrays.decode_params
        scores = layer_arrays.decode_params if in_place else layer_arrays.scores
        for k, sublayer in enumerate(layer):
            place = DepthIndex(at + offset * self.period + k, at)
            prior, rows, current, z = self.mixer.read(
                self.store, sublayer.site, scores[k], prior, rows, current, place
            )
            writer = _writer(layer, k, layer_arrays)
            current, aux = write(k, sublayer.core, z, place, current, writer, aux)
            rows, current = self.mixer.seal(sublayer.site, rows, current, place)
        return prior, rows, current, aux

    def _group_backward(
        self,
        arrays: StackArrays,
        context: Context,
        group: Group,
        bank: Bank,
        saved: SavedStack,
        d_aux: Aux,
        carry: BackwardCarry,
    ) -> BackwardCarry:
        """Run the backward passes of a group's layers, and of the read of earlier rows."""
        d_bank, d_current, gradients, summed = carry
        nothing, no_aux = jnp.zeros(bank.shape[1:], bank.dtype), jax.tree.map(jnp.zeros_like, d_aux)
        sums, first_sum = saved.layer_sums, group.start
        if sums is None and saved.outputs is None and self.mixer.keeps_sum:
            current = nothing
            if saved.group_sums is not None:
                current = stacks.slice_at(saved.group_sums, group.start // self.group)
            sums, first_sum = self._recompute_sums(arrays, context, group, current, no_aux), 0

        def undo_layer(carry, offset):
            d_prior, d_rows, d_current, gradients, summed = carry
            index = group.start + offset
            saved_layer = stacks.slice_at((saved.layers or {}).get(group.layers), index)
            write_in = functools.partial(RunCore, self.store)
            if saved.outputs is not None:
                write = UseSavedOutput(self.store, context, saved.outputs, saved_layer, index)
                write_in = lambda _: write
                current = summed = self._rebuild_sum(
                    arrays, saved.outputs, group.start, offset, summed
                )
            else:
                current = nothing if sums is None else stacks.slice_at(sums, first_sum + offset)
                # Without the barrier, XLA would slice the stack again for each use of the sum.
                current = jax.lax.optimization_barrier(current)

            arguments = [stacks.slice_at(arrays, index), group.prior, group.rows, current, no_aux]
            arguments += [offset, jnp.int32(group.at), context]
            if saved_layer is None or saved.outputs is not None:
                _, pull_back = jax.vjp(self._layer_of(write_in, group), *arguments)
            else:
                pull_back = with_arguments(saved_layer, arguments)
            gradient, *cotangents = pull_back((d_prior, d_rows, d_current, d_aux))[:4]
            return (*cotangents, stacks.update_at(gradients, gradient, index), summed), None

        d_rows, d_bank = self._own_rows(group, d_bank)
        # The only row that a closed group (a single block) writes is the running sum at its end.
        ends = (d_rows, nothing if d_current is None else d_current)
        if self.grouping.closed:
            ends = (None, d_rows[0])
        d_prior = self.mixer.initial_cotangent(group.prior, d_bank)
        over_layers = (d_prior, *ends, gradients, summed)
        over_layers = vary_alike((arrays, over_layers))[1]
        offsets = jnp.arange(group.layers)
        over_layers, _ = jax.lax.scan(undo_layer, over_layers, offsets, reverse=True)
        d_prior, d_rows, d_current, gradients, summed = over_layers
        if d_rows is not None and len(d_rows) == len(bank):
            d_bank = d_rows  # All rows of the bank belong to this group.
        d_bank, gradients = self._prior_backward(arrays, group, bank, d_prior, d_bank, gradients)
        return BackwardCarry(d_bank, d_current if self.grouping.open else None, gradients, summed)

    def _own_rows(self, group: Group, d_bank: Bank) -> tuple[Bank, Bank]:
        """Return the cotangents of the rows that a group writes, and of the whole bank.

        Without the barrier, XLA would read these rows from the bank's cotangent until the end of
        the group, and would copy the cotangent before the group changes it.
        """
        count = self.grouping.rows(group.layers * self.period)
        d_rows = stacks.slice_range(d_bank, group.first_row, count)
        return jax.lax.optimization_barrier((d_rows, d_bank))

    def _prior_backward(
        self,
        arrays: StackArrays,
        group: Group,
        bank: Bank,
        d_prior: Any,
        d_bank: Bank,
        gradients: StackArrays,
    ) -> tuple[Bank, StackArrays]:
        """Run the backward pass of phase one, which reads the rows before a group of layers.

        Returns:
          `d_bank` and `gradients`, with the cotangents of the bank and of the group's scores added.
        """
        start, layers = group.start, group.layers
        scores = stacks.slice_range(arrays.scores, start, layers)
        d_scores, d_bank = self.mixer.prior_backward(
            _sites(scores), bank, group.first_row, group.prior, d_prior, d_bank
        )
        d_scores = d_scores.reshape(scores.shape)
        d_scores += stacks.slice_range(gradients.scores, start, layers)
        d_scores = stacks.update_range(gradients.scores, d_scores, start)
        return d_bank, gradients._replace(scores=d_scores)

    def _rebuild_sum(
        self, arrays: StackArrays, outputs: tuple, start: Index, offset: Index, summed: Row
    ) -> Row:
        """Rebuild the running sum before a layer of a closed group from the saved outputs.

        The result overwrites `summed`, an array with an earlier sum. For the first layer of the
        group, where no site reads the sum, the result is `summed` itself.
        """

        def add(layer_index, current):
            index = start + layer_index
            layer_arrays = stacks.slice_at(arrays, index)
            layer = nnx.merge(self.graphdef, layer_arrays.layers)
            for k, stack in enumerate(outputs):
                place = DepthIndex(layer_index * self.period + k, 0)
                writer = _writer(layer, k, layer_arrays)
                current = write_saved(self.store, current, StackSlice(stack, index), writer, place)
            return current

        return jax.lax.fori_loop(0, offset, add, summed)

    def _recompute_sums(
        self, arrays: StackArrays, context: Context, group: Group, current: Row, aux: Aux
    ) -> Float[Array, "layers batch seq *shape"]:
        """Recompute the running sum before each layer of a group, by a second forward pass."""

        def run_layer(carry, offset):
            rows, current = carry
            layer_arrays = stacks.slice_at(arrays, group.start + offset)
            write = RunCore(self.store, context)
            _, rows, after, _ = self._layer(
                write, layer_arrays, group.at, offset, group.prior, rows, current, aux
            )
            return (rows, after), current

        carry = vary_alike((arrays, (group.rows, current)))[1]
        return jax.lax.scan(run_layer, carry, jnp.arange(group.layers))[1]


def _sites(scores: Float[Array, "layers period *scored"]) -> Float[Array, "sites *scored"]:
    """Merge the axis of layers and the axis of a layer's sublayers into one axis of sites."""
    return scores.reshape(-1, *scores.shape[2:])


def _writer(layer: nnx.List, k: int, layer_arrays: StackArrays) -> Writer:
    """Return the parameters that write sublayer k's output; they belong to the site after it."""
    return layer[k + 1].site.writer if k + 1 < len(layer) else layer_arrays.next_writers
