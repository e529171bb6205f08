"""Pipeline parallelism: each stage has a part of the layers, and microbatches pass through stages.

The code runs per device (in a `jax.shard_map` with the stage axis manual and `check_vma=False`).
`sharding.schedule` states which work a stage does in each unit of time, a *tick*. The code loops
over the ticks, so the body of the loop is compiled only once. There are two kinds of pipeline:

- `sharding.carried`: a chunk of layers maps a state to a state of the same shapes, which is sent to
  the next stage.
- `sharding.banked`: a chunk reads the rows of earlier chunks from a *bank*, a stack of rows, and
  completes its own rows. Each row is written only once. Every stage caches the rows that it has,
  and receives only rows that it lacks ("cross-stage caching", Kimi Team 2026, section 4.1). Every
  stage computes row 0 itself.

After the last chunk, a function computes *terms* from a microbatch's result: scalars that are
summed over microbatches. Chunks may return terms too, and each stage sums the terms of its own
chunks. The objective is a weighted sum of the terms with known weights. The gradient of a
microbatch's result is therefore known when the microbatch has left the last chunk, and the backward
pass of the microbatch starts immediately. A stage's memory thus does not grow with the number of
microbatches. The backward pass of a chunk recomputes the chunk.

A stage that has sent a row to another stage receives the gradient that the other stage computed for
the row. Every stage has the parameters `first`, `shared` and `last`. For these parameters, a stage
returns only its own part of the gradient, and the caller must sum the parts over the stages.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from sharding.schedule import Schedule, StageWork

Tick = Int[Array, ""]


class Parameters(NamedTuple):
    """The differentiable parameters of a pipeline, as trees of arrays.

    Attributes:
      first: the parameters of the function before the first chunk.
      chunks: the parameters of this stage's V chunks, [V, ...].
      shared: the parameters that all chunks share.
      last: the parameters of the function after the last chunk.
    """

    first: Any
    chunks: Any
    shared: Any
    last: Any


First = Callable[[Any, Any], Any]
Chunk = Callable[[Any, Any, Int[Array, ""], Any, Any], tuple[Any, Any]]
Last = Callable[[Any, Any, Any], Any]


def is_last(axis: str = "stage") -> Array:
    """Return whether this device is in the last stage, which has the pipeline's results."""
    return jax.lax.axis_index(axis) == jax.lax.axis_size(axis) - 1


def on_last(function: Callable[[Any], Any], operands: Any) -> Any:
    """Return `function(operands)` on the last stage, and zeros on the other stages.

    The last stage has the results of the pipeline. The other stages skip the computation. The
    backward pass computes `function` again from the operands, which are all that is kept.
    """

    @jax.custom_vjp
    def run(operands):
        shapes = jax.eval_shape(function, operands)
        nothing = lambda _: zeros(shapes)
        return jax.lax.cond(is_last(), function, nothing, operands)

    def backward(operands, cotangents):
        def undo(operands, cotangents):
            return jax.vjp(function, operands)[1](cotangents)[0]

        nothing = lambda operands, _: zeros(operands)
        return (jax.lax.cond(is_last(), undo, nothing, operands, cotangents),)

    run.defvjp(lambda operands: (run(operands), operands), backward)
    return run(operands)


