"""The computation of one chunk of tokens on TPUs, for several heads at once.

The equations are in the module `xla`. All arrays have G heads, `[G, C, ..]`, where C is a power of
two. States are stored transposed, `[G, V, K]`, so that the decays of their rows vary along the
lanes.

The *level* of a pair of tokens i > j is the highest bit in which i and j differ. At each level,
`e^(G_i - G_j)` is the product of a factor for i and a factor for j. A token needs only one factor
per level, because it is either always i or always j there. So a level takes one exponential per
element, one product of `[2 C, K]` with `[K, C]`, and a selection of the level's entries.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.products import dot

# Number of rows in a register tile of 32-bit words, and in a register tile of bfloat16 numbers.
_SUBLANES, _TILE = 8, 16


class Masks(NamedTuple):
    """Masks that state which tokens see each other. The masks are the same for all heads.

    Attributes:
      differing_bits: `i xor j` for tokens i > j of the same document, else 0. At level n, the
        values are from 2^n to 2^(n+1) - 1.
      sees: 1 for tokens that see the state before the chunk, else 0.
      stays: 1 for tokens whose writes remain visible after the chunk, else 0.
    """

    differing_bits: Int[Array, "C C"]
    sees: Float[Array, "C K"]
    stays: Float[Array, "C K"]


class Chunk(NamedTuple):
    """The operands of one chunk in float32; queries are already multiplied by the scale."""

    q: Float[Array, "G C K"]
    k: Float[Array, "G C K"]
    v: Float[Array, "G C V"]
    log_decay: Float[Array, "G C K"]
    beta: Float[Array, "G C 1"]


class _Shared(NamedTuple):
    """Intermediate results of a chunk that both passes need.

    Operands of products are in the narrow dtype. M, P, U, G, S and V are as in the module `xla`.

    Attributes:
      factors: for each level, `e` to the sum of log decays between a token and the middle of its
        block.
      keys, queries: for each level, keys and queries times the level's factors.
      of_keys: M, which is 0 on and above the diagonal.
      of_queries: P.
      inverse: the inverse of `I + diag(beta) M`.
      decay: the decay from the start of the chunk to each token; 0 for tokens that do not see the
        state before the chunk.
      left: the decay from each token to the end of the chunk; 0 if the token's write is not visible
        there.
      decayed_q, decayed_k: queries and keys times `decay`.
      left_k: keys times `left`.
      missing: `V - (k e^G) S`.
      written: U.
    """

    factors: list[Float[Array, "G C K"]]
    keys: list[Float[Array, "G C K"]]
    queries: list[Float[Array, "G C K"]]
    of_keys: Float[Array, "G C C"]
    of_queries: Float[Array, "G C C"]
    inverse: Float[Array, "G C C"]
    decay: Float[Array, "G C K"]
    left: Float[Array, "G C K"]
    decayed_q: Float[Array, "G C K"]
    decayed_k: Float[Array, "G C K"]
    left_k: Float[Array, "G C K"]
    missing: Float[Array, "G C V"]
    written: Float[Array, "G C V"]


def masks(rows, columns, before, last, keys: int) -> Masks:
    """Return the masks of a chunk.

    Args:
      rows, columns: the documents of the chunk's tokens, as a row `[1, C]` and as a column.
      before, last: the documents of the last token before the chunk and of the last token in it.
      keys: the size K of keys.
    """
    size = rows.shape[-1]
    i, j = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    differing_bits = jnp.where(i > j, i ^ j, 0)
    differing_bits = jnp.where(jnp.broadcast_to(columns, (size, size)) == rows, differing_bits, 0)
    documents = jnp.broadcast_to(columns, (size, keys))
    as_float = lambda same: jnp.where(same, 1.0, 0.0)
    return Masks(differing_bits, as_float(documents == before), as_float(documents == last))


def forward(
    chunk: Chunk, state: Float[Array, "G V K"], masks: Masks, narrow: jnp.dtype
) -> tuple[Float[Array, "G C V"], Float[Array, "G V K"]]:
    """Return what the tokens of a chunk read from the state, and the state after the chunk."""
    narrow_state = state.astype(narrow)
    own = _shared(chunk, narrow_state, masks, narrow)
    read = _rows(own.decayed_q, narrow_state) + _plain(own.of_queries, own.written)
    state = own.decay[:, -1:] * state + _columns(own.written, own.left_k)
    return read, state


def backward(
    chunk: Chunk,
    state: Float[Array, "G V K"],
    d_read: Float[Array, "G C V"],
    d_state: Float[Array, "G V K"],
    masks: Masks,
    narrow: jnp.dtype,
) -> tuple[Chunk, Float[Array, "G V K"]]:
    """Return the cotangents of the chunk's operands and of the state before the chunk."""
    narrow_state, d_after = state.astype(narrow), d_state.astype(narrow)
    own = _shared(chunk, narrow_state, masks, narrow)
    q, k, v, _, beta = chunk

    d_written = _columns(own.of_queries, d_read) + _rows(own.left_k, d_after)
    d_of_queries = _rows(d_read, own.written)
    d_right = _columns(own.inverse, d_written.astype(narrow))
    d_lower = -_rows(d_right.astype(narrow), own.written)
    d_lower = jnp.where((masks.differing_bits > 0)[None], d_lower, 0)
    d_beta = jnp.sum(d_right * own.missing, axis=-1, keepdims=True)
    d_beta += jnp.sum(d_lower * own.of_keys, axis=-1, keepdims=True)
    d_v = beta * d_right
    d_missing = d_v.astype(narrow)

    d_decayed_k = -_plain(d_missing, narrow_state)
    d_decayed_q = _plain(d_read, narrow_state)
    d_left_k = _plain(own.written, d_after)
    d_before = own.decay[:, -1:] * d_state
    d_state_decay = jnp.sum(d_before * state, axis=1, keepdims=True)
    d_before += _columns(d_read, own.decayed_q) - _columns(d_missing, own.decayed_k)

    itself = jnp.sum(d_read.astype(jnp.float32) * own.written, axis=-1, keepdims=True)
    d_q = own.decay * d_decayed_q + itself * k
    d_k = own.decay * d_decayed_k + own.left * d_left_k + itself * q
    d_total = own.decay * (d_decayed_q * q + d_decayed_k * k)
    at_end = jax.lax.broadcasted_iota(jnp.int32, d_total.shape, 1) == d_total.shape[1] - 1
    d_total += jnp.where(at_end, d_state_decay, 0)
    d_following = own.left * d_left_k * k

    d_of_keys, d_factors = beta * d_lower, []
    for level, (factor, keys, queries) in enumerate(
        zip(own.factors, own.keys, own.queries, strict=True)
    ):
        here = _level_rows(_at(masks.differing_bits, level), level)
        of_rows = lambda d, here=here, level=level: jnp.where(here, _level_rows(d, level), 0)
        d_scores = jnp.concatenate([of_rows(d_of_queries), of_rows(d_of_keys)], axis=1)
        d_scores = d_scores.astype(narrow)
        of_queries, of_keys = jnp.split(_plain(d_scores, keys), 2, axis=1)
        both = jnp.concatenate([_level_rows(queries, level), _level_rows(keys, level)], axis=1)
        columns = _columns(d_scores, both)
        rows = factor * _replace_level_rows(jnp.zeros_like(q), of_queries, level)
        columns = factor * _replace_level_rows(
            columns, of_keys + _level_rows(columns, level), level
        )
        d_q, d_k = d_q + rows, d_k + columns
        d_factors.append(rows * q + columns * k)
    d_log_decay = _sums_transposed(d_factors, d_total, d_following)
    return Chunk(d_q, d_k, d_v, d_log_decay, d_beta), d_before


