"""Depth-wise LSTM: one LSTM cell per layer replaces the residual and holds the feed-forward layer.

Xu, Song, Liu, van Genabith and Xiong (2024). The state of a token is an output o and a cell c.
Layer b computes:

    a = MHA_b(o_{b-1})                         no norm before it, no residual around it
    z = [a; o_{b-1}]
    i, g, q = s(LN(z W_i)), s(LN(z W_f) + forget_offset), s(LN(z W_o))
    t = gelu(LN(z W_1)) W_2                    the feed-forward layer, of sizes 2D, F and D
    c_b = g * c_{b-1} + i * t,   o_b = q * c_b

Here s is the sigmoid, `o_0` is the embedding, and `c_0` is zero or the embedding. There are no
biases. Outputs are not summed over depth, so no weight needs a smaller initial scale in a deeper
model. Where the paper leaves details open, this code follows its author's code: each gate's norm
has its own gain, and the output gate multiplies the cell directly.
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
from rmt_tpu.residual.protocols import Index, VectorStore

_GATES = 3


class State(NamedTuple):
    """A cell before its feed-forward output t is known: `c = kept + admitted * t`, `o = shown * c`.

    The fields `kept`, `admitted` and `shown` are the gated old cell, the input gate and the output
    gate.
    """

    kept: Float[Array, "batch seq D"]
    admitted: Float[Array, "batch seq D"]
    shown: Float[Array, "batch seq D"]


class Cell(NamedTuple):
    """The output o and the cell c after a complete layer."""

    output: Float[Array, "batch seq D"]
    cell: Float[Array, "batch seq D"]


class Mix(nnx.Module):
    """The gate parameters in a layer's second site, which precedes the feed-forward layer.

    Attributes:
      gates: W_i, W_f and W_o side by side, [2 D, 3 D], so that one matrix product computes all
        gates.
      gate_gains: the gains of the gates' norms, [3, D].
    """

    def __init__(self, config: cfg.ModelConfig, seed: Seed):
        dim = config.store.dim
        std = config.init_std * (2 * dim) ** -0.5
        shape, axes = (2 * dim, _GATES * dim), ("embed", "gate")
        self.gates = parameter(seed / "gates", shape, std=std, role="hidden", axes=axes)
        self.gate_gains = gain((_GATES, dim), axes=("gate", "width"))


class DepthLstm(nnx.Module):
    """The mixer for `config.DepthLstm`."""

    def __init__(self, config: cfg.ModelConfig):
        self.mixer = config.mixer
        self.norm, self.epsilon = config.norm, config.norm_epsilon

    def start(
        self, store: VectorStore, state: Float[Array, "batch seq D"], y: Array
    ) -> tuple[State, Array]:
        """Return the initial state, and the embedding y, which is written to it first.

        The output gate is fully open, so that the output o_0 is the whole embedding.
        """
        kept = store.hold(state)
        return State(kept, jnp.ones_like(kept), jnp.ones_like(kept)), y

    @jax.named_scope("residual")
    def advance(
        self,
        store: VectorStore,
        state: State | Cell,
        y: Float[Array, "batch y_seq vectors size"],
        site: nnx.Module,
        index: Index,
    ) -> tuple[State | Cell, Read]:
        """Complete the current cell and read its output, or compute the gates of the next cell."""
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
