"""Rematerialisation policies: what a layer's backward pass recomputes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.platform import vary_alike
from rmt_tpu import config as cfg
from rmt_tpu.execution.kernels import at_current_precision
from rmt_tpu.layers import stacks


def rematerialize(layer: Callable, policy: cfg.RematPolicy) -> Callable:
    """Wrap `layer` so that its backward pass recomputes what a policy requires.

    The policies are those of `ModelConfig.remat`. With "none", "full" and "reversible", `layer` is
    returned unchanged: for "full", the loop `scan_recomputed` recomputes the layers, and
    "reversible" has its own schedule.
    """
    match policy:
        case "none" | "full" | "reversible":
            return layer
        case "dots":
            saved = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    # A scan needs no barriers against merging, because XLA does not merge operations of different
    # iterations.
    return jax.checkpoint(layer, policy=saved, prevent_cse=False)


def scan_recomputed(
    body: Callable[[Any, Any, Any, Any], Any], carry: Any, scanned: Any, shared: Any, constants: Any
) -> Any:
    """Run `stacks.scan` so that the backward pass recomputes each step.

    Only the carry before each step is kept. A JAX scan over a `jax.checkpoint` has the same result,
    but takes longer, because it first fills the stacks of gradients with zeros.

    Args:
      body: a function `(carry, (slice, index), shared, constants) -> carry`.
      carry: the carry before the first slice, with only floating-point arrays.
      scanned: the floating-point stacks from which the slices are taken.
      shared: parameters that all slices share, whose gradients are summed over slices.
      constants: further inputs of all slices, which have no gradient.

    Returns:
      The carry after the last slice.
    """
    count = len(jax.tree.leaves(scanned)[0])

    def with_indices(*scanned):
        # Both passes create the indices, because a backward pass cannot use arrays from an outer
        # trace.
        return (*scanned, jnp.arange(count))

    @jax.custom_vjp
    def run(carry, scanned, shared, constants):
        step = lambda carry, indexed: (body(carry, indexed, shared, constants), None)
        return stacks.scan(step, carry, with_indices(scanned))[0]

    def forward(carry, scanned, shared, constants):
        step = lambda carry, indexed: (body(carry, indexed, shared, constants), carry)
        carry, carries = stacks.scan(step, carry, with_indices(scanned))
        return carry, (carries, scanned, shared, constants)

    def backward(saved, d_carry):
        carries, scanned, shared, constants = saved

        def step_backward(carry, indexed):
            (d_after, gradients, d_shared), (before, piece, index) = carry, indexed
            step = lambda before, piece, shared: body(before, (piece, index), shared, constants)
            _, pull_back = jax.vjp(step, before, piece, shared)
            d_before, gradient, d_step = pull_back(d_after)
            d_shared = jax.tree.map(jnp.add, d_shared, d_step)
            return (d_before, stacks.update_at(gradients, gradient, index), d_shared), None

        carry = d_carry, stacks.empty_like(scanned), jax.tree.map(jnp.zeros_like, shared)
        carry, _ = stacks.scan(step_backward, carry, with_indices(carries, scanned), reverse=True)
        return *carry, None

    run.defvjp(forward, at_current_precision(backward))
    return run(*vary_alike((carry, scanned, shared)), constants)
