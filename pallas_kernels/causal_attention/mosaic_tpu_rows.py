"""Extraction of heads from size-major blocks [D, rows, tokens] in VMEM, and the reverse.

In the blockwise kernels, "rows_q" is a block of size-major rows, and "q" is the heads [heads, D,
tokens] that are extracted from it into scratch. Other arrays are named in the same way.

A head consists of every `rows`-th row of the flattened block. Strided loads fetch such rows, but
only as 32-bit words in 128 lanes. The bfloat16 rows of two neighbouring heads share words. They are
therefore loaded together and split, and results are joined before they are stored.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.call import LANES, round_up

# Number of 32-bit words per vector component that `Layout.view` returns. A view starts at a
# multiple of this number.
VIEWED = 4


class Layout(NamedTuple):
    """The layout of a block of size-major rows, and of its 32-bit words in scratch.

    The words are arranged in tiles of 128 tokens. In this class, an entry is one of the D
    components of a head's vectors.
    """

    rows: int
    size: int
    tokens: int
    dtype: jnp.dtype

    @property
    def packed(self) -> int:
        """The number of heads whose rows share one word."""
        return packed(self.dtype)

    @property
    def words(self) -> int:
        """The number of 32-bit words per entry (a component of a vector), over all heads."""
        return self.rows // self.packed

    @property
    def stride(self) -> int:
        """The number of words in scratch between successive entries of a head."""
        return self.words if self.words in (1, 2, 4) else round_up(self.words, 8)

    @property
    def scratch(self) -> Any:
        """The VMEM scratch buffer for the words of a block.

        Its shape is [tiles of 128 tokens, entries * stride, 128]. Its dtype is int32 if two heads
        share one word.
        """
        dtype = jnp.int32 if self.packed == 2 else self.dtype
        return pltpu.VMEM((self.tokens // LANES, self.size * self.stride, LANES), dtype)

    def fetch(self, block: Any, words: Any) -> None:
        """Copy the rows of a block to 32-bit words in scratch."""
        for lanes, at, i in self._places():
            rows = block[i, :, lanes]
            words[at] = pltpu.bitcast(rows, jnp.int32) if self.packed == 2 else rows

    def deliver(self, words: Any, block: Any) -> None:
        """Copy 32-bit words in scratch to the rows of a block, the inverse of `fetch`."""
        for lanes, at, i in self._places():
            rows = words[at]
            block[i, :, lanes] = pltpu.bitcast(rows, self.dtype) if self.packed == 2 else rows

    @property
    def direct(self) -> bool:
        """Whether strided loads can read heads directly from a block of 128 tokens (see `view`)."""
        return self.packed == 2 and self.words % 8 == 0

    def view(self, block: Any, first: Any) -> Any:
        """Return a block of 128 tokens as words, in the order of `fetch`, starting at `first`.

        `first` must be a multiple of `VIEWED`. The offset of a load within a tile of that many
        words is then known at compile time.
        """
        words = block.bitcast(jnp.int32).reshape(self.size * self.words, LANES)
        return words.at[pl.ds(first, (self.size - 1) * self.words + VIEWED)]

    def read_heads(self, words: Any, row: Any) -> list[Float[Array, "D tokens"]]:
        """Return the one or two heads that are stored in word `row` of each vector component."""
        return self.read_heads_of_tiles(
            [words.at[tile] for tile in range(self.tokens // LANES)], row
        )

    def read_heads_of_tiles(self, tiles: list[Any], row: Any) -> list[Float[Array, "D tokens"]]:
        """Do the same as `read_heads` for a list with the words of each tile of 128 tokens."""
        found = jnp.concatenate([words[self._of_head(row), :] for words in tiles], axis=1)
        if self.packed == 1:
            return [found]
        as_float = lambda bits: jax.lax.bitcast_convert_type(bits, jnp.float32).astype(self.dtype)
        return [as_float(found << 16), as_float(found & jnp.int32(-(2**16)))]

    def write_heads(self, words: Any, row: Any, heads: list[Float[Array, "D tokens"]]) -> None:
        """Write heads to word `row` of each vector component, the inverse of `read_heads`.

        The heads may have a wider dtype than the rows.
        """
        found = heads[0].astype(self.dtype)
        if self.packed == 2:
            as_bits = lambda x: jax.lax.bitcast_convert_type(
                x.astype(self.dtype).astype(jnp.float32), jnp.int32
            )
            low, high = map(as_bits, heads)
            found = jax.lax.shift_right_logical(low, 16) | high
        for tile in range(self.tokens // LANES):
            words.at[tile][self._of_head(row), :] = found[:, tile * LANES : (tile + 1) * LANES]

    def _of_head(self, row):
        return pl.ds(row, self.size, stride=self.stride)

    def _places(self):
        for tile in range(self.tokens // LANES):
            for i in range(self.size):
                rows = slice(i * self.stride, i * self.stride + self.words)
                yield slice(tile * LANES, (tile + 1) * LANES), (tile, rows, slice(None)), i


def packed(dtype: jnp.dtype) -> int:
    """Return the number of rows that share one 32-bit word."""
    return 2 if dtype == jnp.bfloat16 else 1


def scratch(call: Any, **slots: int) -> dict[str, Any]:
    """Return the scratch shapes for 32-bit words and for extracted heads.

    Args:
      call: the static parameters of the kernel.
      slots: for each named array, the number of blocks whose heads are in scratch at a time.
    """
    heads = {"k": call.step, "v": call.step}
    of_block = call.size, call.blocks.queries
    found = {
        name: pltpu.VMEM((count, heads.get(name, call.step * call.each), *of_block), call.dtype)
        for name, count in slots.items()
    }
    most = max(call.layout, call.layout_out, key=lambda layout: layout.stride)
    return found | {"words": most.scratch}


def extract_heads(call: Any, ref, names: tuple[str, ...]) -> None:
    """Extract the heads of the named arrays from their blocks of rows in VMEM."""
    fetched = None
    for name in names:
        if name == "delta":
            _sum_products(call, ref)
            continue
        layout, source, row = call.layout, "rows_" + name, 0
        if name == "d_out":
            layout, block = call.layout_out, ref[source].at[0]
        else:
            if call.work.parts == 1:
                source, row = _ALL_ROWS[name], _first_rows(call)[name] // layout.packed
            block = ref[source].at[0, :, 0]
        if source != fetched:
            layout.fetch(block, ref["words"])
            fetched = source
        for group in range(ref[name].shape[1] // layout.packed):
            for n, head in enumerate(layout.read_heads(ref["words"], row + group)):
                ref[name][0, group * layout.packed + n] = head


def _sum_products(call: Any, ref) -> None:
    """Compute `delta`, the sum of out * d_out over the entries of a head, for all heads.

    All heads are processed together, because their rows are adjacent in memory.
    """
    layout = call.layout_out
    for start in range(0, layout.tokens, LANES):
        lanes = slice(start, start + LANES)
        total = jnp.zeros((layout.rows, LANES), jnp.float32)
        for i in range(layout.size):
            both = (ref[name][0, i, :, lanes] for name in ("rows_out", "rows_d_out"))
            out, d_out = (x.astype(jnp.float32) for x in both)
            total += out * d_out
        for head in range(layout.rows):
            ref["delta"][0, head, :, lanes] = total[head : head + 1]


_ALL_ROWS = {"q": "rows_q", "k": "rows_k", "v": "rows_k"}


def _first_rows(call: Any) -> dict[str, int]:
    """Return the indices along the axis P at which queries, keys and values begin."""
    return {"q": 0, "k": call.heads, "v": call.heads + call.kv_heads}


def write_out(layout: Layout, ref) -> None:
    """Write the heads of the output, `ref["out"]`, to its size-major block, `ref["rows_out"]`."""
    _write_heads(layout, ref, ref["out"].at[0], 0)
    layout.deliver(ref["words"], ref["rows_out"].at[0])


def write_gradients(call: Any, ref, d_q: Any, scale: Any) -> None:
    """Write the gradients of a block's queries, keys and values.

    The gradients of queries and keys are multiplied by `scale`.
    """
    parts = zip((d_q, ref["d_k_sum"], ref["d_v_sum"]), _first_rows(call).values(), strict=True)
    for part, (heads, first) in enumerate(parts):
        separate = call.work.parts == 3
        _write_heads(call.layout, ref, heads, 0 if separate else first, scale if part < 2 else None)
        if separate or part == 2:
            call.layout.deliver(ref["words"], ref["d_qkv"].at[0, :, part if separate else 0])


def _write_heads(layout: Layout, ref, heads: Any, first: int, scale: Any = None) -> None:
    """Write heads to 32-bit words in scratch, starting at row `first` of the block."""
    packed = layout.packed
    for group in range(heads.shape[0] // packed):
        own = [heads[group * packed + n] for n in range(packed)]
        own = own if scale is None else [x * scale for x in own]
        layout.write_heads(ref["words"], first // packed + group, own)
