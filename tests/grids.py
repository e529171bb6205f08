"""Finds faults in grids and index maps of a program's TPU kernels, without running these.

Plain interpretation hides all of it. `kernels_of` traces a function; `faults` evaluates the index
maps of one of its kernels over the whole grid.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax._src import core
from jax._src.state.discharge import discharge_state
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


@dataclasses.dataclass(frozen=True)
class Operand:
    """An input or output of a kernel, in blocks.

    Attributes:
      name: its place among the inputs or outputs, and its shape.
      shape: of the array.
      block: sizes of a block.
      at: [steps, axes], where a step's block begins; None if the kernel copies what it needs.
      used: whether the kernel reads or writes it at all.
    """

    name: str
    shape: tuple[int, ...]
    block: tuple[int, ...]
    at: np.ndarray | None
    used: bool


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel of a traced program.

    Attributes:
      name: in the program.
      steps: [steps, dimensions], the grid in its order.
      parallel: [dimensions], those whose order is not promised.
      inputs, outputs: without the tables that blocks are chosen by.
      aliases: pairs of an input and the output that is written over it.
    """

    name: str
    steps: np.ndarray
    parallel: tuple[bool, ...]
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    aliases: tuple[tuple[int, int], ...]


def faults(kernel: Kernel) -> list[str]:
    """A line each: what is out of bounds, unwritten, written again, or read after it was."""
    found = [line for x in (*kernel.inputs, *kernel.outputs) for line in _out_of_bounds(x)]
    for n, output in enumerate(kernel.outputs):
        aliased = any(n == other for _, other in kernel.aliases)
        found += [] if output.at is None else _visits(kernel, output, aliased)
    return [f"{kernel.name}: {line}" for line in (*found, *_overwritten(kernel))]


def _out_of_bounds(x: Operand) -> Iterator[str]:
    """A block may end behind its array, not begin there."""
    if x.at is None:
        return
    beyond = (x.at < 0) | (x.at >= np.array(x.shape, int))
    if beyond.any():
        yield f"{x.name} has a block at {x.at[beyond.any(axis=1)][0].tolist()}"


def _visits(kernel: Kernel, output: Operand, aliased: bool) -> Iterator[str]:
    """Every block is written, once; a core has it until it has done with it."""
    blocks, own = np.unique(output.at, axis=0, return_inverse=True)
    own = own.reshape(-1)
    begins = np.flatnonzero(np.diff(own, prepend=-1))
    if len(begins) > len(blocks):
        yield f"{output.name} is left and visited again"
    for block in range(len(blocks)):
        if len(_cores(kernel, own == block)) > 1:
            yield f"{output.name} has a block at {blocks[block].tolist()} of several programs"
            break
    starts = [range(0, n, each) for n, each in zip(output.shape, output.block, strict=True)]
    if aliased and starts:
        # Rows of the first axis may be left as they were: of a stack, all but one.
        starts[0] = set(output.at[:, 0].tolist())
    if len(blocks) < math.prod(map(len, starts)):
        yield f"{output.name} has {len(blocks)} of {math.prod(map(len, starts))} blocks written"


def _cores(kernel: Kernel, steps: np.ndarray) -> np.ndarray:
    """The programs of these steps: those of one may be run before or beside those of another."""
    return np.unique(kernel.steps[steps][:, np.array(kernel.parallel, bool)], axis=0)


def _overwritten(kernel: Kernel) -> Iterator[str]:
    """An input that an output is written over is read before that, or not at all."""
    programs = kernel.steps[:, np.array(kernel.parallel, bool)]
    for i, o in kernel.aliases:
        given, output = kernel.inputs[i], kernel.outputs[o]
        if not given.used or (given.at is None and output.at is None):
            continue
        if given.at is None or output.at is None:
            yield f"{given.name} is in blocks where {output.name} is not, or the reverse"
            continue
        last = {tuple(at): step for step, at in enumerate(output.at.tolist())}
        written, sizes = np.array(list(last)), np.array(output.block)
        done = np.array(list(last.values()))
        for step, at in enumerate(given.at):
            apart = (programs[step] != programs[step - 1]).any()
            if step and not apart and (at == given.at[step - 1]).all():
                continue  # It was brought already.
            shared = ((written < at + given.block) & (at < written + sizes)).all(axis=1)
            others = (programs[done] != programs[step]).any(axis=1)
            if (shared & (others | (done < step))).any():
                yield f"{given.name} is read at {at.tolist()} when {output.name} has written there"
                break


# Tracing -------------------------------------------------------------------------------------


def kernels_of(function: Callable[..., Any], *args: Any) -> list[Kernel]:
    """The TPU kernels of a function.

    Args:
      args: arrays, shapes, or trees of them; of integers that choose blocks, arrays.
    """
    traced, found = jax.make_jaxpr(function)(*args), []
    given = [_constant(x) if _is_whole(x) else _unknown for x in jax.tree.leaves(args)]
    _walk(traced, given, found)
    return found


def _is_whole(x: Any) -> bool:
    return isinstance(x, np.ndarray | jax.Array) and np.issubdtype(x.dtype, np.integer)


# A value that is computed if a kernel's blocks are chosen by it, or None if that is not known.
Value = Callable[[], np.ndarray | None]


def _unknown() -> None:
    return None


def _constant(x: Any) -> Value:
    return lambda: np.asarray(x)


