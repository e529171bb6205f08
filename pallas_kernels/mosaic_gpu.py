"""Access to Pallas's Mosaic GPU backend, with named operands, and helpers for its kernels."""

import inspect
import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.call import declared, round_up
from pallas_kernels.target import target

try:
    from jax.experimental.pallas import mosaic_gpu as plgpu
except ImportError:
    plgpu = None

# The name of the only axis of a kernel's grid.
PROGRAMS = "programs"
# The bytes of shared memory of a multiprocessor, and those of a program for sums over threads.
_SHARED_MEMORY, _SUMS = 228 * 1024, 512


def no_mosaic_gpu(*capabilities: int) -> str | None:
    """Return the reason why Mosaic GPU kernels are unavailable, or None if they are available.

    On a machine without a GPU, they count as available. A program that is traced there may be
    compiled for a GPU that has what the kernels need.

    Args:
      capabilities: ten times the compute capabilities for which the kernels are written: 90 or 100.
        Both kinds of GPUs have a copy engine (TMA).
    """
    if plgpu is None:
        return "this version of jax has no Mosaic GPU backend for Pallas"
    device = target()
    if device.platform == "cuda" and device.capability not in capabilities:
        legal = " or ".join(str(capability / 10) for capability in capabilities)
        return f"{device.kind} (legal: a GPU of compute capability {legal}, such as an H100)"
    return None


def matrix_instructions() -> Literal["wgmma", "tcgen05"]:
    """Return the matrix instructions of the GPU that the program is compiled for.

    If the GPU is unknown, they are those of an H100.
    """
    return "tcgen05" if target().capability == 100 else "wgmma"


def multiprocessors() -> int:
    """Return the number of multiprocessors of an H100, or of a B200 if the program is for one."""
    return 148 if matrix_instructions() == "tcgen05" else 132


def mosaic_gpu_call(
    kernel: Callable[[SimpleNamespace], None],
    name: str,
    inputs: Mapping[str, Array],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    scratch: Mapping[str, Any],
    *,
    programs: int,
    interpret: bool | Any = False,
) -> dict[str, Array]:
    """Run `kernel(refs)` in several programs on a GPU, and return the outputs by name.

    Args:
      kernel: the function that each program runs. `refs.<name>` is the whole array `name`, in
        global memory, or a scratch buffer.
      name: the kernel's name in the compiled program.
      inputs: maps the name of each input to its array.
      outputs: maps the name of each result to its shape and dtype.
      scratch: maps the name of each scratch buffer to its type.
      programs: the number of programs. A program has one warpgroup, which is 128 threads. (With
        more, JAX's sums over all entries would share one scratch buffer.)
      interpret: whether to run the kernel in JAX's interpreter for GPU kernels, or the
        interpreter's parameters.
    """
    names = (*inputs, *outputs)

    def body(*refs, **scratch_refs):
        kernel(SimpleNamespace(**dict(zip(names, refs, strict=True)), **scratch_refs))

    out = plgpu.kernel(
        body,
        out_type=list(declared(outputs, inputs).values()),
        scratch_types=dict(scratch),
        grid=(programs,),
        grid_names=(PROGRAMS,),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            reduction_scratch_bytes=_SUMS,
        ),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret is True else interpret,
    )(*inputs.values())
    return dict(zip(outputs, out, strict=True))


def buffer(shape: tuple[int, ...], dtype: Any, width: int = 128) -> Any:
    """Return the type of a buffer in shared memory, for matrix instructions and the copy engine.

    Args:
      shape: the shape. The last two axes are rows and columns; the number of rows is a multiple
        of 8.
      dtype: the dtype.
      width: the number of bytes of a row that are stored together: 32, 64 or 128, but at most the
        bytes of a row. Both operands of a product must have the same width.
    """
    size = jnp.dtype(dtype).itemsize
    width = min(width, shape[-1] * size)
    transforms = plgpu.TilingTransform((8, width // size)), plgpu.SwizzleTransform(width)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def resident_programs(scratch: Mapping[str, Any]) -> int:
    """Return how many programs with these buffers fit in a multiprocessor's shared memory at once.

    A buffer takes a multiple of 1 KiB. A program takes another 1 KiB for sums over threads,
    barriers and gaps, and 1 KiB that belongs to the system.
    """
    buffers = (x for x in scratch.values() if getattr(x, "memory_space", None) == plgpu.SMEM)
    sizes = (math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in buffers)
    total = sum(round_up(size, 1024) for size in sizes)
    # With one program that takes nearly all memory, 1 KiB is not quite enough.
    return 0 if total > _SHARED_MEMORY - 4096 else _SHARED_MEMORY // (2048 + total)


def load(ref: Any, layout: Any) -> Array:
    """Load an array from global or shared memory, in the given layout of registers."""
    # Older versions of jax require the argument `idx`, and newer versions deprecate or lack it.
    idx = inspect.signature(plgpu.load).parameters.get("idx")
    index = [()] if idx and idx.default is inspect.Parameter.empty else []
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def save(ref: Any, values: Array) -> None:
    """Write an array to global memory, also if it does not cover whole cache lines."""
    # Older versions of jax have no function for this, and newer ones refuse such assignments.
    if hasattr(plgpu, "store"):
        plgpu.store(ref, values, optimized=False)
    else:
        ref[...] = values


def each_token(
    count: int,
    stages: int,
    start: Callable[[Any, Any], None],
    body: Callable[[Any, Any, Callable[[], None], Any], Any],
    carry: Any = None,
) -> Any:
    """Run `carry = body(slot, t, prefetch, carry)` for each of a program's tokens.

    A program processes every `programs`-th of `count` tokens, where `programs` is the number of
    programs.

    Args:
      count: the number of tokens.
      stages: the number of slots in shared memory. A slot holds the operands of a token.
      start: `start(slot, t)` starts to copy the operands of token t to a slot.
      body: the function that processes the token t in a slot. It must call its third argument,
        `prefetch()`, once, before it waits for the operands of the slot. This starts to copy the
        token that is `stages - 1` iterations later (with one stage, this token).
      carry: the initial carry.

    Returns:
      The last carry.
    """
    program, programs = jax.lax.axis_index(PROGRAMS), jax.lax.axis_size(PROGRAMS)
    tokens = (count - program + programs - 1) // programs

    def fetch(i):
        @pl.when(i < tokens)
        def _():
            start(jax.lax.rem(i, stages), program + i * programs)

    for i in range(stages - 1):
        fetch(jnp.int32(i))

    def step(i, carry):
        slot, t = jax.lax.rem(i, stages), program + i * programs
        return body(slot, t, lambda: fetch(i + stages - 1), carry)

    return jax.lax.fori_loop(0, tokens, step, carry)
