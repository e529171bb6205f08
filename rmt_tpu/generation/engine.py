"""Tokens that go on from prompts, many at a time.

Each slot of a batch has a prompt; when its text has ended, the next prompt takes the slot. A new
prompt is read by itself, in one pass, and then put into the slot. Programs are compiled for sizes
that double, and for nothing else: lengths, how tokens are chosen, and what has ended are numbers.
"""

import sys
from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from rmt_tpu.decoder import Cache, Decoder
from rmt_tpu.generation.sampling import Choice, Sampling, choice, penalized, sample

_LEAST = 32  # tokens that the smallest programs are for
RANKS = 5  # likeliest tokens that can be told of each place
_SCORED = 64  # tokens of a prompt whose logits are there at a time


class Request(NamedTuple):
    """A prompt, as tokens with the start token, and how to go on; all that is asked for fits.

    Attributes:
      ranked: whether to tell which tokens were the likeliest.
      scored: whether to tell how likely the prompt's own tokens are.
    """

    tokens: np.ndarray
    sampling: Sampling
    ranked: bool = False
    scored: bool = False


class Scores(NamedTuple):
    """Of some tokens in a row, by the model itself, before temperature: nats.

    Attributes:
      log_probabilities: of each token.
      likeliest: for each place, the RANKS likeliest tokens, from the likeliest on, with their
        log-probabilities; [] if this was not asked for.
    """

    log_probabilities: list[float]
    likeliest: list[dict[int, float]]


class Said(NamedTuple):
    """What has come of a request since the last time.

    Attributes:
      number: of the request.
      tokens: the new ones, without the one that ended it.
      scores: of these.
      ended: whether there will be no more.
      stopped: whether the stop token ended it.
      prompt: scores of the prompt's tokens but the first, with the first new token of a request
        that asks for them.
    """

    number: int
    tokens: list[int]
    scores: Scores
    ended: bool
    stopped: bool
    prompt: Scores | None = None


class _Chosen(NamedTuple):
    """A token of each row.

    Attributes:
      log_probability: by the model itself.
      likeliest: tokens; 0 if they are not asked for.
      log_probabilities: of the likeliest.
    """

    token: Int[Array, "*steps batch"]
    log_probability: Float[Array, "*steps batch"]
    likeliest: Int[Array, "*steps batch ranks"]
    log_probabilities: Float[Array, "*steps batch ranks"]

    def scores(self, at: tuple, ranked: bool) -> Scores:
        """Of the tokens of one row, on the host."""
        values = [np.asarray(x[at]).tolist() for x in self[1:]]
        likeliest = [dict(zip(*ranks, strict=True)) for ranks in zip(*values[1:], strict=True)]
        return Scores(values[0], likeliest if ranked else [])


class _Rows(NamedTuple):
    """A batch in the middle of its texts.

    Attributes:
      token: the newest of each row, which is not in the cache yet.
      left: how many tokens each row may still have; 0 if it has ended.
      seen: which tokens its prompt and text have.
    """

    cache: Cache
    token: Int[Array, " batch"]
    left: Int[Array, " batch"]
    seen: Bool[Array, "batch vocab"]


class _Asked(NamedTuple):
    """Of a prompt: its length, how tokens are chosen, and how many there may be."""

    lengths: Int[Array, "1"]
    how: Choice
    left: Int[Array, ""]
    stop: Int[Array, ""]
    ranked: Bool[Array, ""]