def _walk(traced: Any, given: list[Value], found: list[Kernel]) -> list[Value]:
    """The results of a jaxpr, whose kernels are added to those that are found."""
    jaxpr = getattr(traced, "jaxpr", traced)
    values = dict(zip(jaxpr.invars, given, strict=True))
    values |= zip(jaxpr.constvars, map(_constant, getattr(traced, "consts", ())), strict=False)
    value = lambda x: _constant(x.val) if isinstance(x, core.Literal) else values.get(x, _unknown)
    for equation in jaxpr.eqns:
        operands = [value(x) for x in equation.invars]
        if equation.primitive.name == "pallas_call":
            if isinstance(equation.params["compiler_params"], pltpu.CompilerParams):
                found.append(_kernel(equation, operands))
            continue
        alone = functools.cache(functools.partial(_evaluated, equation, operands))
        results = [functools.partial(_nth, alone, n) for n in range(len(equation.outvars))]
        for inner in _jaxprs(equation.params.values()):
            of_inner = _walk(inner, _given_to(equation, inner, operands), found)
            if equation.primitive.name in _CALLS and len(of_inner) == len(results):
                results = of_inner
        values |= zip(equation.outvars, results, strict=True)
    return [value(x) for x in jaxpr.outvars]


# Their results are those of the jaxpr in them.
_CALLS = ("jit", "pjit", "closed_call", "custom_vjp_call", "custom_jvp_call", "checkpoint")


def _given_to(equation: Any, inner: Any, operands: list[Value]) -> list[Value]:
    """Gives the known values that enter the jaxpr of a call or a branch; of a loop, none."""
    count = len(getattr(inner, "jaxpr", inner).invars)
    name = equation.primitive.name
    operands = operands[1:] if name == "cond" else operands
    if name in ("scan", "while"):
        return [_unknown] * count
    return operands if len(operands) == count else [_unknown] * count


def _jaxprs(params: Any) -> Iterator[Any]:
    """With the constants of those that have some."""
    for x in params:
        if hasattr(x, "eqns"):
            yield x
        elif isinstance(x, tuple | list):
            yield from _jaxprs(x)


def _evaluated(equation: Any, operands: list[Value]) -> list[np.ndarray] | None:
    known = [x() for x in operands]
    if any(x is None for x in known):
        return None
    primitive = equation.primitive
    found = primitive.bind(*known, **primitive.get_bind_params(equation.params))
    return [np.asarray(x) for x in (found if primitive.multiple_results else [found])]


def _nth(results: Callable[[], list | None], n: int) -> np.ndarray | None:
    found = results()
    return None if found is None else found[n]


def _kernel(equation: Any, operands: list[Value]) -> Kernel:
    params, mapping = equation.params, equation.params["grid_mapping"]
    choosing = _choosing(mapping)
    values = [x() if n in choosing else 0 for n, x in enumerate(operands)]
    name = params["name"] or params["jaxpr"].debug_info.func_name
    dynamic = iter(values[: mapping.num_dynamic_grid_bounds])
    sizes = [n if isinstance(n, int) else next(dynamic) for n in mapping.grid]
    tables = values[mapping.num_dynamic_grid_bounds :][: mapping.num_index_operands]
    if any(x is None for x in (*sizes, *tables)):
        raise ValueError(f"{name}: what its blocks are chosen by is not known")
    steps = np.array(list(itertools.product(*(range(int(n)) for n in sizes))), np.int32)
    order = params["compiler_params"].dimension_semantics or ["arbitrary"] * len(sizes)
    refs = params["jaxpr"].invars[len(tables) :]
    used = {var for e in params["jaxpr"].eqns for var in e.invars if isinstance(var, core.Var)}
    blocks = [
        _operand(block, steps, tables, ref in used)
        for block, ref in zip(mapping.block_mappings, refs, strict=False)
    ]
    inputs, outputs = blocks[: mapping.num_inputs], blocks[mapping.num_inputs :]
    pairs = params["input_output_aliases"]
    return Kernel(
        name=name,
        steps=steps,
        parallel=tuple("parallel" in str(one).lower() for one in order),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        aliases=tuple((i - len(tables), o) for i, o in pairs),
    )


def _choosing(mapping: Any) -> set[int]:
    """Places of the operands that the grid or blocks are chosen by, and not the kernel's work."""
    count, found = mapping.num_dynamic_grid_bounds, set(range(mapping.num_dynamic_grid_bounds))
    for block in mapping.block_mappings:
        jaxpr = getattr(block.index_map_jaxpr, "jaxpr", block.index_map_jaxpr)
        read = {x for e in jaxpr.eqns for x in e.invars if isinstance(x, core.Var)}
        tables = jaxpr.invars[len(mapping.grid) :]
        found |= {count + n for n, x in enumerate(tables) if x in read}
    return found


def _operand(mapping: Any, steps: np.ndarray, tables: list, used: bool) -> Operand:
    shape = mapping.array_aval.shape
    name, at = f"{mapping.origin} of {shape}", None
    block = tuple(1 if isinstance(x, pl.Squeezed) else x.block_size for x in mapping.block_shape)
    if mapping.transformed_block_aval.memory_space is not pl.ANY:
        jaxpr = discharge_state(mapping.index_map_jaxpr)
        function = core.jaxpr_as_fun(jaxpr)
        indices = jax.vmap(lambda step: function(*step, *tables)[: len(shape)])(steps)
        count = len(steps)
        each = [
            1 if isinstance(x, pl.Element) else n
            for x, n in zip(mapping.block_shape, block, strict=True)
        ]
        columns = [np.broadcast_to(x, count) * n for x, n in zip(indices, each, strict=True)]
        at = np.stack(columns, axis=-1) if columns else np.zeros((count, 0), int)
    return Operand(name, shape, block, at, used)
