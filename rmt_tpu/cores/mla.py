"""Multi-head latent attention (DeepSeek-AI 2024): one latent per token gives all keys and values.

With x the concatenated data vectors of a token:

    q = W_q x, or W_qb norm(W_qa x)                  H queries [q_nope, q_rope]
    [c, k_rope] = W_kva x                            one latent c; all heads share k_rope
    [k_nope, v] = W_kvb norm(c)                      H keys and values
    y = softmax(scale q . [k_nope, k_rope]) v        scale = 1 / sqrt(D_h + D_r) by default
    y sigmoid(W_g x)                                 in place of y, with an output gate

Norms are RMS norms with a gain. k_rope has no norm, and queries have one only with a low-rank
factor W_qa. If the config has RoPE, it rotates the "rope" parts by position. Without RoPE, this
core ignores the order of tokens, which other layers must represent.

Training computes ("expands") the keys and values of all heads. Decoding caches only c and k_rope.
It avoids the expansion by absorbing the two parts W_uk and W_uv of W_kvb into queries and outputs:
with `q_c = W_uk^T q_nope`, the logits are `q_c . c + q_rope . k_rope`, and `y = W_uv (softmax c)`.
When a prompt is processed in parts, each part attends to expanded keys instead. The keys of earlier
tokens are then expanded in pieces with as many tokens as the part.
"""

import functools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

import pallas_kernels
import sharding
from rmt_tpu import config as cfg
from rmt_tpu.cores import positions as pos
from rmt_tpu.cores.core import (
    Context,
    Core,
    Index,
    all_tokens,
    flatten_rows,
    gated,
    other_axes,
    own_tokens,
    put_tokens,
    ring_axis,
    to_tokens,
    unflatten_rows,
)
from rmt_tpu.layers import stacks
from rmt_tpu.layers.data_vectors import HeadsLayout, Read, concatenate
from rmt_tpu.layers.norm import normalize
from rmt_tpu.layers.parameters import Seed, gain, parameter
from rmt_tpu.layers.products import times, times_each


class Cache(NamedTuple):
    """The cached latents and rope keys of earlier tokens: `kv_rank + rope_dim` numbers each."""

    latents: Float[Array, "repeat batch keys kv_rank"]
    rope_keys: Float[Array, "repeat batch keys rope_dim"]


