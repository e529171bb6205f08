"""Test cases for the kernel calls of a given program, at the sizes of that program.

A case has at most 8192 tokens, 8192 rows of experts or two tiles for each of them, or 2048 tokens
of logits. A larger call is tested with fewer rows of the batch, and if necessary with shorter
sequences. Ops without a test case in this module are not checked.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from pallas_kernels.causal_attention.interface import AttentionOperands, PartOperands
from pallas_kernels.key_vector.interface import FRACTION_BITS, SiteOperands
from pallas_kernels.platform import TracedCall
from pallas_kernels.shapes import Depth, Heads, KeyVector
from rmt_tpu.analysis import device_cases_depth as depth
from rmt_tpu.analysis import device_cases_layers as layers
from rmt_tpu.analysis import device_cases_residual as residual
from rmt_tpu.analysis.device_case import DeviceCase
from rmt_tpu.analysis.device_cases_parts import attention_part

_TOKENS, _LOGITS = 8192, 2048
# The largest number of entries that the sources of depth attention have in a case. In bfloat16
# these are 256 MiB, several times the cache of a GPU, so that times are those of its memory.
_ENTRIES = 2**27


def cases_of(calls: Iterable[TracedCall], platform: str) -> dict[str, list[DeviceCase]]:
    """Return the distinct test cases for a program's calls.

    The result maps the name of each op (`TracedCall.name`) to its cases.

    Args:
      calls: the calls that were collected from a program.
      platform: "tpu" or "cuda". Calls that the platform's kernels do not support are left out.
    """
    found: dict[str, dict[tuple[str, str], DeviceCase]] = {}
    for call in calls:
        if platform in call.platforms and call.name in _CASES:
            for case in _CASES[call.name](call):
                found.setdefault(call.name, {}).setdefault((case.op, case.size), case)
    return {name: [*cases.values()] for name, cases in found.items()}


def _capped(tokens: tuple[int, ...], most: int = _TOKENS) -> tuple[int, int]:
    """Return a number of sequences and of tokens in each, with at most `most` tokens in total.

    A single token axis counts as one sequence.
    """
    batch, seq = (1, *tokens)[-2:] if len(tokens) < 3 else (math.prod(tokens[:-1]), tokens[-1])
    seq = min(seq, most)
    return max(1, min(batch, most // max(seq, 1))), seq


def _key_vector(call: TracedCall) -> Iterator[DeviceCase]:
    operands, backward = call.args[0], call.op == "backward"
    site = operands.site if backward else operands
    matrix = operands.d_residual if site.residual is None else site.residual
    *tokens, K, V = matrix.shape
    tokens = _capped(tuple(tokens))
    R = 0 if site.store_keys is None else site.store_keys.shape[0]
    P = 0 if site.read_keys is None else site.read_keys.shape[0]
    dtype = str(_vectors_dtype(call, site))
    options: dict[str, Any] = {"residual_dtype": str(matrix.dtype)}
    if P and call.options.get("norm"):
        options["norm"] = call.options["norm"]
    again = operands.again if backward else None
    # The operands of `forward` after the site are the statistics and `empty`.
    statistics, empty = (None, None) if backward else (*call.args[1:], None, None)[:2]
    if matrix.dtype == jnp.int16 or call.options.get("rebuild") or statistics is not None:
        # A call that writes is tested as an `undo`, and a call that only reads, or reads again, as
        # an `undo_and_reread`. Both cases need a write and a read. A missing one is added, with a
        # single vector.
        options["fraction_bits"] = call.options.get("fraction_bits", FRACTION_BITS)
        make = residual.undo
        if again is not None or not R:
            reads = None if again is None else again.read_keys.shape[0]
            make = functools.partial(residual.undo_and_reread, again=reads)
        options["in_stacks"] = call.in_stacks
        yield make(KeyVector(K, V, R or 1, P or 1), tokens, dtype, **options)
        return
    if R and P:
        make = residual.site
    elif R:
        make = residual.store_forward if empty is not None else residual.store
    else:
        make = residual.norm_retrieve
    yield make(KeyVector(K, V, R, P), tokens, dtype, **options)


def _vectors_dtype(call: TracedCall, site: SiteOperands) -> jnp.dtype:
    """Return the dtype of the vectors that a key-vector op writes or retrieves."""
    if site.data is not None:
        return site.data.dtype
    if call.op == "backward":
        return call.args[0].d_retrieved.dtype
    return jnp.dtype(call.options.get("dtype") or site.residual.dtype)


def _depth(call: TracedCall) -> Iterator[DeviceCase]:
    operands = call.args[0]
    if call.op.startswith("partial"):
        S, *entries = operands.queries.shape
        N, *tokens = operands.sources.shape[: -len(entries)]
        make, dtype = depth.partial, operands.sources.dtype
        if call.op == "partial_backward" and call.args[1].accumulate is not None:
            make = depth.partial_backward
        elif operands.prior is not None:
            make = functools.partial(depth.partial, prior=True)
    else:
        make, dtype = depth.merge, None
        if call.name == "merge_read":
            reads, operands = operands.read_keys.shape[0], operands.merge
            make = functools.partial(
                depth.merge_read, reads=reads, residual_dtype=str(operands.current.dtype)
            )
            backward = call.op == "merge_read_backward"
            dtype = call.args[2].z.dtype if backward else call.options["dtype"]
        make = functools.partial(make, norm=call.options["norm"])
        S, *entries = operands.mixed.shape[:1] + operands.query.shape
        N, tokens = 1, operands.current.shape[: -len(entries)]
        dtype = dtype or operands.current.dtype
    matrix = tuple(entries) if len(entries) > 1 else None
    size = Depth(S, N, math.prod(entries))
    # Each token has a vector or matrix for each of the S sites or N sources.
    most = _ENTRIES // (max(S, N) * math.prod(entries))
    tokens = _capped(tuple(tokens), min(_TOKENS, max(1, most)))
    yield make(size, tokens, matrix, str(dtype))


def _depth_sums(call: TracedCall) -> Iterator[DeviceCase]:
    weights, sources = call.args[:2]
    (S, N, T), D = weights.shape, sources.shape[2]
    yield depth.sums(Depth(S, N, D), (min(T, _TOKENS),), str(sources.dtype))


def _attention(call: TracedCall) -> Iterator[DeviceCase]:
    operands = call.args[0]
    if call.op.startswith("part"):
        yield _attention_part(call.op, operands)
        return
    batch, seq, rows, D = operands.qkv.shape
    G = call.options["kv_heads"]
    options: dict[str, Any] = {
        "kv_heads": G,
        "alibi": operands.slopes is not None,
        "segments": operands.segment_ids is not None,
        "order": call.options["rows"],
        "dtype": str(operands.qkv.dtype),
        "cap": _cap(operands),
    }
    make = layers.attention_in_stack if call.in_stacks else layers.attention
    if operands.kv is not None:
        options["values"] = operands.kv[1].shape[3]
    heads = rows if operands.kv is not None else rows - 2 * G
    tokens = _capped((batch, seq))
    if operands.window is not None and operands.window < tokens[1]:
        options["window"] = int(operands.window)
    yield make(Heads(heads, D), tokens, **options)


def _attention_part(op: str, operands: PartOperands) -> DeviceCase:
    batch, seq, heads, D = operands.q.shape
    if isinstance(operands.kv, tuple):
        G, values = operands.kv[0].shape[2], operands.kv[1].shape[3]
        length = operands.kv[0].shape[1]
    else:
        length, G, values = operands.kv.shape[1], operands.kv.shape[2] // 2, None
    keys = min(length, _TOKENS)
    tokens = min(batch, max(1, _TOKENS // max(seq, length))), min(seq, _TOKENS)
    dtype, cap = str(operands.q.dtype), _cap(operands)
    segments = operands.segments is not None
    others = operands.slopes, operands.window, values
    if op == "part_forward" and segments and G == heads and others == (None, None, None):
        return layers.attention_to(Heads(heads, D), tokens, keys, dtype, cap=cap)
    window = None if operands.window is None else int(operands.window)
    return attention_part(
        Heads(heads, D),
        tokens,
        keys,
        kv_heads=G,
        alibi=operands.slopes is not None,
        segments=segments,
        values=values,
        dtype=dtype,
        # With fewer keys than in the call, the window must still contain some.
        window=None if window is None else max(window, 1 - keys // 2),
        cap=cap,
    )


def _cap(operands: AttentionOperands | PartOperands) -> float | None:
    return None if operands.cap is None else float(operands.cap)


def _delta(call: TracedCall) -> Iterator[DeviceCase]:
    q, v = call.args[0].q, call.args[0].v
    if q.shape[-1] == v.shape[-1]:
        batch, seq, heads, D = q.shape
        yield layers.delta(_capped((batch, seq)), Heads(heads, D), str(v.dtype))


def _grouped(call: TracedCall) -> Iterator[DeviceCase]:
    if call.op == "product" and not call.options.get("transposed"):
        rows, matrices, _ = call.args
        G, K, N = matrices.shape
        alignment = call.options["alignment"]
        M = min(len(rows), max(_TOKENS, 2 * G * alignment))
        yield layers.grouped(M, K, N, G, str(rows.dtype), alignment=alignment)


def _stacked_product(call: TracedCall) -> Iterator[DeviceCase]:
    rows, matrices, _ = call.args
    yield layers.stacked_product(len(rows), *matrices.shape[1:], str(rows.dtype))


def _token_rows(call: TracedCall) -> Iterator[DeviceCase]:
    rows, _, places = call.args
    choices = call.options["each"]
    all_tokens = len(places) // choices
    tokens = min(all_tokens, _TOKENS // choices or 1)
    count = max(1, len(rows) * tokens // all_tokens)
    yield layers.token_rows(tokens, choices, count, rows.shape[1], str(rows.dtype))


def _logits(call: TracedCall) -> Iterator[DeviceCase]:
    x, kernel, _ = call.args
    yield layers.logits(min(len(x), _LOGITS), *kernel.shape, str(x.dtype))


_CASES: Mapping[str, Callable[[TracedCall], Iterator[DeviceCase]]] = {
    "key_vector": _key_vector,
    "depth_attention": _depth,
    "depth_attention_matrices": _depth,
    "merge_read": _depth,
    "depth_sums": _depth_sums,
    "causal_attention": _attention,
    "delta_attention": _delta,
    "grouped_matmul": _grouped,
    "stacked_product": _stacked_product,
    "token_rows": _token_rows,
    "logits": _logits,
}
