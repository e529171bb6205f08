"""The collectives of a compiled program, such as all-reduce: bytes sent, and mesh axes.

Byte counts are the bytes that one device sends if a ring of n devices performs the collective, for
arrays without padding:

    all-gather          (n - 1) / n  of the result
    reduce-scatter      (n - 1) / n  of the operand
    all-to-all          (n - 1) / n  of the operand
    all-reduce        2 (n - 1) / n  of the operand
    collective-permute               the operand

For a collective between TPU slices, the bytes are those that leave the slice. XLA passes its
operand to the host.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rmt_tpu.estimator.hlo import COLLECTIVES, Executed, Instruction, Module

_GROUPS = re.compile(r"replica_groups=\{(\{[\d,{} ]*\})?\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^)]*\)?)\))? ?\{([^}]*)\}")
_MESH_AXIS = re.compile(r"'(\w+)'=(\d+)")
_MESH_DEVICES = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_CHAIN = re.compile(r'chain_id="')
_HALF = re.compile(r'custom_call_target="AsyncCollective(Start|Done)"')
_STARTS = 'custom_call_target="AsyncCollectiveStart"'
_BETWEEN = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_MEMBERS = re.compile(r"_xla_megascale_target=\{(\{.*?\})\}")
_OF_SLICES = re.compile(r'_xla_megascale_target="\{([\d,:]+)\}x\{([\d,:]+)\}"')
# Instructions that take time, and custom calls that take none.
_WORK = ("call", "conditional", "convolution", "custom-call", "dot", "fusion", "while")
_NO_WORK = re.compile(r'custom_call_target="(AllocateBuffer|ConcatBitcast)"')
_HOST_OPCODES = ("send", "send-done", "recv", "recv-done")
_SLICE = 100_000  # The device ids of TPU slice n start at n times this number.
_KIND_BETWEEN = {
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_REDUCE": "all-reduce",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}

Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective instruction of a program.

    Attributes:
      kind: one of `hlo.COLLECTIVES`.
      op_name: the JAX operation that produced the instruction.
      axes: the mesh axes along which the collective runs, or ("?",) if they cannot be determined.
      devices: the number of devices per group.
      calls: the number of times it runs in one run of the program.
      bytes: the bytes that one device sends over all calls.
      overlaps: whether it runs at the same time as other work.
      between_slices: whether it connects TPU slices, over the data center's network.
    """

    kind: str
    op_name: str
    axes: tuple[str, ...]
    devices: int
    calls: int
    bytes: int
    overlaps: bool
    between_slices: bool = False


def collectives(
    module: Module, mesh: Mapping[str, int], ids: Sequence[int] | None = None
) -> list[Collective]:
    """Return every collective of a program that sends at least one byte.

    Args:
      module: the compiled program.
      mesh: maps the name of each mesh axis to its size, from the outermost to the innermost.
      ids: the device ids in mesh order, which are needed only if there are several slices.
    """
    found = []
    full = mesh
    if ids is not None:
        # Each TPU slice runs its own program, so collectives in it run over the mesh of one slice.
        mesh = _axes_in_slice(mesh, ids)
    for ran in module.run():
        if ids is not None and _BETWEEN.search(ran.instruction.attributes):
            if ran.instruction.opcode == "send":
                found.append(_slice_collective(module, ran, full, ids))
            continue
        for scope, instruction, kind, overlaps in _collectives_of(module, ran):
            axes, devices = _axes_and_devices(instruction, mesh)
            sent = _bytes_sent(kind, scope, instruction, devices)
            if sent:
                found.append(
                    Collective(
                        kind, instruction.op_name or ran.instruction.op_name, axes, devices,
                        ran.times, sent * ran.times, overlaps,
                    )
                )  # fmt: skip
    return found


