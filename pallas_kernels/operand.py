"""Operands of TPU kernels in the form that `call.tpu_call` takes: an array and its block spec."""

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels.arguments import Slot
from pallas_kernels.call import Shaped


def constant(x: Shaped | Slot) -> tuple[Shaped | Slot, pl.BlockSpec]:
    """Return x with one block that holds all of it and is copied once."""
    spec = pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim, pipeline_mode=pl.Buffered(1))
    return x, spec


def in_smem(x: Array) -> tuple[Array, pl.BlockSpec]:
    """Return x as numbers [n] in SMEM, which a kernel reads one by one; x may be a scalar."""
    return x.reshape(-1), pl.BlockSpec(memory_space=pltpu.SMEM)


def anywhere(x: Shaped) -> tuple[Shaped, pl.BlockSpec]:
    """Return x where it lies in memory, for arrays that a kernel copies itself or overwrites."""
    return x, pl.BlockSpec(memory_space=pl.ANY)


def of_stack(spec: pl.BlockSpec) -> pl.BlockSpec:
    """Return `spec` for a stacked operand, whose slice the one prefetched array selects."""

    def index(*ids_and_chosen):
        *ids, chosen = ids_and_chosen
        return chosen[0], *spec.index_map(*ids)

    return pl.BlockSpec((None, *spec.block_shape), index)
