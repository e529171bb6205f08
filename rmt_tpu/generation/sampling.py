"""Which token comes next."""

from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from rmt_tpu.config.checks import Checked, Count, NonNegative, NonZeroShare, Range, Seed

# The cache holds keys and values of all of them.
_NewTokens = Annotated[int, Range(f"positive, at most {2**20}", 1, 2**20)]


@dataclass(frozen=True)
class Sampling(Checked):
    """How tokens are chosen.

    Attributes:
      temperature: divides the logits; 0 always takes the likeliest token.
      top_k: only so many of the likeliest tokens; 0 is all.
      top_p: only the likeliest tokens that together reach this probability.
      max_tokens: to generate at most.
      seed: of the draws.
    """

    temperature: NonNegative = 1.0
    top_k: Count = 0
    top_p: NonZeroShare = 1.0
    max_tokens: _NewTokens = 256
    seed: Seed = 0


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
