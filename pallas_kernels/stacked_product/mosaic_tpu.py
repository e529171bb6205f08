"""A TPU kernel for products of a few rows with one layer's matrices.

Each grid step multiplies all rows by a block of columns, while the next block is copied from HBM.
With few rows, the copies take longer than the arithmetic, so they determine the time.

For T rows, P = 2, K = 1024 and N = 2816 in bfloat16 (the gate and up projection of llama-374m) on
v5e (197 TFLOP/s, 819 GB/s), the copy takes 14.1 us, and the arithmetic takes at least 0.06 us for
one row, 1.9 us for 32 rows and 15.0 us for 256.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.call import LANES, divisors, round_up, tpu_call
from pallas_kernels.products import dot
from pallas_kernels.target import target

# Maximum number of rows. With more rows, the arithmetic takes longer than the copy on every TPU.
MOST_ROWS = 256
# Preferred maximum number of bytes per block, and preferred minimum number of grid steps per call.
# Large blocks hide the latency of a copy. No copy overlaps with the product of the last block, so a
# call should have many blocks.
_BYTES, _STEPS = 3 * 2**20, 4
# Maximum VMEM for all blocks, as an argument of `Target.vmem_part`.
_BUDGET = 50


def unsupported(op: str, rows, matrices, layer) -> str | None:
    """Return a one-line reason why the kernel does not support these operands, or None."""
    if any(x.dtype not in (jnp.bfloat16, jnp.float32) for x in (rows, matrices)):
        return "arrays that are neither bfloat16 nor float32"
    if len(rows) > MOST_ROWS:
        return f"{len(rows)} rows (legal: at most {MOST_ROWS})"
    if _vmem(rows, matrices, _columns(matrices)) > target().vmem_part(_BUDGET):
        return f"matrices with columns of {matrices.shape[2]} numbers do not fit in VMEM"
    return None


def product(
    rows: Float[Array, "T K"],
    matrices: Float[Array, "L P K N"],
    layer: Int[Array, ""],
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "T P*N"]:
    """Compute the products, as specified in `pallas_kernels.stacked_product`."""
    (T, K), (_, P, _, N) = rows.shape, matrices.shape
    columns = _columns(matrices)
    blocks = -(-N // columns)
    # Blocks start at multiples of their size. If N is a multiple of 128, the block size divides N,
    # and the products with all P matrices are written to one array. Otherwise there is one array
    # per matrix.
    joined = P == 1 or N % LANES == 0
    if joined:
        shape, spec = (T, P * N), pl.BlockSpec((T, columns), lambda p, j, _: (0, p * blocks + j))
    else:
        shape, spec = (P, T, N), pl.BlockSpec((None, T, columns), lambda p, j, _: (p, 0, j))
    of_layer = pl.BlockSpec((None, None, K, columns), lambda p, j, layer: (layer[0], p, 0, j))
    out = tpu_call(
        _kernel,
        "stacked_product",
        {
            "rows": (rows, pl.BlockSpec((T, K), lambda p, j, _: (0, 0))),
            "matrices": (matrices, of_layer),
        },
        {"products": (jax.ShapeDtypeStruct(shape, rows.dtype), spec)},
        {},
        grid=(P, blocks),
        semantics=("parallel", "parallel"),
        flops=2 * T * P * K * N,
        moved=(T * K + T * P * N) * rows.dtype.itemsize + P * K * N * matrices.dtype.itemsize,
        prefetch={"layer": layer.reshape(1)},
        in_hbm=("matrices",),
        interpret=interpret,
    )
    products = out["products"]
    return products if joined else jnp.concatenate(list(products), axis=-1)


def _kernel(inputs, outputs, scratch):
    rows, products = inputs["rows"][...], outputs["products"]
    products[...] = dot(rows, inputs["matrices"][...].astype(rows.dtype)).astype(products.dtype)


def _columns(matrices) -> int:
    """Return the number of columns per block: a divisor of N if N is a multiple of 128.

    A block has at most `_BYTES` bytes, unless 128 columns already take more.
    """
    P, K, N = matrices.shape[1:]
    most = P * -(-N // LANES) // _STEPS
    tiles = max(1, min(most, _BYTES // (K * matrices.dtype.itemsize * LANES)))
    if N % LANES:
        return min(tiles * LANES, N) if N > LANES else N
    return LANES * max(n for n in divisors(N // LANES) if n <= tiles)


def _vmem(rows, matrices, columns: int) -> int:
    """Return the number of VMEM bytes for all blocks, with two buffers per block."""
    (T, K), width = rows.shape, round_up(columns, LANES)
    of_rows = round_up(T, 16) * (round_up(K, LANES) + width) * rows.dtype.itemsize
    return 2 * (of_rows + round_up(K, 16) * width * matrices.dtype.itemsize)
