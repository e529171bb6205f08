"""Helpers that build the operands of `call.tpu_call`: pairs of an array and its block spec."""

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels.arguments import StackSlice
from pallas_kernels.call import Shaped


def constant(x: Shaped | StackSlice) -> tuple[Shaped | StackSlice, pl.BlockSpec]:
    """Pair `x` with the spec of one block that contains all of `x` and is copied to VMEM once."""
    spec = pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim, pipeline_mode=pl.Buffered(1))
    return x, spec


def in_smem(x: Array) -> tuple[Array, pl.BlockSpec]:
    """Pair `x`, flattened to [n], with a spec that places it in SMEM, where a kernel reads scalars.

    `x` may itself be a scalar.
    """
    return x.reshape(-1), pl.BlockSpec(memory_space=pltpu.SMEM)


def anywhere(x: Shaped) -> tuple[Shaped, pl.BlockSpec]:
    """Pair `x` with a spec that leaves it where it is (memory space ANY).

    Use this spec for arrays that a kernel copies with its own DMAs, or overwrites.
    """
    return x, pl.BlockSpec(memory_space=pl.ANY)


def of_stack(spec: pl.BlockSpec) -> pl.BlockSpec:
    """Convert `spec`, the block spec for one slice, to a spec for a stack of such slices.

    The call must have one prefetched array, which contains the index of the slice to use.
    """

    def index(*ids_and_chosen):
        *ids, chosen = ids_and_chosen
        return chosen[0], *spec.index_map(*ids)

    return pl.BlockSpec((None, *spec.block_shape), index)
