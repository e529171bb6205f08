"""Estimates of the cost of programs and kernels, from compiler output alone, without a device."""

from rmt_tpu.estimator.collectives import Collective, collectives
from rmt_tpu.estimator.cost import (
    BEST_GUESS,
    HIGHEST,
    MODELS,
    KernelCost,
    ProgramCost,
    program_cost,
    work_of,
)
from rmt_tpu.estimator.links import seconds_on_links
from rmt_tpu.estimator.memory import Assignment, Buffer
from rmt_tpu.estimator.programs import (
    CompilerError,
    Failure,
    Job,
    Program,
    Worker,
    compile_jobs,
    lower,
    versions,
)
from rmt_tpu.estimator.topology import DEVICES, TARGETS, TPUS, Target, parse_topology

__all__ = [
    "BEST_GUESS",
    "HIGHEST",
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
    "seconds_on_links",
    "versions",
    "work_of",
]
