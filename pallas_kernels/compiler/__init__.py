"""What programs and kernels cost, from their compilers and without a device."""

from pallas_kernels.compiler.collectives import Collective, collectives
from pallas_kernels.compiler.cost import (
    BEST_GUESS,
    MODELS,
    KernelCost,
    ProgramCost,
    program_cost,
    work_of,
)
from pallas_kernels.compiler.memory import Assignment, Buffer
from pallas_kernels.compiler.programs import (
    CompilerError,
    Failure,
    Job,
    Program,
    Worker,
    compile_jobs,
    lower,
    versions,
)
from pallas_kernels.compiler.topology import DEVICES, TARGETS, TPUS, Target, parse_topology

__all__ = [
    "BEST_GUESS",
    "DEVICES",
    "MODELS",
    "TARGETS",
    "TPUS",
    "Assignment",
    "Buffer",
    "Collective",
    "CompilerError",
    "Failure",
    "Job",
    "KernelCost",
    "Program",
    "ProgramCost",
    "Target",
    "Worker",
    "collectives",
    "compile_jobs",
    "lower",
    "parse_topology",
    "program_cost",
    "versions",
    "work_of",
]
