"""The schedule for RMTs that saves memory: the backward pass rebuilds the residual.

A write only adds to the residual X. The residual before a write can therefore be rebuilt by
subtracting the written term: `X_l = X_{l+1} - w^T y`, with y the sublayer's output and w the
storage keys. The backward pass starts from the last residual. The forward pass therefore keeps the
last residual and the outputs of all sublayers, of size `R * D_v` per token. The memory for these
outputs does not grow with `D_k`. In int16 fixed point the rebuilt residuals are exact; in float32
they have errors of about 1e-7.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pallas_kernels import StackSlice, Statistics, read_slices
from pallas_kernels.call import nbytes
from pallas_kernels.target import target
from rmt_tpu import config as cfg
from rmt_tpu.cores import Aux, Context, Core
from rmt_tpu.cores.core import Index
from rmt_tpu.execution.kernels import at_current_precision
from rmt_tpu.execution.layer import DecoderParts, add_aux, no_aux, sites_and_cores
from rmt_tpu.layers import choices
from rmt_tpu.layers.data_vectors import Read
from rmt_tpu.layers.kept import kept_by
from rmt_tpu.layers.stacks import empty_like, scan, update_at
from rmt_tpu.residual.protocols import ReversibleStore


def run_layers(
    decoder: DecoderParts,
    residual: Float[Array, "key_batch seq local_D_k D_v"],
    y: Float[Array, "batch seq R D_v"],
    context: Context,
) -> tuple[Read, Aux]:
    """Run all layers; return the unembedding's input and the sums of the cores' scalars.

    Args:
      decoder: a `Decoder` with a matrix store, which converts the residual to the store's dtype.
      residual: the residual before the first write, in a floating-point dtype.
      y: the output to write first.
      context: the rule that determines which tokens may attend to which.
    """
    run = _Layers(decoder, decoder.store, y.dtype)

    @jax.custom_vjp
    def differentiable(stacks, final_site, residual, y, context):
        return run.forward(stacks, final_site, residual, y, context)[0]

    differentiable.defvjp(run.forward, at_current_precision(run.backward))
    parameters = (_parameters(decoder.stacks), _parameters(decoder.final_site))
    return differentiable(*parameters, residual, y, context)


class SavedSublayer(NamedTuple):
    """The arrays that the forward pass saves for one sublayer, except the sublayer's output.

    Attributes:
      statistics: the statistics of the norm in the site before the sublayer.
      core: what the core's `pull_back` needs in addition to the core's input and output.
    """

    statistics: Statistics
    core: Any


class SavedStack(NamedTuple):
    """The arrays that the forward pass saves for one stack of layers.

    Attributes:
      entry: the output that precedes the stack; the stack's first site writes it.
      outputs: one array for each sublayer of a period, with the sublayer's outputs in all repeats.
      sublayers: the other saved arrays of each sublayer of a period, stacked over the repeats.
    """

    entry: StackSlice
    outputs: list[Array]
    sublayers: list[SavedSublayer]


class _Layers:
    """The forward and backward passes of the reversible schedule.

    Parameters are pure dicts, in which the layers of a stack are stacked.

    A stack repeats a period (a sequence of sublayers). Each sublayer of the period has one array
    for its outputs, with one slot (slice) per repeat. The next repeat reads the output of a
    period's last sublayer, so the array for these outputs has one extra slot. Repeat i writes to
    slot i + 1, and slot 0 contains the output from before the first repeat.
    """

    def __init__(self, decoder: DecoderParts, store: ReversibleStore, dtype: jnp.dtype):
        self.config, self.store, self.dtype = decoder.config, store, dtype
        self.kept = kept_by(decoder.config.remat)
        self.graphs = [nnx.graphdef(stack) for stack in decoder.stacks]
        self.last_sites = [nnx.graphdef(stack[-1].site) for stack in decoder.stacks]
        self.site_graph = nnx.graphdef(decoder.final_site)

    def forward(
        self, stacks: dict, final_site: dict, residual: Array, y: Array, context: Context
    ) -> tuple[tuple[Read, Aux], tuple]:
        """Return the results of `run_layers`, and the arrays that `backward` needs."""
        dtype, aux, saved, first = residual.dtype, no_aux(self.config, y.dtype), [], 0
        residual, y = self.store.hold(residual), StackSlice(y[None], 0)
        for number, stack in enumerate(self.config.stacks):
            entry, last = y, len(stack.cores) - 1

            def run_layer(carry, scanned, number=number, first=first, entry=entry):
                parameters, repeat = scanned
                layer, index = self._layer(number, first, stacks[number], parameters, repeat)
                residual, outputs, aux = carry
                saved = []
                for k, (site, core) in enumerate(layer):
                    y = _source(outputs, entry, k, repeat)
                    residual, z, statistics = self.store.add_and_read_with_statistics(
                        residual, y, site
                    )
                    with jax.named_scope(core.name):
                        to = _slot(outputs, k, repeat)
                        written, scalars, of_core = core.forward(
                            z, context, index + k, to, self.kept
                        )
                    outputs = [*outputs[:k], written, *outputs[k + 1 :]]
                    aux = add_aux(aux, scalars)
                    saved.append(SavedSublayer(statistics, of_core))
                return (residual, outputs, aux), saved

            carry = residual, self._empty(stack, entry), aux
            repeats = jnp.arange(stack.repeat)
            carry, sublayers = scan(run_layer, carry, (stacks[number], repeats))
            residual, outputs, aux = carry
            y = _slot(outputs, last, stack.repeat - 1)
            saved.append(SavedStack(entry, outputs, sublayers))
            first += stack.num_sublayers
        site = nnx.merge(self.site_graph, final_site)
        residual, z, statistics = self.store.add_and_read_with_statistics(residual, y, site)
        like = jnp.zeros((0,), dtype)
        return (z, aux), (stacks, final_site, residual, y, statistics, saved, context, like)

    def backward(self, saved: tuple, cotangents: tuple[Read, Aux]) -> tuple:
        """Return the cotangents of the arguments of `forward`."""
        d_z, d_aux = cotangents
        stacks, final_site, residual, y, statistics, saved_stacks, context, like = saved
        site = nnx.merge(self.site_graph, final_site)
        d_residual = jnp.zeros(residual.shape, self.dtype)
        rereads = choices.rereads_rebuilt(target(), nbytes(residual)).value
        z = self.store.read_again(residual, site, statistics, self.dtype)
        residual, d_residual, d_y, d_final_site, _ = self.store.undo(
            residual, y, site, z, statistics, (d_residual, d_z)
        )
        d_stacks, first = {}, self.config.num_sublayers
        for number, stack in reversed(list(enumerate(self.config.stacks))):
            first -= stack.num_sublayers
            sublayers = saved_stacks[number].sublayers
            z = previous = None
            if rereads:
                # In each repeat, `undo` also reads for the preceding repeat. The result of this
                # read is not used in the first repeat.
                reads = stacks[number][len(stack.cores) - 1]["site"], sublayers[-1].statistics
                previous = jax.tree.map(lambda x: jnp.roll(x, 1, 0), reads)
                read = self._last_read(number, *jax.tree.map(lambda x: x[-1], reads))
                z = self.store.read_again(residual, *read, self.dtype)

            def undo_layer(carry, scanned, number=number, first=first, stack=saved_stacks[number]):
                parameters, repeat, saved, previous = scanned
                layer, index = self._layer(number, first, stacks[number], parameters, repeat)
                residual, d_residual, d_y, z, gradients = carry
                gradient = {}
                for k, (site, core) in reversed(list(enumerate(layer))):
                    both = stack.sublayers[k].statistics.both
                    statistics = Statistics(StackSlice(both, repeat))
                    if not rereads:
                        z = self.store.read_again(residual, site, statistics, self.dtype)
                    with jax.named_scope(core.name):
                        y = _slot(stack.outputs, k, repeat)
                        d_core, d_z = core.pull_back(
                            z, y, saved[k].core, context, index + k, d_y, d_aux
                        )
                    y = _source(stack.outputs, stack.entry, k, repeat)
                    read_before = None
                    if rereads and k:
                        read_before = layer[k - 1][0], saved[k - 1].statistics
                    elif rereads:
                        read_before = self._last_read(number, *previous)
                    residual, d_residual, d_y, d_site, z = self.store.undo(
                        residual, y, site, z, statistics, (d_residual, d_z), read_before
                    )
                    # A core without parameters has no entry in the tree of parameters.
                    gradient[k] = {"site": d_site} | ({"core": d_core} if d_core else {})
                return (residual, d_residual, d_y, z, update_at(gradients, gradient, repeat)), None

            scanned = (stacks[number], jnp.arange(stack.repeat), sublayers, previous)
            carry = (residual, d_residual, d_y, z, empty_like(stacks[number]))
            (residual, d_residual, d_y, _, d_stacks[number]), _ = scan(
                undo_layer, carry, scanned, reverse=True
            )
        return d_stacks, d_final_site, d_residual.astype(like.dtype), d_y, None

    def _last_read(self, number: int, site: dict, statistics: Statistics):
        """Return the last site of a layer, and the statistics of the norm in the site's read."""
        return nnx.merge(self.last_sites[number], site), statistics

    def _empty(self, stack: cfg.Stack, entry: StackSlice) -> list[Array]:
        """Return uninitialised arrays for the outputs of a period's sublayers in all repeats.

        If the stack has several repeats, the last array has an extra slot 0, which contains the
        output in `entry`; see `_source`.
        """
        batch, seq, _, size = entry.shape
        rank = self.config.data_shape[0]
        shape = lambda core: (stack.repeat, batch, seq, core.writes.vectors(rank), size)
        outputs = [jax.lax.empty(shape(core), entry.dtype) for core in stack.cores]
        if stack.repeat > 1:
            more = jax.lax.empty((stack.repeat + 1, *outputs[-1].shape[1:]), entry.dtype)
            outputs[-1] = update_at(more, read_slices(entry), 0)
        return outputs

    def _layer(
        self, number: int, first: int, stack: dict, parameters: dict, index: Index
    ) -> tuple[list[tuple[StackSlice, Core]], Index]:
        """Return the sites and cores of one repeat of a stack.

        The sites are slices of the stack, which kernels read in place. The second result is the
        number of sublayers before the repeat.
        """
        stacked, layer = (nnx.merge(self.graphs[number], p) for p in (stack, parameters))
        return sites_and_cores(layer, stacked, index), first + len(layer) * index


def _slot(outputs: list[Array], k: int, repeat: Index) -> StackSlice:
    """Return the slot (a slice of an array of outputs) for sublayer k's output in a repeat."""
    shifted = k == len(outputs) - 1 and _begins_with_earlier(outputs)
    return StackSlice(outputs[k], repeat + 1 if shifted else repeat)


def _source(outputs: list[Array], entry: StackSlice, k: int, repeat: Index) -> StackSlice:
    """Return the slot with the output that is written just before sublayer k of a repeat."""
    if k:
        return _slot(outputs, k - 1, repeat)
    return StackSlice(outputs[-1], repeat) if _begins_with_earlier(outputs) else entry


def _begins_with_earlier(outputs: list[Array]) -> bool:
    """Return whether the last array has an extra slot for the output before the first repeat.

    A stack with several repeats has this slot: see `_Layers`.
    """
    return outputs[-1].shape[0] > 1


def _parameters(module: nnx.Module) -> Any:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))
