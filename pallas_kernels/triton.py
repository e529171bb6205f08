"""Access to Pallas's Triton backend.

JAX announces since version 0.11 that the backend will be removed; then the portable implementations
serve GPUs.
"""

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
        """Parameters of this package's kernels, which lower without JAX's deprecation warning."""

    def _lower(ctx, *operands, **params):
        from jax._src.pallas.triton.pallas_call_registration import pallas_call_lowering

        with warnings.catch_warnings():
            words = "The Pallas Triton backend is deprecated"
            warnings.filterwarnings("ignore", words, DeprecationWarning)
            return pallas_call_lowering(ctx, *operands, **params)

    register_lowering_rule(CompilerParams, _lower, "gpu")


def no_triton() -> str | None:
    """Return why no kernels for GPUs are available; None if they are."""
    return "this version of jax has no Triton backend for Pallas" if plgpu is None else None


def dot(a, b, *, transpose_a=False, transpose_b=False):
    """Multiply a and b on tensor cores with float32 sums.

    A float32 operand is split into three bfloat16 terms. The products of terms that are left out
    are as small as float32's own rounding. Smaller products are added first.
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
    """Split x into three bfloat16 terms of falling size whose sum is exactly the float32 x."""
    parts = []
    for _ in range(3):
        # The low bits are cut off directly, because a compiler may remove a cast to bfloat16 and
        # back.
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
        part = jax.lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return parts
