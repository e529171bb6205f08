"""Test cases for the ops in layers, at any size: attention, linear attention, experts, logits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels import StackSlice
from pallas_kernels.causal_attention.interface import Rows
from pallas_kernels.delta_attention import reference as delta_reference
from pallas_kernels.grouped_matmul import reference as grouped_reference
from pallas_kernels.logits import reference as logits_reference
from pallas_kernels.shapes import Heads
from pallas_kernels.stacked_product import reference as product_reference
from pallas_kernels.token_rows import reference as rows_reference
from rmt_tpu.analysis.device_case import Arrays, DeviceCase, in_words, normal

Tokens = tuple[int, int]

# Attention ------------------------------------------------------------------------------------


def attention(
    size: Heads,
    tokens: Tokens,
    *,
    kv_heads: int | None = None,
    alibi: bool = False,
    segments: bool = True,
    values: int | None = None,
    order: Rows = "size_major",
    dtype: str = "bfloat16",
    window: int | None = None,
    cap: float | None = None,
) -> DeviceCase:
    """Return a test case for `causal_attention` on whole sequences.

    Args:
      size: the number and the size of the query heads.
      tokens: the number of sequences, and of tokens in each.
      kv_heads: the number of key and value heads; None means as many as query heads.
      alibi: whether ALiBi biases are added to the logits.
      segments: whether each sequence consists of two documents.
      values: the head size of the values, or None if queries, keys and values are one array.
      order: the order of heads and features in the kernel's layout.
      dtype: the dtype of queries, keys and values.
      window: the number of tokens that each token sees; None means all earlier ones.
      cap: the soft cap of logits, or None.
    """
    heads, D = size
    G = heads if kv_heads is None else kv_heads
    options = _options(size, kv_heads, alibi, order, window, cap)

    def function(implementation, qkv, segment_ids=None, k=None, v=None):
        out = pallas_kernels.causal_attention(
            qkv,
            segment_ids=segment_ids,
            kv=None if k is None else (k, v),
            implementation=implementation,
            **options,
        )
        return {"out": out}

    def inputs():
        arrays = {"qkv": normal(20, dtype, *tokens, heads + (0 if values else 2 * G), D)}
        if values:
            arrays["k"] = normal(25, dtype, *tokens, G, D)
            arrays["v"] = normal(26, dtype, *tokens, G, values)
        if not segments:
            return arrays
        ids = (jnp.arange(tokens[1]) >= tokens[1] // 3).astype(jnp.int32)
        return arrays | {"segment_ids": jnp.tile(ids, (tokens[0], 1))}

    more = ({"G": G} if G != heads else {}) | ({"Dv": values} if values else {})
    more |= {} if window is None else {"window": window}
    more |= {} if cap is None else {"cap": cap}
    words = in_words(tokens, dtype, H=heads, D=D, **more) + (" ALiBi" if alibi else "")
    words += "" if order == "size_major" else f" {order}"
    words += "" if segments else " one document"
    seen = tokens[1] if window is None else min(2 * window, tokens[1])
    flops = 2 * tokens[0] * tokens[1] * seen * heads * D
    # If a query sees only one key, the terms of the query's and the key's gradients cancel.
    cancels = frozenset({"d_qkv", "d_k"})
    return DeviceCase("causal_attention", words, function, inputs, flops, cancels=cancels)


def attention_in_stack(
    size: Heads, tokens: Tokens, *, segments: bool = True, dtype: str = "bfloat16", **options: Any
) -> DeviceCase:
    """Return a test case for attention that writes its output into an array of two layers.

    A reversible train step calls the op like this, and its backward pass reads the output there.
    The cotangent of queries, keys and values is among the results, and so is the other layer's
    output, which must stay as it is. The case itself is not differentiated. See `attention` for the
    arguments and the options, which are all others except `values`.
    """
    whole = attention(size, tokens, segments=segments, dtype=dtype, **options)
    of_op = _options(size, **options)
    shape = (*tokens, size.heads, size.size)

    def inputs():
        return whole.inputs() | {
            "other": normal(27, dtype, *shape),
            "d_out": normal(28, dtype, *shape),
        }

    def function(implementation, qkv, other, d_out, segment_ids=None):
        given = {"segment_ids": segment_ids, "implementation": implementation} | of_op
        to = StackSlice(jnp.stack([other, other]), 1)
        stack, log_sums = pallas_kernels.attention_forward(qkv, to=to, **given)
        out = StackSlice(stack, 1)
        d_qkv = pallas_kernels.attention_backward(qkv, out, log_sums, d_out, **given)
        return {"other": stack[0], "out": stack[1], "log_sums": log_sums, "d_qkv": d_qkv}

    return DeviceCase(
        "attention_forward",
        f"{whole.size} in a stack",
        function,
        inputs,
        3 * whole.flops,
        gradients=False,
        exact={"other": "other"},
        cancels=whole.cancels,
    )


def _options(
    size: Heads,
    kv_heads: int | None = None,
    alibi: bool = False,
    order: Rows = "size_major",
    window: int | None = None,
    cap: float | None = None,
) -> dict[str, Any]:
    return {
        "scale": size.size**-0.5,
        "slopes": _slopes(size.heads) if alibi else None,
        "kv_heads": size.heads if kv_heads is None else kv_heads,
        "rows": order,
        "window": window,
        "cap": cap,
    }


def _slopes(heads: int) -> jax.Array:
    # NumPy computes the slopes, so that making a test case compiles nothing.
    return jax.device_put(np.float32(2.0 ** -(8 * np.arange(1, heads + 1) / heads)))


def attention_after(
    size: Heads,
    tokens: Tokens,
    before: int,
    dtype: str = "bfloat16",
    *,
    kv_heads: int | None = None,
    alibi: bool = False,
) -> DeviceCase:
    """Return a test case for attention in which queries also see `before` earlier tokens.

    The op computes its gradients with the plain JAX form. See `attention` for the other arguments.
    """
    heads, D = size
    G = heads if kv_heads is None else kv_heads
    slopes = _slopes(heads) if alibi else None

    def function(implementation, qkv, before, filled):
        options = {"scale": D**-0.5, "slopes": slopes, "kv_heads": G}
        options["implementation"] = implementation
        return {"out": pallas_kernels.attention_after(qkv, before, filled, **options)}

    def inputs():
        return {
            "qkv": normal(21, dtype, *tokens, heads + 2 * G, D),
            "before": normal(22, dtype, tokens[0], before, 2 * G, D),
            "filled": _filled(tokens[0], before),
        }

    more = {"G": G} if G != heads else {}
    words = in_words(tokens, dtype, H=heads, D=D, before=before, **more)
    words += " ALiBi" if alibi else ""
    flops = 4 * tokens[0] * tokens[1] * (before + tokens[1] // 2) * heads * D
    return DeviceCase("attention_after", words, function, inputs, flops)


def attention_to(
    size: Heads,
    tokens: Tokens,
    before: int,
    dtype: str = "bfloat16",
    *,
    cap: float | None = None,
) -> DeviceCase:
    """Return a test case for attention to the keys of a cache, as in decoding.

    It has no gradients.
    """
    heads, D = size

    def function(implementation, q, before, seen):
        options = {"scale": D**-0.5, "cap": cap, "implementation": implementation}
        out, log_sums = pallas_kernels.attention_to(q, before, seen, **options)
        return {"out": out, "log_sums": log_sums}

    def inputs():
        return {
            "q": normal(23, dtype, *tokens, heads, D),
            "before": normal(24, dtype, tokens[0], before, 2 * heads, D),
            "seen": jnp.arange(before)[None] < _filled(tokens[0], before)[:, None],
        }

    more = {} if cap is None else {"cap": cap}
    words = in_words(tokens, dtype, H=heads, D=D, before=before, **more)
    flops = 4 * tokens[0] * tokens[1] * before * heads * D
    return DeviceCase("attention_to", words, function, inputs, flops, gradients=False)


def _filled(batch: int, before: int) -> jax.Array:
    """Return the number of earlier tokens of each sequence; it grows by one per row."""
    return jnp.arange(before - batch, before, dtype=jnp.int32)


def delta(
    tokens: Tokens, size: Heads, dtype: str = "bfloat16", *, stepwise: bool = False
) -> DeviceCase:
    """Return a test case for linear attention with a gated delta rule, over three documents.

    The second document has at most 7 tokens, fewer than a kernel processes at a time. The initial
    state belongs to the first document.

    Args:
      tokens: the number of sequences, and of tokens in each.
      size: the number and the size of heads.
      dtype: the dtype of queries, keys and values.
      stepwise: whether the reference is the recurrence over single tokens, which keeps every state
        in memory. Otherwise it is the op's plain JAX form.
    """
    heads, D = size
    rows = *tokens, heads

    def unit(seed):
        x = np.random.default_rng(seed).standard_normal((*rows, D), np.float32)
        return jnp.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True), dtype)

    def inputs():
        place, second = np.arange(tokens[1], dtype=np.int32), tokens[1] // 3
        ids = (place >= second).astype(np.int32) + (place >= second + 7)
        return {
            "segment_ids": jnp.asarray(np.tile(np.int32(ids), (tokens[0], 1))),
            "q": unit(30),
            "k": unit(31),
            "v": normal(32, dtype, *rows, D),
            "log_decay": -jax.nn.softplus(normal(33, "float32", *rows, D) - 2),
            "beta": jax.nn.sigmoid(normal(34, "float32", *rows)),
            "state": normal(35, "float32", tokens[0], heads, D, D, scale=0.1),
        }

    def function(implementation, **arrays):
        options = {"scale": 1.0, "implementation": implementation}
        return dict(
            zip(("read", "state"), pallas_kernels.delta_attention(**arrays, **options), strict=True)
        )

    def recurrence(**arrays):
        found = delta_reference.delta_attention(**arrays, scale=1.0)
        return dict(zip(("read", "state"), found, strict=True))

    words = in_words(tokens, dtype, H=heads, D=D) + " segments"
    flops = 11 * tokens[0] * tokens[1] * heads * D**2
    reference = recurrence if stepwise else None
    return DeviceCase("delta_attention", words, function, inputs, flops, reference=reference)


# Experts and logits ---------------------------------------------------------------------------


def grouped(
    M: int,
    K: int,
    N: int,
    G: int,
    dtype: str = "bfloat16",
    *,
    alignment: int = 1,
    rowwise: bool = False,
) -> DeviceCase:
    """Return a test case for grouped matrix products.

    Each of M rows is multiplied by the matrix of its group.

    Some rows belong to no group, and one group is empty. If there are few rows, the last groups are
    empty too.

    Args:
      M: the number of rows.
      K: the length of a row.
      N: the length of a row of the product.
      G: the number of groups.
      dtype: the dtype of rows and matrices.
      alignment: a number of which the size of each group is a multiple.
      rowwise: whether the reference is one product per row, which copies a matrix for each row.
        Otherwise it is the op's plain JAX form.
    """

    def inputs():
        # The number of tiles in all groups, of which group 1 has none.
        tiles = max(1, (M - M // 10) // alignment)
        each = tiles // max(G - 1, 1)
        sizes = jnp.full(G, each * alignment, jnp.int32)
        if each == 0:
            sizes = jnp.where(jnp.arange(G) <= tiles, alignment, 0)
        return {
            "rows": normal(40, dtype, M, K),
            "matrices": normal(41, dtype, G, K, N, scale=K**-0.5),
            "sizes": sizes.at[1].set(0) if G > 1 else sizes,
        }

    def function(implementation, rows, matrices, sizes):
        grouped_rows = jnp.where(_in_a_group(rows, sizes), rows, 0)
        options = {"alignment": alignment, "implementation": implementation}
        products = pallas_kernels.grouped_matmul(grouped_rows, matrices, sizes, **options)
        # Rows without a group have undefined products, so they are replaced by zeros.
        return {"products": jnp.where(_in_a_group(rows, sizes), products, 0)}

    def by_rows(rows, matrices, sizes):
        return {"products": grouped_reference.grouped_matmul(rows, matrices, sizes)}

    words = in_words((M,), dtype, K=K, N=N, groups=G)
    words += f" in tiles of {alignment}" if alignment > 1 else ""
    reference = by_rows if rowwise else None
    return DeviceCase("grouped_matmul", words, function, inputs, 2 * M * K * N, reference=reference)


def _in_a_group(rows, sizes):
    return (jnp.arange(len(rows)) < jnp.sum(sizes))[:, None]


def stacked_product(T: int, P: int, K: int, N: int, dtype: str = "bfloat16") -> DeviceCase:
    """Return a test case for products with the matrices of one layer of two.

    Args:
      T: the number of rows.
      P: the number of matrices of a layer.
      K: the length of a row.
      N: the length of a row of the product with one matrix.
      dtype: the dtype of rows and matrices.
    """

    def inputs() -> Arrays:
        scale = K**-0.5
        return {
            "rows": normal(45, dtype, T, K),
            "matrices": normal(46, dtype, 2, P, K, N, scale=scale),
        }

    def function(implementation, rows, matrices):
        options = {"implementation": implementation}
        return {"products": pallas_kernels.product_at(1, rows, matrices, **options)}

    return DeviceCase(
        "product_at",
        in_words((T,), dtype, matrices=P, K=K, N=N),
        function,
        inputs,
        2 * T * P * K * N,
        gradients=False,
        reference=lambda rows, matrices: {
            "products": product_reference.product(rows, matrices, jnp.int32(1))
        },
    )


def token_rows(
    tokens: int, choices: int, count: int, width: int, dtype: str = "bfloat16"
) -> DeviceCase:
    """Return a test case for the gathering of rows for experts, and their sum by token.

    Each of `tokens` tokens chooses `choices` experts, and `count` rows of `width` numbers are
    gathered.
    """

    def inputs():
        order = np.random.default_rng(50).permutation(tokens * choices)[:count].astype(np.int32)
        places = np.full(tokens * choices, count, np.int32)
        places[order] = np.arange(len(order))
        # The padding rows belong to no token's choice of an expert.
        order = np.pad(order, (0, count - len(order)), constant_values=tokens * choices)
        return {
            "rows": normal(51, dtype, count, width),
            "x": normal(52, dtype, tokens, width),
            "order": jnp.asarray(order),
            "places": jnp.asarray(places),
        }

    def function(implementation, rows, x, order, places):
        options = {"implementation": implementation}
        return {
            "sums": pallas_kernels.sums_of_rows(rows, order, places, each=choices, **options),
            "rows": _zero_padding_rows(
                pallas_kernels.rows_of_tokens(x, order, places, **options), places
            ),
        }

    def reference(rows, x, order, places):
        sums = rows_reference.sums_of_rows(rows, places, each=choices)
        return {"sums": sums, "rows": _zero_padding_rows(x[order // choices], places)}

    words = in_words((tokens,), dtype, choices=choices, rows=count, width=width)
    return DeviceCase("token_rows", words, function, inputs, count * width, reference=reference)


def _zero_padding_rows(rows, places):
    """Return the gathered rows with the padding rows set to zero."""
    there = jnp.zeros(len(rows), bool).at[places].set(True, mode="drop")
    return jnp.where(there[:, None], rows, 0)


def logits(tokens: int, width: int, vocab: int, dtype: str = "bfloat16") -> DeviceCase:
    """Return a test case, without gradients, for logits and the sums that a loss needs."""

    def inputs() -> Arrays:
        targets = np.random.default_rng(62).integers(vocab, size=tokens, dtype=np.int32)
        return {
            "x": normal(60, dtype, tokens, width),
            "kernel": normal(61, dtype, width, vocab, scale=width**-0.5),
            "targets": jnp.asarray(targets),
        }

    return DeviceCase(
        "logits",
        in_words((tokens,), dtype, width=width, vocab=vocab),
        lambda implementation, x, kernel, targets: pallas_kernels.logits_with_sums(
            x, kernel, targets, implementation=implementation
        )._asdict(),
        inputs,
        2 * tokens * width * vocab,
        gradients=False,
        reference=lambda x, kernel, targets: logits_reference.logits(
            x, kernel, targets, multiplier=1.0
        )._asdict(),
        wide=frozenset({"values", "log_sums", "chosen"}),
    )
