"""Sums of rows on TPUs, as a product with a one-hot matrix for each group of 128 tokens.

The rows are first sorted by token. Then JAX's megablox kernel for grouped matrix products (Gale et
al. 2023) multiplies each group's rows by a one-hot matrix, which adds up each token's rows.

For R rows of width W in bfloat16 and half as many tokens as rows, the op takes `256 R W` FLOPs and
moves `7 R W` bytes: sorting the rows moves `4 R W` bytes, and the kernel moves `3 R W` bytes. For
R = 131,072, W = 2304 and 65,536 tokens, the op takes at least 0.17 ms of arithmetic and 0.76 ms of
memory transfers on v5p (459 TFLOP/s, 2765 GB/s). XLA moves a row for each of 524,288 choices.
Estimates are in docs/benchmarks/kernels.md.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm
from jaxtyping import Array, Float, Int

from pallas_kernels.call import LANES, MEGABLOX_TILES, library_precision
from pallas_kernels.platform import checks_varying
from pallas_kernels.target import target

# Number of rows per grid step. Rows of two groups of 128 tokens are read once for each group.
_TILE = 256
# Maximum number of bytes per row of a tile. The kernel does not request VMEM, so it gets the
# default of 16 MiB even if a core has more.
_BYTES = 2**14
# Minimum number of choices of experts for which the kernel is faster than XLA, and maximum number
# of rows per choice.
_CHOICES, _MOST_ROWS = 1024, 0.6


def unsupported(op: str, rows, order, places) -> str | None:
    """Return a one-line reason why the kernel does not support this call, or None if it does."""
    if rows.dtype not in (jnp.bfloat16, jnp.float32):
        return f"rows of {rows.dtype} (legal: bfloat16 or float32)"
    if len(rows) > (most := MEGABLOX_TILES * _TILE):
        return f"{len(rows)} rows (legal: at most {most})"
    return checks_varying()


def wins(op: str, rows, order, places) -> bool:
    """Return whether the kernel is estimated to be faster than XLA.

    XLA reads a row for every choice, so the kernel is faster if there are few rows.
    """
    fewer_rows = len(rows) <= _MOST_ROWS * len(places) and len(places) >= _CHOICES
    wide = rows.shape[1] >= LANES
    return fewer_rows and wide and unsupported(op, rows, order, places) is None


def sums(
    rows: Float[Array, "rows width"],
    order: Int[Array, " rows"],
    places: Int[Array, " choices"],
    *,
    each: int,
    interpret: bool = False,
) -> Float[Array, "tokens width"]:
    """Compute each token's sum of rows, as specified in `pallas_kernels.token_rows`."""
    count, width = rows.shape
    tokens = len(places) // each
    has = jnp.pad(places < count, (0, -len(places) % (LANES * each)))
    sizes = jnp.sum(has.reshape(-1, LANES * each), axis=1, dtype=jnp.int32)
    # Rows to which no choice is assigned sort after all other rows.
    token = jnp.minimum(order // each, tokens)
    by_token = jnp.pad(jnp.argsort(token), (0, -count % _TILE))
    one_hot = jax.nn.one_hot(token[by_token] % LANES, LANES, dtype=rows.dtype)
    tiling = _TILE, LANES, _columns(width, rows.dtype)
    with library_precision(rows.dtype):
        products = tgmm(one_hot.T, rows[by_token], sizes, rows.dtype, tiling, interpret=interpret)
    return products.reshape(-1, width)[:tokens]


def _columns(width: int, dtype) -> int:
    most = _BYTES if target().chip.vmem > 2**24 else _BYTES // 2
    return min(width, most // jnp.dtype(dtype).itemsize)
