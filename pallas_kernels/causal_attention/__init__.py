"""Causal attention within segments and windows, with ALiBi, soft caps and grouped queries.

A segment is a run of tokens, such as a document, that attends only to itself. With a window, a
token attends only to itself and to the `window - 1` tokens before it. Implementations:

- "xla": plain JAX, on any platform. It uses an online softmax if the logits would take too much
  memory: see `plain`.
- "mosaic_tpu": TPU kernels for any length. ALiBi needs no bias array in memory.
- "cudnn": cuDNN's fused kernels, on GPUs, in bfloat16 or float16. ALiBi and segments are expressed
  as extra entries in queries and keys. Soft caps on logits are not supported.
- "pallas" (the default, None): the TPU kernels on TPUs, cuDNN's kernels on GPUs, and plain JAX on
  other platforms.

`causal_attention` supports reverse-mode differentiation with respect to qkv and kv. Only "xla"
supports second derivatives. Forward mode is not supported. Unsupported derivatives raise a
TypeError.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.arguments import StackSlice, check_shapes, read_slices, write_slice
from pallas_kernels.call import LANES, round_up
from pallas_kernels.causal_attention import cudnn, divided, mosaic_tpu, neighbours, plain
from pallas_kernels.causal_attention.checks import (
    check_cache,
    check_cap,
    check_operands,
    check_part,
    check_window,
)
from pallas_kernels.causal_attention.divided import merged
from pallas_kernels.causal_attention.interface import (
    AttentionOperands,
    Cap,
    KeysAndValues,
    PartOperands,
    ResultsAndCotangent,
    Rows,
    Scale,
    Window,
)
from pallas_kernels.platform import Implementations, reverse_mode

__all__ = [
    "attention_after",
    "attention_backward",
    "attention_forward",
    "attention_to",
    "causal_attention",
    "merged",
]

Implementation = Literal["xla", "mosaic_tpu", "pallas", "cudnn"]


@reverse_mode
def causal_attention(
    qkv: Float[Array, "B N P D"],
    *,
    scale: Scale,
    slopes: Float[Array, " H"] | None = None,
    segment_ids: Int[Array, "B all_N"] | None = None,
    kv_heads: int | None = None,
    kv: KeysAndValues | None = None,
    rows: Rows = "size_major",
    over: str | None = None,
    window: int | None = None,
    cap: float | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B N H Dv"]:
    """Compute `sum_j softmax_j(scale q_i . k_j - slope (i - j)) v_j` for each query i.

    The sum runs over the keys j <= i in the segment of query i. With a window, it runs only over
    keys with `i - j < window`. With a soft cap c, `c tanh(x / c)` replaces `x = scale q_i . k_j`.

    Args:
      qkv: P = H + 2 G data vectors per token, for H query heads and G key heads: the queries of
        all heads, then the keys, then the values.
      scale: the factor by which `q_i . k_j` is multiplied; it gets no gradient.
      slopes: the slopes of ALiBi, one per head; they get no gradient.
      segment_ids: the segment of each token, in any integer dtype; converted to int32. None
        means that each batch row is one segment.
      kv_heads: G, the number of key heads and of value heads. Each of them is shared by H / G
        consecutive query heads. None means G = H.
      kv: keys [B, N, G, D] and values [B, N, G, Dv] in qkv's dtype, if they are separate arrays.
        Then qkv contains only the queries, and kv_heads is not needed.
      rows: the preferred memory order for the kernels. "size_major" is [B, D, P, N], the order in
        which the key-vector kernels write. "head_major" is [B, P, D, N], the order in which a
        projection writes.
      over: the mesh axis along which tokens are sharded, within `jax.shard_map`; or None. Then qkv
        contains this device's tokens, and segment_ids contain those of all tokens.
      window: the number of tokens that each token sees, itself included; None means all earlier
        ones.
      cap: the soft cap; None means no cap. "cudnn" does not support it.
      implementation: None chooses the best one for the platform that the program is lowered for.

    Returns:
      One data vector per token and head, in qkv's dtype. Logits and softmax are at least float32.

    Raises:
      UnsupportedImplementation: a named implementation does not support this call.
      ValueError: qkv does not have `H + 2 G` floating-point vectors per token; kv has a different
        number of tokens, another dtype, or a number of heads that does not divide H; slopes do not
        have shape [H]; segment_ids are not integers, or do not cover all tokens; the window is not
        an integer of at least 1; the cap is not above 0; or a device has an odd number of tokens of
        a sharded sequence.
      TypeError: the op is differentiated in forward mode, or differentiated twice when a kernel may
        compute it.
    """
    call = _AttentionCall(rows, implementation, kv_heads, over)
    arrays = qkv, scale, slopes, segment_ids, kv
    return _attention(*_checked(call, AttentionOperands(*arrays, window=window, cap=cap)))


def attention_forward(
    qkv: Float[Array, "B N P D"],
    *,
    scale: Scale,
    slopes: Float[Array, " H"] | None = None,
    segment_ids: Int[Array, "B all_N"] | None = None,
    kv_heads: int | None = None,
    kv: KeysAndValues | None = None,
    rows: Rows = "size_major",
    over: str | None = None,
    to: StackSlice | None = None,
    window: int | None = None,
    cap: float | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "*count B N H Dv"], Float[Array, "B N H"]]:
    """Compute `causal_attention` and each softmax's log-sum-exp, without a gradient.

    If `to` is not None, the output is written into that slice of a stacked array, and the stack is
    returned in place of the output.
    """
    call = _AttentionCall(rows, implementation, kv_heads, over)
    arrays = qkv, scale, slopes, segment_ids, kv, to
    return _forward(*_checked(call, AttentionOperands(*arrays, window, cap)))


def attention_backward(
    qkv: Float[Array, "B N P D"],
    out: Float[Array, "B N H D"] | StackSlice,
    log_sums: Float[Array, "B N H"],
    d_out: Float[Array, "B N H D"],
    *,
    scale: Scale,
    slopes: Float[Array, " H"] | None = None,
    segment_ids: Int[Array, "B all_N"] | None = None,
    kv_heads: int | None = None,
    rows: Rows = "size_major",
    over: str | None = None,
    window: int | None = None,
    cap: float | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B N P D"]:
    """Return the cotangent of qkv, given the results of `attention_forward`.

    The results are `out` and `log_sums`. `d_out` is the cotangent of `out`.

    Raises:
      ValueError: as in `attention_forward`, or one of the three does not fit qkv.
    """
    call = _AttentionCall(rows, implementation, kv_heads, over)
    arrays = qkv, scale, slopes, segment_ids
    call, operands = _checked(call, AttentionOperands(*arrays, window=window, cap=cap))
    heads = qkv.shape[2] - 2 * call.kv_heads
    shape = (*qkv.shape[:2], heads, qkv.shape[3])
    results = {"out": (out, shape), "log_sums": (log_sums, shape[:3]), "d_out": (d_out, shape)}
    check_shapes(f"qkv {list(qkv.shape)}", **results)
    return _backward(call, operands, ResultsAndCotangent(out, log_sums, d_out))[0]


def attention_after(
    qkv: Float[Array, "B N P D"],
    before: Float[Array, "B K keys_and_values D"],
    filled: Int[Array, " B"],
    *,
    scale: Scale,
    slopes: Float[Array, " H"] | None = None,
    kv_heads: int | None = None,
    rows: Rows = "size_major",
    window: int | None = None,
    cap: float | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B N H D"]:
    """Compute `causal_attention` for new tokens that also attend to earlier, cached tokens.

    Plain JAX computes the gradients of qkv and `before`, whatever the implementation.

    Args:
      qkv: queries, keys and values of the new tokens.
      before: keys of all G heads, then values, of the earlier tokens in order.
      filled: the number of earlier tokens in each batch row, in any integer dtype. Later entries of
        `before` get no weight, but they must be finite.
      scale, slopes, kv_heads, rows, window, cap, implementation: as in `causal_attention`.

    Returns:
      One data vector per new token and head, in qkv's dtype.

    Raises:
      UnsupportedImplementation: a named implementation does not support this call.
      ValueError: as in `causal_attention`, or `before` or `filled` does not fit qkv.
    """
    kv_heads = check_operands(qkv, slopes, None, kv_heads, None)
    check_cache(qkv, kv_heads, before, filled)
    check_window(window)
    call = _AttentionCall(rows, implementation, kv_heads, None, check_cap(cap))
    shown = None if window is None else Window(window)
    # A narrow or unsigned dtype cannot hold the positions that are computed from `filled`.
    filled = filled.astype(jnp.int32)
    return _after(call, shown, qkv, before, filled, jnp.asarray(scale), slopes)


def _attention_after(call, window, qkv, before, filled, scale, slopes):
    if window is not None:
        return _within_window_after(call, window, qkv, before, filled, scale, slopes)
    heads = qkv.shape[2] - 2 * call.kv_heads
    own = _whole_forward(call, AttentionOperands(qkv, scale, slopes, cap=call.cap))
    is_filled = jnp.arange(before.shape[1])[None] < filled[:, None]
    segments = jnp.ones(qkv.shape[:2], jnp.int32), is_filled.astype(jnp.int32)
    most = jnp.max(filled, initial=0)
    q, kv = qkv[:, :, :heads], before.astype(qkv.dtype)
    operands = PartOperands(q, kv, scale, most, slopes, segments, cap=call.cap)
    out, sums = _part_forward(call, operands)
    if slopes is not None:
        # The kernels assume that the first new token has the same position, `most`, in all batch
        # rows. In a row with fewer earlier tokens, ALiBi's distances are then too large by
        # `most - filled`. All logits of the row are too low by the same amount, so only the
        # log-sum-exps need a correction.
        sums = sums + slopes.astype(sums.dtype) * (most - filled)[:, None, None]
    return merged(own, (out, sums))[0].astype(qkv.dtype)


def _within_window_after(call, window, qkv, before, filled, scale, slopes):
    """Compute `attention_after` with a window, from the last cached tokens of each batch row.

    The same number of cached tokens is used in all rows: as many as the window may contain.
    """
    heads, capacity = qkv.shape[2] - 2 * call.kv_heads, before.shape[1]
    shown = _shown(window, qkv.shape[1])
    of_logits = {"window": shown, "cap": call.cap}
    own = _whole_forward(call, AttentionOperands(qkv, scale, slopes, **of_logits))
    if window == 1:
        return own[0]
    count = min(capacity, round_up(window - 1, LANES))
    places = filled[:, None] - count + jnp.arange(count)
    last = jnp.take_along_axis(before, jnp.maximum(places, 0)[..., None, None], axis=1)
    segments = jnp.ones(qkv.shape[:2], jnp.int32), (places >= 0).astype(jnp.int32)
    operands = PartOperands(
        qkv[:, :, :heads],
        last.astype(qkv.dtype),
        scale,
        jnp.int32(count),
        slopes,
        segments,
        Window(window - count),
        call.cap,
    )
    return merged(own, _part_forward(call, operands))[0].astype(qkv.dtype)


def attention_to(
    q: Float[Array, "B N H D"],
    before: Float[Array, "B K keys_and_values D"] | KeysAndValues,
    seen: Bool[Array, "B K"],
    *,
    scale: Scale,
    rows: Rows = "size_major",
    cap: float | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B N H Dv"], Float[Array, "B N H"]]:
    """Compute attention of every query to all visible keys, and each softmax's log-sum-exp.

    A caller can attend to many keys one part at a time, and combine the results with `merged`. The
    op has no gradient.

    Args:
      q: the queries of all heads.
      before: the keys of all G heads, then the values, in one array; or a pair (keys, values).
      seen: whether each key is visible. The other keys and values get no weight, but they must be
        finite.
      scale, rows, cap, implementation: as in `causal_attention`.

    Returns:
      One data vector per query and head, and each softmax's log-sum-exp.

    Raises:
      UnsupportedImplementation: a named implementation does not support this call.
      ValueError: shapes or dtypes do not fit, or the cap is not above 0.
    """
    check_part(q, before, seen)
    kv_heads = before[0].shape[2] if isinstance(before, tuple) else before.shape[2] // 2
    segments = jnp.ones(q.shape[:2], jnp.int32), seen.astype(jnp.int32)
    call = _AttentionCall(rows, implementation, kv_heads, None)
    before = jax.tree.map(lambda x: x.astype(q.dtype), before)
    shift = jnp.int32(0)
    operands = PartOperands(
        q, before, jnp.asarray(scale), shift, None, segments, None, check_cap(cap)
    )
    return _part_forward(call, operands)


def _after_forward(call, window, qkv, before, filled, scale, slopes):
    saved = qkv, before, filled, scale, slopes
    return _attention_after(call, window, *saved), saved


def _after_backward(call, window, saved, d_out):
    qkv, before, filled, scale, slopes = saved
    plain = functools.partial(_attention_after, call._replace(implementation="xla"), window)
    _, pullback = jax.vjp(lambda *x: plain(*x, filled, scale, slopes), qkv, before)
    zeros = (None if x is None else jnp.zeros_like(x) for x in (scale, slopes))
    return *pullback(d_out), None, *zeros


_after = jax.custom_vjp(_attention_after, nondiff_argnums=(0, 1))
_after.defvjp(_after_forward, _after_backward)


def _shown(window: int, length: int) -> Window | None:
    """Return the window as a `Window`, or None if it contains all `length` tokens."""
    return Window(window) if not isinstance(length, int) or window < length else None


class _AttentionCall(NamedTuple):
    rows: Rows
    implementation: str | None
    kv_heads: int | None  # None only before `_checked`.
    over: str | None
    # The soft cap for `attention_after`. For other ops, the operands contain it.
    cap: Cap | None = None


def _checked(
    call: _AttentionCall, operands: AttentionOperands
) -> tuple[_AttentionCall, AttentionOperands]:
    """Check the arguments of an op on whole sequences.

    Args:
      call: the static parameters, in which the number of key heads may be None.
      operands: the operands as the caller passed them.

    Returns:
      The call with the number of key heads, and the operands in the form that `AttentionOperands`
      describes.
    """
    qkv, scale, slopes, ids, kv, _, window, cap = operands
    kv_heads = check_operands(qkv, slopes, ids, call.kv_heads, call.over, kv)
    check_window(window)
    if window is not None:
        length = qkv.shape[1] * (1 if call.over is None else jax.lax.axis_size(call.over))
        window = _shown(window, length)
    return call._replace(kv_heads=kv_heads), operands._replace(
        scale=jnp.asarray(scale),
        segment_ids=None if ids is None else ids.astype(jnp.int32),
        window=window,
        cap=check_cap(cap),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(call, operands):
    return _forward(call, operands)[0]


def _attention_forward(call, operands):
    # A policy of rematerialisation can keep these results by their name.
    out, log_sums = checkpoint_name(_forward(call, operands), "attention")
    return out, (operands, out, log_sums)


def _attention_backward(call, saved, d_out):
    operands, out, log_sums = saved
    d_qkv, d_kv = _backward(call, operands, ResultsAndCotangent(out, log_sums, d_out))
    zeros = [None if x is None else jnp.zeros_like(x) for x in (operands.scale, operands.slopes)]
    static = {"window": operands.window, "cap": operands.cap}
    return (AttentionOperands(d_qkv, *zeros, None, d_kv, **static),)


_attention.defvjp(_attention_forward, _attention_backward)


_IMPLEMENTATIONS = Implementations(
    plain,
    {"mosaic_tpu": mosaic_tpu, "cudnn": cudnn},
    ("tpu", "cuda"),
    name="causal_attention",
    deciding=("kv_heads",),
)


def _forward(call, operands):
    if call.over is None:
        return _whole_forward(call, operands)
    part = operands._replace(to=None)
    out, log_sums = _over_devices(operands).forward(_ops(call), call.over, part, call.kv_heads)
    return write_slice(out, operands.to), log_sums


def _backward(call, operands, results):
    if call.over is None:
        return _whole_backward(call, operands, results)
    run = _over_devices(operands).backward
    return run(_ops(call), call.over, operands, read_slices(results), call.kv_heads)


def _over_devices(operands):
    """Return the module that computes attention with tokens sharded over devices."""
    return divided if operands.window is None else neighbours


def _ops(call):
    """Return the functions that compute attention on one device, which ring attention calls."""
    ops = _whole_forward, _whole_backward, _part_forward, _part_backward
    return divided.DeviceOps(*(functools.partial(op, call) for op in ops))


def _whole(op, call, *operands):
    options = {"kv_heads": call.kv_heads, "rows": call.rows}
    return _IMPLEMENTATIONS.run(call.implementation, op, *operands, **options)


def _part(op, call, *operands):
    return _IMPLEMENTATIONS.run(call.implementation, op, *operands)


_whole_forward = functools.partial(_whole, "attention_forward")
_whole_backward = functools.partial(_whole, "attention_backward")
_part_forward = functools.partial(_part, "part_forward")
_part_backward = functools.partial(_part, "part_backward")
