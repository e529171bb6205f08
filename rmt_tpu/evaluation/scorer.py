"""Batched computation of the log-probabilities of continuations.

Rows are padded to one of a few lengths, because the model is compiled once per length.
"""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Bool, Float, Int32

import sharding
from rmt_tpu.cores.experts import dropless
from rmt_tpu.decoder import Decoder
from rmt_tpu.errors import UsageError
from rmt_tpu.evaluation.scores import NONE, TokenScores, token_scores
from rmt_tpu.execution import kernels
from rmt_tpu.generation import check_tokens, mesh_of
from rmt_tpu.generation.key_heads import repeat_key_heads
from rmt_tpu.residual.fixed_point import with_float_residual

# Default number of tokens per batch, for each device that has its own rows.
BATCH_TOKENS = 16384
# Minimum number of tokens to which a row is padded.
_MIN_ROW = 32


class Request(NamedTuple):
    """A continuation whose tokens are scored after a context.

    Attributes:
      context: the context, at least one token, such as the start token.
      continuation: the scored tokens, at least one.
    """

    context: Int32[np.ndarray, " before"]
    continuation: Int32[np.ndarray, " scored"]

    @property
    def length(self) -> int:
        """The number of tokens that the model reads; the last token is only predicted."""
        return len(self.context) + len(self.continuation) - 1


class Answer(NamedTuple):
    """The answer to a request: scores of each token of the continuation.

    Attributes:
      log_probabilities: the log-probability of each token, in nats.
      greedy: whether the token is the model's likeliest token at its position.
    """

    log_probabilities: Float[np.ndarray, " scored"]
    greedy: Bool[np.ndarray, " scored"]