class Mla(Core):
    """Multi-head latent attention, as described by a `config.Mla`.

    Attributes:
      w_q: W_q [D, H (D_h + D_r)], or W_qb [query_rank, H (D_h + D_r)].
      w_q_down, q_gain: W_qa [D, query_rank] and its norm's gain; None without a query rank.
      w_kv_down: W_kva, [D, kv_rank + D_r].
      kv_gain: the gain of the latent's norm, [kv_rank].
      w_kv_up: W_uk and W_uv, the two parts of W_kvb: [2, kv_rank, H D_h].
      w_gate: W_g [D, H D_h]; None without an output gate.
    """

    name: ClassVar[str] = "mla"

    def __init__(
        self,
        config: cfg.ModelConfig,
        core: cfg.Mla,
        seed: Seed,
        layout: HeadsLayout,
        *,
        scale: float,
    ):
        self.core, self.layout = core, layout
        own = core.latent_epsilon
        self.epsilon = config.norm_epsilon if own is None else own
        self.scale = scale
        width, heads = config.width, core.num_heads

        def weights(name: str, *shape: int, axes: tuple) -> nnx.Param:
            std = config.init_std * shape[-2] ** -0.5
            return parameter(seed / name, shape, std=std, role="hidden", axes=axes)

        rank = core.query_rank
        down = rank is not None
        self.w_q_down = weights("w_q_down", width, rank, axes=("embed", "rank")) if down else None
        self.q_gain = gain((rank,), axes=("rank",)) if down else None
        self.w_q = weights("w_q", rank or width, heads * core.query_dim, axes=("embed", "heads"))
        size = core.kv_rank + core.rope_dim
        self.w_kv_down = weights("w_kv_down", width, size, axes=("embed", "rank"))
        self.kv_gain = gain((core.kv_rank,), axes=("rank",))
        shape = (2, core.kv_rank, heads * core.head_dim)
        self.w_kv_up = weights("w_kv_up", *shape, axes=("projection", "embed", "heads"))
        shape, axes = (width, heads * core.head_dim), ("embed", "heads")
        self.w_gate = weights("w_gate", *shape, axes=axes) if core.output_gate else None

    def __call__(
        self, z: Read, context: Context, index: Index
    ) -> Float[Array, "batch seq_or_gathered heads head_dim"]:
        """Return one data vector per head, in z's dtype.

        Logits and softmax are computed in at least float32.
        """
        q, gates, latent, k_rope = self._compress(z)
        k, v = self._expand(latent)
        k_rope = jnp.broadcast_to(k_rope[:, :, None], (*k.shape[:3], k_rope.shape[-1]))
        # This device has the tokens of all devices along `tensor`. It now exchanges heads for the
        # tokens of all devices along the other mesh axes, such as `sequence`. If the heads
        # cannot be divided evenly, each device keeps its own tokens along `sequence`, and
        # keys are passed around a ring of devices.
        ring = ring_axis(self.core.num_heads, sharding.token_axes())
        swapped = tuple(axis for axis in other_axes() if axis != ring)
        exchange = lambda x: sharding.swap(x, swapped, split=2, join=1)
        q, v = exchange(q), exchange(v)
        k = exchange(jnp.concatenate([k, k_rope], axis=-1))
        own_context = context._replace(query_positions=own_tokens(context.query_positions, ring))
        q, k = self._rotate(q, own_context), self._rotate(k, own_context)
        if context.mask is not None:
            k, v = (all_tokens(x, ring) for x in (k, v))
            y = self._attend_masked(q, k, v, own_tokens(context.mask, ring))
        else:
            y = pallas_kernels.causal_attention(
                q,
                kv=(k, v),
                scale=self.scale,
                segment_ids=context.segment_ids,
                rows="head_major",
                over=ring,
            )
        return to_tokens(gated(y, None if gates is None else exchange(gates)), self.layout, swapped)

    def empty_cache(self, repeat: int, batch: int, capacity: int, dtype: jnp.dtype) -> Cache:
        """Return an empty cache of latents and rope keys, which all heads share."""
        zeros = lambda size: jnp.zeros((repeat, batch, capacity, size), dtype)
        return Cache(zeros(self.core.kv_rank), zeros(self.core.rope_dim))

    def cache_specs(self) -> Cache:
        """Return the specs that shard a cache by rows."""
        return Cache(*2 * [PartitionSpec(None, sharding.CACHE_RULES["batch"])])

    def step(
        self, z: Read, context: Context, index: Index, cache: Cache, layer: Index
    ) -> tuple[Float[Array, "batch seq heads head_dim"], Cache]:
        """Attend from the new tokens to the cached tokens and to the new tokens themselves.

        A single new token attends to the latents, with W_kvb absorbed into queries and outputs.
        Several new tokens attend to expanded keys and values, and so does a single token if the
        cache is empty.
        """
        q, gates, *latents = self._compress(z)
        latents = (
            unflatten_rows(sharding.gather(x, other_axes(), axis=1), context) for x in latents
        )
        latent, k_rope = latents
        k_rope = self._rotate(k_rope[:, :, None], context)[:, :, 0]
        append = lambda old, new: put_tokens(old, new, layer, context.start)
        cache = Cache(append(cache.latents, latent), append(cache.rope_keys, k_rope))
        if context.start is None:
            return self(z, context, index), cache
        to_heads = lambda x: sharding.swap(x, other_axes(), split=2, join=1)
        q = self._rotate(unflatten_rows(to_heads(q), context), context)
        w_up = self._up(z.residual.dtype)
        w_up = w_up.reshape(*w_up.shape[:2], -1, self.core.head_dim)
        w_up = sharding.own_part(w_up, other_axes(), axis=2)
        step = Step(q, latent, k_rope, cache, w_up, jnp.asarray(layer), context.start)
        attend = _attend_absorbed if q.shape[1] == 1 else _attend_in_parts
        y = flatten_rows(attend(self.scale, step), context)
        y = gated(y, None if gates is None else to_heads(gates))
        return to_tokens(y, self.layout, other_axes()), cache

    def _compress(self, z):
        """Return the queries, the gates (or None), the normed latents and k_rope.

        Queries and gates are those of this device's heads. All arrays contain the tokens of all
        devices along the mesh axis `tensor`.
        """
        x = concatenate(z.residual)
        norm = {"norm": "rmsnorm", "epsilon": self.epsilon, "dtype": x.dtype}
        x = sharding.gather(x, "tensor", axis=1)
        q = x
        if self.w_q_down is not None:
            q = normalize(times(x, self.w_q_down, gathered=-2), self.q_gain[...], **norm)
        split = lambda x, size: x.reshape(*x.shape[:-1], -1, size)
        q = split(times(q, self.w_q, gathered=-2), self.core.query_dim)
        gates = None
        if self.w_gate is not None:
            gates = split(times(x, self.w_gate, gathered=-2), self.core.head_dim)
        down = times(x, self.w_kv_down, gathered=-2)
        latent, k_rope = jnp.split(down, [self.core.kv_rank], axis=-1)
        return q, gates, normalize(latent, self.kv_gain[...], **norm), k_rope

    def _up(self, dtype):
        return sharding.gather(self.w_kv_up.astype(dtype), "fsdp", axis=1)

    def _expand(self, latent):
        """Compute keys, without their rope part, and values of this device's heads from latents."""
        split = lambda x: x.reshape(*x.shape[:-1], -1, self.core.head_dim)
        return [split(x) for x in times_each(latent, self.w_kv_up, gathered=-2)]

    def _rotate(self, x, context):
        """Rotate the last `rope_dim` numbers of each head, if the config has RoPE."""
        match self.core.positions:
            case cfg.Rope() as rope:
                first = x.shape[-1] - self.core.rope_dim
                rotated = pos.rotate(x[..., first:], context.query_positions, rope)
                return jnp.concatenate([x[..., :first], rotated], axis=-1)
        return x

    def _attend_masked(self, q, k, v, mask):
        """Attend with an explicit mask."""
        dtype = jnp.result_type(q, jnp.float32)
        logits = jnp.einsum("bnhd,bmhd->bhnm", q, k, preferred_element_type=dtype) * self.scale
        return jnp.einsum("bhnm,bmhd->bnhd", _softmax(logits, mask).astype(v.dtype), v)


