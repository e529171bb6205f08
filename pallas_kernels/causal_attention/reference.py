"""Plain JAX causal attention: the portable form, and what the kernels are tested against.

Long sequences go in blocks of queries, so that the logits of all queries never exist at once.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

# Queries in a block, at most.
_QUERIES = 1024


def visible(
    queries: Int[Array, " Q"], length: int, segment_ids: Int[Array, "B N"] | None
) -> Bool[Array, "B_or_1 Q N"]:
    """Whether query i sees key j: `j <= i` in the same segment."""
    mask = (queries[:, None] >= jnp.arange(length)[None, :])[None]
    if segment_ids is not None:
        mask = mask & (segment_ids[:, queries, None] == segment_ids[:, None, :])
    return mask


def attention_forward(
    qkv: Float[Array, "B N P D"],
    *,
    scale: Float[Array, ""] | int | float,
    slopes: Float[Array, " H"] | None = None,
    segment_ids: Int[Array, "B N"] | None = None,
    kv_heads: int | None = None,
) -> tuple[Float[Array, "B N H D"], Float[Array, "B N H"]]:
    """`softmax(scale q.k - slope (i - j)) v` of every head, and each softmax's log sum.

    At least float32 inside; the output in qkv's dtype, the log sums at least float32.
    """
    q, k, v = _repeated(qkv, kv_heads)
    logits_of = functools.partial(_logits, k, scale, slopes, segment_ids)

    def block(_, queries):
        positions, q = queries
        logits = logits_of(q, positions)
        log_sums = jax.nn.logsumexp(logits, axis=-1)
        weights = jnp.exp(logits - log_sums[..., None]).astype(qkv.dtype)
        return None, (jnp.einsum("bhnm,bmhd->bnhd", weights, v), log_sums.swapaxes(1, 2))

    _, (out, log_sums) = _over_blocks(block, None, (q,))
    return out, log_sums


def attention_backward(
    qkv: Float[Array, "B N P D"],
    out: Float[Array, "B N H D"],
    log_sums: Float[Array, "B N H"],
    d_out: Float[Array, "B N H D"],
    *,
    scale: Float[Array, ""] | int | float,
    slopes: Float[Array, " H"] | None = None,
    segment_ids: Int[Array, "B N"] | None = None,
    kv_heads: int | None = None,
) -> Float[Array, "B N P D"]:
    """The cotangent of qkv. With weights p: `ds = p (d_out v - sum(out d_out))`."""
    dtype = jnp.result_type(qkv, jnp.float32)
    q, k, v = _repeated(qkv, kv_heads)
    logits_of = functools.partial(_logits, k, scale, slopes, segment_ids)
    einsum = functools.partial(jnp.einsum, preferred_element_type=dtype)

    def block(carry, queries):
        positions, q, out, log_sums, d_out = queries
        weights = jnp.exp(logits_of(q, positions) - log_sums.swapaxes(1, 2)[..., None])
        d_weights = einsum("bnhd,bmhd->bhnm", d_out, v)
        delta = jnp.sum(out.astype(dtype) * d_out, axis=-1).swapaxes(1, 2)
        d_logits = (scale * weights * (d_weights - delta[..., None])).astype(qkv.dtype)
        d_k = carry[0] + einsum("bhnm,bnhd->bmhd", d_logits, q)
        d_v = carry[1] + einsum("bhnm,bnhd->bmhd", weights.astype(qkv.dtype), d_out)
        return (d_k, d_v), (einsum("bhnm,bmhd->bnhd", d_logits, k),)

    zeros = (jnp.zeros(k.shape, dtype), jnp.zeros(v.shape, dtype))
    (d_k, d_v), (d_q,) = _over_blocks(block, zeros, (q, out, log_sums, d_out))
    if kv_heads is not None:
        together = lambda x: x.reshape(*x.shape[:2], kv_heads, -1, x.shape[3]).sum(axis=3)
        d_k, d_v = together(d_k), together(d_v)
    return jnp.concatenate([d_q, d_k, d_v], axis=2).astype(qkv.dtype)


def split(
    qkv: Float[Array, "B N P D"], kv_heads: int | None
) -> tuple[Float[Array, "B N H D"], Float[Array, "B N G D"], Float[Array, "B N G D"]]:
    """Queries, keys and values; `kv_heads` None is as many of each."""
    given = qkv.shape[2] // 3 if kv_heads is None else kv_heads
    heads = qkv.shape[2] - 2 * given
    return tuple(jnp.split(qkv, [heads, heads + given], axis=2))


def _repeated(qkv, kv_heads):
    """The same, with a head of keys for each of queries."""
    q, k, v = split(qkv, kv_heads)
    each = q.shape[2] // k.shape[2]
    return q, *((jnp.repeat(x, each, axis=2) if each > 1 else x) for x in (k, v))


def _logits(k, scale, slopes, segment_ids, q, positions):
    """Of a block of queries at these positions, [B, H, queries, keys]; -inf is not used."""
    dtype = jnp.result_type(q, jnp.float32)
    logits = scale * jnp.einsum("bnhd,bmhd->bhnm", q, k, preferred_element_type=dtype)
    if slopes is not None:
        distance = positions[:, None] - jnp.arange(k.shape[1])[None, :]
        logits = logits - slopes.astype(dtype)[:, None, None] * distance
    mask = visible(positions, k.shape[1], segment_ids)[:, None]
    return jnp.where(mask, logits, jnp.finfo(dtype).min).astype(dtype)


def _over_blocks(block, carry, arrays):
    """`lax.scan` of `block(carry, (positions, *arrays))` over blocks of the sequence axis."""
    length = arrays[0].shape[1]
    blocks = -(-length // _QUERIES)
    if blocks <= 1:
        return block(carry, (jnp.arange(length), *arrays))
    size = -(-length // blocks)
    missing = blocks * size - length
    # What fills the last block is at no position, sees no key and gives nothing.
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
