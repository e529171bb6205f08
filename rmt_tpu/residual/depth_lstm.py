"""Depth-wise LSTM: each layer has a cell in place of residuals, which holds the feed-forward layer.

Xu, Song, Liu, van Genabith and Xiong (2024). A token's state is an output o and a cell c; layer b:

    a = MHA_b(o_{b-1})                         no norm before it, no residual around it
    z = [a; o_{b-1}]
    i, g, q = s(LN(z W_i)), s(LN(z W_f) + forget_offset), s(LN(z W_o))
    t = gelu(LN(z W_1)) W_2                    the feed-forward layer, of sizes 2D, F and D
    c_b = g * c_{b-1} + i * t,   o_b = q * c_b

with s the sigmoid, `o_0` the embedding, `c_0` zero or the embedding, and no biases. Nothing is
added up over depth, so no weight starts smaller by depth. Where the paper leaves a choice, this
code follows its author's: each gate's norm has its own gain, and the output gate multiplies the
cell itself.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

import sharding
from rmt_tpu import config as cfg
from rmt_tpu.layers.data_vectors import Read
from rmt_tpu.layers.norm import normalize
from rmt_tpu.layers.parameters import Seed, gain, parameter
from rmt_tpu.residual.protocols import Index, Stepwise

_GATES = 3


class State(NamedTuple):
    """A cell that waits for t: `c = kept + admitted * t; o = shown * c`."""

    kept: Float[Array, "batch seq D"]
    admitted: Float[Array, "batch seq D"]
    shown: Float[Array, "batch seq D"]


class Cell(NamedTuple):
    """The output and the cell of a complete layer, between the sublayers of the next one."""

    output: Float[Array, "batch seq D"]
    cell: Float[Array, "batch seq D"]


class Mix(nnx.Module):
    """The parameters of a layer's second site.

    Attributes:
      gates: W_i, W_f and W_o side by side, [2 D, 3 D], for one matrix product.
      gate_gains: the gains of the gates' norms, [3, D].
    """

    def __init__(self, config: cfg.ModelConfig, seed: Seed):
        dim = config.store.dim
        std = config.init_std * (2 * dim) ** -0.5
        shape, axes = (2 * dim, _GATES * dim), ("embed", "gate")
        self.gates = parameter(seed / "gates", shape, std=std, role="hidden", axes=axes)
        self.gate_gains = gain((_GATES, dim), axes=("gate", "width"))


class DepthLstm(nnx.Module):
    """The mixer of `config.DepthLstm`."""

    def __init__(self, config: cfg.ModelConfig):
        self.mixer = config.mixer
        self.norm, self.epsilon = config.norm, config.norm_epsilon

    def start(
        self, store: Stepwise, state: Float[Array, "batch seq D"], y: Array
    ) -> tuple[State, Array]:
        """Return y, and a cell that waits for y, the embedding, to show all of it as o_0."""
        kept = store.hold(state)
        return State(kept, jnp.ones_like(kept), jnp.ones_like(kept)), y

    @jax.named_scope("residual")
    def advance(
        self,
        store: Stepwise,
        state: State | Cell,
        y: Float[Array, "batch y_seq vectors size"],
        site: nnx.Module,
        index: Index,
    ) -> tuple[State | Cell, Read]:
        """Finish a cell and read its output, or open the gates of the next cell."""
        written = store.written(y, site.write)
        if site.mix is None:
            cell = state.kept + state.admitted * written.astype(state.kept.dtype)
            output = state.shown * cell
            if self.mixer.cell_start == "zero":
                cell = jnp.where(index == 0, jnp.zeros_like(cell), cell)
            return Cell(output, cell), store.read(output, site, y.dtype)
        z = jnp.concatenate([written, state.output.astype(y.dtype)], axis=-1)
        w = sharding.gather(site.mix.gates.astype(z.dtype), "fsdp", axis=0)
        gates = jnp.split(jnp.dot(z, w), _GATES, axis=-1)
        offsets = (0.0, self.mixer.forget_offset, 0.0)
        admit, forget, show = (
            self._opened(gate, gain, offset).astype(state.cell.dtype)
            for gate, gain, offset in zip(gates, site.mix.gate_gains[...], offsets, strict=True)
        )
        return State(forget * state.cell, admit, show), store.project(z, site)

    def _opened(self, gate, gain, offset):
        norm = {"norm": self.norm, "epsilon": self.epsilon}
        return jax.nn.sigmoid(normalize(gate, gain, **norm, dtype=gate.dtype) + offset)
