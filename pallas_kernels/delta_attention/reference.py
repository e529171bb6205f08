"""The gated delta rule as a recurrence over tokens, the reference for testing implementations.

Sums are float32, or float64 for float64 inputs. The cost is `6 K V` FLOPs per token and head.
Tokens are processed one after another, and each reads and writes the whole state.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments import check_array, check_shapes


def delta_attention(
    q: Float[Array, "batch seq heads K"],
    k: Float[Array, "batch seq heads K"],
    v: Float[Array, "batch seq heads V"],
    log_decay: Float[Array, "batch seq heads K"],
    beta: Float[Array, "batch seq heads"],
    state: Float[Array, "batch heads K V"],
    *,
    scale: float,
    segment_ids: Int[Array, "batch seq"] | None = None,
) -> tuple[Float[Array, "batch seq heads V"], Float[Array, "batch heads K V"]]:
    """Return what each token reads, in v's dtype, and the state after the last token.

    The arguments are as in `pallas_kernels.delta_attention.delta_attention`.
    """
    dtype = state.dtype
    fresh = jnp.zeros(q.shape[:2], bool)
    if segment_ids is not None:
        fresh = fresh.at[:, 1:].set(segment_ids[:, 1:] != segment_ids[:, :-1])

    def of_token(state, token):
        q, k, v, log_decay, beta, fresh = token
        state = jnp.where(fresh[:, None, None, None], 0, state)
        return delta_step(q, k, v, log_decay, beta, state, scale=scale)[::-1]

    of_tokens = (x.astype(dtype).swapaxes(0, 1) for x in (q, k, v, log_decay, beta))
    state, read = jax.lax.scan(of_token, state, (*of_tokens, fresh.swapaxes(0, 1)))
    return read.swapaxes(0, 1).astype(v.dtype), state


def delta_step(
    q: Float[Array, "batch heads K"],
    k: Float[Array, "batch heads K"],
    v: Float[Array, "batch heads V"],
    log_decay: Float[Array, "batch heads K"],
    beta: Float[Array, "batch heads"],
    state: Float[Array, "batch heads K V"],
    *,
    scale: float,
) -> tuple[Float[Array, "batch heads V"], Float[Array, "batch heads K V"]]:
    """Process one token: update the state, and return what the token reads and the new state.

    With S the state: `S' = e^g S`, `S'' = S' + beta k (v - k^T S')^T`. The token reads `scale q^T
    S''`, and S'' is the new state.

    Raises:
      ValueError: shapes do not fit, or an array is not one of floats.
    """
    check_array("state", state, "batch heads K V")
    lead, (K, V) = state.shape[:2], state.shape[2:]
    keys = {"q": (q, (*lead, K)), "k": (k, (*lead, K)), "log_decay": (log_decay, (*lead, K))}
    of_heads = {"v": (v, (*lead, V)), "beta": (beta, lead)}
    check_shapes(f"state {list(state.shape)}", **keys, **of_heads)
    q, k, values, log_decay, beta = (x.astype(state.dtype) for x in (q, k, v, log_decay, beta))
    state = jnp.exp(log_decay)[..., None] * state
    # Compute these products as sums on the vector unit, which are exact and read the state only
    # once.
    missing = values - jnp.sum(k[..., None] * state, axis=-2)
    state = state + (beta[..., None] * k)[..., None] * missing[..., None, :]
    return (scale * jnp.sum(q[..., None] * state, axis=-2)).astype(v.dtype), state
