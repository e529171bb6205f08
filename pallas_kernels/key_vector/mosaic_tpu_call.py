"""What is fixed while the TPU kernels are traced, and the order in which they take their tiles."""

import dataclasses
from typing import NamedTuple

from pallas_kernels.arguments import Norm
from pallas_kernels.key_vector.block_sizes import BlockSizes, Sizes
from pallas_kernels.key_vector.interface import FRACTION_BITS
from pallas_kernels.target import target


@dataclasses.dataclass(frozen=True)
class Call:
    """What is fixed while tracing."""

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
        """What 1 in the residual's array means."""
        return 2.0**-self.fraction_bits if self.integer else 1.0

    @property
    def centred(self) -> bool:
        return self.norm == "layernorm"

    @property
    def shifted(self) -> bool:
        """Whether products take the residual less a shift: it may not fit bfloat16 otherwise.

        A bfloat16 residual is an exact operand as it is, and its mean is taken off the result.
        """
        return self.centred and self.sizes.residual_dtype != "bfloat16"

    @property
    def slabs(self) -> int:
        return self.sizes.V // self.blocks.slab


class Tail(NamedTuple):
    """Of the last tile along N: how many tokens exist, and where it is; core None is every core."""

    tokens: int
    core: int | None
    tile: int


class Walk(NamedTuple):
    """The tiles of tokens [B, N] of a backward pass: for two cores, if there are and these divide.

    Each core sums the parameters' gradients on its own.
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
        """The sequence and the tile in it."""
        if self.by_batch:
            return c * self.batches + i, j
        return i, c * self.tiles_each + j

    def tail(self, N: int, tokens: int) -> Tail | None:
        """None if every tile of so many tokens is full."""
        if N % tokens == 0:
            return None
        last_core = None if self.by_batch or self.cores == 1 else self.cores - 1
        return Tail(N % tokens, last_core, self.tiles_each - 1)
