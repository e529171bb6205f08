"""Figures for tuning kernels where there is no device: see `cost`, `compiler` and `schedule`."""

from pallas_kernels.tuning.collectives import Collective, collectives
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
from pallas_kernels.tuning.memory import Assignment, Buffer
from pallas_kernels.tuning.topology import DEVICES, TARGETS, Target, parse_topology

__all__ = [
    "DEVICES",
    "TARGETS",
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
    "collectives",
    "compile_jobs",
    "kernel_cost",
    "lower",
    "parse_topology",
    "program_cost",
    "versions",
]
