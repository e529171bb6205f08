"""A call of an op that a device's kernels are checked with, and what its inputs are drawn from."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Arrays = dict[str, Any]
EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of an op.

    Attributes:
      op: its name.
      size: in words.
      function: `function(implementation, **inputs)`, results by name.
      inputs: makes them, by name.
      flops: of the forward pass.
      gradients: whether the floating inputs have gradients; all results are then floats.
      reference: `reference(**inputs)`, the equations as they are written; None is the plain form.
      exact: results that are an input again, to the bit: the input, by the result.
      wide: results that nothing is rounded for to less than float32, whatever the inputs are.
      cancels: results with rows that may cancel to nothing.
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
    cancels: frozenset[str] = frozenset()


def normal(seed: int, dtype: jax.typing.DTypeLike, *shape: int, scale: float = 1.0) -> jax.Array:
    """Numbers of a normal distribution, drawn on the host: nothing is compiled for them."""
    drawn = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(scale * drawn if scale != 1 else drawn, dtype)


def in_words(tokens: tuple[int, ...], dtype: str = "bfloat16", **sizes: int) -> str:
    """A size as a table has it; bfloat16 is not said."""
    named = [f"{name}={value}" for name, value in sizes.items()]
    return " ".join(["x".join(map(str, tokens)), *named, *([] if dtype == "bfloat16" else [dtype])])


def only(inputs: Callable[[], Arrays], names) -> Arrays:
    """Those of the inputs that an op takes."""
    made = inputs()
    return {name: made[name] for name in names}
