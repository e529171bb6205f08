"""Checks of the arguments of causal-attention ops, which run before an op is traced."""

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import check_array, check_integers, check_tokens
from pallas_kernels.causal_attention.interface import Cap, KeysAndValues


def check_operands(
    qkv: Any,
    slopes: Any,
    segment_ids: Any,
    kv_heads: int | None,
    over: str | None,
    kv: KeysAndValues | None = None,
) -> int:
    """Check the operands of an op on whole sequences, and return the number of key heads.

    Raises:
      ValueError: shapes or dtypes do not fit, or a device has an odd number of tokens of a sharded
        sequence.
    """
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
    check_integers("segment_ids", segment_ids)
    if kv_heads is not None and not _is_integer(kv_heads):
        raise ValueError(f"kv_heads={kv_heads!r} must be an integer, or None")
    if kv is not None:
        return _check_separate(qkv, slopes, kv_heads, kv)
    rows = qkv.shape[2]
    if kv_heads is None:
        heads = keys = rows // 3
    else:
        heads, keys = rows - 2 * kv_heads, int(kv_heads)
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
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"dtypes do not fit: queries are {q.dtype}, keys {k.dtype} and values {v.dtype}; "
            "legal: the same dtype"
        )
    return keys


def check_cache(qkv: Any, kv_heads: int, before: Any, filled: Any) -> None:
    """Check the cached keys and values of `attention_after`, and how many of them are filled.

    Raises:
      ValueError: shapes or dtypes do not fit.
    """
    check_array("before", before, "B K keys_and_values D")
    check_tokens(before=before.shape[1])
    batch, size = qkv.shape[0], qkv.shape[3]
    if before.shape != (batch, before.shape[1], 2 * kv_heads, size):
        raise ValueError(
            f"shapes do not fit: before [B, K, 2 G, D] has shape {before.shape}; legal: "
            f"B={batch}, G={kv_heads} and D={size}, as in qkv {qkv.shape}"
        )
    if filled.shape != (batch,) or not jnp.issubdtype(filled.dtype, jnp.integer):
        raise ValueError(
            f"filled is {filled.dtype}{list(filled.shape)}; legal: {batch} integers, one per row"
        )


def check_part(q: Any, before: Any, seen: Any) -> None:
    """Check the queries, keys and values of `attention_to`, and which keys are visible.

    Raises:
      ValueError: shapes or dtypes do not fit.
    """
    check_array("q", q, "B N H D")
    if isinstance(before, tuple):
        arrays, each, names = before, 1, "(keys [B, K, G, D], values [B, K, G, Dv])"
    else:
        arrays, each, names = (before,), 2, "[B, K, 2 G, D]"
    for x in arrays:
        check_array("before", x, "B K heads D")
    check_tokens(q=q.shape[1], before=arrays[0].shape[1])
    (batch, _, heads, size), (_, count, rows, _) = q.shape, arrays[0].shape
    kv_heads = rows // each
    fits = kv_heads > 0 and heads % kv_heads == 0 and arrays[0].shape[3] == size
    if not fits or any(x.shape[:3] != (batch, count, each * kv_heads) for x in arrays):
        shapes = " and ".join(str(x.shape) for x in arrays)
        raise ValueError(
            f"shapes do not fit: q [B, N, H, D] has shape {q.shape}, and before {names} has "
            f"{shapes}; legal: the same B and D, and a number G of key heads that divides H"
        )
    if seen.shape != (batch, count) or seen.dtype != jnp.bool:
        raise ValueError(
            f"seen is {seen.dtype}{list(seen.shape)}; legal: bool{[batch, count]}, for every row "
            "and key"
        )


def check_window(window: int | None) -> None:
    """Raise ValueError unless a window is None, or an integer of at least 1."""
    if window is not None and not (_is_integer(window) and window >= 1):
        raise ValueError(f"window={window!r} must be an integer, at least 1, or None")


def check_cap(cap: float | None) -> Cap | None:
    """Return the soft cap as a `Cap`, or None if `cap` is None.

    Raises:
      ValueError: the cap is not a finite number above 0.
    """
    if cap is None:
        return None
    if isinstance(cap, bool) or not isinstance(cap, numbers.Real) or not 0 < cap < math.inf:
        raise ValueError(f"cap={cap!r} must be a finite number above 0, or None")
    return Cap(cap)


def _is_integer(x: Any) -> bool:
    # A bool is an `Integral` too, but True is hardly meant as 1.
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)
