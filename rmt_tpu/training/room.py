"""A lower bound on a run's memory, and a check that the machine has it.

Only the compiler knows all that a step needs (see `recipes.preflight`). But a host with less than
this lower bound would end the process without a message.
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
from rmt_tpu.training.copies import as_read
from rmt_tpu.training.run import Run

_BYTES_OF_A_TOKEN = 16  # bytes of a token in a batch: three int32 and a float32


class Least(NamedTuple):
    """Bytes that a run needs with any compiler.

    Attributes:
      state: parameters and optimizer state on a device.
      gradients: gradients on a device; all exist at once, because their norm is known before the
        first is used.
      activations: residuals on a device: one for each token that is trained on at a time, times the
        number of layers where the backward pass needs the residual of each layer.
      batch: a process's part of the batch, on its host.
    """

    state: int
    gradients: int
    activations: int
    batch: int

    @property
    def device(self) -> int:
        """Bytes that a device holds at once; activations and gradients may share memory."""
        return self.state + max(self.gradients, self.activations)


def least(config: RunConfig, run: Run) -> Least:
    """Return a lower bound on the memory that a run needs."""
    train, model = config.train, config.model
    # What a mixer carries from layer to layer contains a residual. A banked mixer keeps rows.
    keeps_residuals = model.remat != "reversible" and not model.mixer.banked
    tokens = train.batch_size * config.data.seq_len
    at_a_time = tokens // train.accumulate
    if run.mesh.shape["stage"] > 1:
        at_a_time //= train.microbatches or run.mesh.shape["stage"]
    dtypes = residual_dtype(model), compute_dtype(model.compute_dtype)
    of_a_token = model.residual_size * min(dtype.itemsize for dtype in dtypes)
    # This is the number of layers, each of which is a step of a scan.
    repeats = sum(stack.repeat for stack in model.stacks)
    activations = at_a_time * of_a_token * (repeats if keeps_residuals else 1)
    return Least(
        state=_bytes_on_a_device(run.abstract, run.state_shardings),
        gradients=_bytes_on_a_device(
            as_read(run.abstract.params, run.abstract.copies), run.state_shardings.params
        ),
        activations=activations // run.mesh.size,
        batch=tokens * _BYTES_OF_A_TOKEN // processes.num_processes(),
    )


def lack(config: RunConfig, run: Run) -> str | None:
    """Return an error message if the machine has less memory than `least`, else None."""
    needs = least(config, run)
    own = [d for d in run.mesh.devices.flat if d.process_index == processes.process_id()]
    there = memory.of_machine()
    if own[0].platform == "cpu":
        places = {"machine": (len(own) * needs.device + needs.batch, there)}
    else:
        limit = (own[0].memory_stats() or {}).get("bytes_limit", math.inf)
        places = {"device": (needs.device, limit), "machine": (needs.batch, there)}
    for place, (needed, has) in places.items():
        if needed > has:
            parameters = sum(leaf.size for leaf in jax.tree.leaves(run.abstract.params))
            return (
                f"--batch_size={config.train.batch_size} of --seq_len={config.data.seq_len} with "
                f"{parameters:,} parameters needs at least {memory.told(needed)} on this {place}, "
                f"which has {memory.told(has)} ({described(needs)})"
            )
    return None


def described(needs: Least) -> str:
    """Describe how much memory each part takes."""
    return (
        f"on a device {memory.told(needs.state)} of parameters and optimizer, "
        f"{memory.told(needs.gradients)} of gradients, at least {memory.told(needs.activations)} "
        f"of activations; on the host {memory.told(needs.batch)} of a batch"
    )


def check(config: RunConfig, run: Run) -> None:
    """Check that a run can fit in memory.

    Raises:
      RunError: the run does not fit, whatever the compiler makes of it.
    """
    if line := lack(config, run):
        raise RunError(f"{line}: {memory.TRAIN_ADVICE}")


def _bytes_on_a_device(arrays: Any, shardings: Any) -> int:
    """Return the bytes of the arrays' shards on a device.

    A sharding in `shardings` holds for all arrays below its place in `arrays`.
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
