"""DenseFormer: a layer reads a learned weighted sum of all layers' outputs.

Pagliardini et al. (NeurIPS 2024). X_0 is the embedding and X_i the output of layer i, which runs as
in the plain model on what it is given:

    X_i = layer_i(Y_{i-1})      Y_0 = X_0      Y_i = sum over j <= i, j = i mod k, of a_ij X_j

if p divides i, and else `Y_i = X_i`. The a_ij are free numbers: `a_ii = 1` and 0 elsewhere at the
start, which is the plain model. The unembedding reads Y_L.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from rmt_tpu import config as cfg
from rmt_tpu.layers import stacks


class Dense(nnx.Module):
    """The mixer of `config.Dense`, by the schedule of `rmt_tpu.execution.banked`.

    Attributes:
      weights: all a_ij that there are, row after row.
    """

    completes_inside, keeps_sum = True, False

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

    @property
    def group_layers(self) -> int:
        """Layers that take the outputs before them in one pass."""
        return max(1, round(self.num_layers**0.5))

    def first_row(self, layer: Int[Array, ""] | int) -> Int[Array, ""] | int:
        """The row of a layer's output."""
        return layer + 1

    def group_rows(self, layers: int) -> int:
        """Rows that a group of so many layers completes."""
        return layers

    def shared(self, layers: nnx.Module) -> Float[Array, "layers rows"]:
        """Row i of the matrix a is what layer i + 1 reads with."""
        return self.matrix()[:-1]

    def matrix(self) -> Float[Array, "rows rows"]:
        """a_ij; where none is learned, 1 on the diagonal and else 0."""
        learned = np.asarray(self.learned)
        matrix = jnp.eye(self.num_rows, dtype=self.weights[...].dtype)
        return matrix.at[np.nonzero(learned)].set(self.weights[...])

    def prior(
        self,
        shared: Float[Array, "layers rows"],
        bank: Float[Array, "rows batch seq *shape"],
        count: Int[Array, ""] | int,
    ) -> Float[Array, "layers batch seq *shape"]:
        """What the rows before a group give to each of its layers."""
        return _mix(shared, bank, jnp.arange(self.num_rows) < count)

    def prior_backward(self, shared, bank, count, prior, d_prior, d_bank):
        """Cotangents of what `prior` was given, that of the bank added to `d_bank`."""
        _, pullback = jax.vjp(lambda shared, bank: self.prior(shared, bank, count), shared, bank)
        d_shared, of_prior = pullback(d_prior)
        return d_shared, d_bank + of_prior

    def layer(self, store, sublayers, of_layer, prior, offset, rows, current):
        """One layer of the plain model on what it reads; its output is a row."""
        layer, index = sublayers.layer, sublayers.index
        first = index - offset + 1
        # Behind the last row is nothing: a slice that reached beyond it would be moved back.
        padded = jnp.pad(of_layer.shared, (0, len(rows)))
        weights = jax.lax.dynamic_slice_in_dim(padded, first, len(rows), 0)
        own = _mix(weights[None], rows, jnp.arange(len(rows)) < offset)[0]
        prior, earlier = stacks.take(prior, offset)
        residual = earlier + own
        z = store.read(residual, layer.attention_site, store.compute_dtype)
        y = sublayers.attention(z)
        residual = store.write(residual, y, layer.feed_forward_site.writer)
        z = store.read(residual, layer.feed_forward_site, store.compute_dtype)
        residual = store.write(residual, sublayers.feed_forward(z), of_layer.after)
        return prior, stacks.put(rows, residual, offset), current

    def final(self, store, bank, final_site):
        """What the unembedding reads: Y_L."""
        residual = _mix(self.matrix()[-1:], bank, jnp.ones(self.num_rows, bool))[0]
        return store.read(residual, final_site, store.compute_dtype)


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
