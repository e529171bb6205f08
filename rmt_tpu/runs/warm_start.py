"""Sources of a new run's initial state.

`WarmStart` supplies parameters from another run or from a Hugging Face model folder. `ContinuedRun`
supplies the complete state of another run, from which training continues.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx, traverse_util

from rmt_tpu import config as cfg
from rmt_tpu.config import overrides
from rmt_tpu.config.overrides import differences
from rmt_tpu.decoder import Decoder
from rmt_tpu.distributed import processes
from rmt_tpu.errors import ArgumentError, RunError, UsageError, argument_errors, flag_errors
from rmt_tpu.hub import weights
from rmt_tpu.hub.models import describe, is_hub
from rmt_tpu.hub.placing import read_parameter
from rmt_tpu.runs.growth import restore_grown
from rmt_tpu.runs.workdir import check_config_meta, open_checkpoints, read_config
from rmt_tpu.storage import open_folder

Path = tuple[Any, ...]
_KEY_DIM = "model.store.key_dim"


class WarmStart:
    """A trained model that supplies initial parameters to a new model.

    The new model gets each parameter that both models have at the same path. Parameters that only
    the new model has keep their random initial values. Therefore the new model may have a different
    residual.

    Args:
      location: a run folder, or a folder in Hugging Face format, local or gs://.
      model: the config of the new model.

    Raises:
      UsageError: the folder has no model, a parameter has different shapes in the two models, only
        one of them has tied embeddings, or they have no parameter in common.

    Attributes:
      location: the folder of the trained model.
      source: the config of the trained model.
      new: the paths of the parameters that only the new model has.
    """

    def __init__(self, location: str, model: cfg.ModelConfig):
        self._folder, self._step = open_folder(location), None
        self._is_hub = is_hub(self._folder)
        try:
            with argument_errors("init_from"):
                other = self._model()
        except UsageError as error:
            flag_and_reason = str(error).replace("workdir=", "")
            raise UsageError(f"--{flag_and_reason}") from None
        if other.tied_embeddings != model.tied_embeddings:
            raise UsageError(
                f"model.tied_embeddings={model.tied_embeddings} does not fit "
                f"--init_from={location}; legal: {other.tied_embeddings}, as in that model"
            )
        own, other_shapes = _shapes(model), _shapes(other)
        self.location, self.source = location, other
        self._shared = [path for path in own if own[path] == other_shapes.get(path)]
        self.new = [path for path in own if path not in other_shapes]
        different = [
            f"{_name(path)} is {list(other_shapes[path])} there and {list(own[path])} here"
            for path in own
            if path in other_shapes and own[path] != other_shapes[path]
        ]
        if different:
            more = f"; and {len(different) - 8} more" if len(different) > 8 else ""
            raise UsageError(
                f"--init_from={location} has parameters with different shapes: "
                f"{'; '.join(different[:8])}{more}{_growth_hint(location, other, model)}"
            )
        if not self._shared:
            raise UsageError(f"--init_from={location} shares no parameter with this model")

    def _model(self) -> cfg.ModelConfig:
        if self._is_hub:
            return describe(self._folder).model
        return read_config(self._folder).model

    def initial_params(self, params: Any, shardings: Any, log: Callable[[str], None]) -> Any:
        """Return `params` with the shared parameters replaced by those of the trained model.

        Each device reads only its own shards.

        Args:
          params: the randomly initialised parameters; those that are replaced are deleted.
          shardings: tree of the parameters' shardings.
          log: a function that prints a line.

        Raises:
          RunError: a file or checkpoint is damaged.
        """
        flat = traverse_util.flatten_dict(params)
        sharding_of = traverse_util.flatten_dict(shardings)
        like = {
            path: jax.ShapeDtypeStruct(
                flat[path].shape, flat[path].dtype, sharding=sharding_of[path]
            )
            for path in self._shared
        }
        # Delete the random values before loading, because the memory may be too small for both.
        for path in like:
            flat[path].delete()
        read = self._read(like)
        count = sum(x.size for x in read.values())
        message = f"{len(read)} of {len(flat)} arrays, {count:,} parameters, are loaded from "
        names = ", ".join(_name(path) for path in self.new[:8])
        more = f" and {len(self.new) - 8} more" if len(self.new) > 8 else ""
        log(message + self.location + (f"; initialised: {names}{more}" if names else ""))
        return traverse_util.unflatten_dict(flat | read)

    def source_params(self, params: Any, like: Any) -> Any | None:
        """Return the parameters of the trained model, or None if its checkpoint has been deleted.

        A run that still trains may have deleted the checkpoint since `initial_params` read it.

        Parameters that the new model also has are taken from `params`, without a copy. Only the
        other parameters are read, and each device reads only its own shards.

        Args:
          params: the new model's parameters, from `initial_params`.
          like: tree of the trained model's parameters as shapes, dtypes and shardings.

        Raises:
          RunError: a file or checkpoint is damaged.
        """
        flat, wanted = map(traverse_util.flatten_dict, (params, like))
        missing = {path: wanted[path] for path in self.left_out(like)}
        try:
            read = self._read(missing) if missing else {}
        except (ArgumentError, RunError):
            if self._has_checkpoint():
                raise
            return None
        found = {path: read[path] if path in read else flat[path] for path in wanted}
        return traverse_util.unflatten_dict(found)

    def left_out(self, like: Any) -> list[Path]:
        """Return the paths of the trained model's parameters (`like`) that the new model lacks."""
        shared = set(self._shared)
        return [path for path in traverse_util.flatten_dict(like) if path not in shared]

    def _has_checkpoint(self) -> bool:
        """Return, on all processes, whether the checkpoint that was read still exists."""
        if self._is_hub:
            return True
        steps = open_checkpoints(self._folder).steps()
        return self._step in processes.from_first(steps, f"the checkpoints of {self.location}")

    def _read(self, like: dict[Path, jax.ShapeDtypeStruct]) -> dict[Path, jax.Array]:
        return self._read_hub(like) if self._is_hub else self._read_run(like)

    def _read_run(self, like: dict[Path, jax.ShapeDtypeStruct]) -> dict[Path, jax.Array]:
        tree = {"params": traverse_util.unflatten_dict(like)}
        # Later calls read the same step, even if the other run has saved a newer checkpoint.
        # The newest checkpoint may be from before a growth of the run's D_k.
        checkpoints = open_checkpoints(self._folder)
        step, state, meta = restore_grown(checkpoints, tree, self.source, self._step, partial=True)
        self._step = step
        with flag_errors("init_from"):
            check_config_meta(self._folder, read_config(self._folder), step, meta, "model.")
        return traverse_util.flatten_dict(state["params"])

    def _read_hub(self, like: dict[Path, jax.ShapeDtypeStruct]) -> dict[Path, jax.Array]:
        tensors = weights.Tensors(self._folder)
        found = weights.pieces_by_parameter(tensors, describe(self._folder))
        shapes, arrays = _shapes(self.source), {}
        for path, wanted in like.items():
            # The shapes may differ, because virtual pipeline stages of the new run split the layer
            # axis into chunks.
            arrays[path] = read_parameter(
                tensors, found.get(path, []), shapes[path], wanted.shape, wanted.sharding
            )
        return arrays


