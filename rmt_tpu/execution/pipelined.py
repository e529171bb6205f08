"""The schedule for a mesh with pipeline stages: microbatches pass through chunks of layers.

The schedule runs in per-device code, with `sharding.pipeline`. There are two kinds of mixers. One
kind passes a state from layer to layer. The input of a chunk is then this state, and only the first
stage computes a microbatch's embedding. The other kind reads a bank, a stack of earlier outputs.
The input of a chunk is then the bank's rows before the chunk. Row 0 is the embedding, which every
stage computes. The last stage reads the input of the unembedding, and each stage computes a part of
the loss.

The backward pass of a microbatch starts as soon as the microbatch's loss is known. It recomputes
each chunk; `remat` determines what is kept while a chunk is recomputed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Shaped

import sharding
from rmt_tpu import config as cfg
from rmt_tpu.cores import Aux, Context
from rmt_tpu.execution import banked_stack, banked_state, kernels, scanned
from rmt_tpu.execution.layer import DecoderParts, no_aux, start
from rmt_tpu.layers.data_vectors import Read
from sharding import pipeline
from sharding.banked import BankPipeline
from sharding.carried import StatePipeline


class Microbatch(NamedTuple):
    """The inputs of a microbatch.

    Attributes:
      tokens: the tokens of the microbatch's rows.
      context: the context of attention.
      of_tokens: further inputs of the loss, in arrays with one value per token.
    """

    tokens: Int[Array, "*microbatches part seq"]
    context: Context
    of_tokens: Any = ()


def check(config: cfg.ModelConfig, schedule: sharding.Schedule, sequences: int) -> None:
    """Check that a pipeline can run the model, and that layers and sequences divide evenly.

    Args:
      config: the model's config.
      schedule: the schedule of the stages.
      sequences: the number of sequences per batch on one device.

    Raises:
      MeshError: layers or sequences do not divide evenly, or the model cannot run in a pipeline.
    """
    if len(config.stacks) > 1:
        raise sharding.MeshError(
            f"--mesh: stage={schedule.stages} needs a model with a single stack of layers, but "
            f"this model has {len(config.stacks)} stacks; legal: stage=1"
        )
    layers, chunks = config.stacks[0].repeat, schedule.chunks
    if layers % chunks:
        name = "num_layers" if "num_layers" in config.short_form() else "stacks.0.repeat"
        raise sharding.MeshError(
            f"model.{name}={layers} is not divisible by stage={schedule.stages} x "
            f"train.virtual_stages={schedule.virtual}; nearest legal: "
            f"{sharding.nearest_multiples(layers, chunks)}"
        )
    if sequences % schedule.microbatches:
        automatic = schedule.microbatches == schedule.stages
        meaning = f" (0 means stage={schedule.stages})" if automatic else ""
        raise sharding.MeshError(
            f"train.microbatches={schedule.microbatches}{meaning} does not divide the {sequences} "
            f"sequences per device; nearest legal: "
            f"{sharding.nearest_multiples(sequences, schedule.microbatches)} sequences"
        )
    if config.rebuilds_residual:
        raise sharding.MeshError(
            f"--mesh: stage={schedule.stages} does not support model.remat={config.remat!r}; legal "
            "policies: none, dots, offload, full"
        )
    period = len(config.stacks[0].cores)
    legal = config.mixer.chunk_multiple(config.num_sublayers)
    if layers * period // chunks % legal:
        fit = [
            n for n in range(2, layers + 1) if layers % n == 0 and layers * period // n % legal == 0
        ]
        fits = f"legal numbers of chunks: {', '.join(map(str, fit))}, or stage=1"
        raise sharding.MeshError(
            f"--mesh: with stage={schedule.stages} x train.virtual_stages={schedule.virtual}, each "
            f"chunk of layers has {layers * period // chunks} sublayers, which is not a multiple "
            f"of the {legal} sublayers of a block; {fits if fit else 'legal: stage=1'}"
        )


def run_layers(
    decoder: DecoderParts,
    tokens: Int[Array, "batch seq"],
    context: Context,
    schedule: sharding.Schedule,
) -> tuple[Read, Aux]:
    """Return the input of the unembedding, and the sums of the cores' scalars.

    Args:
      decoder: the decoder with only this stage's layers: [L / P, ...], or [V, L / (P V), ...] with
        V virtual stages. L is the number of layers, and P is the number of stages.
      tokens: the tokens of the rows.
      context: the context of attention.
      schedule: the schedule of the stages.

    Returns:
      The unembedding's input for this stage's part of the rows, and the scalars of this stage's
      cores, summed over all rows.

    Raises:
      MeshError: see `check`.
    """
    microbatches = _microbatches(decoder, Microbatch(tokens, context), schedule)

    def last(reading, result, _):
        return pipeline.on_last(lambda operands: stages.read(*operands), (reading, result))

    stages = _stages(decoder, schedule)
    z, aux = stages.pipeline(last).results(stages.parameters, microbatches)
    shared = lambda x: sharding.scatter_sum(x.reshape(len(tokens), *x.shape[2:]), "stage", axis=0)
    return jax.tree.map(shared, z), aux


def loss(
    decoder: DecoderParts,
    tokens: Int[Array, "batch seq"],
    context: Context,
    of_tokens: Any,
    terms: Callable[..., Any],
    weights: tuple[Any, dict[str, float]],
    schedule: sharding.Schedule,
) -> tuple[Float[Array, ""], tuple[Any, Aux]]:
    """Return an objective whose gradient needs memory for only a few microbatches at a time.

    Args:
      decoder, tokens, context, schedule: see `run_layers`.
      of_tokens: a tuple of arrays shaped like `tokens`, passed to `terms`.
      terms: a function `terms(z, kernel, *of_tokens)`, where z is the input of the unembedding and
        `kernel` its weights. It returns scalars that are sums over tokens, and accepts any
        selection of tokens, in rows of any length.
      weights: the weights of the terms and of the cores' scalars in the objective.

    Returns:
      This stage's part of the objective, and the sums of the terms and of this stage's cores'
      scalars. The sums have no gradient.

    Raises:
      MeshError: see `check`.
    """
    own = lambda x: sharding.own_part(x, sharding.token_axes(), axis=1)
    batch = Microbatch(tokens, context, jax.tree.map(own, of_tokens))
    microbatches = _microbatches(decoder, batch, schedule)
    stages = _stages(decoder, schedule)

    def last(parameters, result, microbatch):
        reading, kernel = parameters
        z = pipeline.on_last(lambda operands: stages.read(*operands), (reading, result))
        share = sharding.scatter_sum(_tokens(z.residual, schedule.stages), "stage", axis=0)
        part = lambda x: sharding.own_part(_tokens(x, schedule.stages), "stage", axis=0)[None]
        return terms(share[None], kernel, *jax.tree.map(part, microbatch.of_tokens))

    parameters = stages.parameters
    parameters = parameters._replace(last=(parameters.last, decoder.unembedding.matrix))
    with kernels.preferred(decoder.config):
        return stages.pipeline(last).objective(parameters, microbatches, weights)


def _microbatches(
    decoder: DecoderParts, batch: Microbatch, schedule: sharding.Schedule
) -> Microbatch:
    """Split rows into M microbatches, [M, rows / M, ...].

    An array with a single row, such as positions, is copied to every microbatch.
    """
    check(decoder.config, schedule, len(batch.tokens))
    count = schedule.microbatches

    def split(x: Shaped[Array, "batch *shape"]) -> Shaped[Array, "count part *shape"]:
        if len(x) == 1:
            return jnp.broadcast_to(x, (count, *x.shape))
        return x.reshape(count, -1, *x.shape[1:])

    return jax.tree.map(split, batch)


def _tokens(x: Shaped[Array, "batch seq *shape"], parts: int) -> Shaped[Array, "tokens *shape"]:
    """Flatten the tokens of all rows into one axis, padded with zeros to a multiple of `parts`."""
    x = x.reshape(-1, *x.shape[2:])
    return jnp.pad(x, [(0, -len(x) % parts), *[(0, 0)] * (x.ndim - 1)])


class Stages(NamedTuple):
    """A decoder in the form that `sharding.pipeline` accepts.

    Attributes:
      pipeline: a function that returns the pipeline, given the function to run after the last
        chunk.
      parameters: the pipeline's parameters; `last` has the parameters of `read`.
      read: a function `read(parameters, result)` that returns the input of the unembedding from the
        final state or bank.
    """

    pipeline: Callable[[pipeline.Last], StatePipeline | BankPipeline]
    parameters: pipeline.Parameters
    read: Callable[[Any, Any], Read]


def _stages(decoder: DecoderParts, schedule: sharding.Schedule) -> Stages:
    return (_bank_stages if decoder.config.mixer.banked else _state_stages)(decoder, schedule)


def _parameters(*modules: nnx.Module) -> tuple[tuple, Callable[[tuple], list[nnx.Module]]]:
    """Return the modules' parameters, and a function that makes the modules from parameters."""
    graphdefs, states = zip(*map(nnx.split, modules), strict=True)
    return states, lambda states: list(map(nnx.merge, graphdefs, states))