class Step(NamedTuple):
    """The inputs of attention in one decode step; the cache already contains the new tokens.

    Attributes:
      q: the queries of the new tokens, for this device's heads.
      latent, k_rope: the latents and rope keys of the new tokens.
      cache: the cache of all layers of the stack.
      w_up: the part of W_kvb for this device's heads.
      layer: the layer's index in the cache.
      start: the number of earlier tokens in each row.
    """

    q: Float[Array, "batch new heads query_dim"]
    latent: Float[Array, "batch new kv_rank"]
    k_rope: Float[Array, "batch new rope_dim"]
    cache: Cache
    w_up: Float[Array, "2 kv_rank heads head_dim"]
    layer: Int[Array, ""]
    start: Int[Array, " batch"]


def _attend_absorbed(scale: float, step: Step) -> Float[Array, "batch new heads head_dim"]:
    """Attend with W_kvb absorbed into queries and outputs.

    The keys and values of the heads are never computed. All logits are in memory at the same time.
    """
    q, (w_uk, w_uv) = step.q, step.w_up
    latents, rope_keys = stacks.slice_at(step.cache, step.layer)
    q_nope, q_rope = jnp.split(q, [w_uk.shape[-1]], axis=-1)
    dtype = jnp.result_type(q, jnp.float32)
    absorbed = jnp.einsum("bnhd,chd->bnhc", q_nope, w_uk)
    einsum = lambda *args: jnp.einsum(*args, preferred_element_type=dtype)
    logits = einsum("bnhc,bmc->bhnm", absorbed, latents)
    logits = scale * (logits + einsum("bnhr,bmr->bhnm", q_rope, rope_keys))
    positions, keys = step.start[:, None] + jnp.arange(q.shape[1]), jnp.arange(latents.shape[1])
    weights = _softmax(logits, positions[:, :, None] >= keys).astype(q.dtype)
    mixed = jnp.einsum("bhnm,bmc->bnhc", weights, latents)
    return jnp.einsum("bnhc,chd->bnhd", mixed, w_uv)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_in_parts(scale: float, step: Step) -> Float[Array, "batch new heads head_dim"]:
    """Attend to keys and values that are expanded from the latents, using attention kernels.

    The result equals that of `_attend_absorbed`. Earlier tokens are processed in parts that are as
    long as the new tokens. Only the keys of one part are in memory at a time.
    """
    q, start, capacity = step.q, step.start, step.cache.latents.shape[2]
    shared = {"scale": scale, "rows": "head_major"}
    own_keys = _expand(step.w_up, step.latent, step.k_rope)
    out, log_sums = pallas_kernels.attention_forward(q, kv=own_keys, **shared)
    size = min(q.shape[1], capacity)

    def add(part, state):
        first = part * size
        # All parts have the same size, so the last one may overlap the one before it.
        at = jnp.minimum(first, capacity - size)
        zero, layer = jnp.zeros_like(at), step.layer.astype(at.dtype)

        def slice_part(x):
            part_of_layer = jax.lax.dynamic_slice(
                x, (layer, zero, at, zero), (1, x.shape[1], size, x.shape[3])
            )
            return part_of_layer[0]

        places = at + jnp.arange(size)
        mask = (places >= first) & (places < start[:, None])
        cached_keys = _expand(step.w_up, *map(slice_part, step.cache))
        return pallas_kernels.merged(
            state, pallas_kernels.attention_to(q, cached_keys, mask, **shared)
        )

    parts = -(-jnp.max(start) // size)
    out, _ = jax.lax.fori_loop(0, parts, add, (out.astype(log_sums.dtype), log_sums))
    return out.astype(q.dtype)


def _attend_in_parts_backward(scale, step, d_y):
    integers = {"layer": None, "start": None}
    arrays = step._replace(**integers)
    all_at_once = lambda arrays: _attend_absorbed(
        scale, arrays._replace(layer=step.layer, start=step.start)
    )
    (d_arrays,) = jax.vjp(all_at_once, arrays)[1](d_y)
    zeros = {name: np.zeros(getattr(step, name).shape, jax.dtypes.float0) for name in integers}
    return (d_arrays._replace(**zeros),)


_attend_in_parts.defvjp(
    lambda scale, step: (_attend_in_parts(scale, step), step), _attend_in_parts_backward
)


def _expand(w_up, latent, k_rope):
    """Compute the keys and values of this device's heads from latents and rope keys."""
    k, v = (jnp.einsum("bnc,chd->bnhd", latent, w) for w in w_up)
    k_rope = jnp.broadcast_to(k_rope[:, :, None], (*k.shape[:3], k_rope.shape[-1]))
    return jnp.concatenate([k, k_rope], axis=-1), v


def _softmax(logits, mask):
    return jax.nn.softmax(jnp.where(mask[:, None], logits, jnp.finfo(logits.dtype).min), axis=-1)
