"""The schedule for mixers that pass a state from layer to layer: a scan over each stack.

A mixer forms a sublayer's input from earlier outputs, at the site before the sublayer.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from rmt_tpu import config as cfg
from rmt_tpu.cores import Aux, Context
from rmt_tpu.cores.core import Index
from rmt_tpu.execution.layer import DecoderParts, no_aux, run_layer, sites_and_cores
from rmt_tpu.execution.remat import scan_recomputed
from rmt_tpu.layers import stacks
from rmt_tpu.layers.data_vectors import Read
from rmt_tpu.layers.kept import kept_by
from rmt_tpu.layers.products import read_in_stacks, refer_to_stack
from rmt_tpu.residual.protocols import ReversibleStore, StateMixer, Store


def run_layers(
    decoder: DecoderParts,
    state: Array,
    y: Float[Array, "batch seq vectors size"],
    context: Context,
    caches: tuple | None,
) -> tuple[Read, tuple | None, Aux]:
    """Run all layers of a decoder, and read the input of the unembedding.

    Args:
      decoder: a `Decoder`.
      state, y: the results of the store's `start`.
      context: the rule that determines which tokens may attend to which.
      caches: for each stack, the caches of its cores; None unless decoding.

    Returns:
      The input of the unembedding, the caches with the new tokens added, and the sums of the cores'
      scalars.
    """
    mixer, store, config = decoder.mixer, decoder.store, decoder.config
    carry, new, first = (*mixer.start(store, state, y), no_aux(config, y.dtype)), [], 0
    for number, (stack_config, stack) in enumerate(zip(config.stacks, decoder.stacks, strict=True)):
        stack_caches = None if caches is None else caches[number]
        carry, stack_caches = scan(mixer, store, stack, config, carry, context, first, stack_caches)
        new.append(stack_caches)
        first += stack_config.num_sublayers
    *carry, aux = carry
    _, z = mixer.advance(store, *carry, decoder.final_site, first)
    return z, None if caches is None else tuple(new), aux


def scan(
    mixer: StateMixer,
    store: Store,
    stack: nnx.List,
    config: cfg.ModelConfig,
    carry: tuple[Any, Array, Aux],
    context: Context,
    first: Index,
    caches: tuple | None = None,
) -> tuple[tuple[Any, Array, Aux], tuple | None]:
    """Run all repeats of a stack, or of a part of a stack.

    Args:
      mixer: the model's mixer.
      store: the residual's store.
      stack: the stack of layers.
      config: the model's config; its field `remat` determines what the backward pass recomputes.
      carry: the mixer's state, the output that the first site writes, and the cores' summed
        scalars.
      context: the rule that determines which tokens may attend to which.
      first: the number of sublayers before the stack or the part.
      caches: the caches of the stack's cores; None unless decoding.

    Returns:
      The carry and the caches after all repeats.
    """
    graphdef, layers = nnx.split(stack)
    layers = nnx.to_pure_dict(layers)
    in_place = caches is not None and _reads_stacks(config, store, carry[0])
    weights_in_place = caches is not None and read_in_stacks(carry[1])
    mixer_graph, shared = nnx.split(mixer)
    shared = nnx.to_pure_dict(shared)

    def body(carry, scanned, shared, constants, caches=None):
        (layer, index), (context, first) = scanned, constants
        layer = nnx.merge(graphdef, layer)
        if weights_in_place:
            refer_to_stack(layer, stack, index)
        sublayers = sites_and_cores(layer, *((stack, index) if in_place else ()))
        at = first + len(stack) * index
        mixer = nnx.merge(mixer_graph, shared)
        return run_layer(mixer, store, sublayers, carry, context, at, caches, index)

    constants = context, first
    kept = kept_by(config.remat)
    if kept is not None and caches is None:
        run = lambda carry, scanned, shared, constants: body(carry, scanned, shared, constants)[0]
        return scan_recomputed(run, carry, layers, shared, constants, kept), None

    def step(carry, scanned):
        return body(carry[0], scanned, shared, constants, carry[1]), None

    scanned = layers, jnp.arange(len(jax.tree.leaves(layers)[0]))
    return stacks.scan(step, (carry, caches), scanned)[0]


def _reads_stacks(config: cfg.ModelConfig, store: Store, state: Any) -> bool:
    """Return whether decode steps read the sites' parameters directly from the stacks.

    The mixer's state must be the residual. These are also the mixers of the reversible schedule.
    """
    alone = "reversible" in config.mixer.remats
    return alone and isinstance(store, ReversibleStore) and store.reads_stacks(state)
