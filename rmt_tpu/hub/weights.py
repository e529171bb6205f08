"""Conversion between hub tensors and parameters, one tensor at a time.

A piece (`rmt_tpu.hub.pieces`) maps a tensor, or a part of it, to a slice of a parameter. A view
(`rmt_tpu.hub.files`) describes where the numbers of a piece are in the bytes of its tensor.
"""

import collections
import concurrent.futures
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float32

from rmt_tpu.errors import ArgumentError, RunError, UsageError
from rmt_tpu.hub import files, packed
from rmt_tpu.hub.files import INDEX, WEIGHTS
from rmt_tpu.hub.models import Description
from rmt_tpu.hub.pieces import Part, Piece
from rmt_tpu.hub.tensors import pieces
from rmt_tpu.storage import Location, open_folder

# Tensors whose names have these endings are ignored. They are constants in older files: RoPE
# frequencies, and GPT-2's causal masks.
_CONSTANTS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
# These are the tensor name of the unembedding W_U in every model type, and the path of the token
# embeddings. If embeddings are tied, both have the same values.
_UNEMBEDDING, _EMBEDDING = "lm_head.weight", ("embedding", "tokens")
SHARD_BYTES = 5 * 10**9  # the maximum number of bytes per file, as in the hub's tools
# These values limit the size of the buffers for reading, in bytes. Larger buffers would not make
# reading faster, and smaller ones would need many small steps.
LEAST_MEMORY, MOST_MEMORY = 16 * 2**20, 64 * 2**20
_BLOCK = 8 * 2**20  # the maximum number of bytes in one read
_READS = 16  # the maximum number of parallel reads


# Reading tensors from files ------------------------------------------------------------------


