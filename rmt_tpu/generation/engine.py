"""Text generation for many prompts at a time, with continuous batching.

A slot is a row of the batch, which contains the text of one prompt. When this text ends, the next
prompt gets the slot. The engine reads a new prompt in a separate batch of one row, in parts of up
to `PART` tokens. It then copies the row into the slot. Few programs are compiled, because the sizes
of arrays are powers of two. Lengths, sampling settings and the set of ended rows are arguments of
the programs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

import sharding
from rmt_tpu.decoder import Decoder
from rmt_tpu.errors import UsageError
from rmt_tpu.generation import programs
from rmt_tpu.generation.adjustment import Adjustment, changes_of
from rmt_tpu.generation.key_heads import repeat_key_heads
from rmt_tpu.generation.layouts import lay_out
from rmt_tpu.generation.programs import (
    ChosenTokens,
    Ends,
    GenerationSettings,
    ModelSpec,
    Rows,
    Scores,
    mesh_of,
)
from rmt_tpu.generation.sampling import Sampling, choice

# Minimum number of tokens per row for which programs are compiled.
_MIN_SIZE = 32
# Maximum number of prompt tokens that are read at a time.
PART = 2048
# Default number of slots (rows of the batch).
SLOTS = 8


class Request(NamedTuple):
    """A prompt, and the settings for its continuation.

    A model with learned positions needs one for each token of the prompt, and one for each of the
    `max_tokens` new tokens except the last.

    Attributes:
      tokens: all tokens of the prompt, including a start token.
      sampling: how new tokens are chosen, and the maximum number of new tokens.
      ranked: whether to report the likeliest candidates at each position.
      scored: whether to report the log-probabilities of the prompt's own tokens.
      adjustment: changes to the logits, and further stop tokens.
    """

    tokens: np.ndarray
    sampling: Sampling
    ranked: bool = False
    scored: bool = False
    adjustment: Adjustment = Adjustment()

    def first_stop(self, tokens: Sequence[int]) -> int | None:
        """Return the index of the first of the request's own stop tokens; None if there is none."""
        own = self.adjustment.stop_tokens
        return next((index for index, token in enumerate(tokens) if token in own), None)


class NewTokens(NamedTuple):
    """The new tokens of a request since the engine last reported on it.

    Attributes:
      number: the number of the request.
      tokens: the new tokens, without a stop token that ended the text.
      scores: the scores of these tokens.
      ended: whether the request is finished.
      stopped: whether a stop token ended the text.
      prompt: the scores of the prompt's tokens except the first. They are reported together with
        the first new token, and only for requests with `scored`.
    """

    number: int
    tokens: list[int]
    scores: Scores
    ended: bool
    stopped: bool
    prompt: Scores | None = None


