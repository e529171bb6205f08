"""Test cases for depth attention and for weighted sums over depth.

There are N sources with D numbers per token. Each of S sites, the inputs of sublayers, takes a
weighted mean of the sources.
"""

import functools
import math

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels.arguments import Norm
from pallas_kernels.depth_attention import reference as depth_reference
from pallas_kernels.depth_attention.interface import Merge, Partial
from pallas_kernels.depth_sums import reference as sums_reference
from pallas_kernels.shapes import Depth
from rmt_tpu.analysis.device_case import EPSILON, Arrays, DeviceCase, in_words, normal

Tokens = tuple[int, int]


def depth_attention(size: Depth, tokens: Tokens, dtype: str = "bfloat16") -> DeviceCase:
    """Return a test case for depth attention at one site (a sublayer's input), over all sources."""
    _, N, D = size
    return DeviceCase(
        "depth_attention",
        _depth_words(size, tokens, None, dtype),
        lambda implementation, queries, sources: {
            "mixed": pallas_kernels.depth_attention(
                queries[0], sources, implementation=implementation
            )
        },
        functools.partial(_partial_inputs, size._replace(S=1), tokens, (D,), dtype),
        4 * N * tokens[0] * tokens[1] * D,
        reference=lambda queries, sources: {
            "mixed": _partial_plainly(queries[:1], sources)["mixed"][0]
        },
    )


def partial(
    size: Depth,
    tokens: Tokens,
    matrix: Tokens | None = None,
    dtype: str = "bfloat16",
    *,
    prior: bool = False,
) -> DeviceCase:
    """Return a test case for depth attention of several sites at once, over the same sources.

    The sources are vectors, or K x V matrices if `matrix` gives K and V. With `prior`, the result
    of another such call, over other sources, is one more source.
    """

    def function(implementation, queries, sources, **of_prior):
        mixed, log_sums = pallas_kernels.depth_attention_partial(
            queries, sources, prior=_prior(**of_prior), implementation=implementation
        )
        return {"mixed": mixed, "log_sums": log_sums}

    return DeviceCase(
        "depth_attention_matrices_partial" if matrix else "depth_attention_partial",
        _depth_words(size, tokens, matrix, dtype) + (" prior" if prior else ""),
        function,
        functools.partial(_partial_inputs, size, tokens, matrix or (size.D,), dtype, prior),
        4 * size.S * size.N * tokens[0] * tokens[1] * size.D,
        reference=_partial_plainly,
    )


def partial_backward(
    size: Depth, tokens: Tokens, matrix: Tokens | None = None, dtype: str = "bfloat16"
) -> DeviceCase:
    """Return a test case for `partial` and its backward pass, which adds to an accumulator.

    The last row of the sources is empty if there are several. It contains NaN, as memory that
    nothing has been written to may, and its row of the accumulator (`kept`) must not change.
    """
    name = "depth_attention_matrices_partial" if matrix else "depth_attention_partial"
    count = max(1, size.N - 1)
    entries = matrix or (size.D,)

    def inputs():
        arrays = _partial_inputs(size, tokens, entries, dtype)
        accumulate = normal(18, dtype, size.N, *tokens, *entries)
        return arrays | {
            "sources": arrays["sources"].at[count:].set(jnp.nan),
            "d_mixed": normal(19, dtype, size.S, *tokens, *entries),
            "d_log_sums": normal(20, "float32", size.S, *tokens),
            "accumulate": accumulate[:count],
            "kept": accumulate[count:],
        }

    def function(implementation, queries, sources, d_mixed, d_log_sums, accumulate, kept):
        options = {"count": count, "implementation": implementation}
        mixed, log_sums = pallas_kernels.depth_attention_partial(queries, sources, **options)
        g = pallas_kernels.depth_attention_partial_backward(
            *(queries, sources, mixed, log_sums, d_mixed, d_log_sums),
            accumulate=jnp.concatenate([accumulate, kept]),
            **options,
        )
        found = {"mixed": mixed, "log_sums": log_sums, "d_queries": g.queries}
        return found | {"d_sources": g.sources[:count], "kept": g.sources[count:]}

    def reference(queries, sources, d_mixed, d_log_sums, accumulate, kept):
        out, pullback = jax.vjp(_partial_plainly, queries, sources[:count])
        d_queries, d_sources = pullback({"mixed": d_mixed, "log_sums": d_log_sums})
        return out | {"d_queries": d_queries, "d_sources": accumulate + d_sources, "kept": kept}

    return DeviceCase(
        f"{name}_backward",
        _depth_words(size, tokens, matrix, dtype) + " accumulate",
        function,
        inputs,
        12 * size.S * count * tokens[0] * tokens[1] * size.D,
        gradients=False,
        reference=reference,
        exact={"kept": "kept"},
    )


