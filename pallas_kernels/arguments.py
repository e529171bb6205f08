"""Checks of the ops' arguments, and `StackSlice`, which selects one slice of a stacked array.

Each error message is one line that names the invalid argument and lists the legal values.
"""

import math
import numbers
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

Norm = Literal["layernorm", "rmsnorm"]
FRACTION_BITS_RANGE = range(0, 21)


class StackSlice(NamedTuple):
    """A reference to the slice `stack[index]` of a stacked array, which an op accepts as argument.

    The op returns the same result as for the slice itself. Its kernel reads the slice directly from
    the stack, so a loop over slices makes no copies.

    Attributes:
      stack: the stacked array. `index` indexes its first axis. It may also be a module with stacked
        parameters; the slice of every parameter is then selected.
      index: the index of the slice.
    """

    stack: Any
    index: Int[Array, ""] | int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the selected slice."""
        return self.stack.shape[1:]

    @property
    def ndim(self) -> int:
        """Number of axes of the selected slice."""
        return self.stack.ndim - 1

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the stack and of the selected slice."""
        return self.stack.dtype


def write_slice(x: Array, to: StackSlice | None) -> Array:
    """Write `x` into the slice `to` and return the updated stack; return `x` if `to` is None."""
    if to is None:
        return x
    return jax.lax.dynamic_update_index_in_dim(to.stack, x.astype(to.dtype), to.index, 0)


def read_slices(x: Any) -> Any:
    """Return the tree `x` with every `StackSlice` replaced by the array that it selects."""
    is_slice = lambda x: isinstance(x, StackSlice)

    def read(x: Any) -> Any:
        if not is_slice(x):
            return x
        return jax.lax.dynamic_index_in_dim(x.stack, x.index, keepdims=False)

    return jax.tree.map(read, x, is_leaf=is_slice)


def check_array(name: str, x: Any, axes: str, *, or_int16: bool = False) -> None:
    """Check that `x` is a floating-point array with the given axes.

    Args:
      name: the argument's name, for the error message.
      x: the value that was passed.
      axes: the names of the axes, such as "P K"; "..." stands for any number of axes.
      or_int16: whether int16 arrays are legal too.

    Raises:
      ValueError: `x` is not an array, or its number of axes or its dtype is not legal.
    """
    names = axes.split()
    argument = f"{name} [{', '.join(names)}]"
    legal = f"an array of floats{' or int16' if or_int16 else ''}"
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise ValueError(f"{argument} must be {legal}, but is a {type(x).__name__}")
    if isinstance(x, jax.ShapeDtypeStruct):
        raise ValueError(
            f"{argument} must be {legal}, but is a ShapeDtypeStruct; use jax.eval_shape(op, ...) "
            "for arrays without values"
        )
    least = len(names) - ("..." in names)
    if x.ndim < least or ("..." not in names and x.ndim > least):
        count = f"{least} {'axis' if least == 1 else 'axes'}"
        count = f"at least {count}" if "..." in names else count
        raise ValueError(f"{argument} must be {legal} with {count}, but has shape {x.shape}")
    if not (jnp.issubdtype(x.dtype, jnp.floating) or (or_int16 and x.dtype == jnp.int16)):
        raise ValueError(f"{argument} must be {legal}, but is {x.dtype}")
    # Narrower floats are not legal, because JAX does not promote them implicitly to other dtypes.
    if x.dtype.itemsize < 2:
        raise ValueError(
            f"{argument} must be {legal}, but is {x.dtype}; legal: floats of 16 bits or more"
        )


def check_stack(name: str, x: Array, axes: str) -> None:
    """Raise ValueError if a stack of parameters has no layer, or an axis of its layers is empty."""
    if 0 in x.shape:
        raise ValueError(
            f"{name} [{', '.join(axes.split())}] has shape {list(x.shape)}; legal: axes of at "
            "least one entry"
        )


def check_integers(name: str, x: Any) -> None:
    """Raise ValueError if `x` is an array of something other than integers; None is legal."""
    if x is not None and not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} is {x.dtype}; legal: an integer dtype")


def check_shapes(
    beside: str, *, integers: bool = False, **wanted: tuple[Any, tuple[Any, ...]]
) -> None:
    """Raise ValueError if an array has the wrong kind of numbers, or does not fit other arrays.

    Args:
      beside: the arrays that the shapes follow from, in words.
      integers: whether the arrays must hold integers; otherwise they must hold floats.
      **wanted: maps the name of each argument to the array and the shape that fits. An array that
        is None is skipped.
    """
    for name, (x, shape) in wanted.items():
        if x is None:
            continue
        if integers:
            check_integers(name, x)
        else:
            check_array(name, x, "...")
        if tuple(x.shape) != tuple(shape):
            raise ValueError(
                f"{name} has shape {list(x.shape)}, but must have shape {list(shape)} to fit "
                f"{beside}"
            )


def check_tokens(**counts: Any) -> None:
    """Raise ValueError if a number of tokens per row is symbolic (a dimension of `jax.export`)."""
    for name, count in counts.items():
        if not isinstance(count, int):
            raise ValueError(
                f"{name} has a symbolic number of tokens per row, {count}; legal: an integer (only "
                "the number of rows may be symbolic)"
            )


def check_epsilon(name: str, value: Any) -> None:
    """Raise ValueError unless a norm's epsilon is a finite number and at least 0."""
    if isinstance(value, jax.Array):
        raise ValueError(f"{name} must be a Python number, not an array or a traced value")
    # A NaN fails both comparisons with 0 and infinity, and is therefore rejected.
    if not isinstance(value, numbers.Real) or not 0 <= value < math.inf:
        raise ValueError(f"{name}={value!r} must be a finite number, at least 0")


def check_norm(norm: Any) -> None:
    """Raise ValueError unless `norm` is the name of a norm: "layernorm" or "rmsnorm"."""
    if norm not in get_args(Norm):
        raise ValueError(f"norm={norm!r} is unknown; legal: {', '.join(get_args(Norm))}")


def check_fraction_bits(value: Any) -> None:
    """Raise ValueError unless an int16 residual's number of fraction bits is from 0 to 20."""
    if not isinstance(value, int) or value not in FRACTION_BITS_RANGE:
        low, high = FRACTION_BITS_RANGE[0], FRACTION_BITS_RANGE[-1]
        raise ValueError(f"fraction_bits={value!r} must be an integer from {low} to {high}")
