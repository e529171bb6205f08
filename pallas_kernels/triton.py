"""Pallas's Triton backend. JAX says since 0.11 that it will go: the portable forms then serve."""

import warnings

import jax
import jax.numpy as jnp

try:
    # Lowering rules have no public name.
    from jax._src.pallas.core import register_lowering_rule
    from jax.experimental.pallas import triton as plgpu
except ImportError:
    plgpu = None
else:

    class CompilerParams(plgpu.CompilerParams):
        """Of this package's kernels, which are lowered without a warning that JAX gives of each."""

    def _lower(ctx, *operands, **params):
        from jax._src.pallas.triton.pallas_call_registration import pallas_call_lowering

        with warnings.catch_warnings():
            words = "The Pallas Triton backend is deprecated"
            warnings.filterwarnings("ignore", words, DeprecationWarning)
            return pallas_call_lowering(ctx, *operands, **params)

    register_lowering_rule(CompilerParams, _lower, "gpu")


def no_triton() -> str | None:
    """Why there are no kernels for GPUs at all; None if there are."""
    return "this version of jax has no Triton backend for Pallas" if plgpu is None else None


def dot(a, b, *, transpose_a=False, transpose_b=False):
    """`a b` with float32 sums, on tensor cores.

    A float32 is the sum of three bfloat16. The products of parts left out are as small as float32's
    own rounding; small ones are added first.
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
    """Three bfloat16, of falling size, that sum to the float32 exactly."""
    parts = []
    for _ in range(3):
        # Cut off by its bits: a compiler may take a cast there and back for nothing.
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
        part = jax.lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return parts
