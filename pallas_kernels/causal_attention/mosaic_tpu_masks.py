"""The keys that the queries of a pair of blocks see, in the blockwise attention kernels for TPUs.

Queries and keys of a pair are compared in one of three ways: by position and segment, by segment
only, or not at all. On the diagonal, the distance between the two blocks is known at compile time,
so tiles contain only keys that some query sees.

In every function, `call` is a `mosaic_tpu_blocks._BlocksCall`, the static parameters of a kernel.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float

from pallas_kernels.call import LANES, largest_divisor, round_up, widen
from pallas_kernels.causal_attention import mosaic_tpu_pairs as pairs
from pallas_kernels.causal_attention.block_sizes import PART, TILE
from pallas_kernels.products import MASKED


class BlockPair:
    """The query block and the key block that a grid step processes, with their properties."""

    def __init__(self, ref):
        self.group, self.step = pl.program_id(1), pl.program_id(2)
        self.kind = ref["kinds"][self.step]
        self.query_block, self.key_block = ref["queries"][self.step], ref["keys"][self.step]

    def is_(self, bit: int):
        """Return whether the pair has a property, one of the bits in `mosaic_tpu_pairs`."""
        return (self.kind & bit) != 0


class Tile(NamedTuple):
    """A part of a pair that is computed at once: one head, a range of keys and a range of queries.

    Attributes:
      head, own: the indices of the query head and of its key head in the grid step.
      keys, queries: the ranges within the two blocks.
    """

    head: Any
    own: Any
    keys: slice
    queries: slice

    @property
    def parts(self) -> list["Tile"]:
        """The tile, divided along its keys into tiles of at most `PART` keys."""
        start, stop = self.keys.start, self.keys.stop
        firsts = range(start, stop, PART)
        return [self._replace(keys=slice(first, min(first + PART, stop))) for first in firsts]

    @property
    def of_queries(self) -> tuple:
        """The index of the tile's queries in an array [1, heads, size, queries]."""
        return 0, self.head, slice(None), self.queries

    @property
    def of_keys(self) -> tuple:
        """The index of the tile's keys in an array [1, heads, size, keys]."""
        return 0, self.own, slice(None), self.keys


class Mask(NamedTuple):
    """The comparisons that decide which keys each query of a pair sees.

    Attributes:
      positions: whether positions are compared; otherwise every key is at a visible position.
      segments: whether segment ids are compared.
      ahead: the position of the pair's first query minus that of its first key, if it is known at
        compile time; otherwise None.
    """

    positions: bool = False
    segments: bool = False
    ahead: int | None = None

    def by_queries(self, call: Any, heads: list[tuple]) -> list[Tile]:
        """Return the tiles of the forward pass: a few queries, and all keys that they see."""
        tiles = []
        for queries in _ranges(call.blocks.queries):
            end = call.blocks.keys
            if self.ahead is not None:
                end = min(end, round_up(queries.stop + self.ahead, LANES))
            if end > 0:
                tiles += [Tile(*head, slice(0, end), queries) for head in heads]
        return tiles

    def by_keys(self, call: Any, heads: list[tuple]) -> list[Tile]:
        """Return the tiles of the backward pass: a few keys, and all queries that see them."""
        tiles, end = [], call.blocks.queries
        for keys in _ranges(call.blocks.keys):
            start = 0
            if self.ahead is not None:
                start = max(start, (keys.start - self.ahead) // LANES * LANES)
            if start < end:
                tiles += [Tile(*head, keys, slice(start, end)) for head in heads]
        return tiles


def where_seen(call: Any, ref, at: BlockPair, attend) -> None:
    """Call `attend(mask)` with the pair's mask, unless no query of the pair sees a key."""
    compared = call.offset is not None or call.window is not None
    near, same, seen = at.is_(pairs.MASKED), True, True
    if call.segments:
        of = lambda name, block: (ref[name][0, 0, 2 * block + end] for end in range(2))
        q_low, q_high = of("query_ranges", at.query_block)
        k_low, k_high = of("key_ranges", at.key_block)
        seen = (k_low <= q_high) & (q_low <= k_high)
        same = (q_low == q_high) & (k_low == k_high)
    of_near = Mask(True, call.segments, pairs.masked_distance(call))
    if not compared:
        near = False
    elif pairs.all_masked(call):
        near = True
    _when(near, seen, lambda: attend(of_near))
    _when(_not(near), seen, same, lambda: attend(Mask()))
    _when(_not(near), seen, _not(same), lambda: attend(Mask(segments=True)))


def _when(*conditions_and_run) -> None:
    """Call the last argument if all others, Python bools or traced bools, are true."""
    *conditions, run = conditions_and_run
    traced = [condition for condition in conditions if not isinstance(condition, bool)]
    if any(condition is False for condition in conditions):
        return
    if not traced:
        run()
        return
    pl.when(functools.reduce(jnp.logical_and, traced))(run)


def _not(condition):
    return not condition if isinstance(condition, bool) else ~condition


def apply_mask(
    call: Any, ref, at: BlockPair, tile: Tile, mask: Mask, logits: Float[Array, "keys queries"]
) -> Float[Array, "keys queries"]:
    """Replace the logits of keys that a query does not see with `MASKED`."""
    if not (mask.positions or mask.segments):
        return logits
    (keys, queries), free = tile[2:], 0
    if mask.ahead is not None and not mask.segments:
        # All queries of the tile see its first keys.
        free = max(0, (queries.start + mask.ahead + 1 - keys.start) // LANES * LANES)
    if keys.start + free >= keys.stop:
        return logits
    visible = _visible(call, ref, at, slice(keys.start + free, keys.stop), queries, mask)
    hidden = jnp.where(visible, logits[free:], MASKED)
    return jnp.concatenate([logits[:free], hidden]) if free else hidden


def _visible(call, ref, at, keys: slice, queries: slice, mask: Mask) -> Bool[Array, "keys queries"]:
    bq, bk, _ = call.blocks
    shape = keys.stop - keys.start, queries.stop - queries.start
    iota = functools.partial(jax.lax.broadcasted_iota, jnp.int32, shape)
    terms, apart = [], at.query_block * bq - at.key_block * bk
    first = queries.start - keys.start
    if mask.positions and call.window is not None:
        terms.append(iota(1) - iota(0) + (apart + first) < call.window)
    if mask.positions and call.offset is not None:
        ahead = call.offset + apart if mask.ahead is None else mask.ahead
        terms.append(iota(0) - iota(1) <= ahead + first)
    if mask.segments:
        column = jnp.broadcast_to(ref["key_ids"][0, :, keys], (LANES, shape[0])).T
        terms.append(widen(column, shape[1]) == ref["query_ids"][0, :, queries])
    return functools.reduce(jnp.logical_and, terms)


def _ranges(length: int) -> list[slice]:
    size = LANES * largest_divisor(length // LANES, TILE // LANES)
    return [slice(start, start + size) for start in range(0, length, size)]