def _own_layers(decoder: DecoderParts, schedule: sharding.Schedule) -> tuple[nnx.GraphDef, Any]:
    """Return the graph definition of a layer, and the parameters of this stage's layers.

    The parameters are [V, layers of a chunk, ...], with V the number of chunks per stage.
    """
    graphdef, layers = nnx.split(decoder.stacks[0])
    layers = nnx.to_pure_dict(layers)
    if schedule.virtual == 1:
        layers = jax.tree.map(lambda x: x[None], layers)
    return graphdef, layers


# Pipelines for mixers that pass a state from layer to layer ----------------------------------


def _state_stages(decoder: DecoderParts, schedule: sharding.Schedule) -> Stages:
    config, dtype = decoder.config, decoder.dtype
    size = config.num_sublayers // schedule.chunks
    graphdef, layers = _own_layers(decoder, schedule)
    first_params, to_start = _parameters(decoder.embedding, decoder.store, decoder.mixer)
    mixer_params, to_mixer = _parameters(decoder.mixer)
    last_params, to_read = _parameters(decoder.store, decoder.mixer, decoder.final_site)

    def first(first_params, microbatch):
        embedding, store, mixer = to_start(first_params)
        return mixer.start(
            store, *start(embedding, store, microbatch.tokens, microbatch.context, dtype)
        )

    def chunk(layers, mixer_params, index, carry, microbatch):
        (mixer,), stack = to_mixer(mixer_params), nnx.merge(graphdef, layers)
        carry = (*carry, no_aux(config, dtype))
        (*carry, aux), _ = scanned.scan(
            mixer, decoder.store, stack, config, carry, microbatch.context, index * size
        )
        return tuple(carry), aux

    def read(last_params, result):
        store, mixer, site = to_read(last_params)
        return mixer.advance(store, *result, site, config.num_sublayers)[1]

    sums = jax.eval_shape(lambda: no_aux(config, dtype))
    return Stages(
        lambda last: StatePipeline(first, chunk, last, schedule, sums=sums),
        pipeline.Parameters(first_params, layers, mixer_params, last_params),
        read,
    )


