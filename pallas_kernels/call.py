"""Wrappers around `pallas_call` that name a kernel's operands, and helpers for kernels' code."""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, DTypeLike

from pallas_kernels import triton
from pallas_kernels.arguments import StackSlice
from pallas_kernels.platform import varies_in
from pallas_kernels.target import target

LANES = 128


# An array, or the shape and dtype of an output that is not computed yet.
Shaped = Array | jax.ShapeDtypeStruct
Blocked = Mapping[str, tuple[Shaped | StackSlice, pl.BlockSpec]]


def tpu_call(
    kernel: Callable[..., None],
    name: str,
    inputs: Blocked,
    outputs: Blocked,
    scratch: Mapping[str, Any],
    *,
    grid: tuple[int, ...],
    semantics: tuple[str, ...],
    flops: int,
    moved: int | None = None,
    transcendentals: int = 0,
    aliased: Mapping[str, str] | None = None,
    prefetch: Mapping[str, Array | np.ndarray] | None = None,
    in_hbm: tuple[str, ...] = (),
    interpret: bool | pltpu.InterpretParams = False,
) -> dict[str, Array]:
    """Run `kernel(inputs, outputs, scratch)` over a grid on a TPU and return the outputs by name.

    The kernel receives three dicts that map operand names to refs.

    Args:
      kernel: the function that runs at every grid step.
      name: the kernel's name in the compiled program.
      inputs, outputs: dicts from an operand's name to a pair: an array (or its shape) and its block
        spec. An input may also be a `StackSlice`; its blocks are read directly from the stack.
      scratch: a dict from the name of each scratch buffer to its shape.
      grid: the number of steps along each grid dimension.
      semantics: the dimension semantics of each grid dimension ("parallel" or "arbitrary").
      flops, transcendentals: the number of each kind of operation, for XLA's cost estimate.
      moved: the number of bytes moved, for XLA's cost estimate. By default, every input and output
        is counted once, with two exceptions. If an operand's block spec squeezes the first axis,
        one slice along that axis is counted. If there are prefetched arrays, operands in memory
        space ANY are not counted, because the kernel writes only one block of them.
      aliased: a dict from the name of an input to the name of the output that overwrites it.
      prefetch: int32 arrays [n] that select blocks. The index maps of the block specs receive them
        as their last arguments, sorted by name. The kernel receives them as inputs.
      in_hbm: the names of inputs that XLA must leave in HBM. XLA may copy all of any other input to
        VMEM before the call, even if the kernel reads only a part.
      interpret: whether to run the kernel in Pallas's interpreter. With `InterpretParams`, the
        interpreter also simulates TPU memory and DMAs.
    """
    inputs, tables = _in_stacks(inputs, prefetch or {})
    if moved is None:
        blocks = (*inputs.values(), *outputs.values())
        moved = sum(_moved(array, spec, bool(tables)) for array, spec in blocks)
    arrays = {k: array for k, (array, _) in inputs.items()}
    shapes = declared({k: x for k, (x, _) in outputs.items()}, (arrays, tables))
    position = lambda names, name: sorted(names).index(name)

    def body(*refs):
        inputs, *others = refs[len(tables) :]
        kernel(dict(zip(tables, refs, strict=False)) | inputs, *others)

    call = pl.pallas_call(
        body,
        name=name,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=grid,
            in_specs=[{k: spec for k, (_, spec) in inputs.items()}],
            out_specs={k: spec for k, (_, spec) in outputs.items()},
            scratch_shapes=[scratch],
        ),
        out_shape=shapes,
        input_output_aliases={
            len(tables) + position(inputs, a): position(outputs, b)
            for a, b in (aliased or {}).items()
        },
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=semantics, vmem_limit_bytes=target().vmem_limit
        ),
        cost_estimate=_cost(flops, moved, transcendentals, arrays, shapes),
        interpret=interpret,
    )
    if in_hbm and not interpret:
        call = _with_inputs_in_hbm(call, in_hbm)
    # `jax.vmap` batches a kernel by adding a grid dimension. This is impossible if the mapped array
    # is prefetched, is not divided into blocks, or must stay in HBM. A loop then calls the kernel
    # once per batch element.
    without_blocks = lambda blocked: {
        k: spec.block_shape is None or k in in_hbm for k, (_, spec) in blocked.items()
    }
    forces_loop = [True] * len(tables), without_blocks(inputs)
    if any(without_blocks(outputs).values()):
        forces_loop = jax.tree.map(lambda _: True, forces_loop)
    if not any(jax.tree.leaves(forces_loop)):
        return call(arrays)
    mapped = _mapped(lambda tables, arrays: call(*tables, arrays), forces_loop)
    return mapped(list(tables.values()), arrays)


