"""The functions of an engine that are compiled, for one device or a mesh.

Each function is compiled once for every size of its arrays.

On a mesh, every device stores its own rows and heads of the cache, and its shard of each parameter.
The tokens of a prompt are sharded over devices, and so are the tokens of a decode step (one per
row). The mesh axes `data` and `fsdp` divide rows. A prompt is a single row, so all devices along
these axes compute the same result. Only the device with the prompt's slot keeps it.
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
from rmt_tpu.cores.experts import dropless
from rmt_tpu.decoder import Cache, Decoder
from rmt_tpu.execution import kernels
from rmt_tpu.generation.adjustment import (
    LogitChanges,
    change_logits,
    count_tokens,
    no_changes,
)
from rmt_tpu.generation.sampling import Choice, penalize, sample

# Number of likeliest tokens that are computed per position.
RANKS = 5
# Number of prompt tokens whose logits are in memory at a time.
_SCORED = 64

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


class ChosenTokens(NamedTuple):
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
        """Return the scores of one row's tokens as Python lists.

        Args:
          at: the index of the tokens in the arrays.
          ranked: whether the likeliest tokens were requested.
        """
        values = [np.asarray(x[at]).tolist() for x in self[1:]]
        likeliest = [dict(zip(*ranks, strict=True)) for ranks in zip(*values[1:], strict=True)]
        return Scores(values[0], likeliest if ranked else [])


class Rows(NamedTuple):
    """The state of all rows of a batch during generation.

    Attributes:
      cache: the cache of all rows.
      token: the newest token of each row, which is not in the cache yet.
      remaining: how many more tokens each row may get; 0 if its text is finished.
      seen: for each row, which tokens occur in its prompt and text, without the tokens that end
        every text.
      changes: changes to the logits; None if no row needs any. There are separate programs for
        None.
    """

    cache: Cache
    token: Int[Array, " batch"]
    remaining: Int[Array, " batch"]
    seen: Bool[Array, "batch vocab"]
    changes: LogitChanges | None = None


class Ends(NamedTuple):
    """The tokens that end a text, and the set of tokens that may be generated.

    Attributes:
      stop: the stop tokens; each stop token ends a text.
      text_vocab_size: a number above all token ids that have a text. Larger ids are never chosen,
        unless they are stop tokens.
      gaps: ids below `text_vocab_size` that neither have a text nor are stop tokens.
    """

    stop: Int[Array, " stops"]
    text_vocab_size: Int[Array, ""]
    gaps: Int[Array, " gaps"] = np.zeros(0, np.int32)

    def at(self, token: Int[Array, " batch"]) -> Bool[Array, " batch"]:
        """Return whether each row's token is a stop token."""
        return jnp.any(token[:, None] == self.stop, axis=-1)

    def possible(self, logits: Float[Array, "batch vocab"]) -> Float[Array, "batch vocab"]:
        """Set to -inf the logits of tokens that have no text and are not stop tokens."""
        tokens = jnp.arange(logits.shape[-1])
        logits = jnp.where((tokens < self.text_vocab_size) | self.at(tokens), logits, -jnp.inf)
        return logits.at[:, self.gaps].set(-jnp.inf) if len(self.gaps) else logits


class GenerationSettings(NamedTuple):
    """The settings for the continuation of one prompt.

    Attributes:
      lengths: the length of the prompt.
      choice: the sampling settings.
      remaining: the maximum number of new tokens.
      ends: the stop tokens and the tokens that may be generated.
      ranked: whether to report the likeliest tokens.
      changes: changes to the logits; None if the prompt's text needs none.
    """

    lengths: Int[Array, "1"]
    choice: Choice
    remaining: Int[Array, ""]
    ends: Ends
    ranked: Bool[Array, ""]
    changes: LogitChanges | None = None


def mesh_of(decoder: Decoder) -> Mesh | None:
    """Return the mesh over which a decoder's parameters are sharded.

    The result is None if they are on a single device.
    """
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(nnx.state(decoder))]
    if all(isinstance(s, NamedSharding) and s.mesh.size > 1 for s in shardings):
        return shardings[0].mesh
    return None


