"""Heads of size-major rows, [D, rows, tokens], taken out in VMEM and put back.

Of the kernels over blocks: a step's block of rows is named "rows_q", and its heads, [heads, D,
tokens] in scratch, are named "q"; so are those of others.

A head is every `rows`-th row. Strided loads reach rows that are 32-bit words in 128 lanes, so the
bfloat16 rows of two neighbouring heads are fetched together and split, and results are joined and
scattered the same way.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.call import LANES, round_up

# Words of an entry that a view shows, from a multiple of so many on.
VIEWED = 4


class Layout(NamedTuple):
    """Of a block of rows, and of its words in scratch, where tiles of 128 tokens lie one by one."""

    rows: int
    size: int
    tokens: int
    dtype: jnp.dtype

    @property
    def packed(self) -> int:
        """Heads whose rows share a word."""
        return packed(self.dtype)

    @property
    def words(self) -> int:
        """Of an entry of all heads."""
        return self.rows // self.packed

    @property
    def stride(self) -> int:
        """Words from one entry of a head to the next."""
        return self.words if self.words in (1, 2, 4) else round_up(self.words, 8)

    @property
    def scratch(self) -> Any:
        dtype = jnp.int32 if self.packed == 2 else self.dtype
        return pltpu.VMEM((self.tokens // LANES, self.size * self.stride, LANES), dtype)

    def fetch(self, block: Any, words: Any) -> None:
        """The words of a block's rows."""
        for lanes, at, i in self._places():
            rows = block[i, :, lanes]
            words[at] = pltpu.bitcast(rows, jnp.int32) if self.packed == 2 else rows

    def deliver(self, words: Any, block: Any) -> None:
        """`fetch` undone."""
        for lanes, at, i in self._places():
            rows = words[at]
            block[i, :, lanes] = pltpu.bitcast(rows, self.dtype) if self.packed == 2 else rows

    @property
    def direct(self) -> bool:
        """Whether strided loads reach heads in blocks of 128 tokens as they are (`view`)."""
        return self.packed == 2 and self.words % 8 == 0

    def view(self, block: Any, first: Any) -> Any:
        """A block of 128 tokens as `fetch` leaves a tile, but from the word `first` of `VIEWED` on.

        What is not scratch lies in tiles of so many words, and a load's place in one must be known.
        """
        words = block.bitcast(jnp.int32).reshape(self.size * self.words, LANES)
        return words.at[pl.ds(first, (self.size - 1) * self.words + VIEWED)]

    def take(self, words: Any, row: Any) -> list[Float[Array, "D tokens"]]:
        """The heads that share words, whose first word is this one of an entry's."""
        return self.take_from([words.at[tile] for tile in range(self.tokens // LANES)], row)

    def take_from(self, tiles: list[Any], row: Any) -> list[Float[Array, "D tokens"]]:
        """The same, of the words of each 128 tokens."""
        found = jnp.concatenate([words[self._of_head(row), :] for words in tiles], axis=1)
        if self.packed == 1:
            return [found]
        as_float = lambda bits: jax.lax.bitcast_convert_type(bits, jnp.float32).astype(self.dtype)
        return [as_float(found << 16), as_float(found & jnp.int32(-(2**16)))]

    def put(self, words: Any, row: Any, heads: list[Float[Array, "D tokens"]]) -> None:
        """`take` undone; heads may be wider than rows."""
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
    """Rows that share a 32-bit word."""
    return 2 if dtype == jnp.bfloat16 else 1


def scratch(call: Any, **slots: int) -> dict[str, Any]:
    """For the heads of so many blocks by the array's name, and for words."""
    heads = {"k": call.step, "v": call.step}
    of_block = call.size, call.blocks.queries
    found = {
        name: pltpu.VMEM((count, heads.get(name, call.step * call.each), *of_block), call.dtype)
        for name, count in slots.items()
    }
    most = max(call.layout, call.layout_out, key=lambda layout: layout.stride)
    return found | {"words": most.scratch}


def take_out(call: Any, ref, names: tuple[str, ...]) -> None:
    """Heads of these arrays, of the blocks of rows that are there."""
    fetched = None
    for name in names:
        if name == "delta":
            _sum_products(call, ref)
            continue
        layout, source, row = call.layout, "rows_" + name, 0
        if name == "d_out":
            layout, block = call.layout_out, ref[source].at[0]
        else:
            if call.cut.parts == 1:
                source, row = _ALL_ROWS[name], _first_rows(call)[name] // layout.packed
            block = ref[source].at[0, :, 0]
        if source != fetched:
            layout.fetch(block, ref["words"])
            fetched = source
        for group in range(ref[name].shape[1] // layout.packed):
            for n, head in enumerate(layout.take(ref["words"], row + group)):
                ref[name][0, group * layout.packed + n] = head


def _sum_products(call: Any, ref) -> None:
    """`delta`, of all heads at a time: rows of an entry lie side by side."""
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
    """Of queries, keys and values among all rows."""
    return {"q": 0, "k": call.heads, "v": call.heads + call.kv_heads}


def put_out(layout: Layout, ref) -> None:
    """The heads of "out" as rows."""
    _put(layout, ref, ref["out"].at[0], 0)
    layout.deliver(ref["words"], ref["rows_out"].at[0])


def put_gradients(call: Any, ref, d_q: Any, scale: Any) -> None:
    """Of a block's queries, keys and values: sums, of which the first two are to be scaled."""
    parts = zip((d_q, ref["d_k_sum"], ref["d_v_sum"]), _first_rows(call).values(), strict=True)
    for part, (heads, first) in enumerate(parts):
        apart = call.cut.parts == 3
        _put(call.layout, ref, heads, 0 if apart else first, scale if part < 2 else None)
        if apart or part == 2:
            call.layout.deliver(ref["words"], ref["d_qkv"].at[0, :, part if apart else 0])


def _put(layout: Layout, ref, heads: Any, first: int, scale: Any = None) -> None:
    """Into words, from a row on."""
    packed = layout.packed
    for group in range(heads.shape[0] // packed):
        own = [heads[group * packed + n] for n in range(packed)]
        own = own if scale is None else [x * scale for x in own]
        layout.put(ref["words"], first // packed + group, own)
