"""Access to Pallas's Mosaic GPU backend, with named operands.

The kernels use the tensor cores' `wgmma` instructions, which only GPUs of compute capability 9.0
(H100, H200) have.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.call import declared
from pallas_kernels.target import target

try:
    from jax.experimental.pallas import mosaic_gpu as plgpu
except ImportError:
    plgpu = None

# The name of the only axis of a kernel's grid.
PROGRAMS = "programs"


# The slugs (short names) of the GPUs with `wgmma` instructions, which have compute capability 9.0.
_HOPPER = re.compile(r"nvidia_(gh200|h100|h200|h20|h800)(_|$)")


def no_mosaic_gpu() -> str | None:
    """Return the reason why Mosaic GPU kernels are unavailable, or None if they are available.

    On a machine without a GPU, they count as available. A program that is traced there may be
    compiled for a GPU with `wgmma` instructions.
    """
    if plgpu is None:
        return "this version of jax has no Mosaic GPU backend for Pallas"
    device = target()
    if device.platform == "cuda" and not _HOPPER.match(device.slug):
        return f"{device.kind} (legal: a GPU of compute capability 9.0, such as an H100)"
    return None


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
      programs: the number of programs. A program has one warpgroup, which is 128 threads.
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
        ),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret is True else interpret,
    )(*inputs.values())
    return dict(zip(outputs, out, strict=True))


def buffer(shape: tuple[int, ...], dtype: Any, width: int = 128) -> Any:
    """Return the type of a buffer in shared memory that `wgmma` and the copy engine can use.

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


def load_matrix(ref: Any) -> Array:
    """Load a matrix of 64 rows from global memory, in the layout of the results of `wgmma`."""
    # Older versions of jax require the argument `idx`, and newer versions deprecate it.
    required = inspect.signature(plgpu.load).parameters["idx"].default is inspect.Parameter.empty
    index = [()] if required else []
    return plgpu.load(ref, *index, layout=plgpu.Layout.WGMMA, optimized=False)
