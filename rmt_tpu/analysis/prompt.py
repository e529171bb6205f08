"""Functions that compile the text generator's programs for devices that need not be present.

`generation.Engine` has two kinds of programs. One reads a part of a prompt, and the other generates
tokens for all rows of a batch.
"""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import sharding
from rmt_tpu.analysis.decode import STEPS
from rmt_tpu.config import ModelConfig, RunConfig, overrides
from rmt_tpu.decoder import Decoder
from rmt_tpu.errors import UsageError
from rmt_tpu.generation import Sampling, cast_once, programs
from rmt_tpu.generation.engine import PART, SLOTS, bucket
from rmt_tpu.generation.key_heads import repeated_model
from rmt_tpu.generation.layouts import lay_out
from rmt_tpu.generation.placement import parameter_shardings
from rmt_tpu.generation.sampling import choice
from sharding import CACHE_RULES, MeshError

_REPLICATED = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Prompt:
    """The work of one program of `generation.Engine`.

    The program reads a part of a prompt, or generates tokens after several prompts.

    Attributes:
      tokens: the number of tokens in a prompt, which is also the capacity of the cache.
      part: the number of tokens that are read at a time.
      rows: the number of rows to generate new tokens for, or None to read a prompt instead.
    """

    tokens: int
    part: int = PART
    rows: int | None = None

    @property
    def new_tokens(self) -> int:
        """The number of tokens that one run of the program processes."""
        return self.part if self.rows is None else self.rows * STEPS

    def check(self, model: ModelConfig) -> None:
        """Check that the model has positions for the whole prompt.

        Raises:
          UsageError: the model has learned positions, but too few.
        """
        learned = model.learned_positions
        if learned is not None and learned.max_length < self.tokens:
            raise UsageError(
                f"--prompt={self.tokens} is more than the model's {learned.max_length} learned "
                f"positions; legal: up to {learned.max_length}, or "
                f"--set=model.attention.positions.max_length={self.tokens}"
            )


def lower_prompt(
    devices: Sequence[jax.Device], config: dict[str, Any], tokens: int, part: int, rows: int | None
) -> tuple[jax.stages.Lowered, dict[str, Any]]:
    """Lower the program that reads a part of a prompt or generates tokens.

    Args:
      devices: the devices, which need not be present.
      config: a RunConfig as JSON values; of its `train` field, only the mesh is used.
      tokens: the number of tokens in the prompt.
      part: the number of tokens that are read at a time.
      rows: the number of rows to generate STEPS new tokens for, or None to read a prompt instead.

    Returns:
      The lowered program, and the result of `sizes_of` for its mesh.

    Raises:
      MeshError: the mesh does not fit the devices, or the model or the rows cannot be divided
        evenly over the mesh.
    """
    run = overrides.from_json(RunConfig, config)
    mesh = sharding.make_mesh(run.train.mesh, devices)
    decoder = placed_decoder(run.model, mesh)
    model, _ = programs.ModelSpec.of(decoder)
    filled = lambda size: size + -size % model.devices("tokens")
    ints = lambda *shape: _at(jax.ShapeDtypeStruct(shape, jnp.int32), mesh)
    devices = model.devices("batch")
    if rows is not None and rows % devices:
        raise MeshError(
            f"--decode={rows} cannot be divided evenly over the {devices} devices of the mesh "
            f"axes data and fsdp; legal: multiples of {devices}"
        )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), warnings.catch_warnings():
        # Ignore the warning that no kernel supports a call: some kernels support only calls with
        # many tokens, and others only calls with few tokens.
        warnings.filterwarnings("ignore", "no tpu kernel for this call")
        lay_out(decoder, rows or SLOTS + -SLOTS % devices)
    model, params = programs.ModelSpec.of(decoder)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        if rows is not None:
            return _lowered_steps(model, params, mesh, rows, filled(bucket(tokens))), sizes_of(mesh)
        make = lambda params: programs.empty_cache(model, params, 1, filled(bucket(tokens)))
        cache = jax.eval_shape(make, params)
        if model.cache is None:
            cache = jax.tree.map(lambda x: _at(x, mesh), cache)
        else:
            cache = jax.tree.map(lambda x, spec: _at(x, mesh, spec), cache, model.cache)
        arguments = params, ints(1, filled(part)), ints(1), cache
        return programs.extend.lower(model, *arguments), sizes_of(mesh)


def _lowered_steps(
    model: programs.ModelSpec, params: nnx.State, mesh: Mesh, rows: int, capacity: int
) -> jax.stages.Lowered:
    """Lower a dispatch that generates STEPS tokens per row."""
    rows_per_device = rows // model.devices("batch")
    make = lambda params: programs.empty_rows(model, params, rows_per_device, capacity)
    on_mesh = lambda x, spec=None: _at(x, mesh, spec or _REPLICATED)
    row_state = jax.eval_shape(make, params)
    row_state = jax.tree.map(on_mesh, row_state, *(() if model.rows is None else (model.rows,)))
    used = on_mesh(jax.ShapeDtypeStruct((rows,), jnp.bool_), model.spec(CACHE_RULES["batch"]))
    sampling = jax.tree.map(on_mesh, choice(rows * [Sampling()]))
    shape = lambda sizes, dtype: on_mesh(jax.ShapeDtypeStruct(sizes, dtype))
    ends = programs.Ends(shape((1,), jnp.int32), shape((), jnp.int32))
    arguments = row_state, used, sampling, ends, shape((), jnp.bool_)
    with warnings.catch_warnings():
        # Ignore the warning that no kernel supports a call: some kernels need more tokens.
        warnings.filterwarnings("ignore", "no tpu kernel for this call")
        return programs.steps.lower(model, params, *arguments, STEPS)


def sizes_of(mesh: Mesh) -> dict[str, Any]:
    """Return what collectives need to know of a mesh, as JSON values.

    "mesh" has the sizes of its axes, and "ids" the ids of its devices if there are several slices.
    "coordinates" has the coordinates of each device's chip, or None for GPUs.
    """
    devices = mesh.devices.flatten().tolist()
    several = len({getattr(device, "slice_index", 0) for device in devices}) > 1
    coordinates = None
    if all(hasattr(device, "coords") for device in devices):
        coordinates = [list(device.coords) for device in devices]
    return {
        "mesh": dict(mesh.shape),
        "ids": [d.id for d in devices] if several else None,
        "coordinates": coordinates,
    }


def placed_decoder(config: ModelConfig, mesh: Mesh) -> Decoder:
    """Return a decoder of abstract arrays in the compute dtype, sharded over the mesh."""
    config = repeated_model(config, mesh)
    abstract = nnx.eval_shape(lambda: cast_once(Decoder(config, rngs=nnx.Rngs(0))))
    graphdef, state = nnx.split(abstract, nnx.Param)
    shardings = parameter_shardings(abstract, mesh)
    place = lambda x, sharding: _at(x, mesh, sharding.spec)
    return nnx.merge(graphdef, jax.tree.map(place, nnx.to_pure_dict(state), shardings))


def _at(x: Any, mesh: Mesh, spec: PartitionSpec = _REPLICATED) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
