"""Plain JAX reference of weighted sums over depth, against which every implementation is tested.

It computes in float32, or in float64 for float64 inputs. JAX's automatic differentiation computes
the gradients.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def sums(
    weights: Float[Array, "S N T"],
    sources: Float[Array, "N T *size"],
    count: int | Int[Array, ""],
) -> Float[Array, "S T *size"]:
    """Return `sum over i < count of weights[s, i, t] sources[i, t]`."""
    wide = jnp.result_type(weights, sources, jnp.float32)
    active = jnp.arange(len(sources)) < count
    values = jnp.where(active[(slice(None), *[None] * (sources.ndim - 1))], sources, 0)
    return jnp.einsum(
        "snt,nt...->st...", weights.astype(wide), values.astype(wide), precision="highest"
    )
