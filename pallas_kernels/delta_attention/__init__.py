"""The gated delta rule: linear attention whose memory is one matrix per head.

Each head has a state, a matrix S of shape `K x V`. A token first decays the K rows of S; g contains
the log decays. It then writes to S with strength beta, and reads from S. See Kimi Team (2025),
"Kimi Linear", Kimi Delta Attention:

    S' = Diag(e^g_t) S_(t-1)     S_t = S' + beta_t k_t (v_t - k_t^T S')^T     o_t = scale S_t^T q_t

Implementations: "xla" (plain JAX, on any platform), "mosaic_tpu" (TPU kernels) and "pallas" (the
kernels on platforms that have them, else plain JAX). The default, None, uses the kernels on TPUs
and "xla" elsewhere.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments import check_array, check_shapes, check_tokens
from pallas_kernels.delta_attention import mosaic_tpu, xla
from pallas_kernels.delta_attention.interface import DeltaOperands
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
    """Compute `o_t = scale S_t^T q_t` for every head, and the state after the last token.

    Args:
      q, k: queries and keys. The state stays bounded if keys have length 1.
      v: values.
      log_decay: g, at most 0: the log decay of each row of the state at each token. It is applied
        before the token's write.
      beta: the fraction of the difference `v - k^T S` that is written. With beta 0 and log decay 0,
        the state does not change.
      state: the state before the first token; None means zeros.
      scale: the factor by which the output is multiplied; it gets no gradient.
      segment_ids: the segment of each token. At the start of each new segment, the state is reset
        to zeros. The initial state belongs to the first token's segment. None means one segment per
        row.
      implementation: None chooses the fastest one for the platform that the program is lowered for.

    Returns:
      One vector per token and head in v's dtype, and the final state. The state and all sums are at
      least float32.

    Raises:
      UnsupportedImplementation: a named implementation is unknown or does not support this call.
      ValueError: shapes or dtypes do not fit.
      TypeError: the op is differentiated in forward mode.
    """
    _check(q, k, v, log_decay, beta, state, segment_ids)
    dtype = jnp.result_type(jnp.float32, log_decay, beta, v)
    batch, seq, heads, keys = q.shape
    if state is None:
        state = jnp.zeros((batch, heads, keys, v.shape[-1]), dtype)
    state = state.astype(dtype)
    if not q.size or not v.size:
        return jnp.zeros_like(v), state
    documents = jnp.zeros((batch, seq), jnp.int32)
    if segment_ids is not None:
        new = segment_ids[:, 1:] != segment_ids[:, :-1]
        documents = jnp.pad(jnp.cumsum(new, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    call = _DeltaCall(scale, implementation)
    log_decay, beta = log_decay.astype(dtype), beta.astype(dtype)
    arrays = vary_alike((q, k, v, log_decay, beta, state))
    return _delta_attention(call, *arrays, documents)


class _DeltaCall(NamedTuple):
    """The static parameters of a `delta_attention` call, constant during tracing."""

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
    operands = DeltaOperands(q, k, v, log_decay, beta, documents)
    read, after, states = call.run("forward", operands, state)
    return (read, after), (operands, states)


def _backward(call, saved, cotangents):
    gradients = call.run("backward", *saved, *cotangents)
    return *gradients, None


_delta_attention.defvjp(_forward, _backward)


def _check(q, k, v, log_decay, beta, state, segment_ids):
    arrays = {"q": q, "k": k, "log_decay": log_decay, "v": v}
    for name, x in arrays.items():
        check_array(name, x, "batch seq heads V" if name == "v" else "batch seq heads K")
    check_array("beta", beta, "batch seq heads")
    check_tokens(q=q.shape[1])
    lead = q.shape[:3]
    shapes = {"k": q.shape, "log_decay": q.shape, "beta": lead, "v": (*lead, v.shape[-1])}
    if state is not None:
        check_array("state", state, "batch heads K V")
        shapes["state"] = (lead[0], lead[2], q.shape[-1], v.shape[-1])
    arrays |= {"beta": beta, "state": state}
    wanted = {name: (arrays[name], shape) for name, shape in shapes.items()}
    beside = f"q {list(q.shape)} and v {list(v.shape)}"
    check_shapes(beside, **wanted)
    check_shapes(beside, integers=True, segment_ids=(segment_ids, lead[:2]))
