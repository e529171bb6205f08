"""Text from a trained decoder, one token at a time."""

from rmt_tpu.generation.generate import fitting_tokens, generate
from rmt_tpu.generation.sampling import Sampling, sample

__all__ = ["Sampling", "fitting_tokens", "generate", "sample"]
