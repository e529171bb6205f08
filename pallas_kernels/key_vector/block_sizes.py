"""Block sizes of the key-vector TPU kernels, and the check that the blocks fit in VMEM."""

import dataclasses
from typing import Literal, get_args

import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.call import LANES, divisors, round_up
from pallas_kernels.target import target

# The maximum of `vmem_bytes`, in units of 1/60 of the VMEM limit. It is less than 60 because
# `vmem_bytes` does not count all of the compiler's temporaries.
_BUDGET = 58
# Maximum number of elements (rows times tokens) of an intermediate array. The compiler unrolls the
# code for a whole array into one loop body.
_LARGEST_INTERMEDIATE = 2**20
# Maximum number of elements (rows times tokens) in an unrolled loop body, in which independent
# matrix products hide each other's latency.
_UNROLLED = 2**21
# Maps the number of tokens per tile to the estimated cost per token, relative to the best number.
# With smaller tiles, shorter matrix products hide less of their latency.
_TILES = {512: 1.0, 256: 1.15, 128: 1.5}

Op = Literal["forward", "backward", "rebuild"]
_NAME = "key_vector_"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes and dtypes of a kernel's operands.

    Attributes:
      K, V: the sizes of a token's residual matrix.
      R: the number of stored vectors; 0 if the kernel stores none.
      P: the number of retrieved vectors; 0 if the kernel retrieves none.
      residual_dtype, data_dtype: the dtypes of the residual and of the data.
      A: the number of vectors that a backward pass reads from the rebuilt residual; 0 if none.
    """

    K: int
    V: int
    R: int
    P: int
    residual_dtype: str
    data_dtype: str
    A: int = 0

    def padded(self, rows: int) -> int:
        """Round a number of data vectors up to whole register tiles of the data's dtype."""
        return round_up(rows, sublanes(self.data_dtype))

    @property
    def R_padded(self) -> int:
        """R, rounded up to whole register tiles."""
        return self.padded(self.R)

    @property
    def P_padded(self) -> int:
        """P, rounded up to whole register tiles."""
        return self.padded(self.P)

    @property
    def keeps_operand(self) -> bool:
        """Whether the store keeps a copy of the residual, in the data's dtype, for the read.

        It does so for int16 residuals, because converting them a second time is slow.
        """
        kept = self.residual_dtype == "int16" and self.data_dtype == "bfloat16"
        return kept and self.R > 0 and self.P > 0


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """The block sizes of a key-vector TPU kernel.

    Attributes:
      tokens: the number of tokens per tile, a multiple of 128.
      slab: the size of a slab, which is the range of V that is in VMEM at a time. It divides V.
      store_unroll, read_unroll: the number of indices along V per loop iteration, for stores and
        for reads.
      keep: whether a backward pass with a single slab keeps an intermediate result in VMEM instead
        of computing it twice. The intermediate is as large as the residual.
    """

    tokens: int
    slab: int
    store_unroll: int = 1
    read_unroll: int = 4
    keep: bool = False


def choose_block_sizes(op: Op, sizes: Sizes, N: int) -> BlockSizes | None:
    """Return the block sizes for the target device, from a table of tuned sizes or by default.

    Returns None if no block sizes fit in VMEM.
    """
    default = default_block_sizes(op, sizes, N)
    if default is None:
        return None
    return tuned.look_up(KERNELS[_NAME + op], dataclasses.asdict(sizes), N, default)


