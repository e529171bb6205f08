"""The token embedding, which makes the first data vectors, and the unembedding to logits."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

import sharding
from rmt_tpu import config as cfg
from rmt_tpu.layers.data_vectors import concatenate, separate
from rmt_tpu.layers.parameters import Seed, parameter


class Embedding(nnx.Module):
    """The embeddings `E[token]` and, if learned, `P[position]` (equations 5, 6, 18 and 19)."""

    def __init__(self, config: cfg.ModelConfig, seed: Seed):
        self.vectors = config.data_shape[0]
        self.multiplier = getattr(config.parametrization, "input_multiplier", 1.0)
        self.tokens = parameter(
            seed / "tokens",
            (config.vocab_size, config.width),
            std=config.init_std,
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
        """Return the data vectors of the tokens, and of the positions (None if not learned)."""
        # Each device looks up its own columns of the table for the tokens of all devices along
        # `fsdp`. The swap then gives each device whole rows for its own tokens. This moves less
        # data than gathering the whole table.
        rows = self._look_up(self.tokens[...], sharding.gather(tokens, "fsdp", axis=0), dtype)
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

    def _look_up(self, table, indices, dtype):
        # An index outside the table gives NaN. By default, JAX would clamp an index that is too
        # large to the last row, and count a negative index from the end.
        indices = jnp.where(indices < 0, table.shape[0], indices)
        rows = self.multiplier * jnp.take(table, indices, axis=0, mode="fill")
        return rows.astype(dtype)


class Unembedding(nnx.Module):
    """The unembedding `W_U z` over the concatenated data vectors (equations 11 and 26)."""

    def __init__(self, config: cfg.ModelConfig, seed: Seed):
        output_multiplier = getattr(config.parametrization, "output_multiplier", 1.0)
        self.multiplier = output_multiplier / config.width_ratio
        # In muP the initial standard deviation is the one for the base model's width, because the
        # multiplier already divides the logits by the width ratio. If the standard deviation were
        # divided as well, the learning rate would have to be divided too.
        base_width = config.width / config.width_ratio
        # The kernel is stored as one 2-D matrix, because the compiler would transpose a kernel that
        # has a separate axis for the vectors.
        self.kernel = parameter(
            seed / "kernel",
            (config.width, config.vocab_size),
            std=config.init_std * base_width**-0.5,
            role="unembedding",
            axes=("embed", "vocab"),
        )

    def __call__(self, z: Float[Array, "*tokens vectors size"]) -> Float[Array, "*tokens vocab"]:
        """Return the logits for each token, in at least float32."""
        logits = jnp.dot(
            concatenate(z),
            sharding.gather(self.kernel.astype(z.dtype), "fsdp", axis=0),
            preferred_element_type=jnp.result_type(z, jnp.float32),
        )
        return self.multiplier * logits
