"""The layers of a decoder on a mesh with stages: microbatches pass through chunks of layers.

Runs in per-device code, by `sharding.pipeline`. A chunk takes what its mixer carries from layer to
layer, or for a mixer with a bank the rows before it. Everything else each stage does itself, on all
its rows: the embedding, and with it row 0; the read for the unembedding is the last stage's.

The backward pass computes each chunk again, of one microbatch at a time; `remat` says what it then
keeps within it.
"""

import copy
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Shaped

import sharding
from rmt_tpu import config as cfg
from rmt_tpu.execution import banked
from rmt_tpu.execution.remat import rematerialize
from rmt_tpu.layers import attention as attn
from rmt_tpu.layers import stacks
from rmt_tpu.residual.depth_attention import DepthAttention
from sharding import pipeline


def check(config: cfg.ModelConfig, schedule: sharding.Schedule, sequences: int) -> None:
    """Raises MeshError where layers or sequences do not divide, or a model has no pipeline.

    Args:
      config: of the model.
      schedule: of the stages.
      sequences: of a batch, that a device has.
    """
    layers, chunks = config.num_layers, schedule.chunks
    if layers % chunks:
        raise sharding.MeshError(
            f"model.num_layers={layers} is not divisible over stage={schedule.stages} x "
            f"train.virtual_stages={schedule.virtual}; nearest legal: "
            f"{sharding.nearest_multiples(layers, chunks)}"
        )
    if sequences % schedule.microbatches:
        raise sharding.MeshError(
            f"train.microbatches={schedule.microbatches} does not divide the {sequences} sequences "
            f"of a device; nearest legal: "
            f"{sharding.nearest_multiples(sequences, schedule.microbatches)} sequences"
        )
    if config.remat == "reversible":
        raise sharding.MeshError(
            f"--mesh: stage={schedule.stages} does not go with model.remat='reversible'; legal: "
            "none, dots, full"
        )
    if not isinstance(config.mixer, cfg.FullAttention | cfg.BlockAttention):
        return
    if not config.mixer.fused:
        raise sharding.MeshError(
            f"--mesh: stage={schedule.stages} does not go with an ablation of "
            f"{config.mixer.kind}; legal: stage=1"
        )
    block = config.mixer.sublayers_a_block(layers)
    if 2 * layers // chunks % block:
        legal = [
            n for n in range(1, layers + 1) if layers % n == 0 and 2 * layers // n % block == 0
        ]
        raise sharding.MeshError(
            f"--mesh: stage={schedule.stages} x train.virtual_stages={schedule.virtual} chunks are "
            f"{2 * layers // chunks} sublayers each, no multiple of a block's {block}; legal "
            f"numbers of chunks: {', '.join(map(str, legal)) or 'none'}"
        )


def run_layers(
    decoder: nnx.Module,
    state: Float[Array, "group seq *shape"],
    y: Float[Array, "batch seq vectors size"],
    context: attn.Context,
    schedule: sharding.Schedule,
) -> Float[Array, "part seq reads read_size"]:
    """All layers of a decoder, and the read for the unembedding.

    Args:
      decoder: with this stage's own layers: [L / P, ...], or with several virtual stages
        [V, L / (P V), ...].
      state, y: from its store's `start`.
      context: of attention.
      schedule: of the stages.

    Returns:
      This stage's part of the rows that the last stage has read: for a loss that all share.

    Raises:
      MeshError: see `check`.
    """
    check(decoder.config, schedule, len(y))
    run = _banked if isinstance(decoder.config.mixer, cfg.Banked) else _carried
    split = lambda x, groups=1: _microbatches(x, schedule.microbatches, groups)
    groups = len(state) // len(y)  # a residual divided by `key` has the rows of all its devices
    context = jax.tree.map(split, context)
    read, results, site = run(decoder, split(state, groups), split(y), context, schedule)

    z = pipeline.on_last(
        lambda operands: jax.lax.map(lambda result: read(result, operands[1]), operands[0]),
        (results, site),
    )
    return sharding.scatter_sum(z.reshape(len(y), *z.shape[2:]), "stage", axis=0)


