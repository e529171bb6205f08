"""The parts of the key-vector ops that the GPU kernels in Triton and in Mosaic GPU share."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Shaped

from pallas_kernels.arguments import Norm
from pallas_kernels.key_vector.interface import Reread, SiteOperands, SiteResults
from pallas_kernels.key_vector.sharded import key_sums


def is_plain(op: str, site: SiteOperands) -> bool:
    """Return whether this is the backward pass of a store or a read alone, which is plain JAX."""
    return op == "backward" and not (site.stores and site.reads)


def forward_name(site: SiteOperands) -> str:
    """Return the name of the forward kernel for a store, a read or both."""
    halves = {(True, True): "forward", (True, False): "store", (False, True): "read"}
    return f"key_vector_{halves[site.stores, site.reads]}"


def reread(
    forward: Callable[..., SiteResults],
    rebuilt: Shaped[Array, "B N K V"],
    again: Reread,
    *,
    norm: Norm,
    dtype: DTypeLike,
    **options: int,
) -> Float[Array, "B N A V"]:
    """Read from the rebuilt residual with the statistics in `again`.

    The kernel `forward` subtracts a mean that it computes itself. This function corrects the result
    for the difference between this mean and the one in `again`.
    """
    site = SiteOperands(rebuilt, gain=again.gain, read_keys=again.read_keys)
    read = forward(site, scale=False, norm=norm, dtype=dtype, **options)
    retrieved = read.retrieved.astype(jnp.float32)
    if norm == "layernorm":
        above = (read.statistics.mean - again.statistics.mean)[..., None, None]
        retrieved += above * key_sums(again.gain, again.read_keys)
    return (again.statistics.rstd[..., None, None] * retrieved).astype(dtype)
