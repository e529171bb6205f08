"""Vectors of a bank padded to whole tiles of a TPU, so that kernels take them without a copy.

A vector of D numbers is held as one of W numbers, zeros at the end, where W is the next multiple of
128. A TPU's memory and products use that many anyway, and otherwise every kernel would work on a
copy of its operands. With mean squares over W in place of D,

    <query, v> / sqrt(|v|^2 / D + epsilon) = <r query, v> / sqrt(|v|^2 / W + r^2 epsilon)

with `r = sqrt(D / W)`. The same holds for an RMS norm with its gain, but not for a norm that
subtracts a mean.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from rmt_tpu import config as cfg
from rmt_tpu.layers.choices import Choice, padded_width


class Tiles(NamedTuple):
    """The way in which vectors are held.

    Attributes:
      size: D, the numbers of a vector.
      held: W, the numbers with padding; D where vectors are not padded.
    """

    size: int
    held: int

    def widened(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows W"]:
        """Return x padded with zeros at the end."""
        missing = self.held - self.size
        return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, missing),)) if missing else x

    def factor(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows W"]:
        """Return r x, padded, for x that multiplies a vector divided by its root mean square."""
        held = self.held > self.size
        return self.widened(x * math.sqrt(self.size / self.held)) if held else x

    def epsilon(self, epsilon: float) -> float:
        """Return the epsilon rescaled for a mean square over the padded width."""
        return epsilon * self.size / self.held


def as_they_are(module: nnx.Module) -> nnx.Module:
    """Return a copy of a store or mixer whose `tiles` do not pad; others are returned unchanged.

    Kernels for a few tokens take vectors of any size, and XLA would spend time on padding them.
    """
    given = getattr(module, "tiles", None)
    if given is None or given.size == given.held:
        return module
    module = nnx.clone(module)
    module.tiles = Tiles(given.size, given.size)
    return module


def width(config: cfg.ModelConfig) -> Choice:
    """Choose how many numbers a vector of a model's bank has, including zeros."""
    vectors = not config.store.has_keys and getattr(config.mixer, "fused", False)
    by_kernels = vectors and config.norm == "rmsnorm"
    return padded_width(config.residual_shape[-1], by_kernels=by_kernels)


def tiles(config: cfg.ModelConfig) -> Tiles:
    """Return how a model's vectors are held."""
    return Tiles(config.residual_shape[-1], width(config).value)
