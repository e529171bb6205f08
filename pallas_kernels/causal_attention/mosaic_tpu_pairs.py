"""The pairs of blocks that blockwise attention on TPUs computes, in order.

In every function, `call` is a `mosaic_tpu_blocks._BlocksCall`, the static parameters of a kernel.
"""

from typing import Any

import numpy as np

# The properties of a pair of a query block and a key block, as bits. In the forward pass, a pair
# belongs to its query block; in the backward pass, to its key block.
# - FIRST, LAST: the pair is the first or the last pair that belongs to its block.
# - MASKED: some query of the pair does not see some of its keys.
# - DONE: the pair is the last one with its query block.
# - NEW: heads must be extracted from the other block of the pair (the one it does not belong to).
FIRST, LAST, MASKED, DONE, NEW = 1, 2, 4, 8, 16


def count(call: Any) -> int:
    """Return the number of pairs of a query block and a key block in which a query sees a key."""
    return sum(len(seen(call, i)) for i in range(call.queries // call.blocks.queries))


def seen(call: Any, block: int) -> range:
    """Return the key blocks in which some query of a query block sees a key.

    The result has at least one block, so that the results of all queries are written. If all keys
    are before the window, it is the last block.
    """
    bq, bk, _ = call.blocks
    end = call.keys // bk
    if call.offset is not None:
        last = call.offset + (block + 1) * bq - 1
        end = min(end, last // bk + 1)
    if call.window is None:
        return range(end)
    first = max(0, block * bq - call.window + 1) // bk
    return range(min(first, end - 1), end)


def is_masked(call: Any, i: int, j: int) -> bool:
    """Return whether some query of query block i does not see some key of key block j."""
    bq, bk, _ = call.blocks
    if call.window is not None and (i + 1) * bq - 1 - j * bk >= call.window:
        return True
    if call.offset is None:
        return False
    return (j + 1) * bk - 1 > call.offset + i * bq


def all_masked(call: Any) -> bool:
    """Return whether every pair of blocks has a query that does not see some key of the pair."""
    blocks = range(call.queries // call.blocks.queries)
    return all(is_masked(call, i, j) for i in blocks for j in seen(call, i))


def masked_distance(call: Any) -> int | None:
    """Return the position of the first query minus that of the first key in all masked pairs.

    The result is None if this distance is not the same for all pairs, or if there is a window.
    """
    if call.offset is None or call.window is not None:
        return None
    bq, bk, _ = call.blocks
    found = {
        call.offset + i * bq - j * bk
        for i in range(call.queries // bq)
        for j in seen(call, i)
        if is_masked(call, i, j)
    }
    return found.pop() if len(found) == 1 else None


def tables(call: Any) -> dict[str, np.ndarray]:
    """Return tables that map each grid step to its pair of a query block and a key block.

    `queries` and `keys` contain the indices of the two blocks, and `kinds` the properties of the
    pair as bits. `done` contains the index of the query block whose gradients were completed last.
    Before the first completion, it is the block that is completed first. `fetched` contains the
    index of the size-major block that is in VMEM.
    """
    seen_by = [seen(call, i) for i in range(call.queries // call.blocks.queries)]
    pairs = [(i, j) for i, blocks in enumerate(seen_by) for j in blocks]
    if call.by_keys:
        pairs.sort(key=lambda pair: pair[::-1])
    own, other = (1, 0) if call.by_keys else (0, 1)
    kinds, had = [], set()
    for n, (i, j) in enumerate(pairs):
        kind = FIRST * (n == 0 or pairs[n - 1][own] != pairs[n][own])
        kind |= LAST * (n == len(pairs) - 1 or pairs[n + 1][own] != pairs[n][own])
        kind |= MASKED * is_masked(call, i, j) | DONE * (j == seen_by[i][-1])
        if call.slots == 1 or pairs[n][other] not in had:
            kind |= NEW
            had.add(pairs[n][other])
        kinds.append(kind)
    done, now = [], next(i for i, j in pairs if j == seen_by[i][-1])
    fetched = []
    for pair, kind in zip(pairs, kinds, strict=True):
        now = pair[0] if kind & DONE else now
        done.append(now)
        fetched.append(pair[other] if kind & NEW else fetched[-1])
    queries, keys = zip(*pairs, strict=True)
    found = {"queries": queries, "keys": keys, "kinds": kinds, "done": done, "fetched": fetched}
    return {name: np.array(found[name], np.int32) for name in call.tables}
