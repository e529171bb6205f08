"""Functions whose TPU times are published; the program `estimator.calibrate` compiles them.

The project tokamax publishes times of plain XLA functions and of its own kernels. This module has
the same XLA functions, with the same operations in the same order. Only `attention_kernel` needs
tokamax, because it calls tokamax's kernel. Each function takes a device of a topology description
and returns the lowered call.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_BFLOAT16, _FLOAT32, _INT32 = jnp.bfloat16, jnp.float32, jnp.int32
_EPSILON = 1e-6
_PRECISION = jax.lax.DotAlgorithmPreset.BF16_BF16_F32


def norm(device: jax.Device, shape: Sequence[int], axis: int) -> jax.stages.Lowered:
    """Lower (for compilation) a layer norm over `axis`, with a float32 scale and offset."""

    def call(x, scale, offset):
        others = [i for i in range(x.ndim) if i != axis % x.ndim]
        y = x.astype(_FLOAT32)
        y = y - jnp.mean(y, axis, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis, keepdims=True) + _EPSILON)
        scale, offset = (jnp.expand_dims(a, others) for a in (scale, offset))
        return (y * scale + offset).astype(x.dtype)

    size = [shape[axis]]
    return _lower(call, device, shape, (size, _FLOAT32), (size, _FLOAT32))


def norm_gradient(device: jax.Device, shape: Sequence[int], axis: int) -> jax.stages.Lowered:
    """Lower (for compilation) the gradients of `norm`.

    The mean and the inverse standard deviation are arguments of the lowered call.
    """

    def call(x, scale, mean, inverse, gradient):
        others = tuple(i for i in range(x.ndim) if i != axis % x.ndim)
        y = (x.astype(_FLOAT32) - mean) * inverse
        gradient = gradient.astype(_FLOAT32)
        scaled = gradient * jnp.expand_dims(scale, others)
        d_mean, d_square = (jnp.mean(a, axis, keepdims=True) for a in (scaled, scaled * y))
        d_x = inverse * (scaled - d_mean - y * d_square)
        return d_x.astype(x.dtype), jnp.sum(gradient * y, others), jnp.sum(gradient, others)

    row_shape = list(shape)
    row_shape[axis] = 1
    rows = (row_shape, _FLOAT32)
    return _lower(call, device, shape, ([shape[axis]], _FLOAT32), rows, rows, shape)


def cross_entropy(device: jax.Device, shape: Sequence[int], vocab: int) -> jax.stages.Lowered:
    """Lower (for compilation) the mean cross-entropy of logits x [tokens, size] @ w [size, vocab].

    The log-sum-exp of each token is a second result.
    """

    def call(x, labels, w):
        logits = x @ w
        one_hot = jax.nn.one_hot(labels, vocab, dtype=x.dtype)
        losses = jnp.sum(-one_hot * jax.nn.log_softmax(logits), axis=-1, dtype=_FLOAT32)
        return jnp.mean(losses), jax.nn.logsumexp(logits.astype(_FLOAT32), axis=-1)

    return _lower(call, device, shape, (shape[:1], _INT32), [shape[1], vocab])


def cross_entropy_gradient(
    device: jax.Device, shape: Sequence[int], vocab: int
) -> jax.stages.Lowered:
    """Lower (for compilation) the gradients of `cross_entropy`.

    The logits are computed again, and the log-sum-exp of each token is an argument.
    """

    def call(x, labels, w, log_sums, gradient):
        one_hot = jax.nn.one_hot(labels, vocab, dtype=x.dtype)
        d_logits = -one_hot + jnp.exp(x @ w - log_sums[:, None])
        scale = gradient / x.shape[0]
        d_x, d_w = (d_logits @ w.T) * scale, (x.T @ d_logits) * scale
        return d_x.astype(x.dtype), d_w.astype(w.dtype)

    log_sums, scalar = (shape[:1], _FLOAT32), ([], _FLOAT32)
    return _lower(call, device, shape, (shape[:1], _INT32), [shape[1], vocab], log_sums, scalar)


def gated_linear_unit(
    device: jax.Device, shape: Sequence[int], size: int, activation: str
) -> jax.stages.Lowered:
    """Lower (for compilation) the gated linear unit `activation(x @ w[:, 0]) * (x @ w[:, 1])`.

    x has the shape `shape`, [..., features], and w the shape [features, 2, size].
    """
    gate = {"sigmoid": jax.nn.sigmoid, "silu": jax.nn.silu}[activation]

    def call(x, w):
        both = jax.lax.collapse(
            jnp.einsum("...k,kjn->...jn", x, w, precision=_PRECISION), x.ndim - 1
        )
        gated, up = jnp.split(both.astype(_FLOAT32), 2, axis=-1)
        return (gate(gated) * up).astype(x.dtype)

    return _lower(call, device, shape, [shape[-1], 2, size])


def causal_attention(device: jax.Device, shape: Sequence[int]) -> jax.stages.Lowered:
    """Lower (for compilation) causal attention that materializes all logits in float32.

    `shape` is [batch, tokens, heads, head size].
    """
    return _lower(_attend, device, shape, shape, shape)


def causal_attention_gradient(device: jax.Device, shape: Sequence[int]) -> jax.stages.Lowered:
    """Lower (for compilation) the gradients of `causal_attention`, preceded by its forward pass."""

    def call(q, k, v, gradient):
        return jax.vjp(_attend, q, k, v)[1](gradient)

    return _lower(call, device, shape, shape, shape, shape)


def _attend(q, k, v):
    logits = jnp.einsum("...qhd,...khd->...hqk", q, k, preferred_element_type=_FLOAT32)
    seen = jnp.tri(q.shape[-3], dtype=bool)
    logits = jnp.where(seen, logits * q.shape[-1] ** -0.5, float(jnp.finfo(_FLOAT32).min))
    weights = jax.nn.softmax(logits)
    out = jnp.einsum("...hqk,...khd->...qhd", weights, v, preferred_element_type=_FLOAT32)
    return out.astype(q.dtype)


def ragged_dot(
    device: jax.Device, shape: Sequence[int], size: int, groups: int
) -> jax.stages.Lowered:
    """Lower (for compilation) XLA's ragged dot of [rows, features] and [groups, features, size]."""
    dot = jax.lax.ragged_dot
    return _lower(dot, device, shape, [groups, shape[1], size], ([groups], _INT32))


