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


class Request(NamedTuple):
    """A prompt, as tokens with the start token, and how to go on; all that is asked for fits."""

    tokens: np.ndarray
    sampling: Sampling


class Said(NamedTuple):
    """What has come of a request since the last time.

    Attributes:
      number: of the request, from 0.
      tokens: the new ones, without the one that ended it.
      log_probabilities: of these by the model itself, before temperature: nats.
      ended: whether there will be no more.
      stopped: whether the stop token ended it.
    """

    number: int
    tokens: list[int]
    log_probabilities: list[float]
    ended: bool
    stopped: bool


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


class Engine:
    """Goes on from prompts, as many at a time as there are slots.

    Args:
      decoder: the model.
      stop: the token that ends a text.
      slots: rows of the batch.
      steps: tokens a row between two looks at what has come.
    """

    def __init__(self, decoder: Decoder, stop: int, *, slots: int = 1, steps: int = 8):
        self.graphdef, self.params = nnx.split(decoder)
        self.decoder, self.stop, self.steps = decoder, stop, steps
        learned = decoder.config.learned_positions
        # What fills up a prompt has positions too: NaN would stay in the cache.
        self.positions = sys.maxsize if learned is None else learned.max_length
        self.slots, self.capacity = slots, _LEAST
        self.rows = self._no_rows()
        self.numbers: list[int | None] = [None] * slots
        self.lengths, self.how = np.zeros(slots, int), [Sampling()] * slots

    def run(self, requests: Iterable[Request]) -> Iterator[Said]:
        """What comes of each request, as it comes. Closed early, its rows are free again."""
        waiting = enumerate(requests)
        try:
            while True:
                for slot in self._free():
                    if (next_one := next(waiting, None)) is not None:
                        yield self._begin(slot, *next_one)
                if all(number is None for number in self.numbers):
                    if next_one is None:
                        return
                    continue
                yield from self._step()
        finally:
            for number in [number for number in self.numbers if number is not None]:
                self.forget(number)

    def forget(self, number: int) -> None:
        """Ends a request: nothing more comes of it."""
        if number in self.numbers:
            slot = self.numbers.index(number)
            self.numbers[slot] = None
            self.rows = self.rows._replace(left=self.rows.left.at[slot].set(0))

    def _free(self) -> list[int]:
        return [slot for slot, number in enumerate(self.numbers) if number is None]

    def _no_rows(self) -> _Rows:
        zeros = lambda: jnp.zeros(self.slots, jnp.int32)  # each is donated
        seen = jnp.zeros((self.slots, self.decoder.config.vocab_size), bool)
        cache = self.decoder.empty_cache(self.slots, self.capacity)
        return _Rows(cache, zeros(), zeros(), seen)

    def _begin(self, slot: int, number: int, request: Request) -> Said:
        """Reads a prompt, and chooses its first token."""
        length = len(request.tokens)
        padded = np.zeros((1, min(_bucket(length), self.positions)), np.int32)
        padded[0, :length] = request.tokens
        how, left = choice([request.sampling]), np.int32(request.sampling.max_tokens)
        one, log_probability = _prefill(
            self.graphdef,
            self.params,
            padded,
            np.array([length], np.int32),
            how,
            left,
            np.int32(self.stop),
        )
        self.lengths[slot], self.how[slot] = length, request.sampling
        self._grow(padded.shape[1])
        self.rows = _insert(self.rows, one, np.int32(slot))
        ended = int(one.left[0]) == 0
        self.numbers[slot] = None if ended else number
        stopped = int(one.token[0]) == self.stop
        tokens = [] if stopped else [int(one.token[0])]
        return Said(number, tokens, [float(log_probability[0])][: len(tokens)], ended, stopped)

    def _grow(self, tokens: int) -> None:
        """Makes room for rows of so many tokens."""
        if tokens > self.capacity:
            self.capacity = _bucket(tokens)
            self.rows = _grown(self.rows, self.capacity)

    def _step(self) -> list[Said]:
        running = [slot for slot, number in enumerate(self.numbers) if number is not None]
        self._grow(int(self.lengths[running].max()) + self.steps)
        self.rows, *came = _steps(
            *(self.graphdef, self.params, self.rows, choice(self.how), np.int32(self.stop)),
            self.steps,
        )
        tokens, log_probabilities, left = jax.device_get((*came, self.rows.left))
        said = []
        for slot in running:
            of_row = tokens[:, slot]
            count = int(np.sum(of_row >= 0))
            self.lengths[slot] += count
            stopped = self.stop in of_row[:count]
            text = of_row[: count - stopped]
            number, ended = self.numbers[slot], bool(left[slot] == 0)
            if ended:
                self.numbers[slot] = None
            values = log_probabilities[: len(text), slot]
            said.append(Said(number, text.tolist(), values.tolist(), ended, stopped))
        return said


def _bucket(tokens: int) -> int:
    """The least size of a program for so many tokens."""
    return max(_LEAST, 1 << (tokens - 1).bit_length())


@partial(jax.jit, static_argnames="graphdef")
def _prefill(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    tokens: Int[Array, "1 seq"],
    lengths: Int[Array, "1"],
    how: Choice,
    left: Int[Array, ""],
    stop: Int[Array, ""],
) -> tuple[_Rows, Float[Array, "1"]]:
    """A row that has read its prompt, and has its first token."""
    decoder = nnx.merge(graphdef, params)
    logits, cache = decoder.prefill(tokens, lengths, decoder.empty_cache(1, tokens.shape[1]))
    of_prompt = jnp.arange(tokens.shape[1]) < lengths[0]
    # What fills it up is put behind the last token, which is nowhere.
    places = jnp.where(of_prompt, tokens[0], logits.shape[1])
    seen = jnp.zeros(logits.shape, bool).at[0, places].set(True, mode="drop")
    token, log_probability = _chosen(logits, seen, lengths, how)
    left = jnp.where(token == stop, 0, left - 1)
    return _Rows(cache, token, left, seen), log_probability


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
    steps: int,
) -> tuple[_Rows, Int[Array, "steps batch"], Float[Array, "steps batch"]]:
    """So many tokens more; -1 where a row has ended before."""
    decoder = nnx.merge(graphdef, params)

    def step(rows, _):
        running = rows.left > 0
        # What has ended reads again at its beginning: past its end there may be no position.
        start = jnp.where(running, rows.cache.length, 0)
        logits, cache = decoder.decode(rows.token[:, None], rows.cache._replace(length=start))
        length = rows.cache.length + running
        seen = rows.seen.at[jnp.arange(len(running)), rows.token].set(True)
        token, log_probability = _chosen(logits[:, 0], seen, length, how)
        left = jnp.where(running & (token != stop), rows.left - 1, 0)
        token_now = jnp.where(running, token, rows.token)
        after = _Rows(cache._replace(length=length), token_now, left, seen)
        return after, (jnp.where(running, token, -1), log_probability)

    rows, (tokens, log_probabilities) = jax.lax.scan(step, rows, length=steps)
    return rows, tokens, log_probabilities


def _chosen(logits, seen, positions, how):
    """A token of each row, and its log-probability by the model itself."""
    token = sample(penalized(logits, seen, how), positions, how).astype(jnp.int32)
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return token, jnp.take_along_axis(log_probabilities, token[:, None], axis=-1)[:, 0]
