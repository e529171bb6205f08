"""The compiled functions of an engine: each once per size, on one device or on a mesh.

On a mesh every device has its rows and its heads of the cache, and its shard of each parameter. The
tokens of a prompt are divided over devices, and so are those of a step, one of each row. Where
`data` and `fsdp` divide rows, a single row that is read by itself is computed on each of these
devices, and the device that owns the slot keeps it.
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

RANKS = 5  # the number of likeliest tokens that can be reported for each place
_SCORED = 64  # tokens of a prompt whose logits are in memory at a time

_BATCH, _TOKENS = sharding.CACHE_RULES["batch"], sharding.CACHE_RULES["tokens"]
_WHOLE = PartitionSpec()


class Scores(NamedTuple):
    """The model's own scores of tokens in a row, before temperature, in nats.

    Attributes:
      log_probabilities: the log-probability of each token.
      likeliest: for each place, the RANKS likeliest tokens in descending order, with their
        log-probabilities; [] if they were not asked for.
    """

    log_probabilities: list[float]
    likeliest: list[dict[int, float]]


class Chosen(NamedTuple):
    """The chosen token of each row.

    Attributes:
      token: the chosen tokens.
      log_probability: their log-probabilities by the model itself.
      likeliest: the likeliest tokens in their places; 0 if they are not asked for.
      log_probabilities: the log-probabilities of the likeliest tokens.
    """

    token: Int[Array, "*steps batch"]
    log_probability: Float[Array, "*steps batch"]
    likeliest: Int[Array, "*steps batch ranks"]
    log_probabilities: Float[Array, "*steps batch ranks"]

    def scores(self, at: tuple, ranked: bool) -> Scores:
        """Return the scores of one row's tokens, at the index `at`, on the host."""
        values = [np.asarray(x[at]).tolist() for x in self[1:]]
        likeliest = [dict(zip(*ranks, strict=True)) for ranks in zip(*values[1:], strict=True)]
        return Scores(values[0], likeliest if ranked else [])


class Rows(NamedTuple):
    """The state of a batch in the middle of its texts.

    Attributes:
      cache: the cache of all rows.
      token: the newest token of each row, which is not in the cache yet.
      left: how many tokens each row may still have; 0 if it has ended.
      seen: which tokens each row's prompt and text have.
    """

    cache: Cache
    token: Int[Array, " batch"]
    left: Int[Array, " batch"]
    seen: Bool[Array, "batch vocab"]


class Ends(NamedTuple):
    """The tokens that end a text, and the tokens that may be in one.

    Attributes:
      stop: tokens, any of which ends a text.
      known: only tokens below this one have a text; a model may have more, which are never chosen.
      gaps: tokens below `known` that have no text and end no text.
    """

    stop: Int[Array, " stops"]
    known: Int[Array, ""]
    gaps: Int[Array, " gaps"] = np.zeros(0, np.int32)

    def at(self, token: Int[Array, " batch"]) -> Bool[Array, " batch"]:
        """Return whether each row's text ends with its token."""
        return jnp.any(token[:, None] == self.stop, axis=-1)

    def possible(self, logits: Float[Array, "batch vocab"]) -> Float[Array, "batch vocab"]:
        """Return the logits with -inf for tokens that have no text and do not end one."""
        tokens = jnp.arange(logits.shape[-1])
        logits = jnp.where((tokens < self.known) | self.at(tokens), logits, -jnp.inf)
        return logits.at[:, self.gaps].set(-jnp.inf) if len(self.gaps) else logits


class Asked(NamedTuple):
    """A prompt's length, how its tokens are chosen, and how many there may be."""

    lengths: Int[Array, "1"]
    how: Choice
    left: Int[Array, ""]
    ends: Ends
    ranked: Bool[Array, ""]


def mesh_of(decoder: Decoder) -> Mesh | None:
    """Return the mesh that a decoder's parameters are divided over; None for one device."""
    placed = [getattr(x, "sharding", None) for x in jax.tree.leaves(nnx.state(decoder))]
    if all(isinstance(s, NamedSharding) and s.mesh.size > 1 for s in placed):
        return placed[0].mesh
    return None


