"""What a compiled program costs on its target: bytes, cycles, seconds, by several models.

Estimates, all of them, and no model is known to be the right one: what is said of a program holds
as far as they agree. `Work` is what is known of one call of an instruction, `MODELS` are the ways
to make cycles of it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

from pallas_kernels.compiler.collectives import only_communicates
from pallas_kernels.compiler.flops import matmul_flops
from pallas_kernels.compiler.hlo import Bytes, Executed
from pallas_kernels.compiler.programs import Program
from pallas_kernels.compiler.schedule import Schedule
from pallas_kernels.compiler.topology import Target

_ASYNCHRONOUS = ("-start", "-done", "-update")


@dataclasses.dataclass(frozen=True)
class Work:
    """One call of an instruction, in cycles.

    Attributes:
      kind: a Pallas "kernel", a "matmul", a copy that runs beside other work
        ("asynchronous"), a part of a "collective", or "other" work of XLA's.
      estimate: XLA's own; None where it makes none.
      schedule: of its bundles, with waiting for matrix units and not for HBM; None where libtpu
        left no schedule, or one with a loop of unknown trip count (kernels' count as running once).
      matrix: of its matrix products at the peak; of a kernel's with a loop of unknown trip count,
        as many as it declares, and of others 0: they are in the schedule.
      hbm: of moving its bytes at the full HBM bandwidth.
      parked: of moving those of its operands and results that XLA keeps in VMEM, if they were in
        HBM.
    """

    kind: Literal["kernel", "matmul", "other", "asynchronous", "collective"]
    estimate: float | None
    schedule: float | None
    matrix: float
    hbm: float
    parked: float


def _by_compiler(work: Work) -> float:
    """XLA's estimate; of a kernel, of which it makes none, the longer of schedule and bytes."""
    if work.kind in ("asynchronous", "collective"):
        return 0.0
    if work.kind == "kernel":
        return max(work.schedule or 0.0, work.matrix, work.hbm)
    return work.hbm if work.estimate is None else work.estimate


def _by_bytes(work: Work, kinds: tuple[str, ...] = ("other",)) -> float:
    """The longer of schedule and bytes of all but matmuls: XLA's as kernels are."""
    if work.kind in kinds and work.schedule is not None:
        return max(work.schedule, work.hbm)
    return _by_compiler(work)


def _by_schedule(work: Work) -> float:
    """The same of matmuls too: all of XLA's as kernels are."""
    return _by_bytes(work, ("other", "matmul"))


def _slow_kernels(work: Work) -> float:
    """XLA's estimate; half as much again for kernels, if their schedule leaves so much out."""
    return (1.5 if work.kind == "kernel" else 1.0) * _by_compiler(work)


def _by_roofline(work: Work) -> float:
    """As by bytes, and matmuls by the longer of their FLOPs at the peak and bytes."""
    if work.kind == "matmul":
        return max(work.matrix, work.hbm)
    return _by_bytes(work)


def _unparked(work: Work) -> float:
    """As by roofline with every array in HBM, and kernels copy first and then compute."""
    moved = dataclasses.replace(work, hbm=work.hbm + work.parked)
    if work.kind == "kernel":
        return max(work.schedule or 0.0, work.matrix) + moved.hbm
    return _by_roofline(moved)


Model = Callable[[Work], float]
# Cycles of one call. The first is what tables say where they say one figure.
MODELS: Mapping[str, Model] = MappingProxyType(
    {
        "compiler": _by_compiler,
        "bytes": _by_bytes,
        "schedules": _by_schedule,
        "kernels x 1.5": _slow_kernels,
        "roofline matmuls": _by_roofline,
        "nothing in VMEM, no overlap in kernels": _unparked,
    }
)


@dataclasses.dataclass(frozen=True)
class KernelCost:
    """One kernel of a program.

    Attributes:
      name: of its instruction.
      calls: of it in one run of the program.
      cycles: of a call, by its schedule; None where libtpu left no schedule.
      bundles: of it, without waiting for matrix units.
      mxu_cycles: of a call, the floor of the matrix units.
      bytes: of its operands and results, each once.
      vmem_bytes: of its blocks and scratch.
      trips: of its loops, outer before inner; None where the count could not be read.
      unit_use: fraction of each unit's slots that are used.
      seconds: of a call, with operands and results in HBM.
    """

    name: str
    calls: int
    cycles: int | None
    bundles: int | None
    mxu_cycles: int | None
    bytes: Bytes
    vmem_bytes: int
    trips: tuple[int | None, ...]
    unit_use: dict[str, float]
    seconds: float


@dataclasses.dataclass(frozen=True)
class ProgramCost:
    """A program, as if all its arrays lay in HBM.

    XLA keeps what fits in VMEM; within a larger model, other arrays compete for that. So `bytes`
    are those of all instructions wherever their arrays lie, without the copies from HBM to VMEM.
    `seconds` rates what is not a kernel by its bytes, `estimated_seconds` by XLA's estimate, which
    rates element-wise fusions 2 to 7 times as slow as their bytes.
    """

    bytes: int
    seconds: float
    estimated_seconds: float
    kernels: tuple[KernelCost, ...]


def work_of(program: Program, ran: Executed) -> Work:
    """What one call of an instruction asks of its target."""
    instruction, module, target = ran.instruction, program.module, program.target
    schedule, kernel = program.schedules.get(instruction.name), module.kernel(instruction)
    if schedule is not None and schedule.unknown_loops and kernel is None:
        schedule = None
    traffic = module.traffic(ran.computation, instruction)
    flops = matmul_flops(module, ran.computation, instruction)
    if kernel is not None and schedule is not None and schedule.unknown_loops:
        flops = kernel.declared_flops
    if only_communicates(module, instruction):
        kind = "collective"
    elif kernel is not None:
        kind = "kernel"
        traffic = _copied(traffic, schedule)
    elif instruction.opcode.endswith(_ASYNCHRONOUS):
        kind = "asynchronous"
    else:
        kind = "matmul" if flops else "other"
    per_byte = target.clock / target.bandwidth
    return Work(
        kind=kind,
        estimate=None if instruction.cycles is None else float(instruction.cycles),
        schedule=None if schedule is None else float(schedule.cycles),
        matrix=flops / target.peak_flops * target.clock if flops else 0.0,
        hbm=traffic.hbm * per_byte,
        parked=traffic.vmem * per_byte,
    )


def program_cost(program: Program) -> ProgramCost:
    """The cost of one run."""
    target = program.target
    total, seconds, estimated = 0, 0.0, 0.0
    kernels = []
    for ran in program.module.run():
        traffic = program.module.traffic(ran.computation, ran.instruction)
        if ran.instruction.is_prefetch:
            continue
        total += traffic.total * ran.times
        if program.module.kernel(ran.instruction) is not None:
            kernels.append(kernel_cost(program, ran))
            seconds += kernels[-1].seconds * ran.times
            estimated += kernels[-1].seconds * ran.times
        else:
            by_bytes = traffic.total / target.bandwidth
            seconds += by_bytes * ran.times
            estimated += _estimate(ran, by_bytes, target) * ran.times
    return ProgramCost(total, seconds, estimated, tuple(kernels))


def kernel_cost(program: Program, ran: Executed) -> KernelCost:
    """The cost of one kernel of a program."""
    instruction = ran.instruction
    schedule = program.schedules.get(instruction.name)
    traffic = program.module.traffic(ran.computation, instruction)
    return KernelCost(
        name=instruction.name,
        calls=ran.times,
        cycles=schedule and schedule.cycles,
        bundles=schedule and schedule.bundles,
        mxu_cycles=schedule and schedule.mxu_cycles,
        bytes=traffic,
        vmem_bytes=instruction.vmem_bytes,
        trips=tuple(loop.trips for loop, _ in schedule.program.walk())[1:] if schedule else (),
        unit_use=schedule.unit_use if schedule else {},
        seconds=kernel_seconds(program.target, schedule.cycles if schedule else 0, traffic.total),
    )


def kernel_seconds(target: Target, cycles: int | float, moved: int) -> float:
    """Of a call of a kernel: the longer of its schedule and its bytes at the full bandwidth."""
    return max(cycles / target.clock, moved / target.bandwidth)


def _copied(traffic: Bytes, schedule: Schedule | None) -> Bytes:
    """What lies in VMEM is used where it is, unless the kernel copies it at the same rate."""
    if schedule is not None and schedule.copies_in_vmem:
        return Bytes(traffic.total)
    return traffic


def _estimate(ran: Executed, by_bytes: float, target: Target) -> float:
    cycles = ran.instruction.cycles
    return by_bytes if cycles is None else cycles / target.clock
