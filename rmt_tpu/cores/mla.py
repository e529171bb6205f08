"""Multi-head latent attention (DeepSeek-AI 2024): keys and values of all heads from one latent.

With x the concatenated data vectors, of a token:

    q = W_q x, or W_qb norm(W_qa x)                  H queries [q_nope, q_rope]
    [c, k_rope] = W_kva x                            one latent, and one key part for all heads
    [k_nope, v] = W_kvb norm(c)                      of every head
    y = softmax(q . [k_nope, k_rope] / sqrt(D_h + D_r)) v

Norms are RMS norms with a gain; there are none on queries without a rank, nor on k_rope. Parts
"rope" are rotated by position, or not: order is then known from other layers.

Training expands keys and values. Decoding keeps c and k_rope alone and absorbs W_kvb: with
`q_c = W_uk^T q_nope`, scores are `q_c . c + q_rope . k_rope`, and `y = W_uv (softmax c)`.
"""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

import pallas_kernels
import sharding
from rmt_tpu import config as cfg
from rmt_tpu.cores import positions as pos
from rmt_tpu.cores.core import (
    Context,
    Core,
    Index,
    all_tokens,
    apart,
    joined,
    logit_scale,
    own_tokens,
    put_tokens,
    ring_axis,
)
from rmt_tpu.layers import stacks
from rmt_tpu.layers.data_vectors import HeadsLayout, Read, concatenate
from rmt_tpu.layers.norm import normalize
from rmt_tpu.layers.parameters import gain, parameter


class Cache(NamedTuple):
    """Of the tokens seen so far: `kv_rank + rope_dim` numbers each, whatever the heads."""

    latents: Float[Array, "repeat batch keys kv_rank"]
    rope_keys: Float[Array, "repeat batch keys rope_dim"]