def _growth_hint(location: str, other: cfg.ModelConfig, model: cfg.ModelConfig) -> str:
    """Return a hint about growing D_k for the end of an error message, or "" if D_k is the same."""
    sizes = [m.store.key_dim if m.store.has_keys else None for m in (other, model)]
    if None in sizes or sizes[0] == sizes[1]:
        return ""
    return (
        f"; a run's D_k grows in its own folder: --workdir={location} "
        f"--set=model.store.key_dim={sizes[1]} --change_config"
    )


class ContinuedRun:
    """An existing run whose last checkpoint is continued by a new run in another folder.

    Args:
      config: config of the new run. Fields that may not change when a run resumes must have the
        same values as in the existing run.

    Raises:
      UsageError: the existing run cannot be read, differs in such a field, or has already done all
        steps of the new run.

    Attributes:
      folder, config, checkpoints: the existing run's folder, config and checkpoints.
      changes: a line for each field whose value in the new run differs from that in this run.
    """

    def __init__(self, config: cfg.RunConfig):
        location = config.train.init_from
        self.folder = open_folder(location)
        flags = f"--init_from={location} --with_optimizer"
        if is_hub(self.folder):
            raise UsageError(
                f"{flags}: a folder in Hugging Face format has only weights; legal: a run folder, "
                "or leave out --with_optimizer"
            )
        try:
            self.config = read_config(self.folder)
        except ArgumentError as error:
            _, _, value_and_reason = str(error).partition("=")
            raise UsageError(f"--init_from={value_and_reason}") from None
        self.changes = differences(overrides.to_json(self.config), overrides.to_json(config))
        paths = {line: line.split(" ", 1)[0] for line in self.changes}
        fixed = lambda path: path == _KEY_DIM or cfg.resume_rule(config, path) == "fixed"
        if different := [line for line, path in paths.items() if fixed(path)]:
            raise UsageError(
                f"{flags}: the run there has a different config: {'; '.join(different[:8])}; give "
                "the same config, or leave out --with_optimizer to load only its weights"
                f"{_growth_hint(location, self.config.model, config.model)}"
            )
        self.checkpoints = open_checkpoints(self.folder)
        try:
            step, _ = self.checkpoints.identity()
        except RunError as error:
            raise UsageError(f"{flags}: the run there cannot be continued: {error}") from None
        if step >= config.train.steps:
            raise UsageError(
                f"{flags}: that run is at step {step}, and --steps={config.train.steps} leaves no "
                f"step to train; legal: more than {step}"
            )


def _shapes(model: cfg.ModelConfig) -> dict[Path, tuple[int, ...]]:
    abstract = nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0)))
    params = nnx.to_pure_dict(nnx.state(abstract, nnx.Param))
    return {path: np.shape(x) for path, x in traverse_util.flatten_dict(params).items()}


def _name(path: Path) -> str:
    return "/".join(map(str, path))
