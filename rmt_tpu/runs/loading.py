"""Functions that load a trained decoder from a run folder or a folder in Hugging Face format."""

import glob
import hashlib
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import sharding
from rmt_tpu import kernel_tables, memory
from rmt_tpu.data import Tokenizer, load_saved
from rmt_tpu.decoder import Decoder
from rmt_tpu.errors import ArgumentError, RunError, UsageError, argument_errors
from rmt_tpu.generation.placement import parameter_shardings
from rmt_tpu.hub import folder as hub_folder
from rmt_tpu.hub.models import describe, is_hub
from rmt_tpu.residual.fixed_point import with_float_residual
from rmt_tpu.runs import text_ends
from rmt_tpu.runs.growth import restore_grown
from rmt_tpu.runs.workdir import check_config_meta, open_checkpoints, read_config
from rmt_tpu.storage import Folder, Location, find_objects, open_folder

# The names of the files of a model in Hugging Face format end in .json or .safetensors.
_HUB_FILES = ".json", ".safetensors"


class Loaded(NamedTuple):
    """A trained decoder with its tokenizer.

    Attributes:
      decoder: the decoder.
      tokenizer: the tokenizer, with its end tokens.
      step: the step of the checkpoint; None for a folder in Hugging Face format.
      seq_len: number of tokens in a training window, or the maximum length of a Hugging Face model.
    """

    decoder: Any
    tokenizer: Tokenizer
    step: int | None
    seq_len: int


def load(workdir: Location, step: int | None = None, *, mesh: str | None = None):
    """Load the trained decoder and the tokenizer from a run folder; see `load_step`."""
    return load_step(workdir, step, mesh=mesh)[:2]


def load_step(workdir: Location, step: int | None = None, *, mesh: str | None = None) -> Loaded:
    """Load a trained decoder from a run folder or from a folder in Hugging Face format.

    Args:
      workdir: a run folder that `recipes.train` wrote, or a folder in Hugging Face format (see
        `rmt_tpu.hub`), local or gs://.
      step: step of the checkpoint; None is the newest undamaged one.
      mesh: device mesh, like "tensor=2,sequence=4", over which the parameters are sharded for an
        `Engine`; None loads them on one device.

    Returns:
      The decoder, with its tokenizer and step.

    Raises:
      ArgumentError: there is no run in the folder, or no such step, or its tokenizer is missing or
        damaged.
      MeshError: there are not enough devices, or the model cannot be sharded over the mesh.
      RunError: no checkpoint of the run can be read, a weight is not finite, or there is not enough
        memory.
    """
    kernel_tables.use_storage()
    with argument_errors("workdir"):
        folder = open_folder(workdir)
    if is_hub(folder):
        with memory.report_out_of_memory("the model's parameters do not fit"):
            return _of_hub(folder, step, mesh)
    config = read_config(workdir)
    abstract = nnx.eval_shape(lambda: Decoder(with_float_residual(config.model), rngs=nnx.Rngs(0)))
    graphdef, shapes = nnx.split(abstract, nnx.Param)
    params = nnx.to_pure_dict(shapes)
    if mesh is not None:
        placed = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
        shardings = parameter_shardings(abstract, sharding.make_mesh(mesh))
        params = jax.tree.map(placed, params, shardings)
    checkpoints = open_checkpoints(folder)
    like = {"params": params}
    with memory.report_out_of_memory("the model's parameters do not fit"):
        step, state, meta = restore_grown(checkpoints, like, config.model, step, partial=True)
    with argument_errors("workdir"):
        check_config_meta(folder, config, step, meta, "model.")
    _check_finite(state["params"], f"step {step} of {folder}")
    decoder = nnx.merge(graphdef, state["params"])
    tokenizer = _tokenizer(folder)
    tokenizer.starts, tokenizer.ends = text_ends.load(folder, tokenizer, config.model.vocab_size)
    return Loaded(decoder, tokenizer, step, config.data.seq_len)


def _tokenizer(folder: Folder) -> Tokenizer:
    try:
        return load_saved(folder)
    except UsageError as error:
        reason = str(error).partition("; legal: ")[0]
        raise ArgumentError(
            f"workdir={reason}; repeat the run's training command, which writes it again"
        ) from None


def identity(workdir: Location, step: int | None = None) -> tuple[int | str, Any]:
    """Return an identifier of the weights in a folder, without reading the weights.

    Args:
      workdir: the folder, as for `load_step`.
      step: step of the checkpoint; None is the newest undamaged one.

    Returns:
      The step, or "hub" for a folder in Hugging Face format, and a value that changes whenever the
      weights change.

    Raises:
      ArgumentError: there is no run in the folder, or no such step.
    """
    with argument_errors("workdir"):
        folder = open_folder(workdir)
    if not is_hub(folder):
        read_config(workdir)  # This call raises an error if the folder has no run.
        return open_checkpoints(folder).identity(step)
    if step is not None:
        raise _no_step(step, folder)
    if folder.local_path is None:
        found = [
            x for end in _HUB_FILES for x in find_objects(f"{glob.escape(str(folder))}/*{end}")
        ]
        return "hub", [(x.url, x.size, x.generation) for x in found]
    paths = sorted(p for p in folder.local_path.iterdir() if p.suffix in _HUB_FILES)
    return "hub", [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in paths]


def weights_name(workdir: Location, step: int | None = None) -> str:
    """Return a short name for the weights in a folder, such as "48-1f0a93c6b2d7".

    Its parts are the step, or "hub", and a hash of the value that `identity` returns.

    Args:
      workdir, step: see `identity`.

    Raises:
      ArgumentError: see `identity`.
    """
    step, weights = identity(workdir, step)
    return f"{step}-{hashlib.blake2b(json.dumps(weights).encode(), digest_size=6).hexdigest()}"


def _no_step(step: int, folder: Folder) -> ArgumentError:
    return ArgumentError(f"step={step} needs a run folder, and {folder} is in Hugging Face format")


def _check_finite(params: Any, where: str) -> None:
    """Check that all parameters are finite, with one program on the devices that store them.

    Raises:
      RunError: a parameter has a number that is not finite.
    """
    finite = jax.jit(lambda tree: jax.tree.map(lambda x: jnp.isfinite(x).all(), tree))(params)
    for path, good in jax.tree_util.tree_leaves_with_path(jax.device_get(finite)):
        if not good:
            name = "/".join(str(key.key) for key in path)
            raise RunError(
                f"{where}: {name} has numbers that are not finite; load another --step of the run"
            )


def _of_hub(folder: Folder, step: int | None, mesh: str | None) -> Loaded:
    if step is not None:
        raise _no_step(step, folder)
    return Loaded(*hub_folder.load(folder, mesh=mesh), None, describe(folder).max_length)
