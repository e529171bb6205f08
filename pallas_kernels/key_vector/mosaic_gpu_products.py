"""Matrix products of the Mosaic GPU kernels, on the tensor cores of two generations of GPUs.

The instructions `wgmma` (compute capability 9.0) write sums to registers. The instructions
`tcgen05` (10.0) write them to tensor memory. All results are float32 matrices of ROWS rows.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.mosaic_gpu import plgpu

Instructions = Literal["wgmma", "tcgen05"]

# The number of rows of a matrix instruction's result. Residuals with fewer rows are padded on chip.
ROWS = 64


def products_scratch(kind: Instructions, columns: int, **sums: int) -> dict[str, Any]:
    """Return the scratch buffers for products.

    Args:
      kind: the instructions.
      columns: the number of columns of the results of `product`.
      sums: the number of columns of each sum of products, by name.
    """
    if kind == "wgmma":
        return {}
    in_tensor_memory = {"product": columns} | sums
    scratch = {k: plgpu.TMEM((ROWS, n), jnp.float32) for k, n in in_tensor_memory.items()}
    scratch["multiplied"] = plgpu.Barrier(orders_tensor_core=True)
    if sums:
        scratch["added"] = plgpu.Barrier(num_arrivals=len(sums), orders_tensor_core=True)
    return scratch


def product(kind: Instructions, ref: Any, a: Any, b: Any) -> Array:
    """Return the product `a @ b` of two matrices in shared memory.

    Writes to the operands must have been committed (`commit_smem`). With "tcgen05", the result
    overwrites `ref.product`.
    """
    if kind == "wgmma":

        def multiply(sums):
            plgpu.wgmma(sums, a, b)
            return sums[...]

        return pl.run_scoped(multiply, plgpu.ACC((ROWS, b.shape[1]), jnp.float32))
    plgpu.tcgen05_mma(ref.product, a, b, ref.multiplied, accumulate=False)
    plgpu.barrier_wait(ref.multiplied)
    return _load(ref.product)


def with_sums(
    kind: Instructions, ref: Any, run: Callable[[dict[str, Any]], None], **columns: int
) -> None:
    """Call `run(sums)` with accumulators for sums of products, by name.

    `columns` has the number of columns of each. With "wgmma", the accumulators start at 0. With
    "tcgen05", their contents are undefined until `add_product(..., first=True)`.
    """
    if kind == "tcgen05":
        return run({name: getattr(ref, name) for name in columns})
    shapes = {name: plgpu.ACC((ROWS, n), jnp.float32) for name, n in columns.items()}
    return pl.run_scoped(lambda **sums: run(sums), **shapes)


def add_product(kind: Instructions, ref: Any, sums: Any, a: Any, b: Any, *, first: Any) -> None:
    """Start to add the product `a @ b` to an accumulator, or to write it if `first`.

    With "wgmma", `a` may be in registers. Operands in shared memory must not change until `finish`.
    """
    if kind == "wgmma":
        plgpu.wgmma(sums, a, b)
    else:
        plgpu.tcgen05_mma(sums, a, b, ref.added, accumulate=jnp.logical_not(first))


def finish(kind: Instructions, ref: Any) -> None:
    """Wait for the products that `add_product` started: exactly one for each accumulator."""
    if kind == "wgmma":
        plgpu.wgmma_wait(0)
    else:
        plgpu.barrier_wait(ref.added)


def total_of(kind: Instructions, sums: Any) -> Array:
    """Return the sum of products in an accumulator."""
    return sums[...] if kind == "wgmma" else _load(sums)


def _load(sums):
    values = plgpu.async_load_tmem(sums, layout=plgpu.Layout.WGMMA)
    plgpu.wait_load_tmem()
    return values
