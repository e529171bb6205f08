"""The compiled functions of an engine, each compiled once per size, for one device or a mesh.

On a mesh, every device holds its own rows and heads of the cache, and its shard of each parameter.
The tokens of a prompt are sharded over devices, and so are the tokens of a decode step (one per
row). If the mesh axes `data` and `fsdp` divide rows, a prompt that is read as a single row is
computed redundantly on all of their devices, and the device that owns the slot keeps the result.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

import sharding
from rmt_tpu.decoder import Cache, Decoder
from rmt_tpu.execution import kernels
from rmt_tpu.generation.sampling import Choice, penalized, sample

RANKS = 5  # maximum number of likeliest tokens that can be reported per position
_SCORED = 64  # number of prompt tokens whose logits are in memory at a time

_BATCH, _TOKENS = sharding.CACHE_RULES["batch"], sharding.CACHE_RULES["tokens"]
_WHOLE = PartitionSpec()


class Scores(NamedTuple):
    """The scores of a row's tokens under the model, before temperature is applied, in nats.

    Attributes:
      log_probabilities: the log-probability of each token.
      likeliest: for each position, the RANKS likeliest tokens in descending order, mapped to their
        log-probabilities; [] if they were not requested.
    """

    log_probabilities: list[float]
    likeliest: list[dict[int, float]]


class Chosen(NamedTuple):
    """The token that was chosen for each row, with its scores.

    Attributes:
      token: the chosen tokens.
      log_probability: the log-probability of each chosen token under the model, in nats.
      likeliest: the likeliest tokens at the same position; 0 if they were not requested.
      log_probabilities: the log-probabilities of the likeliest tokens.
    """

    token: Int[Array, "*steps batch"]
    log_probability: Float[Array, "*steps batch"]
    likeliest: Int[Array, "*steps batch ranks"]
    log_probabilities: Float[Array, "*steps batch ranks"]

    def scores(self, at: tuple, ranked: bool) -> Scores:
        """Return the scores of one row's tokens, selected by the index `at`, on the host."""
        values = [np.asarray(x[at]).tolist() for x in self[1:]]
        likeliest = [dict(zip(*ranks, strict=True)) for ranks in zip(*values[1:], strict=True)]
        return Scores(values[0], likeliest if ranked else [])


class Rows(NamedTuple):
    """The state of all rows of a batch during generation.

    Attributes:
      cache: the cache of all rows.
      token: the newest token of each row, which is not in the cache yet.
      left: how many more tokens each row may get; 0 if it has ended.
      seen: for each row, which tokens occur in its prompt and text.
    """

    cache: Cache
    token: Int[Array, " batch"]
    left: Int[Array, " batch"]
    seen: Bool[Array, "batch vocab"]


class Ends(NamedTuple):
    """The tokens that end a text, and the set of tokens that may be generated.

    Attributes:
      stop: the stop tokens; any of them ends a text.
      known: the bound of token ids that have a text. A model may have more ids, which are never
        chosen unless they are stop tokens.
      gaps: ids below `known` that have no text and are no stop tokens.
    """

    stop: Int[Array, " stops"]
    known: Int[Array, ""]
    gaps: Int[Array, " gaps"] = np.zeros(0, np.int32)

    def at(self, token: Int[Array, " batch"]) -> Bool[Array, " batch"]:
        """Return whether each row's token is a stop token."""
        return jnp.any(token[:, None] == self.stop, axis=-1)

    def possible(self, logits: Float[Array, "batch vocab"]) -> Float[Array, "batch vocab"]:
        """Set the logits of tokens that have no text and are no stop tokens to -inf."""
        tokens = jnp.arange(logits.shape[-1])
        logits = jnp.where((tokens < self.known) | self.at(tokens), logits, -jnp.inf)
        return logits.at[:, self.gaps].set(-jnp.inf) if len(self.gaps) else logits


class Asked(NamedTuple):
    """The requested generation for a prompt of one row.

    Attributes:
      lengths: the length of the prompt.
      how: the sampling settings.
      left: the maximum number of new tokens.
      ends: the stop tokens and the tokens that may be generated.
      ranked: whether to report the likeliest tokens.
    """

    lengths: Int[Array, "1"]
    how: Choice
    left: Int[Array, ""]
    ends: Ends
    ranked: Bool[Array, ""]


