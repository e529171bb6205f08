"""Plain JAX reference of depth attention, against which every implementation is tested.

All computations are in float32, or in float64 for float64 inputs. JAX's automatic differentiation
computes the gradients. See Kimi Team (2026), "Attention Residuals", equations 2 to 6 and algorithm
1.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.arguments import Norm
from pallas_kernels.depth_attention.interface import Merge, Partial, wide


def _logits(queries, sources, epsilon):
    """Return the logits [S, N, T] of S queries, N sources and T tokens."""
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(sources), axis=-1) + epsilon)
    return jnp.einsum("sd,ntd->snt", queries, sources, precision="highest") * rstd


def partial(
    operands: Partial, *, epsilon: float
) -> tuple[Float[Array, "S T D"], Float[Array, "S T"]]:
    """Compute the mixes (weighted sums of sources) and log-sum-exps of S sites.

    A mix includes the first `count` sources, and the sources whose mixes and log-sum-exps are in
    `prior`.
    """
    queries, sources, count, prior = operands
    dtype = sources.dtype
    active = jnp.arange(sources.shape[0]) < count
    values = jnp.where(active[:, None, None], wide(sources), 0)
    logits = _logits(wide(queries), values, epsilon)
    logits = jnp.where(active[:, None], logits, -jnp.inf)
    values = jnp.broadcast_to(values, (queries.shape[0], *values.shape))
    if prior is not None:
        mixed, log_sums = prior
        logits = jnp.concatenate([logits, wide(log_sums)[:, None]], axis=1)
        values = jnp.concatenate([values, wide(mixed)[:, None]], axis=1)
    log_sums = jax.nn.logsumexp(logits, axis=1)
    weights = jnp.where(logits == -jnp.inf, 0, jnp.exp(logits - log_sums[:, None]))
    mixed = jnp.einsum("snt,sntd->std", weights, values, precision="highest")
    return mixed.astype(dtype), log_sums


def merge(
    operands: Merge,
    *,
    norm: Norm | None,
    epsilon: float,
    norm_epsilon: float,
) -> Float[Array, "T D"]:
    """Add the running sum to one site's mix of the sealed sources, and normalise the result."""
    query, mixed, log_sums, site, current, active, norm_gain = operands
    dtype = current.dtype
    mixed, current = wide(mixed[site]), wide(current)
    logits = _logits(wide(query)[None], current[None], epsilon)[0, 0]
    p = jnp.where(active, jax.nn.sigmoid(logits - log_sums), 0)[:, None]
    h = mixed + p * (current - mixed)
    return normalize(h, norm_gain, norm=norm, epsilon=norm_epsilon).astype(dtype)


def normalize(
    h: Float[Array, "T D"],
    gain: Float[Array, " D"] | None,
    *,
    norm: Norm | None,
    epsilon: float,
) -> Float[Array, "T D"]:
    """Compute `gain * h / sqrt(mean(h^2) + epsilon)`.

    For layernorm, mean(h) is first subtracted from h. If `norm` is None, h is returned unchanged.
    """
    if norm is None:
        return h
    if norm == "layernorm":
        h = h - jnp.mean(h, axis=-1, keepdims=True)
    h = h * jax.lax.rsqrt(jnp.mean(jnp.square(h), axis=-1, keepdims=True) + epsilon)
    return h * gain
