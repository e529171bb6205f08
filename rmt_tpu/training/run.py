"""A run before its first step: its functions, shardings and data. Nothing is allocated for it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx

import sharding
from rmt_tpu import data
from rmt_tpu.config import RunConfig
from rmt_tpu.decoder import Decoder, compute_dtype, residual_dtype
from rmt_tpu.errors import UsageError
from rmt_tpu.layers.parameters import metadata
from rmt_tpu.training.loss import Loss
from rmt_tpu.training.optimizer import make_optimizer
from rmt_tpu.training.step import TrainState, batch_loss, initial_state, make_train_step


class Run(NamedTuple):
    """What `train` starts from, and what can be compiled without training.

    Attributes:
      graphdef: of the decoder.
      mesh: of the devices.
      init: `() -> TrainState`, to be jitted.
      step: `(TrainState, Batch) -> (TrainState, metrics)`, to be jitted.
      loss: `(params, Batch) -> Loss` sums, to be jitted.
      state_shardings: of the TrainState.
      batch_sharding: of the batch.
    """

    graphdef: nnx.GraphDef
    mesh: jax.sharding.Mesh
    init: Callable[[], TrainState]
    step: Callable[[TrainState, data.Batch], tuple[TrainState, dict[str, jax.Array]]]
    loss: Callable[[Any, data.Batch], Loss]
    state_shardings: TrainState
    batch_sharding: jax.sharding.NamedSharding


def resolve_dtypes(config: RunConfig) -> RunConfig:
    """`config` with "auto" dtypes as they are on this platform."""
    store = dataclasses.replace(config.model.store, dtype=residual_dtype(config.model).name)
    dtype = compute_dtype(config.model.compute_dtype).name
    model = dataclasses.replace(config.model, compute_dtype=dtype, store=store)
    return dataclasses.replace(config, model=model)


def prepare(config: RunConfig, mesh: jax.sharding.Mesh) -> Run:
    """The functions and shardings of a run on a mesh.

    Raises:
      MeshError: a size does not divide over the mesh.
    """
    sharding.check_batch_size(mesh, config.train.batch_size, parts=config.train.accumulate)
    make = lambda: Decoder(config.model, rngs=nnx.Rngs(config.train.seed))
    abstract = nnx.eval_shape(make)
    graphdef, _ = nnx.split(abstract, nnx.Param)
    optimizer = make_optimizer(
        config.train.optimizer,
        steps=config.train.steps,
        roles=metadata(abstract, "role"),
        width_ratio=config.model.width_ratio,
    )

    def init() -> TrainState:
        params = nnx.to_pure_dict(nnx.state(make(), nnx.Param))
        return initial_state(params, optimizer, jax.random.key(config.train.seed))

    shardings = _state_shardings(mesh, metadata(abstract, "axes"), jax.eval_shape(init))
    return Run(
        graphdef=graphdef,
        mesh=mesh,
        init=init,
        step=_on_mesh(mesh, make_train_step(config, graphdef, optimizer)),
        loss=_on_mesh(mesh, functools.partial(batch_loss, graphdef)),
        state_shardings=shardings,
        batch_sharding=sharding.batch_sharding(mesh),
    )


def _on_mesh(mesh: jax.sharding.Mesh, function: Callable) -> Callable:
    def traced(*args):
        with sharding.on_mesh(mesh):
            return function(*args)

    return traced


def _state_shardings(mesh: jax.sharding.Mesh, axes: Any, state: TrainState) -> TrainState:
    """Parameters, and what the optimizer keeps of each, by the rules; the rest on every device."""
    params = sharding.parameter_shardings(mesh, axes, state.params)
    replicated = sharding.replicated(mesh)
    structure = jax.tree.structure(state.params)
    like_params = lambda tree: jax.tree.structure(tree) == structure
    optimizer = jax.tree.map(
        lambda tree: params if like_params(tree) else replicated,
        state.optimizer,
        is_leaf=like_params,
    )
    return TrainState(params, optimizer, replicated, replicated, replicated, replicated)


class Datasets(NamedTuple):
    """Windows to train on, and windows held out."""

    train: data.Windows
    held_out: data.Windows


def load_datasets(config: RunConfig, tokenizer: data.Tokenizer) -> Datasets:
    """Reads, splits, tokenises and packs the run's text.

    Raises:
      UsageError: a file is missing or unreadable, the text is shorter than a window, or the
        tokenizer has more tokens than the model.
    """
    if tokenizer.vocab_size > config.model.vocab_size:
        raise UsageError(
            f"model.vocab_size={config.model.vocab_size} is smaller than the {tokenizer.vocab_size}"
            f" tokens of --tokenizer={config.data.tokenizer}; legal: {tokenizer.vocab_size} or more"
        )
    seed = config.train.seed
    documents = data.documents(config.data.source)
    train, held_out = data.split(documents, eval_fraction=config.data.eval_fraction, seed=seed)

    def windows(part: list[str], shuffle: bool) -> data.Windows:
        return data.Windows(
            data.pack(part, tokenizer),
            seq_len=config.data.seq_len,
            batch_size=config.train.batch_size,
            bos=tokenizer.bos,
            seed=seed,
            shuffle=shuffle,
        )

    return Datasets(windows(train, shuffle=True), windows(held_out, shuffle=False))
