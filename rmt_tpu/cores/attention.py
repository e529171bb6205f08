"""Causal softmax attention within documents, with queries, keys and values from the residual."""

import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

import pallas_kernels
import sharding
from pallas_kernels.call import LANES, round_up
from rmt_tpu import config as cfg
from rmt_tpu.cores import positions as pos
from rmt_tpu.cores.core import (
    Aux,
    Context,
    Core,
    Index,
    all_tokens,
    flatten_rows,
    gated,
    own_tokens,
    put_tokens,
    ring_axis,
    unflatten_rows,
    within_window,
)
from rmt_tpu.layers import stacks
from rmt_tpu.layers.caps import soft_capped
from rmt_tpu.layers.choices import cache_width
from rmt_tpu.layers.data_vectors import HeadsLayout, Read
from rmt_tpu.layers.kept import Kept
from rmt_tpu.layers.norm import normalize
from rmt_tpu.layers.parameters import Seed, bias, gain, parameter
from rmt_tpu.layers.products import times


class Cache(NamedTuple):
    """The keys and values of earlier tokens; the last axis concatenates the heads of a token."""

    keys: Float[Array, "repeat batch keys heads_size"]
    values: Float[Array, "repeat batch keys heads_size"]


class Attention(Core):
    """Softmax attention with grouped queries (Ainslie et al. 2023).

    These are equations 8 and 21 of the RMT paper (Mak and Flanigan 2025). The input of the core is
    `[batch, seq, H + 2 G, head_dim]`: H queries, G keys and G values. If tokens are sharded over
    devices, the devices exchange heads for tokens. Each device then computes attention over all
    tokens for its share of the heads. If the heads cannot be divided evenly, tokens stay sharded
    over the mesh axis `sequence`, and keys and values are passed around a ring of devices.

    Args:
      config: the model's config, for the sizes and the norms.
      core: the config of this core, with its heads and position encoding.
      layout: how heads are sharded over devices where they are read from the residual and written
        to it.
      seed: the seed of the weights.
      scale: the factor by which products of queries and keys are multiplied.
      output_scale: the factor that multiplies the initial standard deviation of W_O.

    Attributes:
      query_gain, key_gain: the gains of the norms of queries and keys, [head_dim], or [H, head_dim]
        and [G, head_dim] if a norm is over all heads; None without norms.
      bias: the bias added to the queries, keys and values, [H + 2 G, head_dim]; None without a
        bias.
      w_out: W_O, [H * head_dim, D]; None if the site after the core has it.
      output_bias, output_gain: the bias that is added to the core's output, and the gain of the
        output's norm, [D]; None without them.
    """

    name: ClassVar[str] = "attention"
    MULTIPLIED: ClassVar[tuple[str, ...]] = ("w_out",)

    def __init__(
        self,
        config: cfg.ModelConfig,
        core: cfg.Attention,
        layout: HeadsLayout,
        seed: Seed,
        *,
        scale: float,
        output_scale: float,
    ):
        self.core, self.layout = core, layout
        self.scale, self.epsilon = scale, config.norm_epsilon
        normed, over_heads = core.query_key_norm, core.query_key_norm_over == "heads"
        axes = ("head", "head_dim") if over_heads else ("head_dim",)
        sizes = [(count, core.head_dim)[-len(axes) :] for count in (core.num_heads, core.kv_heads)]
        self.query_gain = gain(sizes[0], axes=axes) if normed else None
        self.key_gain = gain(sizes[1], axes=axes) if normed else None
        shape, axes = (sum(core.qkv_heads), core.head_dim), ("head", "head_dim")
        self.bias = bias(shape, axes) if core.bias else None
        width, heads_width = (config.width,), core.num_heads * core.head_dim
        std = output_scale * config.init_std * heads_width**-0.5
        draw = functools.partial(parameter, std=std, role="hidden", axes=("heads", "embed"))
        projects, self.norm = core.projects, config.norm
        self.w_out = draw(seed / "w_out", (heads_width, *width)) if projects else None
        self.output_bias = bias(width, ("width",)) if core.output_bias else None
        self.output_gain = gain(width, axes=("width",)) if core.normed != "input" else None

    def __call__(
        self, z: Read, context: Context, index: Index
    ) -> Float[Array, "batch seq_or_gathered vectors size"]:
        """Return one vector per head, or the output of W_O if the core applies W_O, in z's dtype.

        Logits and softmax are computed in at least float32.
        """
        gates, z = self._split_gates(z)
        if context.mask is not None:
            q, *kv = self._rotated_heads(z.heads, context)
            kv = (all_tokens(x, self._ring) for x in kv)
            positions = context.query_positions
            mask = own_tokens(within_window(context.mask, self.core.window), self._ring)
            y = self._attend_masked(
                q, *kv, index, own_tokens(positions, self._ring), positions, mask
            )
        else:
            qkv = checkpoint_name(self._pack(z.heads, context), "heads")
            y = self._attend(pallas_kernels.causal_attention, context, index, qkv)
        return self._output(self._to_tokens(gated(y, gates)))

    def forward(
        self,
        z: Read,
        context: Context,
        index: Index,
        to: pallas_kernels.StackSlice,
        kept: Kept,
    ) -> tuple[
        Float[Array, "count batch seq heads head_dim"],
        Aux,
        Float[Array, "batch all_seq own_heads"] | Any,
    ]:
        """Attend, and also return the log-sum-exp of each softmax for the backward pass.

        With an explicit mask or with output gates, this is the forward pass of any core, and no
        log-sum-exp is returned.
        """
        if self.core.output_gate or context.mask is not None:
            return super().forward(z, context, index, to, kept)
        forward, qkv = pallas_kernels.attention_forward, self._pack(z.heads, context)
        if sharding.axis_size(self._swapped) == 1:
            stack, log_sums = self._attend(forward, context, index, qkv, to=to)
            return stack, {}, log_sums
        y, log_sums = self._attend(forward, context, index, qkv)
        return pallas_kernels.write_slice(self._to_tokens(y), to), {}, log_sums

    def pull_back(
        self,
        z: Read,
        y: pallas_kernels.StackSlice,
        saved: Float[Array, "batch all_seq own_heads"] | Any,
        context: Context,
        index: Index,
        d_y: Float[Array, "batch seq heads head_dim"],
        d_aux: Aux,
    ) -> tuple[dict, Read]:
        """Return the cotangents of the parameters and of z.

        The attention is recomputed only with an explicit mask or with output gates.
        """
        if context.mask is not None or self.core.output_gate:
            return super().pull_back(z, y, saved, context, index, d_y, d_aux)
        graphdef, parameters = nnx.split(self, nnx.Param)

        def packed(parameters: Any, heads: Array) -> Array:
            return nnx.merge(graphdef, parameters)._pack(heads, context)

        qkv, rotate_back = jax.vjp(packed, nnx.to_pure_dict(parameters), z.heads)
        if sharding.axis_size(self._swapped) > 1:
            y, d_y = self._to_heads(pallas_kernels.read_slices(y)), self._to_heads(d_y)
        backward = pallas_kernels.attention_backward
        d_qkv = self._attend(backward, context, index, qkv, y, saved, d_y)
        d_parameters, d_heads = rotate_back(d_qkv)
        return d_parameters, Read(heads=d_heads)

    def empty_cache(self, repeat: int, batch: int, capacity: int, dtype: jnp.dtype) -> Cache:
        """Return an empty cache for the keys and values of this device's heads."""
        heads = self.core.kv_heads // sharding.axis_size(self.layout.divided)
        shape = (repeat, batch, capacity, cache_width(heads * self.core.head_dim))
        # Allocate two arrays, because each array can be donated to a program only once.
        return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def cache_specs(self) -> Cache:
        """Return the specs that shard a cache by rows and by heads."""
        rules = sharding.CACHE_RULES
        return Cache(*2 * [PartitionSpec(None, rules["batch"], None, rules["tokens"])])

    def step(
        self, z: Read, context: Context, index: Index, cache: Cache, layer: Index
    ) -> tuple[Float[Array, "batch seq_or_gathered vectors size"], Cache]:
        """Attend from the new tokens to the cached tokens and to themselves."""
        whole = z
        gates, z = self._split_gates(z)
        gates = None if gates is None else unflatten_rows(gates, context)
        q, *new = self._rotated_heads(z.heads, context)
        groups, size = new[0].shape[2:]
        padding = [(0, 0), (0, 0), (0, cache.keys.shape[-1] - groups * size)]
        flat = lambda x: jnp.pad(x.reshape(*x.shape[:2], -1), padding)
        append = lambda old, x: put_tokens(old, flat(x), layer, context.start)
        cache = Cache(*map(append, cache, new))
        if context.start is None:
            return self(whole, context, index), cache
        if q.shape[1] == 1:
            k, v, first = self._within_reach(cache, layer, context.start + 1)
            queries, keys = context.query_positions, first[:, None] + jnp.arange(k.shape[1])
            distance = queries[:, :, None] - keys[:, None, :]
            mask = distance >= 0
            if self.core.window is not None:
                mask = mask & (distance < self.core.window)
            y = self._attend_one_query(q, k, v, groups, index, queries, keys, mask)
        else:
            k, v, first = self._within_reach(cache, layer, context.start)
            heads = lambda x: x[..., : groups * size].reshape(*x.shape[:2], groups, size)
            cached = jnp.concatenate([heads(k), heads(v)], axis=2)
            qkv = jnp.concatenate([q, *new], axis=2)
            y = pallas_kernels.attention_after(
                qkv,
                cached,
                context.start - first,
                scale=self._scale(index),
                slopes=self._slopes(),
                kv_heads=groups,
                rows=self.layout.rows,
                window=self.core.window,
                cap=self.core.logit_cap,
            )
        y = flatten_rows(gated(y, gates), context)
        return self._output(self._to_tokens(y)), cache

    def _within_reach(self, cache, layer, end):
        """Return the cached keys and values of a layer that new tokens may attend to.

        The window of a row ends before its token `end`. If the cache is at least twice as long as a
        window, only the window is returned. Copying it then costs less than reading the whole
        cache. Otherwise the whole cache of the layer is returned.

        Returns:
          Keys and values, [batch, keys, heads_size], and the position of the first of them, [batch
          or 1].
        """
        capacity = cache.keys.shape[2]
        count = capacity if self.core.window is None else round_up(self.core.window, LANES)
        if 2 * count > capacity:
            return *stacks.slice_at(cache, layer), jnp.zeros(1, end.dtype)
        first = jnp.clip(end - count, 0, capacity - count)
        layer = jnp.asarray(layer, first.dtype)

        def part(row: Array, begin: Array) -> Array:
            size = (1, count, row.shape[2])
            return jax.lax.dynamic_slice(row, (layer, begin, jnp.zeros_like(begin)), size)[0]

        k, v = (jax.vmap(part, (1, 0))(x, first) for x in cache)
        return k, v, first

    def _split_gates(self, z):
        """Return the gates of this device's heads or None, and z without them."""
        if not self.core.output_gate:
            return None, z
        count = self.core.num_heads // self._read_devices
        gates, others = jnp.split(z.heads, [count], axis=2)
        # With this name, no policy of rematerialisation keeps the queries, keys and values twice.
        return checkpoint_name(self._to_heads(gates), "heads"), z._replace(heads=others)

    def _output(self, y):
        """Return the vectors that are written to the residual.

        If this core has W_O, it returns the single vector `W_O y`, with its bias and norm, for this
        device's tokens (see `vector.Store.write`). Otherwise it returns one vector per head.
        """
        if self.w_out is None:
            return y
        y = y.reshape(*y.shape[:2], y.shape[2] * y.shape[3])
        with jax.named_scope("projection"):
            y = sharding.scatter_sum(times(y, self.w_out, gathered=-1), "tensor", axis=1)
        if self.output_bias is not None:
            y = y + self.output_bias[...].astype(y.dtype)
        if self.output_gain is not None:
            norm = {"norm": self.norm, "epsilon": self.epsilon, "dtype": y.dtype}
            y = normalize(y, self.output_gain[...], **norm)
        return y[:, :, None]

    def _attend(self, function, context, index, *arrays, **options):
        group_size = self.core.num_heads // self.core.kv_heads
        shared = {
            "scale": self._scale(index),
            "slopes": self._slopes(),
            "segment_ids": context.segment_ids,
            "kv_heads": arrays[0].shape[2] // (group_size + 2),
            "rows": self.layout.rows,
            "over": self._ring,
            "window": self.core.window,
            "cap": self.core.logit_cap,
        }
        return function(*arrays, **shared, **options)

    def _scale(self, index):
        scale = jnp.asarray(self.scale)
        return scale / (index // 2 + 1) if self.core.inverse_layer_scaling else scale

    def _slopes(self):
        if not isinstance(self.core.positions, cfg.Alibi):
            return None
        slopes = pos.alibi_slopes(self.core.num_heads)
        return sharding.own_part(slopes, self._divided, axis=0)

    @property
    def _ring(self):
        return ring_axis(self.core.kv_heads, self.layout.divided)

    @property
    def _swapped(self):
        return tuple(axis for axis in self.layout.swapped if axis != self._ring)

    @property
    def _divided(self):
        return tuple(axis for axis in self.layout.divided if axis != self._ring)

    def _to_heads(self, x, groups=1):
        """Exchange heads for tokens between devices.

        The input has all heads for this device's tokens. The result has this device's heads for all
        tokens. The heads form `groups` equal groups, such as 3 for queries, keys and values, and
        each device gets its share of every group.
        """
        if sharding.axis_size(self._swapped) == 1:
            return x
        x = x.reshape(*x.shape[:2], groups, -1, x.shape[-1])
        x = self._swap(x, split=3, join=1)
        return x.reshape(*x.shape[:2], -1, x.shape[-1])

    def _to_tokens(self, y):
        """Undo `_to_heads`: return all heads for this device's tokens."""
        return self._swap(y, split=1, join=2)

    def _swap(self, x, *, split, join):
        # The kernels have tokens in the lanes. With heads of 64 on four v5e chips, attention with
        # its products, forward and backward, takes 4.2 million cycles in place of 5.3 by estimate
        # if parts come first (512 tokens, 64 rows). With heads of 128 it takes 4.9 in place of 4.7.
        parts_first = x.shape[-1] < LANES
        return sharding.swap(x, self._swapped, split=split, join=join, parts_first=parts_first)

    def _pack(self, z, context):
        """Return queries, keys and values of this device's heads, concatenated along heads."""
        if self.query_gain is not None or self.bias is not None:
            return jnp.concatenate(self._rotated_heads(z, context), axis=2)
        if self._multi_head:
            packed = self._to_heads(z, groups=3)
        else:
            moved = sharding.axis_size(self._swapped) > 1
            packed = jnp.concatenate(self._own_heads(z), axis=2) if moved else z
        match self.core.positions:
            case cfg.Rope() as rope:
                group_size = self.core.num_heads // self.core.kv_heads
                rotated_heads = packed.shape[2] // (group_size + 2) * (group_size + 1)
                positions = self._own_positions(context)
                return pos.rotate_first(packed, positions, heads=rotated_heads, rope=rope)
        return packed

    def _own_positions(self, context):
        return own_tokens(context.query_positions, self._ring)

    @property
    def _multi_head(self):
        """Whether there are as many key and value heads as query heads."""
        return self.core.kv_heads == self.core.num_heads

    def _rotated_heads(self, z, context):
        """Return queries, keys and values of this device's heads, after norms and RoPE."""
        q, k, v = (unflatten_rows(x, context) for x in self._own_heads(z))
        if self.query_gain is not None:
            q = self._normed(q, self.query_gain, self.core.num_heads)
            k = self._normed(k, self.key_gain, self.core.kv_heads)
        match self.core.positions:
            case cfg.Rope() as rope:
                positions = self._own_positions(context)
                q, k = (pos.rotate(x, positions, rope) for x in (q, k))
        return q, k, v

    def _normed(self, x, gain, count):
        """Normalise this device's heads, either each head separately or all `count` heads together.

        In the second case, the norm also covers the heads on other devices. All these devices have
        the same tokens.
        """
        if self.core.query_key_norm_over == "head":
            norm = {"norm": "rmsnorm", "epsilon": self.epsilon, "dtype": x.dtype}
            return normalize(x, gain[...], **norm)
        wide = x.astype(jnp.result_type(x, jnp.float32))
        own_sum = jnp.sum(jnp.square(wide), axis=(2, 3), keepdims=True)
        square = sharding.total(own_sum, self._divided) / (count * x.shape[-1])
        own_gain = sharding.own_part(gain[...], self._divided, axis=0)
        return (wide * jax.lax.rsqrt(square + self.epsilon) * own_gain).astype(x.dtype)

    def _own_heads(self, z):
        """Return queries, keys and values of this device's heads, with biases added."""
        # Equal numbers of heads for queries, keys and values need only one exchange.
        if self._multi_head:
            groups = jnp.split(self._to_heads(z, groups=3), 3, axis=2)
        else:
            queries, keys, _ = (count // self._read_devices for count in self.core.qkv_heads)
            groups = jnp.split(z, [queries, queries + keys], axis=2)
            groups = [self._to_heads(group) for group in groups]
        if self.bias is None:
            return groups
        h, g = self.core.num_heads, self.core.kv_heads
        biases = jnp.split(self.bias[...].astype(z.dtype), [h, h + g])
        own_biases = (sharding.own_part(b, self._divided, axis=0) for b in biases)
        return [group + b for group, b in zip(groups, own_biases, strict=True)]

    @property
    def _read_devices(self):
        """The number of devices over which heads are sharded when the site reads them."""
        return sharding.axis_size(self._divided) // sharding.axis_size(self._swapped)

    def _attend_masked(self, q, k, v, index, query_positions, key_positions, mask):
        """Attend with an explicit mask, for caches and for positions given by the caller."""
        dtype = jnp.result_type(q, jnp.float32)
        group_size = q.shape[2] // k.shape[2]
        if group_size > 1:
            k, v = jnp.repeat(k, group_size, axis=2), jnp.repeat(v, group_size, axis=2)
        logits = jnp.einsum("bnhd,bmhd->bhnm", q, k, preferred_element_type=dtype)
        weights = self._softmax(logits, index, query_positions, key_positions, mask)
        return jnp.einsum("bhnm,bmhd->bnhd", weights.astype(v.dtype), v)

    def _attend_one_query(self, q, k, v, groups, index, query_positions, key_positions, mask):
        """Attend with one query per row to cached keys and values, whose heads are concatenated.

        Each query is padded with zeros to the size of all heads. One matrix product then covers all
        heads. This needs more arithmetic than a product per head, but saves a copy of the keys to a
        layout with a separate axis for heads.
        """
        dtype = jnp.result_type(q, jnp.float32)
        batch, size, used = q.shape[0], q.shape[-1], groups * q.shape[-1]
        own_group = jnp.eye(groups, dtype=q.dtype)
        wide = jnp.einsum("bged,gf->bgefd", q.reshape(batch, groups, -1, size), own_group)
        wide = wide.reshape(batch, -1, used)
        wide = jnp.pad(wide, [(0, 0), (0, 0), (0, k.shape[-1] - used)])
        logits = jnp.einsum("bhw,bmw->bhm", wide, k, preferred_element_type=dtype)[:, :, None]
        weights = self._softmax(logits, index, query_positions, key_positions, mask)
        y = jnp.einsum("bhm,bmw->bhw", weights[:, :, 0].astype(v.dtype), v)
        if used < v.shape[-1]:
            # Remove the padding from y. Without the barrier, XLA would instead remove it from the
            # cached values, which copies all of them.
            y = jax.lax.optimization_barrier(y)
        y = y[..., :used].reshape(batch, groups, -1, groups, size)
        y = jnp.einsum("bgefd,gf->bged", y, own_group)
        return y.reshape(batch, 1, -1, size)

    def _softmax(self, logits, index, query_positions, key_positions, mask):
        """Return the softmax of logits [batch, heads, queries, keys], in their dtype."""
        logits = soft_capped(logits * self._scale(index), self.core.logit_cap)
        slopes = self._slopes()
        if slopes is not None:
            distance = query_positions[:, :, None] - key_positions[:, None, :]
            logits = logits - slopes[:, None, None] * distance[:, None]
        logits = jnp.where(mask[:, None], logits, jnp.finfo(logits.dtype).min)
        return jax.nn.softmax(logits, axis=-1)