def _microbatches(
    x: Shaped[Array, "batch *shape"], count: int, groups: int
) -> Shaped[Array, "count part *shape"]:
    """Runs of rows, each from every group of them; one row is the same for all."""
    if len(x) == 1:
        return jnp.broadcast_to(x, (count, *x.shape))
    x = x.reshape(groups, count, -1, *x.shape[1:]).swapaxes(0, 1)
    return x.reshape(count, -1, *x.shape[3:])


def _own_layers(decoder: nnx.Module, schedule: sharding.Schedule) -> tuple[nnx.GraphDef, Any]:
    """The graph of a layer, and the parameters of this stage's [V, layers of a chunk, ...]."""
    graphdef, layers = nnx.split(decoder.layers)
    layers = nnx.to_pure_dict(layers)
    if schedule.virtual == 1:
        layers = jax.tree.map(lambda x: x[None], layers)
    return graphdef, layers


# Mixers that carry a state -------------------------------------------------------------------


def _carried(decoder, state, y, context, schedule):
    config, store = decoder.config, decoder.store
    count = config.num_layers // schedule.chunks
    graphdef, layers = _own_layers(decoder, schedule)
    mixer_graph, mixer = nnx.split(decoder.mixer)
    start = jax.vmap(lambda state, y: decoder.mixer.start(store, state, y))

    def chunk(layers, mixer, index, carry, context):
        mixer = nnx.merge(mixer_graph, mixer)

        def run_layer(carry, scanned):
            state, y = carry
            layer, index = scanned
            layer = nnx.merge(graphdef, layer)
            state, z = mixer.advance(store, state, y, layer.attention_site, 2 * index)
            with jax.named_scope("attention"):
                y = attn.Attention(config, context, index)(z)
            state, z = mixer.advance(store, state, y, layer.feed_forward_site, 2 * index + 1)
            with jax.named_scope("feed_forward"):
                return (state, layer.feed_forward(z)), None

        run_layer = rematerialize(run_layer, config.remat)
        return jax.lax.scan(run_layer, carry, (layers, index * count + jnp.arange(count)))[0]

    results = pipeline.run_carried(
        chunk, layers, mixer, start(state, y), context, schedule=schedule
    )

    def read(result, site):
        mixer, site = nnx.merge(mixer_graph, site[0]), nnx.merge(site_graph, site[1])
        return mixer.advance(store, *result, site, 2 * config.num_layers)[1]

    site_graph, site = nnx.split(decoder.final_site)
    return read, results, (mixer, site)


# Mixers that read a bank ---------------------------------------------------------------------


def _banked(decoder, state, y, context, schedule):
    store, mixer = decoder.store, decoder.mixer
    graphdef, layers = _own_layers(decoder, schedule)
    merged = nnx.merge(graphdef, layers)
    of_chunks = banked.Stacked(
        layers,
        _shared(mixer, merged, schedule),
        _after(merged.attention_site.writer, decoder.final_site.writer),
    )
    writer = _first(merged.attention_site.writer)
    first = jax.vmap(lambda state, y: store.write(store.hold(state), y, writer))(state, y)
    run = _Chunk(decoder, graphdef, schedule.chunks)
    banks = pipeline.run_banked(
        run.rows,
        of_chunks,
        (),
        first,
        context,
        chunk_rows=run.num_rows,
        chunk_backward=run.rows_backward,
        schedule=schedule,
    )

    def read(bank, parameters):
        mixer, site = nnx.merge(mixer_graph, parameters[0]), nnx.merge(site_graph, parameters[1])
        return mixer.final(store, bank, site)

    mixer_graph, mixer = nnx.split(mixer)
    site_graph, site = nnx.split(decoder.final_site)
    return read, banks, (mixer, site)


