"""Hyper-connections, mHC and mHC-lite: m residual streams with learned reads, writes and mixing.

A token has the streams X in R^{m x D}. At the site of each sublayer f:

    u = sum_i alpha_i X_i      y = f(norm(u))      X'_i = sum_j A_ij X_j + beta_i y

The streams start as m copies of the embedding. After the last sublayer they are summed, and the
final norm is applied to the sum. The coefficients alpha (read), beta (write) and A (mix) are
float32. The variants differ in how each site computes them:

- Hyper-connections (Zhu et al. 2025): "static" coefficients are parameters. "Dynamic" ones add
  terms that depend on the streams, with `Xn_j = norm(X_j)`:

      alpha_j = alpha0_j + s_a tanh(Xn_j w_m)       beta_j = beta0_j + s_b tanh(Xn_j w_b)
      A_ij = A0_ij + s_a tanh(Xn_j W_r)_i

- mHC (Xie et al. 2025): with `x = rmsnorm(vec X)` over all m D numbers, and a matrix W in R^{mD x m
  (m + 2)}:

      alpha = s(a_pre x W_pre + b_pre)              beta = 2 s(a_post x W_post + b_post)
      A = Sinkhorn(a_res x W_res + b_res)

- mHC-lite (Yang and Gao 2026) differs from mHC only in A, a weighted mean of all m! permutation
  matrices, with weights `softmax(a_res x W_res + b_res)`. This A is doubly stochastic without
  iteration.

Here s is the sigmoid. The matrices W are initialised to zero. Each site first reads mostly from one
stream, its home stream, so that the streams become different. The home stream of a site is stream
(site mod m). At initialisation, HC and mHC then equal a standard pre-norm model, and so does
mHC-lite with `init="prenorm"`. The HC paper also scales the sublayers' outputs by sqrt(m); this
code does not.
"""

from itertools import permutations
from math import factorial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from rmt_tpu import config as cfg
from rmt_tpu.layers.data_vectors import Read
from rmt_tpu.layers.parameters import Seed, gain, parameter
from rmt_tpu.residual.protocols import Index, StepwiseStore

# The streams are a tuple of arrays. With a single array, a TPU would copy all streams whenever they
# are joined or split.
Streams = tuple[Float[Array, "batch seq D"], ...]


class Coefficients(NamedTuple):
    """The read, write and mixing coefficients for each token.

    The token axes come last, because a TPU would pad a last axis of size m to 128.
    """

    read: Float[Array, "m batch seq"]
    write: Float[Array, "m batch seq"]
    mix: Float[Array, "to from batch seq"]


class StreamsState(NamedTuple):
    """The streams before the last output is written, and the coefficients for writing it."""

    streams: Streams
    write: Float[Array, "m batch seq"]
    mix: Float[Array, "to from batch seq"]


class HyperConnections(nnx.Module):
    """The mixer for `config.HyperConnections`, `config.Mhc` and `config.MhcLite`.

    A mixer forms a sublayer's input from earlier outputs.
    """

    def __init__(self, config: cfg.ModelConfig):
        self.streams = config.mixer.streams

    def start(
        self, store: StepwiseStore, state: Float[Array, "batch seq D"], y: Array
    ) -> tuple[StreamsState, Array]:
        """Return the initial state, with m equal streams, and the embedding y.

        The streams do not include y yet. The first write adds y to every stream, without mixing.
        """
        residual = store.hold(state)
        m, dtype = self.streams, jnp.result_type(residual, jnp.float32)
        write = jnp.ones((m, *residual.shape[:-1]), dtype)
        mix = jnp.broadcast_to(jnp.eye(m, dtype=dtype)[:, :, None, None], (m, *write.shape))
        return StreamsState((residual,) * m, write, mix), y

    @jax.named_scope("residual")
    def advance(
        self,
        store: StepwiseStore,
        state: StreamsState,
        y: Float[Array, "batch seq_or_gathered vectors size"],
        site: nnx.Module,
        index: Index,
    ) -> tuple[StreamsState, Read]:
        """Mix the streams and write y to them, then read the new streams.

        The coefficients of the read, and of the next write, are computed from the new streams.
        """
        streams = _write(state, store.write_term(y, site.write))
        if site.mix is None:
            total = sum(x.astype(state.write.dtype) for x in streams)
            return state, store.read(total, site, y.dtype)
        read, write, mix = site.mix(streams)
        # The barrier makes XLA compute u, the weighted sum of the streams, once. Without the
        # barrier, each pass of the norm would compute the sum again.
        u = jax.lax.optimization_barrier(_weighted_sum(read, streams).astype(y.dtype))
        return StreamsState(streams, write, mix), store.read(u, site, y.dtype)