# Pipelines for mixers that read a bank of earlier outputs ------------------------------------


def _bank_stages(decoder: DecoderParts, schedule: sharding.Schedule) -> Stages:
    mixer, config, dtype = decoder.mixer, decoder.config, decoder.dtype
    graphdef, layers = _own_layers(decoder, schedule)
    merged = nnx.merge(graphdef, layers)
    writers = merged[0].site.writer
    chunk_params = banked_state.StackArrays(
        layers,
        _scores(decoder, graphdef, layers, schedule),
        _next_writers(writers, decoder.final_site.writer),
    )
    repeat, cores = config.stacks[0].repeat // schedule.chunks, config.stacks[0].cores
    runner = banked_stack.StackRunner(config, decoder.store, mixer, graphdef, 0, repeat, cores)
    size = repeat * len(cores)
    # A chunk of layers consists of whole blocks, so its only input is the bank's rows before it.
    num_rows = mixer.row(size) - mixer.row(0)
    first_params, to_start = _parameters(decoder.embedding, decoder.store)
    last_params, to_read = _parameters(decoder.store, mixer, decoder.final_site)

    def first(first_params, microbatch):
        (embedding, store), writer = to_start(first_params[0]), first_params[1]
        state, y = start(embedding, store, microbatch.tokens, microbatch.context, dtype)
        return mixer.embedding(store.write(store.hold(state), y, writer))

    def rows(chunk_arrays, _, index, bank, microbatch):
        """Return the bank rows that a chunk of layers completes, and its cores' scalars."""
        carry, at = (bank, jnp.zeros_like(bank[0]), no_aux(config, dtype)), index * size
        (bank, _, aux), *_ = runner.forward(chunk_arrays, carry, microbatch.context, None, first=at)
        return jax.lax.dynamic_slice_in_dim(bank, mixer.row(at), num_rows), aux

    def rows_backward(chunk_arrays, _, index, bank, microbatch, d_bank, d_aux):
        """Run a chunk of layers backwards, and add the gradient of its input rows to d_bank."""
        carry, at = (d_bank, jnp.zeros_like(bank[0])), index * size
        saved = banked_state.SavedStack()
        if runner.grouping.open:
            again = (bank, jnp.zeros_like(bank[0]), no_aux(config, dtype))
            saved = runner.forward(
                chunk_arrays, again, microbatch.context, None, keep=True, first=at
            )[2]
        (d_bank, _), gradients = runner.backward(
            chunk_arrays, saved, bank, carry, microbatch.context, d_aux, first=at
        )
        return gradients, (), d_bank

    def read(last_params, bank):
        store, mixer, site = to_read(last_params)
        return mixer.final(store, bank, site)

    options = {
        "chunk_rows": num_rows,
        "first_chunk_row": mixer.row(0),
        "chunk_backward": rows_backward,
        "sums": jax.eval_shape(lambda: no_aux(config, dtype)),
    }
    first_params = (first_params, _first(writers))
    return Stages(
        lambda last: BankPipeline(first, rows, last, schedule, **options),
        pipeline.Parameters(first_params, chunk_params, (), last_params),
        read,
    )


