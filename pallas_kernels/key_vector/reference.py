"""A reference implementation of the key-vector ops, for tests of all other implementations.

Statistics and sums are computed in float32 (float64 for float64 inputs), whatever the dtype of the
inputs.

For T tokens, K x V residuals and R stored and P retrieved vectors, `store_norm_retrieve` takes
`2 * T * (R + P) * K * V` FLOPs. It must move at least `T * (2 * K * V + R * V + P * V)` elements:
it reads and writes the residual once, reads the data once and writes the retrieved vectors once.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

from pallas_kernels.arguments import Norm


def _accumulator(*arrays: Array) -> jnp.dtype:
    return jnp.result_type(jnp.float32, *arrays)


def store(
    residual: Float[Array, "*tokens K V"],
    store_keys: Float[Array, "R K"],
    data: Float[Array, "*tokens R V"],
) -> Float[Array, "*tokens K V"]:
    """Compute `X + sum_r w_r (x) y_r`, with X the residual, w the store keys and y the data.

    The result has the residual's dtype.
    """
    dtype = _accumulator(residual, store_keys, data)
    written = jnp.einsum("rk,...rv->...kv", store_keys.astype(dtype), data.astype(dtype))
    return (residual.astype(dtype) + written).astype(residual.dtype)


def norm_retrieve(
    residual: Float[Array, "*tokens K V"],
    gain: Float[Array, "K V"],
    read_keys: Float[Array, "P K"],
    *,
    norm: Norm,
    epsilon: float,
    dtype: DTypeLike,
) -> Float[Array, "*tokens P V"]:
    """Compute `r_p . (gain * norm(X))`, with X the residual and r the read keys.

    The norm is computed over all K * V entries of a token together. The result is of dtype `dtype`.
    """
    accumulator = _accumulator(residual, gain, read_keys)
    x = residual.astype(accumulator)
    if norm == "layernorm":
        x = x - jnp.mean(x, axis=(-2, -1), keepdims=True)
    x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=(-2, -1), keepdims=True) + epsilon)
    x = x * gain.astype(accumulator)
    return jnp.einsum("pk,...kv->...pv", read_keys.astype(accumulator), x).astype(dtype)


def store_norm_retrieve(
    residual: Float[Array, "*tokens K V"],
    store_keys: Float[Array, "R K"],
    data: Float[Array, "*tokens R V"],
    gain: Float[Array, "K V"],
    read_keys: Float[Array, "P K"],
    *,
    norm: Norm,
    epsilon: float,
) -> tuple[Float[Array, "*tokens K V"], Float[Array, "*tokens P V"]]:
    """Compute `store`, and then `norm_retrieve`, which returns vectors in the data's dtype.

    The stored residual is rounded to its dtype before it is read.
    """
    residual = store(residual, store_keys, data)
    retrieved = norm_retrieve(
        residual, gain, read_keys, norm=norm, epsilon=epsilon, dtype=data.dtype
    )
    return residual, retrieved