def _write(state: StreamsState, y: Float[Array, "batch seq D"]) -> Streams:
    """Return the streams after the write of y: `X'_i = sum_j A_ij X_j + beta_i y`.

    The result has the dtype of the streams.
    """
    streams, write, mix = state
    y = y.astype(write.dtype)
    rows = (_weighted_sum(mix[i], streams) + write[i, ..., None] * y for i in range(len(mix)))
    return tuple(row.astype(x.dtype) for row, x in zip(rows, streams, strict=True))


def _weighted_sum(
    weights: Float[Array, "m batch seq"], streams: Streams
) -> Float[Array, "batch seq D"]:
    """Return `sum_i w_i X_i` in the weights' dtype."""
    return sum(w[..., None] * x.astype(w.dtype) for w, x in zip(weights, streams, strict=True))


# The learned parameters of a site ------------------------------------------------------------


def make_mix(config: cfg.ModelConfig, seed: Seed, *, index: Int[Array, ""]) -> nnx.Module:
    """Return the module that computes the coefficients for the site before sublayer `index`."""
    match config.mixer:
        case cfg.HyperConnections(dynamic=False):
            return StaticMix(config.mixer.streams, index)
        case cfg.HyperConnections():
            return DynamicMix(config, seed, index)
        case cfg.Mhc():
            return ManifoldMix(config, seed, index)
        case cfg.MhcLite():
            return PermutationMix(config, seed, index)


def _learned(value: Float[Array, "..."], *axes: str) -> nnx.Param:
    """Return a parameter that is initialised to `value`, with the logical names of its axes.

    Its role "gain" means that it has no weight decay.
    """
    return nnx.Param(value.astype(jnp.float32), role="gain", axes=axes)


class StaticMix(nnx.Module):
    """The coefficients of static hyper-connections. They are parameters, the same for every token.

    Attributes:
      read, write: alpha0 and beta0, [m]; at first, alpha0 is 1 for the home stream and 0 for
        others.
      mix: A0, [m, m], indexed by the target stream and then by the source stream.
    """

    def __init__(self, streams: int, index: Int[Array, ""]):
        self.read = _learned(_home(streams, index), "stream")
        self.write = _learned(jnp.ones(streams), "stream")
        self.mix = _learned(jnp.eye(streams), "stream", "stream")

    def __call__(self, streams: Streams) -> Coefficients:
        """Return the same read, write and mixing coefficients for every token.

        They are in float32, or wider if the streams are.
        """
        dtype = jnp.result_type(streams[0], jnp.float32)
        spread = lambda p: jnp.broadcast_to(
            p[...].astype(dtype)[..., None, None], (*p.shape, *streams[0].shape[:-1])
        )
        return Coefficients(spread(self.read), spread(self.write), spread(self.mix))


