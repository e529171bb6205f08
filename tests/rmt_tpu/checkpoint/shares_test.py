"""Which process writes what: everything once, and each about as many bytes."""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rmt_tpu.checkpoint import arrays as checkpoint_arrays
from rmt_tpu.checkpoint import save as checkpoint_save
from rmt_tpu.checkpoint.arrays import StoredArray, chunk_shape
from rmt_tpu.checkpoint.shares import Layout, parts_of
from rmt_tpu.distributed import processes
from tests.rmt_tpu.checkpoint.checkpoints import mesh, sharded


class Device(NamedTuple):
    number: int
    process_index: int


@dataclass(frozen=True)
class Hosts(jax.sharding.Sharding):
    """A sharding over many devices, `per_host` of each process, that needs none of them.

    Axis i of an array is cut over axis `axes[i]` of a mesh of such sizes, if that is not None.
    """

    sizes: tuple[int, ...]
    axes: tuple[int | None, ...]
    per_host: int

    def devices_indices_map(self, shape):
        cuts = [1 if axis is None else self.sizes[axis] for axis in self.axes]
        lengths = [size // cut for size, cut in zip(shape, cuts, strict=True)]
        found = {}
        for number, place in enumerate(np.ndindex(self.sizes)):
            at = [0 if axis is None else place[axis] for axis in self.axes]
            index = (slice(i * n, (i + 1) * n) for i, n in zip(at, lengths, strict=True))
            found[Device(number, number // self.per_host)] = tuple(index)
        return found


def gpt(sizes, per_host, cut) -> tuple[Layout, ...]:
    """GPT-2 with two moments of each number; matrices are cut over axis `cut` of the mesh."""
    width, layers, none = 768, 12, None
    shapes = {
        (50304, width): (none, cut),
        (1024, width): (none, cut),
        (layers, width, 3 * width): (none, cut, none),
        (layers, width, width): (none, none, cut),
        (layers, width, 4 * width): (none, cut, none),
        (layers, 4 * width, width): (none, none, cut),
        (layers, width): (none, none),
        (width,): (none,),
    }
    layouts = [Layout((), (), 4, Hosts(sizes, (), per_host)), Layout((3,), (3,), 4, None)]
    for shape, axes in shapes.items():
        pieces = [n // (1 if a is none else sizes[a]) for n, a in zip(shape, axes, strict=True)]
        chunk = chunk_shape(np.broadcast_to(np.float32(0), pieces))
        layouts += 3 * [Layout(shape, chunk, 4, Hosts(sizes, axes, per_host))]
    return tuple(layouts)


def written(layouts, processes) -> list[int]:
    """The bytes of each process, after a look that every chunk is written once by who has it."""
    marks = [
        np.zeros([n // max(1, c) for n, c in zip(layout.shape, layout.chunk, strict=True)], int)
        for layout in layouts
    ]
    totals = [0] * processes
    for process in range(processes):
        for part in parts_of(process, layouts):
            layout = layouts[part.array]
            assert part.piece in _pieces(layout, process)
            chunks = []
            for (start, stop), (first, last), size in zip(
                part.index, part.piece, layout.chunk, strict=True
            ):
                assert first <= start < stop <= last
                assert start % size == stop % size == 0
                chunks.append(slice(start // size, stop // size))
            marks[part.array][tuple(chunks)] += 1
            numbers = math.prod(stop - start for start, stop in part.index)
            totals[process] += numbers * layout.item_bytes
    for mark, layout in zip(marks, layouts, strict=True):
        assert (mark == (layout.sharding is not None)).all()
    return totals


@cache
def _pieces(layout, process) -> set:
    pieces = layout.sharding.devices_indices_map(layout.shape).items()
    return {
        tuple((i.start, i.stop) for i in index)
        for device, index in pieces
        if device.process_index == process
    }


@pytest.mark.parametrize(
    ("sizes", "per_host", "cut"),
    [
        pytest.param((2, 1), 1, None, id="copies_on_2_hosts"),
        pytest.param((16, 1), 1, None, id="copies_on_16_hosts"),
        pytest.param((8, 4), 4, 1, id="cut_within_8_hosts_and_copied_by_all"),
        pytest.param((3, 4), 2, 1, id="cut_over_pairs_of_hosts_and_copied_by_3_pairs"),
        pytest.param((1, 8), 2, 1, id="cut_over_4_hosts_with_a_few_copies"),
    ],
)
def test_every_number_is_written_once_and_each_process_writes_about_as_much(sizes, per_host, cut):
    totals = written(gpt(sizes, per_host, cut), math.prod(sizes) // per_host)
    assert max(totals) <= 1.1 * sum(totals) / len(totals)
    assert min(totals) >= 0.9 * sum(totals) / len(totals)


def test_few_copies_are_split():
    """A part that is cut out takes memory of the device for a moment; a whole copy does not."""
    layouts = gpt((2, 1), 1, None)
    parts = [part for process in range(2) for part in parts_of(process, layouts)]
    split = {part.array for part in parts if part.index != part.piece}
    assert split == set()
    counts = Counter(part.array for part in parts)
    assert set(counts.values()) == {1}


def test_the_first_process_has_less_of_copies_where_it_has_more_of_others():
    everywhere = Hosts((2,), (None,), 1)
    layouts = (Layout((100,), (100,), 1, None), Layout((120,), (10,), 1, everywhere))
    assert written(layouts, 2) == [10, 110]


def test_blocks_are_the_shares_and_what_every_process_has_is_of_the_first(monkeypatch):
    """Two processes that hold the same two shards, each in four chunks."""
    monkeypatch.setattr(checkpoint_arrays, "CHUNK_BYTES", 16)
    numbers = np.arange(32, dtype=np.float32).reshape(8, 4)
    here = jax.device_put(numbers, sharded(mesh(2), "x"))
    everywhere = mock.Mock(
        spec=jax.Array,
        is_fully_addressable=False,
        addressable_shards=here.addressable_shards,
        sharding=Hosts((2, 2), (1, None), 2),
        dtype=here.dtype,
    )
    sources = {"shared": everywhere, "host": np.ones(2, np.float32), "array": here}
    arrays = [
        StoredArray(name, source.shape, "float32", chunk_shape(here), None)
        for name, source in {**sources, "shared": here}.items()
    ]
    arrays[1] = arrays[1]._replace(chunk=(2,))
    found, sizes = np.zeros_like(numbers), []
    for process in range(2):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        monkeypatch.setattr(processes, "is_first", lambda process=process: process == 0)
        blocks = checkpoint_save.blocks_of(sources, arrays)
        names = [block.array.name for block in blocks if block.array.name != "shared"]
        assert names == (["host", "array", "array"] if process == 0 else [])
        sizes.append(sum(block.num_bytes for block in blocks))
        for block in blocks:
            if block.array.name == "shared":
                found[block.index] += np.asarray(block.cut())
    np.testing.assert_array_equal(found, numbers)
    assert sum(sizes) == 2 * numbers.nbytes + 8
    # The first has all of the others, so the second writes all of what both hold.
    assert sizes == [numbers.nbytes + 8, numbers.nbytes]


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "pinned_host"])
def test_a_part_of_a_piece_is_held_alone(monkeypatch, on_host):
    monkeypatch.setattr(checkpoint_save, "is_host", lambda device: on_host)
    values = jax.device_put(jnp.arange(64.0).reshape(16, 4), jax.devices()[1])
    array = StoredArray("w", (32, 8), "float32", (4, 2), None)
    index, within = (slice(20, 24), slice(2, 4)), (slice(4, 8), slice(2, 4))
    block = checkpoint_save.Block(array, index, values, within)
    assert block.num_bytes == 4 * 2 * 4
    np.testing.assert_array_equal(block.cut(), np.asarray(values)[within])
    (held,) = checkpoint_save.snapshot([block])
    assert (held.array, held.index, held.within) == (array, index, ...)
    assert held.num_bytes == 4 * 2 * 4
    np.testing.assert_array_equal(held.cut(), np.asarray(values)[within])
    if not on_host:
        assert held.values.sharding.memory_kind == "pinned_host"
