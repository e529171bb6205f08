"""The layers of a decoder on a mesh with stages: microbatches pass through chunks of layers.

Runs in per-device code, by `sharding.pipeline`. A chunk takes what its mixer carries from layer to
layer, or for a mixer with a bank the rows before it. Everything else each stage does itself, on all
its rows: the embedding, and with it row 0; the read for the unembedding is the last stage's.

The backward pass computes each chunk again, of one microbatch at a time; `remat` says what it then
keeps within it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Shaped

import sharding
from rmt_tpu import config as cfg
from rmt_tpu.cores import Aux, Context
from rmt_tpu.execution import banked, scanned
from rmt_tpu.execution.layer import Model, no_aux
from rmt_tpu.layers.data_vectors import Read
from sharding import pipeline


def check(config: cfg.ModelConfig, schedule: sharding.Schedule, sequences: int) -> None:
    """Raises MeshError where layers or sequences do not divide, or a model has no pipeline.

    Args:
      config: of the model.
      schedule: of the stages.
      sequences: of a batch, that a device has.
    """
    if len(config.stacks) > 1:
        raise sharding.MeshError(
            f"--mesh: stage={schedule.stages} divides the layers of a single stack, and the model "
            f"has {len(config.stacks)}; legal: stage=1"
        )
    layers, chunks = config.stacks[0].repeat, schedule.chunks
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
    period = len(config.stacks[0].cores)
    legal = config.mixer.chunk_multiple(config.num_sublayers)
    if legal is None:
        raise sharding.MeshError(
            f"--mesh: stage={schedule.stages} does not go with an ablation of "
            f"{config.mixer.kind}; legal: stage=1"
        )
    if layers * period // chunks % legal:
        fit = [
            n for n in range(1, layers + 1) if layers % n == 0 and layers * period // n % legal == 0
        ]
        raise sharding.MeshError(
            f"--mesh: stage={schedule.stages} x train.virtual_stages={schedule.virtual} chunks are "
            f"{layers * period // chunks} sublayers each, no multiple of a block's {legal}; legal "
            f"numbers of chunks: {', '.join(map(str, fit)) or 'none'}"
        )


def run_layers(
    decoder: Model,
    state: Float[Array, "group seq *shape"],
    y: Float[Array, "batch seq vectors size"],
    context: Context,
    schedule: sharding.Schedule,
) -> tuple[Read, Aux]:
    """All layers of a decoder: the read for the unembedding, and sums of cores' scalars.

    Args:
      decoder: with this stage's own layers: [L / P, ...], or with several virtual stages
        [V, L / (P V), ...].
      state, y: from its store's `start`.
      context: of attention.
      schedule: of the stages.

    Returns:
      This stage's part of the rows that the last stage has read, for a loss that all share; and of
      all rows the scalars of this stage's own cores.

    Raises:
      MeshError: see `check`.
    """
    check(decoder.config, schedule, len(y))
    run = _banked if decoder.config.mixer.banked else _carried
    split = lambda x, groups=1: _microbatches(x, schedule.microbatches, groups)
    groups = len(state) // len(y)  # a residual divided by `key` has the rows of all its devices
    context = jax.tree.map(split, context)
    given = (split(state, groups), split(y), context, schedule)
    read, (results, aux), site = run(decoder, *given)

    z = pipeline.on_last(
        lambda operands: jax.lax.map(lambda result: read(result, operands[1]), operands[0]),
        (results, site),
    )
    shared = lambda x: sharding.scatter_sum(x.reshape(len(y), *x.shape[2:]), "stage", axis=0)
    return jax.tree.map(shared, z), aux


def _microbatches(
    x: Shaped[Array, "batch *shape"], count: int, groups: int
) -> Shaped[Array, "count part *shape"]:
    """Runs of rows, each from every group of them; one row is the same for all."""
    if len(x) == 1:
        return jnp.broadcast_to(x, (count, *x.shape))
    x = x.reshape(groups, count, -1, *x.shape[1:]).swapaxes(0, 1)
    return x.reshape(count, -1, *x.shape[3:])


def _own_layers(decoder: Model, schedule: sharding.Schedule) -> tuple[nnx.GraphDef, Any]:
    """The graph of a layer, and the parameters of this stage's [V, layers of a chunk, ...]."""
    graphdef, layers = nnx.split(decoder.stacks[0])
    layers = nnx.to_pure_dict(layers)
    if schedule.virtual == 1:
        layers = jax.tree.map(lambda x: x[None], layers)
    return graphdef, layers


# Mixers that carry a state -------------------------------------------------------------------


def _carried(
    decoder: Model, state: Array, y: Array, context: Context, schedule: sharding.Schedule
) -> tuple[Callable, tuple[Any, Aux], tuple]:
    """How results are read; they and the sums of scalars; mixer and site to read them with."""
    config, store = decoder.config, decoder.store
    size = config.num_sublayers // schedule.chunks
    graphdef, layers = _own_layers(decoder, schedule)
    mixer_graph, mixer = nnx.split(decoder.mixer)
    start = jax.vmap(lambda state, y: decoder.mixer.start(store, state, y))

    def chunk(layers, mixer, index, carry, context):
        mixer, stack = nnx.merge(mixer_graph, mixer), nnx.merge(graphdef, layers)
        body, carry = (mixer, store, stack, config.remat), (*carry, no_aux(config, y.dtype))
        (*carry, aux), _ = scanned.scan(*body, carry, context, index * size)
        return tuple(carry), aux

    sums = jax.eval_shape(lambda: no_aux(config, y.dtype))
    results = pipeline.run_carried(
        chunk, layers, mixer, start(state, y), context, sums=sums, schedule=schedule
    )

    def read(result, site):
        mixer, site = nnx.merge(mixer_graph, site[0]), nnx.merge(site_graph, site[1])
        return mixer.advance(store, *result, site, config.num_sublayers)[1]

    site_graph, site = nnx.split(decoder.final_site)
    return read, results, (mixer, site)


