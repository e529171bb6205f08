"""The embedding of tokens and positions, and the unembedding, which computes logits."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

import sharding
from rmt_tpu import config as cfg
from rmt_tpu.layers.caps import soft_capped
from rmt_tpu.layers.data_vectors import concatenate, separate
from rmt_tpu.layers.parameters import Seed, parameter


class Embedding(nnx.Module):
    """The embeddings of tokens, `E[token]`, and of positions, `P[position]`, if these are learned.

    See equations 5, 6, 18 and 19 of the RMT paper.
    """

    def __init__(self, config: cfg.ModelConfig, seed: Seed):
        self.vectors = config.data_shape[0]
        self.multiplier = getattr(config.parametrization, "input_multiplier", 1.0)
        self.scale = config.embedding_scale
        self.tokens = parameter(
            seed / "tokens",
            (config.vocab_size, config.width),
            std=token_std(config),
            role="embedding",
            axes=("vocab", "embed"),
        )
        learned = config.learned_positions
        self.positions = self._positions(config, seed, learned) if learned else None

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        positions: Int[Array, "batch_or_1 seq"],
        dtype: DTypeLike,
    ) -> tuple[
        Float[Array, "batch seq vectors size"], Float[Array, "batch_or_1 seq vectors size"] | None
    ]:
        """Return the tokens' data vectors, and the positions' data vectors if these are learned.

        Data vectors are the vectors that layers write to the residual. The second result is None if
        positions are not learned.
        """
        # Each device looks up its own columns of the table for the tokens of all devices along
        # `fsdp`. The swap then gives each device complete rows for its own tokens. Less data moves
        # between devices than if each device gathered the complete table.
        tokens = sharding.gather(tokens, "fsdp", axis=0)
        rows = self._look_up(self.tokens[...], tokens, dtype, self.scale)
        tokens = separate(sharding.swap(rows, "fsdp", split=0, join=2), self.vectors)
        if self.positions is None:
            return tokens, None
        table = sharding.gather(self.positions[...], "fsdp", axis=1)
        return tokens, separate(self._look_up(table, positions, dtype), self.vectors)

    def _positions(self, config, seed, learned):
        return parameter(
            seed / "positions",
            (learned.max_length, config.width),
            std=config.init_std,
            role="embedding",
            axes=("position", "embed"),
        )

    def _look_up(self, table, indices, dtype, scale=1.0):
        # An index outside the table gives NaN. By default, JAX would clamp an index that is too
        # large to the last row, and count a negative index from the end.
        indices = jnp.where(indices < 0, table.shape[0], indices)
        rows = self.multiplier * scale * jnp.take(table, indices, axis=0, mode="fill")
        return rows.astype(dtype)


class Unembedding(nnx.Module):
    """The unembedding, which computes the logits `W_U z` from the concatenated data vectors z.

    With a soft cap c, a logit x becomes `c tanh(x / c)`.

    See equations 11 and 26 of the RMT paper.

    Args:
      config: the model's config.
      seed: the seed of the weights.
      embedding: the model's embedding. If embeddings are tied, the unembedding uses its weights.
    """

    def __init__(self, config: cfg.ModelConfig, seed: Seed, embedding: Embedding):
        output_multiplier = getattr(config.parametrization, "output_multiplier", 1.0)
        self.multiplier = output_multiplier / config.width_ratio
        self.cap = config.logit_cap
        if config.tied_embeddings:
            # Both modules have the same parameter object, so a decoder's state contains it once.
            self.kernel, self.tokens = None, embedding.tokens
            return
        # The kernel is stored as one 2-D matrix, because XLA would transpose a kernel that has a
        # separate axis for the data vectors.
        self.kernel = parameter(
            seed / "kernel",
            (config.width, config.vocab_size),
            std=_unembedding_std(config),
            role="unembedding",
            axes=("embed", "vocab"),
        )

    @property
    def matrix(self) -> Float[Array, "own_width vocab"]:
        """The transposed matrix W_U; in per-device code, only the rows of this device."""
        return self.tokens[...].T if self.kernel is None else self.kernel[...]

    def __call__(self, z: Float[Array, "*tokens vectors size"]) -> Float[Array, "*tokens vocab"]:
        """Return the logits for each token, in at least float32."""
        logits = jnp.dot(
            concatenate(z),
            sharding.gather(self.matrix.astype(z.dtype), "fsdp", axis=0),
            preferred_element_type=jnp.result_type(z, jnp.float32),
        )
        return self.scaled(logits)

    def scaled(self, products: Float[Array, "*tokens vocab"]) -> Float[Array, "*tokens vocab"]:
        """Convert the products `W_U z` to logits: apply muP's factor and the soft cap."""
        return soft_capped(self.multiplier * products, self.cap)


def token_std(config: cfg.ModelConfig) -> float:
    """Return the initial standard deviation of token embeddings, before they are multiplied.

    Tied embeddings are also the weights of the unembedding, and start like these.
    """
    return _unembedding_std(config) if config.tied_embeddings else config.init_std


def _unembedding_std(config: cfg.ModelConfig) -> float:
    """Return the initial standard deviation of W_U.

    In muP, it depends only on the base model's width, because the logits are already divided by the
    ratio of this model's width to that width.
    """
    return config.init_std * (config.width / config.width_ratio) ** -0.5