def default_block_sizes(op: Op, sizes: Sizes, N: int) -> BlockSizes | None:
    """Return the block sizes that the heuristic selects; None if no block sizes fit in VMEM."""

    def cost(tokens):
        return -(-N // tokens) * tokens * _TILES[tokens]

    for slabs in divisors(sizes.V):
        slab = sizes.V // slabs
        for tokens in sorted((t for t in _TILES if t <= N), key=cost):
            blocks = of_slab(sizes, tokens, slab)
            keeps = slabs == 1 and op != "forward" and sizes.P > 0
            for keep in (True, False) if keeps else (False,):
                if blocks is None:
                    continue
                blocks = dataclasses.replace(blocks, keep=keep)
                if vmem_bytes(op, sizes, blocks) <= target().vmem_part(_BUDGET):
                    return blocks
    return None


def vmem_bytes(op: Op, sizes: Sizes, blocks: BlockSizes) -> int:
    """Estimate the VMEM of a grid step, in bytes.

    Blocks that the pipeline copies count twice, because they are double-buffered.
    """
    s, tokens, slab = sizes, blocks.tokens, blocks.slab
    item = jnp.dtype(s.data_dtype).itemsize
    residual = slab * round_up(s.K, sublanes(s.residual_dtype)) * tokens
    residual *= jnp.dtype(s.residual_dtype).itemsize
    data = slab * s.R_padded * tokens * item
    retrieved = s.P_padded * tokens * item
    of_lanes = lambda rows, columns: round_up(rows, 8) * round_up(columns, LANES)
    # The bytes of the keys, of the gain, and of a transposed copy [V, K] of the gain.
    keys = 4 * (of_lanes(s.R, s.K) + of_lanes(s.P, s.K) + 2 * of_lanes(s.K, s.V))
    padded = data if s.R_padded != s.R else 0
    if op == "forward":
        raw = s.V * s.P_padded * tokens * 4 if slab < s.V else 0
        kept = slab * round_up(s.K, sublanes(s.data_dtype)) * tokens * item * s.keeps_operand
        return 2 * (2 * residual + data + retrieved * s.V) + raw + padded + kept + keys
    # The cotangents of an int16 residual, one read and one written, have the data's dtype.
    dtype = s.data_dtype if s.residual_dtype == "int16" else s.residual_dtype
    cotangent = slab * round_up(s.K, sublanes(dtype)) * tokens * jnp.dtype(dtype).itemsize
    moved = (2 if op == "rebuild" else 1) * residual + 2 * cotangent + 2 * data + slab * retrieved
    moved += slab * s.padded(s.A) * tokens * item
    kept = slab * s.K * tokens * 4 if blocks.keep else 0
    return 2 * moved + slab * retrieved + kept + padded + 3 * keys


def of_slab(sizes: Sizes, tokens: int, slab: int) -> BlockSizes | None:
    """Return block sizes with `tokens` tokens per tile and `slab` indices along V per slab.

    Returns None if an intermediate array would be too large.
    """
    if tokens * sizes.K > _LARGEST_INTERMEDIATE:
        return None
    unroll = min(64, max(1, _UNROLLED // (sizes.K * tokens)))
    return BlockSizes(tokens, slab, unroll, max(1, unroll // 2))


def sublanes(dtype) -> int:
    """Return the number of rows (sublanes) in a register tile of `dtype`."""
    return 32 // jnp.dtype(dtype).itemsize


def _refused(
    kernel: str, key: dict[str, tuned.Value], tokens: int, blocks: BlockSizes
) -> str | None:
    op, sizes, b = kernel.removeprefix(_NAME), Sizes(**key), blocks
    if b.tokens % LANES or b.tokens > tokens:
        return f"tiles of {b.tokens} tokens (legal: multiples of {LANES}, up to {tokens})"
    if sizes.V % b.slab:
        return f"slabs of {b.slab} entries (legal: divisors of V={sizes.V})"
    if b.tokens * sizes.K > _LARGEST_INTERMEDIATE:
        return (
            f"intermediates of {b.tokens} x {sizes.K} numbers (legal: at most "
            f"{_LARGEST_INTERMEDIATE} in total)"
        )
    if b.keep and (op == "forward" or not sizes.P or b.slab != sizes.V):
        return "keep=True, although this kernel has nothing to keep"
    if vmem_bytes(op, sizes, b) > target().vmem_limit:
        need, limit = vmem_bytes(op, sizes, b) >> 20, target().vmem_limit >> 20
        return f"{need} MiB of VMEM (the limit is {limit} MiB)"
    return None


KERNELS = tuned.register(
    "tpu",
    [_NAME + op for op in get_args(Op)],
    BlockSizes,
    [field.name for field in dataclasses.fields(Sizes)],
    _refused,
    version=6,
)
