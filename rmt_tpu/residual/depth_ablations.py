"""Ablations and options of Attention Residuals, in plain JAX: each site reads the whole bank.

The bank contains the outputs of earlier blocks, which are the sources of attention over depth. The
paper names the ablations and gives their losses. The equations are our reading of the names:
- "input" query: the query is the site's vector plus a projection of the RMS-normalised newest
  source;
- "scalars": there are no queries or keys, but one learned logit for every pair of site and source;
- "sigmoid": `weight_i = sigmoid(logit_i)`, so that the weights do not add up to 1;
- no key norm: `logit_i = <query, v_i>`, with v_i the sources;
- heads: v is split into equal parts, which share its norm; each part has its own softmax;
- a window: only the embedding and the newest rows are sources.

This module also computes cumulative sources and the bias of the newest source, whose equations are
in `depth_attention`. With cumulative sources, a row of the bank is still the sum of one block, and
each site adds up the rows.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

import sharding
from rmt_tpu import config as cfg
from rmt_tpu.layers.data_vectors import Read
from rmt_tpu.layers.parameters import Seed, parameter
from rmt_tpu.residual import depth_attention
from rmt_tpu.residual.protocols import Bank, DepthIndex, Grouping, Index, Row, Store


class DepthAblationMix(depth_attention.DepthAttentionMix):
    """The parameters of one site for attention over depth.

    For an "input" query they include a projection [D, D], which is zero at initialisation.
    """

    def __init__(self, config: cfg.ModelConfig, seed: Seed):
        super().__init__(config, seed)
        if config.mixer.query == "scalars":
            self.query = self.key_gain = None
        shape, axes = 2 * (config.residual_size,), ("embed", "width")
        how = {"std": 0.0, "role": "hidden", "exact": True}
        project = config.mixer.query == "input"
        self.project = parameter(seed / "project", shape, axes=axes, **how) if project else None


class DepthAblation(depth_attention.DepthAttention):
    """The mixer for `FullAttention` and `BlockAttention` with options that need plain JAX.

    Attributes:
      logits: the learned logits of the "scalars" ablation, ordered by site and then by source; None
        in other ablations.
    """

    def __init__(self, config: cfg.ModelConfig, seed: Seed):
        super().__init__(config)
        scalars = config.mixer.query == "scalars"
        sites = config.num_sublayers + (self.mixer.output_site == "attention")
        shape = (sum(len(self.seen(k)) for k in range(sites)),)
        how = {"std": 0.0, "role": "gain", "axes": ("source",)}
        self.logits = parameter(seed / "logits", shape, **how) if scalars else None

    def grouping(self, first: int, period: int, repeat: int) -> Grouping:
        """Return one group with all layers, because each site reads all earlier rows by itself.

        A group is a set of layers whose sites share a first pass over earlier rows (phase one). The
        ablations have no such pass.
        """
        ends = self._ends(first, period, repeat)
        return Grouping(repeat, False, any(ends), lambda _: self.num_rows)

    def first_row(self, sublayer: Index) -> int:
        """Return 0, because every group of layers reads the bank from its first row."""
        return 0

    def scores(self, sites: Sequence[Sequence[nnx.Module]]) -> Float[Array, "sublayers scored"]:
        """Return each sublayer's query, or its learned logits in the ablation "scalars"."""
        return super().scores(sites) if self.logits is None else self._table()[:-1]

    def decode_params(self, store: Store, scores: Array, stack: nnx.List) -> tuple:
        """Return an empty tuple, because the ablations have no kernels for decode steps."""
        return ()

    def _table(self) -> Float[Array, "sites sources"]:
        """Return the learned logits as a table of sites by sources.

        For a source that a site cannot read, the entry repeats the logit of the site's last source.
        The entry has no effect, because such a source gets weight 0.
        """
        places, start = [], 0
        for k in range(self.num_sublayers + 1):
            of_source = {source: start + i for i, source in enumerate(self.seen(k))}
            start += len(of_source)
            places.append([of_source.get(i, start - 1) for i in range(self.num_rows + 1)])
        return self.logits[...][jnp.asarray(places)]

    def prior(self, scores: Float[Array, "sites scored"], bank: Bank, count: Index) -> None:
        """Return None, because the ablations have no shared pass over earlier rows (phase one)."""
        return None

    def initial_cotangent(self, prior: None, d_bank: Bank) -> None:
        """Return None, because there is no phase one that needs a cotangent."""
        return None

    def prior_backward(
        self,
        scores: Float[Array, "sites scored"],
        bank: Bank,
        count: Index,
        prior: None,
        d_prior: None,
        d_bank: Bank,
    ) -> tuple[Float[Array, "sites scored"], Bank]:
        """Return zeros and an unchanged `d_bank`, because `prior` reads nothing."""
        return jnp.zeros_like(scores), d_bank

    def final(self, store: Store, bank: Bank, final_site: nnx.Module) -> Read:
        """Return the input of the unembedding, which the final site computes from all rows."""
        if self.mixer.output_site != "attention":
            return super().final(store, bank, final_site)
        scalars = self.logits is not None
        shared = self._table()[-1] if scalars else self._folded(final_site).reshape(-1)
        nothing = jnp.zeros_like(bank[0])
        h = self._mix(final_site, shared, bank, self.num_rows, nothing, jnp.bool(False))
        return store.read(h, final_site, store.compute_dtype)

    def read(
        self,
        store: Store,
        site: nnx.Module,
        score: Float[Array, " scored"],
        prior: None,
        rows: Bank | None,
        current: Row,
        at: DepthIndex,
    ) -> tuple[None, Bank | None, Row, Read]:
        """Mix all rows of the bank and the running sum for one site, and read the result.

        See `protocols.BankMixer`.
        """
        running = jnp.asarray(at.sublayer % self.block > 0)
        h = self._mix(site, score, rows, self.row(at.sublayer), current, running)
        return prior, rows, current, store.read(h, site, store.compute_dtype)

    @jax.named_scope("residual")
    def _mix(self, at, shared, rows, count, current, running):
        """Return the weighted sum of sources for one site.

        The sources are `rows[:count]`. The running sum `current` is also a source if `running` is
        True or sources are cumulative. `at` is the site, and `shared` its query or its learned
        logits.
        """
        written = jnp.arange(self.num_rows) < count
        rows = jnp.where(jnp.expand_dims(written, range(1, rows.ndim)), rows, 0)
        dtype = current.dtype
        if self.mixer.cumulative:
            wide = jnp.result_type(rows, jnp.float32)
            rows = jnp.cumsum(rows.astype(wide), axis=0)
            current = rows[-1] + jnp.where(running, current, 0).astype(wide)
            running = jnp.bool(True)
        weights = self._weights(at, shared, rows, count, current, running)
        heads = weights.shape[-1]

        def add_up(sources, weights):
            split = _flat(sources).reshape(*sources.shape[:3], heads, -1)
            return jnp.sum(weights[..., None] * split, axis=0)

        mixed = add_up(rows, weights[:-1]) + add_up(current[None], weights[-1:])
        return mixed.reshape(current.shape).astype(dtype)

    def _weights(self, at, shared, rows, count, current, running):
        """Return the weights of a site's sources, [sources, batch, seq, heads].

        The sources are all rows of the bank, and the running sum as the last one. A source that the
        site does not read has weight 0.
        """
        indices = jnp.arange(self.num_rows)
        shown = indices < count
        window = getattr(self.mixer, "window", None)
        if window is not None:
            shown &= (indices == 0) | (indices >= count - window)
        shown = jnp.append(shown, running)[:, None, None, None]
        if self.logits is not None:
            logits = jnp.append(shared[: self.num_rows], shared[-1])[:, None, None, None]
            logits = jnp.broadcast_to(logits, (len(logits), *current.shape[:2], 1))
        else:
            query = self._query(at, shared, rows, count, current, running)
            scores = [self._scores(query, at, sources) for sources in (rows, current[None])]
            logits = jnp.concatenate(scores)
        if at.mix.newest_bias is not None:
            newest = jnp.append((indices == count - 1) & ~running, running)
            logits = logits + at.mix.newest_bias[...] * newest[:, None, None, None]
        if self.mixer.weights == "sigmoid":
            return jnp.where(shown, jax.nn.sigmoid(logits), 0)
        return jax.nn.softmax(jnp.where(shown, logits, -jnp.inf), axis=0)

    def _query(self, at, query, rows, count, current, running):
        """Return the query of one site, given the product of its query vector and its key gain.

        For an "input" query, a projection of the newest source is added, so that the query differs
        between tokens.
        """
        if self.mixer.query != "input":
            return query
        newest = jax.lax.dynamic_index_in_dim(rows, count - 1, keepdims=False)
        newest = _flat(jnp.where(running, current, newest)[None])[0]
        project = sharding.gather(at.mix.project.astype(newest.dtype), "fsdp", axis=0)
        projected = jnp.dot(self._normed(newest), project)
        if at.mix.key_gain is not None:
            projected = projected * at.mix.key_gain[...].reshape(-1)
        return query + projected

    def _scores(self, query, at, sources):
        keys = _flat(sources)
        keys = self._normed(keys) if self.mixer.key_norm else keys
        products = query * keys
        own = products.reshape(*keys.shape[:3], self.mixer.num_heads, -1).sum(-1)
        return sharding.total(own, "key")

    def _normed(self, x):
        square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
        mean_square = sharding.total(square, "key") / (x.shape[-1] * sharding.axis_size("key"))
        return x * jax.lax.rsqrt(mean_square + self.mixer.epsilon)

    # Methods for analysis ------------------------------------------------------------------------

    def seen(self, site: int) -> list[int]:
        """Return the indices of the sources that a site attends to, oldest first.

        With a window, these are the embedding and the newest `window` of the other sources. An
        output site without attention has no window.
        """
        every, window = super().seen(site), getattr(self.mixer, "window", None)
        attends = site < self.num_sublayers or self.mixer.output_site == "attention"
        return [0, *every[1:][-window:]] if attends and window is not None else every

    def plain_weights(
        self, index: int, site: nnx.Module, values: Float[Array, "sources batch seq *shape"]
    ) -> Float[Array, "sources batch seq heads"]:
        """Return the attention weights that the site before sublayer `index` gives to `values`.

        A value that occurs as two sources gets the sum of their weights.
        """
        flat = values.reshape(*values.shape[:3], -1)
        mean_square = jnp.mean(jnp.square(flat), axis=-1, keepdims=True)
        normed = flat * jax.lax.rsqrt(mean_square + self.mixer.epsilon)
        if self.logits is not None:
            logits = self._table()[index][jnp.asarray(self.seen(index))]
            logits = jnp.broadcast_to(logits[:, None, None, None], (*flat.shape[:3], 1))
        else:
            query = self._folded(site).reshape(-1)
            if self.mixer.query == "input":
                projected = jnp.dot(normed[-1], site.mix.project[...])
                gained = 1 if site.mix.key_gain is None else site.mix.key_gain[...].reshape(-1)
                query = query + gained * projected
            products = query * (normed if self.mixer.key_norm else flat)
            logits = products.reshape(*flat.shape[:3], self.mixer.num_heads, -1).sum(-1)
        ended = index % self.block == 0 or index == self.num_sublayers
        repeated = self.mixer.cumulative and ended
        if repeated:
            logits = jnp.concatenate([logits, logits[-1:]])
        if site.mix.newest_bias is not None:
            logits = logits.at[-1].add(site.mix.newest_bias[0])
        sigmoid = self.mixer.weights == "sigmoid"
        weights = jax.nn.sigmoid(logits) if sigmoid else jax.nn.softmax(logits, axis=0)
        return weights[:-1].at[-1].add(weights[-1]) if repeated else weights


def _flat(rows: Float[Array, "rows batch seq *shape"]) -> Float[Array, "rows batch seq D"]:
    """Return the rows with each token's entries flattened into one axis, in at least float32."""
    return rows.reshape(*rows.shape[:3], -1).astype(jnp.result_type(rows, jnp.float32))
