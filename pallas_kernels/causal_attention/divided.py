"""Ring attention: causal attention with tokens sharded over devices.

Keys and values are passed around a ring of devices. The sequence is cut into two parts per device.
Device i processes part i and the i-th part from the end. Every device then has the same work in
each ring step. Before the first ring step, devices exchange parts to get this assignment. After the
last ring step, they exchange them back. This costs as much communication as one ring step.

Attention within a window needs no ring: see `neighbours`.

Liu, Zaharia and Abbeel 2023, Ring Attention with Blockwise Transformers. The assignment of parts
follows Dubey et al. 2024, The Llama 3 Herd of Models, section 3.3.2.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments import check_shapes
from pallas_kernels.causal_attention.interface import (
    AttentionOperands,
    KeysAndValues,
    PartOperands,
    ResultsAndCotangent,
)


class DeviceOps(NamedTuple):
    """The attention functions that run on a single device: see `interface.py`."""

    whole_forward: Callable[..., Any]
    whole_backward: Callable[..., Any]
    part_forward: Callable[..., Any]
    part_backward: Callable[..., Any]


def forward(
    ops: DeviceOps, axis: str, operands: AttentionOperands, kv_heads: int
) -> tuple[Float[Array, "B N H Dv"], Float[Array, "B N H"]]:
    """Return the output for this device's queries, and each softmax's log-sum-exp over all keys.

    Args:
      ops: the functions of a single device.
      axis: the mesh axis along which tokens are sharded in order.
      operands: qkv of this device's tokens, and the segments of all tokens.
      kv_heads: the number of key heads.
    """
    ring = _Ring(axis, operands)
    parts = jax.tree.map(ring.balanced, (operands.qkv, operands.kv))
    q, kv = _queries_and_others(*parts, kv_heads)
    # The transfer of the next keys overlaps with the work on the current keys.
    arriving = ring.passed_on(kv)
    out, sums = ring.split_parts(ops.whole_forward(ring.own(*parts)))
    state = out.astype(sums.dtype), sums
    state = _add(state, 1, ops.part_forward(ring.part(q[1], _at(kv, 0), ring.high, ring.low)))

    def hop(carry, step):
        kv, state = carry
        arriving = ring.passed_on(kv)
        for pair in ring.pairs(step):
            found = ops.part_forward(ring.part(q[pair.query], _at(kv, pair.key), *pair.parts))
            state = _add(state, pair.query, found)
        return (arriving, state), None

    (_, (out, sums)), _ = jax.lax.scan(hop, (arriving, state), jnp.arange(1, ring.count))
    return ring.natural(out.astype(q.dtype)), ring.natural(sums)


def backward(
    ops: DeviceOps,
    axis: str,
    operands: AttentionOperands,
    results: ResultsAndCotangent,
    kv_heads: int,
) -> tuple[Float[Array, "B N P D"], KeysAndValues | None]:
    """Return the cotangents of qkv and kv.

    The ring passes the gradients of kv along with kv, in float32.
    """
    ring = _Ring(axis, operands)
    parts = jax.tree.map(ring.balanced, (operands.qkv, operands.kv))
    of_queries = [ring.balanced(x) for x in results]
    q, kv = _queries_and_others(*parts, kv_heads)
    arriving = ring.passed_on(kv)
    of_own = ResultsAndCotangent(*map(ring.batch_parts, of_queries))
    d_parts = ring.split_parts(ops.whole_backward(ring.own(*parts), of_own))
    d_parts = jax.tree.map(lambda x: x.astype(results.log_sums.dtype), d_parts)
    d_q, d_kv = _queries_and_others(*d_parts, kv_heads)

    def add(d_q, d_kv, kv, query, key, parts):
        own = ResultsAndCotangent(*(x[query] for x in of_queries))
        of_q, of_kv = ops.part_backward(ring.part(q[query], _at(kv, key), *parts), own)
        return d_q.at[query].add(of_q), jax.tree.map(lambda x, y: x.at[key].add(y), d_kv, of_kv)

    d_q, d_kv = add(d_q, d_kv, kv, 1, 0, (ring.high, ring.low))

    def hop(carry, step):
        kv, d_q, d_kv = carry
        arriving, d_kv = ring.passed_on((kv, d_kv))
        for pair in ring.pairs(step):
            d_q, d_kv = add(d_q, d_kv, kv, *pair)
        return (arriving, d_q, d_kv), None

    (_, d_q, d_kv), _ = jax.lax.scan(hop, (arriving, d_q, d_kv), jnp.arange(1, ring.count))
    # This last transfer brings each device the gradients of its own keys and values.
    d_kv = ring.passed_on(d_kv)
    if operands.kv is None:
        d_q, d_kv = jnp.concatenate([d_q, d_kv], axis=3), None
    return jax.tree.map(lambda x: ring.natural(x.astype(q.dtype)), (d_q, d_kv))


def _queries_and_others(qkv, kv, kv_heads: int):
    """Return the queries, and the keys and values (`kv`, or else the rest of `qkv`)."""
    if kv is not None:
        return qkv, kv
    heads = qkv.shape[3] - 2 * kv_heads
    return qkv[..., :heads, :], qkv[..., heads:, :]


def _at(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda x: x[index], tree)


class _RingPair(NamedTuple):
    """A part of the sequence with queries, and a part with keys, that one ring step combines.

    Attributes:
      query: which of this device's parts has the queries: 0 for the low part, 1 for the high part.
      key: which of the two parts whose keys the device currently has is used: 0 or 1.
      parts: the indices of the two parts within the sequence: first the queries', then the keys'.
    """

    query: Any
    key: Any
    parts: tuple[Any, Any]


class _Ring:
    """A sequence that is cut into two parts per device, and the ring that passes keys around.

    There are `count` devices and `2 count` parts. Device i processes part i (its low part) and part
    `2 count - 1 - i` (its high part).
    """

    def __init__(self, axis: str, operands: AttentionOperands):
        self.axis, self.count = axis, jax.lax.axis_size(axis)
        self.me = jax.lax.axis_index(axis)
        self.low, self.high = self._parts_of(self.me)
        self.length, self._operands = operands.qkv.shape[1] // 2, operands

    def _parts_of(self, device):
        return device, 2 * self.count - 1 - device

    def balanced(self, x: Float[Array, "B N *rest"]) -> Float[Array, "2 B half_N *rest"]:
        """Exchange parts between devices: return this device's low and high part.

        x contains two consecutive parts of the sequence.
        """
        halves = jnp.split(x, 2, axis=1)
        even, odd = (self._move(x, self._homes(n)) for n, x in enumerate(halves))
        swapped = self.me % 2 == 1
        return jnp.stack([jnp.where(swapped, odd, even), jnp.where(swapped, even, odd)])

    def natural(self, x: Float[Array, "2 B half_N *rest"]) -> Float[Array, "B N *rest"]:
        """Undo the exchange of `balanced`: return two consecutive parts."""
        swapped = self.me % 2 == 1
        halves = jnp.where(swapped, x[1], x[0]), jnp.where(swapped, x[0], x[1])
        back = ([(home, own) for own, home in self._homes(n)] for n in range(2))
        return jnp.concatenate([self._move(*pair) for pair in zip(halves, back, strict=True)], 1)

    def _homes(self, half: int) -> list[tuple[int, int]]:
        """Return, for each part `2 device + half`, the pair (device, home).

        `device` has the part if parts are in token order. `home` is the device that processes it.
        """
        parts = (2 * device + half for device in range(self.count))
        return [(part // 2, min(part, 2 * self.count - 1 - part)) for part in parts]

    def batch_parts(
        self, x: Float[Array, "2 B half_N *rest"]
    ) -> Float[Array, "twice_B half_N *rest"]:
        """Join this device's two parts along the batch axis."""
        return x.reshape(-1, *x.shape[2:])

    def split_parts(self, tree: Any) -> Any:
        """Split the batch axis into this device's two parts, the inverse of `batch_parts`."""
        return jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), tree)

    def own(self, qkv: Float[Array, "2 B half_N P D"], kv: Any) -> AttentionOperands:
        """Return the operands of causal attention within each of the two parts, as batch rows."""
        ids = None
        if self._operands.segment_ids is not None:
            ids = jnp.concatenate([self._ids(part) for part in (self.low, self.high)])
        qkv, kv = jax.tree.map(self.batch_parts, (qkv, kv))
        return self._operands._replace(qkv=qkv, kv=kv, segment_ids=ids)

    def part(self, q: Array, kv: Array | KeysAndValues, queries: Any, keys: Any) -> PartOperands:
        """Return the operands of attention from the queries of one part to the keys of another."""
        operands, segments = self._operands, None
        if operands.segment_ids is not None:
            segments = self._ids(queries), self._ids(keys)
        shift = (queries - keys) * self.length
        return PartOperands(
            q, kv, operands.scale, shift, operands.slopes, segments, cap=operands.cap
        )

    def pairs(self, step: Int[Array, ""]) -> list[_RingPair]:
        """Return the two (query part, key part) pairs to process after `step` ring steps.

        If the current keys come from an earlier device, both parts of this device see only the low
        part of the keys. If they come from a later device, only this device's high part sees them,
        and it sees both parts.
        """
        other = (self.me - step) % self.count
        low, high = self._parts_of(other)
        is_earlier = other < self.me
        which = jnp.where(is_earlier, 0, 1)
        queries, keys = jnp.where(is_earlier, self.low, self.high), jnp.where(is_earlier, low, high)
        return [_RingPair(which, 0, (queries, low)), _RingPair(1, which, (self.high, keys))]

    def passed_on(self, tree: Any) -> Any:
        """Send arrays to the next device in the ring, and return those from the previous device."""
        around = [(device, (device + 1) % self.count) for device in range(self.count)]
        return jax.tree.map(lambda x: self._move(x, around), tree)

    def _move(self, x, pairs):
        return jax.lax.ppermute(x, self.axis, pairs)

    def _ids(self, part):
        return jax.lax.dynamic_slice_in_dim(
            self._operands.segment_ids, part * self.length, self.length, 1
        )


def merged(
    one: tuple[Float[Array, "*rows D"], Float[Array, "*rows"]],
    other: tuple[Float[Array, "*rows D"], Float[Array, "*rows"]],
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows"]]:
    """Combine the outputs and log-sum-exps of attention to two disjoint sets of keys.

    The result is as if each query had attended to both sets. It has the dtype of the log-sum-exps.

    Raises:
      ValueError: shapes do not fit, or an array is not one of floats.
    """
    out, _ = one
    wanted = {"one[0]": (out, out.shape), "other[0]": (other[0], out.shape)}
    wanted |= {
        f"{name}[1]": (x[1], out.shape[:-1]) for name, x in {"one": one, "other": other}.items()
    }
    check_shapes(f"one[0] {list(out.shape)}", **wanted)
    sums = jnp.logaddexp(one[1], other[1])
    weigh = lambda x, of: x.astype(sums.dtype) * jnp.exp(of - sums)[..., None]
    return weigh(*one) + weigh(*other), sums


def _add(state, query, found):
    """Merge new outputs and log-sum-exps into those of this device's part `query` (0 or 1)."""
    after = merged(tuple(x[query] for x in state), found)
    return tuple(x.at[query].set(new) for x, new in zip(state, after, strict=True))
