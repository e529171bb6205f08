"""The schedule for RMTs whose backward pass rebuilds the residual instead of keeping it.

A write only adds, so the residual before a write is the residual after it less what was written:
`X_l = X_{l+1} - w^T y`. The forward pass keeps what every sublayer wrote (y, of size `R * D_v`) and
the last residual, and the backward pass walks down from there. The memory of activations therefore
does not grow with `D_k`. In int16 fixed point the walk is exact; in float32 it drifts by about
1e-7.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pallas_kernels import Slot, Statistics, taken
from pallas_kernels.call import nbytes
from pallas_kernels.target import target
from rmt_tpu import config as cfg
from rmt_tpu.cores import Aux, Context, Core
from rmt_tpu.cores.core import Index
from rmt_tpu.execution.kernels import as_here
from rmt_tpu.execution.layer import Model, add_aux, no_aux, tell_slices
from rmt_tpu.layers import choices
from rmt_tpu.layers.data_vectors import Read
from rmt_tpu.layers.stacks import empty_like, put, scan
from rmt_tpu.residual.protocols import Invertible


def run_layers(
    decoder: Model,
    residual: Float[Array, "group seq own_D_k D_v"],
    y: Float[Array, "batch seq R D_v"],
    context: Context,
) -> tuple[Read, Aux]:
    """Run all layers of a decoder; return the read for the unembedding and sums of scalars.

    Args:
      decoder: a `Decoder` with a matrix store, which holds the residual in its own dtype.
      residual: the state before the first write, in a float dtype.
      y: what is written first.
      context: which token may see which.
    """
    run = _Layers(decoder, decoder.store, y.dtype)

    @jax.custom_vjp
    def differentiable(stacks, final_site, residual, y, context):
        return run.forward(stacks, final_site, residual, y, context)[0]

    differentiable.defvjp(run.forward, as_here(run.backward))
    parameters = (_parameters(decoder.stacks), _parameters(decoder.final_site))
    return differentiable(*parameters, residual, y, context)


class _Layers:
    """The forward and the backward pass.

    Parameters are pure dicts, with the layers of a stack stacked.

    Each sublayer of a period has one stack for what it writes in all repeats. The write stays where
    it is first made, and sites take it from there. What the last sublayer writes is read by the
    next repeat, so its stack has one slot more: repeat i writes slot i + 1, and slot 0 holds what
    was written before the first repeat.
    """

    def __init__(self, decoder: Model, store: Invertible, dtype: jnp.dtype):
        self.config, self.store, self.dtype = decoder.config, store, dtype
        self.graphs = [nnx.graphdef(stack) for stack in decoder.stacks]
        self.last_sites = [nnx.graphdef(stack[-1].site) for stack in decoder.stacks]
        self.site_graph = nnx.graphdef(decoder.final_site)

    def forward(
        self, stacks: dict, final_site: dict, residual: Array, y: Array, context: Context
    ) -> tuple[tuple[Read, Aux], tuple]:
        """Return what `run_layers` returns, and what `backward` needs."""
        held, aux, kept, first = self.store.hold(residual), no_aux(self.config, y.dtype), [], 0
        y = Slot(y[None], 0)
        for number, stack in enumerate(self.config.stacks):
            before, last = y, len(stack.cores) - 1

            def run_layer(carry, scanned, number=number, first=first, before=before):
                parameters, repeat = scanned
                layer, index = self._layer(number, first, stacks[number], parameters, repeat)
                residual, written, aux = carry
                of_layer = []
                for k, (site, core) in enumerate(layer):
                    y = _source(written, before, k, repeat)
                    residual, z, statistics = self.store.add_and_read_with_statistics(
                        residual, y, site
                    )
                    with jax.named_scope(core.name):
                        to = _slot(written, k, repeat)
                        stack, of_core, saved = core.forward(z, context, index + k, to)
                    written = [*written[:k], stack, *written[k + 1 :]]
                    aux = add_aux(aux, of_core)
                    of_layer.append((statistics, saved))
                return (residual, written, aux), of_layer

            carry = held, self._empty(stack, before), aux
            repeats = jnp.arange(stack.repeat)
            carry, of_stack = scan(run_layer, carry, (stacks[number], repeats))
            held, written, aux = carry
            y = _slot(written, last, stack.repeat - 1)
            kept.append((before, written, of_stack))
            first += stack.num_sublayers
        site = nnx.merge(self.site_graph, final_site)
        held, z, statistics = self.store.add_and_read_with_statistics(held, y, site)
        like = jnp.zeros((0,), residual.dtype)
        return (z, aux), (stacks, final_site, held, y, statistics, kept, context, like)

    def backward(self, saved: tuple, cotangents: tuple[Read, Aux]) -> tuple:
        """Return the cotangents of what `forward` was given."""
        d_z, d_aux = cotangents
        stacks, final_site, held, y, statistics, kept, context, like = saved
        site = nnx.merge(self.site_graph, final_site)
        d_residual = jnp.zeros(held.shape, self.dtype)
        at_once = choices.rereads_rebuilt(target(), nbytes(held)).value
        z = self.store.read_again(held, site, statistics, self.dtype)
        held, d_residual, d_y, d_final_site, _ = self.store.undo(
            held, y, site, z, statistics, d_residual, d_z
        )
        d_stacks, first = {}, self.config.num_sublayers
        for number, stack in reversed(list(enumerate(self.config.stacks))):
            first -= stack.num_sublayers
            *_, of_stack = kept[number]
            z = below = None
            if at_once:
                # The first repeat has no repeat of this stack below it. What is read for it there
                # is not used.
                reads = stacks[number][len(stack.cores) - 1]["site"], of_stack[-1][0]
                below = jax.tree.map(lambda x: jnp.roll(x, 1, 0), reads)
                read = self._last_read(number, *jax.tree.map(lambda x: x[-1], reads))
                z = self.store.read_again(held, *read, self.dtype)

            def undo_layer(carry, scanned, number=number, first=first, kept=kept[number]):
                parameters, repeat, of_layer, below = scanned
                before, written, of_stack = kept
                layer, index = self._layer(number, first, stacks[number], parameters, repeat)
                residual, d_residual, d_y, z, gradients = carry
                gradient = {}
                for k, (site, core) in reversed(list(enumerate(layer))):
                    (statistics, _), (_, saved) = of_stack[k], of_layer[k]
                    statistics = Statistics(Slot(statistics.both, repeat))
                    if not at_once:
                        z = self.store.read_again(residual, site, statistics, self.dtype)
                    with jax.named_scope(core.name):
                        of_core = (_slot(written, k, repeat), saved, context, index + k)
                        d_core, d_z = core.pull_back(z, *of_core, d_y, d_aux)
                    y = _source(written, before, k, repeat)
                    read_before = None
                    if at_once and k:
                        read_before = layer[k - 1][0], of_layer[k - 1][0]
                    elif at_once:
                        read_before = self._last_read(number, *below)
                    residual, d_residual, d_y, d_site, z = self.store.undo(
                        residual, y, site, z, statistics, d_residual, d_z, read_before
                    )
                    # A core without parameters is not in the tree.
                    gradient[k] = {"site": d_site} | ({"core": d_core} if d_core else {})
                return (residual, d_residual, d_y, z, put(gradients, gradient, repeat)), None

            scanned = (stacks[number], jnp.arange(stack.repeat), of_stack, below)
            carry = (held, d_residual, d_y, z, empty_like(stacks[number]))
            (held, d_residual, d_y, _, d_stacks[number]), _ = scan(
                undo_layer, carry, scanned, reverse=True
            )
        return d_stacks, d_final_site, d_residual.astype(like.dtype), d_y, None

    def _last_read(self, number: int, site: dict, statistics: Statistics):
        """Return the site that reads last in a repeat of a stack, and its statistics."""
        return nnx.merge(self.last_sites[number], site), statistics

    def _empty(self, stack: cfg.Stack, before: Slot) -> list[Array]:
        """Return room for what the sublayers of a stack write; see `_source`."""
        batch, seq, _, size = before.shape
        count = lambda port: sum(port.heads) + port.whole * self.config.data_shape[0]
        shape = lambda core: (stack.repeat, batch, seq, count(core.writes), size)
        written = [jax.lax.empty(shape(core), before.dtype) for core in stack.cores]
        if stack.repeat > 1:
            more = jax.lax.empty((stack.repeat + 1, *written[-1].shape[1:]), before.dtype)
            written[-1] = put(more, taken(before), 0)
        return written

    def _layer(
        self, number: int, first: int, stack: dict, parameters: dict, index: Index
    ) -> tuple[list[tuple[nnx.Module, Core]], Index]:
        """Return sites and cores of one period of a stack, and the number of its first sublayer."""
        of_stack, layer = (nnx.merge(self.graphs[number], p) for p in (stack, parameters))
        tell_slices(layer, of_stack, index)
        return [(one.site, one.core) for one in layer], first + len(layer) * index


def _slot(written: list[Array], k: int, repeat: Index) -> Slot:
    """Return the slot to which sublayer k of a repeat writes."""
    shifted = k == len(written) - 1 and _begins_with_earlier(written)
    return Slot(written[k], repeat + 1 if shifted else repeat)


def _source(written: list[Array], before: Slot, k: int, repeat: Index) -> Slot:
    """Return the slot of what the site before sublayer k of a repeat writes to the residual."""
    if k:
        return _slot(written, k - 1, repeat)
    return Slot(written[-1], repeat) if _begins_with_earlier(written) else before


def _begins_with_earlier(written: list[Array]) -> bool:
    """Return whether the last stack has a slot more, because there are several repeats."""
    return written[-1].shape[0] > 1


def _parameters(module: nnx.Module) -> Any:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))
