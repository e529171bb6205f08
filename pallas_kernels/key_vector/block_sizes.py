"""Block sizes of the TPU kernels, and the check that a block fits VMEM."""

import dataclasses
from typing import Literal, get_args

import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.call import LANES, divisors, round_up
from pallas_kernels.target import target

# MiB (of 60) that `vmem_bytes` may reach; it does not count every temporary of the compiler.
_BUDGET = 58
# The most rows times tokens of an intermediate, all of which is unrolled into one loop body.
_LARGEST_INTERMEDIATE = 2**20
# The most rows times tokens of a loop body: independent products hide each other's latency.
_UNROLLED = 2**21
# Cost per token relative to the best tile: products of fewer tokens wait longer for their results.
_TILES = {512: 1.0, 256: 1.15, 128: 1.5}

Op = Literal["forward", "backward", "rebuild"]
_NAME = "key_vector_"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The numbers that a kernel is specialised to. R, P or A is 0 if there is no such operand.

    A is the number of vectors that are read again from a rebuilt residual.
    """

    K: int
    V: int
    R: int
    P: int
    residual_dtype: str
    data_dtype: str
    A: int = 0

    def padded(self, rows: int) -> int:
        """Round a number of data rows up to whole tiles."""
        return round_up(rows, sublanes(self.data_dtype))

    @property
    def R_padded(self) -> int:
        return self.padded(self.R)

    @property
    def P_padded(self) -> int:
        return self.padded(self.P)

    @property
    def keeps_operand(self) -> bool:
        """Whether a store keeps the read's operand, which is slow to compute again from int16."""
        kept = self.residual_dtype == "int16" and self.data_dtype == "bfloat16"
        return kept and self.R > 0 and self.P > 0


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """The block sizes of a kernel.

    Attributes:
      tokens: the tokens of a tile, a multiple of 128.
      slab: the values of v that are in VMEM at a time; it divides V.
      store_unroll, read_unroll: the values of v in the body of a loop that stores or reads.
      keep: whether a backward pass with a single slab keeps an intermediate as large as the
        residual instead of computing it twice.
    """

    tokens: int
    slab: int
    store_unroll: int = 1
    read_unroll: int = 4
    keep: bool = False


def choose_block_sizes(op: Op, sizes: Sizes, N: int) -> BlockSizes | None:
    """Return the tuned sizes for the device lowered for, else the default; None if none fits."""
    default = default_block_sizes(op, sizes, N)
    if default is None:
        return None
    return tuned.look_up(KERNELS[_NAME + op], dataclasses.asdict(sizes), N, default)


def default_block_sizes(op: Op, sizes: Sizes, N: int) -> BlockSizes | None:
    """Return the sizes that a rule chooses; None if none fits VMEM."""

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
    """Estimate the bytes of a grid step: moved blocks count twice for the pipeline, others once."""
    s, tokens, slab = sizes, blocks.tokens, blocks.slab
    item = jnp.dtype(s.data_dtype).itemsize
    residual = slab * round_up(s.K, sublanes(s.residual_dtype)) * tokens
    residual *= jnp.dtype(s.residual_dtype).itemsize
    data = slab * s.R_padded * tokens * item
    retrieved = s.P_padded * tokens * item
    of_lanes = lambda rows, columns: round_up(rows, 8) * round_up(columns, LANES)
    # Keys and gains as they are given, and the gains a second time in rows of v.
    keys = 4 * (of_lanes(s.R, s.K) + of_lanes(s.P, s.K) + 2 * of_lanes(s.K, s.V))
    padded = data if s.R_padded != s.R else 0
    if op == "forward":
        raw = s.V * s.P_padded * tokens * 4 if slab < s.V else 0
        kept = slab * round_up(s.K, sublanes(s.data_dtype)) * tokens * item * s.keeps_operand
        return 2 * (2 * residual + data + retrieved * s.V) + raw + padded + kept + keys
    moved = (4 if op == "rebuild" else 3) * residual + 2 * data + slab * retrieved
    moved += slab * s.padded(s.A) * tokens * item
    kept = slab * s.K * tokens * 4 if blocks.keep else 0
    return 2 * moved + slab * retrieved + kept + padded + 3 * keys


def of_slab(sizes: Sizes, tokens: int, slab: int) -> BlockSizes | None:
    """Return the sizes for a slab; None if a loop's intermediate would be too large."""
    if tokens * sizes.K > _LARGEST_INTERMEDIATE:
        return None
    unroll = min(64, max(1, _UNROLLED // (sizes.K * tokens)))
    return BlockSizes(tokens, slab, unroll, max(1, unroll // 2))


def sublanes(dtype) -> int:
    """Return the number of rows of a tile of this dtype."""
    return 32 // jnp.dtype(dtype).itemsize


def _refused(
    kernel: str, key: dict[str, tuned.Value], tokens: int, blocks: BlockSizes
) -> str | None:
    op, sizes, b = kernel.removeprefix(_NAME), Sizes(**key), blocks
    if b.tokens % LANES or b.tokens > tokens:
        return f"tiles of {b.tokens} tokens, of {tokens}"
    if sizes.V % b.slab:
        return f"slabs of {b.slab}, of {sizes.V}"
    if b.tokens * sizes.K > _LARGEST_INTERMEDIATE:
        return "intermediates that are too large"
    if b.keep and (op == "forward" or not sizes.P or b.slab != sizes.V):
        return "nothing to keep"
    if vmem_bytes(op, sizes, b) > target().vmem_limit:
        return f"{vmem_bytes(op, sizes, b) >> 20} MiB of VMEM"
    return None


KERNELS = tuned.register(
    "tpu",
    [_NAME + op for op in get_args(Op)],
    BlockSizes,
    [field.name for field in dataclasses.fields(Sizes)],
    _refused,
    version=6,
)
