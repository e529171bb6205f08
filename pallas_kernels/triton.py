"""Pallas's Triton backend. JAX says since 0.11 that it will go: the portable forms then serve."""

import warnings

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