class Tensors:
    """The tensors in a folder. The constructor reads only file headers; `read` reads values.

    Args:
      location: a local or gs:// folder with model.safetensors, or with several such files and their
        index.

    Attributes:
      folder: the folder.
      memory: the maximum size in bytes of the buffers for reading. It is half of the largest
        tensor's size, but at least 16 MiB and at most 64 MiB.

    Raises:
      UsageError: the folder has no tensors.
      RunError: a file is damaged.
    """

    def __init__(self, location: Location):
        self.folder = open_folder(location)
        self._entries = files.find_tensors(self.folder)
        sizes = (math.prod(entry.shape) * _itemsize(entry) for entry in self._entries.values())
        self.memory = min(max(LEAST_MEMORY, max(sizes, default=0) // 2), MOST_MEMORY)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return a dict from the name of every tensor to its shape."""
        return {name: entry.shape for name, entry in self._entries.items()}

    def dtypes(self) -> dict[str, str]:
        """Return a dict from the name of every tensor to its dtype, as safetensors spells it."""
        return {name: entry.dtype for name, entry in self._entries.items()}

    def read(
        self, wanted: Iterable[tuple[Piece, list[files.Region]]]
    ) -> Iterator[tuple[Piece, files.Region, np.ndarray]]:
        """Read regions of pieces; yield blocks that cover these regions, in the stored dtype.

        Threads read the next blocks in advance, within the limit `memory`.

        Args:
          wanted: pieces, each with the wanted regions of its view (see `view_of`).

        Yields:
          The piece, the block's region in the piece's view, and the block's values.

        Raises:
          RunError: a file is damaged.
        """
        ahead: collections.deque = collections.deque()
        bytes_ahead = 0
        with concurrent.futures.ThreadPoolExecutor(_READS) as pool:
            for piece, block in self._blocks(wanted):
                while ahead and (
                    len(ahead) == _READS or bytes_ahead + block.count > self.memory // 4
                ):
                    bytes_ahead -= ahead[0][1].count
                    yield self._values(*ahead.popleft())
                ahead.append((piece, block, pool.submit(self._read_block, piece, block)))
                bytes_ahead += block.count
            while ahead:
                yield self._values(*ahead.popleft())

    def _blocks(
        self, wanted: Iterable[tuple[Piece, list[files.Region]]]
    ) -> Iterator[tuple[Piece, files.Block]]:
        most = min(self.memory // 16, _BLOCK)
        for piece, regions in wanted:
            entry = self._entries[next(iter(_stored(piece)))]
            size, limit, view = _itemsize(entry), most, view_of(piece, _itemsize(entry))
            if piece.packed:  # a block consists of whole groups, and unpacking enlarges it
                regions = [packed.of_groups(view, region) for region in regions]
                view, size = packed.views(view)[0], packed.GROUP_BYTES
                limit //= packed.GROWTH
            least_gap = entry.file.least_gap
            for block in files.blocks(view, size, regions, least_gap=least_gap, most=limit):
                yield piece, block

    def _read_block(self, piece: Piece, block: files.Block) -> list[np.ndarray]:
        """Read a block's bytes from each of the one or two tensors that store the piece."""
        ranges = [(block.begin, block.count)]
        if piece.packed:
            ranges.append(packed.range_of_scales(view_of(piece, 1), block.region))
        found = []
        for name, (begin, count) in zip(_stored(piece), ranges, strict=True):
            entry, data = self._entries[name], np.empty(count, np.uint8)
            with files.read_errors(entry.file.name):
                entry.file.read(entry.begin + begin, memoryview(data))
            found.append(data)
        return found

    def _values(
        self, piece: Piece, block: files.Block, data: concurrent.futures.Future
    ) -> tuple[Piece, files.Region, np.ndarray]:
        if piece.packed:
            view = view_of(piece, 1)
            return piece, *packed.values(view, block.region, *data.result())
        dtype = files.DTYPES[self._entries[piece.name].dtype]
        shape, (values,) = [stop - start for start, stop in block.region], data.result()
        strides = view_of(piece, dtype.itemsize).strides
        return piece, block.region, np.ndarray(shape, dtype, values, strides=strides)

    def equal(self, one: str, other: str) -> bool:
        """Return whether two tensors have the same shape, and the same values in float32."""
        entries = self._entries[one], self._entries[other]
        legal = all(entry.dtype in files.DTYPES for entry in entries)
        if not legal or entries[0].shape != entries[1].shape:
            return False
        size = _BLOCK // 8
        return all(
            np.array_equal(*[self._numbers(entry, begin, begin + size) for entry in entries])
            for begin in range(0, math.prod(entries[0].shape), size)
        )

    def _numbers(self, entry: files.Entry, begin: int, end: int) -> Float32[np.ndarray, " count"]:
        """Read the numbers from `begin` to `end` of a tensor, in the order of its file."""
        dtype, end = files.DTYPES[entry.dtype], min(end, math.prod(entry.shape))
        found = np.empty((end - begin) * dtype.itemsize, np.uint8)
        with files.read_errors(entry.file.name):
            entry.file.read(entry.begin + begin * dtype.itemsize, memoryview(found))
        return found.view(dtype).astype(np.float32)

    def check_finite(self, name: str, values: np.ndarray) -> None:
        """Check that the values of the tensor `name` are finite in float32.

        Raises:
          RunError: a value is not finite, or overflows float32.
        """
        if not np.isfinite(values).all():
            entry = self._entries.get(name) or self._entries[f"{name}{packed.SUFFIXES[0]}"]
            raise RunError(
                f"{entry.file.name}: {name} has values that are not finite in "
                "float32; legal: a folder written from finite weights"
            )


def _itemsize(entry: files.Entry) -> int:
    return files.itemsize_of(entry.dtype) or 1


def _stored(piece: Piece) -> dict[str, tuple[int, ...]]:
    """Return a dict from name to shape, for the tensors that store a piece.

    A packed piece has two tensors.
    """
    if piece.packed:
        return packed.stored(piece.name, piece.shape)
    return {piece.name: piece.shape}


def _fitted(piece: Piece, shape: tuple[int, ...] | None) -> Piece:
    """Return the piece, adapted to the tensor's shape in the file if the tensor may be longer."""
    count = math.prod(piece.own_shape)
    if not piece.padded or shape is None or len(shape) != 1 or shape[0] < count:
        return piece
    return piece._replace(ones=(), part=Part(0, 0, shape[0]))


def view_of(piece: Piece, itemsize: int) -> files.View:
    """Return a view of a piece's bytes in its tensor, with the axes of the parameter.

    For a transposed matrix, the view has the parameter's last axis first, because this axis is the
    slowest one in the file.
    """
    own = piece.own_shape
    whole = list(own)
    if piece.part is not None:
        whole[piece.part.axis] = piece.part.total
    strides = [itemsize * math.prod(whole[axis + 1 :]) for axis in range(len(own))]
    begin = 0
    if piece.part is not None:
        begin = piece.part.begin * strides[piece.part.axis]
        strides[piece.part.axis] *= piece.part.step
    if piece.as_it_is:
        return files.View(begin, own, tuple(strides))
    # One axis of the tensor combines all of the parameter's axes except the last.
    *rows, last = piece.sizes
    if len(own) < 2:
        stride = strides[0] if own else itemsize
        return files.View(begin, piece.sizes, _split(piece.sizes, stride))
    if not is_moved(piece):
        return files.View(begin, piece.sizes, (*_split(rows, strides[0]), strides[1]))
    return files.View(begin, (last, *rows), (strides[0], *_split(rows, strides[1])))


def is_moved(piece: Piece) -> bool:
    """Return whether the parameter's last axis is the first axis of the piece's view."""
    return piece.transposed and not piece.as_it_is and len(piece.own_shape) == 2


def _split(sizes: Sequence[int], stride: int) -> tuple[int, ...]:
    """Split an axis with the given stride into axes of these sizes; return their strides."""
    return tuple(stride * math.prod(sizes[axis + 1 :]) for axis in range(len(sizes)))


def pieces_by_parameter(
    tensors: Tensors, described: Description
) -> dict[tuple[Any, ...], list[Piece]]:
    """Check a folder's tensors, and return a dict from each parameter's path to its pieces.

    If embeddings are tied, a file may still contain W_U's tensor, with the embedding's values.

    Raises:
      UsageError: tensors are missing or unknown, or have a wrong shape or an unsupported dtype; or
        embeddings are tied, but W_U's tensor differs from the embedding's. The message lists the
        first 8 problems.
    """
    shapes, problems = tensors.shapes(), []
    expected = pieces(described.model, described.family, shapes)
    dtypes = tensors.dtypes()
    family = described.family
    bases = (base for base in (*family.other_bases, family.base) if _any_begins(shapes, base))
    expected = _renamed(expected, family.base, next(bases, ""))
    expected = [_fitted(piece, shapes.get(piece.name)) for piece in expected]
    wanted = [(piece, *tensor) for piece in expected for tensor in _stored(piece).items()]
    for piece, name, own in wanted:
        shape, legal = shapes.get(name), [files.BYTES] if piece.packed else list(files.DTYPES)
        if shape is None:
            problems.append(f"{name} {list(own)} is missing")
        elif shape != own:
            problems.append(f"{name} is {list(shape)}, not {list(own)}")
        elif dtypes[name] not in legal:
            problems.append(f"{name} has dtype {dtypes[name]}; legal: {', '.join(legal)}")
    problems = list(dict.fromkeys(problems))
    names = {name for _, name, _ in wanted}
    unknown = [n for n in shapes if n not in names and not n.endswith(_CONSTANTS)]
    unknown = [name for name in unknown if not name.startswith(family.ignored)]
    if described.model.tied_embeddings and _UNEMBEDDING in unknown:
        unknown.remove(_UNEMBEDDING)
        embedding = next(piece.name for piece in expected if piece.path == _EMBEDDING)
        if not problems and not tensors.equal(_UNEMBEDDING, embedding):
            problems.append(
                f"{_UNEMBEDDING} has other values than {embedding}, which tie_word_embeddings=true "
                "ties to it"
            )
    problems += [f"{name} {list(shapes[name])} is not a tensor of this model" for name in unknown]
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise UsageError(
            f"the tensors in {tensors.folder} do not fit its config.json: "
            f"{'; '.join(problems[:8])}{more}"
        )
    by_path: dict[tuple[Any, ...], list[Piece]] = {}
    for piece in expected:
        by_path.setdefault(piece.path, []).append(piece)
    return by_path


def _any_begins(names: Iterable[str], base: str) -> bool:
    return any(name.startswith(base) for name in names)


def _renamed(expected: list[Piece], old: str, new: str) -> list[Piece]:
    """Return the pieces with `new` in place of the name prefix `old`."""

    def renamed(piece: Piece) -> Piece:
        begins = piece.name.startswith(old)
        return piece._replace(name=new + piece.name.removeprefix(old)) if begins else piece

    return [renamed(piece) for piece in expected]


class Target(NamedTuple):
    """An array that is filled with a part of a parameter.

    Attributes:
      begin: the indices of the part's first element within the parameter.
      values: the array, which starts as zeros.
    """

    begin: tuple[int, ...]
    values: Float[np.ndarray, "..."]


def fill(tensors: Tensors, parameter_pieces: list[Piece], targets: list[Target]) -> None:
    """Read a parameter into the targets, which are float32 arrays for parts of it.

    Each byte range is read only once for all targets. Elements that no piece covers, such as expert
    loads, stay 0.

    Args:
      tensors: the tensors in the folder.
      parameter_pieces: the pieces that map tensors to the parameter.
      targets: the destinations, whose arrays are modified.

    Raises:
      RunError: a value is not finite, or a file is damaged.
    """
    needs: dict[Piece, list[tuple[Target, files.Region]]] = {}
    for piece in parameter_pieces:
        regions = [_in_piece(piece, target) for target in targets]
        pairs = [(t, r) for t, r in zip(targets, regions, strict=True) if r is not None]
        if pairs:
            needs[piece] = pairs
    wanted = ((piece, [region for _, region in pairs]) for piece, pairs in needs.items())
    for piece, block, values in tensors.read(wanted):
        for target, region in needs[piece]:
            common = _common(block, region)
            if common is not None:
                source = _slices(common, [start for start, _ in block])
                _copy(tensors, piece, common, values[source], target)


def _in_piece(piece: Piece, target: Target) -> files.Region | None:
    """Return the region of a piece's view that a target needs, or None if they do not overlap."""
    part = [(b, b + size) for b, size in zip(target.begin, target.values.shape, strict=True)]
    common = _common(piece.at, part)
    if common is None:
        return None
    own = [(a - start, b - start) for (a, b), (start, _) in zip(common, piece.at, strict=True)]
    return (own[-1], *own[:-1]) if is_moved(piece) else tuple(own)


def _copy(
    tensors: Tensors, piece: Piece, region: files.Region, values: np.ndarray, target: Target
) -> None:
    """Convert the values of a region of a piece's view, and write them into a target."""
    if is_moved(piece):
        region, values = (*region[1:], region[0]), np.moveaxis(values, 0, -1)
    begins = [b - start for b, (start, _) in zip(target.begin, piece.at, strict=True)]
    part = target.values[_slices(region, begins)]
    # Suppress numpy's warning if a float64 value overflows; `check_finite` raises an error.
    with np.errstate(over="ignore"):
        part[...] = values
        if piece.factor != 1:
            part /= np.float32(piece.factor)
        if piece.offset:
            part += np.float32(piece.offset)
    tensors.check_finite(piece.name, part)


def _common(one: Iterable[tuple[int, int]], other: Iterable[tuple[int, int]]) -> Any:
    """Return the intersection of two regions, or None if it is empty."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return found if all(a < b for a, b in found) else None


def _slices(region: files.Region, begins: Iterable[int]) -> tuple[slice, ...]:
    """Return the index of a region in an array that starts at the indices `begins`."""
    return tuple(slice(a - at, b - at) for (a, b), at in zip(region, begins, strict=True))


# Writing tensors to files --------------------------------------------------------------------


def write(
    folder: Path, tensor_pieces: list[Piece], value: Callable[[Piece], np.ndarray], dtype: Any
) -> None:
    """Write tensors as one safetensors file, or, if larger than 5 GB, as several with an index.

    Args:
      folder: the folder to write to.
      tensor_pieces: all tensors of the model.
      value: a function that returns the slice of the parameter that a piece describes.
      dtype: the dtype of the written tensors, except pieces with `exact`, which are float32.

    Raises:
      UsageError: safetensors is not installed.
      ArgumentError: `dtype` cannot express a number of a tensor.
      RunError: a file cannot be written.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import save_file
    except ImportError:
        raise UsageError(
            "writing the hub's format needs the package safetensors: pip install 'rmt_tpu[hub]'"
        ) from None

    by_name: dict[str, list[Piece]] = {}
    for piece in tensor_pieces:
        by_name.setdefault(piece.name, []).append(piece)
    groups: list[list[str]] = [[]]
    total = group_bytes = 0
    for name, (piece, *_) in by_name.items():
        count = math.prod(piece.shape) * (4 if piece.exact else np.dtype(dtype).itemsize)
        if groups[-1] and group_bytes + count > SHARD_BYTES:
            groups.append([])
            group_bytes = 0
        groups[-1].append(name)
        group_bytes, total = group_bytes + count, total + count
    single, files = len(groups) == 1, {}
    for number, group in enumerate(groups, 1):
        file = WEIGHTS if single else f"model-{number:05}-of-{len(groups):05}.safetensors"
        tensors = {name: _tensor(by_name[name], value, dtype) for name in group}
        # safetensors makes a file that only its owner can read. It gets the mode of other files.
        (folder / file).touch()
        mode = (folder / file).stat().st_mode
        try:
            save_file(tensors, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:  # The disk may be full.
            reason = " ".join(str(error).split())
            raise RunError(f"{folder / file} cannot be written: {reason}") from None
        (folder / file).chmod(mode)
        files |= dict.fromkeys(tensors, file)
    if not single:
        index: Mapping[str, Any] = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _tensor(parts: list[Piece], value: Callable[[Piece], np.ndarray], dtype: Any) -> np.ndarray:
    first = parts[0]
    tensor = np.empty(first.matrix, np.float32 if first.exact else dtype)
    for piece in parts:
        shape = piece.own_shape[::-1] if piece.transposed else piece.own_shape
        # Suppress numpy's warning if a number overflows; the check below raises an error.
        with np.errstate(over="ignore"):
            part = value(piece).reshape(shape) * np.float32(piece.factor) - np.float32(piece.offset)
            part = part.T if piece.transposed else part
            tensor[piece.index] = part
        if not np.isfinite(tensor[piece.index]).all():
            raise ArgumentError(
                f"dtype={tensor.dtype} cannot express the tensor {piece.name}, whose largest "
                f"magnitude is {np.abs(part).max():.4g}; legal: finite weights, and a dtype with "
                "their range, like float32"
            )
    return tensor.reshape(first.shape)