def _with_inputs_in_hbm(call: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    def run(*tables_and_arrays: Any) -> Any:
        *tables, arrays = tables_and_arrays
        constrained = {k: pltpu.with_memory_space_constraint(arrays[k], pltpu.HBM) for k in names}
        return call(*tables, arrays | constrained)

    return run


def _mapped(run: Callable[..., Any], forces_loop: Any) -> Callable[..., Any]:
    """Return `run` with a rule for `jax.vmap`: add a grid dimension if possible, or else loop.

    Args:
      run: the kernel call.
      forces_loop: a boolean for each argument (in the same tree structure). True means that the
        kernel is called in a loop if `jax.vmap` maps over the argument.
    """

    def narrow(*args: Any) -> Any:
        # Kernels use 32-bit integers, but `jax_enable_x64` may be on when batching traces the call
        # again.
        with jax.enable_x64(False):
            return run(*args)

    call = jax.custom_batching.custom_vmap(narrow)

    @call.def_vmap
    def rule(size: int, are_mapped: list, *args: Any) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten(args)
        mapped = [i for i, is_mapped in enumerate(jax.tree.leaves(are_mapped)) if is_mapped]
        if any(jax.tree.leaves(forces_loop)[i] for i in mapped):

            def one(element: dict[int, Array]) -> Any:
                return call(*tree.unflatten([element.get(i, x) for i, x in enumerate(leaves)]))

            results = jax.lax.map(one, {i: leaves[i] for i in mapped})
        else:
            axes = tree.unflatten([0 if i in mapped else None for i in range(len(leaves))])
            together = jax.vmap(narrow, in_axes=axes, axis_size=size)
            results = _mapped(together, forces_loop)(*args)
        return results, jax.tree.map(lambda _: True, results)

    return call


def gpu_call(
    kernel: Callable[[SimpleNamespace], None],
    name: str,
    inputs: Mapping[str, Array],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    *,
    grid: tuple[int, ...],
    warps: int,
    stages: int = 1,
    flops: int,
    moved: int | None = None,
    transcendentals: int = 0,
    aliased: Mapping[str, str] | None = None,
    interpret: bool = False,
) -> dict[str, Array]:
    """Run `kernel(refs)` over a grid on a GPU and return the outputs by name.

    Args:
      kernel: the function that runs at every grid step. `refs.<name>` is the whole array `name`,
        and `refs.barrier()` synchronises the threads of a program.
      warps: the number of warps per program.
      stages: the number of stages of the software pipeline for loads.
      name, inputs, outputs, grid, flops, moved, transcendentals, aliased, interpret: as in
        `tpu_call`, except that inputs and outputs have no block specs.
    """
    names = (*inputs, *outputs)
    # The interpreter runs a program in a single thread, which needs no barrier.
    barrier = (lambda: None) if interpret else triton.plgpu.debug_barrier

    def body(*refs):
        kernel(SimpleNamespace(barrier=barrier, **dict(zip(names, refs, strict=True))))

    index = lambda arrays, name: tuple(arrays).index(name)
    out = pl.pallas_call(
        body,
        name=name,
        grid=grid,
        in_specs=[pl.no_block_spec] * len(inputs),
        out_specs=[pl.no_block_spec] * len(outputs),
        out_shape=list(declared(outputs, inputs).values()),
        input_output_aliases={
            index(inputs, a): index(outputs, b) for a, b in (aliased or {}).items()
        },
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        cost_estimate=_cost(flops, moved, transcendentals, inputs, outputs),
        interpret=interpret,
    )(*inputs.values())
    return dict(zip(outputs, out, strict=True))


# The largest number of row tiles that JAX's megablox kernels count correctly. They count tiles by a
# histogram with bin edges in float32; with more bins, some edges are rounded to whole numbers.
MEGABLOX_TILES = 4096


def library_precision(dtype: DTypeLike) -> AbstractContextManager:
    """Return a context in which a kernel of JAX's library multiplies as `products.dot` does.

    Such a kernel sets no precision, so it would use `jax_default_matmul_precision`. Mosaic has no
    precision "high", and none but the default for bfloat16.

    Args:
      dtype: the dtype of the factors. Float32 factors are multiplied at full precision.
    """
    return jax.default_matmul_precision("default" if dtype == jnp.bfloat16 else "highest")


def _in_stacks(inputs: Blocked, prefetch: Mapping[str, Any]):
    """Replace each `StackSlice` by its stack, and add its index to the prefetched arrays.

    Returns:
      The inputs without `StackSlice`s, and all prefetched arrays in a dict that is sorted by name.
    """
    slots = {name: x.index for name, (x, _) in inputs.items() if isinstance(x, StackSlice)}
    of_slots = {f"slot_{k}": jnp.asarray(i, jnp.int32).reshape(1) for k, i in slots.items()}
    tables = dict(sorted((prefetch | of_slots).items()))

    def in_stack(name: str, x: StackSlice, spec: pl.BlockSpec):
        at = list(tables).index(f"slot_{name}") - len(tables)
        index = lambda *args: (args[at][0], *spec.index_map(*args))
        shape = (None, *spec.block_shape)
        return x.stack, pl.BlockSpec(shape, index, pipeline_mode=spec.pipeline_mode)

    replace = lambda name, x, spec: in_stack(name, x, spec) if name in slots else (x, spec)
    return {name: replace(name, x, spec) for name, (x, spec) in inputs.items()}, tables


def _moved(array: Shaped, spec: pl.BlockSpec, chosen: bool) -> int:
    of_stack = spec.block_shape is not None and spec.block_shape[0] is None
    if chosen and spec.memory_space is pl.ANY:
        return 0
    return nbytes(array) // (array.shape[0] if of_stack else 1)


def nbytes(x: Shaped) -> int:
    """Return the number of bytes of `x`, which is an array or a `jax.ShapeDtypeStruct`."""
    return math.prod(x.shape) * jnp.dtype(x.dtype).itemsize


def widen(column: Array, width: int) -> Array:
    """Widen `column` [.., 128], whose last axis repeats one value, to [.., width]."""
    return jnp.concatenate([column] * (width // LANES), axis=-1)


def software_pipeline(units, make, use, ahead: int = 1) -> None:
    """Call `use(unit, make(unit))` for each unit, but call `make` for `ahead` units in advance.

    If `make` needs mostly the matrix units and `use` the vector units, both can then work at the
    same time. The compiler does not move matrix products so far ahead by itself.
    """
    made = [make(unit) for unit in units[:ahead]]
    for i, unit in enumerate(units):
        made += [make(later) for later in units[i + ahead : i + ahead + 1]]
        use(unit, made.pop(0))


def round_up(n: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple


def is_power_of_2(n: int) -> bool:
    """Return whether n is a power of two: 1, 2, 4 and so on."""
    return n > 0 and n & (n - 1) == 0


def divisors(n: int) -> list[int]:
    """Return all divisors of n >= 1 in ascending order, from 1 to n."""
    return [d for d in range(1, n + 1) if n % d == 0]


def largest_divisor(n: int, at_most: int) -> int:
    """Return the largest divisor of n that is at most `at_most`, or 1 if `at_most` is below 1."""
    return max(d for d in divisors(n) if d <= max(at_most, 1))


def _cost(flops, moved, transcendentals, inputs, outputs) -> pl.CostEstimate:
    if moved is None:
        moved = sum(map(nbytes, (*inputs.values(), *outputs.values())))
    return pl.CostEstimate(flops=flops, bytes_accessed=moved, transcendentals=transcendentals)


def declared(outputs: Mapping[str, Shaped], operands: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of the outputs, marked as varying over the same mesh axes as `operands`.

    `jax.shard_map` checks these marks if `check_vma` is true.
    """
    varies = jax.sharding.ManualAxisType(varying=varies_in(operands))
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=varies)
    return {name: shape(x) for name, x in outputs.items()}
