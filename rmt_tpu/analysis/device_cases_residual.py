"""Test cases for key-vector ops.

Each token has a residual matrix of size K x V. A write stores R data vectors in it, and a read
retrieves P vectors.
"""

import functools
from collections.abc import Iterable

import jax.numpy as jnp

import pallas_kernels
from pallas_kernels import StackSlice, Statistics
from pallas_kernels.arguments import Norm
from pallas_kernels.key_vector import reference as key_vector_reference
from pallas_kernels.key_vector.interface import FRACTION_BITS
from pallas_kernels.shapes import KeyVector
from rmt_tpu.analysis.device_case import EPSILON, Arrays, DeviceCase, in_words, normal, only

Tokens = tuple[int, int]

# These results are sums over all keys, and the terms of a sum may cancel.
_CANCELS = frozenset({"retrieved", "first", "again", "undone", "d_data"})
# What a reversible backward pass has in arrays of all layers.
_OF_LAYER = ("store_keys", "data", "gain", "read_keys")


def site(
    size: KeyVector,
    tokens: Tokens,
    dtype: str = "bfloat16",
    norm: Norm = "layernorm",
    *,
    residual_dtype: str | None = None,
) -> DeviceCase:
    """Return a test case for `store_norm_retrieve` (write, norm and read), with gradients.

    Here and below, `dtype` is the dtype of the vectors, and `residual_dtype` is that of the
    residual; None means the same.
    """
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
    inputs = functools.partial(_site_inputs, size, tokens, dtype, residual_dtype)
    words = _site_words(size, tokens, dtype, norm, residual_dtype)
    return DeviceCase(
        "store_norm_retrieve",
        words,
        function,
        inputs,
        flops,
        reference=reference,
        cancels=_CANCELS,
    )


def store(
    size: KeyVector,
    tokens: Tokens,
    dtype: str = "bfloat16",
    *,
    residual_dtype: str | None = None,
) -> DeviceCase:
    """Return a test case for `store`, a write to the residual without a read."""
    all_inputs = functools.partial(_site_inputs, size, tokens, dtype, residual_dtype)
    return DeviceCase(
        "store",
        _site_words(size, tokens, dtype, None, residual_dtype),
        lambda implementation, **arrays: {
            "stored": pallas_kernels.store(**arrays, implementation=implementation)
        },
        functools.partial(only, all_inputs, ("residual", "store_keys", "data")),
        size.R * _flops_per_vector(size, tokens),
        reference=lambda **arrays: {"stored": key_vector_reference.store(**arrays)},
    )


def store_forward(
    size: KeyVector,
    tokens: Tokens,
    dtype: str = "bfloat16",
    *,
    residual_dtype: str | None = None,
) -> DeviceCase:
    """Return a test case for writes in place: one to an empty residual, and one after it.

    The empty residual contains NaN, which the first write must overwrite.
    """

    def inputs():
        arrays = _site_inputs(size, tokens, dtype, residual_dtype)
        arrays["residual"] = jnp.full_like(arrays["residual"], jnp.nan)
        return {name: arrays[name] for name in ("residual", "store_keys", "data")}

    def function(implementation, residual, **arrays):
        options = {"implementation": implementation}
        empty = jnp.array([True, False])  # As an array, it is not known when the call is traced.
        first = pallas_kernels.store_forward(residual, **arrays, empty=empty[0], **options)
        stored = pallas_kernels.store_forward(first, **arrays, empty=empty[1], **options)
        return {"first": first, "stored": stored}

    def reference(residual, **arrays):
        first = key_vector_reference.store(jnp.zeros_like(residual), **arrays)
        return {"first": first, "stored": key_vector_reference.store(first, **arrays)}

    return DeviceCase(
        "store_forward",
        _site_words(size, tokens, dtype, None, residual_dtype),
        function,
        inputs,
        2 * size.R * _flops_per_vector(size, tokens),
        gradients=False,
        reference=reference,
    )


def norm_retrieve(
    size: KeyVector,
    tokens: Tokens,
    dtype: str = "bfloat16",
    norm: Norm = "layernorm",
    *,
    residual_dtype: str | None = None,
) -> DeviceCase:
    """Return a test case for a norm and a read of the residual, without a write."""
    options = {"norm": norm, "epsilon": EPSILON}
    all_inputs = functools.partial(_site_inputs, size, tokens, dtype, residual_dtype)
    return DeviceCase(
        "norm_retrieve",
        _site_words(size, tokens, dtype, norm, residual_dtype),
        lambda implementation, **arrays: {
            "retrieved": pallas_kernels.norm_retrieve(
                **arrays, **options, dtype=dtype, implementation=implementation
            )
        },
        functools.partial(only, all_inputs, ("residual", "gain", "read_keys")),
        size.P * _flops_per_vector(size, tokens),
        reference=lambda **arrays: {
            "retrieved": key_vector_reference.norm_retrieve(
                **arrays, **options, dtype=arrays["residual"].dtype
            )
        },
        narrow=dtype != "float32",
        cancels=_CANCELS,
    )


