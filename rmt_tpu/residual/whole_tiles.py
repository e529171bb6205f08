"""Padding of a bank's vectors to whole TPU tiles, so that kernels can read them without a copy.

A bank is the stack of vectors that attention over depth reads. A vector of D numbers is padded with
zeros at the end to W numbers, the next multiple of 128. A TPU stores tiles of 128 numbers in any
case. Without the padding, every kernel would work on a padded copy of its operands. If mean squares
are computed over W instead of D numbers,

    <query, v> / sqrt(|v|^2 / D + epsilon) = <r query, v> / sqrt(|v|^2 / W + r^2 epsilon)

with `r = sqrt(D / W)`. The same identity applies to an RMS norm with a gain, but not to a norm that
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
    """The sizes of a vector without and with padding.

    Attributes:
      size: D, the number of entries without padding.
      padded: W, the number of entries with padding; equal to D if vectors are not padded.
    """

    size: int
    padded: int

    def pad(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows W"]:
        """Return the vectors x, padded with zeros at the end from width D to width W."""
        missing = self.padded - self.size
        return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, missing),)) if missing else x

    def scale_and_pad(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows W"]:
        """Return `sqrt(D / W) x`, padded, for an x that is multiplied with an RMS-normed vector.

        The factor corrects for a mean square over W instead of D numbers.
        """
        padded = self.padded > self.size
        return self.pad(x * math.sqrt(self.size / self.padded)) if padded else x

    def epsilon(self, epsilon: float) -> float:
        """Return the epsilon of a norm, rescaled for a mean square over the padded width W."""
        return epsilon * self.size / self.padded


def without_padding(module: nnx.Module) -> nnx.Module:
    """Return a copy of a store or mixer that does not pad vectors.

    A module without padding is returned unchanged. Kernels for decode steps accept vectors of any
    size, and padding would only cost time there.
    """
    tiles_of_module = getattr(module, "tiles", None)
    if tiles_of_module is None or tiles_of_module.size == tiles_of_module.padded:
        return module
    module = nnx.clone(module)
    module.tiles = Tiles(tiles_of_module.size, tiles_of_module.size)
    return module


def width(config: cfg.ModelConfig) -> Choice:
    """Choose the width to which the vectors in a model's bank are padded."""
    vectors = not config.store.has_keys and getattr(config.mixer, "fused", False)
    by_kernels = vectors and config.norm == "rmsnorm"
    return padded_width(config.residual_shape[-1], by_kernels=by_kernels)


def tiles(config: cfg.ModelConfig) -> Tiles:
    """Return the unpadded and padded sizes of the vectors in a model's bank."""
    return Tiles(config.residual_shape[-1], width(config).value)
