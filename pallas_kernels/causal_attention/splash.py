"""Causal attention by JAX's splash kernels, on TPU, for comparison and for who trusts them more.

They have tokens in rows and a transpose of each array before and after them, and no ALiBi: that is
more entries of queries and keys.
"""

from typing import Any

import jax
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jaxtyping import Array, Float

from pallas_kernels.call import LANES, largest_divisor
from pallas_kernels.causal_attention import entries
from pallas_kernels.causal_attention.interface import Attention
from pallas_kernels.causal_attention.reference import split

# Tokens of a block, at most; of its parts, that are computed at a time.
_TOKENS, _PART = 1024, 512


def unsupported(qkv: Any) -> str | None:
    """Why it cannot serve this call, in a line; None if it can."""
    if jax.config.jax_enable_x64:
        return "jax_enable_x64 is set, with which JAX's kernels cannot be lowered"
    if qkv.shape[1] % LANES:
        return f"sequences of {qkv.shape[1]} tokens (multiples of {LANES})"
    return None


def causal_attention(
    given: Attention, *, kv_heads: int, interpret: bool = False
) -> Float[Array, "B N H Dv"]:
    """With a gradient of its own, in reverse mode."""
    q, k, v = split(given, kv_heads)
    N, H = q.shape[1:3]
    q = (q * given.scale).astype(q.dtype)
    if given.slopes is not None:
        of_queries, of_keys = entries.of_positions(given.slopes, N, q.dtype)
        q, k = entries.added(q, of_queries), entries.added(k, of_keys)
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
    ids = given.segments and splash.SegmentIds(*given.segments)
    in_rows = (x.swapaxes(1, 2) for x in (q, k, v))
    return jax.vmap(kernel)(*in_rows, ids).swapaxes(1, 2).astype(q.dtype)
