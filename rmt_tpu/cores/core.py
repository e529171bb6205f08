"""The interface of cores: the forward pass `y = core(z)`, its backward pass, and caches.

A core is the function of one sublayer, such as attention or a feed-forward layer. The site before
a core (the place where the sublayer accesses the residual) reads the core's input z from the
residual, as a `Read`. A core also receives the rule for which tokens may attend to which
(`Context`) and the number of earlier sublayers. The core's config states its cost. It also has two
ports, which describe the vectors that the core reads and writes.

In addition to its output, a core may return *scalars* (`Aux`), which are summed over depth. Each
scalar is a sum over this device's tokens, so that sums over devices, microbatches and accumulation
steps give the value for the whole batch. The scalar named "loss" is added to the objective; the
others are only reported. If no core returns scalars, the compiled program contains nothing for
them.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Shaped

import sharding
from pallas_kernels import StackSlice, write_slice
from pallas_kernels.target import target
from rmt_tpu import config as cfg
from rmt_tpu.layers import choices
from rmt_tpu.layers.data_vectors import HeadsLayout, Read, concatenate, separate
from rmt_tpu.layers.kept import Kept, recomputed, with_arguments, without_arguments
from rmt_tpu.layers.stacks import Index

# The decoding cache of a core is a tree of arrays, or () if the core needs no cache. It covers all
# repeats of the core's stack, which is a sequence of cores that is repeated in depth.
Cache = Any
# A dict from names to the scalars that a core returns in addition to its output. Most cores return
# {}. The names are listed in the field `aux` of the core's config. Scalars are at least float32.
Aux = dict[str, Float[Array, ""]]


class Context(NamedTuple):
    """The rule for which tokens each token may attend to. All sublayers of a step use one context.

    Attributes:
      query_positions: the positions of the tokens.
      segment_ids: the document of each token; tokens attend only within their document. None means
        one document per row.
      mask: an explicit mask that replaces "causal within segments". It is needed if the caller
        gives positions that differ from the order of the tokens in the row.
      lengths: the number of valid tokens per row, for rows padded at the end; None if no row is
        padded.
      start: the number of tokens per row that are already in the caches; None if there are no
        caches, or if the caches are new.
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
    """Return the context of causal attention within segments, without a cache.

    Each token attends to itself and to the earlier tokens of its segment (its document).

    Args:
      length: the number of tokens per row.
      positions: the positions of the tokens; None means their indices in the row.
      segment_ids: the segment of each token; None means that each row is one segment.
    """
    order = jnp.arange(length)
    # A NumPy array could not be indexed by traced numbers, as attention does.
    segment_ids = None if segment_ids is None else jnp.asarray(segment_ids)
    if positions is None:
        return Context(order[None], segment_ids)
    mask = (order[:, None] >= order[None, :])[None]
    if segment_ids is not None:
        mask = mask & (segment_ids[:, :, None] == segment_ids[:, None, :])
    return Context(jnp.asarray(positions), segment_ids, mask)


def cached(start: Int[Array, " batch"], new: int) -> Context:
    """Return the context for `new` tokens per row, whose positions begin at `start`.

    Each token attends to itself and to all earlier tokens.
    """
    return Context(start[:, None] + jnp.arange(new), start=start)


def put_tokens(
    cache: Float[Array, "repeat batch capacity size"],
    new: Float[Array, "batch new size"],
    layer: Index,
    start: Int[Array, " batch"] | None,
) -> Float[Array, "repeat batch capacity size"]:
    """Return the cache with new tokens of one layer written after the first `start` tokens per row.

    Tokens beyond the capacity are dropped. The axis `size` of the cache contains the vectors of all
    heads. With a separate axis for heads, a TPU would store the cache in another layout. A loop
    over layers would then have to copy the cache to update it.
    """
    new = new.astype(cache.dtype)
    if start is None:
        zero = jnp.zeros_like(layer)
        return jax.lax.dynamic_update_slice(cache, new[None], (layer, zero, zero, zero))
    rows, places = jnp.arange(new.shape[0])[:, None], start[:, None] + jnp.arange(new.shape[1])
    return cache.at[layer, rows, places].set(new, mode="drop", unique_indices=True)


def flatten_rows(x: Shaped[Array, "_ _ *rest"], context: Context) -> Shaped[Array, "_ _ *rest"]:
    """Flatten the new tokens of all rows into one row, padded to a multiple of the device count.

    This is for decoding on a mesh that shards tokens. Each row then has a single new token, which
    cannot be divided over devices, but one row with all new tokens can. On one device, or without
    cached tokens, x is returned unchanged.
    """
    devices = sharding.axis_size(sharding.token_axes())
    if context.start is None or devices == 1:
        return x
    x = x.reshape(1, -1, *x.shape[2:])
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % devices), *[(0, 0)] * (x.ndim - 2)])