def merge(
    size: Depth,
    tokens: Tokens,
    matrix: Tokens | None = None,
    dtype: str = "bfloat16",
    norm: Norm | None = "layernorm",
) -> DeviceCase:
    """Return a test case that adds one more source to the depth attention of a site.

    A partial result covers the earlier sources, and the merged site is its last one.

    If the residual is a vector, the merge also normalizes its result, unless `norm` is None. For a
    matrix, `norm` is ignored.
    """
    norm = None if matrix else norm

    def function(implementation, mixed, log_sums, current, query, norm_gain=None):
        mixed, current, z = pallas_kernels.depth_attention_merge(
            mixed,
            log_sums,
            len(mixed) - 1,
            current,
            query,
            norm_gain,
            norm=norm,
            implementation=implementation,
        )
        return {"mixed": mixed, "current": current, "z": z}

    return DeviceCase(
        "depth_attention_matrices_merge" if matrix else "depth_attention_merge",
        _depth_words(size, tokens, matrix, dtype) + ("" if matrix else f" {norm or 'no norm'}"),
        function,
        functools.partial(_merge_inputs, size, tokens, matrix or (size.D,), dtype, norm=norm),
        15 * tokens[0] * tokens[1] * size.D,
        reference=functools.partial(_merge_plainly, norm),
    )


def merge_read(
    size: Depth,
    tokens: Tokens,
    matrix: Tokens,
    dtype: str = "bfloat16",
    norm: Norm = "layernorm",
    *,
    reads: int = 12,
    residual_dtype: str | None = None,
) -> DeviceCase:
    """Return a test case for a kernel that merges matrices, norms the result and reads it.

    It retrieves `reads` vectors in `dtype`. The matrices have the dtype `residual_dtype`; None
    means the same.
    """
    of_matrices = residual_dtype or dtype

    def run(read_dtype, implementation, mixed, log_sums, current, **arrays):
        options = {"norm": norm, "dtype": read_dtype, "implementation": implementation}
        mixed, current, z = pallas_kernels.depth_attention_merge_read(
            mixed, log_sums, len(mixed) - 1, current, **arrays, **options
        )
        return {"mixed": mixed, "current": current, "z": z}

    def inputs():
        arrays = _merge_inputs(size, tokens, matrix, of_matrices)
        arrays["norm_gain"] = 1 + normal(16, "float32", *matrix, scale=0.1)
        keys = normal(17, "float32", reads, matrix[0], scale=matrix[0] ** -0.5)
        return arrays | {"read_keys": keys}

    flops = (15 + 2 * reads) * tokens[0] * tokens[1] * size.D
    words = f"{_depth_words(size, tokens, matrix, dtype)} P={reads} {norm}"
    words += "" if of_matrices == dtype else f" residual {of_matrices}"
    return DeviceCase(
        "depth_attention_merge_read",
        words,
        functools.partial(run, dtype),
        inputs,
        flops,
        # The reference has float32 inputs, and reads in their dtype.
        reference=functools.partial(run, None, "xla"),
        narrow=dtype != "float32",
    )


def merge_at(size: Depth, batch: int, dtype: str = "bfloat16") -> DeviceCase:
    """Return a test case for `depth_attention_merge_at` with one layer of two.

    The op merges a site's depth attention with one more source, for one token per row.

    The kernels have no gradients.
    """
    tokens = (batch, 1)

    def inputs():
        arrays = _merge_inputs(size, tokens, (size.D,), dtype)
        parameters_of_layer = jnp.stack([arrays.pop("query"), arrays.pop("norm_gain")])
        arrays["log_sums"] = jnp.stack([arrays["log_sums"]] * size.S)
        return arrays | {
            "parameters": jnp.stack([jnp.zeros_like(parameters_of_layer), parameters_of_layer])
        }

    def function(implementation, parameters, mixed, log_sums, current):
        z = pallas_kernels.depth_attention_merge_at(
            1,
            parameters,
            mixed,
            log_sums,
            len(mixed) - 1,
            current,
            implementation=implementation,
        )
        return {"z": z}

    words = _depth_words(size, tokens, None, dtype) + " layernorm"
    flops = 15 * batch * size.D
    return DeviceCase("depth_attention_merge_at", words, function, inputs, flops, gradients=False)


