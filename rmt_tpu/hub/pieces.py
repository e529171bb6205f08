"""Mappings from hub tensors to slices of parameters."""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from rmt_tpu import config as cfg

Range = tuple[int, int]
Path = tuple[Any, ...]
# Name endings of tensors with one axis.
_VECTORS = (".bias", "norm.weight", ".ln_1.weight", ".ln_2.weight", "ln_f.weight")
_VECTORS += (".A_log", ".dt_bias", ".e_score_correction_bias")
# Name endings of tensors without axes.
_SCALARS = ("_res_bias",)


class Part(NamedTuple):
    """A part of a tensor: equally spaced indices of one axis, and all indices of the other axes.

    Attributes:
      axis: the axis.
      begin: the first index.
      total: the size of the axis in the whole tensor.
      step: the distance between two indices.
    """

    axis: int
    begin: int
    total: int
    step: int = 1


class Piece(NamedTuple):
    """A mapping from one hub tensor, or a part of one, to a slice of a parameter.

    Attributes:
      name: the name of the tensor.
      path: the path of the parameter in the tree of `nnx.to_pure_dict`.
      at: the (start, stop) of the slice along each axis of the parameter.
      transposed: whether the tensor's last two axes are swapped relative to the parameter's.
      part: the part of the tensor that contains the slice; None means the whole tensor. In a list
        of pieces, all pieces of one tensor are adjacent.
      as_it_is: whether the tensor has the same shape as the slice. Otherwise it has at most two
        axes, not counting `ones`.
      offset: when tensors are read, parameter = tensor / factor + offset.
      stacked: the size of the tensor's additional first axis, which stacks matrices; 0 if there is
        no such axis. `part` then refers to one matrix with the rows of all these matrices.
      factor: see `offset`.
      ones: the indices of the tensor's additional axes of size 1.
      exact: whether the tensor is written in float32 even if the other tensors have a narrower
        dtype.
      padded: whether the file's tensor may be a longer vector that starts with the parameter's
        numbers.
      packed: whether the tensor is stored packed, as two tensors (see `rmt_tpu.hub.packed`).
    """

    name: str
    path: Path
    at: tuple[Range, ...]
    transposed: bool = False
    part: Part | None = None
    as_it_is: bool = False
    offset: float = 0.0
    stacked: int = 0
    factor: float = 1.0
    ones: tuple[int, ...] = ()
    exact: bool = False
    padded: bool = False
    packed: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the slice along the parameter's axes."""
        return tuple(stop - start for start, stop in self.at)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        shape = list(self.matrix)
        for axis in self.ones:
            shape.insert(axis, 1)
        if self.stacked:
            shape[:1] = self.stacked, shape[0] // self.stacked
        return tuple(shape)

    @property
    def matrix(self) -> tuple[int, ...]:
        """The shape of the tensor as a matrix, without the axes of `ones` and of `stacked`."""
        shape = list(self.own_shape)
        if self.part is not None:
            shape[self.part.axis] = self.part.total
        return tuple(shape)

    @property
    def index(self) -> tuple[slice, ...]:
        """The index that selects the piece's part of a tensor with the shape `matrix`."""
        if self.part is None:
            return (slice(None),) * len(self.own_shape)
        axis, begin, _, step = self.part
        index = [slice(None)] * len(self.own_shape)
        index[axis] = slice(begin, begin + step * self.own_shape[axis], step)
        return tuple(index)

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of the part of the tensor that this piece maps."""
        if self.as_it_is:
            return self.sizes
        if self.name.endswith(_SCALARS):
            return ()
        *rows, last = self.sizes
        if self.name.endswith(_VECTORS):
            return (math.prod(self.sizes),)
        row = math.prod(rows)
        return (last, row) if self.transposed else (row, last)


class Place(NamedTuple):
    """The location of one sublayer's parameters, which are slices of stacked parameters.

    Attributes:
      core: the config of the sublayer's core.
      path: the path of the sublayer's parameters, whose first axis counts repeats.
      repeat: the sublayer's index along that axis.
    """

    core: cfg.Core
    path: Path
    repeat: int

    def piece(self, name: str, path: str, *at: Range, transposed: bool = True) -> Piece:
        """Return the piece that maps a tensor to this sublayer's parameter `path`.

        The path is "site/<name>" or "core/<name>". The piece's field `at` has the ranges of the
        parameter's axes after the first one.
        """
        own = (self.repeat, self.repeat + 1)
        return Piece(name, (*self.path, *path.split("/")), (own, *at), transposed)


def places(model: cfg.ModelConfig) -> Iterator[Place]:
    """Yield the location of every sublayer's parameters, from the first layer to the last."""
    for number, stack in enumerate(model.stacks):
        for repeat in range(stack.repeat):
            for k, core in enumerate(stack.cores):
                yield Place(core, ("stacks", number, k), repeat)


def joined(name: str, parts: list[Piece], axis: int = 0) -> list[Piece]:
    """Return the pieces as consecutive parts of one tensor along `axis`."""
    sizes = [piece.own_shape[axis] for piece in parts]
    begins = itertools.accumulate(sizes, initial=0)
    return [
        piece._replace(name=name, part=Part(axis, begin, sum(sizes)))
        for piece, begin in zip(parts, begins, strict=False)
    ]


def full(*sizes: int) -> tuple[Range, ...]:
    """Return the range (0, size) for each size."""
    return tuple((0, size) for size in sizes)