class Engine:
    """Goes on from prompts, as many at a time as there are slots; one thread may use it.

    Args:
      decoder: the model.
      stop: the token that ends a text.
      slots: rows of the batch.
      steps: tokens a row between two looks at what has come.
      part: tokens of a prompt that are read at a time.
    """

    def __init__(
        self, decoder: Decoder, stop: int, *, slots: int = 1, steps: int = 8, part: int = 2048
    ):
        self.graphdef, self.params = nnx.split(decoder)
        self.decoder, self.stop, self.steps, self.part = decoder, stop, steps, part
        learned = decoder.config.learned_positions
        # What fills up a prompt has positions too: NaN would stay in the cache.
        self.positions = sys.maxsize if learned is None else learned.max_length
        self.slots, self.submitted = slots, 0
        self.reset()

    def reset(self) -> None:
        """Forgets all requests, and makes the rows anew: whatever went wrong with them is gone."""
        self.waiting: dict[int, Request] = {}
        self.numbers: list[int | None] = [None] * self.slots
        self.requests = [Request(np.zeros(1, int), Sampling())] * self.slots
        self.lengths, self.read = np.zeros(self.slots, int), 0
        self._empty()

    def run(self, requests: Iterable[Request]) -> Iterator[Said]:
        """What comes of each request, as it comes; they are numbered in order.

        Closed early, its rows are free again.
        """
        requests = iter(requests)
        try:
            while True:
                for _ in range(len(self._free()) - len(self.waiting)):
                    if (request := next(requests, None)) is not None:
                        self.submit(request)
                if not self.open:
                    return
                yield from self.step()
        finally:
            for number in self.open:
                self.forget(number)

    def compile(self, tokens: int) -> None:
        """Makes the programs for texts of up to so many tokens; others are made when needed."""
        size = _LEAST
        while True:
            length = max(1, min(size, tokens) - self.steps)
            self.submit(Request(np.full(length, self.stop), Sampling(max_tokens=2)))
            while self.open:
                self.step()
            if size >= tokens:
                return
            size *= 2

    def submit(self, request: Request) -> int:
        """The number of a request, from 0. It waits for a slot; `step` says what comes of it."""
        number, self.submitted = self.submitted, self.submitted + 1
        self.waiting[number] = request
        return number

    def step(self) -> list[Said]:
        """Reads the prompt that waits longest, if there is a slot for it; else all rows go on.

        They go on, too, when as many prompts as there are slots were read one after the other:
        requests that end at once do not keep the others waiting.
        """
        free = self._free()
        rows_run = len(free) < self.slots
        if self.waiting and free and not (rows_run and self.read >= self.slots):
            self.read += 1
            number = next(iter(self.waiting))
            return [self._begin(free[0], number, self.waiting.pop(number))]
        self.read = 0
        return self._go_on() if rows_run else []

    def forget(self, number: int) -> None:
        """Ends a request: nothing more comes of it, and its slot is free."""
        self.waiting.pop(number, None)
        if number in self.numbers:
            slot = self.numbers.index(number)
            self.numbers[slot] = None
            self.rows = self.rows._replace(left=self.rows.left.at[slot].set(0))

    @property
    def open(self) -> list[int]:
        """Requests that have not ended."""
        return [*self.waiting, *(number for number in self.numbers if number is not None)]

    def _free(self) -> list[int]:
        return [slot for slot, number in enumerate(self.numbers) if number is None]

    def _empty(self) -> None:
        """Rows with as little room as there can be."""
        self.capacity = _LEAST
        zeros = lambda: jnp.zeros(self.slots, jnp.int32)  # each is donated
        seen = jnp.zeros((self.slots, self.decoder.config.vocab_size), bool)
        self.rows = None  # before there are others
        cache = self.decoder.empty_cache(self.slots, self.capacity)
        self.rows = _Rows(cache, zeros(), zeros(), seen)

    def _begin(self, slot: int, number: int, request: Request) -> Said:
        """Reads a prompt, and chooses its first token."""
        length = len(request.tokens)
        one, chosen = self._read(request)
        if len(self._free()) == self.slots and bucket(length) < self.capacity:
            self._empty()  # no step reads room that nobody needs any more
        self.lengths[slot], self.requests[slot] = length, request
        self._grow(length)
        self.rows = _insert(self.rows, one, np.int32(slot))
        left, chosen = jax.device_get((one.left, chosen))
        ended, stopped = int(left[0]) == 0, int(chosen.token[0]) == self.stop
        self.numbers[slot] = None if ended else number
        new = slice(0, 0 if stopped else 1)
        scores = chosen.scores((new,), request.ranked)
        prompt = self._score(request) if request.scored else None
        return Said(number, chosen.token[new].tolist(), scores, ended, stopped, prompt)

    def _read(self, request: Request) -> tuple[_Rows, _Chosen]:
        """A row of its own."""
        tokens, model = request.tokens, (self.graphdef, self.params)
        asked = _Asked(
            np.array([len(tokens)], np.int32),
            choice([request.sampling]),
            np.int32(request.sampling.max_tokens),
            np.int32(self.stop),
            np.bool_(request.ranked),
        )
        if len(tokens) <= self.part:
            return _prefill(*model, self._padded(tokens, 0, bucket(len(tokens))), asked)
        cache = self.decoder.empty_cache(1, bucket(len(tokens)))
        for first in range(0, len(tokens), self.part):
            part = tokens[first : first + self.part]
            padded = self._padded(part, first, self.part)
            logits, cache = _extend(*model, padded, np.array([len(part)], np.int32), cache)
        seen = np.zeros(logits.shape, bool)
        seen[0, tokens] = True
        return _first(logits, cache, seen, asked)

    def _padded(self, tokens: np.ndarray, first: int, size: int) -> np.ndarray:
        """Tokens from a position on, filled up as far as there are positions."""
        padded = np.zeros((1, min(size, self.positions - first)), np.int32)
        padded[0, : len(tokens)] = tokens
        return padded

    def _score(self, request: Request) -> Scores:
        length, ranked = len(request.tokens), np.bool_(request.ranked)
        padded = self._padded(request.tokens, 0, bucket(length))
        scored = jax.device_get(_score(self.graphdef, self.params, padded, ranked))
        return scored.scores((slice(0, length - 1),), request.ranked)

    def _grow(self, tokens: int) -> None:
        """Makes room for rows of so many tokens."""
        if tokens > self.capacity:
            self.capacity = bucket(tokens)
            self.rows = _grown(self.rows, self.capacity)

    def _go_on(self) -> list[Said]:
        """Some tokens more of each row."""
        running = [slot for slot, number in enumerate(self.numbers) if number is not None]
        self._grow(int(self.lengths[running].max()) + self.steps)
        ranked = np.bool_(any(self.requests[slot].ranked for slot in running))
        how = choice([request.sampling for request in self.requests])
        self.rows, chosen = _steps(
            self.graphdef, self.params, self.rows, how, np.int32(self.stop), ranked, self.steps
        )
        chosen, left = jax.device_get((chosen, self.rows.left))
        said = []
        for slot in running:
            of_row = chosen.token[:, slot]
            count = int(np.sum(of_row >= 0))
            self.lengths[slot] += count
            stopped = self.stop in of_row[:count]
            new = slice(0, count - stopped)
            number, ended = self.numbers[slot], bool(left[slot] == 0)
            if ended:
                self.numbers[slot] = None
            scores = chosen.scores((new, slot), self.requests[slot].ranked)
            said.append(Said(number, of_row[new].tolist(), scores, ended, stopped))
        return said


