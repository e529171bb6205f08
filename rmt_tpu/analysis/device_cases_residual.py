"""Test cases for the ops on residuals: key-vector ops and depth attention.

In key-vector ops, each token has a residual matrix of size K x V. A write stores R data vectors in
it, and a read retrieves P vectors. In depth attention, there are N sources with D numbers per
token. Each of S sites, the inputs of sublayers, takes a weighted mean of the sources.
"""

import functools

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels.arguments import Norm
from pallas_kernels.depth_attention import reference as depth_reference
from pallas_kernels.depth_attention.interface import Merge, Partial
from pallas_kernels.key_vector import reference as key_vector_reference
from pallas_kernels.shapes import Depth, KeyVector
from rmt_tpu.analysis.device_case import EPSILON, Arrays, DeviceCase, in_words, normal, only

Tokens = tuple[int, int]

# Key-vector ops -------------------------------------------------------------------------------

# These results are sums over all keys, and the terms of a sum may cancel.
_CANCELS = frozenset({"retrieved", "first", "again", "undone", "d_data"})


def site(
    size: KeyVector, tokens: Tokens, dtype: str = "bfloat16", norm: Norm = "layernorm"
) -> DeviceCase:
    """Return a test case for `store_norm_retrieve` (write, norm and read), with gradients."""
    options = {"norm": norm, "epsilon": EPSILON}

    def function(implementation, **arrays):
        stored, retrieved = pallas_kernels.store_norm_retrieve(
            **arrays, **options, implementation=implementation
        )
        return {"stored": stored, "retrieved": retrieved}

    def reference(**arrays):
        found = key_vector_reference.store_norm_retrieve(**arrays, **options)
        return dict(zip(("stored", "retrieved"), found, strict=True))

    flops = (size.R + size.P) * _flops_per_vector(size, tokens)
    inputs = functools.partial(_site_inputs, size, tokens, dtype)
    words = _site_words(size, tokens, dtype)
    return DeviceCase(
        "store_norm_retrieve",
        words,
        function,
        inputs,
        flops,
        reference=reference,
        cancels=_CANCELS,
    )


def store(size: KeyVector, tokens: Tokens, dtype: str = "bfloat16") -> DeviceCase:
    """Return a test case for `store`, a write to the residual without a read."""
    all_inputs = functools.partial(_site_inputs, size, tokens, dtype)
    return DeviceCase(
        "store",
        _site_words(size, tokens, dtype),
        lambda implementation, **arrays: {
            "stored": pallas_kernels.store(**arrays, implementation=implementation)
        },
        functools.partial(only, all_inputs, ("residual", "store_keys", "data")),
        size.R * _flops_per_vector(size, tokens),
        reference=lambda **arrays: {"stored": key_vector_reference.store(**arrays)},
    )


def norm_retrieve(
    size: KeyVector, tokens: Tokens, dtype: str = "bfloat16", norm: Norm = "layernorm"
) -> DeviceCase:
    """Return a test case for a norm and a read of the residual, without a write."""
    options = {"norm": norm, "epsilon": EPSILON}
    all_inputs = functools.partial(_site_inputs, size, tokens, dtype)
    return DeviceCase(
        "norm_retrieve",
        _site_words(size, tokens, dtype),
        lambda implementation, **arrays: {
            "retrieved": pallas_kernels.norm_retrieve(
                **arrays, **options, implementation=implementation
            )
        },
        functools.partial(only, all_inputs, ("residual", "gain", "read_keys")),
        size.P * _flops_per_vector(size, tokens),
        reference=lambda **arrays: {
            "retrieved": key_vector_reference.norm_retrieve(
                **arrays, **options, dtype=arrays["residual"].dtype
            )
        },
        cancels=_CANCELS,
    )


def undo(
    size: KeyVector, tokens: Tokens, dtype: str = "bfloat16", norm: Norm = "layernorm"
) -> DeviceCase:
    """Return a test case for a write in int16 and its undo, as in a reversible backward pass.

    The undo computes the residual before the write from the residual after it. It also computes
    gradients, which are among the results.

    The case itself is not differentiated.
    """

    def function(implementation, d_stored, d_retrieved, residual, **arrays):
        options = {"norm": norm, "implementation": implementation}
        stored, retrieved, statistics = pallas_kernels.store_norm_retrieve_with_statistics(
            residual, **arrays, epsilon=EPSILON, **options
        )
        g = pallas_kernels.undo(
            stored, statistics, **arrays, d_residual=d_stored, d_retrieved=d_retrieved, **options
        )
        gradients = {f"d_{name}": getattr(g, name) for name in ("residual", *arrays)}
        return {"stored": stored, "retrieved": retrieved, "rebuilt": g.rebuilt} | gradients

    K, V, R, P = size
    return DeviceCase(
        "undo",
        _site_words(size, tokens, dtype),
        function,
        functools.partial(_undo_inputs, size, tokens, dtype),
        3 * (R + P) * _flops_per_vector(size, tokens),
        gradients=False,
        exact={"rebuilt": "residual"},
        cancels=_CANCELS,
    )


