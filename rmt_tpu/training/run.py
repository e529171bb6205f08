"""Construction of a run's functions and shardings, without allocating any arrays."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import sharding
from pallas_kernels.target import Target
from rmt_tpu import data
from rmt_tpu.config import REVERSIBLE, START_FIELDS, Core, ModelConfig, RematPolicy, RunConfig
from rmt_tpu.cores.experts import dropless
from rmt_tpu.decoder import Decoder, compute_dtype, residual_dtype
from rmt_tpu.distributed import program_cache
from rmt_tpu.errors import UsageError
from rmt_tpu.evaluation.scores import TokenScores, token_scores
from rmt_tpu.execution import kernels, pipelined
from rmt_tpu.execution.plan import faster_in_parts
from rmt_tpu.layers.parameters import metadata
from rmt_tpu.residual.fixed_point import with_float_residual
from rmt_tpu.training import compiler_options, depth_rate
from rmt_tpu.training.copies import Copies, copied_paths, leaves_by_path, make_copies
from rmt_tpu.training.freeze import freeze_of
from rmt_tpu.training.loss import Loss
from rmt_tpu.training.optimizer import make_optimizer
from rmt_tpu.training.remat_choice import Devices, keeps_products
from rmt_tpu.training.step import (
    TrainState,
    add_up_parts,
    batch_loss,
    initial_state,
    make_gradients,
    make_train_step,
)

# Parameters that a model has separately if it has fewer key heads than query heads. Otherwise, they
# are part of other parameters, which have the same fan-in.
_JOINED = {"read_fewer": "read", "value_taps": "taps"}
# Maps the default remat to the policy that also keeps products.
_WITH_PRODUCTS = {"full": "dots", "reversible": "reversible_dots"}


class PreparedRun(NamedTuple):
    """The functions and shardings of a run, which can be compiled without training.

    Attributes:
      graphdef: graph definition of the decoder that evaluation and sampling use. Its residual is in
        floating point.
      mesh: the mesh of devices.
      abstract: shapes and dtypes of the TrainState.
      init: a function `() -> TrainState` that computes the initial state; not jitted.
      copies: a function `params -> Copies` that copies weights in the compute dtype; not jitted.
      gradients: a function `(params, Batch) -> (gradients, mean Loss)`; not jitted.
      step: a function `(TrainState, Batch) -> (TrainState, metrics)`; see `jitted_step`.
      loss: a function `(params, Batch) -> Loss` that returns sums over tokens; not jitted.
      scores: a function `(params, tokens, targets) -> TokenScores`; not jitted.
      state_shardings: sharding of each array in the TrainState.
      batch_sharding: sharding of each array in a batch.
    """

    graphdef: nnx.GraphDef
    mesh: jax.sharding.Mesh
    abstract: TrainState
    init: Callable[[], TrainState]
    copies: Callable[[Any], Copies]
    gradients: Callable[[Any, data.Batch], tuple[Any, Loss]]
    step: Callable[[TrainState, data.Batch], tuple[TrainState, dict[str, jax.Array]]]
    loss: Callable[[Any, data.Batch], Loss]
    scores: Callable[[Any, jax.Array, jax.Array], TokenScores]
    state_shardings: TrainState
    batch_sharding: jax.sharding.NamedSharding

    def jitted_init(self) -> Callable[[], TrainState]:
        """Return `init` jitted such that each device computes only its own part of the state."""
        options = compiler_options.for_init(self.mesh)
        return jax.jit(self.init, out_shardings=self.state_shardings, compiler_options=options)

    def jitted_step(self) -> Callable[..., Any]:
        """Return `step` jitted with the buffers of its state donated, as used for training."""
        options = compiler_options.for_step(self.mesh)
        return jax.jit(self.step, donate_argnums=0, compiler_options=options)

    def with_copies(self, state: TrainState) -> TrainState:
        """Return `state` with new copies of its weights in the compute dtype."""
        make = jax.jit(self.copies, out_shardings=self.state_shardings.copies)
        return state._replace(copies=make(state.params) if self.abstract.copies else {})


def resolve_auto(
    config: RunConfig,
    resume_overrides: Mapping[str, Any] = MappingProxyType({}),
    devices: Devices | None = None,
) -> RunConfig:
    """Return `config` with each "auto", and `accumulate`, replaced by the choice for this platform.

    The default remat of an RMT is "reversible". It takes less time than "full" on TPUs (by
    estimate) and CPUs, and less memory on all platforms. It is not available with pipeline stages
    or a bfloat16 residual. The default of other models is "full". If `remat_choice.keeps_products`
    says so, products are kept as well: the default is then "reversible_dots" or "dots".

    A batch has one part by default, or more if `plan.faster_in_parts` says so.

    Args:
      config: the run's config.
      resume_overrides: values of the run that is resumed, from `workdir.resume_overrides`, or {}
        for a new run. Its remat replaces "auto". Its residual stays float32 if it has outgrown
        int16. Its `depth_rate` is used if the config has none. What it has set in `START_FIELDS`
        replaces the values of the config. A value that it has not set stays, so that
        `workdir.check_workdir` sees the difference.
      devices: the devices that the run trains on; None if they are not known. No policy that
        keeps products is then chosen, and a batch has one part. The same holds for devices that
        do not fit the mesh, on which the run cannot train.

    Raises:
      UsageError: a dtype is float64 without JAX_ENABLE_X64, and jax would silently use float32.
    """
    model = config.model
    if devices is not None and not _fits(config.train.mesh, devices):
        devices = None
    for path, dtype in {
        "model.compute_dtype": model.compute_dtype,
        "model.store.dtype": model.store.dtype,
    }.items():
        if dtype == "float64" and not jax.config.jax_enable_x64:
            raise UsageError(
                f"{path}='float64' needs JAX_ENABLE_X64=1 in the environment; set that variable, "
                f"or set {path} to auto, float32 or bfloat16"
            )
    dtype = compute_dtype(model.compute_dtype).name
    stages = sharding.parse_mesh(config.train.mesh).get("stage", 1)
    asked = model.remat
    model = dataclasses.replace(
        model, compute_dtype=dtype, remat=_remat(model, stages, resume_overrides)
    )
    of_residual = residual_dtype(model).name
    # A run in bfloat16 that rebuilds a float32 residual has outgrown int16. A run in float32 never
    # had an int16 residual.
    kept = {"store.dtype": "float32", "compute_dtype": "bfloat16"}
    overflowed = all(resume_overrides.get(f"model.{path}") == kept[path] for path in kept)
    overflowed = overflowed and resume_overrides.get("model.remat") in REVERSIBLE
    if overflowed and model.store.dtype == "auto" and of_residual == "int16":
        of_residual = "float32"
    store = dataclasses.replace(model.store, dtype=of_residual)
    began = {
        path: resume_overrides.get(f"train.{path}") or getattr(config.train, path)
        for path in START_FIELDS
    }
    if config.train.depth_rate is None:
        began["depth_rate"] = resume_overrides.get("train.depth_rate")
    train = dataclasses.replace(config.train, **began)
    config = RunConfig(dataclasses.replace(model, store=store), train, config.data)
    parts = train.accumulate or _parts(config, resume_overrides.get("train.accumulate"), devices)
    config = dataclasses.replace(config, train=dataclasses.replace(train, accumulate=parts))
    is_free = asked == "auto" and "model.remat" not in resume_overrides
    if is_free and devices is not None:
        keeps = keeps_products(config, devices)
        if keeps is not None and keeps.value:
            remat = _WITH_PRODUCTS[config.model.remat]
            model = dataclasses.replace(config.model, remat=remat)
            return dataclasses.replace(config, model=model)
    return config


def _fits(mesh: str, devices: Devices) -> bool:
    try:
        sharding.mesh_sizes(mesh, devices.count)
    except sharding.MeshError:
        return False
    return True


def _remat(model: ModelConfig, stages: int, resume_overrides: Mapping[str, Any]) -> RematPolicy:
    if model.remat != "auto":
        return model.remat
    can_be_rebuilt = model.store.has_keys and model.store.dtype != "bfloat16" and stages == 1
    legal = [p for p in model.mixer.remats if p not in REVERSIBLE or can_be_rebuilt]
    if resume_overrides.get("model.remat") in legal:
        return resume_overrides["model.remat"]
    return "reversible" if "reversible" in legal else "full"


def _parts(config: RunConfig, kept: int | None, devices: Devices | None) -> int:
    """Return the number of parts of a batch: the one that a resumed run has, or the fastest."""
    if devices is None:
        return kept or 1
    sizes = sharding.mesh_sizes(config.train.mesh, devices.count)
    shards = math.prod(sizes[axis] for axis in sharding.RULES["batch"])
    if kept and config.train.batch_size % (kept * shards) == 0:
        return kept
    chosen = faster_in_parts(config, Target(devices.kind), sizes)
    return 1 if chosen is None else chosen.value


def prepare(config: RunConfig, mesh: jax.sharding.Mesh) -> PreparedRun:
    """Construct the functions and shardings of a run on a mesh.

    Raises:
      MeshError: a size is not divisible by the number of devices that it is sharded over.
    """
    check_sizes(config, mesh)
    program_cache.bypass_for_cpu_meshes()
    schedule = pipeline_schedule(config, mesh)
    make = lambda: Decoder(config.model, rngs=nnx.Rngs(config.train.seed))
    abstract = nnx.eval_shape(make)
    graphdef = used = nnx.split(abstract, nnx.Param)[0]
    # A held-out loss must not depend on the other rows of its batch.
    if (model := dropless(with_float_residual(config.model))) != config.model:
        used = nnx.split(nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0))), nnx.Param)[0]
    names, virtual = metadata(abstract, "axes"), schedule.virtual if schedule else 1
    # Pipelines use no copies: their stages sum gradients over microbatches, and the gradients of
    # bfloat16 copies would have too few bits for such sums.
    dtype = compute_dtype(config.model.compute_dtype)
    paths = frozenset() if schedule else copied_paths(abstract, dtype)
    copies = functools.partial(make_copies, paths=paths, dtype=dtype)
    roles = metadata(abstract, "role")
    rates, over_depth = depth_rate.scale_rates(config, _rates(config.model, abstract))
    freeze = freeze_of(config.train, roles)
    optimizer = make_optimizer(
        config.train.optimizer,
        steps=config.train.steps,
        roles=roles,
        axes=names,
        rates=rates,
        over_depth=over_depth,
        freeze=freeze,
    )

    def init() -> TrainState:
        params = nnx.to_pure_dict(nnx.state(make(), nnx.Param))
        params = _in_chunks(params, names, virtual)
        key = jax.random.key(config.train.seed)
        return initial_state(params, optimizer, key, copies(params))

    state = jax.eval_shape(init)
    specs = _parameter_specs(mesh, names, virtual, state.params)
    batch_sharding = sharding.batch_sharding(mesh)
    replicated, in_specs = PartitionSpec(), (specs, batch_sharding.spec)
    gradients = kernels.per_device(
        make_gradients(config, graphdef, specs, schedule), mesh, in_specs, (specs, replicated)
    )
    loss = kernels.per_device(_held_out_loss(config, used, schedule), mesh, in_specs, replicated)
    return PreparedRun(
        graphdef=used,
        mesh=mesh,
        abstract=state,
        init=init,
        copies=copies,
        gradients=gradients,
        step=make_train_step(config, gradients, optimizer, roles, copies, freeze),
        loss=loss,
        scores=_scores(config, mesh, specs, schedule),
        state_shardings=_state_shardings(mesh, specs, state),
        batch_sharding=batch_sharding,
    )


def place_parameters(model: ModelConfig, mesh: jax.sharding.Mesh, virtual: int) -> tuple[Any, Any]:
    """Return the shapes of a model's parameters, as a run stores them, and their partition specs.

    Args:
      model: the model's config.
      mesh: the mesh of devices.
      virtual: number of virtual pipeline stages, into which the axis of layers is split.

    Raises:
      MeshError: an axis does not divide evenly over the mesh.
    """
    abstract = nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0)))
    names = metadata(abstract, "axes")
    params = nnx.to_pure_dict(nnx.state(abstract, nnx.Param))
    shapes = jax.eval_shape(lambda params: _in_chunks(params, names, virtual), params)
    return shapes, _parameter_specs(mesh, names, virtual, shapes)


def _parameter_specs(mesh: jax.sharding.Mesh, names: Any, virtual: int, shapes: Any) -> Any:
    chunked = lambda axes: ("virtual", *axes) if virtual > 1 and axes[0] == "layer" else axes
    placed = jax.tree.map(chunked, names, is_leaf=lambda leaf: isinstance(leaf, tuple))
    return sharding.parameter_specs(mesh, placed, shapes)


def _held_out_loss(
    config: RunConfig, graphdef: nnx.GraphDef, schedule: sharding.Schedule | None
) -> Callable[[Any, data.Batch], Loss]:
    """Return the per-device function `PreparedRun.loss`.

    It computes a batch in as many parts as training does, because a run that accumulates gradients
    has no memory for the activations of a whole batch.
    """

    def loss(params: Any, batch: data.Batch) -> Loss:
        of_part = lambda part: batch_loss(graphdef, params, part, schedule=schedule)
        return sharding.add_up(add_up_parts(of_part, batch, config.train.parts))

    return loss


def _scores(
    config: RunConfig, mesh: jax.sharding.Mesh, specs: Any, schedule: sharding.Schedule | None
) -> Callable[[Any, jax.Array, jax.Array], TokenScores]:
    """Return `PreparedRun.scores`, whose results are sharded over batch axes and stages."""
    make = lambda: Decoder(dropless(with_float_residual(config.model)), rngs=nnx.Rngs(0))
    graphdef, _ = nnx.split(nnx.eval_shape(make), nnx.Param)

    def scores(params: Any, tokens: jax.Array, targets: jax.Array) -> TokenScores:
        return token_scores(nnx.merge(graphdef, params), tokens, targets, schedule)

    tokens = sharding.batch_sharding(mesh).spec
    out = PartitionSpec((*sharding.RULES["batch"], "stage"), sharding.RULES["tokens"])
    return kernels.per_device(scores, mesh, (specs, tokens, tokens), TokenScores(out, out))


def _rates(model: ModelConfig, abstract: Decoder) -> Any:
    """Return the muP factor of each parameter's learning rate.

    The factor is the parameter's fan-in in muP's base model divided by its fan-in in this model.

    Raises:
      UsageError: this model has a parameter that the base model does not have.
    """
    own = metadata(abstract, "fan_in")
    if model.base_model == model:
        return jax.tree.map(lambda _: 1.0, own)
    base = nnx.eval_shape(lambda: Decoder(model.base_model, rngs=nnx.Rngs(0)))
    of_base = dict(jax.tree_util.tree_leaves_with_path(metadata(base, "fan_in")))

    def rate(path: tuple, fan_in: int) -> float:
        name = path[-1].key
        joined = (*path[:-1], jax.tree_util.DictKey(_JOINED.get(name, name)))
        if (of_path := of_base.get(path, of_base.get(joined))) is None:
            raise UsageError(
                f"ModelConfig.parametrization.base has no {jax.tree_util.keystr(path)}, which the "
                "model has; legal: changes of sizes only, like store.dim=128"
            )
        return of_path / fan_in

    return jax.tree_util.tree_map_with_path(rate, own)


def pipeline_schedule(config: RunConfig, mesh: jax.sharding.Mesh) -> sharding.Schedule | None:
    """Return the schedule of the pipeline, or None if the mesh has only one stage.

    Raises:
      MeshError: the layers or the batch cannot be divided over the stages.
    """
    stages, virtual = mesh.shape["stage"], config.train.virtual_stages
    if stages == 1:
        return None
    schedule = sharding.Schedule(stages, virtual, config.train.microbatches or stages)
    devices = math.prod(mesh.shape[axis] for axis in sharding.RULES["batch"])
    rows = config.train.batch_size // devices // config.train.parts
    pipelined.check(config.model, schedule, rows)
    return schedule


def _in_chunks(params: Any, names: Any, virtual: int) -> Any:
    """Reshape the layer axis of parameters to [virtual, layers / virtual].

    A pipeline with `virtual` stages per device divides the layers into `virtual` chunks. The second
    axis is sharded over the pipeline stages, so that each stage has a part of every chunk.
    """
    if virtual == 1:
        return params

    def split(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
        return x.reshape(virtual, -1, *x.shape[1:]) if names[0] == "layer" else x

    return jax.tree.map(split, params, names)


def check_sizes(config: RunConfig, mesh: jax.sharding.Mesh) -> None:
    """Raise MeshError unless batches, sequences, heads and experts divide evenly over the mesh."""
    train, model = config.train, config.model
    parts, tokens = train.parts, mesh.shape["sequence"] * mesh.shape["tensor"]
    sharding.check_divides(mesh, "--batch_size", train.batch_size, "batch", parts=parts)
    sharding.check_divides(mesh, "--seq_len", config.data.seq_len, "tokens")
    # Devices that share a sequence divide the heads among them. If there are too few heads, the
    # devices form a ring along the mesh axis `sequence` instead, and each of them has two parts of
    # the sequence.
    for core in model.cores:
        ring = core.by_ring and any(n % tokens for n in core.divided_heads.values())
        for name, heads in core.divided_heads.items():
            axis = "heads" if ring else "tokens"
            sharding.check_divides(mesh, f"model.{core.kind}.{name}", heads, axis)
        if ring:
            _check_ring(mesh, core)
            what = f"parts per device, because {core.kind} has fewer heads than there are devices"
            seq_len = config.data.seq_len
            sharding.check_divides(mesh, "--seq_len", seq_len, "tokens", parts=2, what=what)
    sharding.check_keys(mesh, model.store.has_keys, model.mixer.undivided)
    sharding.check_experts(mesh, bool(model.cores_of_kind("experts")))


def _check_ring(mesh: jax.sharding.Mesh, core: Core) -> None:
    """Raise MeshError if devices would pass tokens around a ring within a stage of a pipeline.

    Stages without a microbatch skip their layers, but all devices have to exchange at a time.
    """
    sequence, stages = mesh.shape["sequence"], mesh.shape["stage"]
    if sequence > 1 and stages > 1:
        name, heads = min(core.divided_heads.items(), key=lambda item: item[1])
        raise sharding.MeshError(
            f"--mesh: sequence={sequence} with model.{core.kind}.{name}={heads} passes tokens "
            f"around a ring of devices, which stage={stages} does not support; legal: stage=1, or "
            f"a multiple of {sequence * mesh.shape['tensor']} heads"
        )


def _state_shardings(mesh: jax.sharding.Mesh, specs: Any, state: TrainState) -> TrainState:
    """Return the shardings of a TrainState.

    Parameters, and the optimizer state that belongs to each parameter, have the sharding of the
    parameter. Everything else is replicated.
    """
    params = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    replicated = sharding.replicated(mesh)
    structure = jax.tree.structure(state.params)
    # In an optimizer's state, optax has a MaskedNode for each parameter that another rule
    # updates.
    is_none = lambda leaf: isinstance(leaf, optax.MaskedNode)
    like_params = lambda tree: jax.tree.structure(tree, is_none) == structure
    of_params = lambda tree: jax.tree.map(
        lambda leaf, own: leaf if is_none(leaf) else own, tree, params, is_leaf=is_none
    )
    optimizer = jax.tree.map(
        lambda tree: of_params(tree) if like_params(tree) else replicated,
        state.optimizer,
        is_leaf=like_params,
    )
    of_copies = {path: x for path, x in leaves_by_path(params) if path in state.copies}
    return TrainState(params, optimizer, *[replicated] * 4, of_copies)