def kind_of(instruction: Instruction) -> str | None:
    """Return the kind of collective that an instruction starts or performs, or None."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in COLLECTIVES else None


def only_communicates(module: Module, instruction: Instruction) -> bool:
    """Return whether an instruction is a collective, a part of one, or a fusion of collectives."""
    if instruction.opcode.removesuffix("-start").removesuffix("-done") in COLLECTIVES:
        return True
    if instruction.opcode in _HOST_OPCODES:
        return "megascale" in instruction.attributes
    if instruction.opcode != "fusion":
        return False
    name = instruction.called["calls"]
    root = next(i for i in module.computations[name].values() if i.is_root)
    return name.startswith("all-reduce-scatter") or bool(_HALF.search(root.attributes))


_FoundCollective = tuple[dict[str, Instruction], Instruction, str, bool]


def _collectives_of(module: Module, ran: Executed) -> Iterator[_FoundCollective]:
    """Yield the collectives of an executed instruction: itself, or those fused into it.

    Each result is a tuple: the computation that contains the collective, the collective's
    instruction, its kind, and whether it overlaps with other work.
    """
    instruction = ran.instruction
    if (kind := kind_of(instruction)) is not None:
        scope = module.computations[ran.computation]
        starts = instruction.opcode.endswith("-start")
        yield scope, instruction, kind, starts and _is_hidden(module, scope, instruction)
    elif instruction.opcode in ("fusion", "async-start") and "calls" in instruction.called:
        scope, starts = module.computations[ran.computation], instruction.opcode == "async-start"
        hidden = starts and _is_hidden(module, scope, instruction)
        yield from _fused_collectives(module, instruction.called["calls"], hidden)
    elif instruction.opcode == "call-start":
        hidden = _is_hidden(module, module.computations[ran.computation], instruction)
        yield from _fused_collectives(module, instruction.called["to_apply"], hidden)


def _is_hidden(module: Module, scope: dict[str, Instruction], start: Instruction) -> bool:
    """Return whether anything is computed from the start of a collective until it is complete.

    If it is complete only after the end of its computation, as in a later iteration of a loop, the
    result is true. A collective of a SparseCore starts at `call-update`, which has its operand.
    """
    pending, meanwhile = {start.name}, []
    for instruction in list(scope.values())[list(scope).index(start.name) + 1 :]:
        if not pending.isdisjoint(instruction.operands):
            if instruction.opcode.endswith("-done"):
                return _computes(module, meanwhile)
            if instruction.opcode.endswith("-update"):
                pending.add(instruction.name)
                if instruction.opcode == "call-update":
                    meanwhile.clear()
        meanwhile.append(instruction)
    return True


def _computes(module: Module, instructions: Sequence[Instruction]) -> bool:
    """Return whether any instruction does work during which a collective can run."""
    return any(
        i.opcode in _WORK and not _NO_WORK.search(i.attributes) and not only_communicates(module, i)
        for i in instructions
    )


def _fused_collectives(
    module: Module, computation: str, hidden: bool
) -> Iterator[_FoundCollective]:
    inside = module.computations[computation]
    starts = any(_STARTS in i.attributes for i in inside.values())
    for instruction in inside.values():
        kind = kind_of(instruction)
        if kind is not None:
            # A collective that is split over several fusions occurs in all of them, but counts only
            # in the one that starts it.
            chained = bool(_CHAIN.search(instruction.attributes))
            if starts or not chained:
                if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
                    kind = "reduce-scatter"
                yield inside, instruction, kind, chained or hidden
        elif instruction.opcode == "fusion":
            yield from _fused_collectives(module, instruction.called["calls"], hidden)


def _bytes_sent(
    kind: str, scope: dict[str, Instruction], instruction: Instruction, devices: int
) -> int:
    operands = sum(
        array.size for name in instruction.operands if name in scope for array in scope[name].arrays
    )
    if kind == "collective-permute":
        return operands if devices else 0
    full = operands * devices if kind == "all-gather" else operands
    return (2 if kind == "all-reduce" else 1) * full * (devices - 1) // max(devices, 1)


# Finding collectives between TPU slices -------------------------------------------------------


def _axes_in_slice(mesh: Mapping[str, int], ids: Sequence[int]) -> dict[str, int]:
    """Return the sizes of the mesh axes within one TPU slice."""
    slices = np.asarray(ids).reshape(tuple(mesh.values())) // _SLICE
    first = lambda axis: slices[tuple(slice(None) if a == axis else 0 for a in mesh)]
    return {axis: size // len(np.unique(first(axis))) for axis, size in mesh.items()}


def _slice_collective(
    module: Module, ran: Executed, mesh: Mapping[str, int], ids: Sequence[int]
) -> Collective:
    """Return the collective between TPU slices to which a `send` to the host belongs."""
    instruction, scope = ran.instruction, module.computations[ran.computation]
    transfer = _BETWEEN.search(instruction.attributes)
    assert transfer is not None
    kind, groups = _KIND_BETWEEN[transfer.group(1)], _members(instruction.attributes)
    places = dict(zip(ids, np.ndindex(tuple(mesh.values())), strict=True))
    differ = {
        axis
        for group in groups
        for axis, *indices in zip(mesh, *(places[i] for i in group), strict=True)
        if len(set(indices)) > 1
    }
    devices, hidden = len(groups[0]), _is_hidden_between(module, scope, instruction)
    own = sum(i // _SLICE == groups[0][0] // _SLICE for i in groups[0])
    operand = sum(array.size for name in instruction.operands[:1] for array in scope[name].arrays)
    if kind == "all-gather":
        sent = operand * (devices - own)
    elif kind == "collective-permute":
        sent = operand
    else:
        sent = (2 if kind == "all-reduce" else 1) * operand * (devices - own) // devices
    return Collective(
        kind, instruction.op_name, tuple(axis for axis in mesh if axis in differ), devices,
        ran.times, sent * ran.times, hidden, between_slices=True,
    )  # fmt: skip


def _members(attributes: str) -> Groups:
    """Return the groups of device ids, or source-target pairs, of a collective between slices."""
    if (product := _OF_SLICES.search(attributes)) is not None:
        slices, devices = (_numbers(text) for text in product.groups())
        return tuple(tuple(_SLICE * s + d for s in slices) for d in devices)
    found = _MEMBERS.search(attributes)
    assert found is not None, attributes
    listed = re.findall(r"\{([\d,>-]+)\}", found.group(1))
    return tuple(tuple(map(int, re.findall(r"\d+", text))) for text in listed)


def _numbers(text: str) -> list[int]:
    """Return the numbers in a list like "1,2", or in a range like "0:3", which includes 3."""
    parts = [[int(n) for n in part.split(":")] for part in text.split(",")]
    return [n for part in parts for n in range(part[0], part[-1] + 1)]


def _is_hidden_between(module: Module, scope: dict[str, Instruction], send: Instruction) -> bool:
    """Return whether anything is computed from a `send` until the matching `recv` is complete."""
    rendezvous = _RENDEZVOUS.findall(send.attributes)
    answers = {
        name
        for name, i in scope.items()
        if i.opcode == "recv" and _RENDEZVOUS.findall(i.attributes) == rendezvous
    }
    order = list(scope.values())
    done = [i.opcode == "recv-done" and bool(answers & {*i.operands}) for i in order]
    return _computes(module, order[list(scope).index(send.name) : done.index(True)])


# Finding the groups of devices in a collective ------------------------------------------------


def _axes_and_devices(
    instruction: Instruction, mesh: Mapping[str, int]
) -> tuple[tuple[str, ...], int]:
    """Return the mesh axes along which a collective runs, and the number of devices per group."""
    count = math.prod(mesh.values())
    if (pairs := _PAIRS.search(instruction.attributes)) is not None:
        sent = [tuple(map(int, pair.split(","))) for pair in re.findall(r"\d+,\d+", pairs.group(1))]
        moved = [pair for pair in sent if pair[0] != pair[1]]
        return _crossed(moved, mesh), max((len(c) for c in _cycles(moved)), default=0)
    groups = replica_groups(instruction.attributes, count)
    return axes_of(groups, mesh), max(map(len, groups))


def replica_groups(attributes: str, count: int) -> Groups:
    """Return the device groups of a collective, from any of XLA's three notations.

    Args:
      attributes: the text of the instruction's attributes.
      count: the total number of devices; they form one group if the attributes name no groups.
    """
    if (mesh := _MESH.search(attributes)) is not None:
        sizes = {name: int(size) for name, size in _MESH_AXIS.findall(mesh.group(1))}
        devices = np.arange(math.prod(sizes.values()))
        if (order := _MESH_DEVICES.match(mesh.group(2) or "")) is not None:
            devices = _iota(order.group(1), order.group(2))
        names = re.findall(r"'(\w+)'", mesh.group(3))
        return _tuples(_groups_along(names, devices, sizes))
    if (iota := _IOTA.search(attributes)) is not None:
        shape = tuple(int(n) for n in iota.group(1).split(","))
        return _tuples(_iota(iota.group(2), iota.group(3)).reshape(shape))
    found = _GROUPS.search(attributes)
    listed = re.findall(r"\{([\d,]+)\}", found.group(1) or "") if found else []
    groups = tuple(tuple(int(n) for n in text.split(",")) for text in listed)
    return groups or (tuple(range(count)),)


def axes_of(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes along which the devices of each group differ; ("?",) if none match."""
    wide = [axis for axis, size in mesh.items() if size > 1]
    devices = np.arange(math.prod(mesh.values()))
    wanted = {frozenset(group) for group in groups}
    for n in range(len(wide) + 1):
        for axes in itertools.combinations(wide, n):
            rows = _groups_along(axes, devices, mesh)
            if {frozenset(row) for row in rows.tolist()} == wanted:
                return axes
    return ("?",)