class DynamicMix(nnx.Module):
    """The coefficients of dynamic hyper-connections, computed from the normed streams.

    The norm is of the model's kind, and all streams share its gain.

    Attributes:
      static: alpha0, beta0 and A0.
      gain: the gain of the norm, [D].
      w: w_m, w_b and W_r side by side, [D, 2 + m].
      scales: s_a and s_b, [2].
    """

    def __init__(self, config: cfg.ModelConfig, seed: Seed, index: Int[Array, ""]):
        m, dim = config.mixer.streams, config.store.dim
        self.norm, self.epsilon, self.tanh = config.norm, config.norm_epsilon, config.mixer.tanh
        self.static = StaticMix(m, index)
        self.gain = gain((dim,), axes=("width",))
        axes = ("width", "coefficient")
        shape, how = (dim, 2 + m), {"role": "hidden", "exact": True}
        self.w = parameter(seed / "w", shape, std=0.0, axes=axes, **how)
        self.scales = _learned(jnp.full(2, 0.01), "coefficient")

    def __call__(self, streams: Streams) -> Coefficients:
        """Return each token's read, write and mixing coefficients, computed from its streams."""
        static = self.static(streams)
        projected = [jnp.moveaxis(self._projected(x, static.read.dtype), -1, 0) for x in streams]
        # The stacked projections have the shape [2 + m, source stream, batch, seq].
        projected = jnp.stack(projected, axis=1)
        projected = jnp.tanh(projected) if self.tanh else projected
        s_a, s_b = self.scales[...]
        return Coefficients(
            static.read + s_a * projected[0],
            static.write + s_b * projected[1],
            static.mix + s_a * projected[2:],
        )

    def _projected(self, x, dtype):
        """Return `norm(x) w` for one stream x, with w the projection to coefficients.

        The norm is applied after the product, so that one pass over x is enough.
        """
        w = self.gain[...][:, None] * self.w[...]
        product = jnp.dot(x, w.astype(x.dtype), preferred_element_type=dtype)
        x = x.astype(dtype)
        square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        if self.norm == "layernorm":
            mean = jnp.mean(x, axis=-1, keepdims=True)
            product = product - mean * jnp.sum(w, axis=0)
            square = jnp.maximum(square - jnp.square(mean), 0)
        return product * jax.lax.rsqrt(square + self.epsilon)


class _ProjectedMix(nnx.Module):
    """The base class for the coefficients of mHC and mHC-lite.

    The coefficients are computed by one projection of all streams.

    Attributes:
      gain: the gain of the RMS norm over all m D numbers of a token, [m, D].
      w: W_pre, W_post and W_res side by side, [m, D, 2 m + mixes].
      scales: a_pre, a_post and a_res, [3].
      read_bias, write_bias: b_pre and b_post, [m].
      mix_bias: b_res, [mixes].
    """

    def __init__(
        self,
        config: cfg.ModelConfig,
        seed: Seed,
        *,
        read_bias: Float[Array, " m"],
        write_bias: Float[Array, " m"],
        mix_bias: Float[Array, " mixes"],
    ):
        m, dim = config.mixer.streams, config.store.dim
        self.epsilon = config.norm_epsilon
        self.gain = gain((m, dim), axes=("stream", "width"))
        shape, axes = (m, dim, 2 * m + mix_bias.size), ("stream", "width", "coefficient")
        self.w = parameter(seed / "w", shape, std=0.0, axes=axes, role="hidden", exact=True)
        self.scales = _learned(jnp.full(3, 0.01), "coefficient")
        self.read_bias = _learned(read_bias, "stream")
        self.write_bias = _learned(write_bias, "stream")
        self.mix_bias = _learned(mix_bias, "coefficient")

    def __call__(self, streams: Streams) -> Coefficients:
        m = len(streams)
        projected = self._projected(streams)
        a_pre, a_post, a_res = self.scales[...]
        bias = lambda b: b[...][:, None, None]
        return Coefficients(
            jax.nn.sigmoid(a_pre * projected[:m] + bias(self.read_bias)),
            2 * jax.nn.sigmoid(a_post * projected[m : 2 * m] + bias(self.write_bias)),
            self._mixing(a_res * projected[2 * m :] + bias(self.mix_bias)),
        )

    def _projected(self, streams):
        """Return the normed streams times W, [coefficients, batch, seq].

        The norm is applied after the product, so that one pass over the streams is enough.
        """
        dtype = jnp.result_type(streams[0], jnp.float32)
        w = (self.gain[...][..., None] * self.w[...]).astype(streams[0].dtype)
        dots = (
            jnp.dot(x, w, preferred_element_type=dtype) for x, w in zip(streams, w, strict=True)
        )
        product = sum(dots)
        squares = sum(jnp.square(x.astype(dtype)) for x in streams) / len(streams)
        square = jnp.mean(squares, axis=-1, keepdims=True)
        return jnp.moveaxis(product * jax.lax.rsqrt(square + self.epsilon), -1, 0)


