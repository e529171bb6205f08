"""Static parameters of the key-vector TPU kernels, and the order in which tiles are processed."""

import dataclasses
from typing import NamedTuple

from pallas_kernels.arguments import Norm
from pallas_kernels.key_vector.block_sizes import BlockSizes, Sizes
from pallas_kernels.key_vector.interface import FRACTION_BITS
from pallas_kernels.target import target


@dataclasses.dataclass(frozen=True)
class KeyVectorKernelCall:
    """The static parameters of a key-vector kernel, constant during tracing.

    Attributes:
      sizes, blocks: the sizes that the kernel is specialised to, and its block sizes.
      norm, epsilon: the norm of the read and its epsilon.
      interpret: whether the kernel is interpreted.
      scale: whether the retrieved vectors are multiplied by rstd.
      fraction_bits: the number of fraction bits of an int16 residual.
    """

    sizes: Sizes
    blocks: BlockSizes
    norm: Norm
    epsilon: int | float
    interpret: bool
    scale: bool = True
    fraction_bits: int = FRACTION_BITS

    @property
    def integer(self) -> bool:
        """Whether the residual is stored in int16 fixed point."""
        return self.sizes.residual_dtype == "int16"

    @property
    def unit(self) -> float:
        """The factor that converts stored values to X: the fixed-point step for int16, else 1."""
        return 2.0**-self.fraction_bits if self.integer else 1.0

    @property
    def centred(self) -> bool:
        """Whether the norm subtracts the mean: True for layernorm, and False for rmsnorm."""
        return self.norm == "layernorm"

    @property
    def shifted(self) -> bool:
        """Whether a number near the mean (the shift) is subtracted before matrix products.

        This keeps precision if the residual is rounded to bfloat16 for the products. A bfloat16
        residual is not rounded, so the mean is subtracted after the products instead.
        """
        return self.centred and self.sizes.residual_dtype != "bfloat16"

    @property
    def slabs(self) -> int:
        """The number of slabs into which the axis V is divided."""
        return self.sizes.V // self.blocks.slab


class Tail(NamedTuple):
    """The last tile of a sequence of N tokens, if it is only partly filled.

    Attributes:
      tokens: the number of tokens in the tile.
      core: the TPU core that processes the tile; None if every core has a last tile of its own.
      tile: the index of the tile among the tiles of its core.
    """

    tokens: int
    core: int | None
    tile: int


class Walk(NamedTuple):
    """The order in which a backward pass processes the tiles of tokens [B, N].

    On a chip with two cores, each core processes half of the tiles and sums its own share of the
    parameters' gradients. This requires an even number of sequences, or of tiles per sequence.
    Otherwise one core processes all tiles.

    Attributes:
      cores: the number of cores that are used.
      batches: the number of sequences per core.
      tiles_each: the number of tiles per core and sequence.
      by_batch: whether the sequences, not the tiles within them, are divided between cores.
    """

    cores: int
    batches: int
    tiles_each: int
    by_batch: bool

    @classmethod
    def over(cls, B: int, tiles: int) -> "Walk":
        """Return the order for B sequences of `tiles` tiles each on the target device's cores."""
        if target().chip.cores == 1:
            return cls(1, B, tiles, True)
        if B % 2 == 0:
            return cls(2, B // 2, tiles, True)
        return cls(2, B, tiles // 2, False) if tiles % 2 == 0 else cls(1, B, tiles, False)

    def tile(self, c, i, j):
        """Return the indices of the sequence and its tile that core c processes in step (i, j)."""
        if self.by_batch:
            return c * self.batches + i, j
        return i, c * self.tiles_each + j

    def tail(self, N: int, tokens: int) -> Tail | None:
        """Return the last tile if it is only partly filled, or else None.

        Args:
          N: the length of a sequence.
          tokens: the number of tokens per tile.
        """
        if N % tokens == 0:
            return None
        last_core = None if self.by_batch or self.cores == 1 else self.cores - 1
        return Tail(N % tokens, last_core, self.tiles_each - 1)
