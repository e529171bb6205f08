"""Causal attention with tokens divided over devices; keys and values are passed around a ring.

The sequence is divided into two parts per device. To attend, device i holds part i and the i-th
part counted from the end. In sum, as many keys lie before these two as before the two parts of any
other device, and every step of the ring is the same work for each device. Parts that lie otherwise
are exchanged before and after, which costs as much as one step.

Liu, Zaharia and Abbeel 2023, Ring Attention with Blockwise Transformers; parts as in Dubey et al.
2024, The Llama 3 Herd of Models, section 3.3.2.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.causal_attention.interface import Apart, Attended, Attention, Part


class Ops(NamedTuple):
    """The functions that one device computes: see `interface`."""

    whole_forward: Callable[..., Any]
    whole_backward: Callable[..., Any]
    part_forward: Callable[..., Any]
    part_backward: Callable[..., Any]


def forward(
    ops: Ops, axis: str, given: Attention, kv_heads: int
) -> tuple[Float[Array, "B N H Dv"], Float[Array, "B N H"]]:
    """Return the output of the device's own queries, and each softmax's log sum over all keys.

    Args:
      ops: the functions of one device.
      axis: the mesh axis over which tokens are divided in order.
      given: qkv of the device's own tokens, and the segments of all tokens.
      kv_heads: the number of heads of keys.
    """
    ring = _Ring(axis, given)
    parts = jax.tree.map(ring.balanced, (given.qkv, given.kv))
    q, kv = _queries_and_others(*parts, kv_heads)
    arriving = ring.passed_on(kv)  # The transfer overlaps with the work on the keys held now.
    out, sums = ring.apart(ops.whole_forward(ring.own(*parts)))
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
    ops: Ops, axis: str, given: Attention, attended: Attended, kv_heads: int
) -> tuple[Float[Array, "B N P D"], Apart | None]:
    """Return the cotangents of qkv and kv; d_kv is passed around with kv, in float32."""
    ring = _Ring(axis, given)
    parts = jax.tree.map(ring.balanced, (given.qkv, given.kv))
    of_queries = [ring.balanced(x) for x in attended]
    q, kv = _queries_and_others(*parts, kv_heads)
    arriving = ring.passed_on(kv)
    of_own = Attended(*map(ring.together, of_queries))
    d_parts = ring.apart(ops.whole_backward(ring.own(*parts), of_own))
    d_parts = jax.tree.map(lambda x: x.astype(attended.log_sums.dtype), d_parts)
    d_q, d_kv = _queries_and_others(*d_parts, kv_heads)

    def add(d_q, d_kv, kv, query, key, parts):
        own = Attended(*(x[query] for x in of_queries))
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
    d_kv = ring.passed_on(d_kv)  # Each device gets the gradients of its own keys and values.
    if given.kv is None:
        d_q, d_kv = jnp.concatenate([d_q, d_kv], axis=3), None
    return jax.tree.map(lambda x: ring.natural(x.astype(q.dtype)), (d_q, d_kv))


def _queries_and_others(qkv, kv, kv_heads: int):
    """Return queries, and keys and values: as rows of one array, or as a pair."""
    if kv is not None:
        return qkv, kv
    heads = qkv.shape[3] - 2 * kv_heads
    return qkv[..., :heads, :], qkv[..., heads:, :]


def _at(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda x: x[index], tree)


class _Pair(NamedTuple):
    """One product of a ring step.

    Attributes:
      query: the index of the device's own queries: 0 for its low part, 1 for its high part.
      key: the index of the keys that the device holds in this step.
      parts: the parts of the sequence of these queries and keys.
    """

    query: Any
    key: Any
    parts: tuple[Any, Any]


class _Ring:
    """A sequence in two parts per device: device i of `count` has i and 2 count - 1 - i."""

    def __init__(self, axis: str, given: Attention):
        self.axis, self.count = axis, jax.lax.axis_size(axis)
        self.me = jax.lax.axis_index(axis)
        self.low, self.high = self._parts_of(self.me)
        self.length, self._given = given.qkv.shape[1] // 2, given

    def _parts_of(self, device):
        return device, 2 * self.count - 1 - device

    def balanced(self, x: Float[Array, "B N *rest"]) -> Float[Array, "2 B half_N *rest"]:
        """Exchange two neighbouring parts for the device's low and high part."""
        halves = jnp.split(x, 2, axis=1)
        even, odd = (self._move(x, self._homes(n)) for n, x in enumerate(halves))
        swapped = self.me % 2 == 1
        return jnp.stack([jnp.where(swapped, odd, even), jnp.where(swapped, even, odd)])

    def natural(self, x: Float[Array, "2 B half_N *rest"]) -> Float[Array, "B N *rest"]:
        """Undo `balanced`."""
        swapped = self.me % 2 == 1
        halves = jnp.where(swapped, x[1], x[0]), jnp.where(swapped, x[0], x[1])
        back = ([(home, own) for own, home in self._homes(n)] for n in range(2))
        return jnp.concatenate([self._move(*pair) for pair in zip(halves, back, strict=True)], 1)

    def _homes(self, half: int) -> list[tuple[int, int]]:
        """Return (device, home) of each part `2 device + half`; the home is for attending."""
        parts = (2 * device + half for device in range(self.count))
        return [(part // 2, min(part, 2 * self.count - 1 - part)) for part in parts]

    def together(self, x: Float[Array, "2 B half_N *rest"]) -> Float[Array, "twice_B half_N *rest"]:
        """Return both parts as rows of one batch."""
        return x.reshape(-1, *x.shape[2:])

    def apart(self, tree: Any) -> Any:
        """Undo `together`."""
        return jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), tree)

    def own(self, qkv: Float[Array, "2 B half_N P D"], kv: Any) -> Attention:
        """Return the operands of attention within each of the two own parts."""
        ids = None
        if self._given.segment_ids is not None:
            ids = jnp.concatenate([self._ids(part) for part in (self.low, self.high)])
        qkv, kv = jax.tree.map(self.together, (qkv, kv))
        return self._given._replace(qkv=qkv, kv=kv, segment_ids=ids)

    def part(self, q: Array, kv: Array | Apart, queries: Any, keys: Any) -> Part:
        """Return the operands of attention of one part's queries to another part's keys."""
        given, segments = self._given, None
        if given.segment_ids is not None:
            segments = self._ids(queries), self._ids(keys)
        shift = (queries - keys) * self.length
        return Part(q, kv, given.scale, shift, given.slopes, segments)

    def pairs(self, step: Int[Array, ""]) -> list[_Pair]:
        """Return the pairs of own queries and keys held after `step` steps that see each other.

        If the keys come from an earlier device, both own parts see its low part. If they come from
        a later device, the own high part sees both of its parts.
        """
        other = (self.me - step) % self.count
        low, high = self._parts_of(other)
        before = other < self.me
        which = jnp.where(before, 0, 1)
        queries, keys = jnp.where(before, self.low, self.high), jnp.where(before, low, high)
        return [_Pair(which, 0, (queries, low)), _Pair(1, which, (self.high, keys))]

    def passed_on(self, tree: Any) -> Any:
        """Return what the previous device in the ring had."""
        around = [(device, (device + 1) % self.count) for device in range(self.count)]
        return jax.tree.map(lambda x: self._move(x, around), tree)

    def _move(self, x, pairs):
        return jax.lax.ppermute(x, self.axis, pairs)

    def _ids(self, part):
        return jax.lax.dynamic_slice_in_dim(
            self._given.segment_ids, part * self.length, self.length, 1
        )


def merged(
    one: tuple[Float[Array, "*rows D"], Float[Array, "*rows"]],
    other: tuple[Float[Array, "*rows D"], Float[Array, "*rows"]],
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows"]]:
    """Return the output and log sums over the keys of both, in the log sums' dtype."""
    sums = jnp.logaddexp(one[1], other[1])
    weigh = lambda x, of: x.astype(sums.dtype) * jnp.exp(of - sums)[..., None]
    return weigh(*one) + weigh(*other), sums


def _add(state, query, found):
    """Merge new outputs and log sums into the own ones at `query`."""
    after = merged(tuple(x[query] for x in state), found)
    return tuple(x.at[query].set(new) for x, new in zip(state, after, strict=True))