def mesh_of(decoder: Decoder) -> Mesh | None:
    """Return the mesh over which a decoder's parameters are sharded; None for a single device."""
    placed = [getattr(x, "sharding", None) for x in jax.tree.leaves(nnx.state(decoder))]
    if all(isinstance(s, NamedSharding) and s.mesh.size > 1 for s in placed):
        return placed[0].mesh
    return None


class Model(NamedTuple):
    """The static description of a model that programs are compiled for, together with sizes.

    On a single device, all fields except the first are empty.

    Attributes:
      graphdef: the graph definition of the decoder.
      mesh: the mesh.
      parameters: the partition spec of each parameter, in the order of the tree's leaves.
      cache: the partition spec of each array of a cache.
    """

    graphdef: nnx.GraphDef
    mesh: Mesh | None = None
    parameters: tuple[PartitionSpec, ...] = ()
    cache: Cache | None = None

    @classmethod
    def of(cls, decoder: Decoder) -> tuple["Model", nnx.State]:
        """Return the description and the parameters of a decoder that is already on its devices."""
        graphdef, params = nnx.split(decoder)
        if (mesh := mesh_of(decoder)) is None:
            return cls(graphdef), params
        specs = tuple(x.sharding.spec for x in jax.tree.leaves(params))
        cache = jax.tree.map(partial(sharding.used_axes, mesh), decoder.cache_specs())
        return cls(graphdef, mesh, specs, cache), params

    @property
    def rows(self) -> Rows | None:
        """The partition specs of a `Rows`; None without a mesh."""
        return self.mesh and Rows(self.cache, *3 * [self.over(_BATCH)])

    def over(self, *axes: tuple[str, ...] | None) -> PartitionSpec | None:
        """Return the partition spec of an array, given the mesh axes for each of its axes."""
        return self.mesh and sharding.used_axes(self.mesh, axes)

    def devices(self, axis: str) -> int:
        """Return the number of devices over which a logical axis is sharded."""
        if self.mesh is None:
            return 1
        return int(np.prod([self.mesh.shape[name] for name in sharding.CACHE_RULES[axis]]))

    def placed(self, function: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        """Wrap `function` in `shard_map`: each device runs it on its shards of the arguments."""
        if self.mesh is None:
            return function
        return kernels.per_device(function, self.mesh, in_specs, out_specs, tokens=_TOKENS)

    def run(
        self, function: Callable, params: nnx.State, given: tuple, in_specs: tuple, out_specs: Any
    ) -> Any:
        """Call `function(decoder, *given)` on every device, with its shards of the arguments."""
        leaves, tree = jax.tree.flatten(params)

        def merged(leaves, *given):
            decoder = nnx.merge(self.graphdef, tree.unflatten(leaves))
            return kernels.as_configured(function)(decoder, *given)

        specs = (list(self.parameters), *in_specs)
        return self.placed(merged, specs, out_specs)(leaves, *given)


@partial(jax.jit, static_argnames=("model", "rows", "capacity"))
def empty_cache(model: Model, params: nnx.State, rows: int, capacity: int) -> Cache:
    """Return an empty cache with `rows` rows per device and room for `capacity` tokens."""
    make = lambda decoder: decoder.empty_cache(rows, capacity)
    return model.run(make, params, (), (), model.cache)


@partial(jax.jit, static_argnames=("model", "rows", "capacity"))
def empty_rows(model: Model, params: nnx.State, rows: int, capacity: int) -> Rows:
    """Return `rows` rows per device, all of which count as ended."""

    def make(decoder):
        zeros = jnp.zeros(rows, jnp.int32)
        seen = jnp.zeros((rows, decoder.config.vocab_size), bool)
        return Rows(decoder.empty_cache(rows, capacity), zeros, zeros, seen)

    return model.run(make, params, (), (), model.rows)


@partial(jax.jit, static_argnames="model")
def prefill(
    model: Model,
    params: nnx.State,
    tokens: Int[Array, "1 seq"],
    asked: Asked,
) -> tuple[Rows, Chosen]:
    """Read a prompt in one pass; return its row and its first new token."""

    def read(decoder, tokens, asked):
        cache = decoder.empty_cache(1, tokens.shape[1])
        logits, cache = decoder.prefill(tokens, asked.lengths, cache)
        of_prompt = jnp.arange(tokens.shape[1]) < asked.lengths[0]
        # Padding gets an index outside the vocabulary, so that the scatter drops it.
        places = jnp.where(of_prompt, tokens[0], logits.shape[1])
        seen = jnp.zeros(logits.shape, bool).at[0, places].set(True, mode="drop")
        return _begun(logits, cache, seen, asked)

    out_specs = model.rows, model.over(_BATCH)
    return model.run(read, params, (tokens, asked), (_WHOLE, _WHOLE), out_specs)


@partial(jax.jit, static_argnames="model", donate_argnames="cache")
def extend(
    model: Model,
    params: nnx.State,
    tokens: Int[Array, "1 new"],
    lengths: Int[Array, "1"],
    cache: Cache,
) -> tuple[Float[Array, "rows vocab"], Cache]:
    """Read a part of a prompt; return the logits of its last token, and the extended cache."""
    specs = (_WHOLE, _WHOLE, model.cache), (model.over(_BATCH), model.cache)
    return model.run(Decoder.extend, params, (tokens, lengths, cache), *specs)


@partial(jax.jit, static_argnames="model", donate_argnames="cache")
def first(
    model: Model,
    logits: Float[Array, "rows vocab"],
    cache: Cache,
    seen: Bool[Array, "1 vocab"],
    asked: Asked,
) -> tuple[Rows, Chosen]:
    """Return the row of a prompt that was read in parts, and its first new token."""
    of_rows = model.over(_BATCH)
    specs = (of_rows, model.cache, _WHOLE, _WHOLE), (model.rows, of_rows)
    return model.placed(_begun, *specs)(logits, cache, seen, asked)


def _begun(logits, cache, seen, asked):
    token = _next_token(logits, seen, asked.lengths, asked.how, asked.ends)
    left = jnp.where(asked.ends.at(token), 0, asked.left - 1)
    return Rows(cache, token, left, seen), _chosen(logits, token, asked.ranked)


@partial(jax.jit, static_argnames="model")
def score(
    model: Model,
    params: nnx.State,
    tokens: Int[Array, "1 seq"],
    lengths: Int[Array, "1"],
    ranked: Bool[Array, ""],
) -> Chosen:
    """Return the log-probability of each prompt token but the first, given the tokens before it.

    Position i of the result has the score of token i + 1, so the last position is meaningless.
    Logits are computed for only a few tokens at a time, to save memory.
    """

    def scored(decoder, tokens, lengths, ranked):
        z = decoder.features(tokens, lengths=lengths).z[0]
        following = sharding.own_part(jnp.roll(tokens[0], -1), _TOKENS, axis=0)

        def of_token(given):
            z, token = given
            one = _chosen(decoder.unembedding(z)[None], token[None], ranked)
            return jax.tree.map(lambda x: x[0], one)

        return jax.lax.map(of_token, (z, following), batch_size=_SCORED)

    given = (tokens, lengths, ranked)
    return model.run(scored, params, given, 3 * (_WHOLE,), model.over(_TOKENS))


@partial(jax.jit, static_argnames="model", donate_argnames="rows")
def insert(model: Model, rows: Rows, one: Rows, slot: Int[Array, ""]) -> Rows:
    """Write the row `one` into a slot, replacing the slot's previous row."""

    def put(rows, one, slot):
        count = len(rows.token)
        slot = slot - sharding.axis_index(_BATCH) * count
        own, at = (slot >= 0) & (slot < count), jnp.clip(slot, 0, count - 1)

        def put_one(kept, new, axis):
            start = [at if n == axis else jnp.zeros_like(at) for n in range(kept.ndim)]
            there = jax.lax.dynamic_slice(kept, start, new.shape)
            new = jnp.where(own, new.astype(kept.dtype), there)
            return jax.lax.dynamic_update_slice(kept, new, start)

        of_rows = lambda kept, new: jax.tree.map(partial(put_one, axis=0), kept, new)
        of_cores = jax.tree.map(partial(put_one, axis=1), rows.cache.cores, one.cache.cores)
        cache = Cache(of_cores, of_rows(rows.cache.length, one.cache.length))
        return Rows(cache, *of_rows(rows[1:], one[1:]))

    return model.placed(put, (model.rows, model.rows, _WHOLE), model.rows)(rows, one, slot)


@partial(jax.jit, static_argnames=("model", "capacity"))
def grown(model: Model, params: nnx.State, rows: Rows, capacity: int) -> Rows:
    """Return the rows with a larger cache, which has room for `capacity` tokens."""

    def grow_one(kept, like):
        return jnp.pad(kept, [(0, n - m) for m, n in zip(kept.shape, like.shape, strict=True)])

    def grow(decoder, rows):
        wanted = jax.eval_shape(lambda: decoder.empty_cache(len(rows.token), capacity))
        of_cores = jax.tree.map(grow_one, rows.cache.cores, wanted.cores)
        return rows._replace(cache=rows.cache._replace(cores=of_cores))

    return model.run(grow, params, (rows,), (model.rows,), model.rows)


@partial(jax.jit, static_argnames=("model", "count"), donate_argnames="rows")
def steps(
    model: Model,
    params: nnx.State,
    rows: Rows,
    used: Bool[Array, " batch"],
    how: Choice,
    ends: Ends,
    ranked: Bool[Array, ""],
    count: int,
) -> tuple[Rows, Chosen]:
    """Generate `count` more tokens per row, for the rows selected by `used`.

    The token is -1 where a row has already ended.
    """

    def run(decoder, rows, used, how, ends, ranked):
        def step(rows, _):
            running = rows.left > 0
            # An ended row decodes at position 0, because there may be no learned position after its
            # last token.
            start = jnp.where(running, rows.cache.length, 0)
            logits, cache = decoder.decode(rows.token[:, None], rows.cache._replace(length=start))
            length = rows.cache.length + running
            seen = rows.seen.at[jnp.arange(len(running)), rows.token].set(True)
            token = _next_token(logits[:, 0], seen, length, how, ends)
            left = jnp.where(running & ~ends.at(token), rows.left - 1, 0)
            chosen = _chosen(logits[:, 0], token, ranked)
            token_now = jnp.where(running, token, rows.token)
            after = Rows(cache._replace(length=length), token_now, left, seen)
            return after, chosen._replace(token=jnp.where(running, token, -1))

        return jax.lax.scan(step, rows._replace(left=rows.left * used), length=count)

    in_specs = (model.rows, model.over(_BATCH), model.over(_BATCH), _WHOLE, _WHOLE)
    out_specs = model.rows, model.over(None, _BATCH)
    return model.run(run, params, (rows, used, how, ends, ranked), in_specs, out_specs)


def _next_token(logits, seen, positions, how, ends):
    logits = ends.possible(penalized(logits, seen, how))
    return sample(logits, positions, how).astype(jnp.int32)


def _chosen(
    logits: Float[Array, "batch vocab"], token: Int[Array, " batch"], ranked: Bool[Array, ""]
) -> Chosen:
    logits = logits.astype(jnp.float32)
    # Compute only the chosen token's log-probability: computing all of them would take another
    # array as large as the logits.
    log_sum = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    of_token = (jnp.take_along_axis(logits, token[:, None], axis=-1) - log_sum)[:, 0]
    ranks = min(RANKS, logits.shape[-1])
    none = jnp.zeros((len(token), ranks), jnp.int32), jnp.zeros((len(token), ranks), jnp.float32)

    def best():
        values, tokens = jax.lax.top_k(logits, ranks)
        return tokens.astype(jnp.int32), values - log_sum

    # Likeliest tokens are seldom requested, and top_k over a whole vocabulary is slow.
    return Chosen(token, of_token, *jax.lax.cond(ranked, best, lambda: none))
