"""The schedule of a pipeline: which stage works on what, when, and what it sends.

P stages hold V chunks of layers each (the *virtual* stages); stage r holds the chunks v P + r, of
`C = P V`. M microbatches pass through all chunks, forward and then back. In a tick, every stage
computes one chunk of one microbatch, and then undoes one of another: a microbatch turns back as
soon as it has left the last chunk ("one forward, one backward", Narayanan et al. 2021). After both
the stage sends its results on around a ring. P = 2, V = 2, M = 4, as chunk.microbatch:

    tick               0   1   2   3   4   5   6   7   8   9  10  11
    stage 0 forward  0.0 0.1 2.0 2.1 0.2 0.3 2.2 2.3
            backward                 2.0 2.1 0.0 0.1 2.2 2.3 0.2 0.3
    stage 1 forward      1.0 1.1 3.0 3.1 1.2 1.3 3.2 3.3
            backward             3.0 3.1 1.0 1.1 3.2 3.3 1.2 1.3

Stage r is idle in P - 1 of the `M V + P - 1` ticks in which chunks are computed, and also in P - 1
of the ticks in which chunks are undone: no more than if all microbatches went forward before the
first turned back. But a stage keeps data of 2 P microbatches at most, however many there are.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from sharding.errors import MeshError, nearest_multiples

Caching = Literal["none", "received", "all"]


class Place(NamedTuple):
    """The work of a stage in a tick. For an idle stage, all but `active` are some legal values.

    Attributes:
      active: whether the stage works at all.
      virtual: the index of the chunk among the stage's own.
      microbatch: the index of the microbatch.
      chunk: the index of the chunk among all.
    """

    active: Any
    virtual: Any
    microbatch: Any
    chunk: Any


class Message(NamedTuple):
    """Slots `first` to `last` (not included) of what is sent, between pairs of stages."""

    first: int
    last: int
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Schedule:
    """A schedule of P `stages` of V = `virtual` chunks each, and M `microbatches`.

    Ticks and stages in the arguments of its methods are integer arrays, of NumPy or JAX.

    Raises:
      MeshError: the number of microbatches is no multiple of the number of stages.
    """

    stages: int
    virtual: int
    microbatches: int

    def __post_init__(self):
        if self.microbatches % self.stages or self.microbatches < 1:
            raise MeshError(
                f"microbatches={self.microbatches} is not a multiple of the {self.stages} stages "
                f"of the mesh; nearest legal: {nearest_multiples(self.microbatches, self.stages)}"
            )

    @property
    def chunks(self) -> int:
        """C, the number of all chunks."""
        return self.stages * self.virtual

    @property
    def forward_ticks(self) -> int:
        """The number of ticks until the last microbatch has left the last chunk: `M V + P - 1`."""
        return self.microbatches * self.virtual + self.stages - 1

    @property
    def ticks(self) -> int:
        """The number of ticks until the last microbatch is back: `M V + P + C - 2`."""
        return self.forward_ticks + self.chunks - 1

    def forward(self, tick: Any, stage: Any) -> Place:
        """Return what a stage computes in a tick."""
        return self._place(tick - stage, stage, lambda virtual: virtual)

    def backward(self, tick: Any, stage: Any) -> Place:
        """Return what a stage undoes in a tick; the last chunk is undone when just computed."""
        before = self.chunks - 1 + self.stages - 1 - stage
        return self._place(tick - before, stage, lambda virtual: self.virtual - 1 - virtual)

    def _place(self, number: Any, stage: Any, order: Any) -> Place:
        """Return the place of a stage's piece of work `number`, given the order of its chunks."""
        work = self.microbatches * self.virtual
        active = (number >= 0) & (number < work)
        number = number.clip(0, work - 1)
        # Rounds have P microbatches: the first is back at stage 0 when the last has left it.
        rounds, within = number // self.chunks, number % self.chunks
        virtual = order(within // self.stages)
        microbatch = rounds * self.stages + within % self.stages
        return Place(active, virtual, microbatch, virtual * self.stages + stage)

    def room(self, first: int = 0) -> int:
        """Return for how many microbatches a stage needs room at any time.

        What the stage keeps of microbatch m has the place `m % room`, where the earlier content is
        no longer needed.

        Args:
          first: the index (of V) of one of the stage's chunks. The stage keeps something of a
            microbatch from the forward pass of this chunk until the chunk is undone.
        """
        # Stage 0 is the first to compute a chunk and the last to undo it.
        return self._in(2 * (self.chunks - first * self.stages) - 1)

    @property
    def room_one_way(self) -> int:
        """The room for what a stage keeps from its first chunk to its last, or on the way back."""
        return self._in((self.virtual - 1) * self.stages + 1)

    def _in(self, ticks: int) -> int:
        """Return how many microbatches a stage begins with in this many ticks, at most."""
        rounds, ticks = divmod(ticks, self.chunks)
        return min(rounds * self.stages + min(ticks, self.stages), self.microbatches)

    def spans(self, caching: Caching) -> np.ndarray:
        """Return, for each chunk, of how many of the latest chunks rows are sent on after it.

        Args:
          caching: the rows that stages keep: "none", so that all rows are sent with each chunk;
            "received", the rows that they received; or "all", also those that they made themselves.

        Returns:
          [C]. The sum is C (C - 1) / 2 for "none"; P (P - 1) / 2 + (V - 1) P^2 for "received" (Kimi
          Team 2026, section 4.1); and (V - 1) P less for "all".
        """
        so_far = np.arange(1, self.chunks + 1)
        lacked = {"none": self.chunks, "received": self.stages, "all": self.stages - 1}[caching]
        spans = np.minimum(so_far, lacked)
        spans[-1] = 0
        return spans

    def messages(
        self, spans: np.ndarray, *, back: bool = False
    ) -> tuple[list[tuple[Message, ...]], np.ndarray]:
        """Return the distinct sets of messages, and which of them is sent after each tick.

        Args:
          spans: for each chunk, how many slots are sent after it; slot 0 is its own.
          back: whether the messages return what was sent after a chunk to where it came from, when
            the next chunk was undone.
        """
        ticks, stages = np.arange(self.ticks)[:, None], np.arange(self.stages)
        at = self.backward(ticks, stages) if back else self.forward(ticks, stages)
        of_chunk = np.roll(spans, 1) if back else spans  # none is sent after the last one
        sent = np.where(at.active, of_chunk[at.chunk], 0)
        kinds, kind_at = np.unique(sent, axis=0, return_inverse=True)
        step = -1 if back else 1
        return [_messages(kind.tolist(), step) for kind in kinds], kind_at.reshape(-1)


def _messages(spans: list[int], step: int) -> tuple[Message, ...]:
    """Return the fewest messages that send each stage's slots to the stage `step` further on.

    `spans` has the number of slots that each stage sends.
    """
    messages, first = [], 0
    for last in sorted(set(spans) - {0}):
        senders = [stage for stage, span in enumerate(spans) if span >= last]
        pairs = tuple((stage, (stage + step) % len(spans)) for stage in senders)
        messages.append(Message(first, last, pairs))
        first = last
    return tuple(messages)
