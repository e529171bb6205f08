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
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import callback, dispatch
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as emulator
from jax._src.pallas.mosaic.interpret.utils import to_range
from jax._src.state.types import BitcastTransform, ReshapeTransform
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import triton


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
    original = pl.pallas_call

    @functools.wraps(original)
    def call(*args, interpret=False, **options):
        of_gpu = isinstance(options.get("compiler_params"), triton.CompilerParams)
        if interpret is True and not of_gpu:
            # A core's thread runs programs on the first CPU device, which may be waiting for the
            # other devices in the very same kernel. So a kernel over several devices has one core.
            alone = jax.sharding.get_abstract_mesh().size <= 1
            interpret = parameters(mode, cores if alone else 1, seed)
        return original(*args, interpret=interpret, **options)

    patch.setattr(pl, "pallas_call", call)
    mend(patch)


def mend(patch: pytest.MonkeyPatch):
    """Around four faults of jax 0.10.2's emulator.

    A kernel over several devices may wait forever: see `call_with_numpy`.
    It does not know `ref.bitcast` and `ref.reshape`: see `seen_get`.
    An output that is written over an input comes back with the padding of its last block.
    It does not know how to order the dimension of the grid that `jax.vmap` puts before the others.
    """
    patch.setattr(callback, "io_callback_impl", call_with_numpy)
    patch.setattr(emulator, "get", seen_get(emulator.get))
    patch.setattr(emulator, "swap", seen_swap(emulator.get, emulator.swap))
    original = emulator.interpret_pallas_call

    def call(*args, jaxpr, out_avals, interpret_params, grid_mapping, compiler_params, **options):
        options["grid_mapping"] = grid_mapping
        order = compiler_params and compiler_params.dimension_semantics
        if order:
            batches = ("parallel",) * (len(grid_mapping.grid) - len(order))
            compiler_params = compiler_params.replace(dimension_semantics=batches + order)
        options["compiler_params"] = compiler_params
        given = {"jaxpr": jaxpr, "out_avals": out_avals, "interpret_params": interpret_params}
        found = original(*args, **given, **options)
        return [
            x[tuple(map(slice, shape.shape))] for x, shape in zip(found, out_avals, strict=True)
        ]

    patch.setattr(emulator, "interpret_pallas_call", call)


def call_with_numpy(*args, callback: Callable, **options) -> Any:
    """Call back with NumPy arrays, where JAX first copies the arguments to the first CPU device.

    That device may be waiting for the other devices in a kernel. The copy would then wait for the
    device, and the device for the kernel whose arguments are copied.
    """
    return jax.tree.map(np.asarray, callback(*args))


# Through `ref.bitcast` and `ref.reshape` all that lies before these is read, and for a write is put
# back: what races with any of it counts as a race.


def seen_get(get: Callable) -> Callable:
    """The emulator's `get`, which takes all of these ways to see a buffer."""

    @functools.wraps(get)
    def call(token, device, core, space, buffer, transforms, *args, **options):
        known, others = _apart(transforms)
        token, found = get(token, device, core, space, buffer, known, *args, **options)
        return token, functools.reduce(_seen, others, found)

    return call


def seen_swap(get: Callable, swap: Callable) -> Callable:
    """The emulator's `swap`, which takes all of these ways to see a buffer."""

    @functools.wraps(swap)
    def call(token, device, core, space, buffer, transforms, value, mask, **options):
        known, others = _apart(transforms)
        at = token, device, core, space, buffer, known
        if not others:
            return swap(*at, value, mask, **options)
        token, whole = get(*at, **options)
        before = functools.reduce(_seen, others, whole)
        value = np.asarray(value) if mask is None else np.where(mask, value, before)
        token, _ = swap(token, *at[1:], _with(whole, others, value), None, **options)
        return token, before

    return call


def _apart(transforms: tuple) -> tuple[tuple, list]:
    """Splits them into the indices at the start, which the emulator knows, and all others."""
    count = next((n for n, x in enumerate(transforms) if not hasattr(x, "indices")), None)
    count = len(transforms) if count is None else count
    return transforms[:count], [jax.tree.map(int, x) for x in transforms[count:]]


def _seen(x: np.ndarray, transform: Any) -> np.ndarray:
    if isinstance(transform, BitcastTransform):
        return _bitcast(x, transform.dtype)
    if isinstance(transform, ReshapeTransform):
        return x.reshape(transform.shape)
    return x[to_range((transform,))]


def _with(x: np.ndarray, transforms: list, value: np.ndarray) -> np.ndarray:
    """The array with the value in place of what is seen of it."""
    if not transforms:
        return value
    first, *others = transforms
    value = _with(_seen(x, first), others, value)
    if isinstance(first, BitcastTransform):
        return _bitcast(value, x.dtype)
    if isinstance(first, ReshapeTransform):
        return value.reshape(x.shape)
    x = x.copy()
    x[to_range((first,))] = value
    return x


def _bitcast(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Reads the bits as a TPU does: of two rows in a word, the first is in the low bits."""
    dtype = np.dtype(dtype)
    if dtype.itemsize > x.itemsize:
        each = dtype.itemsize // x.itemsize
        x = x.reshape(*x.shape[:-2], x.shape[-2] // each, each, x.shape[-1])
        return np.ascontiguousarray(x.swapaxes(-1, -2)).view(dtype)[..., 0]
    each = x.itemsize // dtype.itemsize
    parts = np.ascontiguousarray(x)[..., None].view(dtype).swapaxes(-1, -2)
    return parts.reshape(*x.shape[:-2], x.shape[-2] * each, x.shape[-1])


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
