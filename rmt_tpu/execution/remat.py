"""Policies by name for what a layer's backward pass computes again."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.platform import vary_alike
from rmt_tpu import config as cfg
from rmt_tpu.execution.kernels import as_here
from rmt_tpu.layers import stacks


def rematerialize(layer: Callable, policy: cfg.RematPolicy) -> Callable:
    """Return `layer` with the recomputation that the policy names; see `ModelConfig.remat`.

    For "full", see `scan_recomputed`.
    """
    match policy:
        case "none" | "full" | "reversible":
            return layer
        case "dots":
            saved = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    # Within a scan nothing can be merged across the boundary, so barriers would only cost time.
    return jax.checkpoint(layer, policy=saved, prevent_cse=False)


def scan_recomputed(
    body: Callable[[Any, Any, Any, Any], Any], carry: Any, scanned: Any, shared: Any, given: Any
) -> Any:
    """Run `stacks.scan`, keeping only the carry before each slice and recomputing the rest.

    It is like JAX's scan of a `jax.checkpoint`, except that the stacks of gradients start
    uninitialised. JAX would fill them with zeros, which every slice then overwrites.

    Args:
      body: a function `(carry, (slice, index), shared, given) -> carry`.
      carry: the carry before the first slice, of floats.
      scanned: stacks of floats to take the slices from.
      shared: parameters that all slices share, whose gradients are added up.
      given: further inputs of all slices, which have no gradient.

    Returns:
      The carry after the last slice.
    """
    count = len(jax.tree.leaves(scanned)[0])

    def with_indices(*scanned):
        # The indices are made in each pass, because the backward pass cannot use an array of the
        # trace around both passes.
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