def sums(size: Depth, tokens: tuple[int, ...], dtype: str = "bfloat16") -> DeviceCase:
    """Return a test case for weighted sums over depth, with weights that are given per token.

    There are S sums. The last row of the sources is empty. Its gradient is that of the returned
    sources, which are used again.
    """
    S, N, D = size
    count = N - 1

    def function(implementation, weights, sources):
        rows, totals = pallas_kernels.depth_sums(
            weights, sources, count=count, implementation=implementation
        )
        return {"sources": rows, "sums": totals}

    def inputs():
        return {
            "weights": normal(23, "float32", S, N, *tokens),
            "sources": normal(24, dtype, N, *tokens, D),
        }

    def reference(weights, sources):
        T = math.prod(tokens)
        totals = sums_reference.sums(weights.reshape(S, N, T), sources.reshape(N, T, D), count)
        return {"sources": sources, "sums": totals.reshape(S, *tokens, D)}

    words = in_words(tokens, dtype, S=S, N=N, D=D)
    flops = 2 * S * count * math.prod(tokens) * D
    return DeviceCase("depth_sums", words, function, inputs, flops, reference=reference)


def _depth_words(size: Depth, tokens: Tokens, matrix: Tokens | None, dtype: str) -> str:
    S, N, D = size
    sizes = {"K": matrix[0], "V": matrix[1]} if matrix else {"D": D}
    return in_words(tokens, dtype, S=S, N=N, **sizes)


def _partial_inputs(
    size: Depth, tokens: Tokens, entries, dtype: str, prior: bool = False
) -> Arrays:
    inputs = {
        "queries": normal(10, "float32", size.S, *entries, scale=0.1),
        "sources": normal(11, dtype, size.N, *tokens, *entries),
    }
    if not prior:
        return inputs
    return inputs | {
        "prior_mixed": normal(21, dtype, size.S, *tokens, *entries),
        "prior_log_sums": normal(22, "float32", size.S, *tokens),
    }


def _prior(prior_mixed=None, prior_log_sums=None):
    return None if prior_mixed is None else (prior_mixed, prior_log_sums)


def _partial_plainly(queries, sources, prior_mixed=None, prior_log_sums=None) -> Arrays:
    S, (N, B, T, *entries) = len(queries), sources.shape
    flat = queries.reshape(S, -1), sources.reshape(N, B * T, -1)
    prior = _prior(prior_mixed, prior_log_sums)
    if prior is not None:
        prior = prior_mixed.reshape(S, B * T, -1), prior_log_sums.reshape(S, B * T)
    operands = Partial(*flat, N, prior)
    mixed, log_sums = depth_reference.partial(operands, epsilon=EPSILON)
    return {
        "mixed": mixed.reshape(S, B, T, *entries),
        "log_sums": log_sums.reshape(S, B, T),
    }


def _merge_inputs(
    size: Depth, tokens: Tokens, entries, dtype: str, norm: Norm | None = None
) -> Arrays:
    inputs = {
        "mixed": normal(12, dtype, size.S, *tokens, *entries),
        "log_sums": normal(13, "float32", *tokens),
        "current": normal(14, dtype, *tokens, *entries),
        "query": normal(15, "float32", *entries, scale=0.1),
    }
    if norm is None:
        return inputs
    return inputs | {"norm_gain": 1 + normal(16, "float32", *entries, scale=0.1)}


def _merge_plainly(norm, mixed, log_sums, current, query, norm_gain=None) -> Arrays:
    S, tokens = len(mixed), log_sums.size
    flat = mixed.reshape(S, tokens, -1), log_sums.reshape(-1), S - 1, current.reshape(tokens, -1)
    z = depth_reference.merge(
        Merge(query.reshape(-1), *flat, True, norm_gain),
        norm=norm,
        epsilon=EPSILON,
        norm_epsilon=EPSILON,
    )
    # No later site reads this site's row of `mixed`, so the op ignores the row's gradient.
    mixed = mixed.at[-1].set(jax.lax.stop_gradient(mixed[-1]))
    return {"mixed": mixed, "current": current, "z": z.reshape(current.shape)}
