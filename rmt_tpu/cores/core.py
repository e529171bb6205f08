"""What a sublayer computes: `y = core(z)`, with what decoding keeps, and how it is undone.

A core is told which token may see which (`Context`) and its number in depth; of the residual it
knows what its site has read (`Read`), nothing else. What it reads and writes its config says, by
ports, and there too is what it costs.
"""

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from rmt_tpu import config as cfg
from rmt_tpu.layers.data_vectors import Read
from rmt_tpu.layers.stacks import Index

# Of one core, stacked over its stack's repeats: a tree of arrays, () if decoding needs nothing.
Cache = Any


class Context(NamedTuple):
    """Who may see whom; the same for all sublayers of a step.

    Attributes:
      query_positions: of the tokens.
      segment_ids: tokens see only their own document; None is one document a row.
      mask: in place of "causal within segments" where positions are not those of the rows.
      start: how many tokens the caches have; None without caches.
    """

    query_positions: Int[Array, "batch_or_1 seq"]
    segment_ids: Int[Array, "batch seq"] | None = None
    mask: Bool[Array, "batch_or_1 seq seq"] | None = None
    start: Int[Array, ""] | None = None


def causal(
    length: int,
    positions: Int[Array, "batch_or_1 seq"] | None,
    segment_ids: Int[Array, "batch seq"] | None,
) -> Context:
    """Each token sees itself and what is before it in its own document (segment)."""
    order = jnp.arange(length)
    if positions is None:
        return Context(order[None], segment_ids)
    mask = (order[:, None] >= order[None, :])[None]
    if segment_ids is not None:
        mask = mask & (segment_ids[:, :, None] == segment_ids[:, None, :])
    return Context(positions, segment_ids, mask)


def cached(start: Int[Array, ""], new: int) -> Context:
    """`new` tokens from position `start` on; each sees itself and what is before it."""
    return Context(start + jnp.arange(new)[None], start=start)


def logit_scale(config: cfg.ModelConfig, size: int) -> float:
    """Of queries and keys of a size: `1 / sqrt(size)`.

    In muP `attention_multiplier * sqrt(base_head_dim) / size`.
    """
    match config.parametrization:
        case cfg.MuP(attention_multiplier=multiplier, base_head_dim=base_head_dim):
            return multiplier * base_head_dim**0.5 / size
        case cfg.Standard():
            return size**-0.5


class Core(nnx.Module):
    """A core with no cache, that is undone by running it again.

    Attributes:
      name: of its scope in a compiled program, by which reports group it.
    """

    name: ClassVar[str]

    def __call__(
        self, z: Read, context: Context, index: Index
    ) -> Float[Array, "batch y_seq vectors size"]:
        """What is written, from what was read, in z's dtype.

        Args:
          z: as the core's port asks.
          context: who may see whom.
          index: how many sublayers are before it.
        """
        raise NotImplementedError

    def forward(
        self, z: Read, context: Context, index: Index
    ) -> tuple[Float[Array, "batch y_seq vectors size"], Any]:
        """The same, and what `pull_back` needs beside z and y not to compute all again."""
        return self(z, context, index), ()

    def pull_back(
        self,
        z: Read,
        y: Float[Array, "batch y_seq vectors size"],
        saved: Any,
        context: Context,
        index: Index,
        d_y: Float[Array, "batch y_seq vectors size"],
    ) -> tuple[Any, Read]:
        """Cotangents of the core's parameters, as a pure dict, and of z, from that of y."""
        graphdef, parameters = nnx.split(self, nnx.Param)

        def run(parameters: Any, z: Read) -> Array:
            return nnx.merge(graphdef, parameters)(z, context, index)

        _, pullback = jax.vjp(run, nnx.to_pure_dict(parameters), z)
        return pullback(d_y)

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype) -> Cache:
        """For `capacity` tokens of each of `batch` sequences."""
        return ()

    def step(
        self, z: Read, context: Context, index: Index, cache: Cache
    ) -> tuple[Float[Array, "batch y_seq vectors size"], Cache]:
        """The same for the tokens that follow those in the cache, and the cache with them in it."""
        return self(z, context, index), cache
