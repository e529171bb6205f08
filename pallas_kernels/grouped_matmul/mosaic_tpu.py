"""Grouped products on a TPU, by the megablox kernels that jax has (Gale et al. 2023).

A grid over tiles of rows, each once for every group that it has rows of. On v5e (197 TFLOP/s,
819 GB/s) at M 65,536, K 2304, N 2048 and 256 groups in bfloat16: 3.14 ms for the FLOPs, 2.9 ms of
them for the matrices' bytes (2.4 GB), so that rows for an expert should be 256 or more.
"""

import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jaxtyping import Array, Float, Int

from pallas_kernels.call import LANES
from pallas_kernels.platform import checks_varying

# Of a tile: rows, and bytes of rows and of columns of a matrix, the fewest that are worth a step.
# The kernels ask for no VMEM, and have 16 MiB.
_ROWS, _BYTES = 512, 2048


def unsupported(op: str, rows, other, sizes) -> str | None:
    """Why it cannot serve this call, in a line; None if it can."""
    if rows.dtype not in (jnp.bfloat16, jnp.float32):
        return f"rows of {rows.dtype} (bfloat16 or float32)"
    return checks_varying()


def product(
    rows: Float[Array, "M _"],
    matrices: Float[Array, "G K N"],
    sizes: Int[Array, " G"],
    *,
    transposed: bool = False,
    interpret: bool = False,
) -> Float[Array, "M _"]:
    """See the package."""
    tile = _tile_rows(len(rows), len(sizes))
    columns = matrices.shape[1 if transposed else 2]
    options = {"transpose_rhs": transposed, "interpret": interpret}
    tiling = tile, *_of_matrix(rows.dtype, rows.shape[1], columns)
    products = gmm(_padded(rows, tile), matrices, sizes, rows.dtype, tiling, **options)
    return products[: len(rows)]


def of_matrices(
    rows: Float[Array, "M K"],
    d_products: Float[Array, "M N"],
    sizes: Int[Array, " G"],
    *,
    interpret: bool = False,
) -> Float[Array, "G K N"]:
    """See the package."""
    tile = _tile_rows(len(rows), len(sizes))
    tiling = tile, *_of_matrix(rows.dtype, rows.shape[1], d_products.shape[1])
    # The kernel turns the rows back as it reads them.
    turned = _padded(rows, tile).swapaxes(0, 1)
    d_products = _padded(d_products, tile)
    return tgmm(turned, d_products, sizes, rows.dtype, tiling, interpret=interpret)


def _tile_rows(rows: int, groups: int) -> int:
    """As many as a group has, in powers of two: at its borders tiles are computed twice."""
    each = 1 << max(rows // groups - 1, 0).bit_length()
    return min(max(each, LANES), _ROWS)


def _of_matrix(dtype, *sizes: int) -> list[int]:
    """Rows and columns of a tile of a matrix of this dtype."""
    return [min(_BYTES // jnp.dtype(dtype).itemsize, size) for size in sizes]


def _padded(x, tile):
    return jnp.pad(x, ((0, -len(x) % tile), (0, 0)))
