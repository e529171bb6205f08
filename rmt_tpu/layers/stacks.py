"""Slices of stacked arrays, for loops that change one slice at a time and copy nothing."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.platform import vary_alike

Index = Int[Array, ""] | int


class Slice(NamedTuple):
    """One slice of a stack that need not be taken out of it.

    Attributes:
      all: of every slice.
      index: which it is.
    """

    all: Any
    index: Index


def at(stacks: Any, index: Index) -> Any:
    """Slice `index` of every stack in a tree."""
    return jax.tree.map(lambda s: jax.lax.dynamic_index_in_dim(s, index, keepdims=False), stacks)


def put(stacks: Any, values: Any, index: Index) -> Any:
    """Stacks with a tree of values in slice `index`."""

    def put_one(stack, x):
        return jax.lax.dynamic_update_index_in_dim(stack, x.astype(stack.dtype), index, 0)

    return jax.tree.map(put_one, stacks, values)


def run_of(stack: Float[Array, "count *shape"], start: Index, size: int) -> Array:
    """`size` slices from `start` on."""
    return jax.lax.dynamic_slice_in_dim(stack, start, size, 0)


def put_run(stack: Float[Array, "count *shape"], values: Array, start: Index) -> Array:
    """`run_of` the other way."""
    return jax.lax.dynamic_update_slice_in_dim(stack, values.astype(stack.dtype), start, 0)


def scan(
    body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, scanned: Any, *, reverse: bool = False
) -> tuple[Any, Any]:
    """`jax.lax.scan`; of one slice without a loop, so that the carry may change its shape."""
    carry, scanned = vary_alike((carry, scanned))
    if len(jax.tree.leaves(scanned)[0]) > 1:
        return jax.lax.scan(body, carry, scanned, reverse=reverse)
    carry, given = body(carry, jax.tree.map(lambda x: x[0], scanned))
    return carry, jax.tree.map(lambda x: x[None], given)


@jax.custom_jvp
def by_itself(x: Array) -> Array:
    """x, which XLA makes before it is used and as no part of that, where nobody differentiates.

    Where somebody does x is used more than once, and XLA is free to make it anew each time.
    """
    return jax.lax.optimization_barrier(x)


@by_itself.defjvp
def _by_itself_jvp(primals, tangents):
    return *primals, *tangents


def empty_like(stacks: Any) -> Any:
    """Stacks of the same shapes that hold anything: to be written before they are read."""
    return jax.tree.map(lambda x: jax.lax.empty(x.shape, x.dtype), stacks)


@jax.custom_vjp
def take(stack: Float[Array, "count *shape"], index: Index) -> tuple[Array, Array]:
    """The stack, to be used from here on, and its slice `index`, which is not to be used again.

    The gradient of the slice then takes its place in that of the stack. Indexing with JAX would
    make a stack of zeros for each slice, and add them all up.
    """
    return stack, jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)


def _take_forward(stack, index):
    return take(stack, index), index


def _take_backward(index, cotangents):
    d_stack, d_slice = cotangents
    return jax.lax.dynamic_update_index_in_dim(d_stack, d_slice, jnp.asarray(index), 0), None


take.defvjp(_take_forward, _take_backward)


@jax.custom_vjp
def fill(
    stack: Float[Array, "count *shape"],
    x: Float[Array, "*shape"],
    index: Index,
    whole: Bool[Array, ""],
) -> Array:
    """The stack with x in slice `index`, which nobody has read, nor will before x is whole.

    The gradient of x is that of the slice, or 0 while x is not whole. That of the stack is passed
    on as it is: JAX would put zeros in the slice, a copy of the whole stack, for what was there.
    """
    return put(stack, x, index)


def _fill_forward(stack, x, index, whole):
    return fill(stack, x, index, whole), (index, whole)


def _fill_backward(saved, d_stack):
    index, whole = saved
    d_slice = jax.lax.dynamic_index_in_dim(d_stack, index, keepdims=False)
    return d_stack, jnp.where(whole, d_slice, 0), None, None


fill.defvjp(_fill_forward, _fill_backward)
