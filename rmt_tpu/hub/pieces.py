"""The correspondence between one tensor of the hub and a slice of a parameter."""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from rmt_tpu import config as cfg

Range = tuple[int, int]
Path = tuple[Any, ...]
# How the names of tensors with one axis end.
_VECTORS = (".bias", "norm.weight", ".ln_1.weight", ".ln_2.weight", "ln_f.weight")
_VECTORS += (".A_log", ".dt_bias", ".e_score_correction_bias")
# How the names of tensors without axes end.
_SCALARS = ("_res_bias",)


class Part(NamedTuple):
    """The part of a tensor along one axis: every `step`-th of `total` rows or columns.

    The first of them is the one of number `begin`.
    """

    axis: int
    begin: int
    total: int
    step: int = 1


class Piece(NamedTuple):
    """The correspondence between a tensor in the hub's format and a slice of a parameter.

    Attributes:
      name: the name of the tensor.
      path: the path of the parameter in the tree of `nnx.to_pure_dict`.
      at: the (start, stop) of the slice along each axis of the parameter.
      transposed: whether the tensor's last two axes are swapped relative to the parameter's.
      part: the part of the tensor that the slice is; None if it is the whole tensor. The pieces of
        a tensor follow each other.
      as_it_is: whether the tensor has the shape of the slice. Otherwise it has at most two axes,
        without those of `ones`.
      offset: a number that is added to the tensor's numbers to get those of the parameter.
      stacked: how many matrices of equal size the tensor stacks along a first axis; 0 if it has no
        such axis. The piece is then a part of the one matrix that has the rows of all of them.
      factor: a number by which the parameter's numbers are multiplied to get those of the tensor.
      ones: the numbers of the tensor's additional axes, whose sizes are 1.
      exact: whether the tensor is written in float32, also if others have a narrower dtype.
      padded: whether the tensor may instead have one axis with more numbers, the first of which are
        those of the parameter.
      packed: whether the tensor is stored as two tensors (see `rmt_tpu.hub.packed`).
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
        """The shape of the tensor without the axes of `ones` and stacks."""
        shape = list(self.own_shape)
        if self.part is not None:
            shape[self.part.axis] = self.part.total
        return tuple(shape)

    @property
    def index(self) -> tuple[slice, ...]:
        """The index of the piece in its tensor."""
        if self.part is None:
            return (slice(None),) * len(self.own_shape)
        axis, begin, _, step = self.part
        index = [slice(None)] * len(self.own_shape)
        index[axis] = slice(begin, begin + step * self.own_shape[axis], step)
        return tuple(index)

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of the piece of the tensor."""
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
    """The place of one sublayer's parameters: a repeat of a core of a stack.

    Attributes:
      core: the config of the sublayer's core.
      path: the path of the sublayer's parameters, whose first axis counts repeats.
      repeat: the number of the repeat.
    """

    core: cfg.Core
    path: Path
    repeat: int

    def piece(self, name: str, path: str, *at: Range, transposed: bool = True) -> Piece:
        """Return the piece of the parameter "site/<name>" or "core/<name>" of this sublayer."""
        own = (self.repeat, self.repeat + 1)
        return Piece(name, (*self.path, *path.split("/")), (own, *at), transposed)


def places(model: cfg.ModelConfig) -> Iterator[Place]:
    """Yield the place of every sublayer, in the order of depth."""
    for number, stack in enumerate(model.stacks):
        for repeat in range(stack.repeat):
            for k, core in enumerate(stack.cores):
                yield Place(core, ("stacks", number, k), repeat)


def joined(name: str, parts: list[Piece], axis: int = 0) -> list[Piece]:
    """Return pieces as consecutive parts, along `axis`, of one tensor."""
    sizes = [piece.own_shape[axis] for piece in parts]
    begins = itertools.accumulate(sizes, initial=0)
    return [
        piece._replace(name=name, part=Part(axis, begin, sum(sizes)))
        for piece, begin in zip(parts, begins, strict=False)
    ]


def full(*sizes: int) -> tuple[Range, ...]:
    """Return the ranges of axes that are covered whole."""
    return tuple((0, size) for size in sizes)
