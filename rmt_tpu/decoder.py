"""Tokens to logits: the loop over sublayers, the same for every residual system."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

import sharding
from rmt_tpu import config as cfg
from rmt_tpu import residual
from rmt_tpu.execution import banked, pipelined, reversible
from rmt_tpu.execution.remat import rematerialize
from rmt_tpu.layers import attention as attn
from rmt_tpu.layers.embedding import Embedding, Unembedding
from rmt_tpu.layers.feed_forward import FeedForward
from rmt_tpu.layers.parameters import stack


class KVCache(NamedTuple):
    """What decoding keeps of the tokens seen so far: no residual, only keys and values.

    Attributes:
      layers: keys and values, [L, batch, capacity, heads, head_dim].
      length: how many tokens are in it.
    """

    layers: attn.Cache
    length: Int[Array, ""]


class Layer(nnx.Module):
    """The parameters of one attention and one feed-forward sublayer and the sites before them."""

    def __init__(self, config: cfg.ModelConfig, rngs: nnx.Rngs, layer_index: Int[Array, ""]):
        at = {"layer_index": layer_index}
        self.attention_site = residual.make_site(config, rngs, before="attention", **at)
        self.feed_forward_site = residual.make_site(config, rngs, before="feed_forward", **at)
        # In an RMT the storage keys are what writes, and they carry the scale.
        vector = isinstance(config.store, cfg.VectorStore)
        scale = residual.vector.output_scale(config) if vector else 1.0
        options = {}
        if isinstance(config.mixer, cfg.DepthLstm):  # whose cell gives it what attention read too
            options = {"input_width": 2 * config.width, "norm_hidden": True}
        self.feed_forward = FeedForward(config, rngs, output_scale=scale, **options)


class Decoder(nnx.Module):
    """A causal language model over any residual system.

    Args:
      config: what to build.
      rngs: a `params` stream draws the parameters.

    Raises:
      TypeError: `config` or `rngs` is something else.

    Layers are stacked: their parameters have a leading axis L, and a scan runs over it.
    """

    def __init__(self, config: cfg.ModelConfig, *, rngs: nnx.Rngs):
        if not isinstance(config, cfg.ModelConfig):
            raise TypeError(
                f"Decoder takes a ModelConfig, like rmt_tpu.preset('rmt-tiny'); not {config!r:.60}"
            )
        if not isinstance(rngs, nnx.Rngs):
            raise TypeError(f"Decoder takes rngs=nnx.Rngs(0); not {rngs!r:.60}")
        self.config = config
        self.dtype = compute_dtype(config.compute_dtype)
        store = residual.store_module(config.store)
        self.embedding = Embedding(config, rngs)
        self.store = store.Store(
            config, rngs, dtype=residual_dtype(config), compute_dtype=self.dtype
        )
        self.layers = stack(lambda rngs, index: Layer(config, rngs, index), rngs, config.num_layers)
        self.final_site = residual.make_site(
            config, rngs, before="unembedding", layer_index=jnp.int32(config.num_layers)
        )
        self.mixer = residual.make_mixer(config, rngs)
        self.unembedding = Unembedding(config, rngs)

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        *,
        segment_ids: Int[Array, "batch seq"] | None = None,
        positions: Int[Array, "batch_or_1 seq"] | None = None,
    ) -> Float[Array, "batch seq vocab"]:
        """Logits of the next token, at least float32.

        Args:
          tokens: below `config.vocab_size`; others, and positions past the learned ones, give NaN.
          segment_ids: tokens see only their own document; None is one document a row.
          positions: of the tokens; None counts from 0.

        Raises:
          TypeError: the tokens are not integers in an array.
          ValueError: they are not [batch, seq].
        """
        _check(tokens)
        return self.unembedding(self.features(tokens, segment_ids=segment_ids, positions=positions))

    def features(
        self,
        tokens: Int[Array, "batch seq"],
        *,
        segment_ids: Int[Array, "batch seq"] | None = None,
        positions: Int[Array, "batch_or_1 seq"] | None = None,
        schedule: sharding.Schedule | None = None,
    ) -> Float[Array, "part own_seq vectors size"]:
        """What the unembedding reads, for a loss that never holds all logits.

        In per-device code (see `sharding.per_device`): of this device's own tokens, and with a
        `schedule` of stages of its part of their rows.
        """
        context = attn.causal(tokens.shape[1], positions, segment_ids)
        return self._run(tokens, context, None, schedule)[0]

    def decode(
        self, tokens: Int[Array, "batch new"], cache: KVCache
    ) -> tuple[Float[Array, "batch new vocab"], KVCache]:
        """Logits for the tokens that follow those in the cache, and the cache with them in it.

        The caller keeps `cache.length + new` within the cache's capacity.

        Raises:
          TypeError, ValueError: as `__call__`.
        """
        _check(tokens)
        new, capacity = tokens.shape[1], cache.layers.keys.shape[2]
        context = attn.cached(cache.length, new, capacity)
        z, layers = self._run(tokens, context, cache.layers)
        return self.unembedding(z), KVCache(layers, cache.length + new)

    def empty_cache(self, batch: int, capacity: int) -> KVCache:
        """A cache for `capacity` tokens of each of `batch` sequences."""
        heads, head_dim = self.config.attention.num_heads, self.config.attention.head_dim
        heads //= sharding.axis_size(sharding.RULES["tokens"])
        shape = (self.config.num_layers, batch, capacity, heads, head_dim)
        # Two arrays, so that both can be donated.
        keys, values = jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype)
        return KVCache(attn.Cache(keys, values), jnp.int32(0))

    def _run(
        self,
        tokens,
        context: attn.Context,
        cache: attn.Cache | None,
        schedule: sharding.Schedule | None = None,
    ):
        with jax.named_scope("embedding"):
            own = lambda x: sharding.own_part(x, sharding.RULES["tokens"], axis=1)
            embedded = self.embedding(own(tokens), own(context.query_positions), self.dtype)
            state, y = self.store.start(*embedded)
        if schedule is not None:
            return pipelined.run_layers(self, state, y, context, schedule), None
        if self.config.remat == "reversible" and cache is None:
            layers = (self.layers, self.final_site)
            z = reversible.run_layers(self.config, self.store, *layers, state, y, context)
            return z, None
        if isinstance(self.config.mixer, cfg.Banked):
            return banked.run_layers(self, state, y, context, cache)
        mixer, store = self.mixer, self.store
        graphdef, layers = nnx.split(self.layers)

        def run_layer(carry, scanned):
            state, y = carry
            layer, index, cache = scanned
            layer = nnx.merge(graphdef, layer)
            attention = attn.Attention(self.config, context, index)
            state, z = mixer.advance(store, state, y, layer.attention_site, 2 * index)
            with jax.named_scope("attention"):
                y, cache = (attention(z), None) if cache is None else attention.with_cache(z, cache)
            state, z = mixer.advance(store, state, y, layer.feed_forward_site, 2 * index + 1)
            with jax.named_scope("feed_forward"):
                y = layer.feed_forward(z)
            return (state, y), cache

        (state, y), cache = jax.lax.scan(
            rematerialize(run_layer, self.config.remat),
            mixer.start(store, state, y),
            (layers, jnp.arange(self.config.num_layers), cache),
        )
        _, z = mixer.advance(store, state, y, self.final_site, 2 * self.config.num_layers)
        return z, cache


def _check(tokens):
    if not jnp.issubdtype(getattr(tokens, "dtype", None) or object, jnp.integer):
        raise TypeError(f"tokens must be an array of integers, [batch, seq]; not {tokens!r:.60}")
    if tokens.ndim != 2:
        raise ValueError(
            f"tokens are {list(tokens.shape)}, and must be [batch, seq]; "
            "a single sequence is tokens[None]"
        )


def compute_dtype(name: cfg.DType) -> jnp.dtype:
    """The dtype of a name; "auto" is float32 on CPU and bfloat16 elsewhere."""
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def residual_dtype(config: cfg.ModelConfig) -> jnp.dtype:
    """The dtype in which the residual is carried."""
    dtype = compute_dtype(config.compute_dtype)
    if config.store.dtype != "auto":
        return jnp.dtype(config.store.dtype)
    if config.remat == "reversible" and dtype == jnp.bfloat16:
        # As small as bfloat16, and writes can be taken back exactly; bfloat16 would drift.
        return jnp.dtype("int16" if residual.fixed_point.holds(config) else "float32")
    return dtype
