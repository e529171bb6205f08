"""Conversion between the hub's tensors and parameters, one tensor at a time."""

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rmt_tpu.errors import RunError, UsageError
from rmt_tpu.hub.models import Description
from rmt_tpu.hub.pieces import Piece
from rmt_tpu.hub.tensors import pieces

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
_DTYPES = ("F32", "BF16", "F16", "F64")
# How the names of constants end that older files store in addition to parameters: the frequencies
# of RoPE, and GPT-2's causal masks.
_CONSTANTS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
_SHARD = 5 * 10**9  # maximum number of bytes per file, as in the hub's own tools

Index = tuple[slice, ...]


# Reading -------------------------------------------------------------------------------------


class Tensors:
    """The tensors in a folder; a tensor is read only when it is requested.

    Args:
      folder: a folder with model.safetensors, or with several such files and their index.

    Raises:
      UsageError: the folder has no tensors, or safetensors is not installed.
      RunError: a file is damaged.
    """

    def __init__(self, folder: Path):
        self.folder, self._files, self._names = folder, {}, {}
        for file in _weight_files(folder):
            with _read_errors(folder / file):
                opened = _library().safe_open(folder / file, framework="numpy")
                self._files[file] = opened
                self._names |= dict.fromkeys(opened.keys(), file)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor, by name."""
        return {n: tuple(self._file(n).get_slice(n).get_shape()) for n in self._names}

    def dtypes(self) -> dict[str, str]:
        """Return the dtype of every tensor, by name, as safetensors spells it."""
        return {n: self._file(n).get_slice(n).get_dtype() for n in self._names}

    def read(self, piece: Piece) -> np.ndarray:
        """Read a piece of a tensor in the tensor's stored dtype."""
        name = piece.name
        with _read_errors(self.folder / self._names[name]):
            if piece.part is None:
                return self._file(name).get_tensor(name)
            return self._file(name).get_slice(name)[piece.index]

    def check_finite(self, name: str, values: np.ndarray) -> None:
        """Check that the values of the tensor `name` are finite in float32.

        Raises:
          RunError: a value is not finite, or overflows float32.
        """
        if not np.isfinite(values).all():
            raise RunError(
                f"{self.folder / self._names[name]}: {name} has values that are not finite in "
                "float32; legal: a folder written from finite weights"
            )

    def _file(self, name: str) -> Any:
        return self._files[self._names[name]]


def pieces_by_parameter(
    tensors: Tensors, described: Description
) -> dict[tuple[Any, ...], list[Piece]]:
    """Return the pieces that make up each parameter, by the parameter's path.

    If embeddings are tied and W_U has no tensor, the embedding's tensor is used for W_U.

    Raises:
      UsageError: tensors are missing or unknown, have other shapes or are not floats. The message
        lists the first 8 problems, with the two shapes or the dtype.
    """
    shapes, problems, expected = tensors.shapes(), [], pieces(described.model, described.family)
    dtypes = tensors.dtypes()
    if described.tied and "lm_head.weight" not in shapes:
        tied = {"lm_head.weight": expected[0].name}
        expected = [piece._replace(name=tied.get(piece.name, piece.name)) for piece in expected]
    family = described.family
    bases = (base for base in (*family.other_bases, family.base) if _any_begins(shapes, base))
    expected = _renamed(expected, family.base, next(bases, ""))
    for piece in expected:
        shape = shapes.get(piece.name)
        if shape is None:
            problems.append(f"{piece.name} {list(piece.shape)} is missing")
        elif shape != piece.shape:
            problems.append(f"{piece.name} is {list(shape)}, not {list(piece.shape)}")
        elif dtypes[piece.name] not in _DTYPES:
            legal = ", ".join(_DTYPES)
            problems.append(f"{piece.name} has dtype {dtypes[piece.name]}; legal: {legal}")
    problems = list(dict.fromkeys(problems))
    names = {piece.name for piece in expected}
    unknown = [n for n in shapes if n not in names and not n.endswith(_CONSTANTS)]
    unknown = [name for name in unknown if not name.startswith(family.ignored)]
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
    """Return pieces whose tensors' names begin with `new` in place of `old`."""

    def renamed(piece: Piece) -> Piece:
        begins = piece.name.startswith(old)
        return piece._replace(name=new + piece.name.removeprefix(old)) if begins else piece

    return [renamed(piece) for piece in expected]


