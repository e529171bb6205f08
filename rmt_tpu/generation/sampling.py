"""Which token comes next."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from rmt_tpu.config.checks import (
    Checked,
    Count,
    NonNegative,
    NonZeroShare,
    Range,
    Seed,
    Share,
)

_LEAST = 2.0**-126  # float32 has no smaller number that devices do not take for 0
_Penalty = Annotated[float, Range("positive, at most 3.4e+38, at least 1.2e-38", _LEAST, 3.4e38)]
# The cache holds keys and values of all of them.
_NewTokens = Annotated[int, Range(f"positive, at most {2**20}", 1, 2**20)]


@dataclass(frozen=True)
class Sampling(Checked):
    """How tokens are chosen.

    Attributes:
      temperature: divides the logits; 0 always takes the likeliest token.
      top_k: only so many of the likeliest tokens; 0 is all.
      top_p: only the likeliest tokens that together reach this probability; the likeliest always.
      min_p: only tokens at least so likely as this times the likeliest; 0 is all.
      repetition_penalty: divides the logits of tokens that the prompt or the text has, those below
        0 multiplied (Keskar et al., 2019, section 4.1); 1 is none.
      max_tokens: to generate at most.
      seed: of the draws.
    """

    temperature: NonNegative = 1.0
    top_k: Count = 0
    top_p: NonZeroShare = 1.0
    min_p: Share = 0.0
    repetition_penalty: _Penalty = 1.0
    max_tokens: _NewTokens = 256
    seed: Seed = 0


class Choice(NamedTuple):
    """The `Sampling` of each row, as numbers: one program serves all."""

    temperature: Float[Array, " batch"]
    top_k: Int[Array, " batch"]
    top_p: Float[Array, " batch"]
    min_p: Float[Array, " batch"]
    repetition_penalty: Float[Array, " batch"]
    seed: UInt32[Array, " batch"]


def choice(rows: Sequence[Sampling]) -> Choice:
    """Of a batch; in NumPy."""
    # More than there are tokens is all of them, and so is 0.
    bounded = lambda count: min(count, np.iinfo(np.int32).max)
    # Some devices take a smaller number for 0, and others do not.
    normal = lambda value: value if value >= _LEAST else 0.0
    return Choice(
        np.array([normal(s.temperature) for s in rows], np.float32),
        np.array([bounded(s.top_k) for s in rows], np.int32),
        np.array([normal(s.top_p) for s in rows], np.float32),
        np.array([normal(s.min_p) for s in rows], np.float32),
        np.array([s.repetition_penalty for s in rows], np.float32),
        np.array([s.seed for s in rows], np.uint32),
    )


def penalized(
    logits: Float[Array, "batch vocab"], seen: Bool[Array, "batch vocab"], how: Choice
) -> Float[Array, "batch vocab"]:
    """With the logits of tokens that a row has seen made smaller, by its `repetition_penalty`."""
    penalty = how.repetition_penalty[:, None]
    smaller = jnp.where(logits > 0, logits / penalty, logits * penalty)
    # Two that are infinite could not be told apart, and what they differ by is no number.
    largest = jnp.finfo(logits.dtype).max
    smaller = jnp.clip(smaller, -largest, largest)
    return jnp.where(seen & (penalty != 1), smaller, logits)


def sample(
    logits: Float[Array, "batch vocab"], positions: Int[Array, " batch"], how: Choice
) -> Int[Array, " batch"]:
    """A token for each row, drawn from what temperature, top-k, top-p and min-p leave.

    A draw depends on the row's seed and the token's position alone, and not on other rows.
    """
    likeliest = jnp.argmax(logits, axis=-1)

    def drawn():
        # The likeliest is 0, however small the temperature is.
        below = logits - jnp.max(logits, axis=-1, keepdims=True)
        scaled = below / jnp.where(how.temperature > 0, how.temperature, 1)[:, None]
        some = jnp.any((how.top_k > 0) | (how.top_p < 1))  # to sort them all takes long
        scaled = jax.lax.cond(
            some, lambda: jnp.where(_kept(scaled, how), scaled, -jnp.inf), lambda: scaled
        )
        # In whatever order: what top-k and top-p leave out changes no ratio to the likeliest.
        least = jnp.max(scaled, axis=-1) + jnp.log(how.min_p)
        scaled = jnp.where(scaled >= least[:, None], scaled, -jnp.inf)
        tokens = jnp.argmax(scaled + _noise(how.seed, positions, scaled), axis=-1)
        return jnp.where(how.temperature > 0, tokens, likeliest)

    return jax.lax.cond(jnp.any(how.temperature > 0), drawn, lambda: likeliest)


def _noise(seeds, positions, logits):
    """Gumbel's, with which the largest logit is a draw; by token, whatever else is left out."""

    def of_row(seed, position):
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, logits.shape[1:], logits.dtype)

    return jax.vmap(of_row)(seeds, positions)


def _kept(logits, how: Choice) -> Bool[Array, "batch vocab"]:
    """By place in the order and not by value, so that equal logits do not let in more."""
    order = jnp.argsort(logits, axis=-1, stable=True, descending=True)
    top_k = jnp.where(how.top_k > 0, how.top_k, logits.shape[-1])
    within = jnp.arange(logits.shape[-1]) < top_k[:, None]
    ordered = jnp.where(within, jnp.take_along_axis(logits, order, axis=-1), -jnp.inf)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    within &= (before < how.top_p[:, None]) | (how.top_p[:, None] >= 1)
    within |= jnp.arange(logits.shape[-1]) == 0  # the likeliest, where top_p is 0 in float32
    rows = jnp.arange(logits.shape[0])[:, None]
    return jnp.zeros_like(within).at[rows, order].set(within, unique_indices=True)
