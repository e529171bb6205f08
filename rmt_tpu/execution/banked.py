"""The layers of a mixer that reads rows of a bank: the bank is its own checkpoint.

Rows are written once, so what a layer saw is still there when the backward pass comes to it. The
forward pass keeps the bank and the running sum before each layer (with `remat="blocks"` the bank
and the sum before each group), and the backward pass walks down the layers, computing each again.

Layers, each a period of its stack's cores, go in *groups*. Before a group, one pass over the rows
that are there gives all its sites their share of them (phase one); what the group itself adds is
read at each site (phase two). The gradients of a group's sites are so added to those of the bank
once. The running sum is carried from group to group: how often the bank is read, and how often a
row is sealed, are independent.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pallas_kernels.call import LANES
from rmt_tpu import config as cfg
from rmt_tpu.cores import Aux, Context
from rmt_tpu.cores.core import Index
from rmt_tpu.execution.layer import Model, no_aux, run_core
from rmt_tpu.layers import stacks
from rmt_tpu.layers.data_vectors import Read
from rmt_tpu.residual.protocols import At, Bank, Banked, FewTokens, Grouping, Row, Store
from rmt_tpu.residual.whole_tiles import as_they_are


class Stacked(NamedTuple):
    """What each layer of a stack has, stacked over its repeats.

    Attributes:
      layers: parameters, as a pure dict.
      scores: what its sites score with, [repeat, sublayers of the period, ...].
      after: how its last sublayer's output is written; None where that needs nothing.
      merging: of each of its sites, where decoding, what `FewTokens.merging` gives.
    """

    layers: Any
    scores: Array
    after: Array | None
    merging: tuple[Any, ...] = ()


class Kept(NamedTuple):
    """Running sums of a stack that the backward pass starts from; None where it needs none.

    Attributes:
      layers: before each layer.
      groups: before each group, where it may not be empty.
    """

    layers: Float[Array, "repeat batch seq *shape"] | None = None
    groups: Float[Array, "groups batch seq *shape"] | None = None


def run_layers(
    decoder: Model,
    state: Array,
    y: Float[Array, "batch seq vectors size"],
    context: Context,
    caches: tuple | None,
) -> tuple[Read, tuple | None, Aux]:
    """All layers of a decoder, and the read for the unembedding: as `scanned.run_layers`."""
    store, mixer = decoder.store, decoder.mixer
    few = caches is not None and state.shape[1] < LANES
    if few:
        store, mixer = as_they_are(store), as_they_are(mixer)
    runs, of_stacks, before = [], [], 0
    scores = mixer.scores([[one.site for one in stack] for stack in decoder.stacks])
    writers = [stack[0].site.writer for stack in decoder.stacks]
    for number, (stack, of_stack) in enumerate(
        zip(decoder.stacks, decoder.config.stacks, strict=True)
    ):
        last = number + 1 == len(writers)
        next_writer = decoder.final_site.writer if last else _first(writers[number + 1])
        layers = nnx.to_pure_dict(nnx.state(stack, nnx.Param))
        of_layers = scores[before : before + of_stack.num_sublayers]
        of_layers = of_layers.reshape(of_stack.repeat, -1, *scores.shape[1:])
        of_stacks.append(Stacked(layers, of_layers, _after(writers[number], next_writer)))
        runs.append(
            Run(
                decoder.config,
                store,
                mixer,
                nnx.graphdef(stack),
                before,
                of_stack.repeat,
                len(stack),
            )
        )
        before += of_stack.num_sublayers
    first = store.write(store.hold(state), y, _first(writers[0]))
    if few and isinstance(mixer, FewTokens):
        of_stacks = [
            one._replace(merging=mixer.merging(store, one.scores, stack))
            for stack, one in zip(decoder.stacks, of_stacks, strict=True)
        ]
    num_rows = max([mixer.num_rows, *(run.end_row for run in runs)])

    def forward(of_stacks, first, context, caches, keep):
        bank = jax.lax.empty((num_rows, *first.shape), first.dtype)
        aux = no_aux(decoder.config, y.dtype)
        carry, new, kept = (stacks.put(bank, first, 0), jnp.zeros_like(first), aux), [], []
        for run, of_stack, of_cores in zip(runs, of_stacks, caches, strict=True):
            carry, of_cores, sums = run.forward(of_stack, carry, context, of_cores, keep=keep)
            new.append(of_cores)
            kept.append(sums)
        bank, _, aux = carry
        return (bank, aux), tuple(new), kept

    if caches is not None:
        (bank, aux), caches, _ = forward(of_stacks, first, context, caches, False)
        return mixer.final(store, bank, decoder.final_site), caches, aux
    none = [None] * len(runs)

    @jax.custom_vjp
    def differentiable(of_stacks, first, context):
        return forward(of_stacks, first, context, none, False)[0]

    def save(of_stacks, first, context):
        (bank, aux), _, kept = forward(of_stacks, first, context, none, True)
        return (bank, aux), (of_stacks, context, bank, kept)

    def backward(saved, cotangents):
        (of_stacks, context, bank, kept), (d_bank, d_aux) = saved, cotangents
        carry, gradients = (d_bank, jnp.zeros(bank.shape[1:], bank.dtype)), []
        for run, *of_stack in reversed(list(zip(runs, of_stacks, kept, strict=True))):
            carry, gradient = run.backward(*of_stack, bank, carry, context, d_aux)
            gradients.insert(0, gradient)
        return gradients, carry[0][0], None

    differentiable.defvjp(save, backward)
    bank, aux = differentiable(of_stacks, first, context)
    return mixer.final(store, bank, decoder.final_site), None, aux


def _first(writers: nnx.Param | None) -> Array | None:
    return None if writers is None else writers[...][0]


def _after(writers: nnx.Param | None, next_writer: nnx.Param | Array | None) -> Array | None:
    """The writer of each layer's last output is the one of the site that follows."""
    if next_writer is None:
        return None
    return jnp.concatenate([writers[...][1:], next_writer[...][None]])


