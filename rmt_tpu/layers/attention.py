"""Causal attention within documents, over data vectors that the residual's store has read."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

import pallas_kernels
import sharding
from rmt_tpu import config as cfg
from rmt_tpu.layers import positions as pos


class Context(NamedTuple):
    """Who may see whom; the same in every layer.

    Attributes:
      query_positions, key_positions: of the tokens, for RoPE and ALiBi.
      segment_ids: tokens see only their own document; None is one document a row.
      mask: in place of "causal within segments" where positions are not those of the rows.
      start: where new keys and values go in a cache; None without a cache.
    """

    query_positions: Int[Array, "batch_or_1 seq"]
    key_positions: Int[Array, "batch_or_1 keys"]
    segment_ids: Int[Array, "batch seq"] | None = None
    mask: Bool[Array, "batch_or_1 seq keys"] | None = None
    start: Int[Array, ""] | None = None


class Cache(NamedTuple):
    """Keys and values of the tokens seen so far. Stacked over layers, both get a leading axis."""

    keys: Float[Array, "*layer batch keys heads head_dim"]
    values: Float[Array, "*layer batch keys heads head_dim"]


def causal(
    length: int,
    positions: Int[Array, "batch_or_1 seq"] | None,
    segment_ids: Int[Array, "batch seq"] | None,
) -> Context:
    """Each token sees itself and what is before it in its own document (segment)."""
    order = jnp.arange(length)
    if positions is None:
        return Context(order[None], order[None], segment_ids)
    mask = (order[:, None] >= order[None, :])[None]
    if segment_ids is not None:
        mask = mask & (segment_ids[:, :, None] == segment_ids[:, None, :])
    return Context(positions, positions, segment_ids, mask)


def cached(start: Int[Array, ""], new: int, capacity: int) -> Context:
    """`new` tokens from position `start` on; each sees itself and what the cache has before it."""
    query_positions = start + jnp.arange(new)[None]
    key_positions = jnp.arange(capacity)[None]
    mask = query_positions[:, :, None] >= key_positions[:, None, :]
    return Context(query_positions, key_positions, mask=mask, start=start)


class Attention:
    """Softmax attention (equations 8 and 21) of one layer: no parameters, only how it is done.

    Args:
      config: of the model; scale, positions.
      context: who may see whom.
      layer_index: from 0; divides the logits by itself plus 1 if so configured.

    Data vectors are `[batch, seq, 3 * heads, head_dim]`: queries, keys and values of every head.
    Where tokens are divided over devices, each attends with a part of the heads over all of them.
    """

    def __init__(self, config: cfg.ModelConfig, context: Context, layer_index: Int[Array, ""]):
        self.config, self.context = config, context
        self.scale = jnp.asarray(logit_scale(config))
        if config.attention.inverse_layer_scaling:
            self.scale = self.scale / (layer_index + 1)
        alibi = isinstance(config.attention.positions, cfg.Alibi)
        self.slopes = pos.alibi_slopes(config.attention.num_heads) if alibi else None
        # The order of rows in which the store's reads come and its writes go: see the kernels.
        matrix = isinstance(config.store, cfg.MatrixStore)
        self.rows = "size_major" if matrix else "head_major"
        # A matrix store gives every device all heads of its own tokens; a projection gives it its
        # heads of the tokens of all devices of `tensor`.
        self.swapped = ("sequence", "tensor") if matrix else ("sequence",)
        self.divided = self.swapped if matrix else ("tensor", "sequence")
        if alibi:
            self.slopes = sharding.own_part(self.slopes, self.divided, axis=0)

    def __call__(
        self, z: Float[Array, "batch seq vectors head_dim"]
    ) -> Float[Array, "batch seq heads head_dim"]:
        """One data vector a head, in z's dtype. Logits and softmax are at least float32."""
        qkv = self._turned(z)
        if self.context.mask is not None:
            y = self._masked(*jnp.split(qkv, 3, axis=-2))
        else:
            y = self._attend(pallas_kernels.causal_attention, qkv)
        return self._to_tokens(y)

    def forward(
        self, z: Float[Array, "batch seq vectors head_dim"]
    ) -> tuple[Float[Array, "batch seq heads head_dim"], Float[Array, "batch all_seq own_heads"]]:
        """The same, and the logarithm of each softmax's sum: what `backward` needs, beside y.

        With an explicit mask `backward` attends again, and there are no sums (of 0 heads).
        """
        if self.context.mask is not None:
            y = self(z)
            return y, jnp.zeros((*y.shape[:2], 0), y.dtype)
        y, log_sums = self._attend(pallas_kernels.attention_forward, self._turned(z))
        return self._to_tokens(y), log_sums

    def backward(
        self,
        z: Float[Array, "batch seq vectors head_dim"],
        y: Float[Array, "batch seq heads head_dim"],
        log_sums: Float[Array, "batch all_seq own_heads"],
        d_y: Float[Array, "batch seq heads head_dim"],
    ) -> Float[Array, "batch seq vectors head_dim"]:
        """The cotangent of z from that of y, without attending again but for an explicit mask."""
        if self.context.mask is not None:
            return jax.vjp(self.__call__, z)[1](d_y)[0]
        qkv, turn_back = jax.vjp(self._turned, z)
        y, d_y = self._to_heads(y, groups=1), self._to_heads(d_y, groups=1)
        d_qkv = self._attend(pallas_kernels.attention_backward, qkv, y, log_sums, d_y)
        return turn_back(d_qkv)[0]

    def _attend(self, function, *arrays):
        shared = {"scale": self.scale, "slopes": self.slopes}
        return function(*arrays, segment_ids=self.context.segment_ids, rows=self.rows, **shared)

    def _to_heads(self, x, groups):
        """From all heads of own tokens to own heads of all tokens; `groups` of heads are alike."""
        if sharding.axis_size(self.swapped) == 1:
            return x
        x = x.reshape(*x.shape[:2], groups, -1, x.shape[-1])
        x = sharding.swap(x, self.swapped, split=3, join=1)
        return x.reshape(*x.shape[:2], -1, x.shape[-1])

    def _to_tokens(self, y):
        """`_to_heads` undone."""
        return sharding.swap(y, self.swapped, split=1, join=2)

    def with_cache(
        self, z: Float[Array, "batch seq vectors head_dim"], cache: Cache
    ) -> tuple[Float[Array, "batch seq heads head_dim"], Cache]:
        """The same, over what the cache has and z, and the cache with z's keys and values in it."""
        q, k, v = jnp.split(self._turned(z), 3, axis=-2)
        zero = jnp.zeros_like(self.context.start)  # of its dtype, whatever that of a Python int is
        at = (zero, self.context.start, zero, zero)
        k = jax.lax.dynamic_update_slice(cache.keys, k.astype(cache.keys.dtype), at)
        v = jax.lax.dynamic_update_slice(cache.values, v.astype(cache.values.dtype), at)
        return self._to_tokens(self._masked(q, k, v)), Cache(k, v)

    def _turned(self, z):
        """Own heads of z, with positions rotated into its queries and keys, if they are."""
        z = self._to_heads(z, groups=3)
        match self.config.attention.positions:
            case cfg.Rope(base=base):
                q, k, v = jnp.split(z, 3, axis=-2)
                q = pos.rotate(q, self.context.query_positions, base=base)
                k = pos.rotate(k, self.context.query_positions, base=base)
                return jnp.concatenate([q, k, v], axis=-2)
        return z

    def _masked(self, q, k, v):
        """By an explicit mask: for caches and for positions of the caller's."""
        context, dtype = self.context, jnp.result_type(q, jnp.float32)
        logits = jnp.einsum("bnhd,bmhd->bhnm", q, k, preferred_element_type=dtype) * self.scale
        if self.slopes is not None:
            distance = context.query_positions[:, :, None] - context.key_positions[:, None, :]
            logits = logits - self.slopes[:, None, None] * distance[:, None]
        logits = jnp.where(context.mask[:, None], logits, jnp.finfo(dtype).min)
        weights = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
        return jnp.einsum("bhnm,bmhd->bnhd", weights, v)


def logit_scale(config: cfg.ModelConfig) -> float:
    """`1 / sqrt(head_dim)`, or in muP `attention_multiplier * sqrt(base_head_dim) / head_dim`."""
    head_dim = config.attention.head_dim
    match config.parametrization:
        case cfg.MuP(attention_multiplier=multiplier, base_head_dim=base_head_dim):
            return multiplier * base_head_dim**0.5 / head_dim
        case cfg.Standard():
            return head_dim**-0.5