def bucket(tokens: int) -> int:
    """The least size of a program for so many tokens."""
    return max(_LEAST, 1 << (tokens - 1).bit_length())


@partial(jax.jit, static_argnames="graphdef")
def _prefill(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    tokens: Int[Array, "1 seq"],
    asked: _Asked,
) -> tuple[_Rows, _Chosen]:
    """A row that has read its prompt, and has its first token."""
    decoder = nnx.merge(graphdef, params)
    logits, cache = decoder.prefill(tokens, asked.lengths, decoder.empty_cache(1, tokens.shape[1]))
    of_prompt = jnp.arange(tokens.shape[1]) < asked.lengths[0]
    # What fills it up is put behind the last token, which is nowhere.
    places = jnp.where(of_prompt, tokens[0], logits.shape[1])
    seen = jnp.zeros(logits.shape, bool).at[0, places].set(True, mode="drop")
    return _first(logits, cache, seen, asked)


@partial(jax.jit, static_argnames="graphdef", donate_argnames="cache")
def _extend(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    tokens: Int[Array, "1 new"],
    lengths: Int[Array, "1"],
    cache: Cache,
) -> tuple[Float[Array, "1 vocab"], Cache]:
    """Logits behind a part of a prompt, and the cache with it."""
    return nnx.merge(graphdef, params).extend(tokens, lengths, cache)


@partial(jax.jit, donate_argnames="cache")
def _first(
    logits: Float[Array, "1 vocab"],
    cache: Cache,
    seen: Bool[Array, "1 vocab"],
    asked: _Asked,
) -> tuple[_Rows, _Chosen]:
    """A row with the first token behind its prompt."""
    token = _next_token(logits, seen, asked.lengths, asked.how)
    left = jnp.where(token == asked.stop, 0, asked.left - 1)
    return _Rows(cache, token, left, seen), _chosen(logits, token, asked.ranked)


