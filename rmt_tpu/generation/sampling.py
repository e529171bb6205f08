"""Which token comes next."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from rmt_tpu.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
      temperature: divides the logits; 0 always takes the likeliest token.
      top_k: only so many of the likeliest tokens; 0 is all.
      top_p: only the likeliest tokens that together reach this probability.
      max_tokens: to generate at most.
      seed: of the draws.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 256
    seed: int = 0

    def __post_init__(self):
        if self.temperature < 0:
            raise UsageError(f"--temperature={self.temperature} must be at least 0")
        if self.top_k < 0:
            raise UsageError(f"--top_k={self.top_k} must be at least 0 (0 is no limit)")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"--top_p={self.top_p} must be above 0, at most 1 (1 is no limit)")
        if self.max_tokens < 1:
            raise UsageError(f"--max_tokens={self.max_tokens} must be at least 1")


def sample(
    logits: Float[Array, "batch vocab"], key: Key[Array, ""], sampling: Sampling
) -> Int[Array, " batch"]:
    """A token for each row, drawn from what temperature, top-k and top-p leave, in this order."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1)
    # By place in the order and not by value, so that equal logits do not let in more.
    tokens = jnp.argsort(logits, axis=-1, stable=True, descending=True)
    ordered = jnp.take_along_axis(logits, tokens, axis=-1) / sampling.temperature
    if sampling.top_k:
        ordered = jnp.where(jnp.arange(logits.shape[-1]) < sampling.top_k, ordered, -jnp.inf)
    if sampling.top_p < 1:
        probabilities = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        ordered = jnp.where(before < sampling.top_p, ordered, -jnp.inf)
    place = jax.random.categorical(key, ordered, axis=-1)
    return jnp.take_along_axis(tokens, place[:, None], axis=-1)[:, 0]
