"""Vectors of a bank in whole tiles of a TPU, so that its kernels take them as they lie.

A vector of D numbers is held as one of W, zeros behind it, where W is the next multiple of 128.
Memory and products of a TPU have that many anyway, and else every kernel would have a copy made of
what it is given. With mean squares over W in place of D,

    <query, v> / sqrt(|v|^2 / D + epsilon) = <r query, v> / sqrt(|v|^2 / W + r^2 epsilon)

with `r = sqrt(D / W)`, and so is an RMS norm with its gain; a mean that is subtracted is not.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from rmt_tpu import config as cfg
from rmt_tpu.layers.choices import Choice, padded_width


class Tiles(NamedTuple):
    """How vectors are held.

    Attributes:
      size: D.
      held: W; D where they are held as they are.
    """

    size: int
    held: int

    def widened(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows W"]:
        """With zeros behind."""
        missing = self.held - self.size
        return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, missing),)) if missing else x

    def factor(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows W"]:
        """Of what is divided by a root of a mean square: r times as large, with zeros behind."""
        held = self.held > self.size
        return self.widened(x * math.sqrt(self.size / self.held)) if held else x

    def epsilon(self, epsilon: float) -> float:
        """That of such a mean square."""
        return epsilon * self.size / self.held


def as_they_are(module: nnx.Module) -> nnx.Module:
    """A store or a mixer like one that has `tiles`, without zeros; others as they are.

    Kernels for a few tokens take vectors of any size, and XLA takes longer to fill them up.
    """
    given = getattr(module, "tiles", None)
    if given is None or given.size == given.held:
        return module
    module = nnx.clone(module)
    module.tiles = Tiles(given.size, given.size)
    return module


def width(config: cfg.ModelConfig) -> Choice:
    """Choose how many numbers a vector of a model's bank has, zeros among them."""
    vectors = not config.store.has_keys and getattr(config.mixer, "fused", False)
    by_kernels = vectors and config.norm == "rmsnorm"
    return padded_width(config.residual_shape[-1], by_kernels=by_kernels)


def tiles(config: cfg.ModelConfig) -> Tiles:
    """Return how a model's vectors are held."""
    return Tiles(config.residual_shape[-1], width(config).value)
