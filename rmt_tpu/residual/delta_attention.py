"""Delta Attention Residuals: a standard residual, plus attention over what blocks add to it.

Delta Attention Residuals (arXiv 2605.18855, 2026). The standard residual `h_l = h_{l-1} + y_l` is
kept. The delta of a block is the sum of the outputs of its sublayers, by which the block changes h.
A site (the place before sublayer l, or before the unembedding) reads h and a softmax-weighted mean
of deltas:

    D_b = sum of the outputs of block b      D' = sum of the outputs since the last complete block
    logit_b = <gain * w_l, D_b> / rms(D_b)   a = softmax(logit)
    u_l = h_{l-1} + g_l sum_b a_b D_b        z_l = read(u_l)

Every site has a gain and a query w_l, which starts at zero. The embedding is part of h but is not a
delta. With a matrix store, deltas and queries are matrices `D_k x D_v`. This code adds two options:
- g_l, a learned gate per site. It starts at zero, so that the model starts as one with only the
  standard residual. In the paper, g_l is the constant 1.
- a null source with value 0 and a learned logit n_l. It gets the share `1 - sigmoid(L - n_l)` of
  the weight, where L is the log-sum-exp of the deltas' logits.

The deltas are in the first rows of the bank, as in Block AttnRes (`depth_attention`). The embedding
is in the last row, so that kernels do not attend to it. An additional query of zeros gives the
unweighted mean of the deltas, and thus their sum, which is a part of h. Therefore, h needs no other
pass over the bank.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

import pallas_kernels
from rmt_tpu import config as cfg
from rmt_tpu.layers import stacks
from rmt_tpu.layers.data_vectors import Read
from rmt_tpu.layers.parameters import Seed
from rmt_tpu.residual.depth_attention import DepthAttention, DepthAttentionMix, Prior
from rmt_tpu.residual.protocols import Bank, DepthIndex, DepthWeights, Index, Row, Store


class DeltaPrior(NamedTuple):
    """The result of phase one: attention from each site of a group to the deltas before the group.

    Attributes:
      mixed: the softmax-weighted means of these deltas, one per site, and last their unweighted
        mean.
      log_sums: the log-sum-exp of each site's logits, and last the logarithm of the number of
        deltas.
      residual: h before the group, which is the sum of the embedding and these deltas.
    """

    mixed: Float[Array, "*sites_batch_seq_shape"]
    log_sums: Float[Array, "*sites batch seq"]
    residual: Row


class DeltaAttentionMix(DepthAttentionMix):
    """The parameters of delta attention at one site, which include a query and a key gain.

    Attributes:
      gate: the factor g_l of the term that attention over deltas adds to h, [1].
      null_logit: the logit n_l of the null source, [1]; None if there is no null source.
    """

    def __init__(self, config: cfg.ModelConfig, seed: Seed):
        super().__init__(config, seed)
        scalar = lambda x: nnx.Param(jnp.full(1, x, jnp.float32), role="gain", axes=("source",))
        null = config.mixer.null_source
        self.gate = scalar(config.mixer.gate)
        self.null_logit = None if null is None else scalar(null)

    def add(self, residual: Row, mean: Row, log_sums: Float[Array, "batch seq"]) -> Row:
        """Return u, the residual h plus the gated mean of deltas.

        `log_sums` is L, the log-sum-exp of the deltas' logits, which is -inf without deltas.
        """
        weight = self.gate[...] * jnp.ones_like(log_sums)
        if self.null_logit is not None:
            weight = weight * jax.nn.sigmoid(log_sums - self.null_logit[...])
        weight = jnp.expand_dims(weight, range(weight.ndim, residual.ndim))
        return (residual + weight * mean).astype(residual.dtype)


class DeltaAttention(DepthAttention):
    """The mixer for `config.DeltaAttention`, run by `execution.banked`.

    A mixer forms a sublayer's input from earlier outputs.
    """

    @property
    def embedding_row(self) -> int:
        """The bank's last row, so that the rows before it are all deltas."""
        return self.num_rows - 1

    @property
    def keeps_standard_residual(self) -> bool:
        """True: every site reads the standard residual h."""
        return True

    def row(self, sublayer: Index) -> Index:
        """Return the index of the bank row that accumulates a sublayer's output."""
        return sublayer // self.block

    def decode_params(self, store: Store, scores: Array, stack: nnx.List) -> tuple:
        """Return an empty tuple, because kernels for decode steps do not support this mixer."""
        return ()

    def prior(self, scores: Float[Array, "sites scored"], bank: Bank, count: Index) -> DeltaPrior:
        """Run phase one: attend from all sites of a group to the `count` deltas before the group.

        `scores` has the sites' queries.
        """
        mixed, log_sums = self._partial(_with_zeros(scores), bank, count)
        wide = jnp.result_type(bank, jnp.float32)
        h = bank[self.embedding_row].astype(wide) + count * mixed[-1].astype(wide)
        return DeltaPrior(mixed, log_sums, h.astype(bank.dtype))

    def initial_cotangent(self, prior: DeltaPrior, d_bank: Bank) -> DeltaPrior:
        """Return the initial cotangent of phase one's result, with zeros for h.

        Every site adds to the cotangent of h. The other arrays are uninitialised, because each site
        writes its own slice.
        """
        empty = stacks.empty_like(prior)
        return empty._replace(residual=jnp.zeros_like(prior.residual))

    def prior_backward(
        self,
        scores: Float[Array, "sites scored"],
        bank: Bank,
        count: Index,
        prior: DeltaPrior,
        d_prior: DeltaPrior,
        d_bank: Bank,
    ) -> tuple[Float[Array, "sites scored"], Bank]:
        """Run the backward pass of phase one (the method `prior`); see `protocols.BankMixer`."""
        d_mixed, d_log_sums, d_h = d_prior
        # The last mean and log-sum-exp belong to the query of zeros. Sites read neither, but h
        # depends on the mean.
        d_mixed = stacks.update_at(d_mixed, count * d_h, len(scores))
        d_log_sums = stacks.update_at(d_log_sums, jnp.zeros_like(d_log_sums[0]), len(scores))
        prior, d_prior = Prior(*prior[:2]), Prior(d_mixed, d_log_sums)
        d_queries, d_bank = super().prior_backward(
            _with_zeros(scores), bank, count, prior, d_prior, d_bank
        )
        d_embedding = d_bank[self.embedding_row] + d_h
        return d_queries[:-1], stacks.update_at(d_bank, d_embedding, self.embedding_row)

    def final(self, store: Store, bank: Bank, final_site: nnx.Module) -> Read:
        """Return the input of the unembedding, which the final site reads from all rows."""
        query = self._folded(final_site).reshape(1, -1)
        (mean, _), (log_sums, _), h = self.prior(query, bank, self.embedding_row)
        u = final_site.mix.add(h, mean, log_sums)
        return store.read(u, final_site, store.compute_dtype)

    def read(
        self,
        store: Store,
        site: nnx.Module,
        score: Float[Array, " scored"],
        prior: DeltaPrior,
        rows: Bank | None,
        current: Row,
        at: DepthIndex,
    ) -> tuple[DeltaPrior, Bank | None, Row, Read]:
        """Run phase two at one site: attend to the group's own deltas too, and read u.

        See `protocols.BankMixer`.
        """
        place, active = at.sublayer - at.group, jnp.asarray(at.sublayer % self.block > 0)
        of_sites, log_sums = stacks.slice_once(prior.log_sums, place)
        prior, h = prior._replace(log_sums=of_sites), prior.residual
        sealed = prior.mixed, log_sums, place
        if rows is not None:
            count = self.row(at.sublayer) - self.first_row(at.group)
            h = h + _sum_of_first(rows, count)
            mixed, mean = stacks.slice_once(prior.mixed, place)
            prior, before = prior._replace(mixed=mixed), (mean[None], log_sums[None])
            rows, mixed, log_sums = self._of_rows(score[None], rows, count, before)
            sealed = mixed, log_sums[0], 0
        mixed, current, mean, log_sums = self._with_running(score, sealed, current, active, site)
        if rows is None:
            prior = prior._replace(mixed=mixed)
        # Before a block's first output, the running sum may contain arbitrary values.
        h = h + jnp.where(active, current, 0)
        u = site.mix.add(h, mean, log_sums)
        return prior, rows, current, store.read(u, site, store.compute_dtype)

    @jax.named_scope("residual")
    def _with_running(
        self,
        score: Float[Array, " scored"],
        sealed: tuple[Float[Array, "sites batch seq *shape"], Float[Array, "batch seq"], Index],
        current: Row,
        active: Bool[Array, ""],
        site: nnx.Module,
    ) -> tuple[Float[Array, "sites batch seq *shape"], Row, Row, Float[Array, "batch seq"]]:
        """Attend to the running sum `current` too, which is the delta of an incomplete block.

        Args:
          score: the site's query, multiplied by its key gain.
          sealed: the means of other deltas for several sites, the log-sum-exp of this site's
            logits, and the index of this site's mean.
          current: the running sum.
          active: whether there is a running sum.
          site: the site, which determines whether the log-sum-exp is needed.

        Returns:
          The means of all sites and the running sum, which replace the arguments; the mean and the
          log-sum-exp of this site. The latter lacks the running sum if the merge op has computed
          the mean. This op is only used without a null source, where nothing reads the log-sum-exp.
        """
        mixed, log_sums, place = sealed
        if self.block > 1 and not self._divided() and site.mix.null_logit is None:
            merged = pallas_kernels.depth_attention_merge(
                *(mixed, log_sums, place, current, score.reshape(current.shape[2:]), None),
                active=active,
                norm=None,
                epsilon=self.epsilon,
            )
            return *merged, log_sums
        mixed, mean = stacks.slice_once(mixed, place)
        if self.block > 1:
            before, running = (mean[None], log_sums[None]), active.astype(jnp.int32)
            (mean,), (log_sums,) = self._partial(score[None], current[None], running, before)
        return mixed, current, mean, log_sums

    # Methods for analysis ------------------------------------------------------------------------

    def plain_weights(
        self, index: int, site: nnx.Module, values: Float[Array, "sources batch seq *shape"]
    ) -> Float[Array, "sources batch seq 1"]:
        """Return the weights that the site before sublayer `index` gives to `values`.

        The embedding has the weight 1, and a delta the weight `1 + g a`, with g the gate and a its
        attention weight.
        """
        embedding, deltas = jnp.ones((1, *values.shape[1:3], 1), values.dtype), values[1:]
        if not len(deltas):
            return embedding
        logits = self.plain_logits(site, deltas)
        if site.mix.null_logit is not None:
            null = jnp.broadcast_to(site.mix.null_logit[...], (1, *logits.shape[1:]))
            logits = jnp.concatenate([logits, null])
        attention = jax.nn.softmax(logits, axis=0)[: len(deltas)]
        return jnp.concatenate([embedding, 1 + site.mix.gate[...] * attention])

    def depth_weights(
        self, names: Sequence[str], means: Sequence[Float[np.ndarray, " _"]]
    ) -> DepthWeights:
        """Return the mean weight of each source at each site: see `protocols.BankMixer`.

        The weight of a delta is 1 plus the gate times its attention weight, and may be negative.
        """
        return dataclasses.replace(super().depth_weights(names, means), signed=True)


def _sum_of_first(rows: Bank, count: Index) -> Row:
    """Return the sum of the first `count` rows; later rows may contain arbitrary values."""
    first = jnp.arange(len(rows)).reshape(-1, *(1,) * (rows.ndim - 1)) < count
    wide = jnp.result_type(rows, jnp.float32)
    return jnp.sum(jnp.where(first, rows, 0), axis=0, dtype=wide).astype(rows.dtype)


def _with_zeros(rows: Float[Array, "rows *shape"]) -> Array:
    """Append a row of zeros."""
    return jnp.concatenate([rows, jnp.zeros_like(rows[:1])])
