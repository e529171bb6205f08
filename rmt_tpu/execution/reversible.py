"""The layers of an RMT whose backward pass rebuilds the residual instead of keeping it.

A write only adds, so the residual before it is the residual after it less what was written:
`X_l = X_{l+1} - w^T y`. The forward pass keeps what every sublayer wrote (y, of size `R * D_v`) and
the last residual; the backward pass walks down from there. So the memory of activations does not
grow with `D_k`. In int16 fixed point the walk is exact; in float32 it drifts by about 1e-7.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from rmt_tpu.cores import Aux, Context, Core
from rmt_tpu.cores.core import Index
from rmt_tpu.execution.layer import Model, add_aux, no_aux
from rmt_tpu.layers.data_vectors import Read
from rmt_tpu.layers.stacks import scan
from rmt_tpu.residual.protocols import Invertible


def run_layers(
    decoder: Model,
    residual: Float[Array, "group seq own_D_k D_v"],
    y: Float[Array, "batch seq R D_v"],
    context: Context,
) -> tuple[Read, Aux]:
    """All layers of a decoder: the read for the unembedding, and the sums of cores' scalars.

    Args:
      decoder: a `Decoder` with a matrix store, which holds the residual in its own dtype.
      residual: the state before the first write, in a float dtype.
      y: what is written first.
      context: who may see whom.
    """
    run = _Layers(decoder, decoder.store, y.dtype)

    @jax.custom_vjp
    def differentiable(stacks, final_site, residual, y, context):
        return run.forward(stacks, final_site, residual, y, context)[0]

    differentiable.defvjp(run.forward, run.backward)
    parameters = (_parameters(decoder.stacks), _parameters(decoder.final_site))
    return differentiable(*parameters, residual, y, context)


class _Layers:
    """Both passes; parameters are pure dicts, those of a stack stacked."""

    def __init__(self, decoder: Model, store: Invertible, dtype: jnp.dtype):
        self.config, self.store, self.dtype = decoder.config, store, dtype
        self.graphs = [nnx.graphdef(stack) for stack in decoder.stacks]
        self.site_graph = nnx.graphdef(decoder.final_site)

    def forward(
        self, stacks: dict, final_site: dict, residual: Array, y: Array, context: Context
    ) -> tuple[tuple[Read, Aux], tuple]:
        """What `run_layers` gives, and what `backward` needs."""
        carry, written, first = (self.store.hold(residual), y, no_aux(self.config, y.dtype)), [], 0
        for number, stack in enumerate(self.config.stacks):

            def run_layer(carry, scanned, number=number, first=first):
                layer, index = self._layer(number, first, *scanned)
                kept = []
                for k, (site, core) in enumerate(layer):
                    residual, y, aux = carry
                    residual, z = self.store.add_and_read(residual, y, site)
                    with jax.named_scope(core.name):
                        given, of_core, saved = core.forward(z, context, index + k)
                    kept.append((y, saved))
                    carry = residual, given, add_aux(aux, of_core)
                return carry, kept

            repeats = jnp.arange(stack.repeat)
            carry, of_stack = scan(run_layer, carry, (stacks[number], repeats))
            written.append(of_stack)
            first += stack.num_sublayers
        site = nnx.merge(self.site_graph, final_site)
        held, y, aux = carry
        held, z = self.store.add_and_read(held, y, site)
        like = jnp.zeros((0,), residual.dtype)
        return (z, aux), (stacks, final_site, held, y, written, context, like)

    def backward(self, saved: tuple, cotangents: tuple[Read, Aux]) -> tuple:
        """Cotangents of what `forward` was given."""
        d_z, d_aux = cotangents
        stacks, final_site, residual, y, written, context, like = saved
        site = nnx.merge(self.site_graph, final_site)
        d_residual = jnp.zeros(residual.shape, self.dtype)
        z, statistics = self.store.read_with_statistics(residual, site, self.dtype)
        residual, d_residual, d_y, d_final_site = self.store.undo(
            residual, y, site, z, statistics, d_residual, d_z
        )
        carry, d_stacks, first = (residual, y, d_residual, d_y), {}, self.config.num_sublayers
        for number, stack in reversed(list(enumerate(self.config.stacks))):
            first -= stack.num_sublayers

            def undo_layer(carry, scanned, number=number, first=first):
                layer, index, kept = scanned
                layer, index = self._layer(number, first, layer, index)
                gradient = {}
                for k, ((site, core), (y, saved)) in reversed(
                    list(enumerate(zip(layer, kept, strict=True)))
                ):
                    residual, given, d_residual, d_y = carry
                    z, statistics = self.store.read_with_statistics(residual, site, self.dtype)
                    with jax.named_scope(core.name):
                        place = (context, index + k)
                        d_core, d_z = core.pull_back(z, given, saved, *place, d_y, d_aux)
                    residual, d_residual, d_y, d_site = self.store.undo(
                        residual, y, site, z, statistics, d_residual, d_z
                    )
                    # A core without parameters is not in the tree.
                    gradient[k] = {"site": d_site} | ({"core": d_core} if d_core else {})
                    carry = residual, y, d_residual, d_y
                return carry, gradient

            scanned = (stacks[number], jnp.arange(stack.repeat), written[number])
            carry, d_stacks[number] = scan(undo_layer, carry, scanned, reverse=True)
        _, _, d_residual, d_y = carry
        return d_stacks, d_final_site, d_residual.astype(like.dtype), d_y, None

    def _layer(
        self, number: int, first: int, parameters: dict, index: Index
    ) -> tuple[list[tuple[nnx.Module, Core]], Index]:
        """Sites and cores of one period, and the number of its first sublayer."""
        layer = nnx.merge(self.graphs[number], parameters)
        return [(one.site, one.core) for one in layer], first + len(layer) * index


def _parameters(module: nnx.Module) -> Any:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))