def reader(
    tensors: Tensors, parameter_pieces: list[Piece], shape: tuple[int, ...]
) -> Callable[[Index], Any]:
    """Return a function that reads any slice of a parameter from its pieces, in float32.

    What no piece covers is zeros, such as the loads of experts. The function raises RunError if a
    value is not finite.

    Args:
      tensors: the tensors in the folder.
      parameter_pieces: the pieces of the parameter.
      shape: the shape of the parameter.
    """

    def read(index: Index) -> np.ndarray:
        ranges = [s.indices(size)[:2] for s, size in zip(index, shape, strict=True)]
        part = np.zeros([stop - start for start, stop in ranges], np.float32)
        for piece in parameter_pieces:
            common = [
                (max(a, start), min(b, stop))
                for (a, b), (start, stop) in zip(piece.at, ranges, strict=True)
            ]
            if all(a < b for a, b in common):
                value = tensors.read(piece)
                value = (value.T if piece.transposed else value).reshape(piece.sizes)
                source = (
                    slice(a - lo, b - lo) for (a, b), (lo, _) in zip(common, piece.at, strict=True)
                )
                target = (
                    slice(a - lo, b - lo) for (a, b), (lo, _) in zip(common, ranges, strict=True)
                )
                target = tuple(target)
                # No warning if a float64 value overflows float32: `check_finite` raises an error.
                with np.errstate(over="ignore"):
                    part[target] = value[tuple(source)]
                    part[target] += np.float32(piece.offset)
                tensors.check_finite(piece.name, part[target])
        return part

    return read


def _weight_files(folder: Path) -> list[str]:
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    if not (folder / INDEX).is_file():
        raise UsageError(
            f"{folder} has neither {WEIGHTS} nor {INDEX}; legal: a folder with one of them"
        )
    try:
        names = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        files = sorted(set(names))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RunError(f"{folder / INDEX} is damaged: it has no weight_map") from None
    for file in files:
        if not (folder / Path(file).name).is_file():
            raise RunError(f"{folder} has no {file}, which {INDEX} lists")
    return [Path(file).name for file in files]


@contextlib.contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # safetensors and NumPy raise errors of several types
        raise RunError(f"{path} cannot be read: {error}") from None


def _library() -> Any:
    try:
        import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
        import safetensors
    except ImportError:
        raise UsageError(
            "weights in the hub's format need the package safetensors: pip install 'rmt_tpu[hub]'"
        ) from None
    return safetensors


# Writing -------------------------------------------------------------------------------------


def write(
    folder: Path, tensor_pieces: list[Piece], value: Callable[[Piece], np.ndarray], dtype: Any
) -> None:
    """Write tensors as safetensors files; more than 5 GB are split into files with an index.

    Args:
      folder: the folder to write to.
      tensor_pieces: all tensors of the model.
      value: a function that returns the slice of the parameter that a piece describes.
      dtype: the dtype of the written tensors.

    Raises:
      UsageError: safetensors is not installed.
    """
    _library()
    from safetensors.numpy import save_file

    by_name: dict[str, list[Piece]] = {}
    for piece in tensor_pieces:
        by_name.setdefault(piece.name, []).append(piece)
    groups: list[list[str]] = [[]]
    total = group_bytes = 0
    for name, (piece, *_) in by_name.items():
        count = math.prod(piece.shape) * np.dtype(dtype).itemsize
        if groups[-1] and group_bytes + count > _SHARD:
            groups.append([])
            group_bytes = 0
        groups[-1].append(name)
        group_bytes, total = group_bytes + count, total + count
    single, files = len(groups) == 1, {}
    for number, group in enumerate(groups, 1):
        file = WEIGHTS if single else f"model-{number:05}-of-{len(groups):05}.safetensors"
        tensors = {name: _tensor(by_name[name], value, dtype) for name in group}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, file)
    if not single:
        index: Mapping[str, Any] = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _tensor(parts: list[Piece], value: Callable[[Piece], np.ndarray], dtype: Any) -> np.ndarray:
    tensor = np.empty(parts[0].shape, dtype)
    for piece in parts:
        shape = piece.own_shape[::-1] if piece.transposed else piece.own_shape
        part = value(piece).reshape(shape) - np.float32(piece.offset)
        part = part.T if piece.transposed else part
        tensor[piece.index] = part[:, None] if piece.squeezed else part
    return tensor
