"""The estimated cost of a compiled program on its target: bytes, cycles and seconds.

Nothing here is measured. `Work` describes one call of an instruction. The functions in `MODELS`
turn a `Work` into cycles: a low estimate, a best guess and a high estimate. The formula of the best
guess was chosen by comparison with published times (see `calibration`).
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

from rmt_tpu.estimator.collectives import only_communicates
from rmt_tpu.estimator.flops import matmul_flops
from rmt_tpu.estimator.hlo import Bytes, Executed
from rmt_tpu.estimator.programs import Program
from rmt_tpu.estimator.schedule import Schedule

_ASYNCHRONOUS = ("-start", "-done", "-update")


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one call of an instruction; all times are in cycles.

    Attributes:
      kind: "kernel" for a Pallas kernel, "matmul", "asynchronous" for a copy that overlaps other
        work, "collective" for a part of a collective, or "other".
      estimate: XLA's own estimate; None where XLA provides none.
      schedule: the length of the VLIW schedule, including stalls for matrix units but not for HBM.
        It is None if libtpu left no schedule, or if a loop outside kernels has an unknown trip
        count. In a kernel, such a loop counts as one iteration.
      matrix: the time of the matrix products at peak throughput. It is 0 for most kernels, because
        their schedules include their products. For a kernel with a loop of unknown trip count, it
        is the time of the declared FLOPs at the fraction `Target.grouped` of the peak.
      hbm: the time of moving the instruction's bytes at the full HBM bandwidth.
      parked: the time that moving the operands and results in VMEM would take if they were in HBM.
    """

    kind: Literal["kernel", "matmul", "other", "asynchronous", "collective"]
    estimate: float | None
    schedule: float | None
    matrix: float
    hbm: float
    parked: float


def _best_guess(work: Work) -> float:
    """Return the time of the schedule or of the HBM traffic, whichever is longer.

    The result for an instruction without a schedule is XLA's own estimate.
    """
    if work.kind in ("asynchronous", "collective"):
        return 0.0
    if work.kind == "kernel":
        return max(work.schedule or 0.0, work.matrix, work.hbm)
    if work.schedule is not None:
        return max(work.schedule, work.hbm)
    return work.hbm if work.estimate is None else work.estimate


def _least(work: Work) -> float:
    """Return the low estimate of the cycles.

    It is the best guess. For a matrix product by XLA, it is not more than the time at full speed.
    """
    if work.kind == "matmul":
        return min(_best_guess(work), max(work.matrix, work.hbm))
    return _best_guess(work)


def _most(work: Work) -> float:
    """Return the high estimate of the cycles.

    It is 1.5 times the best guess for a kernel. For a matrix product by XLA, it is the best guess
    or XLA's own estimate, whichever is longer. For any other instruction, it is the best guess.
    """
    if work.kind == "kernel":
        return 1.5 * _best_guess(work)
    if work.kind == "matmul":
        return max(_best_guess(work), work.estimate or 0.0)
    return _best_guess(work)


CostModel = Callable[[Work], float]
# Maps the name of each cost model to its function. The model with the lowest estimates comes first.
MODELS: Mapping[str, CostModel] = MappingProxyType(
    {"least": _least, "best guess": _best_guess, "most": _most}
)
BEST_GUESS = "best guess"  # This is the name of the cost model that reports show first.
HIGHEST = "most"


@dataclasses.dataclass(frozen=True)
class KernelCost:
    """The cost of one kernel in a program; cycles, bundles and bytes are per call.

    Attributes:
      name: the name of the kernel's instruction.
      calls: the number of times the kernel runs in one run of the program.
      cycles: the length of the schedule, with stalls; None where libtpu left no schedule.
      bundles: the number of VLIW bundles executed, which excludes stalls for matrix units.
      mxu_cycles: the minimum number of cycles that the matrix units need.
      bytes: the size of operands and results, each counted once.
      vmem_bytes: the VMEM that its blocks and scratch occupy, in bytes.
      trips: the trip counts of its loops, outer before inner; None where a trip count could not be
        read.
      unit_use: maps each functional unit to the fraction of its issue slots that are used.
      seconds: the estimated time of one call with operands and results in HBM.
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
    """The cost that a program would have if all its arrays were in HBM.

    XLA keeps arrays of a small program in VMEM. In a larger model, other arrays compete for that
    space. Therefore `bytes` counts the traffic of every instruction, even if its arrays are in
    VMEM. It leaves out copies from HBM to VMEM.

    Attributes:
      bytes: the bytes read and written in one run.
      by_model: maps the name of each cost model to the seconds of one run.
      kernels: the costs of the kernels, in execution order.
    """

    bytes: int
    by_model: dict[str, float]
    kernels: tuple[KernelCost, ...]

    @property
    def seconds(self) -> float:
        """The time of one run in seconds, according to the best-guess model."""
        return self.by_model[BEST_GUESS]


def work_of(program: Program, ran: Executed) -> Work:
    """Return the work of one call of an instruction, in cycles of the program's target device."""
    instruction, module, target = ran.instruction, program.module, program.target
    schedule, kernel = program.schedules.get(instruction.name), module.kernel(instruction)
    if schedule is not None and schedule.unknown_loops and kernel is None:
        schedule = None
    traffic = module.traffic(ran.computation, instruction)
    flops = matmul_flops(module, ran.computation, instruction)
    peak = target.peak_flops
    if kernel is not None and schedule is not None and schedule.unknown_loops:
        flops, peak = kernel.declared_flops, peak * target.grouped
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
        matrix=flops / peak * target.clock if flops else 0.0,
        hbm=traffic.hbm * per_byte,
        parked=traffic.vmem * per_byte,
    )


def program_cost(program: Program) -> ProgramCost:
    """Return the cost of one run of a compiled program."""
    total, cycles = 0, dict.fromkeys(MODELS, 0.0)
    kernels = []
    for ran in program.module.run():
        if ran.instruction.is_prefetch:
            continue
        total += program.module.traffic(ran.computation, ran.instruction).total * ran.times
        work = work_of(program, ran)
        in_hbm = dataclasses.replace(work, hbm=work.hbm + work.parked, parked=0.0)
        for name, model in MODELS.items():
            cycles[name] += model(in_hbm) * ran.times
        if work.kind == "kernel":
            seconds = MODELS[BEST_GUESS](in_hbm) / program.target.clock
            kernels.append(_kernel_cost(program, ran, seconds))
    by_model = {name: of / program.target.clock for name, of in cycles.items()}
    return ProgramCost(total, by_model, tuple(kernels))


def _kernel_cost(program: Program, ran: Executed, seconds: float) -> KernelCost:
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
        seconds=seconds,
    )


def _copied(traffic: Bytes, schedule: Schedule | None) -> Bytes:
    """Return a kernel's traffic, with VMEM bytes counted as HBM bytes if the kernel copies them.

    A kernel with a pipeline over a grid uses an operand in VMEM in place. Other kernels copy the
    operand within VMEM, which takes as long as a copy from HBM.
    """
    if schedule is not None and schedule.copies_in_vmem:
        return Bytes(traffic.total)
    return traffic
