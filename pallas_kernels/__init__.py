"""Fused JAX ops for residual streams, with reference implementations.

The package does not depend on `rmt_tpu` or on any model.
"""

from pallas_kernels.arguments import StackSlice, read_slices, write_slice
from pallas_kernels.causal_attention import (
    attention_after,
    attention_backward,
    attention_forward,
    attention_to,
    causal_attention,
    merged,
)
from pallas_kernels.delta_attention import delta_attention, delta_step
from pallas_kernels.depth_attention import (
    depth_attention,
    depth_attention_merge,
    depth_attention_merge_at,
    depth_attention_merge_read,
    depth_attention_partial,
    depth_attention_partial_backward,
)
from pallas_kernels.depth_sums import depth_sums
from pallas_kernels.grouped_matmul import grouped_matmul, row_alignment
from pallas_kernels.key_vector import (
    FRACTION_BITS,
    Reread,
    Statistics,
    UnsupportedImplementation,
    norm_retrieve,
    norm_retrieve_again,
    store,
    store_backward,
    store_forward,
    store_norm_retrieve,
    store_norm_retrieve_at,
    store_norm_retrieve_with_statistics,
    to_fixed_point,
    undo,
)
from pallas_kernels.logits import Logits, logits_with_sums
from pallas_kernels.stacked_product import product_at
from pallas_kernels.token_rows import rows_of_tokens, sums_of_rows

__all__ = [
    "FRACTION_BITS",
    "Logits",
    "Reread",
    "StackSlice",
    "Statistics",
    "UnsupportedImplementation",
    "attention_after",
    "attention_backward",
    "attention_forward",
    "attention_to",
    "causal_attention",
    "delta_attention",
    "delta_step",
    "depth_attention",
    "depth_attention_merge",
    "depth_attention_merge_at",
    "depth_attention_merge_read",
    "depth_attention_partial",
    "depth_attention_partial_backward",
    "depth_sums",
    "grouped_matmul",
    "logits_with_sums",
    "merged",
    "norm_retrieve",
    "norm_retrieve_again",
    "product_at",
    "read_slices",
    "row_alignment",
    "rows_of_tokens",
    "store",
    "store_backward",
    "store_forward",
    "store_norm_retrieve",
    "store_norm_retrieve_at",
    "store_norm_retrieve_with_statistics",
    "sums_of_rows",
    "to_fixed_point",
    "undo",
    "write_slice",
]

# Maps old public names of this package to the new names. The error for an old name states the new
# one.
_RENAMED = {
    "Again": "Reread",
    "Slot": "StackSlice",
    "placed": "write_slice",
    "taken": "read_slices",
}


def __getattr__(name: str):
    hint = f"; it is called {_RENAMED[name]} now" if name in _RENAMED else ""
    raise AttributeError(f"module 'pallas_kernels' has no attribute {name!r}{hint}")
