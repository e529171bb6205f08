"""Products of groups of rows with one matrix per group, in Pallas Triton, for GPUs from sm_80 on.

Each group's rows are divided into separate tiles, so that no row is multiplied by the matrix of
another group. A program computes the products of one tile of rows, for some columns. For the
gradient of the matrices, a program computes one tile of a matrix from all rows of its group. XLA's
op on GPUs, in JAX 0.10, costs as much as if every row were in every group.

For example, take M = 65,536 rows, K = 2304, N = 2048 and 256 groups in bfloat16 on an H100 (989
TFLOP/s, 3352 GB/s). The arithmetic takes at least 0.63 ms, and reading the matrices (2.4 GB) once
takes at least 0.72 ms.

Sums are float32. Float32 operands are split into three bfloat16 terms (see `triton.dot`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, DTypeLike, Float, Int

from pallas_kernels.call import gpu_call
from pallas_kernels.triton import dot, no_triton, plgpu


class _Blocks(NamedTuple):
    """The block sizes and launch parameters of a grouped-product kernel.

    Attributes:
      rows, columns: the numbers of rows and columns of a tile of the result.
      depth: the number of terms that are added to the sums of a tile in one step.
      warps: the number of warps (of 32 threads) per program.
      stages: the number of stages of the software pipeline for loads.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    @classmethod
    def of(cls, rows: int, columns: int, dtype: DTypeLike) -> "_Blocks":
        """Return block sizes for a result with this many rows and columns.

        The sides of a tile are powers of two, at least 16, and no larger than the result needs.
        """
        narrow = jnp.dtype(dtype) == jnp.bfloat16
        fit = lambda size, most: min(most, max(16, pl.next_power_of_2(size)))
        largest, depth, stages = (128, 64, 3) if narrow else (64, 32, 2)
        rows, columns = fit(rows, largest), fit(columns, largest)
        return cls(rows, columns, depth, 8 if rows * columns > 64 * 128 else 4, stages)


def unsupported(op: str, rows, other, sizes, **_) -> str | None:
    """Return a one-line reason why the kernels do not support this call, or None."""
    if why := no_triton():
        return why
    if rows.dtype not in (jnp.bfloat16, jnp.float32):
        return f"rows of {rows.dtype} (legal: bfloat16 or float32)"
    return None