class Model(NamedTuple):
    """The key that programs are compiled for, in addition to sizes.

    On one device all fields but the first are empty.

    Attributes:
      graphdef: the graph definition of the decoder.
      mesh: the mesh of the devices.
      parameters: how the mesh divides each parameter, in the order of their tree.
      cache: how the mesh divides each array of a cache.
    """

    graphdef: nnx.GraphDef
    mesh: Mesh | None = None
    parameters: tuple[PartitionSpec, ...] = ()
    cache: Cache | None = None

    @classmethod
    def of(cls, decoder: Decoder) -> tuple["Model", nnx.State]:
        """Return the model and parameters of a decoder whose parameters lie where they are used."""
        graphdef, params = nnx.split(decoder)
        if (mesh := mesh_of(decoder)) is None:
            return cls(graphdef), params
        specs = tuple(x.sharding.spec for x in jax.tree.leaves(params))
        cache = jax.tree.map(partial(sharding.used_axes, mesh), decoder.cache_specs())
        return cls(graphdef, mesh, specs, cache), params

    @property
    def rows(self) -> Rows | None:
        """The partition specs of a `Rows`."""
        return self.mesh and Rows(self.cache, *3 * [self.over(_BATCH)])

    def over(self, *axes: tuple[str, ...] | None) -> PartitionSpec | None:
        """Return the partition spec of an array whose axes are divided over `axes` of the mesh."""
        return self.mesh and sharding.used_axes(self.mesh, axes)

    def devices(self, axis: str) -> int:
        """Return how many devices divide a logical axis."""
        if self.mesh is None:
            return 1
        return int(np.prod([self.mesh.shape[name] for name in sharding.CACHE_RULES[axis]]))

    def placed(self, function: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        """Return `function` as one that every device runs on its shards."""
        if self.mesh is None:
            return function
        return sharding.per_device(function, self.mesh, in_specs, out_specs, tokens=_TOKENS)

    def run(
        self, function: Callable, params: nnx.State, given: tuple, in_specs: tuple, out_specs: Any
    ) -> Any:
        """Call `function(decoder, *given)` on every device, with its shards."""
        leaves, tree = jax.tree.flatten(params)

        def merged(leaves, *given):
            decoder = nnx.merge(self.graphdef, tree.unflatten(leaves))
            return kernels.as_configured(function)(decoder, *given)

        specs = (list(self.parameters), *in_specs)
        return self.placed(merged, specs, out_specs)(leaves, *given)


@partial(jax.jit, static_argnames=("model", "rows", "capacity"))
def empty_cache(model: Model, params: nnx.State, rows: int, capacity: int) -> Cache:
    """Return an empty cache with `rows` rows per device."""
    make = lambda decoder: decoder.empty_cache(rows, capacity)
    return model.run(make, params, (), (), model.cache)


@partial(jax.jit, static_argnames=("model", "rows", "capacity"))
def empty_rows(model: Model, params: nnx.State, rows: int, capacity: int) -> Rows:
    """Return `rows` rows per device, all of which have ended."""

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
    """Read a prompt in one pass, and return its row and its first new token."""

    def read(decoder, tokens, asked):
        cache = decoder.empty_cache(1, tokens.shape[1])
        logits, cache = decoder.prefill(tokens, asked.lengths, cache)
        of_prompt = jnp.arange(tokens.shape[1]) < asked.lengths[0]
        # Padding gets an index outside the vocabulary, where nothing is written.
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
    """Return the logits after a part of a prompt, and the cache with that part."""
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
    """Return how likely each token of a prompt but the first is, given the tokens before it.

    Place i has the score of token i + 1, so the last place has no meaning. Only few tokens have
    their logits in memory at a time.
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
    """Put a row into a slot, in place of the row that had it."""

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
    """Return the rows with a cache for `capacity` tokens."""

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
    """Generate `count` more tokens of the rows in `used`; the token is -1 where a row has ended."""

    def run(decoder, rows, used, how, ends, ranked):
        def step(rows, _):
            running = rows.left > 0
            # A row that has ended decodes at position 0: past its end there may be no learned
            # position.
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
    # The log-probabilities of all tokens would be another array as large as the logits.
    log_sum = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    of_token = (jnp.take_along_axis(logits, token[:, None], axis=-1) - log_sum)[:, 0]
    ranks = min(RANKS, logits.shape[-1])
    none = jnp.zeros((len(token), ranks), jnp.int32), jnp.zeros((len(token), ranks), jnp.float32)

    def best():
        values, tokens = jax.lax.top_k(logits, ranks)
        return tokens.astype(jnp.int32), values - log_sum

    # The ranks are seldom asked for, and top_k over a whole vocabulary takes long.
    return Chosen(token, of_token, *jax.lax.cond(ranked, best, lambda: none))
