"""Which stage works on what, and when: the interleaved schedule of a pipeline, and what it sends.

P stages hold V chunks of layers each (the *virtual* stages); stage r holds the chunks v P + r, of
`C = P V`. M microbatches pass through all of them. In a tick, every stage works on one chunk of one
microbatch, and then hands on to the next stage, around a ring (Narayanan et al. 2021):

    tick            0    1    2    3    4    5    6    7    8        P = 2, V = 2, M = 4
    stage 0        0.0  0.1  2.0  2.1  0.2  0.3  2.2  2.3            chunk.microbatch
    stage 1             1.0  1.1  3.0  3.1  1.2  1.3  3.2  3.3

Stage r is idle in P - 1 of the `M V + P - 1` ticks. The backward pass is the same in reverse.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from sharding.errors import MeshError, nearest_multiples

Caching = Literal["none", "received", "all"]


class Place(NamedTuple):
    """What a stage works on in a tick. Where it is idle, the others are some legal values.

    Attributes:
      active: whether it works at all.
      number: how many pieces of work it has done before.
      virtual: which of its own chunks.
      microbatch: of which microbatch.
      chunk: which of all chunks.
    """

    active: Any
    number: Any
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
    """P `stages` of V = `virtual` chunks, and M `microbatches`.

    Raises:
      MeshError: the microbatches are no multiple of the stages.
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
        """C."""
        return self.stages * self.virtual

    @property
    def ticks(self) -> int:
        """`M V + P - 1`."""
        return self.microbatches * self.virtual + self.stages - 1

    def place(self, tick: Any, stage: Any) -> Place:
        """Of a stage in a tick; both are integer arrays, of NumPy or JAX."""
        work = self.microbatches * self.virtual
        number = tick - stage
        active = (number >= 0) & (number < work)
        number = number.clip(0, work - 1)
        # Rounds of P microbatches: the first is back at stage 0 when the last has left it.
        rounds, within = number // self.chunks, number % self.chunks
        virtual = within // self.stages
        microbatch = rounds * self.stages + within % self.stages
        return Place(active, number, virtual, microbatch, virtual * self.stages + stage)

    def spans(self, caching: Caching) -> np.ndarray:
        """After each chunk, of how many chunks the rows are sent on: those of the latest ones.

        Args:
          caching: the rows that stages keep: "none", so that all rows are sent with each chunk;
            those "received"; or "all", also those that they made themselves.

        Returns:
          [C]. The sum is C (C - 1) / 2 for "none"; P (P - 1) / 2 + (V - 1) P^2 for "received" (Kimi
          Team 2026, section 4.1); and (V - 1) P less for "all".
        """
        so_far = np.arange(1, self.chunks + 1)
        lacked = {"none": self.chunks, "received": self.stages, "all": self.stages - 1}[caching]
        spans = np.minimum(so_far, lacked)
        spans[-1] = 0
        return spans

    def messages(self, spans: np.ndarray) -> tuple[list[tuple[Message, ...]], np.ndarray]:
        """The different sets of messages that there are, and which of them is sent after each tick.

        Args:
          spans: of each chunk, how many slots are sent after it; slot 0 is its own.
        """
        ticks, stages = np.arange(self.ticks)[:, None], np.arange(self.stages)
        at = self.place(ticks, stages)
        sent = np.where(at.active, spans[at.chunk], 0)
        kinds, kind_at = np.unique(sent, axis=0, return_inverse=True)
        return [_messages(kind.tolist()) for kind in kinds], kind_at.reshape(-1)


def _messages(spans: list[int]) -> tuple[Message, ...]:
    """As few as can be, given how many slots each stage sends to the next one."""
    messages, first = [], 0
    for last in sorted(set(spans) - {0}):
        senders = [stage for stage, span in enumerate(spans) if span >= last]
        pairs = tuple((stage, (stage + 1) % len(spans)) for stage in senders)
        messages.append(Message(first, last, pairs))
        first = last
    return tuple(messages)
