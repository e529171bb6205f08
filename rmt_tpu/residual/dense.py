"""DenseFormer: a layer reads a learned weighted sum of all layers' outputs.

Pagliardini et al. (NeurIPS 2024). X_0 is the embedding and X_i the output of layer i, which runs as
in the plain model on what it is given:

    X_i = layer_i(Y_{i-1})      Y_0 = X_0      Y_i = sum over j <= i, j = i mod k, of a_ij X_j

if p divides i, and else `Y_i = X_i`. The a_ij are free numbers: `a_ii = 1` and 0 elsewhere at the
start, which is the plain model. The unembedding reads Y_L.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

from rmt_tpu import config as cfg
from rmt_tpu.layers import stacks
from rmt_tpu.layers.data_vectors import Read
from rmt_tpu.residual.protocols import (
    At,
    Bank,
    DepthWeights,
    Grouping,
    Index,
    Row,
    Store,
    Unstacked,
    Written,
)


class Dense(nnx.Module):
    """The mixer of `config.Dense`, by the schedule of `rmt_tpu.execution.banked`.

    Attributes:
      weights: all a_ij that there are, row after row.
    """

    keeps_sum = False

    def __init__(self, config: cfg.ModelConfig):
        self.num_layers, self.num_rows = config.num_layers, config.num_layers + 1
        period, dilation = config.mixer.period, config.mixer.dilation
        i, j = np.indices((self.num_rows, self.num_rows))
        learned = (i > 0) & (i % period == 0) & (j <= i) & ((i - j) % dilation == 0)
        # Static: which of the matrix's entries are learned, and where they are in `weights`.
        self.learned = tuple(map(tuple, learned.tolist()))
        self.weights = nnx.Param(
            jnp.asarray((i == j)[learned], jnp.float32), role="gain", axes=("source",)
        )

    def grouping(self, first: int, period: int, repeat: int) -> Grouping:
        """About as many layers as there are groups."""
        layers = max(1, round(2 * round(self.num_layers**0.5) / period))
        return Grouping(min(layers, repeat), False, False, lambda sublayers: sublayers // 2)

    def first_row(self, sublayer: Index) -> Index:
        """The row of its layer's output."""
        return sublayer // 2 + 1

    def scores(self, sites: Sequence[Sequence[nnx.Module]]) -> Float[Array, "sublayers rows"]:
        """Row i of the matrix a is what layer i + 1 reads with, at the first of its two sites."""
        return jnp.repeat(self.matrix()[:-1], 2, axis=0)

    def matrix(self) -> Float[Array, "rows rows"]:
        """a_ij; where none is learned, 1 on the diagonal and else 0."""
        learned = np.asarray(self.learned)
        matrix = jnp.eye(self.num_rows, dtype=self.weights[...].dtype)
        return matrix.at[np.nonzero(learned)].set(self.weights[...])

    def prior(
        self,
        scores: Float[Array, "sites rows"],
        bank: Bank,
        count: Index,
    ) -> Float[Array, "layers batch seq *shape"]:
        """What the rows before a group give to each of its layers."""
        return _mix(scores[::2], bank, jnp.arange(self.num_rows) < count)

    def prior_backward(
        self,
        scores: Float[Array, "sites scored"],
        bank: Bank,
        count: Index,
        prior: Array,
        d_prior: Array,
        d_bank: Bank,
    ) -> tuple[Float[Array, "sites scored"], Bank]:
        """Cotangents of what `prior` was given, that of the bank added to `d_bank`."""
        _, pullback = jax.vjp(lambda scores, bank: self.prior(scores, bank, count), scores, bank)
        d_scores, of_prior = pullback(d_prior)
        return d_scores, d_bank + of_prior

    def read(
        self,
        store: Store,
        site: nnx.Module,
        score: Float[Array, " scored"],
        prior: Array,
        rows: Bank | None,
        current: Row,
        at: At,
    ) -> tuple[Array, Bank | None, Row, Read]:
        """A layer begins with what it reads, and goes on as in the plain model."""
        if site.begins_layer:
            offset = (at.sublayer - at.group) // 2
            # Behind the last row is nothing: a slice that reached beyond it would be moved back.
            padded = jnp.pad(score, (0, len(rows)))
            weights = jax.lax.dynamic_slice_in_dim(padded, self.first_row(at.group), len(rows), 0)
            own = _mix(weights[None], rows, jnp.arange(len(rows)) < offset)[0]
            prior, earlier = stacks.take(prior, offset)
            current = earlier + own
        return prior, rows, current, store.read(current, site, store.compute_dtype)

    def seal(
        self, site: nnx.Module, rows: Bank | None, current: Row, at: At
    ) -> tuple[Bank | None, Row]:
        """The output of a layer is a row."""
        if not site.begins_layer:
            rows = stacks.put(rows, current, (at.sublayer - at.group) // 2)
        return rows, current

    def final(self, store: Store, bank: Bank, final_site: nnx.Module) -> Read:
        """What the unembedding reads: Y_L."""
        residual = _mix(self.matrix()[-1:], bank, jnp.ones(self.num_rows, bool))[0]
        return store.read(residual, final_site, store.compute_dtype)

    def unrolled(
        self,
        store: Store,
        state: Float[Array, "batch seq *shape"],
        y: Written,
        sublayers: Sequence[Unstacked],
        final_site: nnx.Module,
    ) -> tuple[Read, tuple]:
        """All layers one by one: see `protocols.Banked`. Weights are not of tokens."""
        matrix = self.matrix()
        given = [store.write(store.hold(state), y, sublayers[0].site.writer)]
        read = lambda row: sum(a * x for a, x in zip(row, given, strict=False))
        for layer, row in zip(range(0, len(sublayers), 2), matrix, strict=False):
            residual = read(row)
            for site, core, writer in sublayers[layer : layer + 2]:
                y = core(store.read(residual, site, store.compute_dtype))
                residual = store.write(residual, y, writer)
            given.append(residual)
        return store.read(read(matrix[-1]), final_site, store.compute_dtype), ()

    def depth_weights(
        self, names: Sequence[str], means: Sequence[Float[np.ndarray, " _"]]
    ) -> DepthWeights:
        """a_ij itself: row i is what layer i + 1 reads, the last the unembedding."""
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
    weights: Float[Array, "layers rows"],
    rows: Float[Array, "rows batch seq *shape"],
    active: Bool[Array, " rows"],
) -> Float[Array, "layers batch seq *shape"]:
    """Weighted sums of the active rows, in their dtype; the sums are at least float32."""
    dtype = jnp.result_type(rows, jnp.float32)
    weights = jnp.expand_dims(weights.astype(dtype), range(2, 1 + rows.ndim))
    # Term by term: as a reduction over a stack it is ten times slower on a CPU.
    terms = (
        weights[:, j] * jnp.where(active[j], rows[j], 0).astype(dtype) for j in range(len(rows))
    )
    return sum(terms).astype(rows.dtype)
