"""Products of groups of rows with one matrix per group on TPUs, with JAX's megablox kernels.

See Gale et al. (2023), MegaBlocks. The grid runs over tiles of rows. A tile that has rows of
several groups is processed once for each of these groups. For example, take M = 65,536 rows, K =
2304, N = 2048 and 256 groups in bfloat16 on v5e (197 TFLOP/s, 819 GB/s). The arithmetic takes at
least 3.14 ms, and reading the matrices (2.4 GB) takes at least 2.9 ms. With fewer than 256 rows per
group, reading would dominate.
"""

import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jaxtyping import Array, Float, Int

from pallas_kernels.call import LANES, MEGABLOX_TILES, library_precision
from pallas_kernels.platform import checks_varying

# Maximum number of rows per tile, and maximum number of bytes in a row or a column of a matrix
# tile. With smaller tiles, the overhead of a grid step is too large. Larger tiles do not fit in the
# 16 MiB of VMEM that the kernels get by default.
_ROWS, _BYTES = 512, 2048


def unsupported(op: str, rows, other, sizes) -> str | None:
    """Return a one-line reason why the kernels do not support this call, or None."""
    if rows.dtype not in (jnp.bfloat16, jnp.float32):
        return f"rows of {rows.dtype} (legal: bfloat16 or float32)"
    if len(rows) > (most := MEGABLOX_TILES * _ROWS):
        return f"{len(rows)} rows (legal: at most {most})"
    return checks_varying()


def product(
    rows: Float[Array, "M _"],
    matrices: Float[Array, "G K N"],
    sizes: Int[Array, " G"],
    *,
    transposed: bool = False,
    interpret: bool = False,
) -> Float[Array, "M _"]:
    """Multiply each row by the matrix of its group, as `pallas_kernels.grouped_matmul` defines."""
    tile = _tile_rows(len(rows), len(sizes))
    columns = matrices.shape[1 if transposed else 2]
    options = {"transpose_rhs": transposed, "interpret": interpret}
    tiling = tile, *_of_matrix(rows.dtype, rows.shape[1], columns)
    with library_precision(rows.dtype):
        products = gmm(_padded(rows, tile), matrices, sizes, rows.dtype, tiling, **options)
    return products[: len(rows)]


def of_matrices(
    rows: Float[Array, "M K"],
    d_products: Float[Array, "M N"],
    sizes: Int[Array, " G"],
    *,
    interpret: bool = False,
) -> Float[Array, "G K N"]:
    """Return the cotangents of the matrices, as `pallas_kernels.grouped_matmul` defines."""
    tile = _tile_rows(len(rows), len(sizes))
    tiling = tile, *_of_matrix(rows.dtype, rows.shape[1], d_products.shape[1])
    # The kernel requires transposed rows.
    turned = _padded(rows, tile).swapaxes(0, 1)
    d_products = _padded(d_products, tile)
    with library_precision(rows.dtype):
        return tgmm(turned, d_products, sizes, rows.dtype, tiling, interpret=interpret)


def _tile_rows(rows: int, groups: int) -> int:
    """Return the number of rows per tile: a power of two, about the mean size of a group.

    Larger tiles would waste work, because a tile with rows of two groups is computed twice. There
    are at most `MEGABLOX_TILES` tiles.
    """
    each = max(rows // groups, -(-rows // MEGABLOX_TILES))
    each = 1 << max(each - 1, 0).bit_length()
    return min(max(each, LANES), _ROWS)


def _of_matrix(dtype, *sizes: int) -> list[int]:
    """Return the size (rows and columns) of the tiles of a matrix with this dtype."""
    return [min(_BYTES // jnp.dtype(dtype).itemsize, size) for size in sizes]


def _padded(x, tile):
    return jnp.pad(x, ((0, -len(x) % tile), (0, 0)))
