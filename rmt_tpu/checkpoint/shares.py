"""Functions that decide which parts of a checkpoint each process writes.

All processes write about the same number of bytes. If several processes hold copies of the same
numbers, only one of them writes these. The choice depends only on the shardings of the arrays, so
all processes make the same choice without communication.
"""

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import jax

from rmt_tpu.checkpoint.arrays import Index, index_of

# A replicated piece is split into chunks if it is larger than this fraction of the mean bytes per
# process. Otherwise one process could write much more than the mean. Smaller pieces are not split,
# because a part of a piece must first be copied on its device.
_COARSE = 1 / 4


class Layout(NamedTuple):
    """The layout of an array in storage and on devices.

    Attributes:
      shape: shape of the array.
      chunk: shape of the stored chunks. The shard of each device consists of whole chunks.
      item_bytes: number of bytes per number.
      sharding: sharding over devices, or None if every process has the whole array. The first
        process then writes it.
    """

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    item_bytes: int
    sharding: jax.sharding.Sharding | None


class Part(NamedTuple):
    """A part of an array that is assigned to one process for writing.

    Attributes:
      array: position of the array in the list of layouts.
      piece: the shard of a device that contains the part, as an index into the array.
      index: the part itself, as an index into the array.
    """

    array: int
    piece: Index
    index: Index


@lru_cache(maxsize=4)  # Every save of a run calls this function with the same layouts.
def parts_of(process: int, layouts: tuple[Layout, ...]) -> tuple[Part, ...]:
    """Return the parts that a process writes, in the order of the arrays.

    The parts of all processes together contain every number of every sharded array exactly once.

    Args:
      process: number of the process, which is the `process_index` of its devices.
      layouts: the layouts of all arrays.
    """
    related = _related_processes(process, layouts)
    own: list[Part] = []
    copies: list[tuple[int, tuple[int, ...], Part]] = []
    written: Counter[int] = Counter()  # Maps each process to the number of bytes assigned to it.
    for position, layout in enumerate(layouts):
        if layout.sharding is None:
            written[0] += math.prod(layout.shape) * layout.item_bytes
            continue
        for holders, pieces in _holders(layout.sharding, layout.shape).items():
            if holders[0] not in related:
                continue
            parts = [Part(position, piece, piece) for piece in pieces]
            sizes = [_bytes(part, layouts) for part in parts]
            if len(holders) > 1:
                copies += [(n, holders, part) for n, part in zip(sizes, parts, strict=True)]
                continue
            written[holders[0]] += sum(sizes)
            if holders[0] == process:
                own += parts
    total = sum(written[p] for p in related) + sum(size for size, _, _ in copies)
    split_above = _COARSE * total / len(related)
    shared = [
        (_bytes(part, layouts), holders, part)
        for size, holders, copy in copies
        for part in (_chunks(copy, layouts[copy.array].chunk) if size > split_above else [copy])
    ]
    # Parts with more copies are assigned later. Each goes to the process with the fewest bytes.
    shared.sort(key=lambda each: (len(each[1]), -each[0]))
    heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for size, holders, part in shared:
        heap = heaps.setdefault(holders, [(0, holder) for holder in holders])
        # A heap orders processes by their assigned bytes. Update the entries of processes to which
        # another heap has assigned parts.
        while heap[0][0] != (now := written[heap[0][1]]):
            heapq.heapreplace(heap, (now, heap[0][1]))
        owner = heap[0][1]
        written[owner] += size
        if owner == process:
            own.append(part)
    return tuple(sorted(own))


def _bytes(part: Part, layouts: tuple[Layout, ...]) -> int:
    return math.prod(stop - start for start, stop in part.index) * layouts[part.array].item_bytes


def _related_processes(process: int, layouts: tuple[Layout, ...]) -> set[int]:
    """Return the processes whose parts affect which parts `process` writes.

    These are the processes that hold copies of its pieces, the processes that hold copies of their
    pieces, and so on. On a large mesh they are a small subset.
    """
    groups = {
        holders
        for layout in layouts
        if layout.sharding is not None
        for holders in _holders(layout.sharding, layout.shape)
    }
    related, near = set(), {process}
    while near:
        related |= near
        near = {p for holders in groups if not related.isdisjoint(holders) for p in holders}
        near -= related
    return related


@lru_cache(maxsize=1024)
def _holders(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...]
) -> dict[tuple[int, ...], list[Index]]:
    """Return the distinct shards of an array, grouped by the processes that hold them.

    Returns:
      A dict from tuples of process numbers to the shards, as indices into the array.
    """
    found: dict[Index, set[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        found.setdefault(index_of(index, shape), set()).add(device.process_index)
    groups: dict[tuple[int, ...], list[Index]] = {}
    for piece, holders in sorted(found.items()):
        groups.setdefault(tuple(sorted(holders)), []).append(piece)
    return groups


def _chunks(copy: Part, chunk: tuple[int, ...]) -> Iterator[Part]:
    """Yield each stored chunk of a shard as a separate part."""
    axes = [
        [(at, min(at + step, stop)) for at in range(start, stop, step)]
        for (start, stop), step in zip(copy.index, chunk, strict=True)
    ]
    return (copy._replace(index=index) for index in itertools.product(*axes))
