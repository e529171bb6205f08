"""Static parameters of the TPU kernels, and the order in which they process their tiles."""

import dataclasses
from typing import NamedTuple

from pallas_kernels.arguments import Norm
from pallas_kernels.key_vector.block_sizes import BlockSizes, Sizes
from pallas_kernels.key_vector.interface import FRACTION_BITS
from pallas_kernels.target import target


@dataclasses.dataclass(frozen=True)
class Call:
    """The parameters of a kernel that are fixed while it is traced."""

    sizes: Sizes
    blocks: BlockSizes
    norm: Norm
    epsilon: int | float
    interpret: bool
    scale: bool = True
    fraction_bits: int = FRACTION_BITS

    @property
    def integer(self) -> bool:
        return self.sizes.residual_dtype == "int16"

    @property
    def unit(self) -> float:
        """The value of 1 in the residual's array."""
        return 2.0**-self.fraction_bits if self.integer else 1.0

    @property
    def centred(self) -> bool:
        return self.norm == "layernorm"

    @property
    def shifted(self) -> bool:
        """Whether products take the residual less a shift, because it may not fit bfloat16 itself.

        A bfloat16 residual is an exact operand without a shift; its mean is subtracted from the
        result.
        """
        return self.centred and self.sizes.residual_dtype != "bfloat16"

    @property
    def slabs(self) -> int:
        return self.sizes.V // self.blocks.slab


class Tail(NamedTuple):
    """The number of tokens in the last tile along N, and its place; core None means every core."""

    tokens: int
    core: int | None
    tile: int


class Walk(NamedTuple):
    """The order of a backward pass over the tiles of tokens [B, N].

    The tiles are divided over two cores if there are two and the tiles divide evenly. Each core
    sums the parameters' gradients on its own.
    """

    cores: int
    batches: int
    tiles_each: int
    by_batch: bool

    @classmethod
    def over(cls, B: int, tiles: int) -> "Walk":
        if target().chip.cores == 1:
            return cls(1, B, tiles, True)
        if B % 2 == 0:
            return cls(2, B // 2, tiles, True)
        return cls(2, B, tiles // 2, False) if tiles % 2 == 0 else cls(1, B, tiles, False)

    def tile(self, c, i, j):
        """Return the index of the sequence and of the tile in it."""
        if self.by_batch:
            return c * self.batches + i, j
        return i, c * self.tiles_each + j

    def tail(self, N: int, tokens: int) -> Tail | None:
        """Return the last, partial tile; None if every tile of this number of tokens is full."""
        if N % tokens == 0:
            return None
        last_core = None if self.by_batch or self.cores == 1 else self.cores - 1
        return Tail(N % tokens, last_core, self.tiles_each - 1)
