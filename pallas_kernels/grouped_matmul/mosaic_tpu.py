"""Products of groups of rows with one matrix per group on TPUs.

Rows are processed in tiles that belong to one group each, so no tile is computed twice. For this,
the size of every group must be a multiple of the tile. If the caller does not promise that, the
rows are moved apart before a call, and the products together after it.

A product has the whole contracted axis in a tile. While a group's rows are multiplied, the matrix
of the next group is copied from HBM. The cores of a chip divide the tiles of all groups. For the
gradient of the matrices, each core computes a part of the columns, if there are enough of them.

For example, take M = 131,072 rows, K = 2304, N = 2048 and 32 groups in bfloat16 on v5p (459
TFLOP/s, 2765 GB/s), as on one device of Kimi Linear's 48B model. The arithmetic takes at least 2.69
ms, and reading and writing everything once (1.44 GB) takes at least 0.52 ms.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.call import LANES, round_up, tpu_call
from pallas_kernels.grouped_matmul.layout import spread
from pallas_kernels.platform import checks_varying
from pallas_kernels.products import dot, dot_columns, dot_rows
from pallas_kernels.target import target

# Minimum and maximum number of rows per tile. Rows in bfloat16 come in tiles of 16.
_LEAST, _MOST = 16, 512
# Maximum VMEM of all blocks, as an argument of `Target.vmem_part`.
_BUDGET = 50
# Maximum number of tiles. The tables of all tiles are in SMEM, which has 1 MiB.
_TILES = 2**15
# Bits of the number that says what a grid step does. A step without bits does nothing.
_ACTIVE, _FIRST, _SECOND_SLOT, _EMPTY = 1, 2, 4, 8


def best_tile(rows: int, groups: int) -> int:
    """Return the best number of rows per tile, for groups with `rows` rows in total.

    It is a power of two, at most the number of rows in a matrix unit. If groups have fewer rows on
    average, it is smaller, because the last tile of each group is seldom full.
    """
    tile = target().chip.unit
    while tile > max(rows // groups, _LEAST):
        tile //= 2
    return tile


def unsupported(
    op: str, rows, other, sizes, *, alignment: int = 1, transposed: bool = False
) -> str | None:
    """Return a one-line reason why the kernels do not support this call, or None."""
    if rows.dtype not in (jnp.bfloat16, jnp.float32):
        return f"rows of {rows.dtype} (legal: bfloat16 or float32)"
    if rows.shape[1] == 1:
        return "rows of one number (legal: at least 2)"
    if op == "product":
        columns, shape = other.shape[1 if transposed else 2], other.shape[1:]
        work = _of_product(rows, columns, sizes, alignment)
    else:
        shape = rows.shape[1], other.shape[1]
        work = _of_matrices(rows, other, sizes, alignment)
    if work is None:
        return f"matrices {list(shape)} of {rows.dtype} do not fit in VMEM"
    if len(rows) > (most := _TILES * work.tile):
        return f"{len(rows)} rows in tiles of {work.tile} (legal: at most {most})"
    return checks_varying()


def product(
    rows: Float[Array, "M _"],
    matrices: Float[Array, "G K N"],
    sizes: Int[Array, " G"],
    *,
    alignment: int = 1,
    transposed: bool = False,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "M _"]:
    """Multiply each row by the matrix of its group, as `pallas_kernels.grouped_matmul` defines."""
    (M, inner), N = rows.shape, matrices.shape[1 if transposed else 2]
    tile, _, columns = _of_product(rows, N, sizes, alignment)
    if alignment % tile:
        apart = spread(M, sizes, tile)
        options = {"alignment": tile, "transposed": transposed, "interpret": interpret}
        return apart.back(product(apart(rows), matrices, apart.sizes, **options))
    tiles = -(-M // tile)
    cores = min(target().chip.cores, tiles)
    steps = -(-tiles // cores)
    step = lambda core, s: core * steps + s
    moved = M * inner * (N // columns) + M * N + matrices.size
    out = tpu_call(
        functools.partial(_product_kernel, steps=steps, transposed=transposed),
        "grouped_matmul_transposed" if transposed else "grouped_matmul",
        {
            "rows": (
                rows,
                pl.BlockSpec((tile, inner), lambda c, n, s, *tables: (tables[-1][step(c, s)], 0)),
            ),
            "matrices": (matrices, pl.BlockSpec(memory_space=pl.ANY)),
        },
        {
            "products": (
                jax.ShapeDtypeStruct((M, N), rows.dtype),
                pl.BlockSpec((tile, columns), lambda c, n, s, *tables: (tables[-1][step(c, s)], n)),
            )
        },
        {
            "matrix": pltpu.VMEM(
                (2, columns, inner) if transposed else (2, inner, columns), rows.dtype
            ),
            "copied": pltpu.SemaphoreType.DMA((2,)),
        },
        grid=(cores, N // columns, steps),
        semantics=("parallel", "arbitrary", "arbitrary"),
        flops=2 * M * inner * N,
        moved=moved * rows.dtype.itemsize,
        prefetch=_steps_of_product(sizes // tile, cores, steps),
        in_hbm=("matrices",),
        interpret=interpret,
    )
    return out["products"]


def of_matrices(
    rows: Float[Array, "M K"],
    d_products: Float[Array, "M N"],
    sizes: Int[Array, " G"],
    *,
    alignment: int = 1,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "G K N"]:
    """Return the cotangents of the matrices, as `pallas_kernels.grouped_matmul` defines."""
    (M, K), N, G = rows.shape, d_products.shape[1], len(sizes)
    tile, inner, columns = _of_matrices(rows, d_products, sizes, alignment)
    if alignment % tile:
        apart = spread(M, sizes, tile)
        options = {"alignment": tile, "interpret": interpret}
        return of_matrices(apart(rows), apart(d_products), apart.sizes, **options)
    tiles = -(-M // tile)
    moved = M * K * (N // columns) + M * N * (K // inner) + G * K * N
    # The tables are `group`, `role` and `tile`.
    of_rows = lambda n, k, s, group, role, tile: (tile[s], k)
    of_products = lambda n, k, s, group, role, tile: (tile[s], n)
    of_group = lambda n, k, s, group, role, tile: (group[s], k, n)
    out = tpu_call(
        _matrices_kernel,
        "grouped_matmul_of_matrices",
        {
            "rows": (rows, pl.BlockSpec((tile, inner), of_rows)),
            "d_products": (d_products, pl.BlockSpec((tile, columns), of_products)),
        },
        {
            "d_matrices": (
                jax.ShapeDtypeStruct((G, K, N), rows.dtype),
                pl.BlockSpec((None, inner, columns), of_group),
            )
        },
        {"sums": pltpu.VMEM((inner, columns), jnp.float32)},
        grid=(N // columns, K // inner, tiles + G),
        semantics=("parallel", "parallel", "arbitrary"),
        flops=2 * M * K * N,
        moved=moved * rows.dtype.itemsize,
        prefetch=_steps_of_matrices(sizes // tile, tiles),
        interpret=interpret,
    )
    return out["d_matrices"]


# What each grid step does -------------------------------------------------------------------------


def _steps_of_product(
    counts: Int[Array, " G"], cores: int, steps: int
) -> dict[str, Int[Array, " steps"]]:
    """Divide the tiles over the cores; return what each step of each core does.

    Args:
      counts: the number of tiles of each group.
      cores: the number of cores.
      steps: the number of steps of each core.

    Returns:
      Four tables: the `tile` of each step; its `group`; its `role`, a sum of bits; and the group
      whose matrix is copied `ahead` in the group's first step, or -1.
    """
    ends = jnp.cumsum(counts)
    core, step = jnp.arange(cores)[:, None], jnp.arange(steps)
    each = -(-ends[-1] // cores)
    own = jnp.clip(ends[-1] - core * each, 0, each)
    # Steps without work stay at the core's last tile, so that nothing is copied for them.
    tile = core * each + jnp.clip(step, 0, jnp.maximum(own - 1, 0))
    group = _group_of(tile, ends)
    active = step < own
    first = active & ((step == 0) | (group != jnp.roll(group, 1, axis=1)))
    second = (jnp.cumsum(first, axis=1) - 1) % 2
    following = ends[group]
    ahead = jnp.where(following < core * each + own, _group_of(following, ends), -1)
    role = _ACTIVE * active + _FIRST * first + _SECOND_SLOT * second
    tables = {"ahead": ahead, "group": group, "role": role, "tile": tile}
    return {name: x.astype(jnp.int32).reshape(-1) for name, x in tables.items()}


def _steps_of_matrices(counts: Int[Array, " G"], tiles: int) -> dict[str, Int[Array, " steps"]]:
    """Return what each step does: its `tile`, its `group` and its `role`, a sum of bits.

    A group without rows has one step, which writes zeros.
    """
    visits = jnp.maximum(counts, 1)
    ends = jnp.cumsum(visits)
    step = jnp.arange(tiles + len(counts))
    at = jnp.minimum(step, ends[-1] - 1)
    group = _group_of(at, ends)
    within = at - (ends - visits)[group]
    tile = jnp.minimum((jnp.cumsum(counts) - counts)[group] + within, tiles - 1)
    role = _ACTIVE * (step < ends[-1]) + _FIRST * (within == 0) + _EMPTY * (counts[group] == 0)
    tables = {"group": group, "role": role, "tile": tile}
    return {name: x.astype(jnp.int32) for name, x in tables.items()}


def _group_of(index, ends):
    """Return the group of each index, or the last group if it is beyond all groups."""
    beyond = jnp.sum(index[..., None] >= ends, axis=-1)
    return jnp.minimum(beyond, len(ends) - 1)


# Kernels ------------------------------------------------------------------------------------------


def _product_kernel(inputs, outputs, scratch, *, steps: int, transposed: bool):
    n, step = pl.program_id(1), pl.program_id(2)
    at = pl.program_id(0) * steps + step
    role, group, ahead = (inputs[name][at] for name in ("role", "group", "ahead"))
    slot, products = jnp.where(role & _SECOND_SLOT != 0, 1, 0), outputs["products"]
    columns = products.shape[1]
    # A slice of 128 columns, or of a multiple of them, starts at a multiple of 128.
    own = slice(None) if columns % LANES else pl.ds(pl.multiple_of(n * columns, LANES), columns)

    def copy(group, slot):
        part = (group, own) if transposed else (group, slice(None), own)
        source, matrix = inputs["matrices"].at[part], scratch["matrix"].at[slot]
        return pltpu.make_async_copy(source, matrix, scratch["copied"].at[slot])

    @pl.when(role & _FIRST != 0)
    def _of_group():
        @pl.when(step == 0)
        def _of_core():
            copy(group, slot).start()

        @pl.when(ahead >= 0)
        def _of_next_group():
            copy(ahead, 1 - slot).start()

        copy(group, slot).wait()

    @pl.when(role & _ACTIVE != 0)
    def _multiply():
        multiply = dot_columns if transposed else dot
        x = multiply(inputs["rows"][...], scratch["matrix"][slot])
        products[...] = x.astype(products.dtype)


def _matrices_kernel(inputs, outputs, scratch):
    role = inputs["role"][pl.program_id(2)]
    sums, d_matrices = scratch["sums"], outputs["d_matrices"]

    @pl.when(role & _ACTIVE != 0)
    def _add():
        before = jnp.where(role & _FIRST != 0, 0.0, sums[...])
        x = before + dot_rows(inputs["rows"][...], inputs["d_products"][...])
        x = jnp.where(role & _EMPTY != 0, 0.0, x)
        sums[...] = x
        # The block is copied to HBM after the group's last tile only. To write it for every tile
        # costs stores, but the schedule has no branch, and takes no longer on v5e and v5p.
        d_matrices[...] = x.astype(d_matrices.dtype)


# Sizes of blocks ----------------------------------------------------------------------------------


class _Blocks(NamedTuple):
    """The number of rows per tile, and the rows and columns of a matrix that a block has."""

    tile: int
    inner: int
    columns: int


def _of_product(rows, N: int, sizes, alignment: int) -> _Blocks | None:
    """Return the blocks of a product with N columns, or None if none fit in VMEM."""
    (_, inner), dtype = rows.shape, rows.dtype
    tiles = _tiles(len(rows), len(sizes), alignment)
    blocks = (_Blocks(tile, inner, c) for tile in tiles for c in _parts(N))
    results = lambda b: _bytes(b.tile, b.columns, jnp.float32)
    return next((b for b in blocks if _fits(b, dtype, results(b))), None)


def _of_matrices(rows, d_products, sizes, alignment: int) -> _Blocks | None:
    """Return the blocks of the gradient of the matrices, or None if none fit in VMEM.

    If possible, there is a block of columns for each core.
    """
    (_, K), (_, N), dtype = rows.shape, d_products.shape, rows.dtype
    cores, narrow = target().chip.cores, dtype == jnp.bfloat16
    most = N // cores if N % (cores * LANES) == 0 else N
    tiles = _tiles(len(rows), len(sizes), alignment)
    parts = [(k, c) for k in _parts(K) for c in _parts(N) if c <= most]
    blocks = (_Blocks(tile, *part) for tile in tiles for part in parts)
    # The compiler spills results of products in float32.
    sums = lambda b: _bytes(b.inner, b.columns, jnp.float32) * (1 if narrow else 3)
    return next((b for b in blocks if _fits(b, dtype, sums(b))), None)


def _tiles(rows: int, groups: int, alignment: int) -> list[int]:
    """Return the possible numbers of rows per tile, best first.

    If `alignment` has large enough divisors, they are such divisors.
    """
    tile = math.gcd(alignment, _MOST)
    tiles = [best_tile(rows, groups) if tile < _LEAST else tile]
    while tiles[-1] >= 2 * _LEAST:
        tiles.append(tiles[-1] // 2)
    return tiles


def _fits(blocks: _Blocks, dtype, kept: int) -> bool:
    """Return whether all blocks fit in VMEM, with `kept` bytes of results in float32."""
    tile, inner, columns = blocks
    factors = (
        _bytes(tile, inner, dtype),
        _bytes(tile, columns, dtype),
        _bytes(inner, columns, dtype),
    )
    # A float32 factor is multiplied as three bfloat16 terms.
    terms = 0 if dtype == jnp.bfloat16 else sum(factors) * 7 // 4
    return 2 * sum(factors) + terms + kept <= target().vmem_part(_BUDGET)


def _bytes(rows: int, columns: int, dtype) -> int:
    return round_up(rows, 16) * round_up(columns, LANES) * jnp.dtype(dtype).itemsize


def _parts(size: int) -> list[int]:
    """Return the sizes that parts of an axis can have: all of it, and multiples of 128, descending.

    A multiple of 128 must divide the axis.
    """
    multiples = range(size // LANES * LANES, 0, -LANES)
    return [size, *(part for part in multiples if size % part == 0 and part < size)]
