"""The decoder, which computes logits from tokens, and its decoding cache."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

import sharding
from rmt_tpu import config as cfg
from rmt_tpu import cores, residual
from rmt_tpu.execution import banked, kernels, layer, pipelined, reversible, scanned
from rmt_tpu.execution.kernels import compute_dtype
from rmt_tpu.layers.embedding import Embedding, Unembedding
from rmt_tpu.layers.parameters import Seed


class Cache(NamedTuple):
    """The decoding cache: the data from earlier tokens that cores such as attention need.

    Attributes:
      cores: a tree of arrays [repeat, batch, ...] for each core in each stack.
      length: number of cached tokens in each row.
    """

    cores: tuple[tuple[cores.Cache, ...], ...]
    length: Int[Array, " batch"]


class Features(NamedTuple):
    """The decoder's outputs before the unembedding, from which a loss is computed.

    Attributes:
      z: the input of the unembedding.
      aux: a dict from names to scalars that the cores return, summed over depth and tokens. The
        scalar named "loss" is part of the training objective.
    """

    z: Float[Array, "part local_seq vectors size"]
    aux: cores.Aux


class Decoder(nnx.Module):
    """A causal language model whose residual system is chosen by its config.

    Args:
      config: the model's config.
      rngs: random streams. One key from the `params` stream is the seed of all parameters.

    Raises:
      TypeError: `config` or `rngs` has the wrong type.

    A scan runs over the layers of a stack. The stack's parameters have a leading axis with one
    entry per layer. The random key of a weight depends only on the seed, the number of its sublayer
    and its name (`layers.parameters.Seed`). Two models with the same seed therefore have the same
    initial values in all weights that both have.
    """

    def __init__(self, config: cfg.ModelConfig, *, rngs: nnx.Rngs):
        if not isinstance(config, cfg.ModelConfig):
            raise TypeError(
                f"Decoder needs a ModelConfig, like rmt_tpu.preset('rmt-tiny'), not {config!r:.60}"
            )
        if not isinstance(rngs, nnx.Rngs):
            raise TypeError(f"Decoder needs nnx.Rngs, such as rngs=nnx.Rngs(0), not {rngs!r:.60}")
        # Training replaces "auto" by a policy of its choice before it creates a decoder. In other
        # decoders, "auto" means "full".
        if config.remat == "auto":
            config = dataclasses.replace(config, remat="full")
        self.config = config
        self.dtype = compute_dtype(config.compute_dtype)
        store = residual.store_module(config.store)
        seed = Seed(rngs.params())
        self.embedding = Embedding(config, seed / "embedding")
        self.store = store.Store(
            config, seed / "store", dtype=residual_dtype(config), compute_dtype=self.dtype
        )
        self.stacks = layer.make_stacks(config, seed)
        self.final_site = layer.make_final_site(config, seed / "final_site")
        self.mixer = residual.make_mixer(config, seed / "mixer")
        self.unembedding = Unembedding(config, seed / "unembedding", self.embedding)

    @kernels.as_configured
    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        *,
        segment_ids: Int[Array, "batch seq"] | None = None,
        positions: Int[Array, "batch_or_1 seq"] | None = None,
    ) -> Float[Array, "batch seq vocab"]:
        """Return the logits of the next token, at least float32.

        Args:
          tokens: token ids below `config.vocab_size`. Other ids, and positions beyond the learned
            positions, give NaN.
          segment_ids: the number of each token's document. Tokens attend only within their
            document. None means that each row is one document.
          positions: positions of the tokens; None counts from 0.

        Raises:
          TypeError: the tokens are not integers in an array.
          ValueError: the shape of the tokens is not [batch, seq].
        """
        features = self.features(tokens, segment_ids=segment_ids, positions=positions)
        return self.unembedding(features.z)

    @kernels.as_configured
    def features(
        self,
        tokens: Int[Array, "batch seq"],
        *,
        segment_ids: Int[Array, "batch seq"] | None = None,
        positions: Int[Array, "batch_or_1 seq"] | None = None,
        lengths: Int[Array, " batch"] | None = None,
        schedule: sharding.Schedule | None = None,
    ) -> Features:
        """Return the input of the unembedding, and the scalars that the cores return.

        A loss can be computed from this input without storing all logits at once. `lengths` is the
        number of tokens in each row before the padding, which may be any tokens.

        In per-device code (see `sharding.per_device`), the result is for this device's tokens. With
        a `schedule` of pipeline stages, z covers only this stage's share of the rows, and the
        scalars come only from this stage's cores. Use `pipelined.loss` for a pipelined loss with
        its gradient.

        Raises:
          TypeError, ValueError: see `__call__`.
        """
        _check(tokens)
        context = cores.causal(tokens.shape[1], positions, segment_ids)
        context = context._replace(lengths=lengths)
        z, _, aux = self._run(tokens, context, None, schedule)
        return Features(z, aux)

    @kernels.as_configured
    def decode(
        self, tokens: Int[Array, "batch new"], cache: Cache
    ) -> tuple[Float[Array, "batch new vocab"], Cache]:
        """Return the logits after each new token, and the cache extended by the new tokens.

        The caller must ensure that `cache.length + new` does not exceed the cache's capacity in any
        row.

        Raises:
          TypeError, ValueError: see `__call__`.
        """
        _check(tokens)
        new = tokens.shape[1]
        context = cores.cached(cache.length, new)
        z, caches, _ = self._run(tokens, context, cache.cores)
        # All tokens are gathered on each device that has a part of them. Most of the time is spent
        # on reading the unembedding matrix from memory, which takes as long for few tokens as for
        # all.
        z = cores.unflatten_rows(sharding.gather(z, sharding.token_axes(), axis=1), context)
        with jax.named_scope("unembedding"):
            return self.unembedding(z), Cache(caches, cache.length + new)

    @kernels.as_configured
    def prefill(
        self, tokens: Int[Array, "batch seq"], lengths: Int[Array, " batch"], cache: Cache
    ) -> tuple[Float[Array, "batch vocab"], Cache]:
        """Return the logits after each row's last token, and a new cache that contains the rows.

        No other logits are computed. Attention is computed as in training.

        In per-device code `tokens` contains this device's rows, each with all of its tokens.

        Args:
          tokens: rows of token ids, padded at their ends with arbitrary tokens.
          lengths: number of tokens in each row without the padding, at least 1.
          cache: an empty cache for at least this many tokens.

        Raises:
          TypeError, ValueError: see `__call__`.
        """
        _check(tokens)
        context = cores.causal(tokens.shape[1], None, None)
        return self._read_prompt(tokens, context, lengths, cache)

    @kernels.as_configured
    def extend(
        self, tokens: Int[Array, "batch new"], lengths: Int[Array, " batch"], cache: Cache
    ) -> tuple[Float[Array, "batch vocab"], Cache]:
        """Return the logits after each row's last token, and the cache extended by the rows.

        The rows continue the rows in the cache. A long text can therefore be read in parts, with
        the memory that one part needs.

        Args:
          tokens: rows of token ids, padded at their ends with arbitrary tokens.
          lengths: number of tokens in each row without the padding, at least 1. They must fit into
            the cache's remaining capacity.
          cache: the cache of the preceding tokens, which may be empty.

        Raises:
          TypeError, ValueError: see `__call__`.
        """
        _check(tokens)
        context = cores.cached(cache.length, tokens.shape[1])
        return self._read_prompt(tokens, context, lengths, cache)

    def _read_prompt(self, tokens, context, lengths, cache):
        after = lengths if context.start is None else context.start + lengths
        context = context._replace(lengths=lengths)
        z, caches, _ = self._run(tokens, context, cache.cores)
        return self.unembedding(self._last(z, context)), Cache(caches, after)

    def _last(
        self, z: Float[Array, "part local_seq vectors size"], context: cores.Context
    ) -> Float[Array, "batch vectors size"]:
        """Select each row's last token.

        If a row's tokens are sharded over devices, only one device has the last token. The other
        devices have zeros, and a sum over these devices gives the token to all of them.
        """
        axes, rows = sharding.token_axes(), jnp.arange(len(context.lengths))
        place = context.lengths - 1
        if z.shape[0] < len(rows):  # All rows have been flattened into a single row.
            place, rows = place + rows * context.query_positions.shape[1], 0
        place -= sharding.axis_index(axes) * z.shape[1]
        last = z[rows, jnp.clip(place, 0, z.shape[1] - 1)]
        own = (place >= 0) & (place < z.shape[1])
        return sharding.total(jnp.where(own[:, None, None], last, 0), axes)

    def empty_cache(self, batch: int, capacity: int) -> Cache:
        """Return an empty cache with room for `capacity` tokens in each of `batch` sequences.

        In per-device code, the result is this device's part of the cache.
        """
        caches = tuple(
            tuple(
                sublayer.core.empty_cache(config.repeat, batch, capacity, self.dtype)
                for sublayer in stack
            )
            for stack, config in zip(self.stacks, self.config.stacks, strict=True)
        )
        return Cache(caches, jnp.zeros(batch, jnp.int32))

    def cache_specs(self) -> Cache:
        """Return the partition specs of a cache's arrays, in a tree shaped like the cache."""
        specs = tuple(
            tuple(sublayer.core.cache_specs() for sublayer in stack) for stack in self.stacks
        )
        return Cache(specs, PartitionSpec(sharding.CACHE_RULES["batch"]))

    def _run(
        self,
        tokens: Int[Array, "batch seq"],
        context: cores.Context,
        caches: tuple | None,
        schedule: sharding.Schedule | None = None,
    ) -> tuple[Float[Array, "part local_seq vectors size"], tuple | None, cores.Aux]:
        if schedule is not None:
            z, aux = pipelined.run_layers(self, tokens, context, schedule)
            return z.residual, None, aux
        state, y = layer.start(self.embedding, self.store, tokens, context, self.dtype)
        if self.config.rebuilds_residual and caches is None:
            z, aux = reversible.run_layers(self, state, y, context)
        else:
            run = banked if self.config.mixer.banked else scanned
            z, caches, aux = run.run_layers(self, state, y, context, caches)
        return z.residual, caches, aux


def _check(tokens):
    if not jnp.issubdtype(getattr(tokens, "dtype", None) or object, jnp.integer):
        raise TypeError(f"tokens must be an array of integers, [batch, seq], not {tokens!r:.60}")
    if tokens.ndim != 2:
        raise ValueError(
            f"tokens has shape {list(tokens.shape)}, but must be [batch, seq]; "
            "for a single sequence, pass tokens[None]"
        )


def residual_dtype(config: cfg.ModelConfig) -> jnp.dtype:
    """Return the dtype in which the residual is stored between sublayers."""
    dtype = compute_dtype(config.compute_dtype)
    if config.store.dtype != "auto":
        return jnp.dtype(config.store.dtype)
    if config.rebuilds_residual and dtype == jnp.bfloat16:
        # An int16 residual is as small as a bfloat16 one. Writes to it can be undone exactly, so
        # the residuals that a reversible backward pass rebuilds have no errors.
        return jnp.dtype("int16" if residual.fixed_point.fits_int16(config) else "float32")
    return dtype
