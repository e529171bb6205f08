"""Pipelines: each stage of the mesh has some of the layers, and microbatches pass through them all.

For code that runs on each device (in a `jax.shard_map` with the stage axis manual and
`check_vma=False`). The schedule is in `sharding.schedule`; a loop runs over its ticks, and its body
is compiled once. Two kinds of model:

- *Carried*: a chunk of layers maps a state to a state of the same shapes, which is sent on.
- *Banked*: a chunk completes some rows of a bank, from the rows before them. Rows are written once;
  every stage caches those that it has, and is sent only those that it lacks, "cross-stage caching"
  (Kimi Team 2026, section 4.1). Row 0 every stage computes itself.

Chunks may also give numbers that each stage adds up for itself, and that are not sent.

The backward pass runs all ticks in reverse, each chunk computed again. Where a stage sent a row on,
it gets back the gradient that the receiver collected for it. A gradient of what every stage has
(`shared`, the starts) is the stage's own part of a sum over the stages.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sharding.schedule import Caching, Place, Schedule

Tick = Int[Array, ""]
Banks = Float[Array, "microbatches rows *shape"]
Rows = Float[Array, "chunk_rows *shape"]
Chunk = Callable[[Any, Any, Int[Array, ""], Any, Any], tuple[Any, Any]]
ChunkBackward = Callable[[Any, Any, Int[Array, ""], Array, Any, Array, Any], tuple[Any, Any, Array]]


def run_carried(
    chunk: Chunk,
    parameters: Any,
    shared: Any,
    starts: Any,
    context: Any,
    *,
    sums: Any = (),
    schedule: Schedule,
    axis: str = "stage",
) -> tuple[Any, Any]:
    """States after all chunks, and sums over what this stage's own chunks gave.

    Args:
      chunk: `chunk(parameters, shared, index, state, context) -> state, terms` of chunk `index`.
      parameters: tree of arrays [V, ...], of this stage's own chunks.
      shared: tree that all chunks get.
      starts: tree of states before the first chunk, [M, ...]; only those of stage 0 are read.
      context: tree of what the chunks of each microbatch get, [M, ...]; has no gradient.
      sums: shapes and dtypes of the terms, as a tree.
      schedule: of the stages.
      axis: of the mesh.

    Returns:
      A tree like `starts`, on the last stage: on the others it is zeros, and its gradient is not
      to be anything else. And a tree like `sums`, on every stage its own part of a sum over them.
    """
    run = _Carried(chunk, sums, schedule, axis)
    return run(parameters, shared, starts, context)


def run_banked(
    chunk: Chunk,
    parameters: Any,
    shared: Any,
    first: Float[Array, "microbatches *shape"],
    context: Any,
    *,
    chunk_rows: int,
    chunk_backward: ChunkBackward | None = None,
    sums: Any = (),
    schedule: Schedule,
    axis: str = "stage",
    caching: Caching = "all",
) -> tuple[Float[Array, "microbatches rows *shape"], Any]:
    """Banks with the rows of all chunks, and sums over what this stage's own chunks gave.

    Args:
      chunk: `chunk(parameters, shared, index, bank, context) -> rows, terms` of chunk `index`; rows
        are [chunk_rows, ...] from the rows before them, those below `1 + index * chunk_rows`; the
        others are finite.
      parameters: tree of arrays [V, ...], of this stage's own chunks.
      shared: tree that all chunks get.
      first: row 0; all stages have it.
      context: tree of what the chunks of each microbatch get, [M, ...]; has no gradient.
      chunk_rows: how many rows a chunk completes.
      chunk_backward: `chunk_backward(parameters, shared, index, bank, context, d_bank, d_terms)`
        gives the gradients of parameters and shared, and d_bank with those of the rows before the
        chunk's added. Bank and d_bank have the chunk's own rows. None differentiates `chunk`.
      sums: shapes and dtypes of the terms, as a tree.
      schedule: of the stages.
      axis: of the mesh.
      caching: which rows stages keep, see `Schedule.spans`: communication, not results.

    Returns:
      `1 + C * chunk_rows` rows, complete on the last stage: on the others some are zeros, and their
      gradient is not to be anything else. And a tree like `sums`, on every stage its own part.
    """
    run = _Banked(chunk, sums, schedule, axis, caching, chunk_rows, chunk_backward)
    return run(parameters, shared, first, context)


def is_last(axis: str = "stage") -> Array:
    """Whether this device is of the last stage, which has the results."""
    return jax.lax.axis_index(axis) == jax.lax.axis_size(axis) - 1


def on_last(function: Callable[[Any], Any], operands: Any, *, axis: str = "stage") -> Any:
    """`function(operands)` on the last stage, where results are; zeros on the others.

    The others spend no time on it. Of the forward pass only the operands are kept.
    """

    @jax.custom_vjp
    def run(operands):
        shapes = jax.eval_shape(function, operands)
        nothing = lambda _: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.cond(is_last(axis), function, nothing, operands)

    def backward(operands, cotangents):
        def undo(operands, cotangents):
            return jax.vjp(function, operands)[1](cotangents)[0]

        nothing = lambda operands, _: _zeros(operands)
        return (jax.lax.cond(is_last(axis), undo, nothing, operands, cotangents),)

    run.defvjp(lambda operands: (run(operands), operands), backward)
    return run(operands)


class _Pipeline:
    """What both kinds have in common: the loop over ticks, and what happens in one."""

    def __init__(
        self, chunk: Chunk, sums: Any, schedule: Schedule, axis: str, spans: Int[np.ndarray, " C"]
    ):
        self.chunk, self.sums, self.schedule, self.axis = chunk, sums, schedule, axis
        self.slots, self.spans = int(spans.max()), jnp.asarray(spans)
        self.messages, kind_at = schedule.messages(spans)
        self.kind_at = jnp.asarray(kind_at)

    def __call__(self, *arguments: Any) -> tuple[Any, Any]:
        @jax.custom_vjp
        def differentiable(*arguments):
            return self.forward(*arguments)[0]

        differentiable.defvjp(self.forward, self.backward)
        return differentiable(*arguments)

    def over_ticks(
        self, run: Callable[[Any, Tick], Any], carry: Any, *, reverse: bool = False
    ) -> Any:
        """`carry = run(carry, tick)` for all ticks."""
        ticks = jnp.arange(self.schedule.ticks)
        return jax.lax.scan(lambda c, t: (run(c, t), None), carry, ticks, reverse=reverse)[0]

    def here(self, tick: Tick) -> Place:
        """Where this stage is in a tick."""
        return self.schedule.place(tick, jax.lax.axis_index(self.axis))

    def work(
        self,
        here: Place,
        parameters: Any,
        shared: Any,
        context: Any,
        inputs: Callable[[], Any],
        sums: Any,
        otherwise: Callable[[], Any],
    ) -> tuple[Any, Any]:
        """What the chunk makes of `inputs()`, and the sums with its terms.

        No time is spent on it where the stage is idle.
        """

        def run():
            of_chunk, of_microbatch = _at(parameters, here.virtual), _at(context, here.microbatch)
            given = (of_chunk, shared, here.chunk, inputs(), of_microbatch)
            value, terms = self.chunk(*given)
            return value, _add(sums, terms)

        return jax.lax.cond(here.active, run, lambda: (otherwise(), sums))

    def undo(
        self,
        here: Place,
        parameters: Any,
        shared: Any,
        context: Any,
        gradients: tuple[Any, Any],
        backward: Callable[[Any, Any, Any], tuple[Any, Any, Any]],
        otherwise: Callable[[], Any],
    ) -> tuple[tuple[Any, Any], Any]:
        """Gradients with the chunk's added, and that of what the chunk was given.

        `backward(of_chunk, shared, of_microbatch)` gives the chunk's.
        """
        so_far = _at(gradients[0], here.virtual), gradients[1]

        def run():
            of_chunk, of_microbatch = _at(parameters, here.virtual), _at(context, here.microbatch)
            *gradient, d_inputs = backward(of_chunk, shared, of_microbatch)
            return _add(so_far, tuple(gradient)), d_inputs

        rest = lambda: (so_far, otherwise())
        (d_chunk, d_shared), d_inputs = jax.lax.cond(here.active, run, rest)
        return (_put(gradients[0], d_chunk, here.virtual), d_shared), d_inputs

    def pullback(
        self,
        here: Place,
        of_chunk: Any,
        shared: Any,
        inputs: Any,
        of_microbatch: Any,
        d_outputs: tuple[Any, Any],
    ) -> tuple[Any, Any, Any]:
        """Gradients of a chunk's parameters, shared and inputs."""

        def forward(of_chunk, shared, inputs):
            return self.chunk(of_chunk, shared, here.chunk, inputs, of_microbatch)

        return jax.vjp(forward, of_chunk, shared, inputs)[1](d_outputs)

    def transfer(self, slots: Any, tick: Tick, *, back: bool = False) -> Any:
        """Each stage's slots to the next one, or `back`; zeros where none are sent.

        Exactly the pairs of stages and the slots that the schedule has for this tick take part. The
        tick is the same everywhere, so all devices take the same branch.
        """

        def permute(messages, x):
            parts, done = [], 0
            for first, last, pairs in messages:
                pairs = [(b, a) for a, b in pairs] if back else pairs
                parts.append(jax.lax.ppermute(x[first:last], self.axis, pairs))
                done = last
            return jnp.concatenate([*parts, jnp.zeros_like(x[done:])])

        def branch(messages):
            return lambda slots: jax.tree.map(lambda x: permute(messages, x), slots)

        return jax.lax.switch(self.kind_at[tick], [branch(m) for m in self.messages], slots)


