"""Learned scalars on the standard residual, and the value residual of attention.

Two options change the standard residual h of a model with layers l. Each can be used alone:

    scalars    h <- a_l h + b_l x_0             before the two sublayers of layer l
    values     V_l <- l1_l V_1 + l2_l V_l       in every attention sublayer after the first

Here x_0 is the residual after the embedding was written, with its positions if they are learned.
V_l are the values that the attention sublayer of layer l reads, and V_1 are the values that the
first attention sublayer reads. Attention uses, and caches, the mixed values. The residual h may be
a vector or a matrix.

The value residual is that of Zhou et al. (2024, arXiv 2410.17897), with learned factors l1 and l2
that start at 0.5 each. The scalars a and b are those of modded-nanogpt (Jordan et al. 2024) and
nanochat (Karpathy 2025), where a starts at 1 or slightly above, and b between 0 and 0.1. The
learning rate of a is 0.01 of that of b. Here all factors are float32 numbers. By default they start
at a = 1, b = 0, l1 = 0 and l2 = 1, and the model starts as one with the standard residual.
`train.depth_rate=0.01` gives the same ratio of the learning rates.

The code of a core does not depend on the value residual. The values are the last vectors that a
site reads for a core, and the mixer replaces them. The layers pass on x_0 and V_1 together with the
residual, so a schedule that saves the state before each layer also saves these two arrays.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

import sharding
from rmt_tpu import config as cfg
from rmt_tpu.layers.data_vectors import HeadsLayout, Read
from rmt_tpu.residual.place import Place
from rmt_tpu.residual.protocols import Index, Row, Store, Written

# The values that a device reads. `gathered` counts the tokens of all devices that divide the heads
# among them, or the device's own tokens if heads are not divided.
Values = Float[Array, "batch gathered value_heads head_dim"]


class ScalarsState(NamedTuple):
    """The state that the mixer passes from site to site.

    Attributes:
      residual: the residual h.
      embedding: x_0, the residual after the embedding was written; zeros before that, and None
        without the option `scalars`.
      values: V_1, the values that the first attention sublayer has read; zeros before that, and
        None without the option `values`.
    """

    residual: Row
    embedding: Row | None
    values: Values | None


class ScalarsMix(nnx.Module):
    """The scalars that one site learns.

    Attributes:
      residual_scale, embedding_scale: a and b; None if the site is not the first of a layer.
      first_value_scale, value_scale: l1 and l2; None if the next core is not attention. Those of
        the first attention sublayer are not used.
    """

    def __init__(self, mixer: cfg.ResidualScalars, place: Place):
        def learned(start: float, used: bool) -> nnx.Param | None:
            return (
                nnx.Param(jnp.asarray(start, jnp.float32), role="gain", axes=()) if used else None
            )

        begins_layer = mixer.scalars and place.within == 0
        self.residual_scale = learned(mixer.residual_scale, begins_layer)
        self.embedding_scale = learned(mixer.embedding_scale, begins_layer)
        before_attention = mixer.values and bool(place.reads.heads)
        self.first_value_scale = learned(mixer.first_value_scale, before_attention)
        self.value_scale = learned(mixer.value_scale, before_attention)


class ResidualScalars(nnx.Module):
    """The mixer for `config.ResidualScalars`; nothing is scaled before the unembedding.

    Args:
      config: the model's config.
      layout: how the heads that the store reads are divided over devices.
    """

    def __init__(self, config: cfg.ModelConfig, layout: HeadsLayout):
        self.scalars, self.values, self.layout = config.mixer.scalars, config.mixer.values, layout
        if self.values:
            attention = ((n, c) for n, c in enumerate(config.sublayers) if c.reads.heads)
            self.first_attention, core = next(attention)
            self.value_heads, self.head_dim = core.kv_heads, core.head_dim

    def start(
        self, store: Store, state: Float[Array, "key_batch seq *shape"], y: Written
    ) -> tuple[ScalarsState, Written]:
        """Return the initial state, with zeros as x_0 and V_1, and y, which is written first."""
        residual = store.hold(state)
        embedding = jnp.zeros_like(residual) if self.scalars else None
        return ScalarsState(residual, embedding, self._no_values(y) if self.values else None), y

    def _no_values(self, y: Written) -> Values:
        """Return zeros in the shape of the values that a site reads on this device.

        If devices divide the heads that they read, a device reads its own heads for the tokens of
        all these devices.
        """
        devices = sharding.axis_size(self.layout.projected)
        batch, seq = y.shape[:2]
        shape = (batch, seq * devices, self.value_heads // devices, self.head_dim)
        return jnp.zeros(shape, y.dtype)

    @jax.named_scope("residual")
    def advance(
        self, store: Store, state: ScalarsState, y: Written, site: nnx.Module, index: Index
    ) -> tuple[ScalarsState, Read]:
        """Write y, scale the residual at the start of a layer, read z, and mix its values."""
        (h, x_0, v_1), mix = state, site.mix
        if mix is None or mix.residual_scale is None:
            h, z = store.add_and_read(h, y, site)
        else:
            h = store.write(h, y, site.writer)
            x_0 = jnp.where(index == 0, h, x_0)
            h = _weighted_sum((mix.residual_scale, h), (mix.embedding_scale, x_0))
            z = store.read(h, site, y.dtype)
        if mix is None or mix.value_scale is None:
            return ScalarsState(h, x_0, v_1), z
        first = index == self.first_attention
        others = z.heads.shape[2] - v_1.shape[2]
        # The gradients of the scalars need V_l. If it has this name, no policy of rematerialisation
        # keeps the queries and keys a second time.
        v = checkpoint_name(z.heads[:, :, others:], "heads")
        v_1 = jnp.where(first, v, v_1)
        mixed = _weighted_sum((mix.first_value_scale, v_1), (mix.value_scale, v))
        mixed = jnp.where(first, v, mixed)
        heads = jax.lax.dynamic_update_slice_in_dim(z.heads, mixed, others, axis=2)
        return ScalarsState(h, x_0, v_1), z._replace(heads=heads)


def _weighted_sum(*terms: tuple[nnx.Param, Float[Array, "*shape"]]) -> Float[Array, "*shape"]:
    """Return the sum of arrays times scalars, in the dtype of the last array.

    It is computed in at least float32.
    """
    return sum(scale[...] * x for scale, x in terms).astype(terms[-1][1].dtype)
