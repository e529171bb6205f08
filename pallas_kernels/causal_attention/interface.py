"""The functions and operands of every implementation of causal attention.

An implementation is a module with the functions below. `kv_heads` is the number of key heads and of
value heads. `rows` is the preferred memory order, for implementations with kernels for both orders.

    attention_forward(AttentionOperands, *, kv_heads, rows)
        -> (out [B, N, H, Dv], log_sums [B, N, H])
    attention_backward(AttentionOperands, ResultsAndCotangent, *, kv_heads, rows)
        -> cotangents of qkv and kv
    part_forward(PartOperands) -> (out [B, Q, H, Dv], log_sums [B, Q, H])
    part_backward(PartOperands, ResultsAndCotangent) -> cotangents of q and kv, at least float32
    unsupported(op, *operands, kv_heads=None) -> a one-line reason if they are not supported, or
        None; part_forward and part_backward have no `kv_heads`

Outputs are in the dtype of the queries. `log_sums` contains each softmax's log-sum-exp, at least
float32. If `to` is not None, the output is written into that slice of a stack, and the stack is
returned in place of the output. With logits s and weights p, the backward pass computes
`ds = p (d_out v - sum(out d_out))`, where the sum runs over an output vector's entries.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments import StackSlice
from pallas_kernels.products import LOG2_E

Rows = Literal["size_major", "head_major"]
Scale = Float[Array, ""] | int | float
Segments = tuple[Int[Array, "B Q"], Int[Array, "B K"]]
# Keys and values as separate arrays; their vector sizes may differ.
KeysAndValues = tuple[Float[Array, "B K G D"], Float[Array, "B K G Dv"]]


@jax.tree_util.register_static
class Window(int):
    """The size of a sliding window: query i sees key j only if `i - j < size`.

    A `Window` is part of a pytree's structure, not a leaf, because kernels are compiled for one
    size.
    """


@jax.tree_util.register_static
class Cap(float):
    """The soft cap c on logits: `c tanh(x / c)` in place of `x = scale q_i . k_j`.

    A `Cap` is part of a pytree's structure, not a leaf, because kernels are compiled for one cap.
    """


def capped(
    x: Float[Array, "*shape"], cap: Cap | None
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"] | float]:
    """Return the logits with the soft cap applied, and their derivative with respect to x."""
    if cap is None:
        return x, 1.0
    tanh = jnp.tanh(x / float(cap))
    return float(cap) * tanh, 1 - jnp.square(tanh)


def kernel_logits(
    products: Float[Array, "*shape"], scale: Float[Array, ""], cap: Cap | None
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"] | None]:
    """Return the logits times log2(e), given the products of queries and keys.

    Returns:
      Two results. The first is log2(e) times the logits, which are `scale * products`, or
      `c tanh(scale * products / c)` with a soft cap c. The second is that tanh, which `through_cap`
      needs, or None without a cap.
    """
    if cap is None:
        return products * (scale * LOG2_E), None
    # Constant factors are multiplied in advance. A cap then costs one product and a tanh per logit.
    tanh = jnp.tanh(products * (scale * (1 / float(cap))))
    return tanh * (float(cap) * LOG2_E), tanh


def through_cap(
    d_logits: Float[Array, "*shape"], tanh: Float[Array, "*shape"] | None
) -> Float[Array, "*shape"]:
    """Return the cotangent of `scale * products` from the cotangent of the logits.

    `tanh` is the second result of `kernel_logits`. The derivative of `c tanh(x / c)` with respect
    to x is `1 - tanh(x / c)^2`.
    """
    return d_logits if tanh is None else d_logits * (1 - jnp.square(tanh))


class AttentionOperands(NamedTuple):
    """The operands of causal attention: `softmax_j(scale q_i . k_j - slope (i - j)) v_j`.

    Query i sees key j if `j <= i`, both are in the same segment, and j is within the window.

    Attributes:
      qkv: the queries of all heads, then keys, then values; or only the queries.
      scale: the factor by which `q_i . k_j` is multiplied.
      slopes: the slopes of ALiBi, or None.
      segment_ids: the segment of each token, or None if each batch row is one segment.
      kv: keys and values, if they are separate arrays.
      to: the slice of a stacked array that the output is written into, or None.
      window: the number of tokens that a query sees, itself included; None means all earlier ones.
      cap: the soft cap on `scale q_i . k_j`, or None.
    """

    qkv: Float[Array, "B N P D"]
    scale: Scale
    slopes: Float[Array, " H"] | None = None
    segment_ids: Int[Array, "B N"] | None = None
    kv: KeysAndValues | None = None
    to: StackSlice | None = None
    window: Window | None = None
    cap: Cap | None = None

    @property
    def segments(self) -> Segments | None:
        """The segments of the queries and of the keys; None if each batch row is one segment."""
        return None if self.segment_ids is None else (self.segment_ids, self.segment_ids)


class PartOperands(NamedTuple):
    """The operands of attention from one part of a sequence to another, without a causal mask.

    A query sees all keys of its segment, or only those within a window.

    Attributes:
      q: the queries.
      kv: the keys of all heads, then the values, in one array; or a pair (keys, values).
      scale: the factor by which `q_i . k_j` is multiplied.
      shift: the first query's position minus the first key's position.
      slopes: the slopes of ALiBi, or None.
      segments: the segments of the queries and of the keys; None if they are all one segment.
      window: None, or the limit of `i - j`, where i counts from the first query and j from the
        first key. The limit may be 0 or negative, because the distance between the two parts has
        been subtracted.
      cap: the soft cap on `scale q_i . k_j`, or None.
    """

    q: Float[Array, "B Q H D"]
    kv: Float[Array, "B K P D"] | KeysAndValues
    scale: Scale
    shift: Int[Array, ""] | int
    slopes: Float[Array, " H"] | None
    segments: Segments | None
    window: Window | None = None
    cap: Cap | None = None

    @property
    def keys_and_values(self) -> KeysAndValues:
        """The keys and values as separate arrays."""
        return self.kv if isinstance(self.kv, tuple) else tuple(jnp.split(self.kv, 2, axis=2))

    def like_kv(self, k: Array, v: Array) -> Array | KeysAndValues:
        """Return keys and values in the same form as `kv`: one array or a pair."""
        return (k, v) if isinstance(self.kv, tuple) else jnp.concatenate([k, v], axis=2)


class ResultsAndCotangent(NamedTuple):
    """The results of attention's forward pass and the cotangent of its output.

    The backward pass needs them in addition to the operands.

    Attributes:
      out: the output of attention to all keys, including the keys of other parts.
      log_sums: each softmax's log-sum-exp over all keys.
      d_out: the cotangent of the output.
    """

    out: Float[Array, "B Q H Dv"] | StackSlice
    log_sums: Float[Array, "B Q H"]
    d_out: Float[Array, "B Q H Dv"]