class _Carried(_Pipeline):
    """One slot: the state. The input of each piece of work is saved."""

    def __init__(self, chunk: Chunk, sums: Any, schedule: Schedule, axis: str):
        spans = np.ones(schedule.chunks, int)
        spans[-1] = 0
        super().__init__(chunk, sums, schedule, axis, spans)

    def forward(
        self, parameters: Any, shared: Any, starts: Any, context: Any
    ) -> tuple[tuple[Any, Any], tuple]:
        """Results, and what the backward pass needs."""
        nothing = _zeros(_at(starts, 0))
        work = self.schedule.microbatches * self.schedule.virtual
        saved = jax.tree.map(lambda x: jnp.zeros((work, *x.shape), x.dtype), nothing)

        def run(carry, tick):
            arrived, saved, results, sums = carry
            here = self.here(tick)
            state = _where(here.chunk == 0, _at(starts, here.microbatch), arrived)
            saved = _put(saved, state, here.number, where=here.active)
            given = (parameters, shared, context, lambda: state, sums, lambda: nothing)
            state, sums = self.work(here, *given)
            results = _put(results, state, here.microbatch, where=self._is_result(here))
            return self._pass_on(state, tick), saved, results, sums

        carry = (nothing, saved, _zeros(starts), _zeros(self.sums))
        _, saved, results, sums = self.over_ticks(run, carry)
        return (results, sums), (parameters, shared, context, saved)

    def backward(self, residuals: tuple, cotangents: tuple[Any, Any]) -> tuple:
        """Cotangents of all arguments."""
        (*arguments, saved), (d_results, d_sums) = residuals, cotangents

        def run(carry, tick):
            d_state, d_starts, gradients = carry
            here = self.here(tick)
            d_after = self._pass_on(d_state, tick, back=True)
            d_after = _where(self._is_result(here), _at(d_results, here.microbatch), d_after)

            def backward(of_chunk, shared, of_microbatch):
                given = (of_chunk, shared, _at(saved, here.number), of_microbatch)
                return self.pullback(here, *given, (d_after, d_sums))

            nothing = lambda: _zeros(d_after)
            gradients, d_state = self.undo(here, *arguments, gradients, backward, nothing)
            is_start = here.active & (here.chunk == 0)
            d_starts = _put(d_starts, d_state, here.microbatch, where=is_start)
            return d_state, d_starts, gradients

        carry = (_zeros(_at(d_results, 0)), _zeros(d_results), _zeros(tuple(arguments[:2])))
        _, d_starts, gradients = self.over_ticks(run, carry, reverse=True)
        return *gradients, d_starts, None

    def _is_result(self, here: Place) -> Bool[Array, ""]:
        return here.active & (here.chunk == self.schedule.chunks - 1)

    def _pass_on(self, state: Any, tick: Tick, *, back: bool = False) -> Any:
        one = jax.tree.map(lambda x: x[None], state)
        return _at(self.transfer(one, tick, back=back), 0)


