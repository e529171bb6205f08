"""Sums of rows on a TPU: those of 128 tokens are a product with 128 columns of ones and zeros.

Rows are brought into the order of their tokens, which is all that is read of them, and multiplied
by jax's megablox kernel for products that have a group of rows each (Gale et al. 2023).

For R rows of W numbers: 256 R W FLOPs, and 7 R W bytes in bfloat16 with what brings them in order
(3 are read and written by that, the rest by the kernel, with half as many tokens as rows). At
R 131,072, W 2304 and 65,536 tokens on v5p (459 TFLOP/s, 2765 GB/s): 0.17 ms, 0.76 ms. XLA's form
moves a row for each of 524,288 choices; estimates are in docs/benchmarks/kernels.md.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm
from jaxtyping import Array, Float, Int

from pallas_kernels.call import LANES
from pallas_kernels.platform import checks_varying
from pallas_kernels.target import target

# Rows of a step; at the borders of 128 tokens' rows they are read twice.
_TILE = 256
# Bytes of a row of a tile: the kernel asks for no VMEM, and has 16 MiB where a core has more.
_BYTES = 2**14
# Fewer are too few for a kernel.
_CHOICES = 1024


def unsupported(op: str, rows, order, places) -> str | None:
    """Why it cannot serve this call, in a line; None if it can."""
    if rows.dtype not in (jnp.bfloat16, jnp.float32):
        return f"rows of {rows.dtype} (bfloat16 or float32)"
    return checks_varying()


def wins(op: str, rows, order, places) -> bool:
    """Whether the kernel is faster, by the estimates: XLA's form takes a row for every choice."""
    few = 2 * len(rows) <= len(places) and len(places) >= _CHOICES
    wide = rows.shape[1] >= LANES
    return few and wide and unsupported(op, rows, order, places) is None


def sums(
    rows: Float[Array, "rows width"],
    order: Int[Array, " rows"],
    places: Int[Array, " choices"],
    *,
    each: int,
    interpret: bool = False,
) -> Float[Array, "tokens width"]:
    """See the package."""
    count, width = rows.shape
    tokens = len(places) // each
    has = jnp.pad(places < count, (0, -len(places) % (LANES * each)))
    sizes = jnp.sum(has.reshape(-1, LANES * each), axis=1, dtype=jnp.int32)
    # Of no choice are those behind all others.
    token = jnp.where(jnp.arange(count) < jnp.sum(sizes), order // each, tokens)
    by_token = jnp.argsort(token)
    own = jax.nn.one_hot(token[by_token] % LANES, LANES, dtype=rows.dtype)
    whole = lambda x: jnp.pad(x, ((0, -count % _TILE), (0, 0)))
    tiling = _TILE, LANES, _columns(width, rows.dtype)
    given = whole(own).T, whole(rows[by_token]), sizes, rows.dtype, tiling
    return tgmm(*given, interpret=interpret).reshape(-1, width)[:tokens]


def _columns(width: int, dtype) -> int:
    """Of a tile."""
    most = _BYTES if target().chip.vmem > 2**24 else _BYTES // 2
    return min(width, most // jnp.dtype(dtype).itemsize)
