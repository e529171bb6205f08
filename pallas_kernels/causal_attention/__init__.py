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
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.arguments import StackSlice, check_array, check_tokens, read_slices, write_slice
from pallas_kernels.call import LANES, round_up
from pallas_kernels.causal_attention import cudnn, divided, mosaic_tpu, neighbours, plain
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
      segment_ids: the segment of each token; None means that each batch row is one segment.
      kv_heads: G, the number of key heads and of value heads. Each of them is shared by H / G
        consecutive query heads. None means G = H.
      kv: keys [B, N, G, D] and values [B, N, G, Dv], if they are separate arrays. Then qkv contains
        only the queries, and kv_heads is not needed.
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
        number of tokens, or a number of heads that does not divide H; slopes do not have shape [H];
        segment_ids do not cover all tokens; the window is not at least 1; the cap is not above 0;
        or a device has an odd number of tokens of a sharded sequence.
      TypeError: the op is differentiated in forward mode, or differentiated twice when a kernel may
        compute it.
    """
    kv_heads = _check(qkv, slopes, segment_ids, kv_heads, over, kv)
    shown = _window(window, qkv, over)
    of_logits = {"window": shown, "cap": _cap(cap)}
    operands = AttentionOperands(qkv, jnp.asarray(scale), slopes, segment_ids, kv, **of_logits)
    return _attention(_AttentionCall(rows, implementation, kv_heads, over), operands)


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
    kv_heads = _check(qkv, slopes, segment_ids, kv_heads, over, kv)
    shown = _window(window, qkv, over)
    arrays = qkv, jnp.asarray(scale), slopes, segment_ids, kv, to
    operands = AttentionOperands(*arrays, shown, _cap(cap))
    return _forward(_AttentionCall(rows, implementation, kv_heads, over), operands)


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
    """
    kv_heads = _check(qkv, slopes, segment_ids, kv_heads, over)
    shown = _window(window, qkv, over)
    of_logits = {"window": shown, "cap": _cap(cap)}
    operands = AttentionOperands(qkv, jnp.asarray(scale), slopes, segment_ids, **of_logits)
    results = ResultsAndCotangent(out, log_sums, d_out)
    return _backward(_AttentionCall(rows, implementation, kv_heads, over), operands, results)[0]


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
      filled: the number of earlier tokens in each batch row; later entries of `before` are ignored.
      scale, slopes, kv_heads, rows, window, cap, implementation: as in `causal_attention`.

    Returns:
      One data vector per new token and head, in qkv's dtype.

    Raises:
      UnsupportedImplementation, ValueError: as in `causal_attention`.
    """
    kv_heads = _check(qkv, slopes, None, kv_heads, None)
    check_tokens(before=before.shape[1])
    if window is not None:
        _check_window(window)
    call = _AttentionCall(rows, implementation, kv_heads, None, _cap(cap))
    shown = None if window is None else Window(window)
    return _after(call, shown, qkv, before, filled, jnp.asarray(scale), slopes)


def _attention_after(call, window, qkv, before, filled, scale, slopes):
    if window is not None:
        return _within_window_after(call, window, qkv, before, filled, scale, slopes)
    heads = qkv.shape[2] - 2 * call.kv_heads
    own = _whole_forward(call, AttentionOperands(qkv, scale, slopes, cap=call.cap))
    is_filled = jnp.arange(before.shape[1])[None] < filled[:, None]
    segments = jnp.ones(qkv.shape[:2], jnp.int32), is_filled.astype(jnp.int32)
    most = jnp.max(filled)
    q, kv = qkv[:, :, :heads], before.astype(qkv.dtype)
    operands = PartOperands(q, kv, scale, most, slopes, segments, cap=call.cap)
    out, sums = _part_forward(call, operands)
    if slopes is not None:
        # The kernels assume that the first new token has the same position, `most`, in all batch
        # rows. In a row with fewer earlier tokens, ALiBi's distances are then too large by
        # `most - filled`. All logits of the row are too low by the same amount, so only the
        # log-sum-exps need a correction.
        sums = sums + slopes * (most - filled)[:, None, None]
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
      seen: whether each key is visible.
      scale, rows, cap, implementation: as in `causal_attention`.

    Returns:
      One data vector per query and head, and each softmax's log-sum-exp.

    Raises:
      UnsupportedImplementation, ValueError: as in `causal_attention`.
    """
    check_tokens(q=q.shape[1], seen=seen.shape[1])
    arrays, each = (before, 1) if isinstance(before, tuple) else ((before,), 2)
    kv_heads = arrays[0].shape[2] // each
    if q.shape[2] % kv_heads or any(x.shape[2] != each * kv_heads for x in arrays):
        shapes = " and ".join(str(x.shape) for x in arrays)
        raise ValueError(
            f"shapes do not fit: q [B, N, H, D] has shape {q.shape}, and before has {shapes}; "
            "legal: a number of key heads that divides H"
        )
    segments = jnp.ones(q.shape[:2], jnp.int32), seen.astype(jnp.int32)
    call = _AttentionCall(rows, implementation, kv_heads, None)
    before = jax.tree.map(lambda x: x.astype(q.dtype), before)
    shift = jnp.int32(0)
    operands = PartOperands(q, before, jnp.asarray(scale), shift, None, segments, None, _cap(cap))
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


