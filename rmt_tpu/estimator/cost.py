"""Estimates what a compiled program costs on its target: bytes, cycles and seconds.

Nothing here is measured. `Work` is what is known of one call of an instruction; `MODELS` are the
ways to make cycles of it: a best guess, one that says less and one that says more. Times that
others measured decide which of them leads, see `calibration`.
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
    """One call of an instruction, in cycles.

    Attributes:
      kind: a Pallas "kernel", a "matmul", a copy that runs beside other work
        ("asynchronous"), a part of a "collective", or "other" work of XLA's.
      estimate: XLA's own; None where it makes none.
      schedule: of its bundles, with waiting for matrix units and not for HBM; None where libtpu
        left no schedule, or one with a loop of unknown trip count (kernels' count as running once).
      matrix: of its matrix products at the peak; of a kernel's with a loop of unknown trip count,
        as many as it declares at `Target.grouped` of the peak, and of others 0: they are in the
        schedule.
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


def _best_guess(work: Work) -> float:
    """An instruction takes the longer of schedule and bytes; without a schedule, XLA's estimate."""
    if work.kind in ("asynchronous", "collective"):
        return 0.0
    if work.kind == "kernel":
        return max(work.schedule or 0.0, work.matrix, work.hbm)
    if work.schedule is not None:
        return max(work.schedule, work.hbm)
    return work.hbm if work.estimate is None else work.estimate


def _least(work: Work) -> float:
    """Charges as the best guess does, but XLA's products no more than peak or bytes ask for."""
    if work.kind == "matmul":
        return min(_best_guess(work), max(work.matrix, work.hbm))
    return _best_guess(work)


def _most(work: Work) -> float:
    """XLA's products take its estimate where that is longer, and kernels half as long again."""
    if work.kind == "kernel":
        return 1.5 * _best_guess(work)
    if work.kind == "matmul":
        return max(_best_guess(work), work.estimate or 0.0)
    return _best_guess(work)


Model = Callable[[Work], float]
# Cycles of one call, from the least to the most of them.
MODELS: Mapping[str, Model] = MappingProxyType(
    {"least": _least, "best guess": _best_guess, "most": _most}
)
BEST_GUESS = "best guess"  # what reports lead with


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

    Attributes:
      bytes: read and written.
      by_model: seconds by each of MODELS.
      kernels: in the order in which they run.
    """

    bytes: int
    by_model: dict[str, float]
    kernels: tuple[KernelCost, ...]

    @property
    def seconds(self) -> float:
        """One run takes so long by the best guess."""
        return self.by_model[BEST_GUESS]


def work_of(program: Program, ran: Executed) -> Work:
    """What one call of an instruction asks of its target."""
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
    """The cost of one run."""
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
    """What lies in VMEM is used where it is, unless the kernel copies it at the same rate."""
    if schedule is not None and schedule.copies_in_vmem:
        return Bytes(traffic.total)
    return traffic
