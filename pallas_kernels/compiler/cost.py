"""What a compiled program costs on its target, by the model: bytes, cycles, seconds.

Estimates, all of them. A kernel takes the longer of its schedule's cycles and its bytes over the
HBM bandwidth. For other instructions there are two views: bytes over bandwidth, and XLA's own
estimated cycles (which rate element-wise fusions about twice as slow as their bytes).
"""

import dataclasses

from pallas_kernels.compiler.hlo import Bytes, Executed
from pallas_kernels.compiler.programs import Program
from pallas_kernels.compiler.topology import Target


@dataclasses.dataclass(frozen=True)
class KernelCost:
    """One kernel of a program.

    Attributes:
      name: of its instruction.
      calls: of it in one run of the program.
      cycles: of a call, by its schedule; None where libtpu left no schedule.
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
    `seconds` rates what is not a kernel by its bytes, `estimated_seconds` by XLA's estimate.
    """

    bytes: int
    seconds: float
    estimated_seconds: float
    kernels: tuple[KernelCost, ...]


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
        if ran.instruction.is_kernel:
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
        mxu_cycles=schedule and schedule.mxu_cycles,
        bytes=traffic,
        vmem_bytes=instruction.vmem_bytes,
        trips=tuple(loop.trips for loop, _ in schedule.program.walk())[1:] if schedule else (),
        unit_use=schedule.unit_use if schedule else {},
        seconds=max(
            (schedule.cycles if schedule else 0) / program.target.clock,
            traffic.total / program.target.bandwidth,
        ),
    )


def _estimate(ran: Executed, by_bytes: float, target: Target) -> float:
    cycles = ran.instruction.cycles
    return by_bytes if cycles is None else cycles / target.clock
