"""Access to slices of stacked arrays, for loops that change one slice at a time without copying."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.platform import vary_alike

Index = Int[Array, ""] | int


def slice_at(stacks: Any, index: Index) -> Any:
    """Return slice `index` of every stack in a tree of stacks."""
    return jax.tree.map(lambda s: jax.lax.dynamic_index_in_dim(s, index, keepdims=False), stacks)


def update_at(stacks: Any, values: Any, index: Index) -> Any:
    """Return the stacks with slice `index` of each replaced by the matching leaf of `values`."""

    def update(stack, x):
        return jax.lax.dynamic_update_index_in_dim(stack, x.astype(stack.dtype), index, 0)

    return jax.tree.map(update, stacks, values)


def slice_range(stack: Float[Array, "count *shape"], start: Index, size: int) -> Array:
    """Return `size` consecutive slices of the stack, starting at slice `start`."""
    return jax.lax.dynamic_slice_in_dim(stack, start, size, 0)


def update_range(stack: Float[Array, "count *shape"], values: Array, start: Index) -> Array:
    """Return the stack with consecutive slices from `start` onwards replaced by `values`."""
    return jax.lax.dynamic_update_slice_in_dim(stack, values.astype(stack.dtype), start, 0)


def scan(
    body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, scanned: Any, *, reverse: bool = False
) -> tuple[Any, Any]:
    """Run `jax.lax.scan`; if there is only one step, run the step without a loop.

    A step without a loop may change the shape of the carry.
    """
    carry, scanned = vary_alike((carry, scanned))
    if len(jax.tree.leaves(scanned)[0]) > 1:
        return jax.lax.scan(body, carry, scanned, reverse=reverse)
    carry, outputs = body(carry, jax.tree.map(lambda x: x[0], scanned))
    return carry, jax.tree.map(lambda x: x[None], outputs)


@jax.custom_jvp
def isolate(x: Array) -> Array:
    """Return x, and prevent XLA from fusing its computation into the operations that use x.

    The restriction does not apply under differentiation, where computing x again for each use may
    be faster.
    """
    return jax.lax.optimization_barrier(x)


@isolate.defjvp
def _isolate_jvp(primals, tangents):
    return *primals, *tangents


@jax.custom_jvp
def in_rows(x: Array) -> Array:
    """Return x; under differentiation it is stored with its last axis innermost.

    The kernels of attention read arrays whose innermost axis is tokens. XLA may choose this layout
    for other values that a scan stacks for its backward pass, and then copies the slices.
    """
    return x


@in_rows.defjvp
def _in_rows_jvp(primals, tangents):
    (x,) = primals
    return with_layout_constraint(x, Layout(tuple(range(x.ndim)))), *tangents


def empty_like(stacks: Any) -> Any:
    """Return uninitialised stacks with the shapes and dtypes of a tree of stacks.

    Every slice must be written before it is read.
    """
    return jax.tree.map(lambda x: jax.lax.empty(x.shape, x.dtype), stacks)


def empty_for(run: Callable[..., list[Array]], count: int, *args: Any) -> list[Array]:
    """Return an uninitialised stack of `count` slices for each array that `run(*args)` returns.

    A stack is in the same memory as its slices: that of the device, or of the host.
    """

    def empty(x):
        stack = jax.lax.empty((count, *x.shape), x.dtype)
        of_device = x.memory_space == jax.memory.Space.Device
        return stack if of_device else jax.device_put(stack, x.memory_space)

    return [empty(x) for x in jax.make_jaxpr(run)(*args).out_avals]


@jax.custom_vjp
def slice_once(stack: Float[Array, "count *shape"], index: Index) -> tuple[Array, Array]:
    """Return the stack and its slice `index`, with a gradient that needs no stack of zeros.

    After the call, use the returned stack, and do not read the slice from the returned stack again.
    The backward pass can then write the slice's gradient into the gradient of the stack. The
    gradient of JAX's own indexing would instead create a stack of zeros per slice and add all of
    these stacks.
    """
    return stack, jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)


def _slice_once_forward(stack, index):
    return slice_once(stack, index), index


def _slice_once_backward(index, cotangents):
    d_stack, d_slice = cotangents
    return jax.lax.dynamic_update_index_in_dim(d_stack, d_slice, jnp.asarray(index), 0), None


slice_once.defvjp(_slice_once_forward, _slice_once_backward)


@jax.custom_vjp
def slice_of_used(stack: Float[Array, "count *shape"], index: Index) -> tuple[Array, Array]:
    """Return the stack and its slice `index`, with a gradient that needs no stack of zeros.

    After the call, use the returned stack. The backward pass adds the slice's gradient to the
    gradient of the returned stack in place, so that the slice may also be read from that stack.
    """
    return stack, jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)


def _slice_of_used_forward(stack, index):
    return slice_of_used(stack, index), index


def _slice_of_used_backward(index, cotangents):
    d_stack, d_slice = cotangents
    index = jnp.asarray(index)
    total = jax.lax.dynamic_index_in_dim(d_stack, index, keepdims=False) + d_slice
    return jax.lax.dynamic_update_index_in_dim(d_stack, total, index, 0), None


slice_of_used.defvjp(_slice_of_used_forward, _slice_of_used_backward)


@jax.custom_vjp
def write_unread(
    stack: Float[Array, "count *shape"],
    x: Float[Array, "*shape"],
    index: Index,
    complete: Bool[Array, ""],
) -> Array:
    """Return the stack with `x` written into slice `index`, which nothing has read so far.

    `complete` tells whether x has its final value. The slice must not be read before a call with
    `complete` True. The gradient of x is the slice's gradient if `complete`, and 0 otherwise. The
    gradient of the stack is passed on unchanged. JAX's own update would set the slice of that
    gradient to zero, which copies the entire stack.
    """
    return update_at(stack, x, index)


def _write_unread_forward(stack, x, index, complete):
    return write_unread(stack, x, index, complete), (index, complete)


def _write_unread_backward(saved, d_stack):
    index, complete = saved
    d_slice = jax.lax.dynamic_index_in_dim(d_stack, index, keepdims=False)
    return d_stack, jnp.where(complete, d_slice, 0), None, None


write_unread.defvjp(_write_unread_forward, _write_unread_backward)