def unflatten_rows(x: Shaped[Array, "_ _ *rest"], context: Context) -> Shaped[Array, "_ _ *rest"]:
    """Undo `flatten_rows`: split a single padded row into the rows of the batch."""
    if context.start is None or sharding.axis_size(sharding.token_axes()) == 1:
        return x
    rows, new = context.query_positions.shape
    return x[:, : rows * new].reshape(rows, new, *x.shape[2:])


def within_window(
    mask: Bool[Array, "batch_or_1 queries keys"], window: int | None
) -> Bool[Array, "batch_or_1 queries keys"]:
    """Return the mask without the pairs of tokens at a distance of `window` or more.

    The distance is measured by the order of the tokens in the row, not by their positions.
    """
    if window is None:
        return mask
    queries, keys = (jnp.arange(size) for size in mask.shape[1:])
    return mask & (queries[:, None] - keys < window)


def logit_scale(
    config: cfg.ModelConfig, core: cfg.Attention | cfg.Mla, base_core: cfg.Attention | cfg.Mla
) -> float:
    """Return the factor by which attention multiplies the products of queries and keys.

    In the standard parametrisation the factor is `1 / sqrt(size)`, where `size` is the size of a
    query. In muP the factor is `attention_multiplier * sqrt(base size) / size`. If the
    core's config sets a factor, this factor is used instead.

    Args:
      config: the model's config.
      core: the config of the core.
      base_core: the config of the core at the same place in muP's base model.
    """
    if (own := getattr(core, "scale", None)) is not None:
        return own
    size = core.query_dim
    match config.parametrization:
        case cfg.MuP(attention_multiplier=multiplier):
            return multiplier * base_core.query_dim**0.5 / size
        case cfg.Standard():
            return size**-0.5


def other_axes() -> tuple[str, ...]:
    """Return all mesh axes that shard tokens, except `tensor`.

    Attention shards heads first over `tensor`, like the weights that compute the heads, and then
    over the axes that this function returns.
    """
    return tuple(axis for axis in sharding.token_axes() if axis != "tensor")


def to_tokens(
    y: Float[Array, "batch seq heads head_dim"], layout: HeadsLayout, axes: tuple[str, ...]
) -> Float[Array, "batch seq_or_gathered local_heads head_dim"]:
    """Exchange heads for tokens between devices, before the store (the residual) writes the output.

    The input has this device's heads for all tokens. The result has all heads for this device's
    tokens. If the store writes with a matrix that is sharded by heads, heads are exchanged only
    over `axes`.
    """
    y = sharding.swap(y, axes, split=1, join=2)
    if not layout.projected:  # the store writes all heads for this device's tokens
        y = sharding.swap(y, "tensor", split=1, join=2)
    return y


def ring_axis(heads: int, axes: tuple[str, ...]) -> str | None:
    """Return the mesh axis along which attention runs as a ring, or None if there is no ring.

    There is a ring if the devices of `axes` cannot divide the heads evenly. Tokens then stay
    sharded along the axis "sequence", and its devices pass keys and values around the ring.
    """
    return "sequence" if heads % sharding.axis_size(axes) else None


def own_tokens(x: Shaped[Array, "batch seq *rest"], ring: str | None) -> Shaped[Array, "..."]:
    """Return this device's share of the tokens of all devices in `x`.

    `ring` is the mesh axis that shards tokens. If it is None, `x` is returned.
    """
    return x if ring is None else sharding.own_part(x, ring, axis=1)


def all_tokens(x: Shaped[Array, "batch seq *rest"], ring: str | None) -> Shaped[Array, "..."]:
    """Gather the tokens of all devices along the mesh axis `ring`; with None, return `x`."""
    return x if ring is None else sharding.gather(x, ring, axis=1)


def gated(
    y: Float[Array, "batch seq heads head_dim"],
    gates: Float[Array, "batch seq heads head_dim"] | None,
    activation: Literal["sigmoid", "silu"] = "sigmoid",
) -> Float[Array, "batch seq heads head_dim"]:
    """Multiply heads' outputs by the activations of their gates; `gates` None returns y unchanged.

    The activation function is computed in at least float32.
    """
    if gates is None:
        return y
    wide = gates.astype(jnp.result_type(gates, jnp.float32))
    return y * getattr(jax.nn, activation)(wide).astype(y.dtype)


