"""Test cases for key-vector ops.

Each token has a residual matrix of size K x V. A write stores R data vectors in it, and a read
retrieves P vectors.
"""

import functools

import jax.numpy as jnp

import pallas_kernels
from pallas_kernels.arguments import Norm
from pallas_kernels.key_vector import reference as key_vector_reference
from pallas_kernels.shapes import KeyVector
from rmt_tpu.analysis.device_case import EPSILON, Arrays, DeviceCase, in_words, normal, only

Tokens = tuple[int, int]

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
    words = _site_words(size, tokens, dtype, norm)
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
        _site_words(size, tokens, dtype, None),
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
        _site_words(size, tokens, dtype, norm),
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
        _site_words(size, tokens, dtype, norm),
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
        _site_words(size, tokens, dtype, norm),
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
    words = _site_words(size, tokens, dtype, "layernorm")
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


def _site_words(size: KeyVector, tokens: Tokens, dtype: str, norm: Norm | None) -> str:
    # The words identify the record of a check, so they name everything that a kernel depends on.
    return in_words(tokens, dtype, **size._asdict()) + (f" {norm}" if norm else "")


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
