"""Pipelines whose chunks of layers complete the rows of a bank, a stack that later chunks read.

See `sharding.pipeline`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sharding.pipeline import (
    Chunk,
    First,
    Last,
    Parameters,
    Pipeline,
    Tick,
    add,
    current_inputs,
    slice_at,
    update_at,
)
from sharding.schedule import Schedule, StageWork

Shape = jax.ShapeDtypeStruct
Bank = Float[Array, "rows *shape"]
Banks = Float[Array, "room rows *shape"]
BackBanks = Float[Array, "room_back rows *shape"]
Rows = Float[Array, "chunk_rows *shape"]
ChunkBackward = Callable[[Any, Any, Int[Array, ""], Bank, Any, Bank, Any], tuple[Any, Any, Bank]]


class BankPipeline(Pipeline):
    """A pipeline whose C chunks of layers together complete a bank of `1 + C * chunk_rows` rows.

    A row is an array that later chunks read, such as a sum of sublayers' outputs. One row, the
    first or the last, is the start that `first` returns. Chunks complete the other rows. A message
    between stages has one slot per chunk: slot 0 contains the rows of the chunk that was just
    completed, slot 1 the rows of the chunk before that chunk, and so on.

    Args:
      first: a function `first(params, context)` that returns the start of a microbatch's bank.
      chunk: a function `chunk(params, shared, index, bank, context) -> rows, terms` for chunk
        `index`. The rows are [chunk_rows, ...] and depend only on the start and on rows of earlier
        chunks, which have indices below `first_chunk_row + index * chunk_rows`. The other rows of
        the bank are zeros or left over from an earlier microbatch.
      last: a function `last(params, bank, context)` that returns terms of the objective, or any
        tree in `results`. All stages call `last` at the same time, but the bank is complete only on
        the last stage; see `on_last`.
      schedule: the schedule of the stages.
      chunk_rows: the number of rows that a chunk completes.
      first_chunk_row: the index of the first row that chunk 0 completes: 1 if the start is row 0,
        and 0 if the start is the last row.
      chunk_backward: a function
        `chunk_backward(params, shared, index, bank, context, d_bank, d_terms)` that returns the
        gradients of `params` and `shared`, and `d_bank` with the gradients of the rows before the
        chunk added to it. `bank` and `d_bank` include the chunk's own rows.
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
        chunk_rows: int,
        first_chunk_row: int = 1,
        chunk_backward: ChunkBackward,
        sums: Any = (),
        axis: str = "stage",
    ):
        super().__init__(first, chunk, last, schedule, sums, axis, schedule.spans)
        self.chunk_rows, self.chunk_backward = chunk_rows, chunk_backward
        self.first_chunk_row = first_chunk_row
        self.start_row = 0 if first_chunk_row else schedule.chunks * chunk_rows

    def _shapes(self, parameters: Parameters, context: Any) -> tuple[Shape, Shape]:
        """Return the shapes of the start, the result of `first`, and of the bank for `last`."""
        start = jax.eval_shape(self.first, parameters.first, slice_at(context, 0))
        rows = 1 + self.schedule.chunks * self.chunk_rows
        return start, jax.ShapeDtypeStruct((rows, *start.shape), start.dtype)

    def _empty(self, start: Shape, *, back: bool) -> Banks:
        """Return banks of zeros for all microbatches in progress on this stage.

        If `back` is true, these include microbatches in their backward pass.
        """
        count = self.schedule.max_in_flight() if back else self.schedule.max_in_flight_one_way
        return self._banks(start, count)

    def _empty_back(self, start: Shape) -> Banks:
        return self._banks(start, self.schedule.max_in_flight_one_way)

    def _banks(self, start: Shape, count: int) -> Banks:
        rows = 1 + self.schedule.chunks * self.chunk_rows
        return jnp.zeros((count, rows, *start.shape), start.dtype)

    def _compute(
        self, parameters: Parameters, context: Any, banks: Banks, sums: Any, tick: Tick
    ) -> tuple[Banks, Callable[[], Bank], Any]:
        """Run this stage's forward work of a tick, if there is any: one chunk of one microbatch.

        Returns:
          All banks, with the chunk's rows written; a function that returns the microbatch's bank;
          and the sums of terms, with the chunk's terms added.
        """
        here = self.schedule.forward(tick, self._stage())
        chunk_params, microbatch = current_inputs(parameters, context, here)
        slot = here.microbatch % len(banks)
        begins = here.active & (here.virtual == 0)
        begin = lambda: self.first(parameters.first, microbatch)
        row = jax.lax.cond(begins, begin, lambda: banks[slot, self.start_row])
        banks = banks.at[slot, self.start_row].set(row)

        def run():
            rows, terms = self.chunk(
                chunk_params, parameters.shared, here.chunk, banks[slot], microbatch
            )
            return rows, add(sums, terms)

        rows, sums = jax.lax.cond(here.active, run, lambda: (self._rows(banks, here), sums))
        banks = self._with_rows(banks, here, rows)
        return banks, lambda: banks[slot], sums

    def _undo(
        self,
        parameters: Parameters,
        context: Any,
        banks: Banks,
        d_banks: BackBanks,
        d_result: Bank,
        d_sums: Any,
        gradients: Parameters,
        tick: Tick,
    ) -> tuple[tuple[BackBanks, Bank], Parameters]:
        """Run this stage's backward work of a tick, if there is any: one chunk of one microbatch.

        Returns:
          The gradients of all banks and of the microbatch's bank; and the gradients of the
          parameters, with the chunk's gradients added.
        """
        here = self.schedule.backward(tick, self._stage())
        chunk_params, microbatch = current_inputs(parameters, context, here)
        is_result = here.chunk == self.schedule.chunks - 1
        d_bank = jnp.where(is_result, d_result, d_banks[here.microbatch % len(d_banks)])
        so_far = slice_at(gradients.chunks, here.virtual)

        def run():
            bank = banks[here.microbatch % len(banks)]
            d_chunk, d_shared, d_earlier = self.chunk_backward(
                chunk_params, parameters.shared, here.chunk, bank, microbatch, d_bank, d_sums
            )
            d_start = d_earlier[self.start_row]
            d_first = self._add_first(
                here.virtual == 0, parameters.first, microbatch, d_start, gradients.first
            )
            return d_earlier, d_first, add(so_far, d_chunk), add(gradients.shared, d_shared)

        skip = lambda: (d_bank, gradients.first, so_far, gradients.shared)
        d_bank, d_first, d_chunk, d_shared = jax.lax.cond(here.active, run, skip)
        d_chunks = update_at(gradients.chunks, d_chunk, here.virtual)
        return (d_banks, d_bank), Parameters(d_first, d_chunks, d_shared, gradients.last)

    def _send_forward(self, banks: Banks, tick: Tick) -> Banks:
        """Send the next stage in the ring the rows that it lacks, after a tick's computations."""
        if not self.slots:
            return banks
        forward, stage = self.schedule.forward, self._stage()
        here, after = forward(tick, stage), forward(tick + 1, stage)
        sender = forward(tick, (stage - 1) % self.schedule.stages)
        slots = jnp.stack([self._rows(banks, here, before=j) for j in range(self.slots)])
        slots = self._transfer(slots, tick)
        for j in range(self.slots):
            comes = sender.active & (j < jnp.asarray(self.spans)[sender.chunk])
            rows = jnp.where(comes, slots[j], self._rows(banks, after, before=j + 1))
            banks = self._with_rows(banks, after, rows, before=j + 1)
        return banks

    def _send_back(self, d_memory: tuple[Banks, Bank], tick: Tick) -> Banks:
        """Send the gradients of received rows to the stages that sent the rows."""
        (d_banks, d_bank), backward, stage = d_memory, self.schedule.backward, self._stage()
        here, after = backward(tick, stage), backward(tick + 1, stage)
        d_current, moved = d_bank[None], []
        for j in range(self.slots):
            rows = self._rows(d_current, here, before=j + 1)
            moved.append(rows)
            came = here.active & (here.chunk > 0) & (j < jnp.asarray(self.spans)[here.chunk - 1])
            rows = jnp.where(came, jnp.zeros_like(rows), rows)
            d_current = self._with_rows(d_current, here, rows, before=j + 1)
        # The next microbatch that uses the same bank starts with a gradient of zeros.
        done = here.active & (here.virtual == 0)
        d_bank = jnp.where(done, jnp.zeros_like(d_bank), d_current[0])
        d_banks = d_banks.at[here.microbatch % len(d_banks)].set(d_bank)
        if not self.slots:
            return d_banks
        moved = self._transfer(jnp.stack(moved), tick, back=True)
        for j in range(self.slots):  # `moved` is zeros if this stage sent no rows.
            rows = self._rows(d_banks, after, before=j) + moved[j]
            d_banks = self._with_rows(d_banks, after, rows, before=j)
        return d_banks

    def _start(self, banks: Banks, place: StageWork, before: int) -> tuple:
        row = self.first_chunk_row + (place.chunk - before) * self.chunk_rows
        # If there is no such earlier chunk, the row is negative. Such rows are never sent, so any
        # legal row will do.
        place = (place.microbatch % len(banks), jnp.maximum(row, self.first_chunk_row))
        return (*place, *(0,) * (banks.ndim - 2))

    def _rows(self, banks: Banks, place: StageWork, *, before: int = 0) -> Rows:
        """Return the rows that an earlier chunk has completed for the microbatch of `place`.

        The index of the earlier chunk is less by `before` than the index of the chunk in `place`.
        """
        sizes = (1, self.chunk_rows, *banks.shape[2:])
        return jax.lax.dynamic_slice(banks, self._start(banks, place, before), sizes)[0]

    def _with_rows(self, banks: Banks, place: StageWork, rows: Rows, *, before: int = 0) -> Banks:
        start = self._start(banks, place, before)
        return jax.lax.dynamic_update_slice(banks, rows[None], start)