class ModelSpec(NamedTuple):
    """The description of a model that is a static argument of the compiled programs.

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
    def of(cls, decoder: Decoder) -> tuple["ModelSpec", nnx.State]:
        """Return the description and the parameters of a decoder that is already on its devices.

        Experts get no limit on their number of tokens, so that no text depends on the other rows of
        its batch.
        """
        graphdef, params = nnx.split(decoder)
        if (mesh := mesh_of(decoder)) is None:
            return cls(graphdef), params
        if (model := dropless(decoder.config)) != decoder.config:
            graphdef = nnx.graphdef(nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0))))
        specs = tuple(x.sharding.spec for x in jax.tree.leaves(params))
        cache = jax.tree.map(partial(sharding.used_axes, mesh), decoder.cache_specs())
        return cls(graphdef, mesh, specs, cache), params

    @property
    def rows(self) -> Rows | None:
        """The partition specs of a `Rows` without changes to logits; None without a mesh."""
        return self.mesh and Rows(self.cache, *3 * [self.spec(_BATCH)])

    def rows_with(self, changes: LogitChanges | None) -> Rows | None:
        """Return the partition specs of a `Rows`, with changes to logits unless they are None."""
        if changes is None or self.mesh is None:
            return self.rows
        return self.rows._replace(changes=self.spec(_BATCH))

    def spec(self, *axes: tuple[str, ...] | None) -> PartitionSpec | None:
        """Return the partition spec of an array; None without a mesh.

        `axes` has the mesh axes that shard each axis of the array.
        """
        return self.mesh and sharding.used_axes(self.mesh, axes)

    def devices(self, axis: str) -> int:
        """Return the number of devices over which `axis` ("batch" or "tokens") is sharded."""
        if self.mesh is None:
            return 1
        return int(np.prod([self.mesh.shape[name] for name in sharding.CACHE_RULES[axis]]))

    def per_device(self, function: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        """Return a function that runs `function` on each device, on its shards of the arguments.

        Without a mesh, `function` is returned.
        """
        if self.mesh is None:
            return function
        return kernels.per_device(function, self.mesh, in_specs, out_specs, tokens=_TOKENS)

    def run(
        self,
        function: Callable,
        params: nnx.State,
        arguments: tuple,
        in_specs: tuple,
        out_specs: Any,
    ) -> Any:
        """Call `function(decoder, *arguments)` on every device with its argument shards."""
        leaves, tree = jax.tree.flatten(params)

        def run_decoder(leaves, *arguments):
            decoder = nnx.merge(self.graphdef, tree.unflatten(leaves))
            return kernels.as_configured(function)(decoder, *arguments)

        specs = (list(self.parameters), *in_specs)
        return self.per_device(run_decoder, specs, out_specs)(leaves, *arguments)


@partial(jax.jit, static_argnames=("model", "rows", "capacity"))
def empty_cache(model: ModelSpec, params: nnx.State, rows: int, capacity: int) -> Cache:
    """Return an empty cache with `rows` rows per device and room for `capacity` tokens."""
    make = lambda decoder: decoder.empty_cache(rows, capacity)
    return model.run(make, params, (), (), model.cache)


@partial(jax.jit, static_argnames=("model", "rows", "capacity"))
def empty_rows(model: ModelSpec, params: nnx.State, rows: int, capacity: int) -> Rows:
    """Return `rows` empty rows per device, all of them marked as ended."""

    def make(decoder):
        zeros = jnp.zeros(rows, jnp.int32)
        seen = jnp.zeros((rows, decoder.config.vocab_size), bool)
        return Rows(decoder.empty_cache(rows, capacity), zeros, zeros, seen)

    return model.run(make, params, (), (), model.rows)


@partial(jax.jit, static_argnames=("model", "rows"))
def unchanged(model: ModelSpec, params: nnx.State, rows: int) -> LogitChanges:
    """Return neutral logit changes for `rows` rows per device, which alter no logits."""
    make = lambda decoder: no_changes(rows, decoder.config.vocab_size)
    return model.run(make, params, (), (), model.spec(_BATCH))


@partial(jax.jit, static_argnames="model")
def prefill(
    model: ModelSpec,
    params: nnx.State,
    tokens: Int[Array, "1 seq"],
    settings: GenerationSettings,
) -> tuple[Rows, ChosenTokens]:
    """Read a prompt in one pass; return it as a batch of one row, and its first new token."""

    def read(decoder, tokens, settings):
        cache = decoder.empty_cache(1, tokens.shape[1])
        logits, cache = decoder.prefill(tokens, settings.lengths, cache)
        in_prompt = jnp.arange(tokens.shape[1]) < settings.lengths[0]
        # Replace padding by an index outside the vocabulary, so that the scatter ignores it.
        places = jnp.where(in_prompt, tokens[0], logits.shape[1])
        seen = jnp.zeros(logits.shape, bool).at[0, places].set(True, mode="drop")
        return _start_row(logits, cache, seen, settings)

    out_specs = model.rows_with(settings.changes), model.spec(_BATCH)
    return model.run(read, params, (tokens, settings), (_WHOLE, _WHOLE), out_specs)


@partial(jax.jit, static_argnames="model", donate_argnames="cache")
def extend(
    model: ModelSpec,
    params: nnx.State,
    tokens: Int[Array, "1 new"],
    lengths: Int[Array, "1"],
    cache: Cache,
) -> tuple[Float[Array, "rows vocab"], Cache]:
    """Read a part of a prompt; return the logits of its last token, and the extended cache."""
    in_specs, out_specs = (_WHOLE, _WHOLE, model.cache), (model.spec(_BATCH), model.cache)
    return model.run(Decoder.extend, params, (tokens, lengths, cache), in_specs, out_specs)


@partial(jax.jit, static_argnames="model", donate_argnames="cache")
def first(
    model: ModelSpec,
    logits: Float[Array, "rows vocab"],
    cache: Cache,
    seen: Bool[Array, "1 vocab"],
    settings: GenerationSettings,
) -> tuple[Rows, ChosenTokens]:
    """Choose the first new token after a prompt that was read in parts; return the row and token.

    Args:
      model: the description of the model.
      logits: the logits of the prompt's last token.
      cache: the cache with the whole prompt.
      seen: which tokens occur in the prompt.
      settings: the settings for the continuation of the prompt.
    """
    row_spec = model.spec(_BATCH)
    in_specs = row_spec, model.cache, _WHOLE, _WHOLE
    out_specs = model.rows_with(settings.changes), row_spec
    return model.per_device(_start_row, in_specs, out_specs)(logits, cache, seen, settings)


def _start_row(logits, cache, seen, settings):
    lengths, changes = settings.lengths, settings.changes
    # A prompt often has an end token: the start token of training runs is one, and templates write
    # one after each message. With a penalty for it, texts would not end.
    seen = seen & ~settings.ends.at(jnp.arange(seen.shape[1]))
    token = _next_token(logits, seen, lengths, settings.choice, settings.ends, changes)
    remaining = jnp.where(settings.ends.at(token), 0, settings.remaining - 1)
    return Rows(cache, token, remaining, seen, changes), _score_tokens(
        logits, token, settings.ranked
    )


@partial(jax.jit, static_argnames="model")
def score(
    model: ModelSpec,
    params: nnx.State,
    tokens: Int[Array, "1 seq"],
    lengths: Int[Array, "1"],
    ranked: Bool[Array, ""],
) -> ChosenTokens:
    """Return the log-probability of each prompt token, given the tokens before it.

    Position i of the result has the score of token i + 1; the last position has no meaning. Logits
    are computed for a few tokens at a time, to save memory.
    """

    def score_prompt(decoder, tokens, lengths, ranked):
        z = decoder.features(tokens, lengths=lengths).z[0]
        following = sharding.own_part(jnp.roll(tokens[0], -1), _TOKENS, axis=0)

        def log_probability(arguments):
            z, token = arguments
            chosen = _score_tokens(decoder.unembedding(z)[None], token[None], ranked)
            return jax.tree.map(lambda x: x[0], chosen)

        return jax.lax.map(log_probability, (z, following), batch_size=_SCORED)

    arguments = (tokens, lengths, ranked)
    return model.run(score_prompt, params, arguments, 3 * (_WHOLE,), model.spec(_TOKENS))


@partial(jax.jit, static_argnames="model", donate_argnames="rows")
def insert(model: ModelSpec, rows: Rows, row: Rows, slot: Int[Array, ""]) -> Rows:
    """Return the batch `rows` with its row number `slot` replaced by the only row of `row`."""

    def write(rows, row, slot):
        count = len(rows.token)
        slot = slot - sharding.axis_index(_BATCH) * count
        is_local, at = (slot >= 0) & (slot < count), jnp.clip(slot, 0, count - 1)

        def write_array(old, new, axis):
            start = [at if n == axis else jnp.zeros_like(at) for n in range(old.ndim)]
            current = jax.lax.dynamic_slice(old, start, new.shape)
            new = jnp.where(is_local, new.astype(old.dtype), current)
            return jax.lax.dynamic_update_slice(old, new, start)

        write_arrays = lambda old, new: jax.tree.map(partial(write_array, axis=0), old, new)
        core_caches = jax.tree.map(partial(write_array, axis=1), rows.cache.cores, row.cache.cores)
        cache = Cache(core_caches, write_arrays(rows.cache.length, row.cache.length))
        return Rows(cache, *write_arrays(rows[1:], row[1:]))

    specs = model.rows_with(rows.changes)
    return model.per_device(write, (specs, specs, _WHOLE), specs)(rows, row, slot)


@partial(jax.jit, static_argnames=("model", "capacity"))
def grow(model: ModelSpec, params: nnx.State, rows: Rows, capacity: int) -> Rows:
    """Return the rows with a larger cache, which has room for `capacity` tokens."""

    def pad(old, like):
        return jnp.pad(old, [(0, n - m) for m, n in zip(old.shape, like.shape, strict=True)])

    def grow_cache(decoder, rows):
        larger = jax.eval_shape(lambda: decoder.empty_cache(len(rows.token), capacity))
        core_caches = jax.tree.map(pad, rows.cache.cores, larger.cores)
        return rows._replace(cache=rows.cache._replace(cores=core_caches))

    specs = model.rows_with(rows.changes)
    return model.run(grow_cache, params, (rows,), (specs,), specs)


@partial(jax.jit, static_argnames=("model", "count"), donate_argnames="rows")
def steps(
    model: ModelSpec,
    params: nnx.State,
    rows: Rows,
    used: Bool[Array, " batch"],
    choice: Choice,
    ends: Ends,
    ranked: Bool[Array, ""],
    count: int,
) -> tuple[Rows, ChosenTokens]:
    """Run `count` decode steps, and return the new state of all rows with the chosen tokens.

    Rows for which `used` is False generate nothing. A chosen token is -1 if the row had already
    ended.
    """

    def run(decoder, rows, used, choice, ends, ranked):
        def step(rows, _):
            running = rows.remaining > 0
            # Rows that have ended are still computed, at position 0. The model may have no learned
            # position after a row's last token.
            start = jnp.where(running, rows.cache.length, 0)
            logits, cache = decoder.decode(rows.token[:, None], rows.cache._replace(length=start))
            length = rows.cache.length + running
            seen = rows.seen.at[jnp.arange(len(running)), rows.token].set(True)
            changes = None if rows.changes is None else count_tokens(rows.changes, rows.token)
            token = _next_token(logits[:, 0], seen, length, choice, ends, changes)
            remaining = jnp.where(running & ~ends.at(token), rows.remaining - 1, 0)
            chosen = _score_tokens(logits[:, 0], token, ranked)
            token_now = jnp.where(running, token, rows.token)
            new_rows = Rows(cache._replace(length=length), token_now, remaining, seen, changes)
            return new_rows, chosen._replace(token=jnp.where(running, token, -1))

        return jax.lax.scan(step, rows._replace(remaining=rows.remaining * used), length=count)

    specs = model.rows_with(rows.changes)
    in_specs = (specs, model.spec(_BATCH), model.spec(_BATCH), _WHOLE, _WHOLE)
    out_specs = specs, model.spec(None, _BATCH)
    return model.run(run, params, (rows, used, choice, ends, ranked), in_specs, out_specs)


def _next_token(logits, seen, positions, choice, ends, changes):
    logits = penalize(logits, seen, choice)
    if changes is not None:
        logits = change_logits(logits, changes, positions)
    logits = ends.possible(logits)
    return sample(logits, positions, choice).astype(jnp.int32)


def _score_tokens(
    logits: Float[Array, "batch vocab"], token: Int[Array, " batch"], ranked: Bool[Array, ""]
) -> ChosenTokens:
    logits = logits.astype(jnp.float32)
    # Compute only the log-probability of the chosen token. Those of all tokens would need as much
    # memory as the logits.
    log_sum = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    log_probability = (jnp.take_along_axis(logits, token[:, None], axis=-1) - log_sum)[:, 0]
    ranks = min(RANKS, logits.shape[-1])
    none = jnp.zeros((len(token), ranks), jnp.int32), jnp.zeros((len(token), ranks), jnp.float32)

    def best():
        values, tokens = jax.lax.top_k(logits, ranks)
        return tokens.astype(jnp.int32), values - log_sum

    # Find the likeliest tokens only if some request needs them, because top_k over a whole
    # vocabulary is slow.
    return ChosenTokens(token, log_probability, *jax.lax.cond(ranked, best, lambda: none))
