"""Highway Transformer: a self-gating unit (SDU) in parallel with every sublayer.

Chai, Jin and Hou (2020), in the pre-norm form of the authors' code. The sublayer's own output is
`y_l = f_l(norm_l(h_{l-1}))`. The unit has a gate `T = act(x W_1)` and a value `v = x W_2`, where x
is `norm_l(h_{l-1})` or the raw `h_{l-1}`. The variants are:

    add      h_l = h_{l-1} + y_l + T * v
    carry    h_l = (1 - T) * h_{l-1} + y_l + T * v
    gated    h_l = h_{l-1} + (1 - T) * y_l + T * v

There are no biases. With `W_2 = 0`, "add" is the standard residual stream.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

import sharding
from rmt_tpu import config as cfg
from rmt_tpu.layers.data_vectors import Read
from rmt_tpu.layers.parameters import Seed, parameter
from rmt_tpu.residual.protocols import Index, StepwiseStore


class HighwayState(NamedTuple):
    """The state that the mixer passes from site to site.

    Attributes:
      residual: the residual h.
      write_scale: the factor that multiplies the next sublayer's output; None means 1.
    """

    residual: Float[Array, "batch seq D"]
    write_scale: Float[Array, "batch seq D"] | None


class HighwayMix(nnx.Module):
    """The weights W_1 and W_2, side by side in [D, 2 D] so that one product with x uses both."""

    def __init__(self, config: cfg.ModelConfig, seed: Seed):
        dim = config.store.dim
        std = config.init_std * dim**-0.5
        axes = ("embed", "gate")
        self.gate_and_value = parameter(
            seed / "gate_and_value", (dim, 2 * dim), std=std, role="hidden", axes=axes
        )


class Highway(nnx.Module):
    """The mixer for `config.Highway`; the last site, before the unembedding, has no gating unit."""

    def __init__(self, config: cfg.ModelConfig):
        self.mixer = config.mixer
        self.activation = {"sigmoid": jax.nn.sigmoid, "tanh": jnp.tanh}[self.mixer.activation]

    def start(
        self, store: StepwiseStore, state: Float[Array, "batch seq D"], y: Array
    ) -> tuple[HighwayState, Array]:
        """Return the mixer's state before the first write, and y, the embedding."""
        residual = store.hold(state)
        scale = jnp.ones_like(residual) if self.mixer.form == "gated" else None
        return HighwayState(residual, scale), y

    @jax.named_scope("residual")
    def advance(
        self,
        store: StepwiseStore,
        state: HighwayState,
        y: Float[Array, "batch seq_or_gathered vectors size"],
        site: nnx.Module,
        index: Index,
    ) -> tuple[HighwayState, Read]:
        """Write y to the residual and read z for the next sublayer.

        The returned state already includes the gated terms of the next update of h. Only the next
        sublayer's output is missing.
        """
        h, write_scale = state
        written = store.write_term(y, site.write).astype(h.dtype)
        h = h + written if write_scale is None else h + write_scale * written
        normed = store.apply_norm(h, site, y.dtype)
        z = store.project(normed, site)
        if site.mix is None:
            return HighwayState(h, write_scale), z
        x = normed if self.mixer.input == "normed" else h.astype(y.dtype)
        w = sharding.gather(site.mix.gate_and_value.astype(x.dtype), "fsdp", axis=0)
        product = jnp.dot(x, w)
        gate, value = jnp.split(product, 2, axis=-1)
        gate = self.activation(gate)
        added, closed = (gate * value).astype(h.dtype), (1 - gate).astype(h.dtype)
        match self.mixer.form:
            case "add":
                return HighwayState(h + added, None), z
            case "carry":
                return HighwayState(closed * h + added, None), z
            case "gated":
                return HighwayState(h + added, closed), z