class ManifoldMix(_ProjectedMix):
    """The coefficients of mHC.

    The preprint does not give the initial values of the biases. Here, as in PaddleFleet, a site
    initially reads 0.95 of its home stream and 0.05 of each other stream, writes with weight 1, and
    has an A near the identity.
    """

    def __init__(self, config: cfg.ModelConfig, seed: Seed, index: Int[Array, ""]):
        m = config.mixer.streams
        self.rounds = config.mixer.rounds
        mix_bias = (6 * jnp.eye(m) - 3).reshape(-1)
        biases = {"read_bias": 6 * _home(m, index) - 3, "write_bias": jnp.zeros(m)}
        super().__init__(config, seed, **biases, mix_bias=mix_bias)

    def _mixing(self, logits):
        m = self.gain.shape[0]
        return sinkhorn(logits.reshape(m, m, *logits.shape[1:]), self.rounds)


class PermutationMix(_ProjectedMix):
    """The coefficients of mHC-lite.

    The permutations are in lexicographic order and start with the identity.
    """

    def __init__(self, config: cfg.ModelConfig, seed: Seed, index: Int[Array, ""]):
        m, home = config.mixer.streams, _home(config.mixer.streams, index)
        match config.mixer.init:
            case "paper":
                biases = {"read_bias": 2 * home - 1, "write_bias": 2 * home - 1}
            case "prenorm":
                biases = {"read_bias": 6 * home - 3, "write_bias": jnp.zeros(m)}
        mix_bias = jnp.full(factorial(m), -8.0).at[0].set(0.0)
        super().__init__(config, seed, **biases, mix_bias=mix_bias)

    def _mixing(self, logits):
        return mixed_permutations(jax.nn.softmax(logits, axis=0), self.gain.shape[0])


def sinkhorn(
    logits: Float[Array, "to from batch seq"], rounds: int
) -> Float[Array, "to from batch seq"]:
    """Return nearly doubly stochastic matrices, normalising columns and rows in turn.

    Each round divides by the column sums and then by the row sums, starting from `A = exp(logits)`.
    Rows are normalised last, so each new stream is a weighted mean of the old ones. The column sums
    are only approximately 1.
    """

    def one_round(a, _):
        a = a / jnp.sum(a, axis=0, keepdims=True)
        return a / jnp.sum(a, axis=1, keepdims=True), None

    # Subtracting the maximum does not change A. Logits are bounded below, because a row of zeros
    # would give 0 / 0 = NaN.
    below_largest = logits - jax.lax.stop_gradient(jnp.max(logits, axis=0, keepdims=True))
    a = jnp.exp(jnp.maximum(below_largest, -60))
    return jax.lax.scan(one_round, a, length=rounds)[0]


def mixed_permutations(
    weights: Float[Array, "mixes batch seq"], streams: int
) -> Float[Array, "to from batch seq"]:
    """Return the weighted mean `sum_k w_k P_k` of all m! permutation matrices P_k.

    The permutations are in lexicographic order, and m is the number of streams.
    """
    matrices = np.eye(streams)[list(permutations(range(streams)))]
    # With "highest", a TPU does not round the float32 weights, so the result's row sums stay 1.
    return jnp.einsum("kij,kbn->ijbn", matrices.astype(weights.dtype), weights, precision="highest")


def _home(streams: int, index: Int[Array, ""]) -> Float[Array, " m"]:
    """Return a one-hot vector for the stream that a site reads most at initialisation.

    It is stream `index mod m`, with m the number of streams.
    """
    return jax.nn.one_hot(index % streams, streams)
