"""Block sizes of the TPU kernels in `mosaic_tpu_blocks`, and the check that they fit in VMEM.

The sizes come from a rule or from tuning tables. In the memory order "size_major", [B, D, P, N], a
grid step processes whole register tiles of heads, or all heads.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.call import LANES, divisors
from pallas_kernels.causal_attention.interface import Rows
from pallas_kernels.causal_attention.mosaic_tpu_rows import packed
from pallas_kernels.target import target

# VMEM for data that stays there during a whole kernel call, in units of 1/60 of the VMEM limit.
_KEPT = 32
# The maximum of `KernelWork.vmem_bytes` if gradients are wider than the operands, in the same
# units. The estimate does not count what the compiler spills, so that kernels which fill VMEM have
# no room for larger outputs.
_WITH_WIDE = 56
# Bytes of SMEM for the tables of block pairs. Every chip has 1 MiB of SMEM.
TABLES = 15 * 2**16
# Number of tables of block pairs for size-major arrays. A table has one int32 per pair.
_TABLES_OF_ROWS = 4
# Number of rows in a register tile. A block of a size-major array has whole tiles, or all rows.
_TILE = 8
# Maps the number of tokens per block to the cost of one logit, relative to the best block size. See
# `_costs`.
_BLOCKS = {1024: 1.0, 512: 1.1, 256: 1.55, 128: 2.5}
# `MOST_HEADS`: the maximum number of query heads that are processed together. `_ENTRIES`: the
# approximate maximum number of their logits. More heads take longer to compile.
MOST_HEADS = 20
_ENTRIES = {"attention_blocks_forward": 2**22, "attention_blocks_backward": 2**21}
# `TILE`: the maximum number of queries in a tile of the forward pass, and of keys in a tile of the
# backward pass. `PART`: the maximum number of keys whose weights are computed together in the
# forward pass. These sizes have the shortest schedules on v5p and v6e.
TILE, PART = 256, 512


class Blocks(NamedTuple):
    """The block sizes of a blockwise attention kernel.

    Attributes:
      queries: the number of queries per block, a multiple of 128.
      keys: the number of keys per block, a multiple of 128.
      heads: the number of key heads that are processed together.
    """

    queries: int
    keys: int
    heads: int


class KernelWork(NamedTuple):
    """The heads, the memory order and the block sizes of a blockwise attention kernel.

    All fields except `blocks` describe the whole operands.
    """

    rows: Rows
    heads: int
    kv_heads: int
    size: int
    value_size: int
    dtype: jnp.dtype
    blocks: Blocks
    capped: bool = False  # Whether logits have a soft cap.
    # Whether the gradients of queries, and those of keys and values, are written in float32.
    wide: tuple[bool, bool] = (False, False)

    @property
    def each(self) -> int:
        """The number of query heads per key head."""
        return self.heads // self.kv_heads

    @property
    def step(self) -> int:
        """The number of key heads per grid step."""
        own, alike = self.blocks.heads, self.heads == self.kv_heads
        if self.rows == "head_major":
            return own
        fills_tiles = lambda n: n == self.kv_heads or (alike and n % _TILE == 0)
        return min(n for n in divisors(self.kv_heads) if n % own == 0 and fills_tiles(n))

    @property
    def gradients(self) -> tuple[jnp.dtype, jnp.dtype]:
        """The dtypes of the gradients of queries, and of those of keys and values."""
        return tuple(jnp.dtype(jnp.float32 if wide else self.dtype) for wide in self.wide)

    @property
    def parts(self) -> int:
        """The number of blocks that a grid step reads from a size-major array [B, D, P, N].

        It is 3 if queries, keys and values have separate blocks, and 1 if one block has all P rows.
        """
        return 3 if self.heads == self.kv_heads and self.step % _TILE == 0 else 1

    @property
    def block_rows(self) -> int:
        """The number of heads (of queries, keys and values) in a block of a size-major array."""
        return self.step if self.parts == 3 else self.heads + 2 * self.kv_heads

    @property
    def packed(self) -> int:
        """The number of heads whose rows share one 32-bit word."""
        return packed(self.dtype)

    @property
    def span(self) -> int:
        """The number of queries (in whole blocks) whose gradients fit in VMEM."""
        per_block = self._bytes(self.step * self.each, 4)
        budget = target().vmem_part(_KEPT)
        if self.rows == "head_major":
            budget = min(budget, self._limit - self._moved)
        return self.blocks.queries * max(1, budget // per_block)

    def slots(self, queries: int, *, by_keys: bool) -> int:
        """Return the number of blocks whose extracted heads are in VMEM at the same time.

        The blocks are those that the kernel visits several times: blocks of keys in the forward
        pass, and blocks of queries in the backward pass. The result is the number of all blocks of
        a sequence if they fit in VMEM, and otherwise 1.

        Args:
          queries: the length of the sequence.
          by_keys: whether this is the backward pass.
        """
        heads, item = self.step * (self.each if by_keys else 1), jnp.dtype(self.dtype).itemsize
        count = -(-queries // self.blocks.queries)
        need = self._bytes(heads, 2 * item + (4 if by_keys else 0))
        return count if count * need <= target().vmem_part(_KEPT) else 1

    def supports_rows(self, tokens: int) -> bool:
        """Return whether the kernels support size-major arrays for sequences of this length."""
        queries, keys, _ = self.blocks
        paired = self.heads % self.packed == self.kv_heads % self.packed == 0
        fit = tokens <= self.span and self.vmem_bytes(tokens) <= target().vmem_limit
        count = -(-tokens // queries)
        fit = fit and 4 * _TABLES_OF_ROWS * count * (count + 1) // 2 <= TABLES
        return self.rows == "size_major" and paired and queries == keys and fit

    def vmem_bytes(self, tokens: int) -> int:
        """Estimate the backward kernel's VMEM in bytes.

        VMEM holds double-buffered blocks, the sums of gradients, and some logits.
        """
        queries, keys, _ = self.blocks
        item, of_queries = jnp.dtype(self.dtype).itemsize, self.step * self.each
        sums = self._bytes(of_queries, 4) * -(-min(tokens, self.span) // queries)
        if self.rows == "head_major":
            return sums + self._moved
        sums += self._sums
        rows = 3 * self.block_rows + (3 * self.step if self.parts == 3 else 0) + 2 * of_queries
        extracted = 2 * self.slots(tokens, by_keys=True) * of_queries + 2 * self.step
        return sums + self._bytes(2 * rows + extracted + self.block_rows, item)

    @property
    def fits(self) -> bool:
        """Whether the backward kernel fits in VMEM with one block of queries.

        The memory order is "head_major".
        """
        return self.vmem_bytes(self.blocks.queries) <= self._limit

    @property
    def _limit(self) -> int:
        """The maximum of `vmem_bytes` for head-major arrays."""
        limit = target().vmem_limit
        wider = any(dtype != jnp.dtype(self.dtype) for dtype in self.gradients)
        return limit // 60 * _WITH_WIDE if wider else limit

    @property
    def _sums(self) -> int:
        """The number of VMEM bytes for the gradient sums of a block of keys, and for its logits."""
        queries, keys, _ = self.blocks
        # With a soft cap, the backward pass also keeps the tanh of each logit.
        logits = (5 if self.capped else 4) * queries * keys
        return 4 * (self.step * (self.size + self.value_size) * keys + logits)

    @property
    def _moved(self) -> int:
        """The number of VMEM bytes for double-buffered head-major blocks and for `_sums`."""
        queries, keys, _ = self.blocks
        both, item = self.size + self.value_size, jnp.dtype(self.dtype).itemsize
        of_queries, of_keys = self.step * self.each * queries, self.step * keys * both
        of_d_q, of_d_kv = (dtype.itemsize for dtype in self.gradients)
        moved = of_queries * (item * both + of_d_q * self.size) + of_keys * (item + of_d_kv)
        return self._sums + 2 * moved

    def _bytes(self, heads: int, item: int) -> int:
        return heads * self.size * self.blocks.queries * item


def default_blocks(
    kernel: str,
    N: int,
    *,
    heads: int,
    kv_heads: int,
    size: int,
    value_size: int,
    rows: Rows,
    dtype: str,
    window: int | None = None,
    capped: bool = False,
    wide: tuple[bool, bool] = (False, False),
    **others,
) -> Blocks:
    """Return the block sizes that a fixed rule chooses for the target device.

    For head-major arrays, the chosen blocks fit in VMEM (`KernelWork.fits`) if any blocks do. The
    arguments in `others` are ignored.
    """
    each, (costs, alone) = heads // kv_heads, _costs(kernel)

    def work(blocks: Blocks) -> KernelWork:
        sizes = heads, kv_heads, size, value_size
        return KernelWork(rows, *sizes, jnp.dtype(dtype), blocks, capped, wide)

    def has_room(blocks: Blocks) -> bool:
        return rows == "size_major" or work(blocks).fits

    def of(tokens: int) -> Blocks:
        # Prefer blocks with which one kernel call can process all queries. Only the gradients of
        # queries, and size-major rows, limit this. Then prefer many heads, because work on one head
        # hides the latency of another.
        most = min(MOST_HEADS, _ENTRIES[kernel] // tokens**2)
        fitting = [Blocks(tokens, tokens, n) for n in divisors(kv_heads) if n * each <= most]
        limited = rows == "size_major" or kernel.endswith("backward")
        whole = lambda blocks: not limited or work(blocks).span >= N
        return max(
            (blocks for blocks in fitting if has_room(blocks) and whole(blocks)),
            default=Blocks(tokens, tokens, 1),
        )

    def cost(blocks: Blocks) -> float:
        tokens, count = blocks.queries, -(-N // blocks.queries)
        waits = alone if blocks.heads * each == 1 and tokens <= 512 else 1.0
        # A block of queries sees all blocks of keys up to its own position, or only the blocks in
        # its window.
        in_window = count if window is None else -(-(window - 1) // tokens) + 1
        pairs = sum(min(n, in_window) for n in range(1, count + 1))
        if window is None:
            pairs *= computed_share(blocks, N)
        return waits * costs[tokens] * tokens**2 * 2 * pairs

    sizes = [t for t in _BLOCKS if each * t**2 <= _ENTRIES[kernel]]
    least = Blocks(min(_BLOCKS), min(_BLOCKS), 1)
    return min(filter(has_room, map(of, sizes)), key=cost, default=least)


def computed_share(blocks: Blocks, tokens: int) -> float:
    """Return the share of the logits of its pairs that a kernel without a window computes.

    In a pair on the diagonal, a tile has only those keys and queries of which some are visible to
    each other (see `mosaic_tpu_masks.Mask`). The schedule of a kernel does not show this.

    Args:
      blocks: the block sizes of the kernel.
      tokens: the number of tokens per sequence.
    """
    size, count = blocks.queries, -(-tokens // blocks.queries)
    if blocks.keys != size:
        return 1.0
    left_out = (1 - min(TILE, size) / size) / 2
    return 1 - left_out * count / (count * (count + 1) / 2)


def _costs(kernel: str) -> tuple[dict[int, float], float]:
    """Return a kernel's cost per logit for each block size, and a factor for blocks with one head.

    The first result has the form of `_BLOCKS`. If a block of at most 512 tokens has only one query
    head, its cost is multiplied by the second. The costs come from the schedules of TPU compilers:
    see docs/benchmarks/kernels.md.
    """
    backward = kernel.endswith("backward")
    of_256, alone = (1.5, 1.75) if backward else (_BLOCKS[256], 1.3)
    # On chips whose matrix units have 128 rows, blocks of 256 tokens cost less than in `_BLOCKS`.
    if target().chip.unit == LANES:
        of_256, alone = 1.2 if backward else 1.3, 1.35
    return _BLOCKS | {256: of_256}, alone


def _refused(kernel: str, key: dict[str, Any], tokens: int, blocks: Blocks) -> str | None:
    queries, keys, heads = blocks
    if queries % LANES or keys % LANES or max(queries, keys) % min(queries, keys):
        return (
            f"blocks of {queries} queries and {keys} keys (legal: multiples of {LANES}, the larger "
            "a multiple of the smaller)"
        )
    if key["kv_heads"] % heads:
        groups = key["kv_heads"]
        return f"{heads} key heads at a time (legal: divisors of {groups})"
    of_key = (key[name] for name in ("rows", "heads", "kv_heads", "size", "value_size"))
    work = KernelWork(*of_key, jnp.dtype(key["dtype"]), blocks)
    if (need := work.vmem_bytes(tokens)) > target().vmem_limit:
        return f"{need >> 20} MiB of VMEM (the limit is {target().vmem_limit >> 20} MiB)"
    if work.rows == "size_major" and not work.supports_rows(tokens):
        return (
            f"size-major blocks of {queries} queries and {keys} keys for {tokens} tokens (legal: "
            "equal numbers, for which all gradients of queries fit in VMEM)"
        )
    return None


KERNELS = tuned.register(
    "tpu",
    ("attention_blocks_forward", "attention_blocks_backward"),
    Blocks,
    ("heads", "kv_heads", "size", "value_size", "dtype", "rows", "alibi", "segments"),
    _refused,
    version=3,
)