@partial(jax.jit, static_argnames="graphdef")
def _score(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    tokens: Int[Array, "1 seq"],
    ranked: Bool[Array, ""],
) -> _Chosen:
    """How likely each token of a prompt was behind those before it, but the first: it is not told.

    The logits of few tokens are there at a time.
    """
    decoder = nnx.merge(graphdef, params)
    z = decoder.features(tokens).z[0]

    def of_token(given):
        z, token = given
        one = _chosen(decoder.unembedding(z)[None], token[None], ranked)
        return jax.tree.map(lambda x: x[0], one)

    return jax.lax.map(of_token, (z[:-1], tokens[0, 1:]), batch_size=_SCORED)


@partial(jax.jit, donate_argnames="rows")
def _insert(rows: _Rows, one: _Rows, slot: Int[Array, ""]) -> _Rows:
    """A row in place of the one that had the slot."""

    def put_tokens(kept, new):
        zero = jnp.zeros_like(slot)
        at = (zero, slot, *[zero] * (kept.ndim - 2))
        return jax.lax.dynamic_update_slice(kept, new.astype(kept.dtype), at)

    put = lambda kept, new: jax.lax.dynamic_update_index_in_dim(kept, new[0], slot, 0)
    of_cores = jax.tree.map(put_tokens, rows.cache.cores, one.cache.cores)
    cache = Cache(of_cores, put(rows.cache.length, one.cache.length))
    others = (put(getattr(rows, name), getattr(one, name)) for name in ("token", "left", "seen"))
    return _Rows(cache, *others)


@partial(jax.jit, static_argnames="capacity")
def _grown(rows: _Rows, capacity: int) -> _Rows:
    """With room for so many tokens in the caches that have one for each."""

    def grow(kept):
        return jnp.pad(kept, [(0, 0), (0, 0), (0, capacity - kept.shape[2]), (0, 0)])

    return rows._replace(cache=rows.cache._replace(cores=jax.tree.map(grow, rows.cache.cores)))


@partial(jax.jit, static_argnames=("graphdef", "steps"), donate_argnames="rows")
def _steps(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    rows: _Rows,
    how: Choice,
    stop: Int[Array, ""],
    ranked: Bool[Array, ""],
    steps: int,
) -> tuple[_Rows, _Chosen]:
    """So many tokens more; -1 where a row has ended before."""
    decoder = nnx.merge(graphdef, params)

    def step(rows, _):
        running = rows.left > 0
        # What has ended reads again at its beginning: past its end there may be no position.
        start = jnp.where(running, rows.cache.length, 0)
        logits, cache = decoder.decode(rows.token[:, None], rows.cache._replace(length=start))
        length = rows.cache.length + running
        seen = rows.seen.at[jnp.arange(len(running)), rows.token].set(True)
        token = _next_token(logits[:, 0], seen, length, how)
        left = jnp.where(running & (token != stop), rows.left - 1, 0)
        chosen = _chosen(logits[:, 0], token, ranked)
        token_now = jnp.where(running, token, rows.token)
        after = _Rows(cache._replace(length=length), token_now, left, seen)
        return after, chosen._replace(token=jnp.where(running, token, -1))

    return jax.lax.scan(step, rows, length=steps)


def _next_token(logits, seen, positions, how):
    return sample(penalized(logits, seen, how), positions, how).astype(jnp.int32)


def _chosen(
    logits: Float[Array, "batch vocab"], token: Int[Array, " batch"], ranked: Bool[Array, ""]
) -> _Chosen:
    logits = logits.astype(jnp.float32)
    # Not the logarithms of all tokens, which would be as many numbers again.
    log_sum = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    of_token = (jnp.take_along_axis(logits, token[:, None], axis=-1) - log_sum)[:, 0]
    ranks = min(RANKS, logits.shape[-1])
    none = jnp.zeros((len(token), ranks), jnp.int32), jnp.zeros((len(token), ranks), jnp.float32)

    def best():
        values, tokens = jax.lax.top_k(logits, ranks)
        return tokens.astype(jnp.int32), values - log_sum

    # Seldom asked for, and to look through a whole vocabulary takes long.
    return _Chosen(token, of_token, *jax.lax.cond(ranked, best, lambda: none))