class Engine:
    """A text generator with one prompt in each slot. It is not thread-safe.

    Args:
      decoder: the model. If its parameters are sharded over a mesh, so is all computation. On TPUs,
        the layouts of its parameters are changed in place: see `layouts`.
      stop: the stop token or a list of stop tokens; each stop token ends a text.
      text_vocab_size: the number of token ids that decode to text. Ids from this number onwards are
        never chosen. None means that all ids decode to text.
      gaps: ids below `text_vocab_size` that have no text.
      slots: the number of slots (rows of the batch).
      steps: the number of decode steps per dispatch, after which the results are read.
      part: the maximum number of prompt tokens that are read at a time.

    Raises:
      UsageError: there are no slots.
      MeshError: the slots cannot be divided over the devices of the batch axes, or the batch axes
        span devices of several processes.
    """

    def __init__(
        self,
        decoder: Decoder,
        stop: int | Sequence[int],
        *,
        text_vocab_size: int | None = None,
        gaps: Sequence[int] = (),
        slots: int = 1,
        steps: int = 8,
        part: int = PART,
    ):
        if (mesh := mesh_of(decoder)) is not None:
            _check_own({device.process_index for device in mesh.devices.flat}, mesh.shape)
            decoder = repeat_key_heads(decoder, mesh)
        check_slots("slots", slots, mesh)
        lay_out(decoder, slots)
        self.model, self.params = ModelSpec.of(decoder)
        self.vocab_size, self.steps = decoder.config.vocab_size, steps
        text_vocab_size = self.vocab_size if text_vocab_size is None else text_vocab_size
        stop = np.atleast_1d(np.array(stop, np.int32))
        text_gaps = np.array([i for i in gaps if i < self.vocab_size and i not in stop], np.int32)
        self.ends = Ends(stop, np.int32(text_vocab_size), text_gaps)
        self.part = self._divisible(part)
        self.slots, self.submitted = slots, 0
        self.reset()

    def reset(self) -> None:
        """Discard all requests and allocate an empty cache, for example after an error."""
        self.waiting: dict[int, Request] = {}
        self.numbers: list[int | None] = [None] * self.slots
        self.requests = [Request(np.zeros(1, int), Sampling())] * self.slots
        self.lengths, self.prompts_read = np.zeros(self.slots, int), 0
        self._empty()

    def run(self, requests: Iterable[Request]) -> Iterator[NewTokens]:
        """Yield the new tokens of each request as they are generated.

        Requests are numbered in order. If the iterator is closed early, its requests end and their
        slots become free.
        """
        requests = iter(requests)
        try:
            while True:
                for _ in range(len(self._free()) - len(self.waiting)):
                    if (request := next(requests, None)) is not None:
                        self.submit(request)
                if not self.open_requests:
                    return
                yield from self.step()
        finally:
            for number in self.open_requests:
                self.forget(number)

    def compile(self, tokens: int, *, scored: bool = True, adjusted: bool = False) -> None:
        """Compile the programs for texts of up to `tokens` tokens in advance.

        This includes the programs that grow the cache from one size to another, and those that
        insert a prompt of a different size. Any other program is compiled when it is first needed.

        Args:
          tokens: the maximum number of tokens in a prompt and its new tokens together.
          scored: whether to compile the programs that score prompts, too.
          adjusted: whether to compile the programs that change logits, too.
        """
        sizes = [bucket(1)]
        while sizes[-1] < tokens:
            sizes.append(2 * sizes[-1])
        ends, self.ends = self.ends, self.ends._replace(stop=np.full_like(self.ends.stop, -1))
        # The requests have no stop tokens. Each text thus has a second token, for which `steps` is
        # compiled.
        try:
            lengths = [max(1, min(size, tokens) - self.steps) for size in sizes]
            # The longest text needs a larger cache for its decode steps than for its prompt. The
            # longest prompt leaves no room for a second token.
            adjustments = [Adjustment(), Adjustment(min_tokens=1)][: 1 + adjusted]
            count = {tokens: 1} | dict.fromkeys([*lengths, max(1, tokens - 1)], 2)
            for length, new in count.items():
                request = Request(np.zeros(length, int), Sampling(max_tokens=new), scored=scored)
                for adjustment in adjustments:
                    self.submit(request._replace(adjustment=adjustment))
                    while self.open_requests:
                        self.step()
        finally:
            self.ends = ends
        sizes = sorted({*map(self._size, sizes), self.capacity})
        for adjustment in adjustments:
            self._compile_moves(sizes, adjustment.changes_logits)

    def _compile_moves(self, sizes: list[int], changed: bool) -> None:
        """Compile programs that grow the cache to each larger size, and that insert smaller rows.

        Args:
          sizes: the sizes of caches, in tokens, in ascending order.
          changed: whether the rows have changes to logits.
        """
        count = self.slots // self.model.devices("batch")

        def empty(rows: int, size: int) -> Rows:
            changes = programs.unchanged(self.model, self.params, rows) if changed else None
            made = programs.empty_rows(self.model, self.params, rows, size)
            return made._replace(changes=changes)

        for index, size in enumerate(sizes):
            rows = empty(count, size)
            for larger in sizes[index + 1 :]:
                programs.grow(self.model, self.params, rows, larger)
            for smaller in sizes[: index + 1]:
                rows = programs.insert(self.model, rows, empty(1, smaller), np.int32(0))

    def submit(self, request: Request) -> int:
        """Queue a request and return its number, counted from 0; `step` reports its new tokens.

        Raises:
          UsageError: the prompt has no tokens, or has a token without an embedding in the model.
        """
        if len(request.tokens) == 0:
            raise UsageError("the prompt has no tokens; legal: 1 or more")
        check_tokens("the prompt", request.tokens, self.vocab_size)
        number, self.submitted = self.submitted, self.submitted + 1
        self.waiting[number] = request
        return number

    def step(self) -> list[NewTokens]:
        """Read the prompt that has waited longest if a slot is free; otherwise run decode steps.

        At most as many prompts as there are slots are read in succession; then decode steps run.
        Otherwise, a long queue of short requests could block the requests that already have a slot.
        """
        free = self._free()
        rows_run = len(free) < self.slots
        if self.waiting and free and not (rows_run and self.prompts_read >= self.slots):
            self.prompts_read += 1
            number = next(iter(self.waiting))
            return [self._start(free[0], number, self.waiting.pop(number))]
        self.prompts_read = 0
        return self._decode() if rows_run else []

    def forget(self, number: int) -> None:
        """Cancel a request: it reports nothing more, and its slot becomes free."""
        self.waiting.pop(number, None)
        if number in self.numbers:
            slot = self.numbers.index(number)
            self.numbers[slot] = None

    @property
    def open_requests(self) -> list[int]:
        """The numbers of all requests that are not finished."""
        return [*self.waiting, *(number for number in self.numbers if number is not None)]

    def _free(self) -> list[int]:
        return [slot for slot, number in enumerate(self.numbers) if number is None]

    def _empty(self) -> None:
        """Replace the cache of all rows by an empty cache of the smallest capacity."""
        self.rows = None  # Free the old rows before allocating the new ones.
        self.capacity = self._size(1)
        rows = self.slots // self.model.devices("batch")
        self.rows = programs.empty_rows(self.model, self.params, rows, self.capacity)

    def _start(self, slot: int, number: int, request: Request) -> NewTokens:
        """Read a prompt into a slot, and choose its first new token."""
        length = len(request.tokens)
        row, chosen = self._read(request)
        if len(self._free()) == self.slots and self._size(length) < self.capacity:
            # Use a smaller cache, because decode steps also read the unused part of a cache.
            self._empty()
        self.lengths[slot], self.requests[slot] = length, request
        self._grow(length)
        row = self._like_rows(row)
        self.rows = programs.insert(self.model, self.rows, row, np.int32(slot))
        remaining, chosen = jax.device_get((row.remaining, chosen))
        own = request.first_stop(chosen.token.tolist()) is not None
        stopped = own or int(chosen.token[0]) in self.ends.stop
        ended = own or int(remaining[0]) == 0
        self.numbers[slot] = None if ended else number
        new = slice(0, 0 if stopped else 1)
        scores = chosen.scores((new,), request.ranked)
        prompt = self._score(request) if request.scored else None
        return NewTokens(number, chosen.token[new].tolist(), scores, ended, stopped, prompt)

    def _like_rows(self, row: Rows) -> Rows:
        """Return the new row in a form that can be inserted into the batch.

        Either both the row and the batch must have logit changes, or neither. If only one of them
        has changes, neutral changes are added to the other.
        """
        unchanged = lambda rows: programs.unchanged(self.model, self.params, rows)
        if row.changes is None and self.rows.changes is not None:
            return row._replace(changes=unchanged(1))
        if row.changes is not None and self.rows.changes is None:
            rows = self.slots // self.model.devices("batch")
            self.rows = self.rows._replace(changes=unchanged(rows))
        return row

    def _read(self, request: Request) -> tuple[Rows, ChosenTokens]:
        """Read a prompt into a separate row, in several parts if it is long."""
        tokens, size = request.tokens, self._size(len(request.tokens))
        changes = None
        if (adjustment := request.adjustment).changes_logits:
            ends = self.ends.stop.tolist()
            changes = changes_of(adjustment, ends, len(tokens), self.vocab_size)
        settings = GenerationSettings(
            lengths=np.array([len(tokens)], np.int32),
            choice=choice([request.sampling]),
            remaining=np.int32(request.sampling.max_tokens),
            ends=self.ends,
            ranked=np.bool_(request.ranked),
            changes=changes,
        )
        if len(tokens) <= self.part:
            return programs.prefill(self.model, self.params, _padded(tokens, size), settings)
        cache = programs.empty_cache(self.model, self.params, 1, size)
        for start in range(0, len(tokens), self.part):
            part = tokens[start : start + self.part]
            lengths, part = np.array([len(part)], np.int32), _padded(part, self.part)
            logits, cache = programs.extend(self.model, self.params, part, lengths, cache)
        seen = np.zeros((1, self.vocab_size), bool)
        seen[0, tokens] = True
        return programs.first(self.model, logits, cache, seen, settings)

    def _score(self, request: Request) -> Scores:
        length = len(request.tokens)
        padded, lengths = _padded(request.tokens, self._size(length)), np.array([length], np.int32)
        ranked = np.bool_(request.ranked)
        scored = programs.score(self.model, self.params, padded, lengths, ranked)
        return jax.device_get(scored).scores((slice(0, length - 1),), request.ranked)

    def _grow(self, tokens: int) -> None:
        """Ensure that the cache has room for `tokens` tokens per row."""
        if tokens > self.capacity:
            self.capacity = self._size(tokens)
            self.rows = programs.grow(self.model, self.params, self.rows, self.capacity)

    def _size(self, tokens: int) -> int:
        """Return the number of tokens to which a row of `tokens` tokens is padded."""
        return self._divisible(bucket(tokens))

    def _divisible(self, tokens: int) -> int:
        """Round `tokens` up to a multiple of the number of devices that share the tokens."""
        return tokens + -tokens % self.model.devices("tokens")

    def _decode(self) -> list[NewTokens]:
        """Run one dispatch of decode steps for all rows, and report each row's new tokens."""
        used = np.array([number is not None for number in self.numbers])
        running = np.flatnonzero(used).tolist()
        self._grow(int(self.lengths[running].max()) + self.steps)
        if not any(self.requests[slot].adjustment.changes_logits for slot in running):
            # The program for rows without changes is faster and needs less memory.
            self.rows = self.rows._replace(changes=None)
        ranked = np.bool_(any(self.requests[slot].ranked for slot in running))
        sampling = choice([request.sampling for request in self.requests])
        self.rows, chosen = programs.steps(
            self.model, self.params, self.rows, used, sampling, self.ends, ranked, self.steps
        )
        chosen, remaining = jax.device_get((chosen, self.rows.remaining))
        new_tokens = []
        for slot in running:
            row_tokens = chosen.token[:, slot]
            count = int(np.sum(row_tokens >= 0))
            self.lengths[slot] += count
            stopped = bool(np.isin(row_tokens[:count], self.ends.stop).any())
            new = slice(0, count - stopped)
            number, ended = self.numbers[slot], bool(remaining[slot] == 0)
            own = self.requests[slot].first_stop(row_tokens[:count].tolist())
            if own is not None:
                new, stopped, ended = slice(0, own), True, True
            if ended:
                self.numbers[slot] = None
            scores = chosen.scores((new, slot), self.requests[slot].ranked)
            new_tokens.append(NewTokens(number, row_tokens[new].tolist(), scores, ended, stopped))
        return new_tokens


