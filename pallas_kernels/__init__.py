"""Fused ops for residual streams, with their references. Imports jax only and knows no model."""

from pallas_kernels.causal_attention import attention_backward, attention_forward, causal_attention
from pallas_kernels.key_vector import (
    FRACTION_BITS,
    Statistics,
    UnsupportedImplementation,
    norm_retrieve,
    norm_retrieve_with_statistics,
    store,
    store_norm_retrieve,
    to_fixed_point,
    undo,
)

__all__ = [
    "FRACTION_BITS",
    "Statistics",
    "UnsupportedImplementation",
    "attention_backward",
    "attention_forward",
    "causal_attention",
    "norm_retrieve",
    "norm_retrieve_with_statistics",
    "store",
    "store_norm_retrieve",
    "to_fixed_point",
    "undo",
]