def undo(
    size: KeyVector,
    tokens: Tokens,
    dtype: str = "bfloat16",
    norm: Norm = "layernorm",
    *,
    residual_dtype: str = "int16",
    fraction_bits: int = FRACTION_BITS,
    in_stacks: bool = False,
) -> DeviceCase:
    """Return a test case for a write and its undo, as in a reversible backward pass.

    The undo computes the residual before the write from the residual after it, exactly if it is
    int16. It also computes gradients, which are among the results. `fraction_bits` are those of an
    int16 residual. With `in_stacks`, keys, gain, vectors and statistics are those of the last of
    two layers, and kernels read them from arrays of both layers.

    The case itself is not differentiated.
    """
    of_residual = residual_dtype, fraction_bits

    def inputs():
        arrays = _undo_inputs(size, tokens, dtype, *of_residual)
        return _two_layers(arrays, _OF_LAYER) if in_stacks else arrays

    def function(implementation, d_stored, d_retrieved, residual, **arrays):
        options = {"norm": norm, "fraction_bits": fraction_bits, "implementation": implementation}
        arrays = _last_layer(arrays) if in_stacks else arrays
        stored, retrieved, statistics = pallas_kernels.store_norm_retrieve_with_statistics(
            residual, **arrays, epsilon=EPSILON, **options
        )
        g = pallas_kernels.undo(
            stored,
            _in_a_stack(statistics) if in_stacks else statistics,
            **arrays,
            d_residual=d_stored,
            d_retrieved=d_retrieved,
            retrieved=retrieved,
            **options,
        )
        gradients = {f"d_{name}": getattr(g, name) for name in ("residual", *arrays)}
        return {"stored": stored, "retrieved": retrieved, "rebuilt": g.rebuilt} | gradients

    K, V, R, P = size
    return DeviceCase(
        "undo",
        _undo_words(size, tokens, dtype, norm, *of_residual, in_stacks),
        function,
        inputs,
        3 * (R + P) * _flops_per_vector(size, tokens),
        gradients=False,
        exact={"rebuilt": "residual"} if residual_dtype == "int16" else {},
        cancels=_CANCELS,
    )


def undo_and_reread(
    size: KeyVector,
    tokens: Tokens,
    dtype: str = "bfloat16",
    norm: Norm = "layernorm",
    *,
    residual_dtype: str = "int16",
    fraction_bits: int = FRACTION_BITS,
    again: int | None = None,
    in_stacks: bool = False,
) -> DeviceCase:
    """Return a test case for two ops: an undo with a read, and the read alone.

    An undo computes the residual before a write from the residual after it, with gradients. The
    read retrieves `again` vectors from the residual before the write; None means P. Neither op is
    differentiated. See `undo` for the other arguments.
    """
    of_residual = residual_dtype, fraction_bits
    again = size.P if again is None else again

    def inputs():
        arrays = _undo_inputs(size, tokens, dtype, *of_residual)
        arrays["gain_again"] = 1 + normal(7, "float32", size.K, size.V, scale=0.1)
        arrays["keys_again"] = normal(8, "float32", again, size.K, scale=size.K**-0.5)
        of_layer = (*_OF_LAYER, "gain_again", "keys_again")
        return _two_layers(arrays, of_layer) if in_stacks else arrays

    def function(implementation, d_stored, d_retrieved, residual, **arrays):
        options = {"norm": norm, "fraction_bits": fraction_bits, "implementation": implementation}
        arrays = _last_layer(arrays) if in_stacks else arrays
        read = arrays.pop("gain_again"), arrays.pop("keys_again")
        data = arrays["data"].dtype
        before = [jnp.zeros(x.shape, x.dtype) for x in (arrays["store_keys"], arrays["data"])]
        _, first, statistics = pallas_kernels.store_norm_retrieve_with_statistics(
            residual, *before, *read, epsilon=EPSILON, **options
        )
        statistics = _in_a_stack(statistics) if in_stacks else statistics
        reread = pallas_kernels.norm_retrieve_again(
            residual, statistics, *read, epsilon=EPSILON, dtype=data, **options
        )
        stored, retrieved, later = pallas_kernels.store_norm_retrieve_with_statistics(
            residual, **arrays, epsilon=EPSILON, **options
        )
        g = pallas_kernels.undo(
            stored,
            _in_a_stack(later) if in_stacks else later,
            **arrays,
            d_residual=d_stored,
            d_retrieved=d_retrieved,
            retrieved=retrieved,
            again=pallas_kernels.Reread(*read, statistics),
            **options,
        )
        return {"first": first, "again": reread, "undone": g.retrieved, "rebuilt": g.rebuilt}

    more = {} if again == size.P else {"again": again}
    return DeviceCase(
        "norm_retrieve_again",
        _undo_words(size, tokens, dtype, norm, *of_residual, in_stacks, **more),
        function,
        inputs,
        (3 * size.R + 2 * size.P + 4 * again) * _flops_per_vector(size, tokens),
        gradients=False,
        exact={"rebuilt": "residual"} if residual_dtype == "int16" else {},
        cancels=_CANCELS,
    )


