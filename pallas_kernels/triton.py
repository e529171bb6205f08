"""Access to Pallas's Triton backend.

Since version 0.11, JAX warns that this backend will be removed. Once it is removed, GPUs use the
portable implementations.
"""

import warnings

import jax
import jax.numpy as jnp

try:
    # JAX has no public function that registers a lowering rule.
    from jax._src.pallas.core import register_lowering_rule
    from jax.experimental.pallas import triton as plgpu
except ImportError:
    plgpu = None
else:

    class CompilerParams(plgpu.CompilerParams):
        """Triton's compiler parameters, as a class whose lowering emits no deprecation warning."""

    def _lower(ctx, *operands, **params):
        from jax._src.pallas.triton.pallas_call_registration import pallas_call_lowering

        with warnings.catch_warnings():
            words = "The Pallas Triton backend is deprecated"
            warnings.filterwarnings("ignore", words, DeprecationWarning)
            return pallas_call_lowering(ctx, *operands, **params)

    register_lowering_rule(CompilerParams, _lower, "gpu")


def no_triton() -> str | None:
    """Return the reason why GPU kernels are unavailable, or None if they are available."""
    return "this version of jax has no Triton backend for Pallas" if plgpu is None else None


def dot(a, b, *, transpose_a=False, transpose_b=False):
    """Multiply `a` and `b` on tensor cores, accumulating in float32.

    Float32 operands are each split into three bfloat16 terms, and six of the nine products of terms
    are summed, smallest first. The three products that are omitted are no larger than float32's
    rounding error.
    """
    dimensions = (((0 if transpose_a else 1,), (1 if transpose_b else 0,)), ((), ()))
    multiply = lambda a, b: jax.lax.dot_general(
        a, b, dimensions, jax.lax.Precision.DEFAULT, preferred_element_type=jnp.float32
    )
    if a.dtype == jnp.bfloat16:
        return multiply(a, b)
    a, b = _thirds(a), _thirds(b)
    order = (1, 1), (0, 2), (2, 0), (0, 1), (1, 0), (0, 0)
    return sum(multiply(a[i], b[j]) for i, j in order)


def _thirds(x):
    """Split float32 `x` into three bfloat16 terms, largest first, whose sum is exactly `x`."""
    parts = []
    for _ in range(3):
        # The low bits are masked off, because a compiler may remove a pair of casts to bfloat16 and
        # back to float32.
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
        part = jax.lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return parts
