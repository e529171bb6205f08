"""Plain JAX reference of causal attention: what every other implementation is tested against."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def visible(length: int, segment_ids: Int[Array, "B N"] | None) -> Bool[Array, "B_or_1 N N"]:
    """Whether query i sees key j: `j <= i` in the same segment."""
    order = jnp.arange(length)
    mask = (order[:, None] >= order[None, :])[None]
    if segment_ids is not None:
        mask = mask & (segment_ids[:, :, None] == segment_ids[:, None, :])
    return mask


def attention_forward(
    qkv: Float[Array, "B N P D"],
    *,
    scale: Float[Array, ""] | int | float,
    slopes: Float[Array, " H"] | None = None,
    segment_ids: Int[Array, "B N"] | None = None,
) -> tuple[Float[Array, "B N H D"], Float[Array, "B N H"]]:
    """`softmax(scale q.k - slope (i - j)) v` of every head, and each softmax's log sum.

    At least float32 inside; the output in qkv's dtype, the log sums at least float32.
    """
    dtype = jnp.result_type(qkv, jnp.float32)
    q, k, v = jnp.split(qkv, 3, axis=2)
    logits = scale * jnp.einsum("bnhd,bmhd->bhnm", q, k, preferred_element_type=dtype)
    order = jnp.arange(qkv.shape[1])
    if slopes is not None:
        distance = order[:, None] - order[None, :]
        logits = logits - slopes.astype(dtype)[:, None, None] * distance
    mask = visible(qkv.shape[1], segment_ids)[:, None]
    logits = jnp.where(mask, logits, jnp.finfo(dtype).min).astype(dtype)
    log_sums = jax.nn.logsumexp(logits, axis=-1)
    weights = jnp.exp(logits - log_sums[..., None]).astype(qkv.dtype)
    return jnp.einsum("bhnm,bmhd->bnhd", weights, v), log_sums.swapaxes(1, 2)


def attention_backward(
    qkv: Float[Array, "B N P D"],
    out: Float[Array, "B N H D"],
    log_sums: Float[Array, "B N H"],
    d_out: Float[Array, "B N H D"],
    *,
    scale: Float[Array, ""] | int | float,
    slopes: Float[Array, " H"] | None = None,
    segment_ids: Int[Array, "B N"] | None = None,
) -> Float[Array, "B N P D"]:
    """The cotangent of qkv. With weights p: `ds = p (d_out v - sum(out d_out))`."""
    dtype = jnp.result_type(qkv, jnp.float32)
    q, k, v = jnp.split(qkv, 3, axis=2)
    logits = scale * jnp.einsum("bnhd,bmhd->bhnm", q, k, preferred_element_type=dtype)
    order = jnp.arange(qkv.shape[1])
    if slopes is not None:
        distance = order[:, None] - order[None, :]
        logits = logits - slopes.astype(dtype)[:, None, None] * distance
    mask = visible(qkv.shape[1], segment_ids)[:, None]
    weights = jnp.where(mask, jnp.exp(logits - log_sums.swapaxes(1, 2)[..., None]), 0)
    d_weights = jnp.einsum("bnhd,bmhd->bhnm", d_out, v, preferred_element_type=dtype)
    delta = jnp.sum(out.astype(dtype) * d_out, axis=-1).swapaxes(1, 2)
    d_logits = (scale * weights * (d_weights - delta[..., None])).astype(qkv.dtype)
    d_q = jnp.einsum("bhnm,bmhd->bnhd", d_logits, k)
    d_k = jnp.einsum("bhnm,bnhd->bmhd", d_logits, q)
    d_v = jnp.einsum("bhnm,bnhd->bmhd", weights.astype(qkv.dtype), d_out)
    return jnp.concatenate([d_q, d_k, d_v], axis=2)