def _of_layer(of_stack: Stacked, index: Index) -> Stacked:
    merging = tuple(stacks.Slice(x, index) for x in of_stack.merging)
    return stacks.at(of_stack._replace(merging=()), index)._replace(merging=merging)


class Run:
    """Both passes of a stack, or of a part of one.

    Loops carry whole stacks of arrays and change a slice: nothing is copied to stack it.

    Args:
      config, store, mixer: of the decoder.
      graphdef: of the stack.
      first: how many sublayers are before it.
      repeat: of its period.
      period: sublayers in it.
    """

    def __init__(
        self,
        config: cfg.ModelConfig,
        store: Store,
        mixer: Banked,
        graphdef: nnx.GraphDef,
        first: int,
        repeat: int,
        period: int,
    ):
        self.config, self.store, self.mixer = config, store, mixer
        self.graphdef, self.first, self.repeat, self.period = graphdef, first, repeat, period
        self.grouping: Grouping = self.mixer.grouping(first, period, repeat)
        self.group = self.grouping.layers

    @property
    def end_row(self) -> int:
        """Behind the last row that a group takes from the bank."""
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
        keep: bool,
        first: Index | None = None,
    ) -> tuple[tuple[Bank, Row, Aux], tuple | None, Kept]:
        """Bank, running sum and sums of scalars after all layers, their caches, and what is kept.

        `first` is how many sublayers are before it, if it is not as many as in `__init__`.
        """
        bank, current, aux = carry
        kept = Kept()
        if keep and self.mixer.keeps_sum:
            empty = lambda count: jax.lax.empty((count, *current.shape), current.dtype)
            if self.config.remat == "full":
                kept = Kept(layers=empty(self.repeat))
            elif self.grouping.open:
                kept = Kept(groups=empty(-(-self.repeat // self.group)))

        def run(carry, start, layers):
            return self._group_forward(of_stack, context, carry, start, layers, first)

        started = current if self.grouping.open else None
        carry = (bank, started, caches, kept, aux)
        bank, ended, caches, kept, aux = self._over_groups(run, carry, decoding=caches is not None)
        return (bank, jnp.zeros_like(current) if ended is None else ended, aux), caches, kept

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
        """Cotangents of the bank and of the running sum before, and those of the parameters."""

        def run(carry, start, layers):
            given = (of_stack, kept, bank, context, d_aux)
            return self._group_backward(*given, carry, start, layers, first)

        d_bank, d_current = carry
        ended = d_current if self.grouping.open else None
        carry = (d_bank, ended, stacks.empty_like(of_stack))
        d_bank, started, gradients = self._over_groups(run, carry, reverse=True)
        return (d_bank, jnp.zeros_like(d_current) if started is None else started), gradients

    def _over_groups(
        self,
        run: Callable[[tuple, Index, int], tuple],
        carry: tuple,
        *,
        reverse: bool = False,
        decoding: bool = False,
    ) -> tuple:
        """`carry = run(carry, first layer, layers)` for each group; the last may be smaller."""
        full, left = divmod(self.repeat, self.group)

        def scanned(carry, index):
            return run(carry, index * self.group, self.group), None

        if left and reverse:
            carry = run(carry, full * self.group, left)
        if full == 1:  # the first row is then known, and is 0 for a mixer without groups
            carry = run(carry, 0, self.group)
        else:
            carry, _ = jax.lax.scan(scanned, carry, jnp.arange(full), reverse=reverse)
        if left and not reverse:
            start = full * self.group
            if decoding:
                # Of a layer that it knows XLA would lay out the weights of all layers anew, and of
                # one that is the same in all steps of a dispatch keep those weights in a copy.
                start, carry = jax.lax.optimization_barrier((jnp.int32(start), carry))
            carry = run(carry, start, left)
        return carry

    def _begin(
        self, of_stack: Stacked, bank: Bank, start: Index, layers: int, first: Index | None
    ) -> tuple[Index, Index, Any, Bank | None]:
        """What a group begins with: its first sublayer and row, prior, and rows of its own."""
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
    ) -> tuple[Bank, Row | None, tuple | None, Kept, Aux]:
        bank, current, caches, kept, aux = carry
        at, first_row, prior, rows = self._begin(of_stack, bank, start, layers, first)
        if kept.groups is not None:
            kept = kept._replace(groups=stacks.put(kept.groups, current, start // self.group))
        if current is None:
            current = jnp.zeros(bank.shape[1:], bank.dtype)

        def run_layer(carry, offset):
            rows, current, caches, sums, aux = carry
            index = start + offset
            if sums is not None:
                sums = stacks.put(sums, current, index)
            given = (_of_layer(of_stack, index), at, offset, context)
            _, rows, current, caches, aux = self._layer(
                *given, prior, rows, current, caches, aux, index
            )
            return (rows, current, caches, sums, aux), None

        carry = (rows, current, caches, kept.layers, aux)
        (rows, current, caches, sums, aux), _ = jax.lax.scan(run_layer, carry, jnp.arange(layers))
        bank = stacks.put_run(bank, current[None] if rows is None else rows, first_row)
        ended = current if self.grouping.open else None
        return bank, ended, caches, kept._replace(layers=sums), aux

    def _layer(
        self,
        of_layer: Stacked,
        at: Index,
        offset: Index,
        context: Context,
        prior: Any,
        rows: Bank | None,
        current: Row,
        caches: tuple | None,
        aux: Aux,
        layer_index: Index | None = None,
    ) -> tuple[Any, Bank | None, Row, tuple | None, Aux]:
        """Each sublayer of a layer: read, compute, write, and seal a row where one is complete.

        `at` is the number of the group's first sublayer, `offset` the layer's within the group,
        `layer_index` its number in the stack, for the caches.
        """
        layer = nnx.merge(self.graphdef, of_layer.layers)
        for one, stacked in zip(layer, of_layer.merging, strict=False):
            one.site.stacked = nnx.data(stacked)
        new = []
        for k, one in enumerate(layer):
            place = At(at + offset * self.period + k, at)
            prior, rows, current, z = self.mixer.read(
                self.store, one.site, of_layer.scores[k], prior, rows, current, place
            )
            cache = None if caches is None else caches[k]
            given = (z, context, place.sublayer, cache, layer_index, aux)
            y, cache, aux = run_core(one.core, *given)
            new.append(cache)
            writer = layer[k + 1].site.writer if k + 1 < len(layer) else of_layer.after
            current = self.store.write(current, y, writer)
            rows, current = self.mixer.seal(one.site, rows, current, place)
        return prior, rows, current, None if caches is None else tuple(new), aux

    def _group_backward(
        self,
        of_stack: Stacked,
        kept: Kept,
        bank: Bank,
        context: Context,
        d_aux: Aux,
        carry: tuple[Bank, Row | None, Stacked],
        start: Index,
        layers: int,
        first: Index | None,
    ) -> tuple[Bank, Row | None, Stacked]:
        d_bank, d_current, gradients = carry
        at, first_row, prior, rows = self._begin(of_stack, bank, start, layers, first)
        nothing, zeros = jnp.zeros(bank.shape[1:], bank.dtype), jax.tree.map(jnp.zeros_like, d_aux)
        sums, first_sum = kept.layers, start
        if sums is None and self.mixer.keeps_sum:
            current = nothing
            if kept.groups is not None:
                current = stacks.at(kept.groups, start // self.group)
            given = (prior, rows, current, at, start, layers, zeros)
            sums = self._sums_again(of_stack, context, *given)
            first_sum = 0

        def undo_layer(carry, offset):
            d_prior, d_rows, d_current, gradients = carry
            index = start + offset
            current = nothing if sums is None else stacks.at(sums, first_sum + offset)
            # XLA would slice once for each that reads it.
            current = jax.lax.optimization_barrier(current)

            def forward(of_layer, prior, rows, current):
                given = (at, offset, context, prior, rows, current, None, zeros)
                prior, rows, current, _, aux = self._layer(of_layer, *given)
                return prior, rows, current, aux

            _, pullback = jax.vjp(forward, stacks.at(of_stack, index), prior, rows, current)
            gradient, *cotangents = pullback((d_prior, d_rows, d_current, d_aux))
            return (*cotangents, stacks.put(gradients, gradient, index)), None

        d_rows = stacks.run_of(d_bank, first_row, self.grouping.rows(layers * self.period))
        # A closed group's one row is the running sum at its end.
        ends = (d_rows, nothing if d_current is None else d_current)
        if self.grouping.closed:
            ends = (None, d_rows[0])
        carry = (stacks.empty_like(prior), *ends, gradients)
        (d_prior, d_rows, d_current, gradients), _ = jax.lax.scan(
            undo_layer, carry, jnp.arange(layers), reverse=True
        )
        if isinstance(first_row, int) and first_row == 0:
            d_bank = d_rows  # all rows are the group's; the first is one that it did not complete
        scores = stacks.run_of(of_stack.scores, start, layers)
        d_scores, d_bank = self.mixer.prior_backward(
            _sites(scores), bank, first_row, prior, d_prior, d_bank
        )
        d_scores = d_scores.reshape(scores.shape) + stacks.run_of(gradients.scores, start, layers)
        gradients = gradients._replace(scores=stacks.put_run(gradients.scores, d_scores, start))
        return d_bank, d_current if self.grouping.open else None, gradients

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
        """The running sums before each layer of a group, by a second forward pass."""

        def run_layer(carry, offset):
            rows, current = carry
            given = (at, offset, context, prior, rows, current, None, aux)
            _, rows, after, *_ = self._layer(stacks.at(of_stack, start + offset), *given)
            return (rows, after), current

        return jax.lax.scan(run_layer, (rows, current), jnp.arange(layers))[1]


def _sites(scores: Float[Array, "layers period *scored"]) -> Float[Array, "sites *scored"]:
    """Of a group's layers, one after the other."""
    return scores.reshape(-1, *scores.shape[2:])
