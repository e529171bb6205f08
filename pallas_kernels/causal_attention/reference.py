"""Causal attention in plain JAX: a portable implementation, and the reference for kernel tests.

Long sequences are processed in blocks of queries, to save memory.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.arguments import read_slices, write_slice
from pallas_kernels.causal_attention.interface import (
    AttentionOperands,
    Cap,
    KeysAndValues,
    PartOperands,
    ResultsAndCotangent,
    Rows,
    Scale,
    Segments,
    Window,
    capped,
)

# Maximum number of queries per block, and of logits per head in a block.
QUERIES, _LOGITS = 1024, 2**23


def visible(
    queries: Int[Array, " Q"],
    length: int,
    segment_ids: Int[Array, "B N"] | None,
    window: Window | None = None,
) -> Bool[Array, "B_or_1 Q N"]:
    """Return whether query i sees key j: `j <= i`, in the same segment, and within the window."""
    distance = queries[:, None] - jnp.arange(length)[None, :]
    mask = _within(window, distance, distance >= 0)[None]
    if segment_ids is not None:
        # A NumPy array could not be indexed by traced numbers, the positions of a block of queries.
        segment_ids = jnp.asarray(segment_ids)
        mask = mask & (segment_ids[:, queries, None] == segment_ids[:, None, :])
    return mask


def attention_forward(
    operands: AttentionOperands, *, kv_heads: int, rows: Rows = "size_major"
) -> tuple[Float[Array, "*count B N H Dv"], Float[Array, "B N H"]]:
    """Return the attention output and each softmax's log-sum-exp, as `interface.py` specifies.

    Sums are in float32 or wider.
    """
    parts = split(operands, kv_heads)
    out, log_sums = forward(*parts, _terms(operands, 0), _causal(operands))
    return write_slice(out, operands.to), log_sums


def attention_backward(
    operands: AttentionOperands,
    results: ResultsAndCotangent,
    *,
    kv_heads: int,
    rows: Rows = "size_major",
) -> tuple[Float[Array, "B N P D"], KeysAndValues | None]:
    """Return the cotangents of qkv and kv, as `interface.py` specifies."""
    arrays = *split(operands, kv_heads), *read_slices(results)
    gradients = backward(*arrays, _terms(operands, 0), _causal(operands))
    gradients = [x.astype(operands.qkv.dtype) for x in gradients]
    if operands.kv is not None:
        return gradients[0], tuple(gradients[1:])
    return jnp.concatenate(gradients, axis=2), None


def part_forward(operands: PartOperands) -> tuple[Float[Array, "B Q H Dv"], Float[Array, "B Q H"]]:
    """Attend from one part of a sequence to another, as `interface.py` specifies."""
    k, v = operands.keys_and_values
    mask = of_part(k.shape[1], operands.segments, operands.window)
    return forward(operands.q, k, v, _terms(operands, operands.shift), mask)


def part_backward(
    operands: PartOperands, results: ResultsAndCotangent
) -> tuple[Float[Array, "B Q H D"], Float[Array, "B K P D"] | KeysAndValues]:
    """Return the cotangents of `part_forward`'s q and kv, as `interface.py` specifies."""
    k, v = operands.keys_and_values
    mask = of_part(k.shape[1], operands.segments, operands.window)
    arrays = operands.q, k, v, *results
    d_q, d_k, d_v = backward(*arrays, _terms(operands, operands.shift), mask)
    return d_q, operands.like_kv(d_k, d_v)


def split(
    operands: AttentionOperands, kv_heads: int
) -> tuple[Float[Array, "B N H D"], Float[Array, "B N G D"], Float[Array, "B N G Dv"]]:
    """Return the queries, the keys and the values as separate arrays."""
    if operands.kv is not None:
        return operands.qkv, *operands.kv
    heads = operands.qkv.shape[2] - 2 * kv_heads
    return tuple(jnp.split(operands.qkv, [heads, heads + kv_heads], axis=2))


class Terms(NamedTuple):
    """The values that, with the queries and keys, determine the attention logits.

    Attributes:
      scale: the factor by which `q . k` is multiplied.
      slopes: the slope of ALiBi for each query head, or None.
      shift: the position of the first query, relative to the first key.
      cap: the soft cap on the scaled products `scale q . k`, or None.
    """

    scale: Scale
    slopes: Float[Array, " H"] | None
    shift: Int[Array, ""] | int
    cap: Cap | None


def _terms(operands: AttentionOperands | PartOperands, shift: Int[Array, ""] | int) -> Terms:
    return Terms(operands.scale, operands.slopes, shift, operands.cap)


def forward(q, k, v, terms, mask):
    """Compute attention one block of queries at a time.

    Args:
      q, k, v: queries [B, N, H, D], keys [B, M, G, D] and values [B, M, G, Dv].
      terms: the scale, ALiBi's slopes, the shift of the positions, and the soft cap on the logits.
      mask: a function from the positions of queries to the mask of the keys that they see.

    Returns:
      The outputs [B, N, H, Dv], and the log-sum-exp [B, N, H] of each softmax.
    """
    k, v = _for_each_query(q, k), _for_each_query(q, v)

    def block(_, queries):
        positions, q = queries
        logits, _ = _logits(q, k, terms, positions, mask(positions))
        log_sums = jax.nn.logsumexp(logits, axis=-1)
        weights = jnp.exp(logits - log_sums[..., None]).astype(q.dtype)
        return None, (jnp.einsum("bhnm,bmhd->bnhd", weights, v), log_sums.swapaxes(1, 2))

    _, (out, log_sums) = _over_blocks(block, None, (q,), k.shape[1])
    return out, log_sums


