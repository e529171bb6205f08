"""Functions that all schedules use: they make a model's layers, and run one layer.

A layer is one repeat of a stack's period, the repeated pattern of sublayers.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

import sharding
from pallas_kernels import StackSlice
from rmt_tpu import config as cfg
from rmt_tpu import residual
from rmt_tpu.cores import Aux, Cache, Context, Core, flatten_rows, make_core
from rmt_tpu.cores.core import Index
from rmt_tpu.layers.data_vectors import Read
from rmt_tpu.layers.embedding import Embedding, Unembedding
from rmt_tpu.layers.parameters import Seed, stack
from rmt_tpu.residual.protocols import BankMixer, StateMixer, Store


@runtime_checkable
class DecoderParts(Protocol):
    """The parts of a decoder that schedules use.

    Attributes:
      dtype: the dtype of data vectors.
      stacks: the stacks of layers from `make_stacks`; in a pipeline, only the layers of this stage.
      final_site: the site from `make_final_site`, at which the unembedding's input is read.
    """

    config: cfg.ModelConfig
    dtype: jnp.dtype
    embedding: Embedding
    store: Store
    mixer: StateMixer | BankMixer
    stacks: nnx.List
    final_site: nnx.Module
    unembedding: Unembedding


class Sublayer(nnx.Module):
    """A sublayer: its core (attention or MLP), and the site where the core's input is read."""

    def __init__(self, site: nnx.Module, core: Core):
        self.site, self.core = site, core


def make_stacks(config: cfg.ModelConfig, seed: Seed) -> nnx.List:
    """Return a model's stacks, ordered by depth.

    Each stack is an `nnx.List` with the `Sublayer`s of its period (the repeated pattern of
    sublayers). Their parameters have a leading axis "layer" over the stack's repeats. For example,
    `stacks/0/1/site/gain` contains the gains of the second sublayer's site in the first stack.
    """
    stacks, first = [], 0
    writes = base_writes = cfg.RESIDUAL_PORT
    for stack_config, base in zip(config.stacks, config.base_model.stacks, strict=True):
        places = []
        for k, (core, base_core) in enumerate(zip(stack_config.cores, base.cores, strict=True)):
            of_base = {"base_writes": base_writes, "base_reads": base_core.reads}
            place = residual.Place(first + k, (first + k) % 2, writes, core.reads, **of_base)
            places.append((place, core, base_core))
            writes, base_writes = core.writes, base_core.writes

        def period(
            seed: Seed, repeat: jax.Array, first: int = first, places: list = places
        ) -> nnx.List:
            sublayers = []
            for k, (place, core, base_core) in enumerate(places):
                index = first + repeat * len(places) + k
                own = seed.numbered(index)
                site = residual.make_site(config, own / "site", place._replace(index=index))
                made = make_core(config, core, base_core, own / "core", place.within)
                sublayers.append(Sublayer(site, made))
            return nnx.List(sublayers)

        stacks.append(stack(period, seed, stack_config.repeat))
        first += stack_config.num_sublayers
    return nnx.List(stacks)


def make_final_site(config: cfg.ModelConfig, seed: Seed) -> nnx.Module:
    """Return the site before the unembedding, at which the unembedding's input is read."""
    depth = config.num_sublayers
    place = residual.Place(
        jnp.int32(depth),
        depth % 2,
        config.stacks[-1].cores[-1].writes,
        cfg.RESIDUAL_PORT,
        last=True,
        base_writes=config.base_model.stacks[-1].cores[-1].writes,
    )
    return residual.make_site(config, seed, place)


@jax.named_scope("embedding")
def start(
    embedding: Embedding,
    store: Store,
    tokens: Int[Array, "batch seq"],
    context: Context,
    dtype: jnp.dtype,
) -> tuple[
    Float[Array, "key_batch local_seq *shape"], Float[Array, "local_batch local_seq vectors size"]
]:
    """Return the residual before the first write, and the embedding, which is written first.

    Both are for this device's tokens.
    """
    own = lambda x: sharding.own_part(flatten_rows(x, context), sharding.token_axes(), axis=1)
    return store.start(*embedding(own(tokens), own(_positions(embedding, context)), dtype))


