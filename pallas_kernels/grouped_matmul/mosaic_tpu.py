"""Products of groups of rows with one matrix per group on TPUs.

Rows are processed in tiles that belong to one group each, so no tile is computed twice. For this,
the size of every group must be a multiple of the tile. If the caller does not promise that, the
rows are moved apart before a call, and together after it. A tile is multiplied with a matrix along
the whole contracted axis. While a group's tiles are multiplied, the matrix of the next group is
copied from HBM. The cores of a chip share the tiles that belong to a group.

For example, take M = 131,072 rows, K = 2304, N = 2048 and 32 groups in bfloat16 on v5p (459
TFLOP/s, 2765 GB/s), as on one device of Kimi Linear's 48B model. The arithmetic takes at least 2.69
ms, and reading and writing everything once (1.44 GB) takes at least 0.52 ms.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.call import LANES, tpu_call
from pallas_kernels.grouped_matmul.layout import spread
from pallas_kernels.platform import checks_varying
from pallas_kernels.products import dot, dot_columns, dot_rows
from pallas_kernels.target import target

# Minimum and maximum number of rows per tile. Rows in bfloat16 come in tiles of 16.
_LEAST, _MOST = 16, 512
# Maximum VMEM of all blocks, as an argument of `Target.vmem_part`.
_BUDGET = 50
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
    tile, inner = _tile(rows, sizes, alignment), rows.shape[1]
    if op == "product":
        columns = other.shape[1 if transposed else 2]
        fits = _columns(inner, columns, tile, rows.dtype)
        inner, columns = (columns, inner) if transposed else (inner, columns)
    else:
        columns = other.shape[1]
        fits = _blocks(inner, columns, tile, rows.dtype)
    if fits is None:
        return f"matrices [{inner}, {columns}] of {rows.dtype} do not fit in VMEM"
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
    tile = _tile(rows, sizes, alignment)
    if alignment % tile:
        apart = spread(len(rows), sizes, tile)
        options = {"alignment": tile, "transposed": transposed, "interpret": interpret}
        return apart.back(product(apart(rows), matrices, apart.sizes, **options))
    (M, inner), N = rows.shape, matrices.shape[1 if transposed else 2]
    tiles = -(-M // tile)
    cores = min(target().chip.cores, tiles)
    steps = -(-tiles // cores)
    columns = _columns(inner, N, tile, rows.dtype)
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
    tile = _tile(rows, sizes, alignment)
    if alignment % tile:
        apart = spread(len(rows), sizes, tile)
        options = {"alignment": tile, "interpret": interpret}
        return of_matrices(apart(rows), apart(d_products), apart.sizes, **options)
    (M, K), N, G = rows.shape, d_products.shape[1], len(sizes)
    inner, columns = _blocks(K, N, tile, rows.dtype)
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
        # takes no time, because the matrix units are the limit.
        d_matrices[...] = x.astype(d_matrices.dtype)


# Sizes of blocks ----------------------------------------------------------------------------------


def _tile(rows, sizes, alignment: int) -> int:
    """Return the number of rows per tile: a divisor of `alignment`, if this is large enough."""
    tile = math.gcd(alignment, _MOST)
    return best_tile(len(rows), len(sizes)) if tile < _LEAST else tile


def _columns(inner: int, columns: int, tile: int, dtype) -> int | None:
    """Return the number of a product's columns per block, or None if no number fits in VMEM.

    Args:
      inner: the length of the contracted axis.
      columns: the number of columns of the product.
      tile: the number of rows per tile.
      dtype: the dtype of rows and matrices.
    """
    item, limit = jnp.dtype(dtype).itemsize, target().vmem_part(_BUDGET)
    need = lambda c: 2 * item * (inner * c + tile * inner + tile * c) + 4 * tile * c
    return next((c for c in _parts(columns) if need(c) <= limit), None)


def _blocks(K: int, N: int, tile: int, dtype) -> tuple[int, int] | None:
    """Return the numbers of rows and columns of a block of a matrix, or None if none fit in VMEM.

    If possible, there is a block of columns for each core.
    """
    item, limit = jnp.dtype(dtype).itemsize, target().vmem_part(_BUDGET)
    need = lambda k, c: 4 * k * c + 2 * item * (k * c + tile * k + tile * c)
    cores = target().chip.cores
    most = N // cores if N % (cores * LANES) == 0 else N
    sizes = ((k, c) for k in _parts(K) for c in _parts(N) if c <= most)
    return next((size for size in sizes if need(*size) <= limit), None)


def _parts(size: int) -> list[int]:
    """Return the sizes that parts of an axis can have: all of it, and multiples of 128, descending.

    A multiple of 128 must divide the axis.
    """
    multiples = range(size // LANES * LANES, 0, -LANES)
    return [size, *(part for part in multiples if size % part == 0 and part < size)]
