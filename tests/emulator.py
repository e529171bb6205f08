"""What a chip does and plain interpretation hides; conftest.py has the options and the fixtures.

`--emulate=on_wait` runs every TPU kernel that a test interprets by jax's emulator of a TPU. Memory
starts as NaN. A copy happens when it is waited for; with `--emulate=eager`, at once. The grid's
parallel dimensions run in a random order (`--emulate_seed`) over `--emulate_cores`. A test fails
in which two cores race, or a kernel and a copy.

`jax.lax.empty` is always NaN, for that costs nothing. On a CPU it is zeros, and on a chip it is
whatever lay there.
"""

import dataclasses
import functools

import jax.numpy as jnp
import pytest
from jax._src import dispatch
from jax._src.core import subjaxprs
from jax._src.pallas import hlo_interpreter
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as emulator
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import triton

COUNTS = {"emulated": 0, "not known to the emulator": 0}


def parameters(mode: str, cores: int = 1, seed: int | None = None) -> pltpu.InterpretParams:
    known = {field.name for field in dataclasses.fields(pltpu.InterpretParams)}
    # Newer jax ends the kernel at its first race, if it is not told to go on.
    go_on = {"on_race": "warn"} if "on_race" in known else {}
    return pltpu.InterpretParams(
        **go_on,
        detect_races=True,
        dma_execution_mode=mode,
        uninitialized_memory="nan",
        out_of_bounds_reads="uninitialized",  # a last block that is not whole
        num_cores_or_threads=cores,
        random_seed=seed,
    )


def emulate(config, patch: pytest.MonkeyPatch):
    """From now on, if the options ask for it: `pallas_call` itself, for jax's own kernels too."""
    mode = config.getoption("emulate")
    if mode is None:
        return
    cores, seed = config.getoption("emulate_cores"), config.getoption("emulate_seed")
    params = parameters(mode, cores, seed)
    original = pl.pallas_call

    @functools.wraps(original)
    def call(*args, interpret=False, **options):
        of_gpu = isinstance(options.get("compiler_params"), triton.CompilerParams)
        if interpret is True and not of_gpu:
            interpret = params
        return original(*args, interpret=interpret, **options)

    patch.setattr(pl, "pallas_call", call)
    mend(patch)


def mend(patch: pytest.MonkeyPatch):
    """Around three faults of jax 0.10.2's emulator.

    It does not know `ref.bitcast` and `ref.reshape`: kernels that use them are interpreted plainly.
    An output that is written over an input comes back with the padding of its last block.
    It does not know how to order the dimension of the grid that `jax.vmap` puts before the others.
    """
    original = emulator.interpret_pallas_call

    def call(*args, jaxpr, out_avals, interpret_params, grid_mapping, compiler_params, **options):
        options["grid_mapping"] = grid_mapping
        order = compiler_params and compiler_params.dimension_semantics
        if order:
            batches = ("parallel",) * (len(grid_mapping.grid) - len(order))
            compiler_params = compiler_params.replace(dimension_semantics=batches + order)
        options["compiler_params"] = compiler_params
        if reshapes(jaxpr):
            COUNTS["not known to the emulator"] += 1
            # The emulator's calls are ordered among each other, as jax has noted of this one.
            io_callback(lambda: None, None, ordered=True)
            return hlo_interpreter.pallas_call_hlo_interpret(
                *args, jaxpr=jaxpr, out_avals=out_avals, **options
            )
        COUNTS["emulated"] += 1
        given = {"jaxpr": jaxpr, "out_avals": out_avals, "interpret_params": interpret_params}
        found = original(*args, **given, **options)
        return [
            x[tuple(map(slice, shape.shape))] for x, shape in zip(found, out_avals, strict=True)
        ]

    patch.setattr(emulator, "interpret_pallas_call", call)


def reshapes(jaxpr) -> bool:
    """Whether a kernel reads or writes through `ref.bitcast` or `ref.reshape`, loops included."""
    for equation in jaxpr.eqns:
        how = str(equation.params.get("tree", equation.params.get("args_tree")))
        if "BitcastTransform" in how or "ReshapeTransform" in how:
            return True
    return any(map(reshapes, subjaxprs(jaxpr)))


def races_found() -> bool:
    """Since the last call of `forget`; where jax has no such flag, it raises an error."""
    races = getattr(emulator, "races", None)
    return races is not None and races.races_found


def forget():
    """What an emulation leaves behind that has failed, so that those after it begin anew."""
    pltpu.reset_tpu_interpret_mode_state()
    dispatch.runtime_tokens.clear()


def nan_empty(shape, dtype, **options):
    """`jax.lax.empty`, of what must not be read before it is written: NaN, the largest integer."""
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.full(shape, jnp.nan, dtype)
    largest = jnp.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.integer) else True
    return jnp.full(shape, largest, dtype)