# Mixers that read a bank ---------------------------------------------------------------------


def _banked(
    decoder: Model, state: Array, y: Array, context: Context, schedule: sharding.Schedule
) -> tuple[Callable, tuple[Array, Aux], tuple]:
    """The same; the results are banks."""
    store, mixer, config = decoder.store, decoder.mixer, decoder.config
    graphdef, layers = _own_layers(decoder, schedule)
    merged = nnx.merge(graphdef, layers)
    writers = merged[0].site.writer
    of_chunks = banked.Stacked(
        layers,
        _scores(decoder, graphdef, layers, schedule),
        _after(writers, decoder.final_site.writer),
    )
    writer = _first(writers)
    first = jax.vmap(lambda state, y: store.write(store.hold(state), y, writer))(state, y)
    repeat, period = config.stacks[0].repeat // schedule.chunks, len(merged)
    run, size = banked.Run(decoder, graphdef, 0, repeat, period), repeat * period
    # A chunk is whole blocks, and takes nothing but rows from what is before it.
    num_rows = mixer.first_row(size) - 1

    def rows(of_chunk, _, index, bank, context):
        """Those that chunk `index` completes, and its cores' scalars."""
        carry, at = (bank, jnp.zeros_like(bank[0]), no_aux(config, y.dtype)), index * size
        (bank, _, aux), *_ = run.forward(of_chunk, carry, context, None, keep=False, first=at)
        return jax.lax.dynamic_slice_in_dim(bank, mixer.first_row(at), num_rows), aux

    def rows_backward(of_chunk, _, index, bank, context, d_bank, d_aux):
        """Gradients of the stacked parameters and, added to `d_bank`, of the rows before."""
        carry, at = (d_bank, jnp.zeros_like(bank[0])), index * size
        kept = banked.Kept()
        if run.grouping.open:
            again = (bank, jnp.zeros_like(bank[0]), no_aux(config, y.dtype))
            kept = run.forward(of_chunk, again, context, None, keep=True, first=at)[2]
        given = (of_chunk, kept, bank, carry, context, d_aux)
        (d_bank, _), gradients = run.backward(*given, first=at)
        return gradients, (), d_bank

    banks = pipeline.run_banked(
        rows,
        of_chunks,
        (),
        first,
        context,
        chunk_rows=num_rows,
        chunk_backward=rows_backward,
        sums=jax.eval_shape(lambda: no_aux(config, y.dtype)),
        schedule=schedule,
    )

    def read(bank, parameters):
        mixer, site = nnx.merge(mixer_graph, parameters[0]), nnx.merge(site_graph, parameters[1])
        return mixer.final(store, bank, site)

    mixer_graph, mixer = nnx.split(mixer)
    site_graph, site = nnx.split(decoder.final_site)
    return read, banks, (mixer, site)


def _scores(
    decoder: Model, graphdef: nnx.GraphDef, layers: Any, schedule: sharding.Schedule
) -> Float[Array, "virtual layers period *scored"]:
    """What the sites of own layers score with, [V, layers of a chunk, sublayers of one, ...]."""
    of_chunk = lambda v: nnx.merge(graphdef, jax.tree.map(lambda x: x[v], layers))
    chunks = [of_chunk(v) for v in range(schedule.virtual)]
    scores = decoder.mixer.scores([[one.site for one in chunk] for chunk in chunks])
    if len(scores) == decoder.config.num_sublayers:
        # Learned as one matrix, that every stage has.
        scores = scores.reshape(schedule.virtual, schedule.stages, -1, *scores.shape[1:])
        scores = scores[:, sharding.axis_index("stage")]
    return scores.reshape(schedule.virtual, -1, len(chunks[0]), *scores.shape[-1:])


def _first(writers: nnx.Param | None) -> Array | None:
    """The writer of the embedding: that of the first stage's first site."""
    if writers is None:
        return None
    own = writers[...][0, 0]
    mine = jnp.where(sharding.axis_index("stage") == 0, own, jnp.zeros_like(own))
    return sharding.total(mine, "stage")


def _after(writers: nnx.Param | None, final_writer: nnx.Param | None) -> Array | None:
    """The writer of each layer's last output is the one of the site that follows.

    After a chunk, that is the next stage's.
    """
    if final_writer is None:
        return None
    writers, final_writer = writers[...], final_writer[...]
    stages = sharding.axis_size("stage")
    around = [(stage, (stage - 1) % stages) for stage in range(stages)]
    first = jax.lax.ppermute(writers[:, 0], "stage", around)
    of_last = jnp.concatenate([first[1:], final_writer[None]])
    first = jnp.where(pipeline.is_last(), of_last, first)
    return jnp.concatenate([writers[:, 1:], first[:, None]], axis=1)