def bucket(tokens: int) -> int:
    """Return the smallest power of two that is at least `tokens` and at least `_MIN_SIZE`."""
    return max(_MIN_SIZE, 1 << (tokens - 1).bit_length())


def _check_own(processes: set[int], sizes: Mapping[str, int]) -> None:
    """Check that this process can read all rows of the batch, because they are on its devices.

    Args:
      processes: the processes that own devices of the mesh.
      sizes: the size of each mesh axis.

    Raises:
      MeshError: the batch is sharded over devices of several processes.
    """
    rows = sharding.CACHE_RULES["batch"]
    if (count := len(processes)) > 1 and any(sizes[axis] > 1 for axis in rows):
        raise sharding.MeshError(
            f"the mesh axes {' and '.join(rows)} divide texts over devices of {count} processes; "
            "legal: only devices of one process"
        )


def check_tokens(name: str, tokens: np.ndarray, vocab_size: int) -> None:
    """Raise UsageError if a token id is not among the model's `vocab_size` embeddings."""
    foreign = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if foreign.size:
        raise UsageError(
            f"{name} has token {foreign[0]}, for which the model has no embedding; "
            f"legal: 0 to {vocab_size - 1}"
        )


def check_slots(name: str, slots: int, mesh: jax.sharding.Mesh | None) -> None:
    """Check that there are slots, and that the mesh can divide them as rows of a batch.

    Args:
      name: the flag or the argument that sets the number of slots.
      slots: the number of slots.
      mesh: the mesh, or None.

    Raises:
      UsageError: there are no slots.
      MeshError: the mesh cannot divide them.
    """
    if slots < 1:
        raise UsageError(f"{name}={slots} is out of range; legal: 1 or more")
    if mesh is not None:
        sharding.check_divides(mesh, name, slots, "batch", rules=sharding.CACHE_RULES)


def _padded(tokens: np.ndarray, size: int) -> np.ndarray:
    padded = np.zeros((1, size), np.int32)
    padded[0, : len(tokens)] = tokens
    return padded
