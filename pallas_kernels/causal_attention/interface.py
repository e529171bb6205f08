"""The functions and operands of every implementation of causal attention.

An implementation is a module with these functions. `kv_heads` is the number of heads of keys and of
values, and `rows` the preferred order if the implementation has kernels for both orders:

    attention_forward(Attention, *, kv_heads, rows) -> (out [B, N, H, Dv], log_sums [B, N, H])
    attention_backward(Attention, Attended, *, kv_heads, rows) -> cotangents of qkv and kv
    part_forward(Part) -> (out [B, Q, H, Dv], log_sums [B, Q, H])
    part_backward(Part, Attended) -> cotangents of q and kv, at least float32
    unsupported(op, *operands) -> why it cannot serve these, in a line, or None

Outputs are in the dtype of queries, log sums are at least float32. If `to` is a slot, the output is
written into the slot and the stack is returned instead. With weights p:
`ds = p (d_out v - sum(out d_out))`.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments import Slot

Rows = Literal["size_major", "head_major"]
Scale = Float[Array, ""] | int | float
Segments = tuple[Int[Array, "B Q"], Int[Array, "B K"]]
# Keys and values as separate arrays, whose sizes may differ.
Apart = tuple[Float[Array, "B K G D"], Float[Array, "B K G Dv"]]


class Attention(NamedTuple):
    """`softmax_j(scale q_i . k_j - slope (i - j)) v_j` over `j <= i` in i's segment.

    Attributes:
      qkv: queries of all heads, then keys, then values; or queries alone.
      scale: the factor of the logits.
      slopes: the slopes of ALiBi.
      segment_ids: the segment of each token.
      kv: keys and values, if they are separate arrays.
      to: the slot that the output is written into, or None.
    """

    qkv: Float[Array, "B N P D"]
    scale: Scale
    slopes: Float[Array, " H"] | None = None
    segment_ids: Int[Array, "B N"] | None = None
    kv: Apart | None = None
    to: Slot | None = None

    @property
    def segments(self) -> Segments | None:
        """The segments of queries and of keys."""
        return None if self.segment_ids is None else (self.segment_ids, self.segment_ids)


class Part(NamedTuple):
    """Attention to an earlier part of the sequence: a query sees all keys of its segment.

    Attributes:
      q: queries.
      kv: keys of all heads, then values; or a pair of both.
      scale: the factor of the logits.
      shift: the first query's position minus the first key's.
      slopes: the slopes of ALiBi.
      segments: the segments of queries and of keys.
    """

    q: Float[Array, "B Q H D"]
    kv: Float[Array, "B K P D"] | Apart
    scale: Scale
    shift: Int[Array, ""] | int
    slopes: Float[Array, " H"] | None
    segments: Segments | None

    @property
    def apart(self) -> Apart:
        """Keys and values as separate arrays."""
        return self.kv if isinstance(self.kv, tuple) else tuple(jnp.split(self.kv, 2, axis=2))

    def like_kv(self, k: Array, v: Array) -> Array | Apart:
        """Return arrays of keys and of values in the form of `kv`."""
        return (k, v) if isinstance(self.kv, tuple) else jnp.concatenate([k, v], axis=2)


class Attended(NamedTuple):
    """Output and log sums of attention over all parts of the keys, and the output's cotangent."""

    out: Float[Array, "B Q H Dv"] | Slot
    log_sums: Float[Array, "B Q H"]
    d_out: Float[Array, "B Q H Dv"]