def product(
    rows: Float[Array, "M _"],
    matrices: Float[Array, "G K N"],
    sizes: Int[Array, " G"],
    *,
    alignment: int = 1,
    transposed: bool = False,
    interpret: bool = False,
) -> Float[Array, "M _"]:
    """Multiply each row by the matrix of its group, as `pallas_kernels.grouped_matmul` defines."""
    (M, inner), groups = rows.shape, len(sizes)
    columns = matrices.shape[1 if transposed else 2]
    blocks = _Blocks.of(max(1, M // groups), columns, rows.dtype)

    def kernel(ref):
        tile, column = pl.program_id(1), pl.program_id(0) * blocks.columns
        group, start, stop = (plgpu.load(x.at[tile]) for x in (ref.group, ref.start, ref.stop))

        def add(step, total):
            numbers = (step * blocks.depth, blocks.depth)
            a = _load(ref.rows, (), (start, blocks.rows), numbers, stop)
            sides = numbers, (column, blocks.columns)
            b = _load(ref.matrices, (group,), *(sides[::-1] if transposed else sides))
            return total + dot(a, b, transpose_b=transposed)

        total = jnp.zeros((blocks.rows, blocks.columns), jnp.float32)
        steps = pl.cdiv(inner, blocks.depth) * (start < stop).astype(jnp.int32)
        total = jax.lax.fori_loop(0, steps, add, total)
        _save(ref.products, (), (start, blocks.rows), (column, blocks.columns), total, stop)

    inputs = _tiles(sizes, M, blocks.rows) | {"rows": rows, "matrices": matrices}
    outputs = {"products": jax.ShapeDtypeStruct((M, columns), rows.dtype)}
    return gpu_call(
        kernel,
        "grouped_matmul_transposed" if transposed else "grouped_matmul",
        inputs,
        outputs,
        grid=(pl.cdiv(columns, blocks.columns), len(inputs["group"])),
        warps=blocks.warps,
        stages=blocks.stages,
        flops=2 * M * inner * columns,
        interpret=interpret,
    )["products"]


def of_matrices(
    rows: Float[Array, "M K"],
    d_products: Float[Array, "M N"],
    sizes: Int[Array, " G"],
    *,
    alignment: int = 1,
    interpret: bool = False,
) -> Float[Array, "G K N"]:
    """Return the cotangents of the matrices, as `pallas_kernels.grouped_matmul` defines."""
    (M, K), N = rows.shape, d_products.shape[1]
    blocks = _Blocks.of(K, N, rows.dtype)

    def kernel(ref):
        column, row = pl.program_id(0) * blocks.columns, pl.program_id(1) * blocks.rows
        group = pl.program_id(2)
        start, stop = plgpu.load(ref.start.at[group]), plgpu.load(ref.stop.at[group])

        def add(step, total):
            own = (start + step * blocks.depth, blocks.depth)
            a = _load(ref.rows, (), own, (row, blocks.rows), stop)
            b = _load(ref.d_products, (), own, (column, blocks.columns), stop)
            return total + dot(a, b, transpose_a=True)

        total = jnp.zeros((blocks.rows, blocks.columns), jnp.float32)
        total = jax.lax.fori_loop(0, pl.cdiv(stop - start, blocks.depth), add, total)
        _save(ref.matrices, (group,), (row, blocks.rows), (column, blocks.columns), total)

    stop = jnp.cumsum(sizes)
    return gpu_call(
        kernel,
        "grouped_matmul_of_matrices",
        {"start": stop - sizes, "stop": stop, "rows": rows, "d_products": d_products},
        {"matrices": jax.ShapeDtypeStruct((len(sizes), K, N), rows.dtype)},
        grid=(pl.cdiv(N, blocks.columns), pl.cdiv(K, blocks.rows), len(sizes)),
        warps=blocks.warps,
        stages=blocks.stages,
        flops=2 * M * K * N,
        interpret=interpret,
    )["matrices"]


def _tiles(sizes: Int[Array, " G"], rows: int, height: int) -> dict[str, Int[Array, " tiles"]]:
    """Return each row tile's group, its first row, and the end of the group's rows.

    The number of tiles is static: the most that any group sizes could need. Unused tiles have no
    rows.
    """
    needed = -(-sizes // height)
    behind, stop = jnp.cumsum(needed), jnp.cumsum(sizes)
    tile = jnp.arange(pl.cdiv(rows, height) + len(sizes), dtype=jnp.int32)
    group = jnp.searchsorted(behind, tile, side="right", method="compare_all").astype(jnp.int32)
    group = jnp.minimum(group, len(sizes) - 1)
    within = tile - (behind - needed)[group]
    start = (stop - sizes)[group] + within * height
    return {"group": group, "start": start, "stop": jnp.where(start < stop[group], stop[group], 0)}


def _load(ref, lead, rows, columns, stop=None):
    """Load a block of the matrix `ref[*lead]`, with 0 outside of the matrix and from row `stop` on.

    `rows` and `columns` are pairs (first index, size).
    """
    at, mask = _block(ref, lead, rows, columns, stop)
    return plgpu.load(at, mask=mask, other=jnp.zeros((), ref.dtype))


def _save(ref, lead, rows, columns, values, stop=None):
    at, mask = _block(ref, lead, rows, columns, stop)
    plgpu.store(at, values.astype(ref.dtype), mask=mask)


def _block(ref, lead, rows, columns, stop):
    i = rows[0] + jnp.arange(rows[1])[:, None]
    j = columns[0] + jnp.arange(columns[1])[None, :]
    mask = (i < (ref.shape[-2] if stop is None else stop)) & (j < ref.shape[-1])
    return ref.at[(*lead, i, j)], mask