class Mla(Core):
    """The core of `config.Mla`.

    Attributes:
      w_q: W_q [D, H (D_h + D_r)], or W_qb [query_rank, H (D_h + D_r)].
      w_q_down, q_gain: W_qa [D, query_rank] and its norm's gain; None without a rank.
      w_kv_down: W_kva, [D, kv_rank + D_r].
      kv_gain: of the latent's norm, [kv_rank].
      w_kv_up: W_uk and W_uv, the two parts of W_kvb: [2, kv_rank, H D_h].
    """

    name: ClassVar[str] = "mla"

    def __init__(self, config: cfg.ModelConfig, core: cfg.Mla, rngs: nnx.Rngs, layout: HeadsLayout):
        self.core, self.layout, self.epsilon = core, layout, config.norm_epsilon
        self.scale = logit_scale(config, core.query_dim)
        width, heads = config.width, core.num_heads

        def weights(*shape: int, axes: tuple) -> nnx.Param:
            std = config.init_std * shape[-2] ** -0.5
            return parameter(rngs, shape, std=std, role="hidden", axes=axes)

        rank = core.query_rank
        down = rank is not None
        self.w_q_down = weights(width, rank, axes=("embed", "rank")) if down else None
        self.q_gain = gain((rank,), axes=("rank",)) if down else None
        self.w_q = weights(rank or width, heads * core.query_dim, axes=("embed", "heads"))
        size = core.kv_rank + core.rope_dim
        self.w_kv_down = weights(width, size, axes=("embed", "rank"))
        self.kv_gain = gain((core.kv_rank,), axes=("rank",))
        shape = (2, core.kv_rank, heads * core.head_dim)
        self.w_kv_up = weights(*shape, axes=("projection", "embed", "heads"))

    def __call__(
        self, z: Read, context: Context, index: Index
    ) -> Float[Array, "batch y_seq heads head_dim"]:
        """One data vector a head, in z's dtype. Logits and softmax are at least float32."""
        q, latent, k_rope = self._compressed(z)
        k, v = self._expanded(latent)
        k_rope = jnp.broadcast_to(k_rope[:, :, None], (*k.shape[:3], k_rope.shape[-1]))
        # Own heads of the tokens of all devices of `sequence`; those of `tensor` are here. Where
        # there are more devices than heads, all heads of own tokens, and keys go round.
        ring = ring_axis(self.core.num_heads, sharding.token_axes())
        swapped = tuple(axis for axis in self._others if axis != ring)
        exchange = lambda x: sharding.swap(x, swapped, split=2, join=1)
        q, v = exchange(q), exchange(v)
        k = exchange(jnp.concatenate([k, k_rope], axis=-1))
        own = context._replace(query_positions=own_tokens(context.query_positions, ring))
        q, k = self._rotated(q, own), self._rotated(k, own)
        if context.mask is not None:
            k, v = (all_tokens(x, ring) for x in (k, v))
            y = self._masked(q, k, v, own_tokens(context.mask, ring))
        else:
            # As wide as keys are: one array for the kernel. The rest of y is zero.
            v = jnp.pad(v, [(0, 0)] * 3 + [(0, self.core.rope_dim)])
            y = pallas_kernels.causal_attention(
                jnp.concatenate([q, k, v], axis=2),
                scale=self.scale,
                segment_ids=context.segment_ids,
                rows="head_major",
                over=ring,
            )[..., : self.core.head_dim]
        return self._to_tokens(y, swapped)

    def empty_cache(self, repeat: int, batch: int, capacity: int, dtype: jnp.dtype) -> Cache:
        """For all heads together."""
        zeros = lambda size: jnp.zeros((repeat, batch, capacity, size), dtype)
        return Cache(zeros(self.core.kv_rank), zeros(self.core.rope_dim))

    def cache_specs(self) -> Cache:
        """Rows."""
        return Cache(*2 * [PartitionSpec(None, sharding.CACHE_RULES["batch"])])

    def step(
        self, z: Read, context: Context, index: Index, cache: Cache, layer: Index
    ) -> tuple[Float[Array, "batch seq heads head_dim"], Cache]:
        """The same, over what the cache has and z, with W_kvb absorbed."""
        q, *latents = self._compressed(z)
        latents = (apart(sharding.gather(x, self._others, axis=1), context) for x in latents)
        latent, k_rope = latents
        k_rope = self._rotated(k_rope[:, :, None], context)[:, :, 0]
        put = lambda kept, new: put_tokens(kept, new, layer, context.start)
        cache = Cache(put(cache.latents, latent), put(cache.rope_keys, k_rope))
        if context.start is None:
            return self(z, context, index), cache
        q = apart(sharding.swap(q, self._others, split=2, join=1), context)
        q = self._rotated(q, context)
        latents, rope_keys = stacks.at(cache, layer)
        w_uk, w_uv = self._up(z.whole.dtype)
        heads = lambda w: w.reshape(w.shape[0], -1, self.core.head_dim)
        split = lambda w: sharding.own_part(heads(w), self._others, axis=1)
        q_nope, q_rope = jnp.split(q, [self.core.head_dim], axis=-1)
        dtype = jnp.result_type(q, jnp.float32)
        absorbed = jnp.einsum("bnhd,chd->bnhc", q_nope, split(w_uk))
        einsum = lambda *args: jnp.einsum(*args, preferred_element_type=dtype)
        logits = einsum("bnhc,bmc->bhnm", absorbed, latents)
        logits = self.scale * (logits + einsum("bnhr,bmr->bhnm", q_rope, rope_keys))
        keys = jnp.arange(latents.shape[1])[None]
        mask = context.query_positions[:, :, None] >= keys[:, None, :]
        weights = _softmax(logits, mask).astype(q.dtype)
        mixed = jnp.einsum("bhnm,bmc->bnhc", weights, latents)
        y = joined(jnp.einsum("bnhc,chd->bnhd", mixed, split(w_uv)), context)
        return self._to_tokens(y, self._others), cache

    @property
    def _others(self):
        """Axes that divide the tokens of what `_compressed` gives."""
        return tuple(axis for axis in sharding.token_axes() if axis != "tensor")

    def _to_tokens(self, y, swapped):
        """From own heads of all tokens, those of the axes given, to what the store writes."""
        y = sharding.swap(y, swapped, split=1, join=2)
        if not self.layout.projected:  # all heads of own tokens
            y = sharding.swap(y, "tensor", split=1, join=2)
        return y

    def _compressed(self, z):
        """Queries of own heads, the normed latent, and k_rope: of the tokens of all of `tensor`."""
        x = concatenate(z.whole)
        weights = lambda w, axis=0: sharding.gather(w.astype(x.dtype), "fsdp", axis=axis)
        norm = {"norm": "rmsnorm", "epsilon": self.epsilon, "dtype": x.dtype}
        x = sharding.gather(x, "tensor", axis=1)
        q = x
        if self.w_q_down is not None:
            q = normalize(jnp.dot(x, weights(self.w_q_down)), self.q_gain[...], **norm)
        q = jnp.dot(q, weights(self.w_q))
        q = q.reshape(*q.shape[:-1], -1, self.core.query_dim)
        down = jnp.dot(x, weights(self.w_kv_down))
        latent, k_rope = jnp.split(down, [self.core.kv_rank], axis=-1)
        return q, normalize(latent, self.kv_gain[...], **norm), k_rope

    def _up(self, dtype):
        return sharding.gather(self.w_kv_up.astype(dtype), "fsdp", axis=1)

    def _expanded(self, latent):
        """Keys without their rope part, and values, of own heads."""
        split = lambda x: x.reshape(*x.shape[:-1], -1, self.core.head_dim)
        return [split(jnp.dot(latent, w)) for w in self._up(latent.dtype)]

    def _rotated(self, x, context):
        """With the last `rope_dim` numbers of each head rotated, if they are."""
        match self.core.positions:
            case cfg.Rope(base=base):
                first = x.shape[-1] - self.core.rope_dim
                turned = pos.rotate(x[..., first:], context.query_positions, base=base)
                return jnp.concatenate([x[..., :first], turned], axis=-1)
        return x

    def _masked(self, q, k, v, mask):
        """By an explicit mask."""
        dtype = jnp.result_type(q, jnp.float32)
        logits = jnp.einsum("bnhd,bmhd->bhnm", q, k, preferred_element_type=dtype) * self.scale
        return jnp.einsum("bhnm,bmhd->bnhd", _softmax(logits, mask).astype(v.dtype), v)


def _softmax(logits, mask):
    return jax.nn.softmax(jnp.where(mask[:, None], logits, jnp.finfo(logits.dtype).min), axis=-1)
