"""Weighted sums over depth, with weights that are given for each token.

A token's source is the output of an earlier layer. For S sums (such as the four inputs of a layer
in MUDD), N rows of sources and T tokens,

    sums[s, t] = sum over i < count of weights[s, i, t] sources[i, t]

In contrast to `depth_attention`, the caller computes the weights, and any values are legal.

Implementations: "xla" (plain JAX, on any platform), "mosaic_tpu" (TPU kernels) and "pallas" (the
kernels if there are some for the platform, else plain JAX). The default, None, uses the kernels on
TPUs for at least 128 tokens. They read each source once for all sums, and do not read rows from
`count` onwards.
"""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int

from pallas_kernels.arguments import check_array
from pallas_kernels.depth_attention.checks import check_count
from pallas_kernels.depth_sums import mosaic_tpu, xla
from pallas_kernels.key_vector.calls import check_dtype
from pallas_kernels.platform import Implementations, reverse_mode

__all__ = ["depth_sums"]

Implementation = Literal["xla", "mosaic_tpu", "pallas"]
_IMPLEMENTATIONS = Implementations(
    xla, {"mosaic_tpu": mosaic_tpu}, by_default=(), name="depth_sums"
)


@reverse_mode
def depth_sums(
    weights: Float[Array, "S N *tokens"],
    sources: Float[Array, "N *tokens_D"],
    *,
    count: int | Int[Array, ""] | None = None,
    dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "N *tokens_D"], Float[Array, "S *tokens_D"]]:
    """Compute S weighted sums of the same sources; see the module's docstring for the equation.

    Args:
      weights: a weight for each sum, source and token.
      sources: the sources, with the token axes of `weights`, and then any axes.
      count: the number of sources, or None if all N rows contain a source. Rows from `count`
        onwards may contain any values, including NaN.
      dtype: the dtype of the sums; None means that of the sources. Sums are accumulated in at least
        float32.
      implementation: None chooses the fastest one for the platform that the program is lowered for.

    Returns:
      `sources` and the sums. A caller that uses the sources again must use the returned array in
      place of the argument. The backward pass then adds its gradient to that of the later uses, and
      needs no further array of N rows.

    Raises:
      UnsupportedImplementation: a named implementation is unknown or does not support this call.
      ValueError: the shapes do not fit, there is no sum or no row, `count` is not an integer from 0
        to the number of rows, or `dtype` is not a float dtype of 16 bits or more.
      TypeError: the op is differentiated in forward mode.
    """
    check_array("weights", weights, "S N ...")
    check_array("sources", sources, "N ...")
    tokens = weights.shape[2:]
    if 0 in weights.shape[:2]:
        raise ValueError(
            f"weights [S, N, *tokens] has shape {list(weights.shape)}; legal: S and N of at least 1"
        )
    if sources.shape[: 1 + len(tokens)] != weights.shape[1:]:
        raise ValueError(
            f"shapes do not fit: weights [S, N, *tokens] has shape {list(weights.shape)}, but "
            f"sources [N, *tokens, ...] has shape {list(sources.shape)}"
        )
    check_count(count, len(sources))
    T, size = math.prod(tokens), sources.shape[1 + len(tokens) :]
    rows, sums = _sums(
        implementation,
        check_dtype(sources.dtype if dtype is None else dtype).name,
        weights.reshape(*weights.shape[:2], T),
        sources.reshape(len(sources), T, *size),
        jnp.asarray(len(sources) if count is None else count, jnp.int32),
    )
    return rows.reshape(sources.shape), sums.reshape(len(weights), *sources.shape[1:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sums(implementation, dtype, weights, sources, count):
    run = functools.partial(_IMPLEMENTATIONS.run, implementation)
    return sources, run("sums", weights, sources, count, dtype=dtype)


def _sums_forward(implementation, dtype, *operands):
    return _sums(implementation, dtype, *operands), operands


def _sums_backward(implementation, dtype, operands, cotangents):
    # JAX may return saved constants as NumPy arrays, which are converted to JAX arrays.
    weights, sources, count = map(jnp.asarray, operands)
    accumulate, d_sums = cotangents
    d_weights, d_sources = _IMPLEMENTATIONS.run(
        implementation, "sums_backward", weights, sources, count, d_sums, accumulate
    )
    return d_weights.astype(weights.dtype), d_sources, None


_sums.defvjp(_sums_forward, _sums_backward)