class Pipeline:
    """The base class of pipelines: the loops over ticks, and the order of work in a tick.

    A subclass defines what a stage keeps between ticks: `memory` for microbatches in their forward
    pass, and `d_memory` for microbatches in their backward pass. `_empty` and `_empty_back` create
    `memory` and `d_memory` before the first tick, from the shapes that `_shapes` returns.
    `_compute` does a stage's forward work in a tick, and `_undo` the stage's backward work. At the
    end of a tick, `_send_forward` and `_send_back` communicate.
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
        """Return the results of `last` per microbatch, [M, ...], and the sums of the chunks' terms.

        The sums are over all microbatches and this stage's own chunks.

        Args:
          parameters: the parameters of the functions.
          context: a tree of further inputs of the functions for each microbatch, [M, ...].
        """
        start, result = self._shapes(parameters, context)
        outputs = jax.eval_shape(self.last, parameters.last, result, slice_at(context, 0))
        count = self.schedule.microbatches
        outputs = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), outputs)

        def run(carry, tick):
            memory, outputs, sums = carry
            memory, result, sums = self._compute(parameters, context, memory, sums, tick)
            leaving = self._leaving(tick)

            def finish():
                microbatch = slice_at(context, leaving.microbatch)
                output = self.last(parameters.last, result(), microbatch)
                return update_at(outputs, output, leaving.microbatch)

            outputs = jax.lax.cond(leaving.active, finish, lambda: outputs)
            return self._send_forward(memory, tick), outputs, sums

        carry = (self._empty(start, back=False), outputs, zeros(self.sums))
        _, outputs, sums = self._loop(self.schedule.forward_ticks, run, carry)
        return outputs, sums

    def objective(
        self, parameters: Parameters, context: Any, weights: tuple[Any, Any]
    ) -> tuple[Array, tuple[Any, Any]]:
        """Return this stage's part of the objective, and the unweighted sums of all terms.

        The forward pass already computes the gradient, which the backward pass only multiplies by
        the objective's cotangent. The sums have no gradient.

        Args:
          parameters: the parameters of the functions.
          context: a tree of further inputs of the functions for each microbatch, [M, ...], which
            have no gradient.
          weights: the weights of the terms that `last` returns, and of the terms that chunks
            return.
        """

        def weighted(totals):
            terms = jax.tree.map(lambda weight, total: weight * total, weights, totals)
            return sum(jax.tree.leaves(terms)), totals

        @jax.custom_vjp
        def differentiable(parameters, context):
            outputs, sums = self.results(parameters, context)
            return weighted((jax.tree.map(lambda x: jnp.sum(x, axis=0), outputs), sums))

        def forward(parameters, context):
            totals, gradients = self._totals_and_gradients(parameters, context, weights)
            return weighted(totals), gradients

        def backward(gradients, cotangents):
            return jax.tree.map(lambda x: x * cotangents[0].astype(x.dtype), gradients), None

        differentiable.defvjp(forward, backward)
        return differentiable(parameters, context)

    def _totals_and_gradients(
        self, parameters: Parameters, context: Any, weights: tuple[Any, Any]
    ) -> tuple[tuple[Any, Any], Parameters]:
        """Run all forward and backward passes.

        Return the sums of all terms, and the gradient of the weighted sum of the terms.
        """
        start, result_like = self._shapes(parameters, context)
        terms = jax.eval_shape(self.last, parameters.last, result_like, slice_at(context, 0))
        totals = (terms, self.sums)
        d_terms = jax.tree.map(lambda w, x: jnp.full(x.shape, w, x.dtype), weights, totals)

        def run(carry, tick):
            memory, d_memory, gradients, (total, sums) = carry
            memory, result, sums = self._compute(parameters, context, memory, sums, tick)
            leaving = self._leaving(tick)

            def finish():
                microbatch = slice_at(context, leaving.microbatch)
                forward = lambda last, result: self.last(last, result, microbatch)
                terms, pullback = jax.vjp(forward, parameters.last, result())
                d_last, d_result = pullback(d_terms[0])
                return add(total, terms), add(gradients.last, d_last), d_result

            skip = lambda: (total, gradients.last, zeros(result_like))
            total, d_last, d_result = jax.lax.cond(leaving.active, finish, skip)
            gradients = gradients._replace(last=d_last)
            d_memory, gradients = self._undo(
                parameters, context, memory, d_memory, d_result, d_terms[1], gradients, tick
            )
            memory, d_memory = self._send_forward(memory, tick), self._send_back(d_memory, tick)
            return memory, d_memory, gradients, (total, sums)

        memory, d_memory = self._empty(start, back=True), self._empty_back(start)
        carry = (memory, d_memory, zeros(parameters), zeros(totals))
        *_, gradients, totals = self._loop(self.schedule.ticks, run, carry)
        return totals, gradients

    def _loop(self, ticks: int, run: Callable[[Any, Tick], Any], carry: Any) -> Any:
        """Compute `carry = run(carry, tick)` for the first `ticks` ticks."""
        return jax.lax.scan(lambda c, t: (run(c, t), None), carry, jnp.arange(ticks))[0]

    def _stage(self) -> Int[Array, ""]:
        return jax.lax.axis_index(self.axis)

    def _leaving(self, tick: Tick) -> StageWork:
        """Return the forward work of the last stage in a tick, active if it runs the last chunk.

        A microbatch leaves the pipeline after the last chunk. The result is the same on all stages.
        """
        place = self.schedule.forward(tick, self.schedule.stages - 1)
        return place._replace(active=place.active & (place.chunk == self.schedule.chunks - 1))

    def _add_first(
        self,
        begins: Bool[Array, ""],
        parameters: Any,
        microbatch: Any,
        d_start: Any,
        d_first: Any,
    ) -> Any:
        """Return `d_first` with the gradient of the function `first` added if `begins` is true.

        `begins` states whether the stage runs the backward pass of a microbatch's first chunk.
        """

        def run():
            pullback = jax.vjp(lambda first: self.first(first, microbatch), parameters)[1]
            return add(d_first, pullback(d_start)[0])

        return jax.lax.cond(begins, run, lambda: d_first)

    def _transfer(self, slots: Any, tick: Tick, *, back: bool = False) -> Any:
        """Send each stage's slots to the next stage or, if `back` is true, to the previous stage.

        A slot is one part of a message. Only the slots and the pairs of stages that the schedule
        lists for this tick communicate; all other slots arrive as zeros. The tick is the same on
        all devices, so all devices take the same branch.
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


def current_inputs(parameters: Parameters, context: Any, here: StageWork) -> tuple[Any, Any]:
    """Return the parameters of the chunk and the context of the microbatch that `here` names."""
    return slice_at(parameters.chunks, here.virtual), slice_at(context, here.microbatch)


def slice_at(stacks: Any, index: Int[Array, ""] | int) -> Any:
    """Return slice `index` of every stack in a tree of stacks."""
    take = lambda stack: jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)
    return jax.tree.map(take, stacks)


def update_at(
    stacks: Any, values: Any, index: Int[Array, ""], *, where: Bool[Array, ""] | bool = True
) -> Any:
    """Return the stacks, with slice `index` replaced by `values` if `where` is true."""
    values = values if where is True else choose(where, values, slice_at(stacks, index))
    update = lambda stack, x: jax.lax.dynamic_update_index_in_dim(stack, x, index, 0)
    return jax.tree.map(update, stacks, values)


def choose(condition: Bool[Array, ""], a: Any, b: Any) -> Any:
    """Return tree `a` if the condition is true, and tree `b` otherwise."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), a, b)


def add(a: Any, b: Any) -> Any:
    """Return the sum of two trees of arrays, leaf by leaf."""
    return jax.tree.map(jnp.add, a, b)


def zeros(tree: Any) -> Any:
    """Return a tree of zeros with the shapes and dtypes of the given tree."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