def _shared(chunk: Chunk, narrow_state, masks: Masks, narrow) -> _Shared:
    q, k, v, log_decay, beta = chunk
    between, total, following = _sums(log_decay)
    factors = [jnp.exp(x) for x in between]
    keys = [(k * factor).astype(narrow) for factor in factors]
    queries = [(q * factor).astype(narrow) for factor in factors]
    of_keys = of_queries = jnp.zeros((*k.shape[:-1], k.shape[1]), jnp.float32)
    for level, (of_k, of_q) in enumerate(zip(keys, queries, strict=True)):
        here = _level_rows(_at(masks.differing_bits, level), level)
        rows = jnp.where(here, _rows(_level_rows(of_k, level), of_k), _level_rows(of_keys, level))
        of_keys = _replace_level_rows(of_keys, rows, level)
        rows = jnp.where(
            here, _rows(_level_rows(of_q, level), of_k), _level_rows(of_queries, level)
        )
        of_queries = _replace_level_rows(of_queries, rows, level)
    itself = jnp.sum(q * k, axis=-1, keepdims=True)
    of_queries = jnp.where(_diagonal(masks.differing_bits), itself, of_queries).astype(narrow)
    inverse = _inverse(beta * of_keys, masks.differing_bits, narrow).astype(narrow)

    decay, left = jnp.exp(total) * masks.sees, jnp.exp(following) * masks.stays
    decayed_k = (decay * k).astype(narrow)
    missing = v - _rows(decayed_k, narrow_state)
    written = _plain(inverse, (beta * missing).astype(narrow)).astype(narrow)
    return _Shared(
        factors,
        keys,
        queries,
        of_keys,
        of_queries,
        inverse,
        decay,
        left,
        (decay * q).astype(narrow),
        decayed_k,
        (left * k).astype(narrow),
        missing,
        written,
    )


# Sums of log decays over tokens --------------------------------------------------------------


