"""What a layer's backward pass computes again, by the name of a policy."""

from collections.abc import Callable

import jax

from rmt_tpu import config as cfg


def rematerialize(layer: Callable, policy: cfg.RematPolicy) -> Callable:
    """`layer` with what its backward pass recomputes set by name; see `ModelConfig.remat`."""
    match policy:
        case "none" | "reversible":
            return layer
        case "dots":
            saved = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        case "full":
            saved = jax.checkpoint_policies.nothing_saveable
    # Within a scan nothing can be merged across the boundary: barriers would only cost.
    return jax.checkpoint(layer, policy=saved, prevent_cse=False)
