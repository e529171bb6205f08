"""Attention Residuals: a sublayer reads a softmax over what earlier sublayers, or blocks, wrote.

Kimi Team (2026), equations 2 to 6. The sources of site k (k sublayers are done, S to a block) are
the embedding, the sums of the blocks that are complete, and the running sum of the next one:

    v_0 = embedding      v_n = sum of the outputs of block n      v' = sum of those since
    logit_i = <gain * query, v_i> / rms(v_i)       h = sum_i softmax(logit)_i v_i      z = read(h)

Every site has a query, zero at the start (a plain mean), and a gain. Full AttnRes is S = 1. Over a
matrix store, v and the query are matrices `D_k x D_v`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

import pallas_kernels
import sharding
from rmt_tpu import config as cfg
from rmt_tpu.layers import stacks
from rmt_tpu.layers.parameters import gain, parameter


class Prior(NamedTuple):
    """What the sources sealed before a group of layers give to each of its sites."""

    mixed: Float[Array, "*sites batch seq D"]
    log_sums: Float[Array, "*sites batch seq"]


class Mix(nnx.Module):
    """What a site learns: `query` w and `key_gain`, both of a source's shape.

    Attributes:
      key_gain: None where the keys' norm has none, or there is no norm.
    """

    def __init__(self, config: cfg.ModelConfig, rngs: nnx.Rngs):
        vector = isinstance(config.store, cfg.VectorStore)
        shape = (config.store.dim,) if vector else (config.store.key_dim, config.attention.head_dim)
        axes = ("width",) if vector else ("key", "head")
        self.query = parameter(rngs, shape, std=0.0, role="gain", axes=axes)
        with_gain = config.mixer.key_norm and config.mixer.key_gain
        self.key_gain = gain(shape, axes=axes) if with_gain else None

    def folded(self) -> Float[Array, "*layers D_or_D_k_D_v"]:
        """`gain * query`: with it no normalised key is ever made."""
        query = self.query[...]
        return query if self.key_gain is None else query * self.key_gain[...]


class DepthAttention(nnx.Module):
    """The mixer of `FullAttention` and `BlockAttention`, by the schedule of `execution.banked`."""

    def __init__(self, config: cfg.ModelConfig):
        self.mixer, self.num_layers = config.mixer, config.num_layers
        self.vector = isinstance(config.store, cfg.VectorStore)
        self.norm, self.norm_epsilon = config.norm, config.norm_epsilon
        self.block = config.mixer.sublayers_a_block(config.num_layers)
        self.num_rows = 1 - (-2 * config.num_layers // self.block)

    # The schedule -------------------------------------------------------------------------------

    @property
    def group_layers(self) -> int:
        """Layers whose sites take the sources before them in one pass; whole blocks."""
        if self.block % 2 == 0:
            return self.block // 2
        if self.block > 1:
            return min(self.block, self.num_layers)
        layers = getattr(self.mixer, "phase_layers", None)
        if layers is not None:
            return layers
        # A site reads about L / 2G earlier sources (its share of a pass) and G of its own group.
        best = (self.num_layers / 2) ** 0.5
        divisors = [g for g in range(1, self.num_layers + 1) if self.num_layers % g == 0]
        nearest = min(divisors, key=lambda g: max(g / best, best / g))
        return nearest if 0.5 <= nearest / best <= 2 else max(1, round(best))

    def first_row(self, layer: Int[Array, ""] | int) -> Int[Array, ""] | int:
        """The first row that a group beginning with this layer completes."""
        return 2 * layer // self.block + 1

    def group_rows(self, layers: int) -> int:
        """Rows that a group of so many layers completes."""
        return -(-2 * layers // self.block)

    @property
    def completes_inside(self) -> bool:
        """Whether rows are complete before their group's end, so that its later sites read them."""
        return self.block % 2 == 1

    @property
    def keeps_sum(self) -> bool:
        """Whether layers hand on a running sum: not where every output is a row of its own."""
        return self.block > 1

    # What a group's sites have in common --------------------------------------------------------

    def shared(self, layers: nnx.Module) -> Float[Array, "layers 2 scored"]:
        """Of each layer, what its two sites score with."""
        sites = (layers.attention_site.mix, layers.feed_forward_site.mix)
        return jnp.stack([m.folded().reshape(self.num_layers, -1) for m in sites], axis=1)

    def prior(
        self,
        shared: Float[Array, "layers 2 scored"],
        bank: Float[Array, "rows batch seq *shape"],
        count: Int[Array, ""] | int,
    ) -> Prior:
        """Phase one: all sites of a group over the rows before it."""
        return Prior(*self._partial(_queries(shared), bank, count))

    def prior_backward(
        self,
        shared: Float[Array, "layers 2 scored"],
        bank: Float[Array, "rows batch seq *shape"],
        count: Int[Array, ""] | int,
        prior: Prior,
        d_prior: Prior,
        d_bank: Float[Array, "rows batch seq *shape"],
    ) -> tuple[Float[Array, "layers 2 scored"], Float[Array, "rows batch seq *shape"]]:
        """Cotangents of what `prior` was given, that of the bank added to `d_bank`."""
        with jax.named_scope("residual"):
            g = pallas_kernels.depth_attention_partial_backward(
                _queries(shared),
                _flat(bank),
                *prior,
                *d_prior,
                count=count,
                accumulate=_flat(d_bank),
                epsilon=self.mixer.epsilon,
                **self._divided(),
            )
        return g.queries.reshape(shared.shape), g.sources.reshape(d_bank.shape)

    @jax.named_scope("residual")
    def _partial(self, queries, rows, count, prior=None):
        return pallas_kernels.depth_attention_partial(
            queries,
            _flat(rows),
            count=count,
            prior=prior,
            epsilon=self.mixer.epsilon,
            **self._divided(),
        )

    def _divided(self):
        """The axis of the mesh that divides a source, if there is one."""
        return {"key_axis": "key"} if sharding.axis_size("key") > 1 else {}

    # A layer ------------------------------------------------------------------------------------

    def layer(self, store, sublayers, of_layer, prior, offset, rows, current):
        """Both sublayers of one layer, with phase two before each.

        Args:
          store: of the residual.
          sublayers, of_layer: of this layer, from `rmt_tpu.execution.banked`.
          prior: of all sites of its group; each is read once.
          offset: of the layer within its group.
          rows: those that its group completes, so far; None if that is one row, at the end.
          current: the running sum.

        Returns:
          prior, rows and current, as the next layer gets them.
        """
        layer, index = sublayers.layer, sublayers.index
        halves = (
            (layer.attention_site, sublayers.attention, layer.feed_forward_site.writer),
            (layer.feed_forward_site, sublayers.feed_forward, of_layer.after),
        )
        for half, (at, core, writer) in enumerate(halves):
            site, query = (2 * index + half, 2 * offset + half), of_layer.shared[half]
            prior, current, z = self._read(store, at, site, query, prior, rows, current)
            current = store.write(current, core(z), writer)
            rows, current = self._seal(rows, current, site[0] + 1)
        return prior, rows, current

    def final(self, store, bank, final_site):
        """What the unembedding reads: the last aggregation, over all rows."""
        query = final_site.mix.folded().reshape(1, -1)
        h = self._partial(query, bank, self.num_rows)[0][0]
        return store.read(h.reshape(bank.shape[1:]), final_site, store.compute_dtype)

    def _read(self, store, at, site, query, prior, rows, current):
        """The mix of one site, normed and read: prior and running sum as passed on, and z.

        `site` is its number, and that within its group.
        """
        number, place = site
        shape, dtype, active = current.shape, store.compute_dtype, number % self.block > 0
        if self.vector and rows is None:
            prior, current, z = self._merge(prior, place, current, query, at.gain[...], active)
            return prior, current, store.project(z.astype(dtype), at)
        mixed, own_mixed = stacks.take(prior.mixed, place)
        log_sums, own_log_sums = stacks.take(prior.log_sums, place)
        own = Prior(own_mixed[None], own_log_sums[None])
        if rows is not None:
            count = number // self.block + 1 - self._first_row_at(number)
            own = Prior(*self._partial(query[None], rows, count, tuple(own)))
        if self.block > 1:
            running = jnp.asarray(active, jnp.int32)
            own = Prior(*self._partial(query[None], current[None], running, tuple(own)))
        z = store.read(own.mixed[0].reshape(shape), at, dtype)
        return Prior(mixed, log_sums), current, z

    @jax.named_scope("residual")
    def _merge(self, prior, place, current, query, norm_gain, active):
        log_sums, own = stacks.take(prior.log_sums, place)
        mixed, current, z = pallas_kernels.depth_attention_merge(
            prior.mixed,
            own,
            place,
            current,
            query,
            norm_gain,
            active=active,
            norm=self.norm,
            epsilon=self.mixer.epsilon,
            norm_epsilon=self.norm_epsilon,
        )
        # The kernel has one axis of tokens. Without the barrier XLA finds that out and merges the
        # tokens' axes in the products with z too, for which it has to transpose the other factors.
        z = jax.lax.optimization_barrier(z)
        return Prior(mixed, log_sums), current, z

    def _seal(self, rows, current, done):
        """After `done` sublayers: a block that is complete becomes a row, and its sum is empty."""
        if rows is None:
            return rows, current
        at = -(-done // self.block) - self._first_row_at(done - 1)
        sealed = (done % self.block == 0) | (done == 2 * self.num_layers)
        there = jax.lax.dynamic_index_in_dim(rows, at, keepdims=False)
        row = current if self.block == 1 else jnp.where(sealed, current, there)
        rows = jax.lax.dynamic_update_index_in_dim(rows, row, at, 0)
        empty = jnp.zeros_like(current)
        return rows, empty if self.block == 1 else jnp.where(sealed, empty, current)

    def _first_row_at(self, site):
        """`first_row` of the group that a site is in."""
        return self.first_row(site // 2 // self.group_layers * self.group_layers)


def _flat(rows: Float[Array, "rows batch seq *shape"]) -> Float[Array, "rows batch seq D"]:
    return rows.reshape(*rows.shape[:3], -1)


def _queries(shared: Float[Array, "layers 2 scored"]) -> Float[Array, "sites scored"]:
    return shared.reshape(-1, shared.shape[-1])
