"""The contents of a device's memory when a program uses the most of it, read from XLA's dumps.

This works even for a program that does not fit in memory, because XLA dumps its buffer assignment
before it reports the error.
"""

import bisect
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from rmt_tpu.estimator.hlo import Instruction, Module

# Maps each kind of dump to the suffix of its file name.
DUMPS = {
    "assignment": "after_optimizations-buffer-assignment.txt",
    "lives": "after_optimizations-live-range.txt",
    "hlo": "after_optimizations.txt",
}
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (.*):$")
# Matches buffers outside of HBM. XLA numbers the kinds of memory, as colors; HBM has color 0.
_COLOR = re.compile(r"\bcolor ([1-9]\d*),")
_VALUE = re.compile(
    r"^ value: <\d+ ([^ >]+)(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): \(*([^ {]+)"
)
_PARAMETER = re.compile(r"\bparameter (\d+),")
_SEQUENCE = re.compile(r"^    (\d+):(\S+)$")
_LIFE = re.compile(r"^    (\S+?)(\{[\d,]*\}):(\d+)-(\d+)$")
_INDEXED = re.compile(r"^(.*?)\{(\d+)[\d,]*\}$")
# These instructions only pass an array through, so their results get the name of that array.
_PASSES = {
    "bitcast", "convert", "copy", "copy-done", "copy-start", "opt-barrier", "reshape", "transpose",
}  # fmt: skip
_COMPUTES = {"convolution", "custom-call", "dot", "fusion", "while"}
_VAGUE = {
    "",
    "shard_map",
    "while",
    "dynamic_update_slice",
    "broadcast_in_dim",
    "copy",
    "body",
    "closed_call",
}


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A range of memory that contains one array, or several arrays at different times.

    Attributes:
      name: the op_name of the instruction that produces the array, or the path of an argument.
      instruction: the name of that instruction in the program.
      shape: the dtype and shape of the array, as text.
      bytes: the size in memory, in bytes.
      is_saved: whether the forward pass produces the array and the backward pass reads it.
    """

    name: str
    instruction: str
    shape: str
    bytes: int
    is_saved: bool = False


@dataclasses.dataclass(frozen=True)
class Assignment:
    """XLA's assignment of one device's high-bandwidth memory; sizes are in bytes.

    Attributes:
      arguments: the buffers of the program's arguments. A result that reuses an argument's memory
        adds nothing.
      live: the temporary buffers in use at the peak.
      temporary: the memory reserved for temporary buffers. It consists of the buffers in `live`,
        and gaps.
      other: the memory of constants, of results that do not reuse an argument's memory, and of
        small scratch buffers.
    """

    arguments: tuple[Buffer, ...]
    live: tuple[Buffer, ...]
    temporary: int
    other: int

    @property
    def total(self) -> int:
        """The bytes that the compiler compares with the device's memory capacity."""
        return sum(b.bytes for b in self.arguments) + self.temporary + self.other

    @property
    def gaps(self) -> int:
        """The bytes that are reserved for temporary buffers but unused at their peak."""
        return self.temporary - sum(b.bytes for b in self.live)


def read_assignment(folder: Path) -> Assignment | None:
    """Return the buffer assignment of the largest program in a dump folder.

    Return None if the folder has no program.
    """
    found = sorted(folder.glob(f"*{DUMPS['assignment']}"), key=lambda path: path.stat().st_size)
    if not found:
        return None
    stem = found[-1].name.removesuffix(DUMPS["assignment"])
    paths = {kind: folder / f"{stem}{end}" for kind, end in DUMPS.items()}
    texts = {
        kind: path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        for kind, path in paths.items()
    }
    return parse_assignment(texts["assignment"], texts["lives"], Module(texts["hlo"]))


def parse_assignment(assignment: str, lives: str, module: Module) -> Assignment:
    """Parse a module's buffer assignment.

    Args:
      assignment: the text of XLA's `buffer-assignment.txt`.
      lives: the text of XLA's `live-range.txt`. If it has no live ranges, `Assignment.live` is
        approximated by the largest buffers whose addresses do not overlap.
      module: the compiled program.
    """
    names = _Names(module)
    parameters, values, temporary, other = _parse_allocations(assignment)
    order, ranges = _parse_lives(lives)
    live, moment = _at_peak(values, ranges) if ranges else (values, 0)
    work = [(time, names.is_backward(name)) for time, name in order if names.computes(name)]
    before = [is_backward for time, is_backward in work if time <= moment]
    in_backward = bool(before) and before[-1]
    backward = [time for time, is_backward in work if is_backward]
    # The result of a loop is one value inside the loop and another after it, at the same address.
    # Therefore the live ranges of values with the same address and name belong together.
    lives_of: dict[tuple[int, int, str], list[tuple[int, int]]] = {}
    for value in values:
        if value.name in ranges:
            place = value.offset, value.size, names.of(value.name)
            lives_of.setdefault(place, []).append(ranges[value.name])
    buffers = []
    for sharing in _without_overlaps(live):
        best = min(sharing, key=lambda v: names.vagueness(v.name))
        name = names.of(best.name)
        lives_here = lives_of.get((best.offset, best.size, name), [])
        crosses = in_backward or any(_contains_time(life, backward) for life in lives_here)
        is_saved = _is_forward(name) and crosses
        buffers.append(Buffer(name, best.name, best.shape, best.size, is_saved))
    arguments = [names.argument(number, size) for number, size in parameters]
    by_size = lambda found: tuple(sorted(found, key=lambda buffer: -buffer.bytes))
    return Assignment(by_size(arguments), by_size(buffers), temporary, other)


