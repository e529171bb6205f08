"""The estimated cost of a compiled program on its target: bytes, cycles and seconds.

Nothing here is measured. `Work` is what is known of one call of an instruction; `MODELS` are ways
to turn it into cycles: a best guess, one that gives less and one that gives more. Times that others
measured decide which of them is the best guess, see `calibration`.
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
    """The work of one call of an instruction, in cycles.

    Attributes:
      kind: a Pallas "kernel", a "matmul", a copy that overlaps other work ("asynchronous"), a part
        of a "collective", or "other" work of XLA's.
      estimate: XLA's own estimate; None where XLA makes none.
      schedule: the cycles of its bundles, with waiting for matrix units and not for HBM; None where
        libtpu left no schedule, or one with a loop of unknown trip count (in kernels, such loops
        count as running once).
      matrix: the cycles of its matrix products at the peak; 0 for a kernel, whose schedule has
        them. For a kernel with a loop of unknown trip count they are its declared FLOPs at
        `Target.grouped` of the peak.
      hbm: the cycles of moving its bytes at the full HBM bandwidth.
      parked: the cycles of moving the operands and results that XLA keeps in VMEM, if they were in
        HBM.
    """

    kind: Literal["kernel", "matmul", "other", "asynchronous", "collective"]
    estimate: float | None
    schedule: float | None
    matrix: float
    hbm: float
    parked: float


def _best_guess(work: Work) -> float:
    """Charge the longer of a call's schedule and bytes; without schedule, XLA's estimate."""
    if work.kind in ("asynchronous", "collective"):
        return 0.0
    if work.kind == "kernel":
        return max(work.schedule or 0.0, work.matrix, work.hbm)
    if work.schedule is not None:
        return max(work.schedule, work.hbm)
    return work.hbm if work.estimate is None else work.estimate


def _least(work: Work) -> float:
    """Charge the best guess, but for XLA's products no more than their peak or bytes require."""
    if work.kind == "matmul":
        return min(_best_guess(work), max(work.matrix, work.hbm))
    return _best_guess(work)


def _most(work: Work) -> float:
    """Charge XLA's products its estimate where that is longer, and kernels 1.5 times the guess."""
    if work.kind == "kernel":
        return 1.5 * _best_guess(work)
    if work.kind == "matmul":
        return max(_best_guess(work), work.estimate or 0.0)
    return _best_guess(work)


Model = Callable[[Work], float]
# Functions that give the cycles of one call, from the lowest to the highest.
MODELS: Mapping[str, Model] = MappingProxyType(
    {"least": _least, "best guess": _best_guess, "most": _most}
)
BEST_GUESS = "best guess"  # the model that reports show first


@dataclasses.dataclass(frozen=True)
class KernelCost:
    """The cost of one kernel of a program.

    Attributes:
      name: the name of its instruction.
      calls: how often it runs in one run of the program.
      cycles: the cycles of a call by its schedule; None where libtpu left no schedule.
      bundles: the bundles of a call, which do not include waiting for matrix units.
      mxu_cycles: the least cycles of a call that its matrix units need.
      bytes: the bytes of its operands and results, each once.
      vmem_bytes: the bytes of its blocks and scratch.
      trips: the trip counts of its loops, outer before inner; None where a count could not be read.
      unit_use: the fraction of each unit's slots that are used.
      seconds: the seconds of a call, with operands and results in HBM.
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
    """The cost of a program if all its arrays were in HBM.

    XLA keeps in VMEM what fits, but within a larger model other arrays compete for that. So `bytes`
    counts all instructions wherever their arrays are, without the copies from HBM to VMEM.

    Attributes:
      bytes: the bytes read and written.
      by_model: the seconds by each of MODELS.
      kernels: the kernels, in the order in which they run.
    """

    bytes: int
    by_model: dict[str, float]
    kernels: tuple[KernelCost, ...]

    @property
    def seconds(self) -> float:
        """The seconds of one run by the best guess."""
        return self.by_model[BEST_GUESS]


def work_of(program: Program, ran: Executed) -> Work:
    """Return the work of one call of an instruction on the program's target."""
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
    """Return the cost of one run."""
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
    """Return a kernel's bytes, those in VMEM as HBM bytes if the kernel copies them.

    A kernel uses operands in VMEM where they are, unless it copies them, which takes as long.
    """
    if schedule is not None and schedule.copies_in_vmem:
        return Bytes(traffic.total)
    return traffic