def _sums(x: Float[Array, "G C K"]) -> tuple[list[Array], Array, Array]:
    """Return three kinds of sums of x over tokens, computed without subtractions.

    Returns:
      Three sums for each token. The first is over the tokens between it and the middle of its
      block, one for each level. The second is over the tokens up to and including it, and the third
      over the later tokens.
    """
    before, behind, total, between = x, jnp.zeros_like(x), x, []
    for half in _halves(x.shape[1]):
        lower = _lower(x.shape, half)
        between.append(jnp.where(lower, before, behind))
        other = _sibling(total, half)
        before = before + jnp.where(lower, other, 0)
        behind = behind + jnp.where(lower, 0, other)
        total = total + other
    return between, before, behind


def _sums_transposed(d_between, d_before, d_behind):
    d_total = jnp.zeros_like(d_before)
    for half, d in reversed(list(zip(_halves(d_before.shape[1]), d_between, strict=True))):
        lower = _lower(d.shape, half)
        d_total = d_total + _sibling(jnp.where(lower, d_before, d_behind) + d_total, half)
        d_before = d_before + jnp.where(lower, d, 0)
        d_behind = d_behind + jnp.where(lower, 0, d)
    return d_before + d_total


def _halves(size: int) -> list[int]:
    return [1 << level for level in range((size - 1).bit_length())]


def _lower(shape, half):
    """Return whether each token is in the second half of its block of `2 half` tokens."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, 1) & half != 0


def _sibling(x, half):
    """Return x with the row of each token i replaced by the row of token `i xor half`."""
    heads, size, width = x.shape
    if half >= _SUBLANES:
        x = x.reshape(heads * size // (2 * half), 2, half, width)
        return jnp.concatenate([x[:, 1:], x[:, :1]], axis=1).reshape(heads, size, width)
    tiles = x.reshape(-1, _SUBLANES, width)
    down, up = pltpu.roll(tiles, half, 1), pltpu.roll(tiles, _SUBLANES - half, 1)
    return jnp.where(_lower(tiles.shape, half), down, up).reshape(x.shape)


# Matrices over pairs of tokens ---------------------------------------------------------------


def _at(differing_bits, level):
    """Return a mask [1, C, C] of the token pairs that belong to a level, for all heads."""
    return ((differing_bits >= 1 << level) & (differing_bits < 2 << level))[None]


def _level_rows(x, level):
    """Return the rows of x whose tokens may be the later token of a pair at `level`.

    They are the second halves of the level's blocks. If a half is smaller than a register tile, all
    rows are returned.
    """
    half, (heads, size, width) = 1 << level, x.shape
    if half < _TILE:
        return x
    x = x.reshape(heads, size // (2 * half), 2, half, width)
    return x[:, :, 1].reshape(heads, size // 2, width)


def _replace_level_rows(x, rows, level):
    """Return x with the rows that `_level_rows` selects replaced by `rows`."""
    half, (heads, size, width) = 1 << level, x.shape
    if half < _TILE:
        return rows
    x = x.reshape(heads, size // (2 * half), 2, half, width)
    rows = rows.reshape(heads, size // (2 * half), 1, half, width)
    return jnp.concatenate([x[:, :, :1], rows], axis=2).reshape(heads, size, width)


def _diagonal(differing_bits):
    i, j = (jax.lax.broadcasted_iota(jnp.int32, differing_bits.shape, axis) for axis in (0, 1))
    return (i == j)[None]


def _inverse(lower: Float[Array, "G C C"], differing_bits, narrow) -> Float[Array, "G C C"]:
    """Compute `(I + lower)^-1` block by block.

    If the diagonal blocks are A and B, and L is below A, the inverse has -B^-1 L A^-1 below A^-1.
    In bfloat16, the error is up to 5e-3 for similar keys. One step of Newton's method, with `lower`
    as a sum of two bfloat16 terms, reduces it to 1e-5.
    """
    unit = jnp.where(_diagonal(differing_bits), 1.0, 0.0)
    inverse = (unit - jnp.where(_at(differing_bits, 0), lower, 0)).astype(narrow)
    high = lower.astype(narrow)
    for level in range(1, len(_halves(differing_bits.shape[0]))):
        rows = _level_rows(high, level)
        rows = jnp.where(_level_rows(_at(differing_bits, level), level), rows, jnp.zeros_like(rows))
        rows = _plain(rows, inverse).astype(narrow)
        below = _replace_level_rows(jnp.zeros_like(high), rows, level)
        rows = _level_rows(inverse, level)
        inverse = _replace_level_rows(inverse, rows - _plain(rows, below).astype(narrow), level)
    if narrow == jnp.float32:
        return inverse
    low = (lower - high.astype(jnp.float32)).astype(narrow)
    rest = unit - inverse.astype(jnp.float32) - _plain(high, inverse) - _plain(low, inverse)
    return inverse.astype(jnp.float32) + _plain(inverse, rest.astype(narrow))


# Matrix products for each head ---------------------------------------------------------------


_plain = functools.partial(dot, over=(2, 1), of_each=(0,))
_rows = functools.partial(dot, over=(2, 2), of_each=(0,))
_columns = functools.partial(dot, over=(1, 1), of_each=(0,))
