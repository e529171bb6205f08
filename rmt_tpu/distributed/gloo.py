"""A workaround for Gloo, the library through which CPUs in several processes communicate."""

import jax

# JAX has no public name for the primitive of reduce-scatter.
from jax._src.lax.parallel import reduce_scatter_p
from jax.interpreters import mlir


def scatter_sums_by_all_reduce() -> None:
    """Make all later reduce-scatters on CPUs use an all-reduce.

    Each device then takes its part of the whole sum. Gloo's reduce-scatter overwrites data that it
    is still sending. Some numbers in the first device's part are then occasionally wrong, and no
    error is raised (jax issue 40830; jaxlib 0.10 and 0.12). This happens to gradients on a mesh
    with `fsdp`, for example. Gloo's all-reduce is correct.
    """
    lowering = mlir.lower_fun(_part_of_sum, multiple_results=False)
    mlir.register_lowering(reduce_scatter_p, lowering, platform="cpu")


def _part_of_sum(
    x: jax.Array, *, scatter_dimension: int, axis_name, axis_size: int, tiled: bool, **_
) -> jax.Array:
    whole = jax.lax.psum(x, axis_name)
    size = x.shape[scatter_dimension] // axis_size
    start = jax.lax.axis_index(axis_name) * size
    part = jax.lax.dynamic_slice_in_dim(whole, start, size, scatter_dimension)
    return part if tiled else part.squeeze(scatter_dimension)
