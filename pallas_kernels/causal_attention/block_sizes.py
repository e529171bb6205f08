"""Block sizes of the kernels over blocks, by rule and by table, and the check that they fit VMEM.

With "size_major" rows, [B, D, P, N], a grid step has as many heads as fill whole tiles, or all.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.call import LANES, divisors
from pallas_kernels.causal_attention.interface import Rows
from pallas_kernels.causal_attention.mosaic_tpu_rows import packed
from pallas_kernels.target import target

# MiB (of 60) for what the kernels keep of all blocks of a sequence or of a span of it.
_KEPT = 32
# Rows of a tile; a block of size-major rows has whole tiles or all rows.
_TILE = 8
# Tokens of a block, and the cost of an entry of its logits relative to the best; see `_costs`.
_BLOCKS = {1024: 1.0, 512: 1.04, 256: 1.9, 128: 2.5}
# About the most entries of the logits of heads processed together, and the most heads of queries.
_ENTRIES = 2**21
MOST_HEADS = 20


class Blocks(NamedTuple):
    """Tokens of a block of `queries` and of `keys`, multiples of 128; `heads` of keys at a time."""

    queries: int
    keys: int
    heads: int


class Cut(NamedTuple):
    """A division of a kernel's work: heads, their sizes, the order of rows, and block sizes."""

    rows: Rows
    heads: int
    kv_heads: int
    size: int
    value_size: int
    dtype: jnp.dtype
    blocks: Blocks

    @property
    def each(self) -> int:
        """The number of heads of queries for one of keys."""
        return self.heads // self.kv_heads

    @property
    def step(self) -> int:
        """The number of heads of keys in a grid step."""
        own, alike = self.blocks.heads, self.heads == self.kv_heads
        if self.rows == "head_major":
            return own
        whole = lambda n: n == self.kv_heads or (alike and n % _TILE == 0)
        return min(n for n in divisors(self.kv_heads) if n % own == 0 and whole(n))

    @property
    def parts(self) -> int:
        """Blocks of size-major rows in a step: queries, keys and values, or one of all rows."""
        return 3 if self.heads == self.kv_heads and self.step % _TILE == 0 else 1

    @property
    def block_rows(self) -> int:
        """Size-major rows of a block of queries, keys or values, or of a block of all rows."""
        return self.step if self.parts == 3 else self.heads + 2 * self.kv_heads

    @property
    def packed(self) -> int:
        """The number of heads whose rows share a 32-bit word."""
        return packed(self.dtype)

    @property
    def span(self) -> int:
        """Queries whose gradients the backward kernel can keep, in whole blocks."""
        kept = self._bytes(self.step * self.each, 4)
        room = target().vmem_part(_KEPT)
        if self.rows == "head_major":
            room = min(room, target().vmem_limit - self._moved)
        return self.blocks.queries * max(1, room // kept)

    def slots(self, queries: int, *, by_keys: bool) -> int:
        """Return how many blocks keep their size-major heads in VMEM: all of a sequence, or one.

        These are the blocks that come again with every block of the other kind: blocks of keys in
        the forward pass, blocks of queries in the backward pass (`by_keys`). `queries` is the
        length of the sequence.
        """
        heads, item = self.step * (self.each if by_keys else 1), jnp.dtype(self.dtype).itemsize
        count = -(-queries // self.blocks.queries)
        need = self._bytes(heads, 2 * item + (4 if by_keys else 0))
        return count if count * need <= target().vmem_part(_KEPT) else 1

    def has(self, tokens: int) -> bool:
        """Return whether the kernels take size-major rows of sequences with this many tokens."""
        queries, keys, _ = self.blocks
        paired = self.heads % self.packed == self.kv_heads % self.packed == 0
        fit = tokens <= self.span and self.vmem_bytes(tokens) <= target().vmem_limit
        return self.rows == "size_major" and paired and queries == keys and fit

    def vmem_bytes(self, tokens: int) -> int:
        """Estimate the backward kernel's bytes: blocks in two buffers, sums, and some logits."""
        queries, keys, _ = self.blocks
        item, of_queries = jnp.dtype(self.dtype).itemsize, self.step * self.each
        kept = self._bytes(of_queries, 4) * -(-min(tokens, self.span) // queries)
        if self.rows == "head_major":
            return kept + self._moved
        kept += self._sums
        rows = 3 * self.block_rows + (3 * self.step if self.parts == 3 else 0) + 2 * of_queries
        taken = 2 * self.slots(tokens, by_keys=True) * of_queries + 2 * self.step
        return kept + self._bytes(2 * rows + taken + self.block_rows, item)

    @property
    def fits(self) -> bool:
        """Whether VMEM has room for a block of head-major queries' gradients and for the rest.

        The span of queries is then as long as there is room for.
        """
        return self.vmem_bytes(self.blocks.queries) <= target().vmem_limit

    @property
    def _sums(self) -> int:
        """Bytes of the sums of a block of keys, and of some logits."""
        queries, keys, _ = self.blocks
        return 4 * self.step * (self.size + self.value_size) * keys + 4 * 4 * queries * keys

    @property
    def _moved(self) -> int:
        """Bytes of `_sums` and of blocks of head-major rows in two buffers."""
        queries, keys, _ = self.blocks
        both, item = self.size + self.value_size, jnp.dtype(self.dtype).itemsize
        moved = self.step * self.each * queries * (both + self.size) + 2 * self.step * keys * both
        return self._sums + 2 * item * moved

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
    **others,
) -> Blocks:
    """Return the blocks that a rule chooses for the device lowered for.

    Blocks of head-major rows fit VMEM if any do, which `Cut.fits` says. `others` in the key do not
    matter.
    """
    each, (costs, alone) = heads // kv_heads, _costs(kernel, size)

    def cut(blocks: Blocks) -> Cut:
        return Cut(rows, heads, kv_heads, size, value_size, jnp.dtype(dtype), blocks)

    def has_room(blocks: Blocks) -> bool:
        return rows == "size_major" or cut(blocks).fits

    def of(tokens: int) -> Blocks:
        # Work on one head hides another's latency, and all queries should fit if they can.
        most = min(MOST_HEADS, _ENTRIES // tokens**2)
        fitting = [Blocks(tokens, tokens, n) for n in divisors(kv_heads) if n * each <= most]
        kept = [blocks for blocks in fitting if has_room(blocks) and cut(blocks).span >= N]
        return max(kept, default=Blocks(tokens, tokens, 1))

    def cost(blocks: Blocks) -> float:
        tokens, count = blocks.queries, -(-N // blocks.queries)
        waits = alone if blocks.heads * each == 1 else 1.0
        return waits * costs[tokens] * tokens**2 * count * (count + 1)

    sizes = [t for t in _BLOCKS if each * t**2 <= _ENTRIES]
    least = Blocks(min(_BLOCKS), min(_BLOCKS), 1)
    return min(filter(has_room, map(of, sizes)), key=cost, default=least)


def _costs(kernel: str, size: int) -> tuple[dict[int, float], float]:
    """Return a kernel's `_BLOCKS`, and the relative cost of entries with one head at a time.

    The numbers come from compilers' schedules: docs/benchmarks/kernels.md.
    """
    backward = kernel.endswith("backward")
    of_256, alone = (1.6, 1.45) if backward else (_BLOCKS[256], 1.3)
    if target().chip.unit == LANES:  # Smaller blocks compute fewer entries of a short sequence.
        of_256, alone = 1.2 if backward or size >= LANES else of_256, 1.15
    return _BLOCKS | {256: of_256}, alone


def _refused(kernel: str, key: dict[str, Any], tokens: int, blocks: Blocks) -> str | None:
    queries, keys, heads = blocks
    if queries % LANES or keys % LANES or max(queries, keys) % min(queries, keys):
        return f"blocks of {queries} queries and {keys} keys"
    if key["kv_heads"] % heads:
        groups = key["kv_heads"]
        return f"{heads} heads at a time, of {groups}"
    of_key = (key[name] for name in ("rows", "heads", "kv_heads", "size", "value_size"))
    cut = Cut(*of_key, jnp.dtype(key["dtype"]), blocks)
    if (need := cut.vmem_bytes(tokens)) > target().vmem_limit:
        return f"{need >> 20} MiB of VMEM"
    if cut.rows == "size_major" and not cut.has(tokens):
        return f"blocks of {queries} queries and {keys} keys, of size-major rows"
    return None


KERNELS = tuned.register(
    "tpu",
    ("attention_blocks_forward", "attention_blocks_backward"),
    Blocks,
    ("heads", "kv_heads", "size", "value_size", "dtype", "rows", "alibi", "segments"),
    _refused,
    version=2,
)