@dataclasses.dataclass(frozen=True)
class _Value:
    name: str
    size: int
    offset: int
    shape: str


def _parse_allocations(text: str) -> tuple[list[tuple[int, int]], list[_Value], int, int]:
    """Parse the allocations of a buffer assignment.

    Returns:
        The number and size of each parameter, the temporary values, the bytes reserved for
        temporary values, and the bytes of all other allocations.
    """
    parameters, values, temporary, other = [], [], 0, 0
    is_temporary = False
    for line in text.splitlines():
        if (found := _ALLOCATION.match(line)) is not None:
            size, kind = int(found.group(1)), found.group(2)
            here = not _COLOR.search(kind)
            is_temporary = here and "preallocated-temp" in kind
            parameter = _PARAMETER.search(kind)
            if here and parameter:
                parameters.append((int(parameter.group(1)), size))
            elif is_temporary:
                temporary += size
            elif here:
                other += size
        elif is_temporary and (found := _VALUE.match(line)) is not None:
            name, size, offset, shape = found.groups()
            values.append(_Value(name, int(size), int(offset), shape))
    return parameters, values, temporary, other


def _parse_lives(text: str) -> tuple[list[tuple[int, str]], dict[str, tuple[int, int]]]:
    """Parse XLA's `live-range.txt`.

    A time is the position of an instruction in the order of execution.

    Returns:
        The instructions with their times, and the first and last time of each value.
    """
    order, ranges = [], {}
    for line in text.splitlines():
        if line.startswith("  Live ranges at"):
            break
        if (found := _LIFE.match(line)) is not None:
            name, index, start, end = found.groups()
            ranges[name if index == "{}" else name + index] = int(start), int(end)
        elif (found := _SEQUENCE.match(line)) is not None:
            order.append((int(found.group(1)), found.group(2)))
    return order, ranges


def _at_peak(values: list[_Value], ranges: dict[str, tuple[int, int]]) -> tuple[list[_Value], int]:
    """Return the values that are live at peak memory use, and the time of the peak.

    A memory range that several values share counts once.
    """
    events = []
    for value in values:
        if value.name in ranges:
            start, end = ranges[value.name]
            events += [(start, 0, value), (end, 1, value)]
    used: dict[tuple[int, int], int] = {}
    total = most = moment = 0
    # At equal times, starts come before ends, because a value is still in use at its last time.
    for time, ends, value in sorted(events, key=lambda event: event[:2]):
        place = value.offset, value.size
        used[place] = used.get(place, 0) + (-1 if ends else 1)
        if ends and not used[place]:
            total -= value.size
        elif not ends and used[place] == 1:
            total += value.size
            if total > most:
                most, moment = total, time
    inside = lambda life: life is not None and life[0] <= moment <= life[1]
    return [value for value in values if inside(ranges.get(value.name))], moment


def _without_overlaps(values: list[_Value]) -> Iterator[list[_Value]]:
    """Group values by memory range, and yield the groups.

    A range that overlaps a larger one is skipped.
    """
    places: dict[tuple[int, int], list[_Value]] = {}
    for value in values:
        places.setdefault((value.offset, value.size), []).append(value)
    used_ranges: list[tuple[int, int]] = []
    for offset, size in sorted(places, key=lambda place: (-place[1], place[0])):
        if size and not any(offset < end and start < offset + size for start, end in used_ranges):
            used_ranges.append((offset, offset + size))
            yield places[offset, size]


def _contains_time(life: tuple[int, int], times: list[int]) -> bool:
    """Return whether one of `times` is in a live range, but is not its start.

    `times` is in ascending order.
    """
    after = bisect.bisect_right(times, life[0])
    return after < len(times) and times[after] <= life[1]


def _is_forward(op_name: str) -> bool:
    return "jvp(" in op_name and not _is_backward(op_name)