def _window(window: int | None, qkv, over: str | None) -> Window | None:
    """Return the window as a `Window`, or None if every token sees all earlier tokens.

    Raises:
      ValueError: the window is not at least 1.
    """
    if window is None:
        return None
    _check_window(window)
    return _shown(window, qkv.shape[1] * (1 if over is None else jax.lax.axis_size(over)))


def _check_window(window: int) -> None:
    if window < 1:
        raise ValueError(f"window={window} must be at least 1, or None")


def _cap(cap: float | None) -> Cap | None:
    """Return the soft cap as a `Cap`, or None if `cap` is None.

    Raises:
      ValueError: the cap is not a finite number above 0.
    """
    if cap is None:
        return None
    if not 0 < cap < math.inf:
        raise ValueError(f"cap={cap} must be a finite number above 0, or None")
    return Cap(cap)


def _shown(window: int, length: int) -> Window | None:
    """Return the window as a `Window`, or None if it contains all `length` tokens."""
    return Window(window) if not isinstance(length, int) or window < length else None


def _check(qkv, slopes, segment_ids, kv_heads: int | None, over: str | None, kv=None) -> int:
    """Check the arguments, and return the number of key heads."""
    check_array("qkv", qkv, "B N P D")
    check_tokens(qkv=qkv.shape[1])
    if over is not None and qkv.shape[1] % 2:
        raise ValueError(
            f"a sequence divided over {over} has {qkv.shape[1]} tokens per device; legal: an even "
            "number, because each device processes two parts of the sequence"
        )
    length = qkv.shape[1] * (1 if over is None else jax.lax.axis_size(over))
    if segment_ids is not None and segment_ids.shape != (qkv.shape[0], length):
        raise ValueError(
            f"shapes do not fit: segment_ids has shape {segment_ids.shape}, but must have shape "
            f"{(qkv.shape[0], length)}: batch rows, and tokens of the whole sequence"
        )
    if kv is not None:
        return _check_separate(qkv, slopes, kv_heads, kv)
    rows = qkv.shape[2]
    if kv_heads is None:
        heads = keys = rows // 3
    else:
        heads, keys = rows - 2 * kv_heads, kv_heads
    fits = keys > 0 and heads > 0 and heads % keys == 0 and heads + 2 * keys == rows
    if not fits or (slopes is not None and slopes.shape != (heads,)):
        of_slopes = "" if slopes is None else f", and slopes [H] have shape {slopes.shape}"
        wanted = "3 H" if kv_heads is None else f"H + 2 * {kv_heads}"
        raise ValueError(
            f"shapes do not fit: qkv [B, N, {wanted}, D] has shape {qkv.shape}{of_slopes}; legal: "
            "a number H of query heads that is a multiple of the number of key heads"
        )
    return keys


def _check_separate(q, slopes, kv_heads: int | None, kv: KeysAndValues) -> int:
    k, v = kv
    check_array("keys", k, "B N G D")
    check_array("values", v, "B N G Dv")
    heads, keys = q.shape[2], k.shape[2]
    fits = k.shape == (*q.shape[:2], keys, q.shape[3]) and v.shape[:3] == k.shape[:3]
    fits = fits and keys > 0 and heads % keys == 0 and kv_heads in (None, keys)
    if not fits or (slopes is not None and slopes.shape != (heads,)):
        of_slopes = "" if slopes is None else f", and slopes [H] have shape {slopes.shape}"
        raise ValueError(
            f"shapes do not fit: queries [B, N, H, D] have shape {q.shape}, keys [B, N, G, D] have "
            f"shape {k.shape}, values [B, N, G, Dv] have shape {v.shape}{of_slopes}; "
            "legal: the same B, N and D, and a number G of key heads that divides H"
        )
    return keys


class _AttentionCall(NamedTuple):
    rows: Rows
    implementation: str | None
    kv_heads: int
    over: str | None
    # The soft cap for `attention_after`. For other ops, the operands contain it.
    cap: Cap | None = None


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