def _scores(
    decoder: DecoderParts, graphdef: nnx.GraphDef, layers: Any, schedule: sharding.Schedule
) -> Float[Array, "virtual layers period *scored"]:
    """Return the scoring parameters (such as queries) of the sites in this stage's layers.

    The result is [V, layers of a chunk, sublayers of a layer, ...].
    """
    chunk_at = lambda v: nnx.merge(graphdef, jax.tree.map(lambda x: x[v], layers))
    chunks = [chunk_at(v) for v in range(schedule.virtual)]
    scores = decoder.mixer.scores([[sublayer.site for sublayer in chunk] for chunk in chunks])
    if len(scores) == decoder.config.num_sublayers:
        # This mixer learns its scoring parameters as one matrix, which every stage has. Select the
        # rows for this stage's layers.
        scores = scores.reshape(schedule.virtual, schedule.stages, -1, *scores.shape[1:])
        scores = scores[:, sharding.axis_index("stage")]
    return scores.reshape(schedule.virtual, -1, len(chunks[0]), *scores.shape[-1:])


def _first(writers: nnx.Param | None) -> Array | None:
    """Return the parameters that write the embedding, on every stage of the pipeline.

    They belong to the first site of the first stage, which sends them to all other stages.
    """
    if writers is None:
        return None
    own = writers[...][0, 0]
    mine = jnp.where(sharding.axis_index("stage") == 0, own, jnp.zeros_like(own))
    return sharding.total(mine, "stage")


def _next_writers(writers: nnx.Param | None, final_writer: nnx.Param | None) -> Array | None:
    """Return, for each layer, the parameters that write its last output.

    They are the parameters of the site after the layer. The next stage sends those for the last
    layer of a chunk.
    """
    if final_writer is None:
        return None
    writers, final_writer = writers[...], final_writer[...]
    stages = sharding.axis_size("stage")
    around = [(stage, (stage - 1) % stages) for stage in range(stages)]
    first = jax.lax.ppermute(writers[:, 0], "stage", around)
    last_params = jnp.concatenate([first[1:], final_writer[None]])
    first = jnp.where(pipeline.is_last(), last_params, first)
    return jnp.concatenate([writers[:, 1:], first[:, None]], axis=1)
