"""Attention within windows, with tokens sharded over devices that send keys to their neighbours.

A device has N consecutive tokens. With windows of W tokens, its queries see its own keys and those
of the `ceil((W - 1) / N)` devices before it. These devices send their keys and values, and receive
the gradients. All devices except the first few have the same work. Unlike in the module `divided`,
the work need not be balanced.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.causal_attention.divided import DeviceOps, merged
from pallas_kernels.causal_attention.interface import (
    AttentionOperands,
    KeysAndValues,
    PartOperands,
    ResultsAndCotangent,
    Window,
)


def forward(
    ops: DeviceOps, axis: str, operands: AttentionOperands, kv_heads: int
) -> tuple[Float[Array, "B N H Dv"], Float[Array, "B N H"]]:
    """Return the output for this device's queries, and each softmax's log-sum-exp over all keys.

    Args:
      ops: the functions of a single device.
      axis: the mesh axis along which tokens are sharded in order.
      operands: qkv of this device's tokens, the segments of all tokens, and the window.
      kv_heads: the number of key heads.
    """
    line = _Line(axis, operands, kv_heads)
    out, sums = ops.whole_forward(line.own)
    state = out.astype(sums.dtype), sums
    for hops in line.hops:
        out, sums = ops.part_forward(line.part(hops))
        # The first devices received zeros in place of keys, which must get a weight of 0.
        sums = jnp.where(line.me >= hops, sums, jnp.finfo(sums.dtype).min)
        state = merged(state, (out, sums))
    return state[0].astype(operands.qkv.dtype), state[1]


def backward(
    ops: DeviceOps,
    axis: str,
    operands: AttentionOperands,
    results: ResultsAndCotangent,
    kv_heads: int,
) -> tuple[Float[Array, "B N P D"], KeysAndValues | None]:
    """Return the cotangents of qkv and kv, which are summed in float32 or wider."""
    line, dtype = _Line(axis, operands, kv_heads), results.log_sums.dtype
    d_qkv, d_kv = ops.whole_backward(line.own, results)
    if operands.kv is None:
        d_q, d_kv = d_qkv[..., : line.heads, :], d_qkv[..., line.heads :, :]
    else:
        d_q = d_qkv
    d_q, d_kv = jax.tree.map(lambda x: x.astype(dtype), (d_q, d_kv))
    for hops in line.hops:
        found = ops.part_backward(line.part(hops), results)
        # The first devices attended to zeros in place of keys, so their gradients may be inf or
        # NaN.
        found = jax.tree.map(lambda x, hops=hops: jnp.where(line.me >= hops, x, 0), found)
        d_q = d_q + found[0]
        d_kv = jax.tree.map(jnp.add, d_kv, line.sent_back(found[1], hops))
    d_q, d_kv = jax.tree.map(lambda x: x.astype(operands.qkv.dtype), (d_q, d_kv))
    if operands.kv is not None:
        return d_q, d_kv
    return jnp.concatenate([d_q, d_kv], axis=2), None


class _Line:
    """The devices along a mesh axis, in the order of their tokens, as one of them sees them.

    Attributes:
      me: this device's index along the axis.
      heads: the number of query heads.
      own: the operands of attention to this device's own keys.
    """

    def __init__(self, axis: str, operands: AttentionOperands, kv_heads: int):
        self._axis, self._operands = axis, operands
        self._count, self.me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
        self._length = operands.qkv.shape[1]
        joined = operands.kv is None
        self.heads = operands.qkv.shape[2] - 2 * kv_heads * joined
        self._q = operands.qkv[..., : self.heads, :]
        self._kv = operands.qkv[..., self.heads :, :] if joined else operands.kv
        ids = None if operands.segment_ids is None else self._ids(self.me)
        window = operands.window if operands.window < self._length else None
        self.own = operands._replace(segment_ids=ids, window=window)

    @property
    def hops(self) -> range:
        """The distances to the earlier devices that have keys within this device's windows."""
        most = -(-(self._operands.window - 1) // self._length)
        return range(1, min(most, self._count - 1) + 1)

    def part(self, hops: int) -> PartOperands:
        """Return the operands of attention to the keys of the device `hops` before this one."""
        pairs = [(device, device + hops) for device in range(self._count - hops)]
        kv = jax.tree.map(lambda x: jax.lax.ppermute(x, self._axis, pairs), self._kv)
        operands, segments = self._operands, None
        if operands.segment_ids is not None:
            segments = self._ids(self.me), self._ids(jnp.maximum(self.me - hops, 0))
        distance = hops * self._length
        window = Window(operands.window - distance)
        shift = jnp.int32(distance)
        of_logits = operands.scale, shift, operands.slopes
        return PartOperands(self._q, kv, *of_logits, segments, window, operands.cap)

    def sent_back(self, tree: Any, hops: int) -> Any:
        """Send arrays to the device `hops` before this one; return the arrays sent to this one."""
        pairs = [(device + hops, device) for device in range(self._count - hops)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self._axis, pairs), tree)

    def _ids(self, device):
        ids = self._operands.segment_ids
        return jax.lax.dynamic_slice_in_dim(ids, device * self._length, self._length, 1)
