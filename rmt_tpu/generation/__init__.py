"""Text from a trained decoder, one token at a time."""

from rmt_tpu.generation import files
from rmt_tpu.generation.engine import RANKS, Engine, Request, Said, Scores
from rmt_tpu.generation.generate import Completion, Draft, complete, fitting_tokens, generate
from rmt_tpu.generation.sampling import Choice, Sampling, choice, sample
from rmt_tpu.generation.weights import cast_once

__all__ = [
    "RANKS",
    "Choice",
    "Completion",
    "Draft",
    "Engine",
    "Request",
    "Said",
    "Sampling",
    "Scores",
    "cast_once",
    "choice",
    "complete",
    "files",
    "fitting_tokens",
    "generate",
    "sample",
]
