"""Operands of TPU kernels as `call.tpu_call` takes them: an array and how it is cut into blocks."""

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels.arguments import Slot
from pallas_kernels.call import Shaped


def constant(x: Shaped | Slot) -> tuple[Shaped | Slot, pl.BlockSpec]:
    """All of it, brought once."""
    spec = pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim, pipeline_mode=pl.Buffered(1))
    return x, spec


def in_smem(x: Array) -> tuple[Array, pl.BlockSpec]:
    """Numbers that are read one by one, [n] or one alone."""
    return x.reshape(-1), pl.BlockSpec(memory_space=pltpu.SMEM)


def anywhere(x: Shaped) -> tuple[Shaped, pl.BlockSpec]:
    """Where it is: what the kernel copies itself, or what is written over."""
    return x, pl.BlockSpec(memory_space=pl.ANY)


def of_stack(spec: pl.BlockSpec) -> pl.BlockSpec:
    """These blocks, of that of a stack which the one prefetched array names."""

    def index(*ids_and_chosen):
        *ids, chosen = ids_and_chosen
        return chosen[0], *spec.index_map(*ids)

    return pl.BlockSpec((None, *spec.block_shape), index)