def _is_backward(op_name: str) -> bool:
    return "transpose(jvp" in op_name


class _Names:
    """The names that the arrays of a compiled module have in the JAX program.

    A name is either an op_name (a path of JAX's scopes) or the path of a program's argument.
    """

    def __init__(self, module: Module):
        self._module = module
        self._where = {
            name: instruction
            for scope in module.computations.values()
            for name, instruction in scope.items()
        }
        loops = [i for i in self._where.values() if i.opcode == "while"]
        self._loops = {i.called[part]: i for i in loops for part in ("body", "condition")}
        self._scope = {
            name: computation
            for computation, scope in module.computations.items()
            for name in scope
        }
        self._arguments = {
            module.number(i): i
            for i in module.computations[module.entry].values()
            if i.opcode == "parameter"
        }

    def argument(self, number: int, size: int) -> Buffer:
        instruction = self._arguments.get(number)
        if instruction is None:
            return Buffer(f"argument {number}", "", "", size)
        return Buffer(self.of(instruction.name), instruction.name, instruction.result, size)

    def computes(self, name: str) -> bool:
        """Return whether an instruction does work, rather than being a constant or a copy."""
        instruction = self._where.get(name)
        return instruction is not None and instruction.opcode in _COMPUTES

    def is_backward(self, name: str) -> bool:
        return _is_backward(self._where[name].op_name)

    def of(self, value: str) -> str:
        """Return the op_name (JAX operation) of the instruction that produces a value.

        A value is written as `instruction`, or as `instruction{index}` for one result of a tuple.
        """
        indexed = _INDEXED.match(value)
        name, index = (indexed.group(1), int(indexed.group(2))) if indexed else (value, 0)
        instruction = self._where.get(name)
        if instruction is None:
            return name
        made_by = self._producer_name(instruction, index, set()) or instruction.op_name or name
        return made_by.replace("\\'", "'")

    def vagueness(self, value: str) -> tuple[bool, int]:
        """Return a sort key that puts the value with the clearest name first."""
        name = self.of(value)
        return _is_vague(name), -len(name)

    def _producer_name(
        self, instruction: Instruction, index: int, seen: set[tuple[str, int]]
    ) -> str:
        if (instruction.name, index) in seen:
            return ""
        seen.add((instruction.name, index))
        opcode, scope = instruction.opcode, self._scope[instruction.name]
        operand = lambda i: self._where.get(instruction.operands[i])
        if opcode == "while":
            return self._carried_name(instruction, index, seen)
        if opcode == "parameter":
            loop = self._loops.get(scope)
            return self._carried_name(loop, index, seen) if loop else instruction.op_name
        if opcode == "get-tuple-element":
            number = int(re.search(r"index=(\d+)", instruction.attributes).group(1))
            return self._producer_name(operand(0), number, seen)
        if opcode == "tuple":
            return self._producer_name(operand(index), 0, seen)
        if opcode in _PASSES and instruction.operands and _is_vague(instruction.op_name):
            return self._producer_name(operand(0), index, seen)
        if (update := self._update(instruction)) is not None:
            return self._producer_name(update, 0, seen) or instruction.op_name
        return instruction.op_name

    def _carried_name(self, loop: Instruction, index: int, seen: set[tuple[str, int]]) -> str:
        """Return the name of the value at `index` that a loop carries between its iterations.

        The result is the name in the loop's body or, if that name is vague, the name of the value
        with which the loop starts.
        """
        body = self._module.computations[loop.called["body"]]
        root = next(i for i in body.values() if i.is_root)
        if root.opcode == "tuple" and index < len(root.operands):
            found = self._producer_name(self._where[root.operands[index]], 0, seen)
            if found and not _is_vague(found):
                return found
        start = self._where[loop.operands[0]]
        return self._producer_name(start, index, seen)

    def _update(self, instruction: Instruction) -> Instruction | None:
        """Return the instruction that computes the slice which `instruction` writes into an array.

        Return None if `instruction` does not write a slice.
        """
        if instruction.opcode == "dynamic-update-slice":
            return self._where[instruction.operands[1]]
        if instruction.opcode != "fusion":
            return None
        inside = self._module.computations[instruction.called["calls"]]
        root = next(i for i in inside.values() if i.is_root)
        while root.opcode == "bitcast":
            root = inside[root.operands[0]]
        if root.opcode != "dynamic-update-slice":
            return None
        update = inside[root.operands[1]]
        while update.opcode in ("bitcast", "convert", "copy", "reshape", "transpose"):
            update = inside[update.operands[0]]
        if update.opcode == "parameter":
            return self._where.get(instruction.operands[self._module.number(update)])
        return update


def _is_vague(op_name: str) -> bool:
    return op_name.rpartition("/")[2] in _VAGUE
