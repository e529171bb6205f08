"""Tiles of tokens, and the DMAs of their sources, for the TPU kernels over depth for vectors.

A kernel processes one tile of tokens in a grid step, and a tile in groups of GROUP tokens. A bank
is an array [N, T, D] of N sources. A kernel copies a tile of all active sources to a buffer in VMEM
while it computes the previous tile.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.call import LANES, largest_divisor

# Number of tokens per matrix product: the rows of a bfloat16 register tile.
GROUP = 16


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """The block sizes of a TPU kernel over depth for residual vectors.

    Attributes:
      tokens: the number of tokens per tile, a multiple of 16.
      lanes: the number of entries along D that are processed at a time.
      unroll: the maximum number of token groups per loop iteration.
      weight_pieces: for bfloat16 sources, the number of bfloat16 terms whose sum is a softmax
        weight. With 2, weights keep 16 bits. With 1, they are rounded to bfloat16, as in attention
        kernels. With many sites, 2 is noticeably slower.
    """

    tokens: int
    lanes: int = 512
    unroll: int = 2
    weight_pieces: int = 2


class TiledCall:
    """The tiles of a kernel's tokens. A subclass has the attributes below.

    Attributes:
      N: the number of rows in the bank of sources.
      tokens: the number of tokens.
      width: the number of lanes, D padded to a multiple of 128.
      blocks: the block sizes.
    """

    N: int
    tokens: int
    width: int
    blocks: BlockSizes

    @property
    def tiles(self) -> int:
        """The number of tiles of tokens; the last tile may be only partly filled."""
        return -(-self.tokens // self.blocks.tokens)

    @property
    def cores(self) -> int:
        """The number of grid slices that cores process in parallel: 2, or 1 if `tiles` is odd.

        A kernel that sums over tokens has one sum for each slice.
        """
        return 2 if self.tiles % 2 == 0 else 1

    @property
    def tiles_each(self) -> int:
        """The number of tiles per grid slice; see `cores`."""
        return self.tiles // self.cores

    @property
    def groups(self) -> int:
        """The number of groups of tokens in a tile."""
        return self.blocks.tokens // GROUP

    @property
    def lane_blocks(self) -> list[slice]:
        """The slices of a source's entries (lanes) that a kernel processes one after another."""
        step = self.blocks.lanes
        return [slice(d, min(d + step, self.width)) for d in range(0, self.width, step)]


class Tile:
    """The tile of tokens that a grid step processes.

    Attributes:
      slot: the index of the buffer that contains the tile: 0 or 1.
      first, last: whether the tile is the first or the last one that its core processes.
    """

    def __init__(self, call: TiledCall):
        self._start = pl.program_id(0) * call.tiles_each
        self._step = pl.program_id(1)
        self.slot = self._step & 1
        self.first = self._step == 0
        self.last = self._step == call.tiles_each - 1

    def at(self, steps: int):
        """Return the index of the tile that this core processes `steps` grid steps later."""
        return self._start + self._step + steps


def copy_rows(call, array, buffer, semaphores, rows, tile, slot, action, out=False):
    """Start the DMAs that copy a tile of the first `rows` sources, or wait for them.

    Args:
      call: the static parameters.
      array, buffer: the array in HBM and the pair of buffers in VMEM.
      semaphores: the DMA semaphore of each buffer.
      rows: the number of sources to copy.
      tile: the index of the tile.
      slot: the index of the buffer.
      action: "start" or "wait".
      out: whether to copy from VMEM to HBM.
    """
    tokens, tail = call.blocks.tokens, call.tokens % call.blocks.tokens

    def copy(tokens_here):
        def row(i, _):
            start = pl.multiple_of(tile * tokens, GROUP)
            outer = array.at[i, pl.ds(start, tokens_here)]
            inner = buffer.at[slot, i, pl.ds(0, tokens_here)]
            source, target = (inner, outer) if out else (outer, inner)
            getattr(pltpu.make_async_copy(source, target, semaphores.at[slot]), action)()
            return _

        jax.lax.fori_loop(0, rows, row, 0)

    if not tail:
        copy(tokens)
        return
    pl.when(tile == call.tiles - 1)(lambda: copy(tail))
    pl.when(tile != call.tiles - 1)(lambda: copy(tokens))


def clear(call, buffer, count):
    """Write zeros to those parts of a pair of buffers that no DMA fills.

    The kernel multiplies these parts by a weight of 0. If the memory contained NaN, the product
    would be NaN.
    """
    first = 0 if call.tokens % call.blocks.tokens else count

    def row(i, _):
        for slot in range(2):
            buffer[slot, first + i] = jnp.zeros(buffer.shape[2:], buffer.dtype)
        return _

    jax.lax.fori_loop(0, call.N - first, row, 0)


def each_group(call, body):
    """Run `body(group)` for each group of tokens in a tile, in a partly unrolled loop.

    The number of unrolled iterations is the largest divisor of the number of groups that is at most
    the block size `unroll`.
    """
    unroll = largest_divisor(call.groups, call.blocks.unroll)

    def step(i, _):
        for k in range(unroll):
            body(i * unroll + k)
        return _

    jax.lax.fori_loop(0, call.groups // unroll, step, 0)


def group_rows(group):
    """Return the slice of a tile's rows that contains the tokens of one group."""
    return pl.ds(pl.multiple_of(group * GROUP, GROUP), GROUP)


def fold_lanes(x):
    """Sum x [rows, lanes] over groups of 128 lanes, and return [rows, 128]."""
    return sum(x[:, d : d + LANES] for d in range(0, x.shape[1], LANES))
