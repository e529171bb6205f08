"""Causal attention within documents, over data vectors that the residual's store has read."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rmt_tpu import config as cfg
from rmt_tpu.layers import positions as pos


class Context(NamedTuple):
    """Who may see whom; the same in every layer.

    `start` is where new keys and values go in a cache; None without a cache.
    """

    query_positions: Int[Array, "batch_or_1 seq"]
    key_positions: Int[Array, "batch_or_1 keys"]
    mask: Bool[Array, "batch_or_1 seq keys"]
    start: Int[Array, ""] | None = None


class Cache(NamedTuple):
    """Keys and values of the tokens seen so far. Stacked over layers, both get a leading axis."""

    keys: Float[Array, "*layer batch keys heads head_dim"]
    values: Float[Array, "*layer batch keys heads head_dim"]


def causal(
    positions: Int[Array, "batch_or_1 seq"], segment_ids: Int[Array, "batch seq"] | None
) -> Context:
    """Each token sees itself and what is before it in its own document (segment)."""
    order = jnp.arange(positions.shape[-1])
    mask = (order[:, None] >= order[None, :])[None]
    if segment_ids is not None:
        mask = mask & (segment_ids[:, :, None] == segment_ids[:, None, :])
    return Context(positions, positions, mask)


def cached(start: Int[Array, ""], new: int, capacity: int) -> Context:
    """`new` tokens from position `start` on; each sees itself and what the cache has before it."""
    query_positions = start + jnp.arange(new)[None]
    key_positions = jnp.arange(capacity)[None]
    mask = query_positions[:, :, None] >= key_positions[:, None, :]
    return Context(query_positions, key_positions, mask, start)


def attention(
    z: Float[Array, "batch seq vectors head_dim"],
    context: Context,
    *,
    config: cfg.ModelConfig,
    layer_index: Int[Array, ""],
    cache: Cache | None = None,
) -> tuple[Float[Array, "batch seq heads head_dim"], Cache | None]:
    """Softmax attention (equations 8 and 21).

    Args:
      z: queries, keys and values of every head: `vectors = 3 * heads`, in this order.
      context: the mask and positions.
      config: of the model; scale, positions.
      layer_index: from 0; divides the logits by itself plus 1 if so configured.
      cache: of this layer; new keys and values are put in at `context.start`.

    Returns:
      One data vector a head, in z's dtype, and the cache with the new tokens in it. Logits and
      softmax are at least float32.
    """
    q, k, v = jnp.split(z, 3, axis=-2)
    if isinstance(config.attention.positions, cfg.Rope):
        base = config.attention.positions.base
        q = pos.rotate(q, context.query_positions, base=base)
        k = pos.rotate(k, context.query_positions, base=base)
    if cache is not None:
        at = (0, context.start, 0, 0)
        k = jax.lax.dynamic_update_slice(cache.keys, k.astype(cache.keys.dtype), at)
        v = jax.lax.dynamic_update_slice(cache.values, v.astype(cache.values.dtype), at)
        cache = Cache(k, v)

    dtype = jnp.result_type(z, jnp.float32)
    logits = jnp.einsum("bnhd,bmhd->bhnm", q, k, preferred_element_type=dtype)
    logits = logits * logit_scale(config)
    if config.attention.inverse_layer_scaling:
        logits = logits / (layer_index + 1)
    if isinstance(config.attention.positions, cfg.Alibi):
        distance = context.query_positions[:, :, None] - context.key_positions[:, None, :]
        slopes = pos.alibi_slopes(config.attention.num_heads)
        logits = logits - slopes[:, None, None] * distance[:, None]
    logits = jnp.where(context.mask[:, None], logits, jnp.finfo(dtype).min)
    weights = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
    return jnp.einsum("bhnm,bmhd->bnhd", weights, v), cache


def logit_scale(config: cfg.ModelConfig) -> float:
    """`1 / sqrt(head_dim)`, or in muP `attention_multiplier * sqrt(base_head_dim) / head_dim`."""
    head_dim = config.attention.head_dim
    match config.parametrization:
        case cfg.MuP(attention_multiplier=multiplier, base_head_dim=base_head_dim):
            return multiplier * base_head_dim**0.5 / head_dim
        case cfg.Standard():
            return head_dim**-0.5