class Scorer(NamedTuple):
    """A model that answers requests in batches.

    Attributes:
      scores: a function that computes the scores of targets on the devices. Its arguments are rows
        and their targets, both [batch, seq].
      max_length: the maximum number of tokens that the model reads per row.
      rows: a number that must divide the number of rows in a batch.
      tokens: a number that must divide the number of tokens in a row.
      batch_tokens: the approximate number of tokens per batch.
      vocab_size: the number of embeddings, which limits the token ids; None allows all ids.
      positions: the number of learned positions, which limits `max_length`; None sets no limit.
    """

    scores: Callable[[Any, Any], TokenScores]
    max_length: int
    rows: int = 1
    tokens: int = 1
    batch_tokens: int = BATCH_TOKENS
    vocab_size: int | None = None
    positions: int | None = None

    @classmethod
    def of(cls, decoder: Decoder, max_length: int, batch_tokens: int = BATCH_TOKENS) -> "Scorer":
        """Return a scorer that runs a decoder on the devices that store its parameters.

        Experts get no limit on their number of tokens. Otherwise they could drop tokens, and an
        answer would depend on the other requests in its batch.

        Raises:
          UsageError: the model has fewer than `max_length` learned positions.
          MeshError: `max_length` cannot be divided over the devices.
        """
        check_length(decoder.config, max_length)
        limits = {"vocab_size": decoder.config.vocab_size}
        limits["positions"] = _num_positions(decoder.config)
        if (mesh := mesh_of(decoder)) is not None:
            decoder = repeat_key_heads(decoder, mesh)
        params = nnx.state(decoder, nnx.Param)
        make = lambda: Decoder(dropless(with_float_residual(decoder.config)), rngs=nnx.Rngs(0))
        graphdef = nnx.split(nnx.eval_shape(make), nnx.Param)[0]
        if mesh is None:
            compiled = jax.jit(partial(_scores, graphdef))
            scores = partial(compiled, params)
            return cls(scores, max_length, batch_tokens=batch_tokens, **limits)
        sharding.check_divides(mesh, "--max_length", max_length, "tokens")
        specs = jax.tree.map(lambda x: x.sharding.spec, params)
        batch_spec = PartitionSpec(sharding.RULES["batch"])
        token_spec = PartitionSpec(sharding.RULES["batch"], sharding.RULES["tokens"])
        run = kernels.per_device(
            partial(_scores, graphdef),
            mesh,
            (specs, batch_spec, batch_spec),
            TokenScores(token_spec, token_spec),
        )
        # The result is replicated, so that every process has it.
        compiled = jax.jit(run, out_shardings=sharding.replicated(mesh))
        shard = partial(jax.device_put, device=NamedSharding(mesh, batch_spec))
        rows = math.prod(mesh.shape[axis] for axis in sharding.RULES["batch"])
        tokens = math.prod(mesh.shape[axis] for axis in sharding.RULES["tokens"])
        return cls(
            lambda tokens, targets: compiled(params, shard(tokens), shard(targets)),
            max_length,
            rows,
            # Ring attention divides a row into two parts per device.
            2 * tokens if tokens > 1 else 1,
            batch_tokens * rows,
            **limits,
        )

    def answers(self, requests: Sequence[Request]) -> Iterator[dict[int, Answer]]:
        """Yield the answers batch by batch, starting with the longest requests.

        Each yielded dict maps the indices of requests to their answers. If a request is longer than
        `max_length`, the beginning of its context is cut off. `check` finds continuations that are
        too long.

        Raises:
          UsageError: the model has no embedding for a token.
        """
        if self.vocab_size is not None:
            for request in requests:
                check_tokens("a text", np.concatenate(request), self.vocab_size)
        by_length = defaultdict(list)
        for number, request in enumerate(requests):
            by_length[self._size(min(request.length, self.max_length))].append(number)
        batches = (
            (size, numbers[start : start + self._rows(size)])
            for size, numbers in sorted(by_length.items(), reverse=True)
            for start in range(0, len(numbers), self._rows(size))
        )
        running, running_scores = None, None
        for size, numbers in batches:
            # Start this batch before fetching the previous one, so that the devices stay busy.
            scores = self._begin(size, [requests[number] for number in numbers])
            if running is not None:
                yield _answers(running, running_scores, requests)
            running, running_scores = numbers, scores
        if running is not None:
            yield _answers(running, running_scores, requests)

    def check(
        self,
        name: str,
        requests: Sequence[Request],
        flag: str = "max_length",
        limit: str | None = None,
    ) -> None:
        """Check that no continuation of a task exceeds `max_length` tokens.

        Args:
          name: the name of the task.
          requests: the requests of the task.
          flag: the command-line flag that sets the length, for error messages.
          limit: the subject of the error message, which tells the length; None is the flag with
            its value.

        Raises:
          UsageError: a continuation is longer.
        """
        longest = max(len(request.continuation) for request in requests)
        if longest <= self.max_length:
            return
        legal = f"--{flag}={longest} or more"
        if self.positions is not None and longest > self.positions:
            legal = f"a task that fits in the model's {self.positions} learned positions"
        raise UsageError(
            f"{limit or f'--{flag}={self.max_length}'} is less than the {longest} tokens of the "
            f"longest continuation of {name}; legal: {legal}"
        )

    def cut(self, requests: Sequence[Request]) -> int:
        """Return the number of requests whose context is cut because they exceed `max_length`."""
        return sum(request.length > self.max_length for request in requests)

    def _size(self, length: int) -> int:
        """Return the length to which a row of `length` tokens is padded.

        The result is 2^n or 3/4 * 2^n, rounded up to a multiple of `tokens`. It is at most
        `max_length`.
        """
        size = max(_MIN_ROW, 1 << (length - 1).bit_length())
        if length <= size * 3 // 4 and size > _MIN_ROW:
            size = size * 3 // 4
        return min(size + -size % self.tokens, self.max_length)

    def _rows(self, size: int) -> int:
        """Return the number of rows in a batch whose rows have `size` tokens each."""
        return max(self.batch_tokens // size // self.rows, 1) * self.rows

    def _begin(self, size: int, requests: list[Request]) -> TokenScores:
        shape = self._rows(size), size
        tokens, targets = np.zeros(shape, np.int32), np.full(shape, NONE, np.int32)
        for row, request in enumerate(requests):
            text = np.concatenate(request)[-(self.max_length + 1) :]
            read, scored = len(text) - 1, len(request.continuation)
            tokens[row, :read] = text[:-1]
            targets[row, read - scored : read] = request.continuation
        return self.scores(tokens, targets)


def check_length(model: Any, max_length: int, name: str = "the model") -> None:
    """Raise UsageError unless a model can read `max_length` tokens; `name` is for the message."""
    positions = _num_positions(model)
    if positions is not None and max_length > positions:
        raise UsageError(
            f"--max_length={max_length} is more than {name}'s {positions} learned positions; "
            f"legal: 1 to {positions}"
        )


def _num_positions(model: Any) -> int | None:
    """Return the number of a model's learned positions, or None if it has none."""
    learned = model.learned_positions
    return None if learned is None else learned.max_length


def fingerprint(decoder: Decoder) -> str:
    """Return a hex hash of the parameters' names, shapes and bits.

    The hash does not depend on the mesh.
    """
    params = nnx.to_pure_dict(nnx.state(decoder, nnx.Param))
    sums = jax.jit(partial(jax.tree.map, _digest))(params)
    flat, _ = jax.tree_util.tree_flatten_with_path(jax.device_get(sums))
    shapes = [list(x.shape) for x in jax.tree.leaves(params)]
    entries = [
        [jax.tree_util.keystr(path), shape, int(value)]
        for (path, value), shape in zip(flat, shapes, strict=True)
    ]
    return hashlib.blake2b(json.dumps(entries).encode(), digest_size=8).hexdigest()


def _digest(x: jax.Array) -> jax.Array:
    """Return a checksum of an array: the sum of its elements' bits, weighted by index, modulo 2^32.

    The checksum does not depend on the order of additions.
    """
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
    index = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    weight = (index * jnp.uint32(2654435761)) | jnp.uint32(1)
    return jnp.sum(bits * weight, dtype=jnp.uint32)


def _scores(graphdef, params, tokens, targets) -> TokenScores:
    return token_scores(nnx.merge(graphdef, params), tokens, targets)


def _answers(
    numbers: list[int], scores: TokenScores, requests: Sequence[Request]
) -> dict[int, Answer]:
    scores, answers = jax.device_get(scores), {}
    limit = scores.greedy.shape[1]
    for row, number in enumerate(numbers):
        stop = min(requests[number].length, limit)
        positions = slice(stop - len(requests[number].continuation), stop)
        answers[number] = Answer(
            scores.log_probability[row, positions], scores.greedy[row, positions]
        )
    return answers
