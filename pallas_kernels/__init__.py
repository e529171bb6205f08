"""Fused ops for residual streams, with their references. Imports jax only and knows no model."""

from pallas_kernels.key_vector import (
    UnsupportedImplementation,
    norm_retrieve,
    store,
    store_norm_retrieve,
)

__all__ = ["UnsupportedImplementation", "norm_retrieve", "store", "store_norm_retrieve"]
