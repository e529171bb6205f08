"""The interface of cores: `y = core(z)`, what decoding keeps, and how a core is undone.

A core is given which token may see which (`Context`) and its number in depth. Of the residual it
knows only what its site has read (`Read`). Its config says, by ports, what it reads and writes, and
also what it costs.

Besides what it writes a core may return *scalars* (`Aux`), which are added up over depth. Each is a
sum over this device's own tokens, so that devices, microbatches and accumulated parts add up to the
whole batch. The scalar named "loss" is added to the objective; the others are only reported. A
model whose cores have none has nothing of this in its program.
"""

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Shaped

import sharding
from pallas_kernels import Slot, placed
from pallas_kernels.target import target
from rmt_tpu import config as cfg
from rmt_tpu.layers import choices
from rmt_tpu.layers.data_vectors import HeadsLayout, Read, concatenate, separate
from rmt_tpu.layers.stacks import Index

# The cache of a core in all repeats of its stack: a tree of arrays, () if decoding needs nothing.
Cache = Any
# Scalars by the names in `aux` of the core's config, at least float32; {} for most cores.
Aux = dict[str, Float[Array, ""]]


class Context(NamedTuple):
    """The tokens that each token may see; the same for all sublayers of a step.

    Attributes:
      query_positions: the positions of the tokens.
      segment_ids: the documents of tokens, which see only their own; None is one document a row.
      mask: an explicit mask in place of "causal within segments", where the caller gives positions
        that are not the order in the row.
      lengths: the lengths of rows that are padded at their ends; None if no row is padded.
      start: how many tokens the caches hold of each row; None without caches, or if they are new.
    """

    query_positions: Int[Array, "batch_or_1 seq"]
    segment_ids: Int[Array, "batch seq"] | None = None
    mask: Bool[Array, "batch_or_1 seq seq"] | None = None
    lengths: Int[Array, " batch"] | None = None
    start: Int[Array, " batch"] | None = None


def causal(
    length: int,
    positions: Int[Array, "batch_or_1 seq"] | None,
    segment_ids: Int[Array, "batch seq"] | None,
) -> Context:
    """Return a context where each token sees itself and what precedes it in its segment."""
    order = jnp.arange(length)
    if positions is None:
        return Context(order[None], segment_ids)
    mask = (order[:, None] >= order[None, :])[None]
    if segment_ids is not None:
        mask = mask & (segment_ids[:, :, None] == segment_ids[:, None, :])
    return Context(positions, segment_ids, mask)


def cached(start: Int[Array, " batch"], new: int) -> Context:
    """Return the context of `new` tokens a row from position `start` on.

    Each token sees itself and what is before it.
    """
    return Context(start[:, None] + jnp.arange(new), start=start)


def put_tokens(
    cache: Float[Array, "repeat batch capacity size"],
    new: Float[Array, "batch new size"],
    layer: Index,
    start: Int[Array, " batch"] | None,
) -> Float[Array, "repeat batch capacity size"]:
    """Return a cache with new tokens of one layer put after the `start` tokens of each row.

    Tokens for which there is no room are left out. Loops that carry the cache copy nothing: heads
    and their size are one axis, because TPUs would otherwise copy the cache to another layout.
    """
    new = new.astype(cache.dtype)
    if start is None:
        zero = jnp.zeros_like(layer)
        return jax.lax.dynamic_update_slice(cache, new[None], (layer, zero, zero, zero))
    rows, places = jnp.arange(new.shape[0])[:, None], start[:, None] + jnp.arange(new.shape[1])
    return cache.at[layer, rows, places].set(new, mode="drop", unique_indices=True)


def joined(x: Shaped[Array, "_ _ *rest"], context: Context) -> Shaped[Array, "_ _ *rest"]:
    """Flatten the new tokens of all rows to one padded row, if a mesh divides tokens.

    With one new token a row there would be nothing to divide. Elsewhere, and for tokens that do not
    follow a cache, x stays as it is.
    """
    devices = sharding.axis_size(sharding.token_axes())
    if context.start is None or devices == 1:
        return x
    x = x.reshape(1, -1, *x.shape[2:])
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % devices), *[(0, 0)] * (x.ndim - 2)])


def apart(x: Shaped[Array, "_ _ *rest"], context: Context) -> Shaped[Array, "_ _ *rest"]:
    """Undo `joined`."""
    if context.start is None or sharding.axis_size(sharding.token_axes()) == 1:
        return x
    rows, new = context.query_positions.shape
    return x[:, : rows * new].reshape(rows, new, *x.shape[2:])


def logit_scale(config: cfg.ModelConfig, core: cfg.Attention | cfg.Mla) -> float:
    """Return the scale of products of queries and keys: `1 / sqrt(size)`.

    In muP it is `attention_multiplier * sqrt(base size) / size`.
    """
    size = core.query_dim
    match config.parametrization:
        case cfg.MuP(attention_multiplier=multiplier):
            return multiplier * config.base_core(core).query_dim ** 0.5 / size
        case cfg.Standard():
            return size**-0.5


