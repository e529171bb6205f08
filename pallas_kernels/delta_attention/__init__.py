"""The gated delta rule: attention whose memory of all tokens is one matrix a head.

Kimi Team (2025), "Kimi Linear": Kimi Delta Attention. Of each head, with a state S of `K x V`, log
decays g of its rows and a strength beta of each token's write:

    S' = Diag(e^g_t) S_(t-1)     S_t = S' + beta_t k_t (v_t - k_t^T S')^T     o_t = scale S_t^T q_t

Implementations: "xla" (plain JAX, anywhere), in chunks of 64 tokens; "pallas" is the same until
there are kernels. None is "xla".
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments import check_array
from pallas_kernels.delta_attention import xla
from pallas_kernels.delta_attention.interface import Operands
from pallas_kernels.delta_attention.reference import delta_step
from pallas_kernels.platform import Implementations, reverse_mode

__all__ = ["delta_attention", "delta_step"]

Implementation = Literal["xla", "pallas"]


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
    """`o_t = scale S_t^T q_t` of every head, and the state behind the last token.

    Args:
      q, k: queries and keys; keys of length 1 keep the state bounded.
      v: values.
      log_decay: g, at most 0: of each of the state's K rows, at each token, before it is written.
      beta: how much of `v - k^T S` is written; 0, with a log decay of 0, leaves the state alone.
      state: before the first token; None is an empty one.
      scale: of what is read; no gradient.
      segment_ids: a token whose id is not that of the token before it finds an empty state; None is
        one segment a row. The state given is of the first token's segment.
      implementation: None picks what is best on the platform that the program is lowered for.

    Returns:
      One data vector a head in v's dtype, and the state, which as all sums is at least float32.

    Raises:
      UnsupportedImplementation: a named implementation is unknown.
      ValueError: shapes or dtypes do not fit.
      TypeError: it is differentiated in forward mode.
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
    return _delta_attention(call, q, k, v, log_decay, beta, state, documents)


class _Call(NamedTuple):
    """What is fixed while tracing."""

    scale: float
    implementation: str | None

    def run(self, op: str, *args):
        return _IMPLEMENTATIONS.run(self.implementation, op, *args, scale=self.scale)


_IMPLEMENTATIONS = Implementations(xla, {}, ())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _delta_attention(call, q, k, v, log_decay, beta, state, documents):
    return _forward(call, q, k, v, log_decay, beta, state, documents)[0]


def _forward(call, q, k, v, log_decay, beta, state, documents):
    operands = _chunked(q, k, v, log_decay, beta, documents)
    read, after, states = call.run("forward", operands, state)
    # What is saved is not in chunks: it may be there for others too.
    return (_joined(read, q.shape[1]), after), (q, k, v, log_decay, beta, documents, states)


def _backward(call, saved, cotangents):
    (*given, documents, states), (d_read, d_state) = saved, cotangents
    operands, pull_back = jax.vjp(lambda *given: _chunked(*given, documents), *given)
    d_read = _in_chunks(d_read, operands.q.shape[-2])
    d_chunks, d_state = call.run("backward", operands, states, d_read, d_state)
    no_gradient = lambda x: jnp.zeros(x.shape, jax.dtypes.float0)
    d_operands = Operands(*d_chunks, *map(no_gradient, operands[5:]))
    return *pull_back(d_operands), d_state, None


_delta_attention.defvjp(_forward, _backward)


def _chunked(q, k, v, log_decay, beta, documents) -> Operands:
    """In chunks as long as the implementations', or the next power of two above the sequence."""
    size = min(xla.CHUNK, 1 << (q.shape[1] - 1).bit_length())
    *floats, beta = (_in_chunks(x, size) for x in (q, k, v, log_decay, beta[..., None]))
    documents = jnp.pad(documents, ((0, 0), (0, -documents.shape[1] % size)), mode="edge")
    documents = documents.reshape(len(documents), -1, size).swapaxes(0, 1)
    before = jnp.concatenate([jnp.zeros_like(documents[:1, :, 0]), documents[:-1, :, -1]])
    return Operands(*floats, beta[..., 0], documents, before)


def _in_chunks(x, size):
    """`[batch, seq, heads, ..]` as `[chunks, batch, heads, size, ..]`, zeros at the end."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size), (0, 0), (0, 0)))
    x = x.reshape(x.shape[0], -1, size, *x.shape[2:])
    return jnp.transpose(x, (1, 0, 3, 2, 4))


def _joined(x, seq):
    """`_in_chunks` undone."""
    x = jnp.transpose(x, (1, 0, 3, 2, 4))
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :seq]


def _check(q, k, v, log_decay, beta, state, segment_ids):
    given = {"q": q, "k": k, "log_decay": log_decay, "v": v}
    for name, x in given.items():
        check_array(name, x, "batch seq heads V" if name == "v" else "batch seq heads K")
    check_array("beta", beta, "batch seq heads")
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
