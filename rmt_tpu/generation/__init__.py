"""Text generation with a trained decoder, one token at a time."""

from rmt_tpu.generation import files
from rmt_tpu.generation.adjustment import Adjustment
from rmt_tpu.generation.engine import Engine, NewTokens, Request, check_slots, check_tokens
from rmt_tpu.generation.generate import Completion, Draft, complete, fitting_tokens, generate
from rmt_tpu.generation.programs import RANKS, Scores, mesh_of
from rmt_tpu.generation.sampling import Choice, Sampling, choice, sample
from rmt_tpu.generation.weights import cast_once

__all__ = [
    "RANKS",
    "Adjustment",
    "Choice",
    "Completion",
    "Draft",
    "Engine",
    "Request",
    "NewTokens",
    "Sampling",
    "Scores",
    "cast_once",
    "check_slots",
    "check_tokens",
    "choice",
    "complete",
    "files",
    "fitting_tokens",
    "generate",
    "mesh_of",
    "sample",
]
