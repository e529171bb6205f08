"""A parser for compiled programs in XLA's text form: instructions, execution counts and traffic.

It reads the output of `jax.stages.Compiled.as_text()` for a TPU or a GPU.
"""

import copy
import dataclasses
import functools
import math
import re
from collections.abc import Hashable, Iterator
from typing import Literal

_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z\d]*)\[([\d,]*)\](?:\{([^{}]*)\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"\b(calls|body|condition|to_apply)=%([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
_ACCESSED = re.compile(r'"bytes_accessed":"?(\d+)')
_FLOPS = re.compile(r'"flops":"?(\d+)')
_CONSTANT = re.compile(r"constant\((\d+)\)")
_INDEX = re.compile(r"index=(\d+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"?(\d+)')
_SCOPED = re.compile(r'"used_scoped_memory_configs":\[\{[^}]*"size":"(\d+)"')
_KERNEL = re.compile(r'custom_call_target="tpu_custom_call"')
_KERNEL_BODY = re.compile(r'"body": ?"([^"]*)"')
# Matches attributes at the end of an instruction that do not affect its result.
_NAMING = re.compile(r", (?:metadata|backend_config|frontend_attributes)=\{.*", re.DOTALL)
_TILE = re.compile(r"T\(([\d,*]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")
_ALIASED = "output_to_operand_aliasing={{}: (0, {})}"

# These instructions only name arrays or pass them through, so they move no bytes.
_FREE = {
    "after-all", "bitcast", "call", "conditional", "constant", "get-tuple-element",
    "opt-barrier", "parameter", "partition-id", "tuple", "while",
}  # fmt: skip
_FREE_CALLS = re.compile(r'custom_call_target="(AllocateBuffer|ConcatBitcast)"')
_MOVES = {"copy", "transpose", "reshape", "slice", "dynamic-slice", "dynamic-update-slice",
          "concatenate", "pad"}  # fmt: skip
_SLICES = {"slice", "dynamic-slice", "gather"}
# The opcodes of collectives. XLA divides some collectives over several fusions that do other work
# at the same time. Each of these fusions contains the entire collective.
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
# Matches an element of a fusion's result that is the same memory as one of its operands.
_PASSED = re.compile(r"\{(\d+)\}: \(\d+, \{\}\)")
# Maps each instruction that updates a part of its first operand in place to the index of the
# operand with the new values.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
VMEM = 1
Branches = Literal["costliest", "cheapest", "all"]


@dataclasses.dataclass(frozen=True)
class Array:
    """An array with its memory layout.

    `order` lists the dimensions from the fastest varying to the slowest. `tile` is the shape of the
    tiles into which the fastest dimensions are divided. `space` is 0 for HBM and 1 for VMEM.
    """

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    tile: tuple[int, ...]
    space: int

    @functools.cached_property
    def bytes(self) -> int:
        """The bytes that the array occupies in memory, including the padding of its tiles."""
        sizes = [self.shape[i] for i in self.order]
        for i, rows in enumerate(reversed(self.tile)):
            if i < len(sizes):
                sizes[i] = -(-sizes[i] // rows) * rows
        return math.prod(sizes) * _bits(self.dtype) // 8

    @property
    def size(self) -> int:
        """The size of the array in bytes, without padding."""
        return math.prod(self.shape) * _bits(self.dtype) // 8


@dataclasses.dataclass(frozen=True)
class Bytes:
    """The bytes that an instruction reads and writes, in HBM and in VMEM."""

    hbm: int = 0
    vmem: int = 0

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(self.hbm + other.hbm, self.vmem + other.vmem)

    @property
    def total(self) -> int:
        """The bytes in HBM and VMEM together."""
        return self.hbm + self.vmem


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction of a compiled program.

    Attributes:
      name, opcode: its name in the program, and its operation.
      arrays: its results.
      operands: the names of the instructions whose results it reads.
      attributes: the rest of the instruction's text.
      is_root: whether its results are those of the computation.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str = dataclasses.field(repr=False)
    is_root: bool

    def _attribute(self, pattern: re.Pattern) -> str | None:
        found = pattern.search(self.attributes)
        return found.group(1) if found else None

    @functools.cached_property
    def op_name(self) -> str:
        """The name of the JAX operation that produced the instruction, or an empty string."""
        return re.sub(r"\\(.)", r"\1", self._attribute(_OP_NAME) or "")

    @functools.cached_property
    def cycles(self) -> int | None:
        """XLA's own estimate in cycles, or None if XLA has none (which it writes as 2^63 - 1)."""
        found = self._attribute(_CYCLES)
        return None if found is None or int(found) == 2**63 - 1 else int(found)

    @functools.cached_property
    def called(self) -> dict[str, str]:
        """The names of the called computations, keyed by attribute, such as `body` of a loop."""
        return dict(_CALLED.findall(self.attributes))

    @property
    def branches(self) -> list[str]:
        """The names of the computations from which a conditional instruction chooses."""
        return _NAME.findall(self._attribute(_BRANCHES) or "")

    @property
    def is_kernel(self) -> bool:
        """Whether the instruction is a Pallas kernel."""
        return self.opcode == "custom-call" and bool(_KERNEL.search(self.attributes))

    @property
    def is_prefetch(self) -> bool:
        """Whether the instruction starts an asynchronous copy between HBM and VMEM."""
        spaces = {a.space for a in self.arrays if a.shape}
        return self.opcode in ("copy-start", "slice-start") and len(spaces) > 1

    @property
    def kernel_body(self) -> str:
        """The encoded program of a Pallas kernel, by which equal kernels are recognized."""
        found = self._attribute(_KERNEL_BODY)
        return self.name if found is None else found

    @property
    def declared_flops(self) -> int:
        """The FLOPs in the kernel's declared cost estimate; 0 if it declares none."""
        return int(self._attribute(_FLOPS) or 0) if self.is_kernel else 0

    @property
    def vmem_bytes(self) -> int:
        """The VMEM that a kernel uses for its blocks and scratch, in bytes."""
        return int(self._attribute(_SCOPED) or 0)

    @property
    def result(self) -> str:
        """The dtype and shape of the first result, like `bf16[16,512]`."""
        if not self.arrays:
            return "()"
        first = self.arrays[0]
        return f"{first.dtype}[{','.join(map(str, first.shape))}]"


class Module:
    """A compiled program.

    Attributes:
      computations: maps the name of each computation to a dict from name to instruction.
      entry: the name of the computation at which execution starts.
      branches: the branches of a conditional that run: "costliest" for the one that moves the most
        bytes, "cheapest" for the one that moves the fewest, or "all".
    """

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        self.branches: Branches = "costliest"
        self._moved: dict[str, int] = {}
        current: dict[str, Instruction] = {}
        instruction: Instruction | None = None
        for line in text.splitlines():
            if (header := _COMPUTATION.match(line)) is not None:
                current = self.computations[header.group(2)] = {}
                if header.group(1):
                    self.entry = header.group(2)
            elif (found := _INSTRUCTION.match(line)) is not None:
                instruction = _instruction(found.group(2), found.group(3), bool(found.group(1)))
                current[instruction.name] = instruction
            elif instruction is not None and line.startswith(('"', "}, ")):
                # A kernel inside a fusion has a configuration that continues on further lines.
                attributes = instruction.attributes + line
                instruction = dataclasses.replace(instruction, attributes=attributes)
                current[instruction.name] = instruction
        if not self.entry:
            raise ValueError("the HLO text has no ENTRY computation")

    def taking(self, branches: Branches) -> "Module":
        """Return the same program, whose conditionals take other branches."""
        other = copy.copy(self)
        other.branches, other._moved = branches, {}
        return other

    def run(self) -> Iterator["Executed"]:
        """Yield every instruction that runs; a fusion counts as one instruction.

        The text does not say how often each branch of a conditional runs. Each time that the
        conditional runs, the branch that `branches` names counts as executed, and no other.
        """
        yield from self._run(self.entry, 1, 0)

    def _run(self, computation: str, times: int, depth: int) -> Iterator["Executed"]:
        for instruction in self.computations[computation].values():
            called = instruction.called
            if instruction.opcode == "while":
                trips = self.trips(instruction)
                yield Executed(computation, instruction, times, depth, trips is None)
                yield from self._run(called["body"], times * (trips or 1), depth + 1)
                continue
            yield Executed(computation, instruction, times, depth)
            if instruction.opcode == "call":
                yield from self._run(called["to_apply"], times, depth)
            for branch in self._taken(instruction.branches):
                yield from self._run(branch, times, depth)

    def _taken(self, branches: list[str]) -> list[str]:
        """Return those of a conditional's branches that count as executed."""
        if self.branches == "all" or not branches:
            return branches
        return [(min if self.branches == "cheapest" else max)(branches, key=self._bytes_moved)]

    def _bytes_moved(self, computation: str) -> int:
        """Return the bytes that a computation reads and writes, also for its collectives."""
        if computation not in self._moved:
            self._moved[computation] = sum(
                ran.times * self.traffic(ran.computation, ran.instruction).total
                for ran in self._run(computation, 1, 0)
            )
        return self._moved[computation]

    def kernel(self, instruction: Instruction) -> Instruction | None:
        """Return the instruction if it is a Pallas kernel, or the kernel fused into it, or None.

        XLA fuses a kernel with the update that writes the kernel's results into a stacked array.
        """
        if instruction.is_kernel:
            return instruction
        if instruction.opcode != "fusion":
            return None
        inside = self.computations[instruction.called["calls"]].values()
        return next((i for i in inside if i.is_kernel), None)

    def trips(self, loop: Instruction) -> int | None:
        """Return how often a `while` loop from 0 to a constant runs, or None for other loops."""
        known = _TRIPS.search(loop.attributes)
        if known is not None:
            return int(known.group(1))
        condition = self.computations[loop.called["condition"]]
        constants = [i for i in condition.values() if i.opcode == "constant"]
        if len(constants) != 1:
            return None
        bound = _CONSTANT.match(constants[0].attributes)
        return -(-int(bound.group(1)) // self._step(loop)) if bound else None

    def _step(self, loop: Instruction) -> int:
        """Return the constant that an iteration of a loop adds to its counter; 1 if unknown.

        The step is 2 in loops that XLA unrolls, such as those that hide collectives.
        """
        condition, body = (self.computations[loop.called[name]] for name in ("condition", "body"))
        counter = next((i for i in condition.values() if i.opcode == "get-tuple-element"), None)
        result = next(i for i in body.values() if i.is_root)
        if counter is None or result.opcode != "tuple":
            return 1
        added = body[result.operands[int(_INDEX.search(counter.attributes).group(1))]]
        if added.opcode != "add":
            return 1
        constants = (_CONSTANT.match(body[name].attributes) for name in added.operands)
        return next((int(found.group(1)) for found in constants if found), 1)

    def traffic(self, computation: str, instruction: Instruction) -> Bytes:
        """Return the bytes that an instruction reads and writes.

        If an operand is only sliced, only its slices count. If an array is updated in place, only
        the update counts. An array that a fusion passes on or sends to other devices does not
        count. The traffic of an asynchronous copy counts at the instruction that starts the copy.
        """
        opcode = instruction.opcode
        if _is_free(instruction):
            return Bytes()
        scope = self.computations[computation]
        if opcode.endswith("-start"):
            return _started(instruction)
        if opcode == "fusion":
            return self._fusion(scope, instruction)
        if opcode in _SLICES:
            return _bytes(instruction.arrays) + _bytes(instruction.arrays)
        if opcode in _UPDATES:
            update = scope[instruction.operands[_UPDATES[opcode]]].arrays
            return _bytes(update) + _bytes(update)
        if opcode == "call-update":
            # Its results contain the operand of the collective.
            return sum((_bytes((array,)) for array in instruction.arrays), Bytes())
        read = (scope[name].arrays for name in instruction.operands if name in scope)
        total = sum(map(_bytes, read), _bytes(instruction.arrays))
        return _declared(instruction, total) if opcode == "custom-call" else total

    def equality_key(self, computation: str, instruction: Instruction) -> Hashable:
        """Return a key that two instructions share if they do equal work on arrays of equal shapes.

        libtpu dumps the schedule of only one of several instructions with equal keys.
        """
        if instruction.is_kernel:
            return instruction.kernel_body
        scope = self.computations[computation]
        read = tuple(scope[name].arrays for name in instruction.operands if name in scope)
        parts = tuple(map(self._parts, instruction.called.values()))
        # XLA's cycle estimate is in the key, because it depends on how XLA divides the work.
        return instruction.opcode, instruction.arrays, instruction.cycles, read, parts

    def _parts(self, computation: str) -> Hashable:
        """Return a key that two computations share if they differ only in names."""
        scope = self.computations[computation]
        position = {name: i for i, name in enumerate(scope)}
        return tuple(
            (
                part.opcode,
                part.arrays,
                tuple(position[name] for name in part.operands),
                _CALLED.sub("", _NAMING.sub("", part.attributes)),
                tuple(map(self._parts, part.called.values())),
                part.is_kernel and part.kernel_body,
            )
            for part in scope.values()
        )

    def launches(self) -> int:
        """Return the number of instructions that one run launches, such as kernels and copies."""
        return sum(ran.times for ran in self.run() if not _is_free(ran.instruction))

    def moves_only(self, instruction: Instruction) -> bool:
        """Return whether an instruction only moves data: a copy, a slice, or a fusion of these."""
        if instruction.opcode != "fusion":
            return instruction.opcode in _MOVES
        inside = self.computations[instruction.called["calls"]].values()
        opcodes = {i.opcode for i in inside} - _FREE
        return bool(opcodes) and opcodes <= _MOVES

    def _fusion(self, scope: dict[str, Instruction], instruction: Instruction) -> Bytes:
        inside = self.computations[instruction.called["calls"]]
        root = next(i for i in inside.values() if i.is_root)
        roots = [inside[name] for name in root.operands] if root.opcode == "tuple" else [root]
        total, sent = Bytes(), set()
        aliases = {int(n) for n in _PASSED.findall(instruction.attributes)}
        for i, (source, array) in enumerate(zip(roots, instruction.arrays, strict=False)):
            if i in aliases and source.opcode in COLLECTIVES:
                sent.add(source.name)
            elif i not in aliases or source.opcode != "parameter":
                total += self._written(inside, source, array)
        if aliases:
            # Neither the collective nor the tuple of results reads an array for this fusion.
            inside = {name: i for name, i in inside.items() if name not in {root.name, *sent}}
        for name, operand in zip(self._parameters(inside), instruction.operands, strict=True):
            if operand in scope:
                total += self._read(inside, name, scope[operand].arrays)
        kernel = self.kernel(instruction)
        return total if kernel is None else _declared(kernel, total)

    def _written(self, inside: dict[str, Instruction], source: Instruction, array: Array) -> Bytes:
        """Return the bytes written for a result, or for the update if it is updated in place."""
        if source.opcode == "bitcast":
            return self._written(inside, inside[source.operands[0]], array)
        if source.opcode == "fusion" and len(source.arrays) == 1:
            nested = self.computations[source.called["calls"]]
            return self._written(nested, next(i for i in nested.values() if i.is_root), array)
        if source.opcode in _UPDATES:
            update = inside[source.operands[_UPDATES[source.opcode]]].arrays[0]
            return _bytes((dataclasses.replace(update, space=array.space),))
        return _bytes((array,))

    def _read(self, inside: dict[str, Instruction], name: str, arrays: tuple[Array, ...]) -> Bytes:
        """Return the bytes that a fusion reads from an operand.

        The operand is called `name` inside the fusion. If it is only sliced there, only the slices
        count.
        """
        full, parts = _bytes(arrays), Bytes()
        for user in (i for i in inside.values() if name in i.operands):
            if user.opcode in _SLICES and user.operands[0] == name:
                parts += _bytes((dataclasses.replace(user.arrays[0], space=arrays[0].space),))
            elif (user.opcode == "bitcast" or _is_view(user)) and not user.is_root:
                parts += self._read(inside, user.name, arrays)
            elif user.opcode == "fusion":
                nested = self.computations[user.called["calls"]]
                for inner, outer in zip(self._parameters(nested), user.operands, strict=True):
                    parts += self._read(nested, inner, arrays) if outer == name else Bytes()
            elif user.opcode not in _UPDATES or user.operands[0] != name:
                return full
        return parts if parts.total < full.total else full

    @staticmethod
    def _parameters(computation: dict[str, Instruction]) -> list[str]:
        """Return the names of a computation's parameters, in parameter order."""
        numbers = {
            Module.number(i): i.name for i in computation.values() if i.opcode == "parameter"
        }
        return [numbers[n] for n in sorted(numbers)]

    @staticmethod
    def number(parameter: Instruction) -> int:
        """Return the index of a parameter in its computation, from 0."""
        return int(re.search(r"parameter\((\d+)\)", parameter.attributes).group(1))


@dataclasses.dataclass(frozen=True)
class Executed:
    """An instruction of a program, with the number of times that it runs.

    Attributes:
      computation: the name of the computation that contains it.
      instruction: the instruction.
      times: the number of times that it runs in one run of the program.
      depth: the number of loops that enclose it.
      unknown_trips: whether it is a loop with a trip count that could not be read.
    """

    computation: str
    instruction: Instruction
    times: int
    depth: int
    unknown_trips: bool = False


def _instruction(name: str, rest: str, is_root: bool) -> Instruction:
    end = _balanced(rest, 0) if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    closing = _balanced(rest, opening)
    opcode, inside = rest[:opening], rest[opening:closing]
    operands = tuple(_NAME.findall(inside))
    # For a constant or a parameter, the parentheses contain its value or index, not operands.
    attributes = rest[opening + len(inside) :] if operands else f"{opcode}{inside}{rest[closing:]}"
    arrays = tuple(_array(*found) for found in _ARRAY.findall(kind))
    return Instruction(name, opcode, arrays, operands, attributes, is_root)


def _balanced(text: str, start: int) -> int:
    """Return the index after the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    raise ValueError(f"the HLO text has unbalanced parentheses: {text[:80]}")


def _array(dtype: str, shape: str, layout: str) -> Array:
    sizes = tuple(int(n) for n in shape.split(",") if n)
    order, _, tiling = layout.partition(":")
    minor_first = tuple(int(n) for n in order.split(",") if n) or tuple(range(len(sizes)))[::-1]
    tile = _TILE.search(tiling)
    rows = tuple(int(n) for n in tile.group(1).split(",") if n != "*") if tile else ()
    space = _SPACE.search(tiling)
    return Array(dtype, sizes, minor_first, rows, int(space.group(1)) if space else 0)


def _bits(dtype: str) -> int:
    if dtype in ("pred", "token"):
        return 8
    digits = re.search(r"\d+", dtype)
    return int(digits.group()) if digits else 8


def _declared(kernel: Instruction, total: Bytes) -> Bytes:
    """Return a kernel's declared traffic if it is less than `total`, the traffic of its operands.

    Such a kernel reads only parts of large stacked arrays in HBM, so the HBM traffic is reduced.
    """
    declared = _ACCESSED.search(kernel.attributes)
    if declared is None or int(declared.group(1)) >= total.total:
        return total
    hbm = max(0, int(declared.group(1)) - total.vmem)
    return Bytes(hbm, int(declared.group(1)) - hbm)


def _bytes(arrays: tuple[Array, ...]) -> Bytes:
    return Bytes(
        hbm=sum(a.bytes for a in arrays if a.space == 0),
        vmem=sum(a.bytes for a in arrays if a.space == VMEM),
    )


def _started(instruction: Instruction) -> Bytes:
    """Return the traffic of an asynchronous copy, from the instruction that starts it.

    `copy-start` and `slice-start` have three results: the source, the destination and a semaphore.
    """
    arrays = [a for a in instruction.arrays if a.shape]
    if not arrays:
        return Bytes()
    source, target = arrays[0], arrays[-1]
    if instruction.opcode == "copy-start":
        # copy-start lists the destination first, unlike slice-start.
        source, target = target, source
    moved = dataclasses.replace(target, space=source.space)
    return _bytes((moved,)) + _bytes((target,))


def _is_view(inside: Instruction) -> bool:
    """Return whether an instruction inside a fusion only reinterprets its operand's tiling.

    Such an instruction moves no data. It occurs because on tpu7x bfloat16 arrays have tiles of 16
    rows, while fusions work on tiles of 8 rows.
    """
    return inside.opcode == "fusion" and _ALIASED in inside.attributes


def _is_free(instruction: Instruction) -> bool:
    """Return whether an instruction moves no bytes: it only names memory, or awaits a copy."""
    opcode = instruction.opcode
    if opcode == "custom-call":
        return _FREE_CALLS.search(instruction.attributes) is not None
    return opcode in _FREE or opcode.endswith("-done")
