"""Attention Residuals: a sublayer reads a softmax-weighted mean of earlier sublayers' outputs.

Kimi Team (2026), equations 2 to 6. The outputs may first be summed over blocks of S sublayers each.
A site is the place before a sublayer. Its sources are the embedding, the sum of each complete
block, and the running sum of the incomplete block:

    v_0 = embedding      v_n = sum of the outputs of block n
    v' = sum of the outputs since the last complete block
    logit_i = <gain * query, v_i> / rms(v_i)       h = sum_i softmax(logit)_i v_i      z = read(h)

Every site has a gain and a query. Queries are initialised to zero, which gives an unweighted mean.
Full AttnRes is the case S = 1. With a matrix store, the sources v and the queries are matrices
`D_k x D_v`.

Some options are not in the paper:
- `query="none"` is a control for experiments. There are no queries or gains, and h is always the
  unweighted mean. Kernels then get zero queries.
- Each site has a learned bias b for the newest source (open-attention-residuals starts it at 3 or
  10):  `logit_last = <gain * query, v_last> / rms(v_last) + b`
- Cumulative sources (open-attention-residuals) are the standard residuals at the ends of blocks,
  and the running residual:  `v_n = embedding + sum of the outputs of blocks 1 to n`. The running
  residual is a source of every site. Right after a block, it equals that block's source, so the
  same value gets two weights. The bias of the newest source applies only to the running residual.
- Without attention at the output site, the unembedding reads the newest source, or the sum of the
  embedding and all outputs (an option of marin). If sources are cumulative, the newest source is
  the standard residual, as in open-attention-residuals.
- The embedding is normalised before it is a source (marin):  `v_0 = embedding / rms(embedding)`

The sources are kept in a *bank*, a stack of rows. A row is *sealed* when its block is complete.
Layers run in groups. Phase one reads the rows that are sealed before a group, in one pass for all
sites of the group. It computes a partial softmax over these rows. Phase two adds the group's own
rows at each site.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

import pallas_kernels
import sharding
from rmt_tpu import config as cfg
from rmt_tpu.layers import stacks
from rmt_tpu.layers.data_vectors import Read
from rmt_tpu.layers.parameters import Seed, gain, parameter
from rmt_tpu.residual.protocols import (
    Bank,
    DepthIndex,
    DepthWeights,
    Grouping,
    Index,
    Row,
    SingleSublayer,
    StepwiseStore,
    Store,
    Written,
)
from rmt_tpu.residual.whole_tiles import tiles


class Prior(NamedTuple):
    """The result of phase one: a softmax, for each site of a group, over the rows before the group.

    Attributes:
      mixed: the softmax-weighted means of these rows, one per site of the group.
      log_sums: the log-sum-exp of each site's logits.
    """

    mixed: Float[Array, "*sites_batch_seq_shape"]
    log_sums: Float[Array, "*sites batch seq"]


class DepthAttentionMix(nnx.Module):
    """The query and the key gain of attention over depth at one site, each shaped like a source.

    Attributes:
      query: the query, initialised to zero; None if every source has the same weight.
      key_gain: the gain of the norm that turns sources into keys; None without a gain or norm.
      newest_bias: the number b that is added to the newest source's logit, [1]; None if the config
        has no such bias.
    """

    def __init__(self, config: cfg.ModelConfig, seed: Seed):
        shape = config.residual_shape
        axes = ("width",) if len(shape) == 1 else ("key", "head")
        # A logit is a sum over all entries of a source, so the fan-in is the size of a source.
        fan_in = config.residual_size
        how = {"std": 0.0, "role": "gain", "axes": axes, "fan_in": fan_in}
        queried = config.mixer.query != "none"
        self.query = parameter(seed / "query", shape, **how) if queried else None
        with_gain = queried and config.mixer.key_norm and config.mixer.key_gain
        self.key_gain = gain(shape, axes=axes) if with_gain else None
        bias = config.mixer.newest_bias
        scalar = lambda x: nnx.Param(jnp.full(1, x, jnp.float32), role="gain", axes=("source",))
        self.newest_bias = None if bias is None else scalar(bias)

    def folded(self) -> Float[Array, "*layers D_or_D_k_D_v"]:
        """Return `gain * query`. The keys then need no gain: a logit is a query times a key."""
        query = self.query[...]
        return query if self.key_gain is None else query * self.key_gain[...]


class DepthAttention(nnx.Module):
    """The mixer for `FullAttention` and `BlockAttention`, run by `execution.banked`.

    A mixer forms a sublayer's input from earlier outputs.
    """

    embedding_row = 0

    def __init__(self, config: cfg.ModelConfig):
        self.mixer, self.num_sublayers = config.mixer, config.num_sublayers
        self.source_shape = config.residual_shape
        self.block = config.mixer.sublayers_a_block(config.num_sublayers)
        self.num_rows = 1 - (-config.num_sublayers // self.block)
        self.tiles = tiles(config)

    @property
    def epsilon(self) -> float:
        """The epsilon of the norm that turns sources into keys, adjusted for padded sources."""
        return self.tiles.epsilon(self.mixer.epsilon)

    def embedding(self, row: Row) -> Row:
        """Return the embedding as a source, which is RMS-normalised if the config says so."""
        if not self.mixer.normed_embedding:
            return row
        wide = row.astype(jnp.result_type(row, jnp.float32))
        square = jnp.sum(jnp.square(wide), axis=tuple(range(2, row.ndim)), keepdims=True)
        mean_square = sharding.total(square, "key") / math.prod(self.source_shape)
        return (wide * jax.lax.rsqrt(mean_square + self.mixer.epsilon)).astype(row.dtype)

    # Groups of layers ---------------------------------------------------------------------------

    def grouping(self, first: int, period: int, repeat: int) -> Grouping:
        """Return groups of one block each where possible, and other groups of layers otherwise.

        A period is the pattern of layers that the stack repeats. Groups are blocks if a block
        consists of whole periods, and the stack starts and ends at the borders of blocks. Otherwise
        a group may contain parts of several blocks.
        """
        begun, goes_on = self._ends(first, period, repeat)
        if self.block > 1 and self.block % period == 0 and not (begun or goes_on):
            return Grouping(min(self.block // period, repeat), True, False, lambda _: 1)
        layers = self._phase_layers(period, repeat)
        # A group that starts inside a block may write one row more than other groups. All groups
        # get this number of rows.
        group = layers * period
        into = max((first + start) % self.block for start in range(0, repeat * period, group))
        rows = lambda sublayers: -(-(into + sublayers) // self.block)
        return Grouping(layers, False, into > 0 or goes_on, rows)

    def _ends(self, first: int, period: int, repeat: int) -> tuple[bool, bool]:
        """Return whether a stack of layers starts inside a block, and whether it ends in one."""
        end = first + period * repeat
        return first % self.block > 0, end % self.block > 0 and end < self.num_sublayers

    def _phase_layers(self, period: int, repeat: int) -> int:
        """Return the number of layers per group.

        With larger groups, there are fewer passes over earlier rows, but each site reads more rows
        of its own group.
        """
        if self.block > 1:
            return min(-(-2 * self.block // period), repeat)
        layers = getattr(self.mixer, "phase_layers", None)
        if layers is not None:
            return min(max(1, round(2 * layers / period)), repeat)
        # With K sublayers in groups of M, a site reads about M / 2 sources of its own group on
        # average. The site's share of the group's single pass over earlier sources is about K / 2M
        # sources. The sum of the two numbers is least for M = sqrt(K).
        best = self.num_sublayers**0.5 / period
        divisors = [g for g in range(1, repeat + 1) if repeat % g == 0]
        nearest = min(divisors, key=lambda g: max(g / best, best / g))
        within = 0.5 <= nearest / best <= 2
        return nearest if within else min(max(1, round(best)), repeat)

    def first_row(self, sublayer: Index) -> Index:
        """Return the index of the first row that a group of layers completes.

        `sublayer` is the number of sublayers before the group.
        """
        return self.row(sublayer)

    def row(self, sublayer: Index) -> Index:
        """Return the index of the bank row that accumulates a sublayer's output."""
        return sublayer // self.block + 1

    @property
    def keeps_standard_residual(self) -> bool:
        """Whether sites read the standard residual, or sources that are its earlier values."""
        return self.mixer.cumulative

    @property
    def keeps_sum(self) -> bool:
        """Whether a running sum is passed between layers; False if every output has its own row."""
        return self.block > 1

    # Phase one: the rows before a group of layers -----------------------------------------------

    def scores(self, sites: Sequence[Sequence[nnx.Module]]) -> Float[Array, "sublayers scored"]:
        """Return every site's query, multiplied by the site's key gain and flattened."""
        in_order = []
        for of_stack in sites:
            folded = [self._folded(site, stacked=True) for site in of_stack]
            folded = jnp.stack([x.reshape(len(x), -1) for x in folded], axis=1)
            in_order.append(folded.reshape(-1, folded.shape[-1]))
        return jnp.concatenate(in_order)

    def _folded(
        self, site: nnx.Module, *, stacked: bool = False
    ) -> Float[Array, "*layers scored_shape"]:
        """Return the product of query and key gain, padded, for a site or a stack of sites.

        Without queries, the result is zeros.
        """
        if site.mix.query is not None:
            return self.tiles.scale_and_pad(site.mix.folded())
        of_site = jax.tree.leaves(nnx.state(site, nnx.Param))[0]
        *keys, width = self.source_shape
        keys = [size // sharding.axis_size("key") for size in keys]
        layers = of_site.shape[:1] if stacked else ()
        return self.tiles.pad(jnp.zeros((*layers, *keys, width), of_site.dtype))

    def decode_params(
        self, store: Store, scores: Float[Array, "repeat period scored"], stack: nnx.List
    ) -> tuple[Array, ...]:
        """Return each site's parameters for decode steps: see `protocols.StackedScores`."""
        if not isinstance(store, StepwiseStore):
            return ()
        return tuple(
            store.decode_params(scores[:, k], sublayer.site) for k, sublayer in enumerate(stack)
        )

    def prior(
        self,
        scores: Float[Array, "sites scored"],
        bank: Bank,
        count: Index,
    ) -> Prior:
        """Run phase one: attend from all sites of a group of layers to the rows before the group.

        `scores` has the sites' queries, and `count` is the number of rows before the group.
        """
        return Prior(*self._partial(scores, bank, count))

    def initial_cotangent(self, prior: Prior, d_bank: Bank) -> Prior:
        """Return an uninitialised cotangent of `prior`; each site writes its own slice of it."""
        return stacks.empty_like(prior)

    def prior_backward(
        self,
        scores: Float[Array, "sites scored"],
        bank: Bank,
        count: Index,
        prior: Prior,
        d_prior: Prior,
        d_bank: Bank,
    ) -> tuple[Float[Array, "sites scored"], Bank]:
        """Run the backward pass of phase one (the method `prior`); see `protocols.BankMixer`."""
        with jax.named_scope("residual"):
            g = pallas_kernels.depth_attention_partial_backward(
                _shaped(scores, bank),
                bank,
                *prior,
                *d_prior,
                count=count,
                accumulate=d_bank,
                epsilon=self.epsilon,
                **self._divided(),
            )
        return g.queries.reshape(scores.shape), g.sources

    @jax.named_scope("residual")
    def _partial(self, queries, rows, count, prior=None):
        return pallas_kernels.depth_attention_partial(
            _shaped(queries, rows),
            rows,
            count=count,
            prior=prior,
            epsilon=self.epsilon,
            **self._divided(),
        )

    @jax.named_scope("residual")
    def _of_rows(self, queries, rows, count, prior):
        """Return the rows, and the result of `_partial` on the rows.

        Later sites must read the returned rows. In the backward pass, this site then receives their
        gradient of the rows. Its kernel adds its own gradient in the same pass.
        """
        options = {"epsilon": self.epsilon, **self._divided()}

        @jax.custom_vjp
        def partial(queries, rows, count, prior):
            return rows, *pallas_kernels.depth_attention_partial(
                queries, rows, count=count, prior=prior, **options
            )

        def save(*args):
            out = partial(*args)
            return out, (*args, *out[1:])

        def backward(saved, cotangents):
            queries, rows, count, prior, *out = saved
            d_rows, *d_out = cotangents
            with jax.named_scope("residual"):
                g = pallas_kernels.depth_attention_partial_backward(
                    *(queries, rows, *out, *d_out),
                    count=count,
                    prior=prior,
                    accumulate=d_rows,
                    **options,
                )
            return g.queries, g.sources, None, g.prior

        partial.defvjp(save, backward)
        return partial(_shaped(queries, rows), rows, jnp.asarray(count), prior)

    def _divided(self):
        """Return the keyword argument that tells kernels which mesh axis shards a source.

        The result is {} if no mesh axis shards a source.
        """
        return {"key_axis": "key"} if sharding.axis_size("key") > 1 else {}

    # Phase two: the rows of the group itself ----------------------------------------------------

    def final(self, store: Store, bank: Bank, final_site: nnx.Module) -> Read:
        """Return the input of the unembedding, which the final site computes from all rows."""
        if self.mixer.output_site == "attention":
            query = self._folded(final_site).reshape(1, -1)
            h = self._partial(query, bank, self.num_rows)[0][0]
        else:
            h = self._without_attention(bank)
        return store.read(h, final_site, store.compute_dtype)

    def _without_attention(self, bank: Bank) -> Row:
        """Return what an output site without attention reads: the newest row or the sum of rows."""
        if self.mixer.output_site == "newest" and not self.mixer.cumulative:
            return bank[self.num_rows - 1]
        wide = jnp.result_type(bank, jnp.float32)
        return jnp.sum(bank[: self.num_rows], axis=0, dtype=wide).astype(bank.dtype)

    def read(
        self,
        store: Store,
        site: nnx.Module,
        score: Float[Array, " scored"] | pallas_kernels.StackSlice,
        prior: Prior,
        rows: Bank | None,
        current: Row,
        at: DepthIndex,
    ) -> tuple[Prior, Bank | None, Row, Read]:
        """Run phase two at one site: mix in the group's own rows, and read the result.

        See `protocols.BankMixer`.
        """
        place = at.sublayer - at.group
        active = at.sublayer % self.block > 0
        if isinstance(score, pallas_kernels.StackSlice):
            z = store.decode_merge_and_read(
                (*prior, place), current, score, site, active=active, epsilon=self.epsilon
            )
            return prior, rows, current, z
        log_sums, own_log_sums = stacks.slice_once(prior.log_sums, place)

        def with_current(mixed, log_sums, place):
            query = score.reshape(current.shape[2:])
            sealed = (mixed, log_sums, place)
            return store.merge_and_read(
                sealed, current, query, site, active=active, epsilon=self.epsilon
            )

        if rows is None and not self._divided():
            mixed, passed, z = with_current(prior.mixed, own_log_sums, place)
            return Prior(mixed, log_sums), rows, passed, z
        mixed, own_mixed = stacks.slice_once(prior.mixed, place)
        prior = Prior(mixed, log_sums)
        own = Prior(own_mixed[None], own_log_sums[None])
        if rows is not None:
            count = self.row(at.sublayer) - self.first_row(at.group)
            rows, *own = self._of_rows(score[None], rows, count, tuple(own))
            own = Prior(*own)
        if self.block > 1 and not self._divided():
            _, current, z = with_current(own.mixed, own.log_sums[0], 0)
            return prior, rows, current, z
        if self.block > 1:
            running = jnp.asarray(active, jnp.int32)
            own = Prior(*self._partial(score[None], current[None], running, tuple(own)))
        return prior, rows, current, store.read(own.mixed[0], site, store.compute_dtype)

    def seal(
        self, site: nnx.Module, rows: Bank | None, current: Row, at: DepthIndex
    ) -> tuple[Bank | None, Row]:
        """Store the running sum as a row if its block is complete, and then reset the sum to zero.

        See `protocols.BankMixer`.
        """
        if rows is None:
            return rows, current
        done = at.sublayer + 1
        own = self.row(at.sublayer) - self.first_row(at.group)
        sealed = jnp.asarray((done % self.block == 0) | (done == self.num_sublayers))
        # The row may be written early, because no site reads it before its block is complete.
        rows = stacks.write_unread(rows, current, own, sealed)
        return rows, jnp.where(sealed, 0, current)

    # Methods for analysis ------------------------------------------------------------------------

    def unrolled(
        self,
        store: Store,
        state: Float[Array, "key_batch seq *shape"],
        y: Written,
        sublayers: Sequence[SingleSublayer],
        final_site: nnx.Module,
    ) -> tuple[Read, list[Array]]:
        """Run all layers one by one, by the paper's equations 2 to 6: see `protocols.BankMixer`."""
        embedding = store.write(store.hold(state), y, sublayers[0].site.writer)
        complete, recorded = [self.embedding(embedding)], []
        running = jnp.zeros_like(embedding)
        # If the mixer keeps the standard residual, `before` is the sum of all complete sources, and
        # each output is written to `before + running`.
        before = complete[0] if self.keeps_standard_residual else running

        def read(k, site):
            values = jnp.stack([*complete, running])
            values = jnp.cumsum(values, axis=0) if self.mixer.cumulative else values
            values = values[jnp.asarray(self.seen(k))]
            if k == len(sublayers) and self.mixer.output_site != "attention":
                weights = self._output_weights(values)
            else:
                weights = self.plain_weights(k, site, values)
            recorded.append(weights)
            parts = values.reshape(*weights.shape, -1)
            h = jnp.sum(weights[..., None] * parts, axis=0).reshape(running.shape)
            return store.read(h, site, store.compute_dtype)

        for k, (site, core, writer) in enumerate(sublayers):
            running = store.write(before + running, core(read(k, site)), writer) - before
            if (k + 1) % self.block == 0 or k + 1 == len(sublayers):
                complete.append(running)
                before = before + running if self.keeps_standard_residual else before
                running = jnp.zeros_like(running)
        return read(len(sublayers), final_site), recorded

    def _output_weights(
        self, values: Float[Array, "sources batch seq *shape"]
    ) -> Float[Array, "sources batch seq 1"]:
        """Return the weights of the sources at an output site without attention."""
        newest = self.mixer.output_site == "newest" or self.mixer.cumulative
        weights = jnp.ones((*values.shape[:3], 1), values.dtype)
        return weights.at[:-1].set(0) if newest else weights

    def depth_weights(
        self, names: Sequence[str], means: Sequence[Float[np.ndarray, " _"]]
    ) -> DepthWeights:
        """Return the mean weight of each source at each site: see `protocols.BankMixer`.

        The weight of an incomplete block is in the column of this block.
        """
        sites, last = [*names, "U"], self.seen(self.num_sublayers)[-1]
        mean: list[list[float | None]] = [[None] * (1 + last) for _ in sites]
        for k, (row, weights) in enumerate(zip(mean, means, strict=True)):
            for source, weight in zip(self.seen(k), weights, strict=True):
                row[source] = float(weight)
        blocks = [f"B{n}" for n in range(1, 1 + last)]
        return DepthWeights(sites, ["E", *(blocks if self.block > 1 else names)], mean, False)

    def seen(self, site: int) -> list[int]:
        """Return the sources that a site attends to, oldest first.

        Source 0 is the embedding, and source n is block n. The last block may be incomplete.
        """
        return list(range(1 - (-site // self.block)))

    def plain_weights(
        self, index: int, site: nnx.Module, values: Float[Array, "sources batch seq *shape"]
    ) -> Float[Array, "sources batch seq heads"]:
        """Return the attention weights that the site before sublayer `index` gives to `values`."""
        return jax.nn.softmax(self.plain_logits(site, values), axis=0)

    def plain_logits(
        self, site: nnx.Module, values: Float[Array, "sources batch seq *shape"]
    ) -> Float[Array, "sources batch seq 1"]:
        """Return the attention logit of each of `values` for the query of a site."""
        if site.mix.query is None:
            return jnp.zeros((*values.shape[:3], 1), values.dtype)
        query = site.mix.folded().reshape(-1)
        flat = values.reshape(*values.shape[:3], -1)[..., : query.size]
        mean_square = jnp.mean(jnp.square(flat), axis=-1, keepdims=True)
        normed = flat * jax.lax.rsqrt(mean_square + self.mixer.epsilon)
        return jnp.sum(query * normed, axis=-1, keepdims=True)


def _shaped(
    queries: Float[Array, "sites D"], rows: Float[Array, "rows batch seq *shape"]
) -> Float[Array, "sites *shape"]:
    """Reshape the queries to the shape of a source: a vector or a matrix, like the residual."""
    return queries.reshape(-1, *rows.shape[3:])
