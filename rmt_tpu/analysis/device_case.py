"""A call of an op with which a device's kernels are checked, and random inputs for it."""

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
      op: the name of the op.
      size: the sizes, in words.
      function: the op as `function(implementation, **inputs)`; it returns results by name.
      inputs: makes the inputs, by name.
      flops: FLOPs of the forward pass.
      gradients: whether the floating inputs have gradients; all results are then floats.
      reference: the equations as they are written, `reference(**inputs)`; None is the plain form.
      exact: for each result that must equal an input bit for bit, the name of the input.
      wide: results for which nothing is rounded below float32, whatever the inputs are.
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
    """Return normally distributed numbers, drawn on the host so that nothing is compiled."""
    drawn = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(scale * drawn if scale != 1 else drawn, dtype)


def in_words(tokens: tuple[int, ...], dtype: str = "bfloat16", **sizes: int) -> str:
    """Return a size as a table shows it; bfloat16 is left out."""
    named = [f"{name}={value}" for name, value in sizes.items()]
    return " ".join(["x".join(map(str, tokens)), *named, *([] if dtype == "bfloat16" else [dtype])])


def only(inputs: Callable[[], Arrays], names) -> Arrays:
    """Return the inputs of these names."""
    made = inputs()
    return {name: made[name] for name in names}
