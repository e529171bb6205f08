"""Test cases for attention from one part of a sequence to another, as in ring attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.causal_attention import cudnn, mosaic_tpu, plain
from pallas_kernels.causal_attention.interface import (
    Cap,
    PartOperands,
    ResultsAndCotangent,
    Window,
)
from pallas_kernels.platform import Implementations
from pallas_kernels.shapes import Heads
from rmt_tpu.analysis.device_case import DeviceCase, in_words, normal
from rmt_tpu.analysis.device_cases_layers import Tokens

# The implementations of causal attention. No public op computes a part alone, with gradients.
_IMPLEMENTATIONS = Implementations(
    plain,
    {"mosaic_tpu": mosaic_tpu, "cudnn": cudnn},
    ("tpu", "cuda"),
    name="causal_attention",
)


def attention_part(
    size: Heads,
    tokens: Tokens,
    keys: int,
    *,
    kv_heads: int | None = None,
    alibi: bool = False,
    segments: bool = True,
    values: int | None = None,
    dtype: str = "bfloat16",
    window: int | None = None,
    cap: float | None = None,
) -> DeviceCase:
    """Return a test case for attention to the keys of the part before the queries' own.

    With segments, the second of the keys' two documents ends in the middle of the queries. The
    results of queries that see no key are set to 0, because they are not defined. Gradients are
    those of the output; the log-sum-exps have none.

    Args:
      size: the number and the size of the query heads.
      tokens: the number of sequences, and of queries in each.
      keys: the number of keys in each sequence; at least 2.
      kv_heads: the number of key and value heads; None means as many as query heads.
      alibi: whether ALiBi biases are added to the logits.
      segments: whether queries and keys have segments.
      values: the head size of the values, or None if keys and values are one array.
      dtype: the dtype of queries, keys and values.
      window: the limit of `i - j` for query i and key j, each counted from its own part's first; it
        may be negative. None means that a query sees all keys of its segment.
      cap: the soft cap of logits, or None.
    """
    (heads, D), (batch, queries) = size, tokens
    G = heads if kv_heads is None else kv_heads
    # NumPy computes these arrays, so that making a test case compiles nothing.
    slopes = 2.0 ** -(8 * np.arange(1, heads + 1) / heads)
    places = np.arange(queries)
    sees = (places < max(1, queries // 2)) | (not segments)
    sees &= window is None or places - (keys - 1) < window
    static = {
        "window": None if window is None else Window(window),
        "cap": None if cap is None else Cap(cap),
    }

    def inputs():
        arrays = {"q": normal(27, dtype, *tokens, heads, D)}
        if values is None:
            arrays["kv"] = normal(28, dtype, batch, keys, 2 * G, D)
        else:
            arrays["k"] = normal(28, dtype, batch, keys, G, D)
            arrays["v"] = normal(29, dtype, batch, keys, G, values)
        if segments:
            of_queries = np.where(places < max(1, queries // 2), 1, 2)
            of_keys = (np.arange(keys) >= keys // 3).astype(np.int32)
            rows = lambda ids: jnp.asarray(np.tile(np.int32(ids), (batch, 1)))
            arrays |= {"segments": rows(of_queries), "key_segments": rows(of_keys)}
        return arrays

    def function(implementation, q, kv=None, k=None, v=None, segments=None, key_segments=None):
        operands = PartOperands(
            q,
            (k, v) if kv is None else kv,
            jnp.float32(D**-0.5),
            jnp.int32(keys),
            jnp.float32(slopes) if alibi else None,
            None if segments is None else (segments, key_segments),
            **static,
        )
        out, log_sums = _part(implementation, jnp.asarray(sees), operands)
        return {"out": out, "log_sums": log_sums}

    named = {"G": None if G == heads else G, "Dv": values, "window": window, "cap": cap}
    more = {name: value for name, value in named.items() if value is not None}
    words = in_words(tokens, dtype, H=heads, D=D, keys=keys, **more) + (" ALiBi" if alibi else "")
    words += "" if segments else " one document"
    flops = 4 * batch * queries * keys * heads * D
    # If a query sees only one key, the terms of the query's and the key's gradients cancel.
    cancels = frozenset({"d_q", "d_k", "d_kv"})
    return DeviceCase("attention_part", words, function, inputs, flops, cancels=cancels)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _part(implementation, sees, operands):
    """Return the output and the log-sum-exps, which are 0 for queries for which `sees` is False."""
    out, log_sums = _IMPLEMENTATIONS.run(implementation, "part_forward", operands)
    out = jnp.where(sees[:, None, None], out, 0)
    return out, jnp.where(sees[:, None], log_sums, 0)


def _forward(implementation, sees, operands):
    results = _part(implementation, sees, operands)
    return results, (sees, operands, results)


def _backward(implementation, saved, cotangents):
    sees, operands, results = saved
    d_out = jnp.where(sees[:, None, None], cotangents[0], 0)
    given = operands, ResultsAndCotangent(*results, d_out)
    gradients = _IMPLEMENTATIONS.run(implementation, "part_backward", *given)
    d_q, d_kv = jax.tree.map(lambda x: x.astype(operands.q.dtype), gradients)
    others = operands.scale, operands.shift, operands.slopes, operands.segments
    zeros = jax.tree.map(_zero, others)
    return None, operands._replace(
        q=d_q, kv=d_kv, scale=zeros[0], shift=zeros[1], slopes=zeros[2], segments=zeros[3]
    )


def _zero(x):
    """Return the zero cotangent of x; None stands for that of integers."""
    return jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.floating) else None


_part.defvjp(_forward, _backward)