def _shared(mixer, layers, schedule):
    """What the sites of own layers score with, [V, layers of a chunk, ...]."""
    if isinstance(mixer, DepthAttention):
        sites = (layers.attention_site.mix, layers.feed_forward_site.mix)
        folded = [site.folded() for site in sites]
        return jnp.stack([f.reshape(*f.shape[:2], -1) for f in folded], axis=2)
    # Learned as one matrix, that every stage has.
    shared = mixer.shared(layers)
    of_chunks = shared.reshape(schedule.virtual, schedule.stages, -1, *shared.shape[1:])
    return of_chunks[:, sharding.axis_index("stage")]


def _first(writers):
    """The writer of the embedding: that of the first stage's first site."""
    if writers is None:
        return None
    own = writers[...][0, 0]
    mine = jnp.where(sharding.axis_index("stage") == 0, own, jnp.zeros_like(own))
    return sharding.total(mine, "stage")


def _after(writers, final_writer):
    """The writer of each layer's last output is the one of the site that follows.

    After a chunk, that is the next stage's.
    """
    if writers is None:
        return None
    writers, final_writer = writers[...], final_writer[...]
    stages = sharding.axis_size("stage")
    around = [(stage, (stage - 1) % stages) for stage in range(stages)]
    first = jax.lax.ppermute(writers[:, 0], "stage", around)
    of_last = jnp.concatenate([first[1:], final_writer[None]])
    first = jnp.where(pipeline.is_last(), of_last, first)
    return jnp.concatenate([writers[:, 1:], first[:, None]], axis=1)


class _Chunk(banked.Groups):
    """The layers of a chunk, which count from 0 here."""

    def __init__(self, decoder, graphdef, chunks):
        super().__init__(decoder, graphdef)
        self.num_layers //= chunks
        divisors = [n for n in range(1, self.num_layers + 1) if self.num_layers % n == 0]
        self.group = min(divisors, key=lambda n: max(n / self.group, self.group / n))
        if isinstance(decoder.config.mixer, cfg.FullAttention):
            mixer = dataclasses.replace(decoder.config.mixer, phase_layers=self.group)
            self.mixer = DepthAttention(dataclasses.replace(decoder.config, mixer=mixer))
        self.num_rows = self.mixer.group_rows(self.num_layers)
        self.first_layer = 0

    def rows(self, stacked, _, index, bank, context):
        """Those that chunk `index` completes."""
        chunk = self._at(index)

        def run(carry, start, layers):
            return chunk.group_forward(stacked, context, carry, start, layers)

        bank, *_ = chunk.over_groups(run, (bank, None, None))
        return stacks.run_of(bank, chunk.mixer.first_row(0), self.num_rows)

    def rows_backward(self, stacked, _, index, bank, context, d_bank):
        """Gradients of the stacked parameters and, added to `d_bank`, of the rows before."""
        chunk = self._at(index)

        def run(carry, start, layers):
            return chunk.group_backward(stacked, context, bank, None, carry, start, layers)

        carry = (d_bank, stacks.empty_like(stacked))
        d_bank, gradients = chunk.over_groups(run, carry, reverse=True)
        return gradients, (), d_bank

    def _at(self, index):
        """The same for chunk `index`."""
        chunk = copy.copy(self)
        chunk.first_layer = index * self.num_layers
        chunk.mixer = _From(self.mixer, chunk.first_layer)
        return chunk

    def _layer(self, of_layer, place, *arguments):
        index, offset = place
        return super()._layer(of_layer, (self.first_layer + index, offset), *arguments)


class _From:
    """A mixer for layers that count from `first_layer` on."""

    def __init__(self, mixer, first_layer):
        self.mixer, self.first_layer = mixer, first_layer

    def __getattr__(self, name):
        return getattr(self.mixer, name)

    def first_row(self, layer):
        return self.mixer.first_row(self.first_layer + layer)