def site_at(size: KeyVector, batch: int) -> DeviceCase:
    """Return a test case for a write, norm and read with the parameters of one layer of two.

    There is one token per row of the batch, as in decoding. The kernels have no gradients.
    """
    tokens = (batch, 1)

    def inputs():
        arrays = _site_inputs(size, tokens, "bfloat16")
        return _two_layers(arrays, ("store_keys", "gain", "read_keys"))

    def function(implementation, **arrays):
        stored, retrieved = pallas_kernels.store_norm_retrieve_at(
            1, **arrays, implementation=implementation
        )
        return {"stored": stored, "retrieved": retrieved}

    flops = (size.R + size.P) * _flops_per_vector(size, tokens)
    words = _site_words(size, tokens, "bfloat16", "layernorm")
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


def _site_words(
    size: KeyVector,
    tokens: Tokens,
    dtype: str,
    norm: Norm | None,
    residual_dtype: str | None = None,
    **more: int,
) -> str:
    # The words identify the record of a check, so they name everything that a kernel depends on.
    words = in_words(tokens, dtype, **size._asdict(), **more) + (f" {norm}" if norm else "")
    other = residual_dtype not in (None, dtype)
    return f"{words} residual {residual_dtype}" if other else words


def _undo_words(size, tokens, dtype, norm, residual_dtype, fraction_bits, in_stacks, **more) -> str:
    bits = {"bits": fraction_bits} if residual_dtype == "int16" else {}
    words = _site_words(size, tokens, dtype, norm, residual_dtype, **more, **bits)
    return f"{words} in stacks" if in_stacks else words


def _two_layers(arrays: Arrays, names: Iterable[str]) -> Arrays:
    """Return `arrays` with those in `names` stacked: zeros, and then the array itself."""
    return arrays | {k: jnp.stack([jnp.zeros_like(arrays[k]), arrays[k]]) for k in names}


def _last_layer(arrays: Arrays) -> dict[str, StackSlice]:
    return {name: StackSlice(x, 1) for name, x in arrays.items()}


def _in_a_stack(statistics: Statistics) -> Statistics:
    both = statistics.both
    return Statistics(StackSlice(jnp.stack([jnp.zeros_like(both), both]), 1))


def _site_inputs(
    size: KeyVector, tokens: Tokens, dtype: str, residual_dtype: str | None = None
) -> Arrays:
    K, V, R, P = size
    return {
        "residual": normal(0, residual_dtype or dtype, *tokens, K, V),
        "store_keys": normal(1, "float32", R, K, scale=max(R, 1) ** -0.5),
        "data": normal(2, dtype, *tokens, R, V),
        "gain": 1 + normal(3, "float32", K, V, scale=0.1),
        "read_keys": normal(4, "float32", P, K, scale=K**-0.5),
    }


def _undo_inputs(
    size: KeyVector, tokens: Tokens, dtype: str, residual_dtype: str, fraction_bits: int
) -> Arrays:
    K, V, _, P = size
    inputs = _site_inputs(size, tokens, dtype, "float32")
    cotangents = {
        "d_stored": normal(5, dtype, *tokens, K, V),
        "d_retrieved": normal(6, dtype, *tokens, P, V),
    }
    if residual_dtype != "int16":
        return inputs | cotangents | {"residual": inputs["residual"].astype(residual_dtype)}
    # With this factor, the residual fits in its range, and has a spread of many steps. Its inverse
    # scales the cotangent, so that the two terms of the gradient keep their proportion.
    factor = min(2.0 ** (9 - fraction_bits), max(1.0, 2.0 ** (7 - fraction_bits)))
    inputs["data"] *= jnp.asarray(factor, dtype)
    cotangents["d_stored"] *= jnp.asarray(1 / factor, dtype)
    residual = pallas_kernels.to_fixed_point(factor * inputs["residual"], fraction_bits)
    return inputs | cotangents | {"residual": residual}
