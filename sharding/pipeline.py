"""Pipelines: each stage of the mesh has some of the layers, and microbatches pass through them all.

For code that runs on each device (in a `jax.shard_map` with the stage axis manual and
`check_vma=False`). The schedule is in `sharding.schedule`; a loop runs over its ticks, and its body
is compiled once. Two kinds of model:

- `sharding.carried`: a chunk of layers maps a state to a state of the same shapes, which is sent
  on.
- `sharding.banked`: a chunk completes some rows of a bank, from the rows before them. Rows are
  written once; every stage caches those that it has, and is sent only those that it lacks,
  "cross-stage caching" (Kimi Team 2026, section 4.1). Row 0 every stage computes itself.

What is made of a microbatch that has left the last chunk are terms of a sum, and chunks may give
terms too; each stage adds up its own. As the objective is a sum of terms with known weights, a
microbatch's gradient is known when it has left, and its backward pass begins at once: what a stage
keeps does not grow with the number of microbatches. Each chunk is computed again where it is
undone.

Where a stage sent a row on, it gets back the gradient that the receiver collected for it. A
gradient of what every stage has (`first`, `shared`, `last`) is the stage's own part of a sum over
the stages.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from sharding.schedule import Place, Schedule

Tick = Int[Array, ""]


class Parameters(NamedTuple):
    """What has a gradient: trees of arrays.

    Attributes:
      first: of what is before the first chunk.
      chunks: [V, ...], of this stage's own chunks.
      shared: of all chunks.
      last: of what is behind the last chunk.
    """

    first: Any
    chunks: Any
    shared: Any
    last: Any


First = Callable[[Any, Any], Any]
Chunk = Callable[[Any, Any, Int[Array, ""], Any, Any], tuple[Any, Any]]
Last = Callable[[Any, Any, Any], Any]


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
        nothing = lambda _: zeros(shapes)
        return jax.lax.cond(is_last(axis), function, nothing, operands)

    def backward(operands, cotangents):
        def undo(operands, cotangents):
            return jax.vjp(function, operands)[1](cotangents)[0]

        nothing = lambda operands, _: zeros(operands)
        return (jax.lax.cond(is_last(axis), undo, nothing, operands, cotangents),)

    run.defvjp(lambda operands: (run(operands), operands), backward)
    return run(operands)


class Pipeline:
    """What both kinds have in common: the loops over ticks, and what happens in one.

    A kind says what a stage keeps from tick to tick: `memory` of microbatches on their way there,
    `d_memory` of those on their way back, of `_shapes` that are `_empty` and `_empty_back` before
    the first tick. `_compute` and `_undo` are a stage's pieces of work in a tick; `_hand_on` and
    `_hand_back` end it.
    """

    def __init__(
        self,
        first: First,
        chunk: Chunk,
        last: Last,
        schedule: Schedule,
        sums: Any,
        axis: str,
        spans: Int[np.ndarray, " C"],
    ):
        self.first, self.chunk, self.last = first, chunk, last
        self.schedule, self.sums, self.axis = schedule, sums, axis
        self.slots, self.spans = int(spans.max()), spans
        self.messages = {back: schedule.messages(spans, back=back) for back in (False, True)}

    def results(self, parameters: Parameters, context: Any) -> tuple[Any, Any]:
        """What `last` gives of each microbatch, [M, ...], and this stage's sums of chunks' terms.

        Args:
          parameters: of the functions.
          context: tree of what the functions get for each microbatch, [M, ...].
        """
        start, result = self._shapes(parameters, context)
        outputs = jax.eval_shape(self.last, parameters.last, result, at(context, 0))
        count = self.schedule.microbatches
        outputs = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), outputs)

        def run(carry, tick):
            memory, outputs, sums = carry
            memory, result, sums = self._compute(parameters, context, memory, sums, tick)
            leaving = self._leaving(tick)

            def give():
                given = (parameters.last, result(), at(context, leaving.microbatch))
                return put(outputs, self.last(*given), leaving.microbatch)

            outputs = jax.lax.cond(leaving.active, give, lambda: outputs)
            return self._hand_on(memory, tick), outputs, sums

        carry = (self._empty(start, back=False), outputs, zeros(self.sums))
        _, outputs, sums = self._over(self.schedule.forward_ticks, run, carry)
        return outputs, sums

    def objective(
        self, parameters: Parameters, context: Any, weights: tuple[Any, Any]
    ) -> tuple[Array, tuple[Any, Any]]:
        """This stage's part of the objective, and what it is made of: sums of scalars.

        The forward pass gives the gradient already: the cotangent of a scalar only scales it. The
        sums have none.

        Args:
          parameters: of the functions.
          context: tree of what the functions get for each microbatch, [M, ...]; has no gradient.
          weights: numbers, of each term that `last` gives and of each that chunks give.
        """

        def weighted(totals):
            terms = jax.tree.map(lambda weight, total: weight * total, weights, totals)
            return sum(jax.tree.leaves(terms)), totals

        @jax.custom_vjp
        def differentiable(parameters, context):
            outputs, sums = self.results(parameters, context)
            return weighted((jax.tree.map(lambda x: jnp.sum(x, axis=0), outputs), sums))

        def forward(parameters, context):
            totals, gradients = self._there_and_back(parameters, context, weights)
            return weighted(totals), gradients

        def backward(gradients, cotangents):
            return jax.tree.map(lambda x: x * cotangents[0].astype(x.dtype), gradients), None

        differentiable.defvjp(forward, backward)
        return differentiable(parameters, context)

    def _there_and_back(
        self, parameters: Parameters, context: Any, weights: tuple[Any, Any]
    ) -> tuple[tuple[Any, Any], Parameters]:
        """All sums, and the gradients of their weighted sum."""
        start, result_like = self._shapes(parameters, context)
        of_last = jax.eval_shape(self.last, parameters.last, result_like, at(context, 0))
        totals = (of_last, self.sums)
        d_terms = jax.tree.map(lambda w, x: jnp.full(x.shape, w, x.dtype), weights, totals)

        def run(carry, tick):
            memory, d_memory, gradients, (total, sums) = carry
            memory, result, sums = self._compute(parameters, context, memory, sums, tick)
            leaving = self._leaving(tick)

            def turn():
                of_microbatch = at(context, leaving.microbatch)
                forward = lambda of_last, result: self.last(of_last, result, of_microbatch)
                terms, pullback = jax.vjp(forward, parameters.last, result())
                d_last, d_result = pullback(d_terms[0])
                return add(total, terms), add(gradients.last, d_last), d_result

            rest = lambda: (total, gradients.last, zeros(result_like))
            total, d_last, d_result = jax.lax.cond(leaving.active, turn, rest)
            d_memory, gradients = self._undo(
                *(parameters, context, memory, d_memory, d_result, d_terms[1]),
                *(gradients._replace(last=d_last), tick),
            )
            memory, d_memory = self._hand_on(memory, tick), self._hand_back(d_memory, tick)
            return memory, d_memory, gradients, (total, sums)

        memory, d_memory = self._empty(start, back=True), self._empty_back(start)
        carry = (memory, d_memory, zeros(parameters), zeros(totals))
        *_, gradients, totals = self._over(self.schedule.ticks, run, carry)
        return totals, gradients

    def _over(self, ticks: int, run: Callable[[Any, Tick], Any], carry: Any) -> Any:
        """`carry = run(carry, tick)` for the first ticks."""
        return jax.lax.scan(lambda c, t: (run(c, t), None), carry, jnp.arange(ticks))[0]

    def _stage(self) -> Int[Array, ""]:
        return jax.lax.axis_index(self.axis)

    def _leaving(self, tick: Tick) -> Place:
        """Where the last stage is, active if a microbatch leaves it: the same for all stages."""
        place = self.schedule.forward(tick, self.schedule.stages - 1)
        return place._replace(active=place.active & (place.chunk == self.schedule.chunks - 1))

    def _add_first(
        self,
        begins: Bool[Array, ""],
        parameters: Any,
        of_microbatch: Any,
        d_start: Any,
        d_first: Any,
    ) -> Any:
        """`d_first` with the gradient of what is before the first chunk."""

        def run():
            pullback = jax.vjp(lambda first: self.first(first, of_microbatch), parameters)[1]
            return add(d_first, pullback(d_start)[0])

        return jax.lax.cond(begins, run, lambda: d_first)

    def _transfer(self, slots: Any, tick: Tick, *, back: bool = False) -> Any:
        """Each stage's slots to the next one, or `back`; zeros where none are sent.

        Exactly the pairs of stages and the slots that the schedule has for this tick take part. The
        tick is the same everywhere, so all devices take the same branch.
        """

        def permute(messages, x):
            parts, done = [], 0
            for first, last, pairs in messages:
                parts.append(jax.lax.ppermute(x[first:last], self.axis, pairs))
                done = last
            return jnp.concatenate([*parts, jnp.zeros_like(x[done:])])

        def branch(messages):
            return lambda slots: jax.tree.map(lambda x: permute(messages, x), slots)

        kinds, kind_at = self.messages[back]
        return jax.lax.switch(jnp.asarray(kind_at)[tick], [branch(m) for m in kinds], slots)


def own(parameters: Parameters, context: Any, here: Place) -> tuple[Any, Any]:
    """Those of the chunk and of the microbatch at hand."""
    return at(parameters.chunks, here.virtual), at(context, here.microbatch)


def at(stacks: Any, index: Int[Array, ""] | int) -> Any:
    """A slice of every stack in a tree."""
    take = lambda stack: jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)
    return jax.tree.map(take, stacks)


def put(
    stacks: Any, values: Any, index: Int[Array, ""], *, where: Bool[Array, ""] | bool = True
) -> Any:
    """Stacks with a tree of values in a slice, or as they are."""
    values = values if where is True else choose(where, values, at(stacks, index))
    put = lambda stack, x: jax.lax.dynamic_update_index_in_dim(stack, x, index, 0)
    return jax.tree.map(put, stacks, values)


def choose(condition: Bool[Array, ""], a: Any, b: Any) -> Any:
    """One of two trees."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), a, b)


def add(a: Any, b: Any) -> Any:
    """The sum of two trees."""
    return jax.tree.map(jnp.add, a, b)


def zeros(tree: Any) -> Any:
    """Of the same shapes."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
