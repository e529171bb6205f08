"""MUDD: a layer's queries, keys, values and residual are different sums of layers' outputs.

Multiway dynamic dense connections (Xiao et al., ICML 2025, arXiv 2502.12170). X_0 is the embedding,
and X_i the output of layer i. A layer is attention followed by another core, such as a feed-forward
layer. Layer i + 1 reads weighted sums of X_0 to X_i in four ways, c = q, k, v, r. A small network
computes the weights of each token from X_i:

    A_i = gelu(rmsnorm(X_i) W_1) W_2 + a_i      U^c = sum over j <= i of A_i[c, j] X_j
    H = U^r + attention(norm(U^q) W_Q, norm(U^k) W_K, norm(U^v) W_V)
    X_{i+1} = H + core(norm(H))

The unembedding reads a single weighted sum of X_0 to X_L, with the way r. Layer 1 reads X_0 alone.
For s sums of i + 1 outputs, the network has `n = s (i + 1)` hidden units. W_1 is [D, n] and W_2 is
[n, n]. The network's rmsnorm has no gain. W_2 starts at zero, and the static weights a_i start at 1
for j = i and at 0 elsewhere. The model therefore starts as one with the standard residual. With a
single way and without W_1 and W_2, the equations are those of DenseFormer (`dense`).

A site has one norm gain for the three inputs of attention. Options of the published code are left
out: three gains, more hidden units in the networks, and feed-forward layers that grow with depth.
GELU uses the tanh approximation. With a matrix store, X_i and the sums are matrices `D_k x D_v`,
and W_1 is [D_k, D_v, n].

The code of attention does not depend on the four ways. `Store.read_groups` reads the queries, keys
and values of a core from three different sums. The cores MLA and KDA also read the whole residual.
The equations have no sum for it, so these cores are not supported.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

import pallas_kernels
import sharding
from rmt_tpu import config as cfg
from rmt_tpu.config.depth_mixers import MUDD_WAYS as WAYS
from rmt_tpu.layers import stacks
from rmt_tpu.layers.activations import gelu_tanh
from rmt_tpu.layers.data_vectors import Read
from rmt_tpu.layers.parameters import Seed, parameter
from rmt_tpu.residual.dense import LayerBank
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

# The weights of each token's sums of earlier outputs. The token axes come last, because a TPU would
# pad a last axis with few sources to 128.
Weights = Float[Array, "ways sources batch seq"]


class Connections(nnx.Module):
    """The network and the static weights for sums of X_0 to X_i, with n = ways * sources.

    Attributes:
      project_in: W_1, [D, n] or [D_k, D_v, n].
      project_out: W_2, [n, ways, sources].
      static: a_i, [ways, sources].
    """

    def __init__(self, config: cfg.ModelConfig, seed: Seed, *, sources: int, ways: int):
        shape, size, hidden = config.residual_shape, config.residual_size, ways * sources
        axes = ("width",) if len(shape) == 1 else ("key", "head")
        self.epsilon = config.norm_epsilon
        self.project_in = parameter(
            seed / "project_in",
            (*shape, hidden),
            std=config.init_std * size**-0.5,
            role="hidden",
            axes=(*axes, "coefficient"),
            fan_in=size,
            exact=True,
        )
        # The sizes of these parameters do not depend on the model's width. The role "gain" means
        # that they have no weight decay, and the same learning rate at every width.
        zeros = jnp.zeros((hidden, ways, sources), jnp.float32)
        newest = jnp.zeros((ways, sources), jnp.float32).at[:, -1].set(1)
        axes = ("way", "source")
        self.project_out = nnx.Param(zeros, role="gain", axes=("coefficient", *axes))
        self.static = nnx.Param(newest, role="gain", axes=axes)

    def weights(self, newest: Row) -> Weights:
        """Return the weights A_i of each token, where `newest` is X_i."""
        arrays = (self.project_in[...], self.project_out[...], self.static[...])
        return _weights(*arrays, newest, self.epsilon)

    def packed(self, sources: int) -> Float[Array, " size"]:
        """Return all parameters in one vector, padded with zeros to `sources` sources.

        The padding has no effect on the result.
        """
        fewer = (0, sources - self.static.shape[1])
        units = (0, len(WAYS) * fewer[1])
        padded = (
            _padded(self.project_in, units),
            _padded(self.project_out, units, (0, 0), fewer),
            _padded(self.static, fewer),
        )
        return jnp.concatenate([x.reshape(-1) for x in padded])


class Mudd(LayerBank):
    """The mixer for `config.Mudd`, run by the schedule `rmt_tpu.execution.banked`.

    Attributes:
      connections: the networks and static weights for the inputs of layers 2 to L, and last those
        for the unembedding.
    """

    def __init__(self, config: cfg.ModelConfig, seed: Seed):
        super().__init__(config)
        self.epsilon, seed = config.norm_epsilon, seed / "connections"
        self.connections = nnx.List(
            Connections(
                config,
                seed.numbered(i),
                sources=i + 1,
                ways=1 if i == self.num_layers else len(WAYS),
            )
            for i in range(1, self.num_layers + 1)
        )

    def grouping(self, first: int, period: int, repeat: int) -> Grouping:
        """Return groups of one period each.

        The weights of a layer depend on the output of the layer before. One pass over the bank
        therefore cannot compute the sums of several layers, and larger groups would save nothing.
        """
        return Grouping(1, False, False, lambda sublayers: sublayers // 2)

    def scores(self, sites: Sequence[Sequence[nnx.Module]]) -> Float[Array, "sublayers size"]:
        """Return, for each sublayer, all parameters of the connections to its layer in one vector.

        Only the first sublayer of a layer has them; the vector of the second one is zero.
        """
        *of_layers, final = self.connections
        network = math.prod(final.project_in.shape[:-1]) + len(WAYS) * self.num_layers
        of_first = jnp.zeros((network * len(WAYS) * self.num_layers,), jnp.float32)
        embedding = _padded(jnp.ones((len(WAYS), 1), jnp.float32), (0, self.num_layers - 1))
        first = jnp.concatenate([of_first, embedding.reshape(-1)])
        packed = jnp.stack([first, *(c.packed(self.num_layers) for c in of_layers)])
        return jnp.stack([packed, jnp.zeros_like(packed)], axis=1).reshape(-1, packed.shape[-1])

    def _unpacked(self, score: Float[Array, " size"], shape: tuple[int, ...]) -> tuple[Array, ...]:
        """Return W_1, W_2 and a_i from the vector of a layer; `shape` is that of a residual."""
        hidden, last = len(WAYS) * self.num_layers, (len(WAYS), self.num_layers)
        shapes = ((*shape, hidden), (hidden, *last), last)
        ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
        parts = zip(jnp.split(score, ends), shapes, strict=True)
        return tuple(x.reshape(shape) for x, shape in parts)

    def prior(self, scores: Float[Array, "sites size"], bank: Bank, count: Index) -> Bank:
        """Return the bank, from which the first layer of a group reads all earlier rows."""
        return bank

    def initial_cotangent(self, prior: Bank, d_bank: Bank) -> Bank:
        """Return the cotangent of the bank, to which every layer adds in place."""
        return d_bank

    def prior_backward(
        self,
        scores: Float[Array, "sites size"],
        bank: Bank,
        count: Index,
        prior: Bank,
        d_prior: Bank,
        d_bank: Bank,
    ) -> tuple[Float[Array, "sites size"], Bank]:
        """Return zeros for `scores`, and the cotangent of the bank, which `d_prior` already is."""
        return jnp.zeros_like(scores), d_prior

    def read(
        self,
        store: Store,
        site: nnx.Module,
        score: Float[Array, " size"],
        prior: Bank,
        rows: Bank | None,
        current: Row,
        at: DepthIndex,
    ) -> tuple[Bank, Bank | None, Row, Read]:
        """Read the four sums at the first site of a layer, and the residual at the second site."""
        if not site.begins_layer:
            return prior, rows, current, store.read(current, site, store.compute_dtype)
        count, own = self.first_row(at.group), (at.sublayer - at.group) // 2
        several = len(rows) > 1
        prior, newest = stacks.slice_of_used(prior, count - 1)
        if several:
            rows, in_group = stacks.slice_of_used(rows, jnp.maximum(own - 1, 0))
            newest = jnp.where(own > 0, in_group, newest)
        weights = _weights(*self._unpacked(score, rows.shape[3:]), newest, self.epsilon)
        weights = _padded(weights, (0, len(prior) - weights.shape[1]), (0, 0), (0, 0))
        dtype = jnp.result_type(rows, jnp.float32) if several else rows.dtype
        prior, sums = _sums(weights, prior, count, dtype)
        if several:
            padded = _padded(weights, (0, len(rows)), (0, 0), (0, 0))
            of_rows = jax.lax.dynamic_slice_in_dim(padded, count, len(rows), axis=1)
            rows, more = _sums(of_rows, rows, own, dtype)
            sums = (sums + more).astype(rows.dtype)
        # The barrier makes XLA compute the weighted sums once. Without the barrier, each pass of
        # the norm would compute them again.
        *attended, current = jax.lax.optimization_barrier(list(sums))
        return prior, rows, current, store.read_groups(attended, site, store.compute_dtype)

    def final(self, store: Store, bank: Bank, final_site: nnx.Module) -> Read:
        """Return the input of the unembedding, read from its weighted sum of all rows."""
        bank, newest = stacks.slice_of_used(bank, self.num_layers)
        _, (u,) = _sums(self.connections[-1].weights(newest), bank, self.num_rows, bank.dtype)
        return store.read(u, final_site, store.compute_dtype)

    # Methods for analysis ------------------------------------------------------------------------

    def unrolled(
        self,
        store: Store,
        state: Float[Array, "batch seq *shape"],
        y: Written,
        sublayers: Sequence[SingleSublayer],
        final_site: nnx.Module,
    ) -> tuple[Read, list[Float[Array, "sources batch seq 1"]]]:
        """Run all layers one by one, with four lists of weights per layer: see `BankMixer`."""
        outputs = [store.write(store.hold(state), y, sublayers[0].site.writer)]
        recorded: list[Array] = []

        def sums(weights: Weights) -> list[Row]:
            recorded.extend(weights[..., None])
            shaped = jnp.expand_dims(weights, range(4, 2 + outputs[0].ndim))
            return list(jnp.sum(shaped * jnp.stack(outputs), axis=1))

        for layer in range(self.num_layers):
            first, second = sublayers[2 * layer : 2 * layer + 2]
            alone = jnp.ones((len(WAYS), 1, *outputs[0].shape[:2]), outputs[0].dtype)
            weights = self.connections[layer - 1].weights(outputs[-1]) if layer else alone
            *attended, h = sums(weights)
            y = first.core(store.read_groups(attended, first.site, store.compute_dtype))
            h = store.write(h, y, first.writer)
            y = second.core(store.read(h, second.site, store.compute_dtype))
            outputs.append(store.write(h, y, second.writer))
        (u,) = sums(self.connections[-1].weights(outputs[-1]))
        return store.read(u, final_site, store.compute_dtype), recorded

    def depth_weights(
        self, names: Sequence[str], means: Sequence[Float[np.ndarray, " _"]]
    ) -> DepthWeights:
        """Return the mean weight of each layer's output in each sum: see `protocols.BankMixer`.

        A sum's name consists of the layer and the way: "2q" is the sum for the queries of layer 2.
        """
        layers = [str(1 + layer) for layer in range(self.num_layers)]
        mean = [[*map(float, row), *(self.num_rows - len(row)) * [None]] for row in means]
        sites = [layer + way for layer in layers for way in WAYS]
        return DepthWeights([*sites, "U"], ["E", *layers], mean, signed=True)


@jax.named_scope("residual")
def _weights(
    project_in: Float[Array, "*shape n"],
    project_out: Float[Array, "n ways sources"],
    static: Float[Array, "ways sources"],
    newest: Row,
    epsilon: float,
) -> Weights:
    """Return the weights A_i of each token, computed in at least float32, where `newest` is X_i.

    The norm is applied after the product with W_1, so that one pass over X_i is enough.
    """
    dtype = jnp.result_type(newest, jnp.float32)
    axes = tuple(range(2, newest.ndim))
    size = math.prod(newest.shape[2:]) * sharding.axis_size("key")
    square = jnp.sum(jnp.square(newest.astype(dtype)), axis=axes)
    product = jnp.tensordot(
        newest,
        project_in.astype(newest.dtype),
        axes=(axes, tuple(range(len(axes)))),
        preferred_element_type=dtype,
    )
    mean_square = sharding.total(square, "key") / size
    normed = sharding.total(product, "key") * jax.lax.rsqrt(mean_square + epsilon)[..., None]
    hidden = gelu_tanh(normed)
    dynamic = jnp.einsum("bsn,ncj->cjbs", hidden, project_out.astype(dtype))
    return dynamic + static.astype(dtype)[..., None, None]


@jax.named_scope("residual")
def _sums(weights: Weights, rows: Bank, count: Index, dtype: DTypeLike) -> tuple[Bank, Array]:
    """Return the rows, and a weighted sum of the first `count` rows for each way, in `dtype`."""
    return pallas_kernels.depth_sums(weights, rows, count=count, dtype=dtype)


def _padded(x: nnx.Param | Array, *last: tuple[int, int]) -> Array:
    """Pad the last axes with zeros; `last` has one pair (zeros before, zeros after) per axis."""
    return jnp.pad(x[...], [(0, 0)] * (x.ndim - len(last)) + list(last))
