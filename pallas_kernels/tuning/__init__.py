"""Figures for tuning kernels where there is no device: see `cost`, `compiler` and `schedule`."""

from pallas_kernels.tuning.compiler import (
    CompilerError,
    Failure,
    Job,
    Program,
    compile_jobs,
    lower,
    versions,
)
from pallas_kernels.tuning.cost import KernelCost, ProgramCost, kernel_cost, program_cost
from pallas_kernels.tuning.topology import TARGETS, Target

__all__ = [
    "TARGETS",
    "CompilerError",
    "Failure",
    "Job",
    "KernelCost",
    "Program",
    "ProgramCost",
    "Target",
    "compile_jobs",
    "kernel_cost",
    "lower",
    "program_cost",
    "versions",
]
