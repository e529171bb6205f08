"""Pipelines whose chunks of layers map a state to a state; see `sharding.pipeline`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from sharding.pipeline import (
    Chunk,
    First,
    Last,
    Parameters,
    Pipeline,
    Tick,
    add,
    choose,
    current_inputs,
    slice_at,
    update_at,
    zeros,
)
from sharding.schedule import Schedule, StageWork

# A state is a tree of arrays, such as the residual and the output that is written to it next. Saved
# states are a tree with the same structure, whose arrays have a leading axis over states.
State = Any
SavedStates = Any


class StatePipeline(Pipeline):
    """A pipeline whose chunks of layers map a state, which is a tree of arrays, to a new state.

    A message between stages contains one state. A stage keeps the state before each of its chunks
    until the backward pass of the chunk is done.

    Args:
      first: a function `first(params, context)` that returns the state before the first chunk.
      chunk: a function `chunk(params, shared, index, state, context) -> state, terms` for chunk
        `index`.
      last: a function `last(params, state, context)` that returns terms of the objective, or any
        tree in `results`. All stages call `last` at the same time, but only the last stage has a
        valid state; see `on_last`.
      schedule: the schedule of the stages.
      sums: a tree with the shapes and dtypes of the chunks' terms.
      axis: the mesh axis of the stages.
    """

    def __init__(
        self,
        first: First,
        chunk: Chunk,
        last: Last,
        schedule: Schedule,
        *,
        sums: Any = (),
        axis: str = "stage",
    ):
        spans = np.ones(schedule.chunks, int)
        spans[-1] = 0
        super().__init__(first, chunk, last, schedule, sums, axis, spans)
        self.max_saved = np.array(
            [schedule.max_in_flight(virtual) for virtual in range(schedule.virtual)]
        )

    def _shapes(self, parameters: Parameters, context: Any) -> tuple[State, State]:
        """Return the shapes of the result of `first`, and of the state that `last` accepts."""
        start = jax.eval_shape(self.first, parameters.first, slice_at(context, 0))
        return start, start

    def _empty(self, start: State, *, back: bool) -> tuple[State, SavedStates]:
        """Return zeros for the received state and, if `back` is true, for the saved states.

        Saved states are the states before chunks, which only a backward pass needs.
        """
        count = self.max_saved.sum() if back else 0
        saved = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), start)
        return zeros(start), saved

    def _empty_back(self, start: State) -> State:
        return zeros(start)

    def _compute(
        self,
        parameters: Parameters,
        context: Any,
        memory: tuple[State, SavedStates],
        sums: Any,
        tick: Tick,
    ) -> tuple[tuple[State, SavedStates], Callable[[], State], Any]:
        """Run this stage's forward work of a tick, if there is any: one chunk of one microbatch.

        Returns:
          The memory with the new state; a function that returns the new state; and the sums of
          terms, with the chunk's terms added.
        """
        (arrived, saved), here = memory, self.schedule.forward(tick, self._stage())

        def run():
            chunk_params, microbatch = current_inputs(parameters, context, here)
            begin = lambda: self.first(parameters.first, microbatch)
            state = jax.lax.cond(here.chunk == 0, begin, lambda: arrived)
            after, terms = self.chunk(
                chunk_params, parameters.shared, here.chunk, state, microbatch
            )
            return state, after, add(sums, terms)

        skip = lambda: (arrived, arrived, sums)
        state, after, sums = jax.lax.cond(here.active, run, skip)
        if len(jax.tree.leaves(saved)[0]):
            saved = update_at(saved, state, self._index(here), where=here.active)
        return (after, saved), lambda: after, sums

    def _undo(
        self,
        parameters: Parameters,
        context: Any,
        memory: tuple[State, SavedStates],
        d_memory: State,
        d_result: State,
        d_sums: Any,
        gradients: Parameters,
        tick: Tick,
    ) -> tuple[State, Parameters]:
        """Run this stage's backward work of a tick, if there is any: one chunk of one microbatch.

        Returns:
          The gradient of the state before the chunk; and the gradients of the parameters, with the
          chunk's gradients added.
        """
        here = self.schedule.backward(tick, self._stage())
        d_after = choose(here.chunk == self.schedule.chunks - 1, d_result, d_memory)
        so_far = slice_at(gradients.chunks, here.virtual)

        def run():
            chunk_params, microbatch = current_inputs(parameters, context, here)
            state = slice_at(memory[1], self._index(here))

            def forward(chunk_params, shared, state):
                return self.chunk(chunk_params, shared, here.chunk, state, microbatch)

            pullback = jax.vjp(forward, chunk_params, parameters.shared, state)[1]
            d_chunk, d_shared, d_state = pullback((d_after, d_sums))
            d_first = self._add_first(
                here.chunk == 0, parameters.first, microbatch, d_state, gradients.first
            )
            return d_state, d_first, add(so_far, d_chunk), add(gradients.shared, d_shared)

        skip = lambda: (d_after, gradients.first, so_far, gradients.shared)
        d_state, d_first, d_chunk, d_shared = jax.lax.cond(here.active, run, skip)
        d_chunks = update_at(gradients.chunks, d_chunk, here.virtual)
        return d_state, Parameters(d_first, d_chunks, d_shared, gradients.last)

    def _send_forward(
        self, memory: tuple[State, SavedStates], tick: Tick
    ) -> tuple[State, SavedStates]:
        state, saved = memory
        return self._pass(state, tick), saved

    def _send_back(self, d_state: State, tick: Tick) -> State:
        return self._pass(d_state, tick, back=True)

    def _pass(self, state: State, tick: Tick, *, back: bool = False) -> State:
        slots = jax.tree.map(lambda x: x[None], state)
        return slice_at(self._transfer(slots, tick, back=back), 0)

    def _index(self, here: StageWork) -> Int[Array, ""]:
        """Return the index, among the saved states, of the state before the chunk in `here`."""
        before = jnp.asarray(np.cumsum(self.max_saved) - self.max_saved)[here.virtual]
        return before + here.microbatch % jnp.asarray(self.max_saved)[here.virtual]
