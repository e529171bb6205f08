"""The gated delta rule: attention whose memory of all tokens is one matrix per head.

Kimi Team (2025), "Kimi Linear": Kimi Delta Attention. Each head has a state S of `K x V`, log
decays g of the state's rows and a strength beta of each token's write:

    S' = Diag(e^g_t) S_(t-1)     S_t = S' + beta_t k_t (v_t - k_t^T S')^T     o_t = scale S_t^T q_t

Implementations: "xla" (plain JAX, on any platform), "mosaic_tpu" (kernels for TPUs) and "pallas"
(the kernels where there are any). The default, None, means the kernels on TPUs and "xla" elsewhere.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments import check_array, check_tokens
from pallas_kernels.delta_attention import mosaic_tpu, xla
from pallas_kernels.delta_attention.interface import Operands
from pallas_kernels.delta_attention.reference import delta_step
from pallas_kernels.platform import Implementations, reverse_mode, vary_alike

__all__ = ["delta_attention", "delta_step"]

Implementation = Literal["xla", "mosaic_tpu", "pallas"]


@reverse_mode
def delta_attention(
    q: Float[Array, "batch seq heads K"],
    k: Float[Array, "batch seq heads K"],
    v: Float[Array, "batch seq heads V"],
    log_decay: Float[Array, "batch seq heads K"],
    beta: Float[Array, "batch seq heads"],
    state: Float[Array, "batch heads K V"] | None = None,
    *,
    scale: float,
    segment_ids: Int[Array, "batch seq"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "batch seq heads V"], Float[Array, "batch heads K V"]]:
    """Compute `o_t = scale S_t^T q_t` of every head, and the state after the last token.

    Args:
      q, k: queries and keys; keys of length 1 keep the state bounded.
      v: values.
      log_decay: g, at most 0: the log decay of each of the state's K rows at each token, applied
        before the token's write.
      beta: the share of `v - k^T S` that is written; 0, with a log decay of 0, leaves the state
        unchanged.
      state: the state before the first token; None is an empty state.
      scale: the factor of what is read; it has no gradient.
      segment_ids: the segment of each token. A token whose id differs from the previous token's
        finds an empty state. None means one segment per row. The given state belongs to the first
        token's segment.
      implementation: None picks the best one for the platform that the program is lowered for.

    Returns:
      One data vector per head in v's dtype, and the state. The state, like all sums, is at least
      float32.

    Raises:
      UnsupportedImplementation: a named implementation is unknown or cannot serve this call.
      ValueError: shapes or dtypes do not fit.
      TypeError: the op is differentiated in forward mode.
    """
    _check(q, k, v, log_decay, beta, state, segment_ids)
    dtype = jnp.result_type(jnp.float32, log_decay, beta, v)
    batch, seq, heads, keys = q.shape
    if state is None:
        state = jnp.zeros((batch, heads, keys, v.shape[-1]), dtype)
    state = state.astype(dtype)
    if not q.size:
        return jnp.zeros_like(v), state
    documents = jnp.zeros((batch, seq), jnp.int32)
    if segment_ids is not None:
        new = segment_ids[:, 1:] != segment_ids[:, :-1]
        documents = jnp.pad(jnp.cumsum(new, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    call = _Call(scale, implementation)
    log_decay, beta = log_decay.astype(dtype), beta.astype(dtype)
    arrays = vary_alike((q, k, v, log_decay, beta, state))
    return _delta_attention(call, *arrays, documents)


class _Call(NamedTuple):
    """The parameters of a call that are fixed while it is traced."""

    scale: float
    implementation: str | None

    def run(self, op: str, *args):
        return _IMPLEMENTATIONS.run(self.implementation, op, *args, scale=self.scale)


_IMPLEMENTATIONS = Implementations(
    xla, {"mosaic_tpu": mosaic_tpu}, ("tpu",), name="delta_attention"
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _delta_attention(call, q, k, v, log_decay, beta, state, documents):
    return _forward(call, q, k, v, log_decay, beta, state, documents)[0]


def _forward(call, q, k, v, log_decay, beta, state, documents):
    operands = Operands(q, k, v, log_decay, beta, documents)
    read, after, states = call.run("forward", operands, state)
    return (read, after), (operands, states)


def _backward(call, saved, cotangents):
    gradients = call.run("backward", *saved, *cotangents)
    return *gradients, None


_delta_attention.defvjp(_forward, _backward)


def _check(q, k, v, log_decay, beta, state, segment_ids):
    given = {"q": q, "k": k, "log_decay": log_decay, "v": v}
    for name, x in given.items():
        check_array(name, x, "batch seq heads V" if name == "v" else "batch seq heads K")
    check_array("beta", beta, "batch seq heads")
    check_tokens(q=q.shape[1])
    lead = q.shape[:3]
    shapes = {"k": q.shape, "log_decay": q.shape, "beta": lead, "v": (*lead, v.shape[-1])}
    if state is not None:
        check_array("state", state, "batch heads K V")
        shapes["state"] = (lead[0], lead[2], q.shape[-1], v.shape[-1])
    if segment_ids is not None:
        shapes["segment_ids"] = lead[:2]
    given |= {"beta": beta, "state": state, "segment_ids": segment_ids}
    for name, shape in shapes.items():
        if given[name].shape != shape:
            raise ValueError(
                f"{name} is {list(given[name].shape)}, and must be {list(shape)} with q "
                f"{list(q.shape)} and v {list(v.shape)}"
            )