def _groups_along(axes: Sequence[str], devices: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
    """Return an array with one row per group of devices that differ only along `axes`."""
    inner = [list(sizes).index(axis) for axis in axes]
    outer = [i for i in range(len(sizes)) if i not in inner]
    grid = devices.reshape(tuple(sizes.values())).transpose(outer + inner)
    return grid.reshape(-1, math.prod(sizes[axis] for axis in axes))


def _crossed(pairs: list[tuple[int, ...]], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes along which data moves between (source, target) pairs of devices."""
    shape = tuple(mesh.values())
    axes = set()
    for pair in pairs:
        ends = [np.unravel_index(device, shape) for device in pair]
        axes |= {axis for axis, a, b in zip(mesh, *ends, strict=True) if a != b}
    return tuple(axis for axis in mesh if axis in axes)


def _cycles(pairs: list[tuple[int, ...]]) -> list[set[int]]:
    """Return the sets of devices that (source, target) pairs connect, directly or indirectly."""
    together: dict[int, set[int]] = {}
    for pair in pairs:
        connected = set().union(*(together.get(device, {device}) for device in pair))
        together |= dict.fromkeys(connected, connected)
    return list(together.values())


def _iota(shape: str, order: str | None) -> np.ndarray:
    sizes = tuple(int(n) for n in shape.split(","))
    grid = np.arange(math.prod(sizes)).reshape(sizes)
    return (grid.transpose([int(n) for n in order.split(",")]) if order else grid).reshape(-1)


def _tuples(rows: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in rows.tolist())
