"""Byte-range reads of safetensors files, local or in a bucket.

The package safetensors can only map local files into memory. This module instead reads a file's
header, and then only the byte ranges that are needed. It can do so in a bucket, too.

This module does not import JAX.
"""

import contextlib
import glob
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from rmt_tpu.errors import RunError, UsageError
from rmt_tpu.storage import Folder, Object, find_objects, open_object

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
# This dict has the numpy dtype for each supported dtype name of safetensors.
DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F64": np.dtype(np.float64),
}
BYTES = "U8"
# A header may have at most this number of bytes. The package safetensors has the same limit.
_MOST_HEADER = 100 * 10**6


class LocalFile:
    """A local file that supports reads of byte ranges.

    Attributes:
      name: the file's path or URL, for messages.
      size: the number of bytes.
      least_gap: the smallest gap between two requested ranges, in bytes, that is worth skipping.
    """

    least_gap = 64 * 2**10

    def __init__(self, path: Path):
        self.name, self._path = str(path), path
        self.size = path.stat().st_size

    def read(self, begin: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes that start at offset `begin`.

        Raises:
          ValueError: the file ends too early.
          OSError: the file cannot be read.
        """
        with open(self._path, "rb", buffering=0) as file:
            file.seek(begin)
            _fill(file, buffer)


class BucketFile:
    """An object in a bucket, with the attributes of a `LocalFile`."""

    least_gap = 4 * 2**20

    def __init__(self, found: Object):
        self.name, self.size, self._generation = found.url, found.size, found.generation

    def read(self, begin: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes that start at offset `begin`, in one request.

        Raises:
          ValueError: the object ends too early.
          Fault: the object was replaced, or the storage does not answer.
        """
        with open_object(self.name, self.size, self._generation) as file:
            file.seek(begin)
            _fill(file, buffer)


def _fill(file, buffer: memoryview) -> None:
    while buffer:
        count = file.readinto(buffer)
        if not count:
            raise ValueError("the file ends within a tensor")
        buffer = buffer[count:]


File = LocalFile | BucketFile


class Entry(NamedTuple):
    """A tensor in a file; `dtype` is the name that safetensors uses."""

    file: File
    dtype: str
    shape: tuple[int, ...]
    begin: int


def find_tensors(folder: Folder) -> dict[str, Entry]:
    """Locate every tensor in a folder; return the entries by tensor name, sorted by name.

    Only the file headers are read.

    Raises:
      UsageError: the folder has no tensors.
      RunError: a file is missing or damaged.
    """
    entries: dict[str, Entry] = {}
    for file in _files(folder):
        with read_errors(file.name):
            entries |= _header(file)
    return dict(sorted(entries.items()))


def _files(folder: Folder) -> list[File]:
    there = set(folder.names())
    if WEIGHTS in there:
        names = [WEIGHTS]
    elif INDEX in there:
        try:
            found = json.loads(folder.read(INDEX).data)["weight_map"].values()
            names = sorted({Path(name).name for name in found})
        except (ValueError, KeyError, TypeError, AttributeError):
            raise RunError(f"{folder}/{INDEX} is damaged: it has no weight_map") from None
    else:
        raise UsageError(
            f"{folder} has neither {WEIGHTS} nor {INDEX}; legal: a folder with one of them"
        )
    for name in names:
        if name not in there:
            raise RunError(f"{folder} has no {name}, which {INDEX} lists")
    if folder.local_path is not None:
        return [LocalFile(folder.local_path / name) for name in names]
    objects = {
        found.url: found for found in find_objects(f"{glob.escape(str(folder))}/*.safetensors")
    }
    return [BucketFile(objects[f"{folder}/{name}"]) for name in names]


def _header(file: File) -> dict[str, Entry]:
    """Read a file's header, a JSON object, and return the location of each tensor by name."""
    length = int.from_bytes(_bytes(file, 0, 8), "little")
    if length > min(_MOST_HEADER, file.size - 8):
        raise ValueError(
            f"the header length of {length} bytes exceeds the file, or the limit of {_MOST_HEADER}"
        )
    values = json.loads(_bytes(file, 8, length))
    values.pop("__metadata__", None)
    entries = {}
    for name, value in values.items():
        (begin, end), shape = value["data_offsets"], tuple(value["shape"])
        count = math.prod(shape)
        itemsize = itemsize_of(value["dtype"])
        fits = itemsize is None or end - begin == count * itemsize
        if not (0 <= begin <= end <= file.size - 8 - length and fits):
            raise ValueError(f"the bytes of {name} {list(shape)} do not fit its shape or the file")
        entries[name] = Entry(file, value["dtype"], shape, 8 + length + begin)
    return entries


def itemsize_of(dtype: str) -> int | None:
    """Return the bytes per element of a safetensors dtype; None if the dtype is not supported.

    The dtype "U8" (bytes) is supported only for packed matrices, see `rmt_tpu.hub.packed`.
    """
    return 1 if dtype == BYTES else DTYPES[dtype].itemsize if dtype in DTYPES else None


def _bytes(file: File, begin: int, count: int) -> bytes:
    buffer = bytearray(count)
    file.read(begin, memoryview(buffer))
    return bytes(buffer)


@contextlib.contextmanager
def read_errors(name: str) -> Iterator[None]:
    """Convert errors in the `with` body into a RunError that names the file."""
    try:
        yield
    except (MemoryError, RunError):
        raise
    except Exception as error:  # damaged files and storage raise many types of errors
        raise RunError(f"{name} cannot be read: {error}") from None


# Dividing a tensor into byte ranges ----------------------------------------------------------

Region = tuple[tuple[int, int], ...]


class View(NamedTuple):
    """An array within the bytes of a tensor.

    Strides are in bytes, and never increase from one axis to the next.
    """

    begin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Block(NamedTuple):
    """A part of a view that is one contiguous range of bytes.

    Attributes:
      region: the range of indices along each axis of the view.
      begin: the first byte.
      count: the number of bytes.
    """

    region: Region
    begin: int
    count: int


def blocks(
    view: View, itemsize: int, wanted: list[Region], *, least_gap: int, most: int
) -> Iterator[Block]:
    """Yield blocks that cover the wanted regions of a view, each of at most `most` bytes.

    For a matrix, a block consists of wanted rows. Whole rows are read even if only some columns are
    wanted, unless a row spans at least `least_gap` bytes. The same holds for arrays with more axes.
    No byte is read twice, even if several regions need it.

    Args:
      view: the view.
      itemsize: the number of bytes of an element.
      wanted: regions of the view, as the (start, stop) of each axis.
      least_gap: size of the smallest gap that is skipped, in bytes.
      most: maximum number of bytes in a block; a block has at least one element.
    """
    shape, strides = view.shape, view.strides
    # Entry i + 1 is the number of bytes that one index of axis i spans.
    extents = [itemsize]
    for size, stride in zip(shape[::-1], strides[::-1], strict=True):
        extents.insert(0, (size - 1) * stride + extents[0])

    def of_axis(axis: int, before: Region, regions: list[Region], begin: int) -> Iterator[Block]:
        inner, stride = extents[axis + 1], strides[axis]
        rest = tuple((0, size) for size in shape[axis + 1 :])
        whole = all(region[axis + 1 :] == rest for region in regions)
        inside = axis + 1 < len(shape) and (inner > most or (inner >= least_gap and not whole))
        for start, stop in _union([region[axis] for region in regions]):
            step = 1 if inside else max(1, (most - inner) // max(stride, 1) + 1)
            for a in range(start, stop, step):
                b, at = min(a + step, stop), begin + a * stride
                if inside:
                    own = [r for r in regions if r[axis][0] <= a < r[axis][1]]
                    yield from of_axis(axis + 1, (*before, (a, b)), own, at)
                else:
                    yield Block((*before, (a, b), *rest), at, (b - a - 1) * stride + inner)

    return of_axis(0, (), wanted, view.begin)


def _union(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Merge ranges that overlap or touch, and yield the results in order."""
    current: tuple[int, int] | None = None
    for start, stop in itertools.chain(sorted(set(ranges)), [(math.inf, math.inf)]):
        if current is not None and start <= current[1]:
            current = current[0], max(current[1], stop)
            continue
        if current is not None:
            yield current
        current = start, stop
