"""DenseFormer: a layer reads a learned weighted sum of the outputs of all earlier layers.

Pagliardini et al. (NeurIPS 2024). X_0 is the embedding, and X_i is the output of layer i, an
ordinary layer with the standard residual inside it:

    X_i = layer_i(Y_{i-1})      Y_0 = X_0      Y_i = sum over j <= i, j = i mod k, of a_ij X_j

The sum is taken if the period p divides i; otherwise `Y_i = X_i`. k is the dilation. The weights
a_ij are unconstrained. They are initialised to `a_ii = 1` and 0 elsewhere, so that the model starts
as one with the standard residual. The unembedding reads Y_L.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

import pallas_kernels
from rmt_tpu import config as cfg
from rmt_tpu.layers import stacks
from rmt_tpu.layers.data_vectors import Read
from rmt_tpu.residual.protocols import (
    Bank,
    DepthIndex,
    DepthWeights,
    Grouping,
    Index,
    Row,
    SingleSublayer,
    Store,
    Written,
)


class LayerBank(nnx.Module):
    """The base class of mixers that keep the output of every layer in a bank.

    A bank is a stack of rows, and its first row is the embedding. Every layer has two sublayers.
    """

    keeps_sum = False
    embedding_row = 0

    def __init__(self, config: cfg.ModelConfig):
        self.num_layers, self.num_rows = config.num_layers, config.num_layers + 1

    def embedding(self, row: Row) -> Row:
        """Return `row` itself, because sites read the embedding unchanged."""
        return row

    def first_row(self, sublayer: Index) -> Index:
        """Return the index of the first row that a group of layers completes.

        `sublayer` is the number of sublayers before the group.
        """
        return self.row(sublayer)

    def row(self, sublayer: Index) -> Index:
        """Return the index of the bank row for the layer that contains a sublayer."""
        return sublayer // 2 + 1

    def seal(
        self, site: nnx.Module, rows: Bank | None, current: Row, at: DepthIndex
    ) -> tuple[Bank | None, Row]:
        """Store the residual `current` in a layer's bank row after the layer's last sublayer."""
        if not site.begins_layer:
            rows = stacks.update_at(rows, current, (at.sublayer - at.group) // 2)
        return rows, current


class Dense(LayerBank):
    """The mixer for `config.Dense`, run by the schedule `rmt_tpu.execution.banked`.

    Attributes:
      weights: all learned a_ij in one vector, in row-major order.
    """

    def __init__(self, config: cfg.ModelConfig):
        super().__init__(config)
        period, dilation = config.mixer.period, config.mixer.dilation
        i, j = np.indices((self.num_rows, self.num_rows))
        learned = (i > 0) & (i % period == 0) & (j <= i) & ((i - j) % dilation == 0)
        # `learned` marks the learned entries of the matrix. It is a tuple, so that JAX treats it as
        # a constant.
        self.learned = tuple(map(tuple, learned.tolist()))
        self.weights = nnx.Param(
            jnp.asarray((i == j)[learned], jnp.float32), role="gain", axes=("source",)
        )

    def grouping(self, first: int, period: int, repeat: int) -> Grouping:
        """Return groups of about sqrt(L) layers each, with L the number of layers.

        The layers of a group read the earlier rows of the bank in one pass.
        """
        layers = max(1, round(2 * round(self.num_layers**0.5) / period))
        return Grouping(min(layers, repeat), False, False, lambda sublayers: sublayers // 2)

    def scores(self, sites: Sequence[Sequence[nnx.Module]]) -> Float[Array, "sublayers rows"]:
        """Return, for each sublayer, the row of the matrix a_ij for its layer.

        Both sublayers of layer i + 1 get row i; only the first one uses it.
        """
        return jnp.repeat(self.matrix()[:-1], 2, axis=0)

    def matrix(self) -> Float[Array, "rows rows"]:
        """Return the matrix a_ij, whose other entries are those of the identity matrix."""
        learned = np.asarray(self.learned)
        matrix = jnp.eye(self.num_rows, dtype=self.weights[...].dtype)
        return matrix.at[np.nonzero(learned)].set(self.weights[...])

    def prior(
        self,
        scores: Float[Array, "sites rows"],
        bank: Bank,
        count: Index,
    ) -> Float[Array, "layers batch seq *shape"]:
        """Run phase one: compute each layer's weighted sum of the rows before a group of layers.

        `scores` has two equal rows of weights per layer, and `count` is the number of rows before
        the group.
        """
        return _mix(scores[::2], bank, count)[1]

    def initial_cotangent(self, prior: Array, d_bank: Bank) -> Array:
        """Return an uninitialised cotangent of `prior`; each layer writes its own slice of it."""
        return stacks.empty_like(prior)

    def prior_backward(
        self,
        scores: Float[Array, "sites scored"],
        bank: Bank,
        count: Index,
        prior: Array,
        d_prior: Array,
        d_bank: Bank,
    ) -> tuple[Float[Array, "sites scored"], Bank]:
        """Run the backward pass of phase one (the method `prior`); see `protocols.BankMixer`."""
        _, pull_back = jax.vjp(lambda scores, bank: _mix(scores[::2], bank, count), scores, bank)
        return pull_back((d_bank, d_prior))

    def read(
        self,
        store: Store,
        site: nnx.Module,
        score: Float[Array, " scored"],
        prior: Array,
        rows: Bank | None,
        current: Row,
        at: DepthIndex,
    ) -> tuple[Array, Bank | None, Row, Read]:
        """Read the residual at one site, as in a model with the standard residual.

        The first site of a layer first computes the layer's input, the weighted sum of earlier
        outputs.
        """
        if site.begins_layer:
            offset = (at.sublayer - at.group) // 2
            # The weights in `score` are padded with zeros, because JAX shifts a dynamic slice that
            # would extend past the end.
            padded = jnp.pad(score, (0, len(rows)))
            weights = jax.lax.dynamic_slice_in_dim(padded, self.first_row(at.group), len(rows), 0)
            rows, own = _mix(weights[None], rows, offset)
            prior, earlier = stacks.slice_once(prior, offset)
            current = earlier + own[0]
        return prior, rows, current, store.read(current, site, store.compute_dtype)

    def final(self, store: Store, bank: Bank, final_site: nnx.Module) -> Read:
        """Return the input of the unembedding, read from Y_L, the last weighted sum of outputs."""
        _, (residual,) = _mix(self.matrix()[-1:], bank, self.num_rows)
        return store.read(residual, final_site, store.compute_dtype)

    def unrolled(
        self,
        store: Store,
        state: Float[Array, "batch seq *shape"],
        y: Written,
        sublayers: Sequence[SingleSublayer],
        final_site: nnx.Module,
    ) -> tuple[Read, tuple]:
        """Run all layers one by one; see `protocols.BankMixer`.

        The weights do not depend on the tokens, so none are returned.
        """
        matrix = self.matrix()
        inputs = [store.write(store.hold(state), y, sublayers[0].site.writer)]
        read = lambda row: sum(a * x for a, x in zip(row, inputs, strict=False))
        for layer, row in zip(range(0, len(sublayers), 2), matrix, strict=False):
            residual = read(row)
            for site, core, writer in sublayers[layer : layer + 2]:
                y = core(store.read(residual, site, store.compute_dtype))
                residual = store.write(residual, y, writer)
            inputs.append(residual)
        return store.read(read(matrix[-1]), final_site, store.compute_dtype), ()

    def depth_weights(
        self, names: Sequence[str], means: Sequence[Float[np.ndarray, " _"]]
    ) -> DepthWeights:
        """Return the weights a_ij, which are the same for all tokens.

        Layer i + 1 reads with row i, and the unembedding reads with the last row.
        """
        matrix, learned = np.asarray(self.matrix()), np.asarray(self.learned)
        there = learned | np.eye(len(matrix), dtype=bool)
        layers = [str(1 + layer) for layer in range(self.num_layers)]
        mean = [
            [float(w) if shown else None for w, shown in zip(*row, strict=True)]
            for row in zip(matrix, there, strict=True)
        ]
        return DepthWeights([*layers, "U"], ["E", *layers], mean, signed=True)


@jax.named_scope("residual")
def _mix(
    weights: Float[Array, "layers rows"], rows: Bank, count: Index
) -> tuple[Bank, Float[Array, "layers batch seq *shape"]]:
    """Return the rows, and a weighted sum of the first `count` rows for each layer."""
    of_tokens = jnp.broadcast_to(weights[..., None, None], (*weights.shape, *rows.shape[1:3]))
    return pallas_kernels.depth_sums(of_tokens, rows, count=count)
