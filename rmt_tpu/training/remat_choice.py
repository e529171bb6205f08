"""The choice of what a model keeps for its backward pass on TPUs.

With the remat policies "dots" and "reversible_dots", a layer's backward pass computes no product
with weights again. A step takes more memory with them than with "full" and "reversible", and on
most chips less time (docs/benchmarks/train_step.md). The estimate of memory here is within 1% of
the compiled programs of gpt2-405m and rmt-305m (16 x 512 tokens) and llama-374m (4 x 2048), and
within 2% of that of rmt-attnres-305m (16 x 512). Only the compiler knows the actual memory of a
step.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

import sharding
from pallas_kernels.target import Target, chip_of
from rmt_tpu import cost
from rmt_tpu.config import ModelConfig, RunConfig
from rmt_tpu.decoder import compute_dtype, residual_dtype
from rmt_tpu.execution.plan import whole_blocks
from rmt_tpu.layers.choices import Choice

# Bytes per parameter: itself and two moments in float32, and a copy and a gradient in bfloat16.
_STATE_BYTES = 3 * 4 + 2 * 2
# The largest share of a device's memory that the estimate may fill.
_MOST = 0.9
# Maps whether the residual is a matrix to the TPUs on which keeping products saves no time at some
# sizes, by estimate. For matrices in blocks, this was not estimated on tpu7x.
_NO_FASTER_ON = {False: ("tpu_v6_lite",), True: ("tpu7x",)}


class Devices(NamedTuple):
    """The devices that a run trains on.

    Attributes:
      kind: JAX's name for their kind, such as "TPU v5 lite".
      count: their number.
    """

    kind: str
    count: int

    @classmethod
    def here(cls) -> "Devices":
        """Return the devices of all processes of this run."""
        devices = jax.devices()
        return cls(devices[0].device_kind, len(devices))


def keeps_products(config: RunConfig, devices: Devices) -> Choice | None:
    """Choose whether all products with weights are kept for the backward pass.

    The result is None if the run has a pipeline, if the backward pass rebuilds the model's residual
    matrices neither as a whole nor within blocks of layers, or if it is not known how many
    residuals the mixer keeps.

    Args:
      config: the run's config.
      devices: the devices that the run trains on.
    """
    model, chip = config.model, chip_of(devices.kind)
    if model.store.has_keys and not _keeps_outputs(model):
        return None
    if model.mixer.kept_residuals is None:
        return None
    sizes = sharding.mesh_sizes(config.train.mesh, devices.count)
    if sizes["stage"] != 1:
        return None
    if chip is None or not chip.hbm:
        return Choice(False, f"{devices.kind} is not a TPU whose memory is known")
    policy = "reversible_dots" if model.rebuilds_residual else "dots"
    if Target(devices.kind).slug in _NO_FASTER_ON[model.store.has_keys]:
        reason = f'"{policy}" is not known to save time at every size on {devices.kind}'
        return Choice(False, reason)
    of_token = _kept_per_token(config)
    if of_token is None:
        return Choice(False, "it is not known how much a layer would keep")
    tokens = config.train.batch_size * config.data.seq_len // config.train.parts
    kept = of_token * tokens // devices.count
    shards = math.prod(sizes[axis] for axis in ("fsdp", "tensor"))
    needed = kept + _STATE_BYTES * sum(cost.parameters(model).values()) // shards
    fits = needed <= _MOST * chip.hbm
    size = lambda count: f"{count / 1e9:.1f} GB"
    return Choice(
        fits,
        f"a device would keep {size(kept)} for the backward pass, {size(needed)} with parameters, "
        f"optimizer and gradients; the limit is {_MOST:.0%} of {size(chip.hbm)}",
    )


def _kept_per_token(config: RunConfig) -> int | None:
    """Return the bytes that all layers keep for each token, or None if this is not known."""
    model, (vectors, size) = config.model, config.model.data_shape
    of_residual = jnp.dtype(residual_dtype(model)).itemsize * model.residual_size
    of_number = jnp.dtype(compute_dtype(model.compute_dtype)).itemsize
    keeps_outputs, of_layer, total = _keeps_outputs(model), 0, 0
    if not keeps_outputs:
        of_layer = model.mixer.kept_residuals * of_residual
    elif model.rebuilds_residual:
        # There is one residual and its gradient. The outputs of all cores are kept instead.
        total = 2 * of_residual
    else:
        # There is a bank with a row for the embedding and for each block, what the sites of a block
        # read from it, and the gradient of each.
        block = model.mixer.sublayers_a_block(model.num_sublayers)
        total = 2 * (1 + -(-model.num_sublayers // block) + block) * of_residual
    for stack in model.stacks:
        for core in stack.cores:
            numbers = core.kept_numbers(model.width, rebuilt=keeps_outputs)
            if numbers is None:
                return None
            if keeps_outputs:
                numbers += core.writes.vectors(vectors) * size
            total += stack.repeat * (of_layer + of_number * numbers)
    return total


def _keeps_outputs(model: ModelConfig) -> bool:
    """Return whether sublayers' outputs are kept, from which residual matrices are rebuilt.

    The backward pass rebuilds either the one residual, or the sum within each block of layers.
    """
    in_blocks = whole_blocks(model) if model.store.has_keys else None
    return model.rebuilds_residual or (in_blocks is not None and in_blocks.value)
