"""Sampling of the next token from the logits."""

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

_MIN_NORMAL = 2.0**-126  # The smallest float32 that devices do not flush to 0.
_Penalty = Annotated[
    float, Range("positive, at most 3.4e+38, at least 1.2e-38", _MIN_NORMAL, 3.4e38)
]
# The cache allocates memory for the keys and values of all `max_tokens` new tokens, so `max_tokens`
# has an upper limit.
_NewTokens = Annotated[int, Range(f"positive, at most {2**20}", 1, 2**20)]


@dataclass(frozen=True)
class Sampling(Checked):
    """The settings of one text that determine how new tokens are chosen.

    Attributes:
      temperature: the divisor of the logits; 0 always chooses the likeliest token.
      top_k: the number of likeliest tokens that are kept; 0 keeps all tokens.
      top_p: keep the smallest set of likeliest tokens whose total probability reaches this value;
        the likeliest token is always kept.
      min_p: keep only tokens whose probability is at least this fraction of the likeliest token's;
        0 keeps all tokens.
      repetition_penalty: applies to tokens that already occur in the prompt or the text. Their
        positive logits are divided by this value, and negative logits are multiplied by it (Keskar
        et al., 2019, section 4.1). 1 changes nothing. Unlike in transformers and vLLM, it does not
        apply to the tokens that end every text. A prompt often has one, such as the start token,
        but the text itself has none to repeat.
      max_tokens: the maximum number of new tokens.
      seed: the seed of the random draws.
    """

    temperature: NonNegative = 1.0
    top_k: Count = 0
    top_p: NonZeroShare = 1.0
    min_p: Share = 0.0
    repetition_penalty: _Penalty = 1.0
    max_tokens: _NewTokens = 256
    seed: Seed = 0


class Choice(NamedTuple):
    """The `Sampling` settings of all rows, as arrays.

    They are arguments of compiled programs, which therefore work with any settings.
    """

    temperature: Float[Array, " batch"]
    top_k: Int[Array, " batch"]
    top_p: Float[Array, " batch"]
    min_p: Float[Array, " batch"]
    repetition_penalty: Float[Array, " batch"]
    seed: UInt32[Array, " batch"]


def choice(rows: Sequence[Sampling]) -> Choice:
    """Return the sampling settings of all rows as NumPy arrays."""
    # Limit top_k to int32. Any value above the vocabulary size keeps all tokens.
    bounded = lambda count: min(count, np.iinfo(np.int32).max)
    # Set numbers below _MIN_NORMAL to 0 here, because only some devices flush them to 0.
    normal = lambda value: value if value >= _MIN_NORMAL else 0.0
    return Choice(
        np.array([normal(s.temperature) for s in rows], np.float32),
        np.array([bounded(s.top_k) for s in rows], np.int32),
        np.array([normal(s.top_p) for s in rows], np.float32),
        np.array([normal(s.min_p) for s in rows], np.float32),
        np.array([s.repetition_penalty for s in rows], np.float32),
        np.array([s.seed for s in rows], np.uint32),
    )


def penalize(
    logits: Float[Array, "batch vocab"], seen: Bool[Array, "batch vocab"], choice: Choice
) -> Float[Array, "batch vocab"]:
    """Apply each row's `repetition_penalty` to the logits of the tokens that the row has seen."""
    penalty = choice.repetition_penalty[:, None]
    smaller = jnp.where(logits > 0, logits / penalty, logits * penalty)
    # Clip logits to finite values, because differences of infinite logits would be NaN.
    largest = jnp.finfo(logits.dtype).max
    smaller = jnp.clip(smaller, -largest, largest)
    return jnp.where(seen & (penalty != 1), smaller, logits)


def sample(
    logits: Float[Array, "batch vocab"], positions: Int[Array, " batch"], choice: Choice
) -> Int[Array, " batch"]:
    """Draw one token per row among the tokens that temperature, top-k, top-p and min-p keep.

    A draw depends only on the logits of its row, the row's settings and seed, and the token's
    position. It does not depend on other rows.
    """
    likeliest = jnp.argmax(logits, axis=-1)

    def draw():
        # Subtract the maximum before the division by the temperature, so that the largest logit is
        # 0 and a small temperature cannot make it overflow.
        below = logits - jnp.max(logits, axis=-1, keepdims=True)
        scaled = below / jnp.where(choice.temperature > 0, choice.temperature, 1)[:, None]
        # Top-k and top-p sort all tokens, which is slow, so skip them if no row uses them.
        truncates = jnp.any((choice.top_k > 0) | (choice.top_p < 1))
        scaled = jax.lax.cond(
            truncates,
            lambda: jnp.where(_top_k_top_p(scaled, choice), scaled, -jnp.inf),
            lambda: scaled,
        )
        # min_p can be applied last, because top-k and top-p do not change ratios of probabilities.
        threshold = jnp.max(scaled, axis=-1) + jnp.log(choice.min_p)
        scaled = jnp.where(scaled >= threshold[:, None], scaled, -jnp.inf)
        tokens = jnp.argmax(scaled + _noise(choice.seed, positions, scaled), axis=-1)
        return jnp.where(choice.temperature > 0, tokens, likeliest)

    return jax.lax.cond(jnp.any(choice.temperature > 0), draw, lambda: likeliest)


def _noise(seeds, positions, logits):
    """Return Gumbel noise; the argmax of logits plus noise is a draw from their softmax.

    The noise is drawn for all tokens, including those that top-k, top-p or min-p exclude.
    """

    def row_noise(seed, position):
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, logits.shape[1:], logits.dtype)

    return jax.vmap(row_noise)(seeds, positions)


def _top_k_top_p(logits, choice: Choice) -> Bool[Array, "batch vocab"]:
    """Return which tokens top-k and top-p keep.

    Tokens are selected by rank and not by value, so that at most `top_k` tokens are kept even if
    some have equal logits.
    """
    order = jnp.argsort(logits, axis=-1, stable=True, descending=True)
    top_k = jnp.where(choice.top_k > 0, choice.top_k, logits.shape[-1])
    mask = jnp.arange(logits.shape[-1]) < top_k[:, None]
    ordered = jnp.where(mask, jnp.take_along_axis(logits, order, axis=-1), -jnp.inf)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    preceding = jnp.cumsum(probabilities, axis=-1) - probabilities
    mask &= (preceding < choice.top_p[:, None]) | (choice.top_p[:, None] >= 1)
    mask |= (
        jnp.arange(logits.shape[-1]) == 0
    )  # Keep the likeliest token, even if top_p is 0 in float32.
    rows = jnp.arange(logits.shape[0])[:, None]
    return jnp.zeros_like(mask).at[rows, order].set(mask, unique_indices=True)
