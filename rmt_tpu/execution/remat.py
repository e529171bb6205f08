"""Rematerialisation: a scan whose backward pass recomputes what the forward pass did not keep."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.platform import vary_alike
from rmt_tpu.execution.kernels import at_current_precision
from rmt_tpu.layers import stacks
from rmt_tpu.layers.kept import (
    NOTHING,
    Kept,
    recomputed,
    with_arguments,
    without_arguments,
)


def scan_recomputed(
    body: Callable[[Any, Any, Any, Any], Any],
    carry: Any,
    scanned: Any,
    shared: Any,
    constants: Any,
    kept: Kept = NOTHING,
) -> Any:
    """Run `stacks.scan` so that the backward pass recomputes each step.

    Only values with a name in `kept` are kept, and those parts of the carry before each step from
    which the others are recomputed. A JAX scan over a `jax.checkpoint` has the same result, but
    takes longer, because it first fills the stacks of gradients with zeros.

    Args:
      body: a function `(carry, (slice, index), shared, constants) -> carry`.
      carry: the carry before the first slice, with only floating-point arrays.
      scanned: the floating-point stacks from which the slices are taken.
      shared: parameters that all slices share, whose gradients are summed over slices.
      constants: further inputs of all slices, which have no gradient.
      kept: the names of values to keep, given by `jax.ad_checkpoint.checkpoint_name`.

    Returns:
      The carry after the last slice.
    """
    count = len(jax.tree.leaves(scanned)[0])

    def with_indices(*scanned):
        # Both passes create the indices, because a backward pass cannot use arrays from an outer
        # trace.
        return (*scanned, jnp.arange(count))

    # The index and the constants are arguments, too, so that the forward pass need not save them.
    def run_one(before, piece, shared, index, constants):
        return body(before, (piece, index), shared, constants)

    @jax.custom_vjp
    def run(carry, scanned, shared, constants):
        step = lambda carry, indexed: (body(carry, indexed, shared, constants), None)
        return stacks.scan(step, carry, with_indices(scanned))[0]

    def forward(carry, scanned, shared, constants):
        def step(before, indexed):
            piece, index = indexed
            arguments = before, piece, shared, index, constants
            after, pull_back = jax.vjp(recomputed(run_one, kept), *arguments)
            needed = pull_back.args_res[0]
            return after, (needed, without_arguments(pull_back))

        carry, stacked = stacks.scan(step, carry, with_indices(scanned))
        return carry, (stacked, scanned, shared, constants)

    def backward(residuals, d_carry):
        stacked, scanned, shared, constants = residuals

        def step_backward(carry, indexed):
            (d_after, gradients, d_shared), ((before, pull_back), piece, index) = carry, indexed
            arguments = [before, piece, shared, index, constants]
            pull_back = with_arguments(pull_back, arguments)
            d_before, gradient, d_step, *_ = pull_back(d_after)
            d_shared = jax.tree.map(jnp.add, d_shared, d_step)
            return (d_before, stacks.update_at(gradients, gradient, index), d_shared), None

        carry = d_carry, stacks.empty_like(scanned), jax.tree.map(jnp.zeros_like, shared)
        carry, _ = stacks.scan(step_backward, carry, with_indices(stacked, scanned), reverse=True)
        return *carry, None

    run.defvjp(forward, at_current_precision(backward))
    return run(*vary_alike((carry, scanned, shared)), constants)