def backward(q, k, v, out, log_sums, d_out, terms, mask):
    """Return the cotangents of q, k and v, in float32 or wider."""
    dtype, kv_heads = jnp.result_type(q, jnp.float32), k.shape[2]
    k, v = _for_each_query(q, k), _for_each_query(q, v)
    einsum = functools.partial(jnp.einsum, preferred_element_type=dtype)

    def block(carry, queries):
        positions, q, out, log_sums, d_out = queries
        logits, slope = _logits(q, k, terms, positions, mask(positions))
        weights = jnp.exp(logits - log_sums.swapaxes(1, 2)[..., None])
        d_weights = einsum("bnhd,bmhd->bhnm", d_out, v)
        delta = jnp.sum(out.astype(dtype) * d_out, axis=-1).swapaxes(1, 2)
        d_logits = terms.scale * weights * (d_weights - delta[..., None]) * slope
        d_logits = d_logits.astype(q.dtype)
        d_k = carry[0] + einsum("bhnm,bnhd->bmhd", d_logits, q)
        d_v = carry[1] + einsum("bhnm,bnhd->bmhd", weights.astype(q.dtype), d_out)
        return (d_k, d_v), (einsum("bhnm,bmhd->bnhd", d_logits, k),)

    zeros = (jnp.zeros(k.shape, dtype), jnp.zeros(v.shape, dtype))
    (d_k, d_v), (d_q,) = _over_blocks(block, zeros, (q, out, log_sums, d_out), k.shape[1])
    if kv_heads < q.shape[2]:
        together = lambda x: x.reshape(*x.shape[:2], kv_heads, -1, x.shape[3]).sum(axis=3)
        d_k, d_v = together(d_k), together(d_v)
    return d_q, d_k, d_v


def _for_each_query(q, x):
    """Repeat the heads of keys or values, so that each query head has its own."""
    each = q.shape[2] // x.shape[2]
    return jnp.repeat(x, each, axis=2) if each > 1 else x


def _causal(operands: AttentionOperands):
    """Return the causal mask as a function of query positions."""
    return functools.partial(
        visible,
        length=operands.qkv.shape[1],
        segment_ids=operands.segment_ids,
        window=operands.window,
    )


def _within(window: Window | None, distance, mask):
    """Mask also the pairs whose query is `window` or more tokens after the key."""
    return mask if window is None else mask & (distance < window)


def of_part(length: int, segments: Segments | None, window: Window | None = None):
    """Return a mask as a function of query positions: queries see all keys of their segment.

    With a window, they see only those within the window: see `PartOperands`. Padding queries, at
    position -1, see no key.
    """

    def mask(queries):
        inside = jnp.broadcast_to((queries >= 0)[:, None], (len(queries), length))
        inside = _within(window, queries[:, None] - jnp.arange(length), inside)[None]
        if segments is None:
            return inside
        of_queries, of_keys = map(jnp.asarray, segments)
        return inside & (of_queries[:, queries, None] == of_keys[:, None, :])

    return mask


def _logits(q, k, terms, positions, mask):
    """Return the logits [B, H, queries, keys] of the queries at `positions`.

    The second result is the derivative of the logits with respect to the scaled products. Masked
    logits are the lowest finite float instead of -inf.
    """
    dtype = jnp.result_type(q, jnp.float32)
    products = jnp.einsum("bnhd,bmhd->bhnm", q, k, preferred_element_type=dtype)
    logits, slope = capped(terms.scale * products, terms.cap)
    if terms.slopes is not None:
        distance = terms.shift + positions[:, None] - jnp.arange(k.shape[1])[None, :]
        logits = logits - terms.slopes.astype(dtype)[:, None, None] * distance
    return jnp.where(mask[:, None], logits, jnp.finfo(dtype).min).astype(dtype), slope


def _over_blocks(block, carry, arrays, keys):
    """Scan `block(carry, (positions, *arrays))` over blocks along the sequence axis."""
    length = arrays[0].shape[1]
    blocks = -(-length // min(QUERIES, max(1, _LOGITS // max(1, keys))))
    if blocks <= 1:
        return block(carry, (jnp.arange(length), *arrays))
    size = -(-length // blocks)
    missing = blocks * size - length
    # The padding of the last block has position -1, which sees no key.
    positions = np.append(np.arange(length), np.full(missing, -1)).reshape(blocks, size)

    def split(x):
        if missing:
            x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(x.shape[0], blocks, size, *x.shape[2:]).swapaxes(0, 1)

    carry, results = jax.lax.scan(block, carry, (jnp.asarray(positions), *map(split, arrays)))

    def join(x):
        x = x.swapaxes(0, 1)
        return x.reshape(x.shape[0], blocks * size, *x.shape[3:])[:, :length]

    return carry, tuple(map(join, results))