def other_axes() -> tuple[str, ...]:
    """Return the axes of tokens except `tensor`.

    They divide heads too, after `tensor`, which alone divides the weights that heads are read with.
    """
    return tuple(axis for axis in sharding.token_axes() if axis != "tensor")


def to_tokens(
    y: Float[Array, "batch seq heads head_dim"], layout: HeadsLayout, axes: tuple[str, ...]
) -> Float[Array, "batch y_seq y_heads head_dim"]:
    """Exchange own heads of all tokens, over the axes given, for what the store writes."""
    y = sharding.swap(y, axes, split=1, join=2)
    if not layout.projected:  # all heads of own tokens
        y = sharding.swap(y, "tensor", split=1, join=2)
    return y


def ring_axis(heads: int, axes: tuple[str, ...]) -> str | None:
    """Return the axis over which tokens stay divided, or None if `axes` divide the heads."""
    return "sequence" if heads % sharding.axis_size(axes) else None


def own_tokens(x: Shaped[Array, "batch seq *rest"], ring: str | None) -> Shaped[Array, "..."]:
    """Return this device's own tokens of x, which has all tokens on every device."""
    return x if ring is None else sharding.own_part(x, ring, axis=1)


def all_tokens(x: Shaped[Array, "batch seq *rest"], ring: str | None) -> Shaped[Array, "..."]:
    """Gather the own tokens of every device: the inverse of `own_tokens`."""
    return x if ring is None else sharding.gather(x, ring, axis=1)


class Core(nnx.Module):
    """A core with no cache and no scalars, which is undone by running it again.

    Attributes:
      name: the name of its scope in a compiled program, by which reports group it.
    """

    name: ClassVar[str]

    def __call__(
        self, z: Read, context: Context, index: Index
    ) -> Float[Array, "batch y_seq vectors size"]:
        """Return what is written, from what was read, in z's dtype.

        Args:
          z: what the site has read, as the core's port asks.
          context: which token may see which.
          index: how many sublayers are before it.
        """
        raise NotImplementedError  # every core overrides this method, and the methods below call it

    def with_aux(
        self, z: Read, context: Context, index: Index
    ) -> tuple[Float[Array, "batch y_seq vectors size"], Aux]:
        """Run the core, and also return its scalars: sums over own tokens.

        Decoding has no use for the scalars.
        """
        return self(z, context, index), {}

    def forward(
        self, z: Read, context: Context, index: Index, to: Slot
    ) -> tuple[Float[Array, "count batch y_seq vectors size"], Aux, Any]:
        """Run the core for a schedule that keeps what it writes.

        Returns:
          The stack of `to` with y in its slot, the core's scalars, and what `pull_back` needs
          besides z and y.
        """
        y, aux = self.with_aux(z, context, index)
        if not choices.outputs_in_place(target()).value:
            return placed(jax.lax.optimization_barrier(y), to), aux, ()
        # y is one vector a token here: the product that makes it is then written directly to its
        # slot.
        long = placed(concatenate(y), Slot(concatenate(to.stack), to.index))
        return separate(long, y.shape[2]), aux, ()

    def pull_back(
        self,
        z: Read,
        y: Slot,
        saved: Any,
        context: Context,
        index: Index,
        d_y: Float[Array, "batch y_seq vectors size"],
        d_aux: Aux,
    ) -> tuple[Any, Read]:
        """Return the cotangents of the core's parameters, as a pure dict, and of z.

        `d_aux` has the cotangents of this core's scalars, together with those of the model's other
        cores.
        """
        graphdef, parameters = nnx.split(self, nnx.Param)

        def run(parameters: Any, z: Read) -> tuple[Array, Aux]:
            return nnx.merge(graphdef, parameters).with_aux(z, context, index)

        (_, aux), pullback = jax.vjp(run, nnx.to_pure_dict(parameters), z)
        return pullback((d_y, {name: d_aux[name].astype(x.dtype) for name, x in aux.items()}))

    def empty_cache(self, repeat: int, batch: int, capacity: int, dtype: jnp.dtype) -> Cache:
        """Return a cache for `capacity` tokens of `batch` sequences, in all the stack's repeats."""
        return ()

    def cache_specs(self) -> Any:
        """Return the axes of a mesh over which each array of the cache is divided."""
        return ()

    def step(
        self, z: Read, context: Context, index: Index, cache: Cache, layer: Index
    ) -> tuple[Float[Array, "batch y_seq vectors size"], Cache]:
        """Run the core on the tokens that follow those in the cache, and add them to the cache.

        `layer` is the index of this core's repeat in its stack.
        """
        return self(z, context, index), cache
