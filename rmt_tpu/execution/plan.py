"""The plan of a train step: the choices that are made for it, with their reasons."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

import sharding
from pallas_kernels.target import Target
from rmt_tpu.config import ModelConfig, RunConfig
from rmt_tpu.cores.experts import dropless
from rmt_tpu.layers import choices
from rmt_tpu.layers.choices import Choice
from rmt_tpu.layers.kept import kept_by
from rmt_tpu.residual.whole_tiles import width

_SCHEDULES = {
    "reversible": "the backward pass rebuilds the residual, whose memory does not grow with depth",
    "banked": "the bank of rows is its own checkpoint",
    "pipelined": "the mesh has stages",
    "scanned": "each layer is one step of a scan",
}

# The schedules in which JAX differentiates every layer.
_DIFFERENTIATED = ("scanned", "pipelined")


class ExecutionPlan(NamedTuple):
    """The choices made for one train step.

    Attributes:
      target: the device that the step is compiled for.
      schedule: the schedule of the layers: "scanned", "reversible", "banked" or "pipelined".
      residual_dtype: the dtype in which layers pass on the residual.
      outputs_in_place: whether sublayers write their outputs directly into a stack of outputs; None
        without such stacks.
      products_in_turn: whether a feed-forward layer's two products run as separate instructions.
      kept_in_rows: whether a residual vector and what feed-forward layers compute are kept for the
        backward pass with their last axis innermost.
      rereads_rebuilt: whether the kernel that rebuilds the residual also reads it; None if no
        residual is rebuilt.
      parts: the number of parts in which a batch is computed; None if no residual is rebuilt, or
        if choices of experts may be dropped.
      whole_blocks: whether each block of attention over depth consists of whole periods of a stack
        of layers; None without blocks of several sublayers.
      padded_width: the width of a vector in a bank, including padding; None without a bank of
        vectors.
      decode_kernels: whether decoding uses the kernels for a few tokens.
    """

    target: Target
    schedule: Choice
    residual_dtype: Choice
    outputs_in_place: Choice | None
    products_in_turn: Choice
    kept_in_rows: Choice
    rereads_rebuilt: Choice | None
    parts: Choice | None
    whole_blocks: Choice | None
    padded_width: Choice | None
    decode_kernels: Choice

    def lines(self) -> dict[str, str]:
        """Return one line of text per choice, in a dict keyed by readable names of the choices."""
        chosen = {
            name.replace("_", " "): f"{_word(choice.value)}: {choice.reason}"
            for name, choice in self._asdict().items()
            if isinstance(choice, Choice)
        }
        return {"compiled for": self.target.kind} | chosen


def plan_of(config: RunConfig, mesh: jax.sharding.Mesh) -> ExecutionPlan:
    """Return the plan of a run's train step.

    Args:
      config: the run's resolved config, in which no dtype and no remat policy is "auto".
      mesh: the mesh of devices for the step; the devices need not be attached.
    """
    model, train = config.model, config.train
    target = Target(mesh.devices.flat[0].device_kind)
    schedule = _schedule(config, mesh)
    tokens = train.batch_size // train.parts * config.data.seq_len
    own_tokens = config.data.seq_len // math.prod(
        mesh.shape.get(axis, 1) for axis in sharding.RULES["tokens"]
    )
    in_turn = choices.products_in_turn(target, model.data_shape[0], own_tokens)
    kept = kept_by(model.remat)
    if in_turn.value and (schedule in _DIFFERENTIATED or (kept is not None and kept.products)):
        in_turn = Choice(False, "JAX differentiates each layer, and XLA may join its products")
    in_place = rereads = padded = None
    if schedule == "reversible":
        size = jnp.dtype(model.store.dtype).itemsize * model.residual_size
        in_place = choices.outputs_in_place(target, model.data_shape[0])
        rereads = choices.rereads_rebuilt(target, tokens * size // mesh.size)
    if model.mixer.banked and not model.store.has_keys:
        padded = width(model)
    return ExecutionPlan(
        target=target,
        schedule=Choice(schedule, _SCHEDULES[schedule]),
        residual_dtype=Choice(model.store.dtype, _dtype_reason(config, schedule)),
        outputs_in_place=in_place,
        products_in_turn=in_turn,
        kept_in_rows=choices.kept_in_rows(target),
        rereads_rebuilt=rereads,
        parts=_parts(config, target, mesh.shape),
        whole_blocks=whole_blocks(model),
        padded_width=padded,
        decode_kernels=_decode_kernels(model, target, mesh),
    )


def whole_blocks(model: ModelConfig) -> Choice | None:
    """Say whether each block of attention over depth consists of whole periods of a stack.

    The result is None for a model without blocks of several sublayers, and for an ablation, whose
    sites read the whole bank one by one.
    """
    if not (model.mixer.banked and getattr(model.mixer, "fused", True)):
        return None
    block, start = model.mixer.sublayers_a_block(model.num_sublayers), 0
    if block == 1:
        return None
    for stack in model.stacks:
        period, end = len(stack.cores), start + stack.num_sublayers
        if block % period or start % block or (end % block and end < model.num_sublayers):
            return Choice(
                False,
                f"a block of {block} sublayers begins or ends within the {period} sublayers that a "
                "stack repeats, or within a stack, so that sites also read sums within their own "
                "group, which takes longer",
            )
        start = end
    return Choice(True, f"blocks of {block} sublayers are whole periods of the stacks of layers")


def faster_in_parts(config: RunConfig, target: Target, mesh: Mapping[str, int]) -> Choice | None:
    """Choose the number of parts in which a batch probably takes the least time.

    The result is None if the backward pass rebuilds no residual matrix, and if choices of experts
    are dropped, because a part would drop others than the whole batch.

    Args:
      config: the run's config; its remat policy and the dtype of its residual are not "auto".
      target: the device that the step is compiled for.
      mesh: a dict from the names of the mesh axes to their sizes.
    """
    model, train = config.model, config.train
    if not model.rebuilds_residual or dropless(model) != model:
        return None
    shards = math.prod(mesh.get(a, 1) for a in sharding.RULES["batch"])
    rows, left = divmod(train.batch_size, shards)
    if left:
        return Choice(1, f"{train.batch_size} rows are not divisible over {shards} devices")
    tokens = train.batch_size * config.data.seq_len // math.prod(mesh.values())
    size = jnp.dtype(model.store.dtype).itemsize * model.residual_size
    return choices.faster_in_parts(target, tokens * size, tokens, rows)


def _parts(config: RunConfig, target: Target, mesh: Mapping[str, int]) -> Choice | None:
    chosen, parts = faster_in_parts(config, target, mesh), config.train.parts
    if chosen is None or chosen.value == parts:
        return chosen
    reason = f"train.accumulate is {parts}"
    if chosen.value > parts:
        better = f"--set=train.accumulate={chosen.value} probably takes less time"
        reason = f"{reason}; {better}, because {chosen.reason}"
    return Choice(parts, reason)


def _schedule(config: RunConfig, mesh: jax.sharding.Mesh) -> str:
    if mesh.shape.get("stage", 1) > 1:
        return "pipelined"
    if config.model.rebuilds_residual:
        return "reversible"
    return "banked" if config.model.mixer.banked else "scanned"


def _dtype_reason(config: RunConfig, schedule: str) -> str:
    if config.model.store.dtype == "int16":
        return "as small as bfloat16, and its writes can be undone exactly"
    if config.model.store.dtype == config.model.compute_dtype:
        return "the compute dtype"
    if schedule == "reversible":
        return "its writes can be undone nearly exactly"
    return "set in the config"


def _decode_kernels(model: ModelConfig, target: Target, mesh: jax.sharding.Mesh) -> Choice:
    if not target.on_tpu:
        return Choice(False, "they run on TPUs only")
    weights = choices.weights_in_stacks(target, 1, mesh.shape.get("fsdp", 1))
    of_weights = "one multiplies a few rows by weights in the stack of all layers"
    if not weights.value:
        of_weights = f"none for products, because {weights.reason}"
    # Some kernels for a matrix residual read a site's parameters from a stack. They support the
    # same mixers as the reversible schedule: those that pass on only the residual.
    alone = "reversible" in model.mixer.remats
    if not (alone if model.store.has_keys else model.mixer.decode_kernels):
        return Choice(weights.value, f"{of_weights}; this store and mixer have no others")
    if mesh.shape.get("key", 1) > 1:
        return Choice(weights.value, f"{of_weights}; others do not support a divided D_k")
    return Choice(True, f"{of_weights}; others read the sites' parameters in their stacks")


def _word(value: object) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)