def _positions(embedding: Embedding, context: Context) -> Int[Array, "batch_or_1 seq"]:
    """Return the tokens' positions; padding gets the position of the last token in its row.

    Larger positions in the padding could exceed the number of learned positions. This would put NaN
    into the cache.
    """
    if embedding.positions is None or context.lengths is None:
        return context.query_positions
    before = 0 if context.start is None else context.start
    return jnp.minimum(context.query_positions, (before + context.lengths - 1)[:, None])


def no_aux(config: cfg.ModelConfig, dtype: jnp.dtype) -> Aux:
    """Return the initial sums (zeros) of the cores' scalars, such as a balance loss.

    `dtype` is the dtype of the data vectors. The sums have at least float32 precision.
    """
    return {name: jnp.zeros((), jnp.promote_types(dtype, jnp.float32)) for name in config.aux}


def add_aux(total: Aux, scalars: Aux) -> Aux:
    """Return the sums of scalars with one core's scalars added.

    Raises:
      KeyError: a scalar has a name that is not among the sums.
    """
    return total | {name: total[name] + x.astype(total[name].dtype) for name, x in scalars.items()}


def sites_and_cores(
    layer: nnx.List, stack: nnx.List | None = None, index: Index | None = None
) -> list[tuple[nnx.Module | StackSlice, Core]]:
    """Return the site and the core of each sublayer of one layer.

    A site has the parameters for writing and reading the residual before the core. If `stack` is
    given, kernels read these parameters directly from the stack, at `index`.
    """
    if stack is None:
        return [(sublayer.site, sublayer.core) for sublayer in layer]
    return [
        (StackSlice(stacked.site, index), sublayer.core)
        for sublayer, stacked in zip(layer, stack, strict=True)
    ]


def run_core(
    core: Core,
    z: Read,
    context: Context,
    index: Index,
    cache: Cache | None,
    layer: Index | None,
    aux: Aux,
) -> tuple[Float[Array, "batch seq_or_gathered vectors size"], Cache | None, Aux]:
    """Return a core's output, its cache, and the sums with the core's scalars added.

    If a cache is given, the core runs on tokens that follow the cached tokens, and its scalars are
    not added. `layer` is then the index of the layer in its stack.
    """
    with jax.named_scope(core.name):
        if cache is not None:
            return *core.step(z, context, index, cache, layer), aux
        y, scalars = core.with_aux(z, context, index)
        return y, None, add_aux(aux, scalars)


def run_layer(
    mixer: StateMixer,
    store: Store,
    sublayers: Sequence[tuple[nnx.Module | StackSlice, Core]],
    carry: tuple[Any, Float[Array, "batch seq_or_gathered vectors size"], Aux],
    context: Context,
    first: Index,
    caches: tuple[Cache, ...] | None = None,
    layer: Index | None = None,
) -> tuple[tuple[Any, Float[Array, "batch _ _ _"], Aux], tuple[Cache, ...] | None]:
    """Run one layer: for each sublayer, read the core's input at the site, then run the core.

    Args:
      mixer: the model's mixer.
      store: the residual's store.
      sublayers: the site and the core of each sublayer: see `sites_and_cores`.
      carry: the mixer's state, the output that the first site writes, and the cores' summed
        scalars.
      context: the rule that determines which tokens may attend to which.
      first: the number of sublayers before the layer.
      caches: the caches of the layer's cores; None unless decoding.
      layer: the index of the layer in its stack; None unless decoding.

    Returns:
      The carry and the caches after the layer.
    """
    state, y, aux = carry
    new = []
    for k, (site, core) in enumerate(sublayers):
        state, z = mixer.advance(store, state, y, site, first + k)
        cache = None if caches is None else caches[k]
        y, cache, aux = run_core(core, z, context, first + k, cache, layer, aux)
        new.append(cache)
    return (state, y, aux), None if caches is None else tuple(new)