class Core(nnx.Module):
    """The base class of cores.

    By default, a core has no cache and returns no scalars, and its backward pass runs the forward
    pass again, except for what `forward` has kept.

    Attributes:
      name: the name of the core's scope in a compiled program. Reports group operations by scope.
    """

    name: ClassVar[str]

    def __call__(
        self, z: Read, context: Context, index: Index
    ) -> Float[Array, "batch seq_or_gathered vectors size"]:
        """Return the core's output, in z's dtype.

        Args:
          z: the vectors that the site before the core has read from the residual, as described by
            the port `reads` of the core's config.
          context: the rule for which tokens may attend to which.
          index: the number of sublayers before this one.
        """
        raise NotImplementedError  # every subclass overrides this method

    def with_aux(
        self, z: Read, context: Context, index: Index
    ) -> tuple[Float[Array, "batch seq_or_gathered vectors size"], Aux]:
        """Return the core's output, and its scalars as sums over this device's tokens.

        The scalars are needed only in training, for example as terms of the loss.
        """
        return self(z, context, index), {}

    def forward(
        self, z: Read, context: Context, index: Index, to: StackSlice, kept: Kept
    ) -> tuple[Float[Array, "count batch seq_or_gathered vectors size"], Aux, Any]:
        """Run the core for a schedule that keeps the outputs y of all cores in one stacked array.

        Args:
          z, context, index: as in `__call__`.
          to: the place of the output.
          kept: the names of the values that `pull_back` gets and does not compute again.

        Returns:
          The array `to.stack` with the output y written at index `to.index`, the core's scalars,
          and the arrays that `pull_back` needs in addition to z and y.
        """
        if kept.products:
            arguments = self._parameters(), z, context, index
            (y, aux), pull_back = jax.vjp(recomputed(self._run_with(), kept), *arguments)
            saved = without_arguments(pull_back)
        else:
            (y, aux), saved = self.with_aux(z, context, index), ()
        if not choices.outputs_in_place(target(), y.shape[2]).value:
            return write_slice(jax.lax.optimization_barrier(y), to), aux, saved
        # Concatenate the vectors of each token. XLA then writes the result of the last matrix
        # product directly into the stacked array.
        long = write_slice(concatenate(y), StackSlice(concatenate(to.stack), to.index))
        return separate(long, y.shape[2]), aux, saved

    def pull_back(
        self,
        z: Read,
        y: StackSlice,
        saved: Any,
        context: Context,
        index: Index,
        d_y: Float[Array, "batch seq_or_gathered vectors size"],
        d_aux: Aux,
    ) -> tuple[Any, Read]:
        """Return the cotangents of the core's parameters (a pure dict) and the cotangent of z.

        `d_aux` maps the name of each scalar in the model to its cotangent; names that this core
        does not return are ignored.
        """
        run, arguments = self._run_with(), [self._parameters(), z, context, index]
        if isinstance(saved, tuple):  # it is empty
            (_, aux), pull_back = jax.vjp(lambda p, z: run(p, z, context, index), *arguments[:2])
        else:
            _, aux = jax.eval_shape(run, *arguments)
            pull_back = with_arguments(saved, arguments)
        of_aux = {name: d_aux[name].astype(x.dtype) for name, x in aux.items()}
        d_parameters, d_z, *_ = pull_back((d_y, of_aux))
        return d_parameters, d_z

    def _parameters(self) -> Any:
        return nnx.to_pure_dict(nnx.state(self, nnx.Param))

    def _run_with(self) -> Callable[[Any, Read, Context, Index], tuple[Array, Aux]]:
        """Return `with_aux` as a function of the core's parameters, too."""
        graphdef, _ = nnx.split(self, nnx.Param)

        def run(parameters: Any, z: Read, context: Context, index: Index) -> tuple[Array, Aux]:
            return nnx.merge(graphdef, parameters).with_aux(z, context, index)

        return run

    def empty_cache(self, repeat: int, batch: int, capacity: int, dtype: jnp.dtype) -> Cache:
        """Return a cache with room for `capacity` tokens of each of `batch` sequences."""
        return ()

    def cache_specs(self) -> Any:
        """Return, for each array of the cache, the mesh axes over which the array is sharded."""
        return ()

    def step(
        self, z: Read, context: Context, index: Index, cache: Cache, layer: Index
    ) -> tuple[Float[Array, "batch seq_or_gathered vectors size"], Cache]:
        """Run the core on tokens that follow the cached tokens, and add these tokens to the cache.

        `layer` is the index of the current repeat of the stack, which selects a part of the cache.
        """
        return self(z, context, index), cache
