"""Test cases that check a device's kernels, and random inputs for them."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Arrays = dict[str, Any]
EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class DeviceCase:
    """A call of an op, as a test case for its kernels.

    Attributes:
      op: the name of the op.
      size: the sizes of the arrays, as text.
      function: a function that calls the op, as `function(implementation, **inputs)`, and returns
        a dict from name to result.
      inputs: a function that creates the inputs, as a dict from name to array.
      flops: the FLOPs of the forward pass.
      gradients: whether to check the gradients of the floating-point inputs; if so, all results are
        floating-point.
      reference: a function that evaluates the equations directly, called as `reference(**inputs)`;
        None means the op's plain JAX form.
      exact: maps each result that must equal an input bit for bit to the name of that input.
      wide: the names of results that are computed in float32 throughout, even if inputs are
        narrower.
      narrow: whether some results are narrower than float32 although all inputs are float32, so
        that the bounds of narrow inputs hold.
      cancels: the names of results in which the terms of a row may cancel. Such a row consists only
        of rounding errors.
    """

    op: str
    size: str
    function: Callable[..., Arrays]
    inputs: Callable[[], Arrays]
    flops: int
    gradients: bool = True
    reference: Callable[..., Arrays] | None = None
    exact: Mapping[str, str] = dataclasses.field(default_factory=dict)
    wide: frozenset[str] = frozenset()
    narrow: bool = False
    cancels: frozenset[str] = frozenset()


def normal(seed: int, dtype: jax.typing.DTypeLike, *shape: int, scale: float = 1.0) -> jax.Array:
    """Return normally distributed numbers, drawn on the host to avoid a compilation."""
    drawn = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(scale * drawn if scale != 1 else drawn, dtype)


def in_words(tokens: tuple[int, ...], dtype: str = "bfloat16", **sizes: int | float) -> str:
    """Return sizes as text like "16x512 K=64 V=64 float32". The dtype is omitted for bfloat16."""
    named = [f"{name}={value}" for name, value in sizes.items()]
    return " ".join(["x".join(map(str, tokens)), *named, *([] if dtype == "bfloat16" else [dtype])])


def only(inputs: Callable[[], Arrays], names) -> Arrays:
    """Create the inputs of a test case, and return only those in `names`."""
    arrays = inputs()
    return {name: arrays[name] for name in names}