def undo_and_reread(
    size: KeyVector, tokens: Tokens, dtype: str = "bfloat16", norm: Norm = "layernorm"
) -> DeviceCase:
    """Return a test case for two ops: an undo with a read, and the read alone.

    An undo computes the residual before a write from the residual after it, with gradients. Neither
    op is differentiated.
    """

    def function(implementation, d_stored, d_retrieved, residual, **arrays):
        options = {"norm": norm, "implementation": implementation}
        data = arrays["data"].dtype
        before = jnp.zeros_like(arrays["store_keys"]), jnp.zeros_like(arrays["data"])
        read = arrays["gain"], arrays["read_keys"]
        _, first, statistics = pallas_kernels.store_norm_retrieve_with_statistics(
            residual, *before, *read, epsilon=EPSILON, **options
        )
        retrieved = pallas_kernels.norm_retrieve_again(
            residual, statistics, *read, epsilon=EPSILON, dtype=data, **options
        )
        stored, _, later = pallas_kernels.store_norm_retrieve_with_statistics(
            residual, **arrays, epsilon=EPSILON, **options
        )
        g = pallas_kernels.undo(
            stored,
            later,
            **arrays,
            d_residual=d_stored,
            d_retrieved=d_retrieved,
            again=pallas_kernels.Reread(*read, statistics),
            **options,
        )
        return {"first": first, "again": retrieved, "undone": g.retrieved, "rebuilt": g.rebuilt}

    return DeviceCase(
        "norm_retrieve_again",
        _site_words(size, tokens, dtype),
        function,
        functools.partial(_undo_inputs, size, tokens, dtype),
        (3 * size.R + 6 * size.P) * _flops_per_vector(size, tokens),
        gradients=False,
        exact={"rebuilt": "residual"},
        cancels=_CANCELS,
    )


def site_at(size: KeyVector, batch: int, dtype: str = "bfloat16") -> DeviceCase:
    """Return a test case for a write, norm and read with the parameters of one layer of two.

    There is one token per row of the batch, as in decoding. The kernels have no gradients.
    """
    tokens = (batch, 1)

    def inputs():
        arrays = _site_inputs(size, tokens, dtype)
        of_layers = lambda x: jnp.stack([jnp.zeros_like(x), x])  # Only layer 1 is used.
        return arrays | {k: of_layers(arrays[k]) for k in ("store_keys", "gain", "read_keys")}

    def function(implementation, **arrays):
        stored, retrieved = pallas_kernels.store_norm_retrieve_at(
            1, **arrays, implementation=implementation
        )
        return {"stored": stored, "retrieved": retrieved}

    flops = (size.R + size.P) * _flops_per_vector(size, tokens)
    words = _site_words(size, tokens, dtype)
    return DeviceCase(
        "store_norm_retrieve_at",
        words,
        function,
        inputs,
        flops,
        gradients=False,
        cancels=_CANCELS,
    )


def _flops_per_vector(size: KeyVector, tokens: Tokens) -> int:
    return 2 * tokens[0] * tokens[1] * size.K * size.V


def _site_words(size: KeyVector, tokens: Tokens, dtype: str) -> str:
    return in_words(tokens, dtype, **size._asdict())


def _site_inputs(size: KeyVector, tokens: Tokens, dtype: str) -> Arrays:
    K, V, R, P = size
    return {
        "residual": normal(0, dtype, *tokens, K, V),
        "store_keys": normal(1, "float32", R, K, scale=max(R, 1) ** -0.5),
        "data": normal(2, dtype, *tokens, R, V),
        "gain": 1 + normal(3, "float32", K, V, scale=0.1),
        "read_keys": normal(4, "float32", P, K, scale=K**-0.5),
    }


def _undo_inputs(size: KeyVector, tokens: Tokens, dtype: str) -> Arrays:
    K, V, _, P = size
    inputs = _site_inputs(size, tokens, dtype)
    residual = pallas_kernels.to_fixed_point(inputs["residual"].astype(jnp.float32))
    cotangents = {
        "d_stored": normal(5, dtype, *tokens, K, V),
        "d_retrieved": normal(6, dtype, *tokens, P, V),
    }
    return inputs | cotangents | {"residual": residual}


# Depth attention ------------------------------------------------------------------------------

# The number of vectors that a merge with a read retrieves.
_READ = 12


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
    size: Depth, tokens: Tokens, matrix: Tokens | None = None, dtype: str = "bfloat16"
) -> DeviceCase:
    """Return a test case for depth attention of several sites at once, over the same sources.

    The sources are vectors, or K x V matrices if `matrix` gives K and V.
    """

    def function(implementation, queries, sources):
        mixed, log_sums = pallas_kernels.depth_attention_partial(
            queries, sources, implementation=implementation
        )
        return {"mixed": mixed, "log_sums": log_sums}

    return DeviceCase(
        "depth_attention_matrices_partial" if matrix else "depth_attention_partial",
        _depth_words(size, tokens, matrix, dtype),
        function,
        functools.partial(_partial_inputs, size, tokens, matrix or (size.D,), dtype),
        4 * size.S * size.N * tokens[0] * tokens[1] * size.D,
        reference=_partial_plainly,
    )


