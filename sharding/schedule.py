"""The schedule of a pipeline: the work of each stage in each tick, and the data that it sends.

Each of P stages has V chunks of layers (its *virtual* stages). Stage r has the chunks v P + r, for
v from 0 to V - 1, out of `C = P V` chunks. Each of M microbatches passes forward through all chunks
and then backward through all chunks. In each tick, a stage computes the forward pass of one chunk
for one microbatch, and then the backward pass of one chunk for another microbatch. The backward
passes of a microbatch start as soon as it has left the last chunk ("one forward, one backward",
Narayanan et al. 2021). At the end of a tick, the stages send their results around a ring. The table
shows chunk.microbatch for P = 2, V = 2 and M = 4:

    tick               0   1   2   3   4   5   6   7   8   9  10  11
    stage 0 forward  0.0 0.1 2.0 2.1 0.2 0.3 2.2 2.3
            backward                 2.0 2.1 0.0 0.1 2.2 2.3 0.2 0.3
    stage 1 forward      1.0 1.1 3.0 3.1 1.2 1.3 3.2 3.3
            backward             3.0 3.1 1.0 1.1 3.2 3.3 1.2 1.3

Forward passes take `M V + P - 1` ticks, and each stage has no forward pass in P - 1 of these ticks.
The same is true of backward passes. This is no more idle time than if all forward passes came
before all backward passes. However, a stage keeps the data of at most 2 P microbatches, however
large M is.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sharding.errors import MeshError, nearest_multiples


class StageWork(NamedTuple):
    """The work of a stage in a tick. If `active` is False, the other fields have no meaning.

    Attributes:
      active: whether the stage has work in this tick.
      virtual: the index of the chunk among this stage's chunks.
      microbatch: the index of the microbatch.
      chunk: the index of the chunk among all chunks.
    """

    active: Any
    virtual: Any
    microbatch: Any
    chunk: Any


class Message(NamedTuple):
    """A message that some pairs of stages exchange after a tick.

    Attributes:
      first: the first slot that the message contains.
      last: one more than the last slot that the message contains.
      pairs: the sending and the receiving stage of each pair.
    """

    first: int
    last: int
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Schedule:
    """A schedule for P `stages` with V = `virtual` chunks each, and M `microbatches`.

    The methods accept ticks and stages as integer arrays of NumPy or JAX.

    Raises:
      MeshError: the number of microbatches is not a multiple of the number of stages.
    """

    stages: int
    virtual: int
    microbatches: int

    def __post_init__(self):
        if self.microbatches % self.stages or self.microbatches < 1:
            raise MeshError(
                f"microbatches={self.microbatches} is not a multiple of the mesh's {self.stages} "
                f"stages; nearest legal: {nearest_multiples(self.microbatches, self.stages)}"
            )

    @property
    def chunks(self) -> int:
        """C, the total number of chunks."""
        return self.stages * self.virtual

    @property
    def forward_ticks(self) -> int:
        """The number of ticks until the last microbatch has left the last chunk, `M V + P - 1`."""
        return self.microbatches * self.virtual + self.stages - 1

    @property
    def ticks(self) -> int:
        """The number of ticks until all backward passes are done, `M V + P + C - 2`."""
        return self.forward_ticks + self.chunks - 1

    def forward(self, tick: Any, stage: Any) -> StageWork:
        """Return the chunk and microbatch whose forward pass a stage computes in a tick."""
        return self._place(tick - stage, stage, lambda virtual: virtual)

    def backward(self, tick: Any, stage: Any) -> StageWork:
        """Return the chunk and microbatch whose backward pass a stage computes in a tick.

        The backward pass of the last chunk follows its forward pass in the same tick.
        """
        before = self.chunks - 1 + self.stages - 1 - stage
        return self._place(tick - before, stage, lambda virtual: self.virtual - 1 - virtual)

    def _place(self, number: Any, stage: Any, order: Any) -> StageWork:
        """Return the piece of work with index `number` in the sequence of a stage's work.

        `order` maps n to the index, among the stage's chunks, of the n-th chunk that each
        microbatch runs there.
        """
        work = self.microbatches * self.virtual
        active = (number >= 0) & (number < work)
        number = number.clip(0, work - 1)
        # Microbatches run in rounds of P. The first microbatch of a round returns to stage 0 just
        # after the last microbatch of the round has left stage 0.
        rounds, within = number // self.chunks, number % self.chunks
        virtual = order(within // self.stages)
        microbatch = rounds * self.stages + within % self.stages
        return StageWork(active, virtual, microbatch, virtual * self.stages + stage)

    def max_in_flight(self, first: int = 0) -> int:
        """Return the maximum number of microbatches whose data a stage must keep at the same time.

        If the result is n, the data of microbatch m replaces the data of microbatch m - n, which is
        no longer needed.

        Args:
          first: the index (from 0 to V - 1) of one of the stage's chunks. The stage keeps data of a
            microbatch from this chunk's forward pass until this chunk's backward pass.
        """
        # Stage 0 keeps a microbatch longest, because its forward passes come before those of other
        # stages, and its backward passes after them.
        return self._in(2 * (self.chunks - first * self.stages) - 1)

    @property
    def max_in_flight_one_way(self) -> int:
        """The maximum number of microbatches that have begun but not finished one direction.

        The direction is forward or backward, on one stage: a microbatch begins with the first chunk
        that the stage runs for it, and finishes with the last.
        """
        return self._in((self.virtual - 1) * self.stages + 1)

    def _in(self, ticks: int) -> int:
        """Return the maximum number of microbatches that a stage starts within this many ticks."""
        rounds, ticks = divmod(ticks, self.chunks)
        return min(rounds * self.stages + min(ticks, self.stages), self.microbatches)

    @property
    def spans(self) -> np.ndarray:
        """The numbers of newest chunks whose rows are sent after each chunk, an array [C].

        Stages keep the rows that they receive and the rows that they compute. They therefore lack
        only the rows of the chunks that other stages have run since their own last chunk. The sum
        is P (P - 1) / 2 + (V - 1) P (P - 1). If stages kept only the rows that they receive, it
        would be larger by (V - 1) P (Kimi Team 2026, section 4.1).
        """
        spans = np.minimum(np.arange(1, self.chunks + 1), self.stages - 1)
        spans[-1] = 0
        return spans

    def messages(
        self, spans: np.ndarray, *, back: bool = False
    ) -> tuple[list[tuple[Message, ...]], np.ndarray]:
        """Return the distinct sets of messages, and the index of the set to send after each tick.

        Args:
          spans: for each chunk, the number of slots to send after it; slot 0 contains the chunk's
            own rows.
          back: whether the messages are for the backward pass, in which the slots return to their
            sender after the backward pass of the next chunk.
        """
        ticks, stages = np.arange(self.ticks)[:, None], np.arange(self.stages)
        at = self.backward(ticks, stages) if back else self.forward(ticks, stages)
        of_chunk = np.roll(spans, 1) if back else spans  # The last chunk sends nothing.
        sent = np.where(at.active, of_chunk[at.chunk], 0)
        kinds, kind_at = np.unique(sent, axis=0, return_inverse=True)
        step = -1 if back else 1
        return [_messages(kind.tolist(), step) for kind in kinds], kind_at.reshape(-1)


def _messages(spans: list[int], step: int) -> tuple[Message, ...]:
    """Return the fewest messages with which each stage sends its slots to another stage.

    `spans` has the number of slots that each stage sends. Stage r sends to stage r + `step`, modulo
    the number of stages.
    """
    messages, first = [], 0
    for last in sorted(set(spans) - {0}):
        senders = [stage for stage, span in enumerate(spans) if span >= last]
        pairs = tuple((stage, (stage + step) % len(spans)) for stage in senders)
        messages.append(Message(first, last, pairs))
        first = last
    return tuple(messages)
