"""What a layer's backward pass computes again, by the name of a policy."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.platform import vary_alike
from rmt_tpu import config as cfg
from rmt_tpu.execution.kernels import as_here
from rmt_tpu.layers import stacks


def rematerialize(layer: Callable, policy: cfg.RematPolicy) -> Callable:
    """`layer` with what its backward pass recomputes set by name; see `ModelConfig.remat`.

    Of "full", see `scan_recomputed`.
    """
    match policy:
        case "none" | "full" | "reversible":
            return layer
        case "dots":
            saved = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    # Within a scan nothing can be merged across the boundary: barriers would only cost.
    return jax.checkpoint(layer, policy=saved, prevent_cse=False)


def scan_recomputed(
    body: Callable[[Any, Any, Any, Any], Any], carry: Any, scanned: Any, shared: Any, given: Any
) -> Any:
    """`stacks.scan`, which keeps the carry before each slice and computes all else of it again.

    As JAX's scan of a `jax.checkpoint`, but that the stacks of gradients start unwritten: JAX's are
    filled with zeros, which every slice then overwrites.

    Args:
      body: `(carry, (slice, index), shared, given) -> carry`.
      carry: before the first slice, of floats.
      scanned: stacks of floats to take the slices from.
      shared: by all slices, whose gradients are added up.
      given: to all slices; it has no gradient.

    Returns:
      The carry after the last slice.
    """
    count = len(jax.tree.leaves(scanned)[0])

    def with_indices(*scanned):
        # Made in each pass: an array of the trace around both is not the backward pass's to use.
        return (*scanned, jnp.arange(count))

    @jax.custom_vjp
    def run(carry, scanned, shared, given):
        step = lambda carry, one: (body(carry, one, shared, given), None)
        return stacks.scan(step, carry, with_indices(scanned))[0]

    def forward(carry, scanned, shared, given):
        step = lambda carry, one: (body(carry, one, shared, given), carry)
        carry, kept = stacks.scan(step, carry, with_indices(scanned))
        return carry, (kept, scanned, shared, given)

    def backward(saved, d_carry):
        kept, scanned, shared, given = saved

        def back(carry, before):
            (d_carry, gradients, d_shared), (kept, one, index) = carry, before
            step = lambda kept, one, shared: body(kept, (one, index), shared, given)
            _, pull_back = jax.vjp(step, kept, one, shared)
            d_carry, gradient, of_one = pull_back(d_carry)
            d_shared = jax.tree.map(jnp.add, d_shared, of_one)
            return (d_carry, stacks.put(gradients, gradient, index), d_shared), None

        carry = d_carry, stacks.empty_like(scanned), jax.tree.map(jnp.zeros_like, shared)
        carry, _ = stacks.scan(back, carry, with_indices(kept, scanned), reverse=True)
        return *carry, None

    run.defvjp(forward, as_here(backward))
    return run(*vary_alike((carry, scanned, shared)), given)