def merge(
    size: Depth, tokens: Tokens, matrix: Tokens | None = None, dtype: str = "bfloat16"
) -> DeviceCase:
    """Return a test case that adds one more source to the depth attention of a site.

    A partial result covers the earlier sources, and the merged site is its last one.

    If the residual is a vector, the merge also normalizes its result.
    """

    def function(implementation, mixed, log_sums, current, query, norm_gain=None):
        mixed, current, z = pallas_kernels.depth_attention_merge(
            mixed,
            log_sums,
            len(mixed) - 1,
            current,
            query,
            norm_gain,
            norm=None if norm_gain is None else "layernorm",
            implementation=implementation,
        )
        return {"mixed": mixed, "current": current, "z": z}

    return DeviceCase(
        "depth_attention_matrices_merge" if matrix else "depth_attention_merge",
        _depth_words(size, tokens, matrix, dtype),
        function,
        functools.partial(_merge_inputs, size, tokens, matrix or (size.D,), dtype),
        15 * tokens[0] * tokens[1] * size.D,
        reference=_merge_plainly,
    )


def merge_read(size: Depth, tokens: Tokens, matrix: Tokens, dtype: str = "bfloat16") -> DeviceCase:
    """Return a test case for a kernel that merges matrices, norms the result and reads it."""

    def function(implementation, mixed, log_sums, current, **arrays):
        mixed, current, z = pallas_kernels.depth_attention_merge_read(
            mixed, log_sums, len(mixed) - 1, current, **arrays, implementation=implementation
        )
        return {"mixed": mixed, "current": current, "z": z}

    def inputs():
        arrays = _merge_inputs(size, tokens, matrix, dtype)
        arrays["norm_gain"] = 1 + normal(16, "float32", *matrix, scale=0.1)
        keys = normal(17, "float32", _READ, matrix[0], scale=matrix[0] ** -0.5)
        return arrays | {"read_keys": keys}

    flops = (15 + 2 * _READ) * tokens[0] * tokens[1] * size.D
    words = _depth_words(size, tokens, matrix, dtype)
    return DeviceCase("depth_attention_merge_read", words, function, inputs, flops)


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

    words = _depth_words(size, tokens, None, dtype)
    flops = 15 * batch * size.D
    return DeviceCase("depth_attention_merge_at", words, function, inputs, flops, gradients=False)


def _depth_words(size: Depth, tokens: Tokens, matrix: Tokens | None, dtype: str) -> str:
    S, N, D = size
    sizes = {"K": matrix[0], "V": matrix[1]} if matrix else {"D": D}
    return in_words(tokens, dtype, S=S, N=N, **sizes)


def _partial_inputs(size: Depth, tokens: Tokens, entries, dtype: str) -> Arrays:
    return {
        "queries": normal(10, "float32", size.S, *entries, scale=0.1),
        "sources": normal(11, dtype, size.N, *tokens, *entries),
    }


def _partial_plainly(queries, sources) -> Arrays:
    S, (N, B, T, *entries) = len(queries), sources.shape
    operands = Partial(queries.reshape(S, -1), sources.reshape(N, B * T, -1), N, None)
    mixed, log_sums = depth_reference.partial(operands, epsilon=EPSILON)
    return {
        "mixed": mixed.reshape(S, B, T, *entries),
        "log_sums": log_sums.reshape(S, B, T),
    }


def _merge_inputs(size: Depth, tokens: Tokens, entries, dtype: str) -> Arrays:
    inputs = {
        "mixed": normal(12, dtype, size.S, *tokens, *entries),
        "log_sums": normal(13, "float32", *tokens),
        "current": normal(14, dtype, *tokens, *entries),
        "query": normal(15, "float32", *entries, scale=0.1),
    }
    if len(entries) > 1:
        return inputs
    return inputs | {"norm_gain": 1 + normal(16, "float32", *entries, scale=0.1)}


def _merge_plainly(mixed, log_sums, current, query, norm_gain=None) -> Arrays:
    S, tokens = len(mixed), log_sums.size
    flat = mixed.reshape(S, tokens, -1), log_sums.reshape(-1), S - 1, current.reshape(tokens, -1)
    norm = None if norm_gain is None else "layernorm"
    z = depth_reference.merge(
        Merge(query.reshape(-1), *flat, True, norm_gain),
        norm=norm,
        epsilon=EPSILON,
        norm_epsilon=EPSILON,
    )
    # No later site reads this site's row of `mixed`, so the op ignores the row's gradient.
    mixed = mixed.at[-1].set(jax.lax.stop_gradient(mixed[-1]))
    return {"mixed": mixed, "current": current, "z": z.reshape(current.shape)}
