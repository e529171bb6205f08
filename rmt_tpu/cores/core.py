"""What a sublayer computes: `y = core(z)`, with what decoding keeps, and how it is undone.

A core is told which token may see which (`Context`) and its number in depth; of the residual it
knows what its site has read (`Read`), nothing else. What it reads and writes its config says, by
ports, and there too is what it costs.

Beside what it writes a core may give *scalars* (`Aux`), which are added up over depth. Each is a
sum over this device's own tokens, so that devices, microbatches and accumulated parts add up to the
whole batch. That named "loss" is added to the objective; the others are for people. A model whose
cores have none has nothing of this in its program.
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

# Of a core in all repeats of its stack: a tree of arrays, () if decoding needs nothing.
Cache = Any
# By the names that the core's config has as `aux`, at least float32; {} for most.
Aux = dict[str, Float[Array, ""]]


class Context(NamedTuple):
    """Who may see whom; the same for all sublayers of a step.

    Attributes:
      query_positions: of the tokens.
      segment_ids: tokens see only their own document; None is one document a row.
      mask: in place of "causal within segments" where positions are not those of the rows.
      lengths: of rows that are filled up at their ends; None if none is.
      start: how many tokens the caches have of each row; None without caches, or if those are new.
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
    """Each token sees itself and what is before it in its own document (segment)."""
    order = jnp.arange(length)
    if positions is None:
        return Context(order[None], segment_ids)
    mask = (order[:, None] >= order[None, :])[None]
    if segment_ids is not None:
        mask = mask & (segment_ids[:, :, None] == segment_ids[:, None, :])
    return Context(positions, segment_ids, mask)


def cached(start: Int[Array, " batch"], new: int) -> Context:
    """`new` tokens a row from position `start` on; each sees itself and what is before it."""
    return Context(start[:, None] + jnp.arange(new), start=start)


def put_tokens(
    cache: Float[Array, "repeat batch capacity size"],
    new: Float[Array, "batch new size"],
    layer: Index,
    start: Int[Array, " batch"] | None,
) -> Float[Array, "repeat batch capacity size"]:
    """A cache with new tokens of one layer behind the `start` that each row has.

    What has no room is left out. In loops that carry the cache nothing is copied: sizes are one
    axis and not heads and their size, for else it would be laid out anew on TPUs.
    """
    new = new.astype(cache.dtype)
    if start is None:
        zero = jnp.zeros_like(layer)
        return jax.lax.dynamic_update_slice(cache, new[None], (layer, zero, zero, zero))
    rows, places = jnp.arange(new.shape[0])[:, None], start[:, None] + jnp.arange(new.shape[1])
    return cache.at[layer, rows, places].set(new, mode="drop", unique_indices=True)


def joined(x: Shaped[Array, "_ _ *rest"], context: Context) -> Shaped[Array, "_ _ *rest"]:
    """Tokens that follow those in the caches, of all rows as of one, with what fills it up.

    Where a mesh divides tokens: of one new token a row there would be nothing to divide. Elsewhere
    they stay as they are.
    """
    devices = sharding.axis_size(sharding.token_axes())
    if context.start is None or devices == 1:
        return x
    x = x.reshape(1, -1, *x.shape[2:])
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % devices), *[(0, 0)] * (x.ndim - 2)])


def apart(x: Shaped[Array, "_ _ *rest"], context: Context) -> Shaped[Array, "_ _ *rest"]:
    """`joined` undone."""
    if context.start is None or sharding.axis_size(sharding.token_axes()) == 1:
        return x
    rows, new = context.query_positions.shape
    return x[:, : rows * new].reshape(rows, new, *x.shape[2:])


def logit_scale(config: cfg.ModelConfig, core: cfg.Attention | cfg.Mla) -> float:
    """Of queries and keys: `1 / sqrt(size)`.

    In muP `attention_multiplier * sqrt(base size) / size`.
    """
    size = core.query_dim
    match config.parametrization:
        case cfg.MuP(attention_multiplier=multiplier):
            return multiplier * config.base_core(core).query_dim ** 0.5 / size
        case cfg.Standard():
            return size**-0.5


def other_axes() -> tuple[str, ...]:
    """Axes that divide heads after `tensor`, which alone divides what heads are read with."""
    return tuple(axis for axis in sharding.token_axes() if axis != "tensor")


def to_tokens(
    y: Float[Array, "batch seq heads head_dim"], layout: HeadsLayout, axes: tuple[str, ...]
) -> Float[Array, "batch y_seq y_heads head_dim"]:
    """From own heads of all tokens, those of the axes given, to what the store writes."""
    y = sharding.swap(y, axes, split=1, join=2)
    if not layout.projected:  # all heads of own tokens
        y = sharding.swap(y, "tensor", split=1, join=2)
    return y


def ring_axis(heads: int, axes: tuple[str, ...]) -> str | None:
    """The axis of the mesh over which tokens stay divided; None if these axes divide the heads."""
    return "sequence" if heads % sharding.axis_size(axes) else None


def own_tokens(x: Shaped[Array, "batch seq *rest"], ring: str | None) -> Shaped[Array, "..."]:
    """Of what all devices have of all tokens."""
    return x if ring is None else sharding.own_part(x, ring, axis=1)


def all_tokens(x: Shaped[Array, "batch seq *rest"], ring: str | None) -> Shaped[Array, "..."]:
    """`own_tokens` of every device."""
    return x if ring is None else sharding.gather(x, ring, axis=1)


class Core(nnx.Module):
    """A core with no cache and no scalars, that is undone by running it again.

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
        raise NotImplementedError  # every core has its own; what follows is built on it

    def with_aux(
        self, z: Read, context: Context, index: Index
    ) -> tuple[Float[Array, "batch y_seq vectors size"], Aux]:
        """The same, and the core's scalars: sums over own tokens. Decoding has no use for them."""
        return self(z, context, index), {}

    def forward(
        self, z: Read, context: Context, index: Index, to: Slot
    ) -> tuple[Float[Array, "count batch y_seq vectors size"], Aux, Any]:
        """The same: a stack with y where it is to be, and what `pull_back` needs beside z and y."""
        y, aux = self.with_aux(z, context, index)
        if not choices.outputs_in_place(target()).value:
            return placed(jax.lax.optimization_barrier(y), to), aux, ()
        # As one vector a token: a product that makes it is then made in its place.
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
        """Cotangents of the core's parameters, as a pure dict, and of z, from those given.

        Those of its scalars are in `d_aux`, with those of the model's other cores.
        """
        graphdef, parameters = nnx.split(self, nnx.Param)

        def run(parameters: Any, z: Read) -> tuple[Array, Aux]:
            return nnx.merge(graphdef, parameters).with_aux(z, context, index)

        (_, aux), pullback = jax.vjp(run, nnx.to_pure_dict(parameters), z)
        return pullback((d_y, {name: d_aux[name].astype(x.dtype) for name, x in aux.items()}))

    def empty_cache(self, repeat: int, batch: int, capacity: int, dtype: jnp.dtype) -> Cache:
        """For `capacity` tokens of each of `batch` sequences, in all repeats of the stack."""
        return ()

    def cache_specs(self) -> Any:
        """Over which axes of a mesh each of these arrays is divided."""
        return ()

    def step(
        self, z: Read, context: Context, index: Index, cache: Cache, layer: Index
    ) -> tuple[Float[Array, "batch y_seq vectors size"], Cache]:
        """The same for the tokens that follow those in the cache, and the cache with them in it.

        `layer` is which of the stack's repeats this is.
        """
        return self(z, context, index), cache
