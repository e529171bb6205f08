"""A lower bound on the memory that a run needs, and a check that the machine has that much.

Only the compiler knows the actual memory of a step (see `recipes.preflight`). The check exists
because a host with less memory than the lower bound would kill the process without a message.
"""

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from rmt_tpu import memory
from rmt_tpu.config import RunConfig
from rmt_tpu.decoder import compute_dtype, residual_dtype
from rmt_tpu.distributed import processes
from rmt_tpu.errors import RunError
from rmt_tpu.training import freeze
from rmt_tpu.training.copies import substitute_copies
from rmt_tpu.training.run import PreparedRun

_BATCH_BYTES_PER_TOKEN = 16  # A batch has three int32 numbers and one float32 number per token.


class MemoryLowerBound(NamedTuple):
    """Lower bounds, in bytes, on the memory that a run needs.

    Attributes:
      state: parameters and optimizer state on one device.
      gradients: gradients on one device. All of them exist at once, because their norm is computed
        before the first is used. Parameters that are frozen for the whole run have no gradient.
      activations: residuals on one device for all tokens in a forward pass. There is one per token,
        or one per token and layer if the backward pass needs the residual of every layer.
      batch: the part of the batch that one process holds in host memory.
    """

    state: int
    gradients: int
    activations: int
    batch: int

    @property
    def device(self) -> int:
        """Lower bound, in bytes, on the memory of one device.

        Gradients and activations need not exist at the same time, so only the larger counts.
        """
        return self.state + max(self.gradients, self.activations)


def lower_bound(config: RunConfig, run: PreparedRun) -> MemoryLowerBound:
    """Return lower bounds on the memory of a run's parts, from the shapes of its arrays."""
    train, model = config.train, config.model
    # The backward pass needs the residual of every layer, except in the reversible schedule, which
    # rebuilds residuals, and with a mixer that keeps a bank of earlier outputs instead.
    keeps_residuals = not model.rebuilds_residual and not model.mixer.banked
    tokens = train.batch_size * config.data.seq_len
    tokens_at_once = tokens // train.parts
    if run.mesh.shape["stage"] > 1:
        tokens_at_once //= train.microbatches or run.mesh.shape["stage"]
    dtypes = residual_dtype(model), compute_dtype(model.compute_dtype)
    token_bytes = model.residual_size * min(dtype.itemsize for dtype in dtypes)
    # The scan over layers runs one layer for each repeat of a stack's period (its sequence of
    # cores).
    repeats = sum(stack.repeat for stack in model.stacks)
    activations = tokens_at_once * token_bytes * (repeats if keeps_residuals else 1)
    gradients = substitute_copies(run.abstract.params, run.abstract.copies)
    own = [freeze.learned(train, tree) for tree in (gradients, run.state_shardings.params)]
    return MemoryLowerBound(
        state=bytes_per_device(run.abstract, run.state_shardings),
        gradients=bytes_per_device(*own),
        activations=activations // run.mesh.size,
        batch=tokens * _BATCH_BYTES_PER_TOKEN // processes.num_processes(),
    )


def shortfall(config: RunConfig, run: PreparedRun) -> str | None:
    """Return an error message if there is less memory than `lower_bound` returns, else None."""
    needs = lower_bound(config, run)
    own = run.mesh.local_devices
    machine = memory.machine_bytes()
    if own[0].platform == "cpu":
        places = {"machine": (len(own) * needs.device + needs.batch, machine)}
    else:
        limit = (own[0].memory_stats() or {}).get("bytes_limit", math.inf)
        places = {"device": (needs.device, limit), "machine": (needs.batch, machine)}
    for place, (needed, available) in places.items():
        if needed > available:
            parameters = sum(leaf.size for leaf in jax.tree.leaves(run.abstract.params))
            return (
                f"--batch_size={config.train.batch_size} of --seq_len={config.data.seq_len} with "
                f"{parameters:,} parameters needs at least {memory.format_bytes(needed)} on this "
                f"{place}, which has {memory.format_bytes(available)} ({describe(needs)})"
            )
    return None


def describe(needs: MemoryLowerBound) -> str:
    """Return a text with the memory for parameters, gradients, activations and a batch."""
    return (
        f"per device {memory.format_bytes(needs.state)} for parameters and optimizer, "
        f"{memory.format_bytes(needs.gradients)} for gradients, at least "
        f"{memory.format_bytes(needs.activations)} for activations; on the host "
        f"{memory.format_bytes(needs.batch)} for a batch"
    )


def check(config: RunConfig, run: PreparedRun) -> None:
    """Check that the machine has at least the memory that `lower_bound` returns.

    Raises:
      RunError: the machine has less memory.
    """
    if error := shortfall(config, run):
        raise RunError(f"{error}: {memory.train_advice(config.train.parts)}")


def bytes_per_device(arrays: Any, shardings: Any) -> int:
    """Return the total size in bytes of the shards of all arrays on one device.

    Args:
      arrays: a tree of arrays.
      shardings: a tree of shardings whose structure is a prefix of the structure of `arrays`.
    """
    size = lambda array, sharding: (
        array.dtype.itemsize * math.prod(sharding.shard_shape(array.shape))
    )
    sizes = jax.tree.map(
        lambda s, below: sum(size(a, s) for a in jax.tree.leaves(below)),
        shardings,
        arrays,
        is_leaf=lambda leaf: isinstance(leaf, jax.sharding.Sharding),
    )
    return int(np.sum(jax.tree.leaves(sizes)))