class _Banked(_Pipeline):
    """Slot j is the rows of a chunk: 0 of the one that was just completed, 1 of that before, ..."""

    def __init__(
        self,
        chunk: Chunk,
        sums: Any,
        schedule: Schedule,
        axis: str,
        caching: Caching,
        chunk_rows: int,
        chunk_backward: ChunkBackward | None,
    ):
        super().__init__(chunk, sums, schedule, axis, schedule.spans(caching))
        self.chunk_rows, self.chunk_backward = chunk_rows, chunk_backward

    def forward(
        self,
        parameters: Any,
        shared: Any,
        first: Float[Array, "microbatches *shape"],
        context: Any,
    ) -> tuple[tuple[Banks, Any], tuple]:
        """Banks, and what the backward pass needs: the banks."""
        num_rows = 1 + self.schedule.chunks * self.chunk_rows
        banks = jnp.zeros((len(first), num_rows, *first.shape[1:]), first.dtype)

        def run(carry, tick):
            (banks, sums), here = carry, self.here(tick)
            bank, there = (lambda: _at(banks, here.microbatch)), (lambda: self._rows(banks, here))
            rows, sums = self.work(here, parameters, shared, context, bank, sums, there)
            banks = self._with_rows(banks, here, rows)
            return (self._send(banks, tick) if self.slots else banks), sums

        carry = (banks.at[:, 0].set(first), _zeros(self.sums))
        banks, sums = self.over_ticks(run, carry)
        return (banks, sums), (parameters, shared, context, banks)

    def backward(self, residuals: tuple, cotangents: tuple[Any, Any]) -> tuple:
        """Cotangents of all arguments."""
        (*arguments, banks), (d_banks, d_sums) = residuals, cotangents

        def run(carry, tick):
            d_banks, gradients = carry
            here = self.here(tick)
            d_banks = self._send_back(d_banks, tick) if self.slots else d_banks
            d_bank = _at(d_banks, here.microbatch)

            def backward(of_chunk, shared, of_microbatch):
                bank = _at(banks, here.microbatch)
                if self.chunk_backward is not None:
                    given = (of_chunk, shared, here.chunk, bank, of_microbatch, d_bank, d_sums)
                    return self.chunk_backward(*given)
                d_rows = self._rows(d_bank[None], here._replace(microbatch=0))
                given = (of_chunk, shared, bank, of_microbatch, (d_rows, d_sums))
                *gradient, d_earlier = self.pullback(here, *given)
                return *gradient, d_bank + d_earlier

            gradients, d_bank = self.undo(here, *arguments, gradients, backward, lambda: d_bank)
            return _put(d_banks, d_bank, here.microbatch), gradients

        carry = (d_banks, _zeros(tuple(arguments[:2])))
        d_banks, gradients = self.over_ticks(run, carry, reverse=True)
        return *gradients, d_banks[:, 0], None

    def _send(self, banks: Banks, tick: Tick) -> Banks:
        """The rows that the next stages lack; the tick's own work is done."""
        here, after = self.here(tick), self.here(tick + 1)
        slots = jnp.stack([self._rows(banks, here, before=j) for j in range(self.slots)])
        slots = self.transfer(slots, tick)
        for j in range(self.slots):
            rows = jnp.where(self._comes(tick, j), slots[j], self._rows(banks, after, before=j + 1))
            banks = self._with_rows(banks, after, rows, before=j + 1)
        return banks

    def _send_back(self, d_banks: Banks, tick: Tick) -> Banks:
        """Moves the gradients of the rows that `_send` sent to where they came from."""
        here, after, moved = self.here(tick), self.here(tick + 1), []
        for j in range(self.slots):
            rows = self._rows(d_banks, after, before=j + 1)
            moved.append(rows)
            rows = jnp.where(self._comes(tick, j), jnp.zeros_like(rows), rows)
            d_banks = self._with_rows(d_banks, after, rows, before=j + 1)
        moved = self.transfer(jnp.stack(moved), tick, back=True)
        for j in range(self.slots):  # zeros where this stage had sent none
            rows = self._rows(d_banks, here, before=j) + moved[j]
            d_banks = self._with_rows(d_banks, here, rows, before=j)
        return d_banks

    def _comes(self, tick: Tick, slot: int) -> Bool[Array, ""]:
        """Whether the stage before this one sends the slot after a tick."""
        stage, stages = jax.lax.axis_index(self.axis), self.schedule.stages
        sender = self.schedule.place(tick, (stage - 1) % stages)
        return sender.active & (slot < self.spans[sender.chunk])

    def _start(self, banks: Banks, place: Place, before: int) -> tuple:
        row = 1 + (place.chunk - before) * self.chunk_rows
        # Slots that reach back beyond the first chunk are never sent.
        return (place.microbatch, jnp.maximum(row, 1), *(0,) * (banks.ndim - 2))

    def _rows(self, banks: Banks, place: Place, *, before: int = 0) -> Rows:
        """Of a microbatch, the rows of the chunk `before` that at `place`."""
        sizes = (1, self.chunk_rows, *banks.shape[2:])
        return jax.lax.dynamic_slice(banks, self._start(banks, place, before), sizes)[0]

    def _with_rows(self, banks: Banks, place: Place, rows: Rows, *, before: int = 0) -> Banks:
        start = self._start(banks, place, before)
        return jax.lax.dynamic_update_slice(banks, rows[None], start)


def _at(stacks: Any, index: Int[Array, ""] | int) -> Any:
    take = lambda stack: jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)
    return jax.tree.map(take, stacks)


def _put(
    stacks: Any, values: Any, index: Int[Array, ""], *, where: Bool[Array, ""] | bool = True
) -> Any:
    values = values if where is True else _where(where, values, _at(stacks, index))
    put = lambda stack, x: jax.lax.dynamic_update_index_in_dim(stack, x, index, 0)
    return jax.tree.map(put, stacks, values)


def _where(condition: Bool[Array, ""], a: Any, b: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), a, b)


def _add(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)


def _zeros(tree: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, tree)
