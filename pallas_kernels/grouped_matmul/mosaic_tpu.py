"""Grouped products on a TPU, by JAX's megablox kernels (Gale et al. 2023).

The grid goes over tiles of rows, each once for every group that has rows in it. On v5e
(197 TFLOP/s, 819 GB/s) at M 65,536, K 2304, N 2048 and 256 groups in bfloat16, the FLOPs take
3.14 ms and the matrices' bytes (2.4 GB) 2.9 ms, so that an expert should have 256 rows or more.
"""

import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jaxtyping import Array, Float, Int

from pallas_kernels.call import LANES
from pallas_kernels.platform import checks_varying

# Rows of a tile, and bytes of a row or a column of a tile of a matrix: the fewest that are worth a
# grid step. The kernels do not request VMEM, so they have 16 MiB.
_ROWS, _BYTES = 512, 2048


def unsupported(op: str, rows, other, sizes) -> str | None:
    """Return why the kernels cannot serve this call, in a line; None if they can."""
    if rows.dtype not in (jnp.bfloat16, jnp.float32):
        return f"rows of {rows.dtype} (legal: bfloat16 or float32)"
    return checks_varying()


def product(
    rows: Float[Array, "M _"],
    matrices: Float[Array, "G K N"],
    sizes: Int[Array, " G"],
    *,
    transposed: bool = False,
    interpret: bool = False,
) -> Float[Array, "M _"]:
    """Compute the products: see the package."""
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
    """Compute the gradient of the matrices: see the package."""
    tile = _tile_rows(len(rows), len(sizes))
    tiling = tile, *_of_matrix(rows.dtype, rows.shape[1], d_products.shape[1])
    # The kernel transposes the rows back as it reads them.
    turned = _padded(rows, tile).swapaxes(0, 1)
    d_products = _padded(d_products, tile)
    return tgmm(turned, d_products, sizes, rows.dtype, tiling, interpret=interpret)


def _tile_rows(rows: int, groups: int) -> int:
    """Return about the rows of a group, a power of two: tiles at borders are computed twice."""
    each = 1 << max(rows // groups - 1, 0).bit_length()
    return min(max(each, LANES), _ROWS)


def _of_matrix(dtype, *sizes: int) -> list[int]:
    """Return the rows and columns of a tile of a matrix with this dtype."""
    return [min(_BYTES // jnp.dtype(dtype).itemsize, size) for size in sizes]


def _padded(x, tile):
    return jnp.pad(x, ((0, -len(x) % tile), (0, 0)))