def attention_kernel(
    device: jax.Device, shape: Sequence[int], blocks: Mapping[str, int]
) -> jax.stages.Lowered:
    """Lower (for compilation) tokamax's attention kernel without a mask.

    The lowered call includes the transposes of operands and result, as the timed call did.

    Args:
      device: a device of a topology description.
      shape: the shape of queries, keys, values and the result: [batch, tokens, heads, head size].
      blocks: fields of tokamax's config object, such as block sizes.
    """
    from tokamax._src.ops.experimental.tpu.splash_attention import (
        splash_attention_kernel as splash,
    )
    from tokamax._src.ops.experimental.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    layouts = {k: splash.QKVLayout(v) for k, v in blocks.items() if k.endswith("layout")}
    config = dataclasses.replace(splash.SplashConfig.get_default(), **{**blocks, **layouts})
    kernel = splash.make_splash_mha(
        masks.FullMask((shape[1], shape[1])), config=config, q_seq_shards=1,
        downcast_smem_data=False, mask_value=float(jnp.finfo(_FLOAT32).min),
    )  # fmt: skip

    def call(q, k, v):
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q * shape[-1] ** -0.5, k, v))
        return jnp.swapaxes(jax.vmap(kernel)(q, k, v), 1, 2)

    return _lower(call, device, shape, shape, shape)


def _lower(call: Callable[..., Any], device: jax.Device, *arrays: Any) -> jax.stages.Lowered:
    """Lower (for compilation) a call with arrays in JAX's default layouts.

    Each item of `arrays` is the shape of a bfloat16 array, or a pair of a shape and a dtype.
    """
    mesh = Mesh(np.array([device]), ("device",))
    here = NamedSharding(mesh, PartitionSpec())
    operands = []
    for array in arrays:
        shape, dtype = array if isinstance(array, tuple) else (array, _BFLOAT16)
        operands.append(jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=here))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(call).lower(*operands)
