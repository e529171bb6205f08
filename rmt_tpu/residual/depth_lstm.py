"""Depth-wise LSTM: LSTM cells replace the residual and contain the feed-forward layers.

Xu, Song, Liu, van Genabith and Xiong (2024). The state of a token is an output o and a cell c.
Layer b computes:

    a = MHA_b(o_{b-1})                         no norm before it, no residual around it
    z = [a; o_{b-1}]
    i, g, q = s(LN(z W_i)), s(LN(z W_f) + forget_offset), s(LN(z W_o))
    t = gelu(LN(z W_1)) W_2                    the feed-forward layer, of sizes 2D, F and D
    c_b = g * c_{b-1} + i * t,   o_b = q * c_b

Here s is the sigmoid, `o_0` is the embedding, and `c_0` is zero or the embedding. There are no
biases. Where the paper leaves details open, this code follows its author's code. Each gate's norm
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
from rmt_tpu.residual.protocols import Index, StepwiseStore

_GATES = 3


class LstmState(NamedTuple):
    """The gates and the old cell of a layer whose feed-forward output t is not known yet.

    The new cell is `c = old_cell + input_gate * t`, and the layer's output is
    `o = output_gate * c`.

    Attributes:
      old_cell: the cell of the previous layer, already multiplied by the forget gate.
      input_gate: the factor of t.
      output_gate: the factor of c.
    """

    old_cell: Float[Array, "batch seq D"]
    input_gate: Float[Array, "batch seq D"]
    output_gate: Float[Array, "batch seq D"]


class LstmCell(NamedTuple):
    """The output o and the cell c of the LSTM after a complete layer."""

    output: Float[Array, "batch seq D"]
    cell: Float[Array, "batch seq D"]


class LstmGates(nnx.Module):
    """The gates' parameters, which belong to the site before a layer's feed-forward sublayer.

    Attributes:
      gates: W_i, W_f and W_o side by side, [2 D, 3 D].
      gate_gains: the gains of the gates' norms, [3, D].
    """

    def __init__(self, config: cfg.ModelConfig, seed: Seed):
        dim = config.store.dim
        std = config.init_std * (2 * dim) ** -0.5
        shape, axes = (2 * dim, _GATES * dim), ("embed", "gate")
        self.gates = parameter(seed / "gates", shape, std=std, role="hidden", axes=axes)
        self.gate_gains = gain((_GATES, dim), axes=("gate", "width"))


class DepthLstm(nnx.Module):
    """The mixer for `config.DepthLstm`: an LSTM over depth in place of the residual."""

    def __init__(self, config: cfg.ModelConfig):
        self.mixer = config.mixer
        self.norm, self.epsilon = config.norm, config.norm_epsilon

    def start(
        self, store: StepwiseStore, state: Float[Array, "batch seq D"], y: Array
    ) -> tuple[LstmState, Array]:
        """Return the LSTM's state before the first write, and y, the embedding.

        The output gate is 1, so that o_0 is the embedding.
        """
        cell = store.hold(state)
        return LstmState(cell, jnp.ones_like(cell), jnp.ones_like(cell)), y

    @jax.named_scope("residual")
    def advance(
        self,
        store: StepwiseStore,
        state: LstmState | LstmCell,
        y: Float[Array, "batch seq_or_gathered vectors size"],
        site: nnx.Module,
        index: Index,
    ) -> tuple[LstmState | LstmCell, Read]:
        """Write the output y, and read the input of the next sublayer.

        The site before a feed-forward sublayer computes the gates of the next cell. Every other
        site completes the current cell from the feed-forward output y.
        """
        written = store.write_term(y, site.write)
        if site.mix is None:
            cell = state.old_cell + state.input_gate * written.astype(state.old_cell.dtype)
            output = state.output_gate * cell
            if self.mixer.cell_start == "zero":
                cell = jnp.where(index == 0, jnp.zeros_like(cell), cell)
            return LstmCell(output, cell), store.read(output, site, y.dtype)
        z = jnp.concatenate([written, state.output.astype(y.dtype)], axis=-1)
        w = sharding.gather(site.mix.gates.astype(z.dtype), "fsdp", axis=0)
        gates = jnp.split(jnp.dot(z, w), _GATES, axis=-1)
        offsets = (0.0, self.mixer.forget_offset, 0.0)
        input_gate, forget_gate, output_gate = (
            self._gate(gate, gain, offset).astype(state.cell.dtype)
            for gate, gain, offset in zip(gates, site.mix.gate_gains[...], offsets, strict=True)
        )
        return LstmState(forget_gate * state.cell, input_gate, output_gate), store.project(z, site)

    def _gate(self, gate, gain, offset):
        norm = {"norm": self.norm, "epsilon": self.epsilon}
        return jax.nn.sigmoid(normalize(gate, gain, **norm, dtype=gate.dtype) + offset)
