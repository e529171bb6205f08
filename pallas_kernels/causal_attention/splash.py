"""Causal attention by JAX's splash kernels, on TPU, for comparison and for who trusts them more.

They have tokens in rows and a transpose of each array before and after them, and no ALiBi: that is
two more entries of queries and keys. A softmax over j ignores what depends on i alone, so that
`-slope (i - j)` may be `slope j`, which is `(256 slope, slope) . (j // 256, j % 256)`: whole
numbers to 255 are exact in bfloat16. So is a slope that is a power of two; what another one is off
by is two entries more.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jaxtyping import Array, Float, Int

from pallas_kernels.call import LANES, largest_divisor
from pallas_kernels.causal_attention.reference import split

# Tokens of a block, at most; of its parts, that are computed at a time.
_TOKENS, _PART = 1024, 512


def unsupported(qkv: Any) -> str | None:
    """Why it cannot serve this call, in a line; None if it can."""
    if qkv.shape[1] % LANES:
        return f"sequences of {qkv.shape[1]} tokens (multiples of {LANES})"
    return None


def causal_attention(
    qkv: Float[Array, "B N P D"],
    *,
    scale: Float[Array, ""] | int | float,
    slopes: Float[Array, " H"] | None,
    segment_ids: Int[Array, "B N"] | None,
    kv_heads: int,
    interpret: bool = False,
) -> Float[Array, "B N H D"]:
    """With a gradient of its own, in reverse mode."""
    q, k, v = split(qkv, kv_heads)
    N, H = q.shape[1:3]
    q = (q * scale).astype(qkv.dtype)
    if slopes is not None:
        q, k = _with_positions(q, k, slopes)
    tokens = LANES * largest_divisor(N // LANES, _TOKENS // LANES)
    part = LANES * largest_divisor(tokens // LANES, _PART // LANES)
    sizes = splash.BlockSizes(
        block_q=tokens,
        block_kv=tokens,
        block_kv_compute=part,
        block_q_dkv=tokens,
        block_kv_dkv=tokens,
        block_kv_dkv_compute=part,
        block_q_dq=tokens,
        block_kv_dq=tokens,
    )
    mask = splash.MultiHeadMask([splash.CausalMask((N, N))] * H)
    kernel = splash.make_splash_mha(
        mask, head_shards=1, q_seq_shards=1, block_sizes=sizes, interpret=interpret
    )
    ids = None if segment_ids is None else splash.SegmentIds(segment_ids, segment_ids)
    in_rows = (x.swapaxes(1, 2) for x in (q, k, v))
    return jax.vmap(kernel)(*in_rows, ids).swapaxes(1, 2).astype(qkv.dtype)


def _with_positions(q, k, slopes):
    """Queries and keys with entries whose products are `slope j`, in a multiple of 8."""
    high = slopes.astype(q.dtype)
    low = (slopes - high.astype(slopes.dtype)).astype(q.dtype)
    of_queries = jnp.stack([256 * high, high, 256 * low, low], axis=-1)
    j = jnp.arange(q.shape[1])
    of_keys = jnp.stack([j // 256, j % 256] * 2, axis=-1)[:, None].astype(k.dtype)

    def added(x, entries):
        entries = jnp.broadcast_to(entries, (*x.shape[:3], entries.shape[-1]))
        x = jnp.concatenate([x, entries], axis=-1)
        return jnp.pad(x, [(0, 0)] * 3 + [(0, -x.shape[-1] % 8)])

    return added(q, of_queries), added(k, of_keys)
