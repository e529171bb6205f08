"""Access to slices of stacked arrays, for loops that change one slice at a time without copying."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.platform import vary_alike

Index = Int[Array, ""] | int


class Slice(NamedTuple):
    """One slice of a stack, named without taking it out of the stack.

    Attributes:
      all: the whole stack, or a tree or module of stacks.
      index: the index of the slice.
    """

    all: Any
    index: Index


def at(stacks: Any, index: Index) -> Any:
    """Return slice `index` of every stack in a tree."""
    return jax.tree.map(lambda s: jax.lax.dynamic_index_in_dim(s, index, keepdims=False), stacks)


def put(stacks: Any, values: Any, index: Index) -> Any:
    """Return the stacks with a tree of values in slice `index`."""

    def put_one(stack, x):
        return jax.lax.dynamic_update_index_in_dim(stack, x.astype(stack.dtype), index, 0)

    return jax.tree.map(put_one, stacks, values)


def run_of(stack: Float[Array, "count *shape"], start: Index, size: int) -> Array:
    """Return `size` consecutive slices, beginning with slice `start`."""
    return jax.lax.dynamic_slice_in_dim(stack, start, size, 0)


def put_run(stack: Float[Array, "count *shape"], values: Array, start: Index) -> Array:
    """Return the stack with `values` in consecutive slices from `start` on."""
    return jax.lax.dynamic_update_slice_in_dim(stack, values.astype(stack.dtype), start, 0)


def scan(
    body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, scanned: Any, *, reverse: bool = False
) -> tuple[Any, Any]:
    """Run `jax.lax.scan`; a single step runs without a loop, so its carry may change shape."""
    carry, scanned = vary_alike((carry, scanned))
    if len(jax.tree.leaves(scanned)[0]) > 1:
        return jax.lax.scan(body, carry, scanned, reverse=reverse)
    carry, given = body(carry, jax.tree.map(lambda x: x[0], scanned))
    return carry, jax.tree.map(lambda x: x[None], given)


@jax.custom_jvp
def by_itself(x: Array) -> Array:
    """Return x, which XLA computes on its own before use instead of fusing it into what uses it.

    Under differentiation x is returned as it is: it is then used more than once, and XLA is free to
    compute it again each time.
    """
    return jax.lax.optimization_barrier(x)


@by_itself.defjvp
def _by_itself_jvp(primals, tangents):
    return *primals, *tangents


def empty_like(stacks: Any) -> Any:
    """Return uninitialised stacks of the same shapes, to be written before they are read."""
    return jax.tree.map(lambda x: jax.lax.empty(x.shape, x.dtype), stacks)


@jax.custom_vjp
def take(stack: Float[Array, "count *shape"], index: Index) -> tuple[Array, Array]:
    """Return the stack and its slice `index`.

    Afterwards the caller uses the returned stack, and does not read this slice of it again. The
    gradient of the slice then takes its place in the gradient of the stack. Indexing with JAX would
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
    """Write `x` into a slice that no one has read, and that no one may read until `whole` is True.

    The gradient of x is that of the slice, or 0 while x is not whole. The gradient of the stack is
    passed on unchanged: JAX would put zeros in the slice for what was there before, which copies
    the whole stack.
    """
    return put(stack, x, index)


def _fill_forward(stack, x, index, whole):
    return fill(stack, x, index, whole), (index, whole)


def _fill_backward(saved, d_stack):
    index, whole = saved
    d_slice = jax.lax.dynamic_index_in_dim(d_stack, index, keepdims=False)
    return d_stack, jnp.where(whole, d_slice, 0), None, None


fill.defvjp(_fill_forward, _fill_backward)
