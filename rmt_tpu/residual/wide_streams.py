"""Wide streams: K residuals per token, which differ only in the weights of reads and writes.

This mixer follows the streamwise wide residual of NVIDIA's Megatron-LM (pull request 6716, 2026). A
token has the streams X_1 to X_K, each a residual of the store: a vector, or a matrix `D_k x D_v`.
For a sublayer f, u is read at the site before f, and then f's output y is written:

    u = sum_i r_i X_i      y = f(norm(u))      X_i <- rho_i X_i + w_i write(y)

All streams start as the embedding, and the unembedding reads their mean. Each site learns

- the read weights r_i, which start at 1 / K;
- the write weights `w_i = 2 sigmoid(beta_i)`. The beta_i start in equal steps from -s to s, so that
  the streams differ. The mean of the w_i starts at 1;
- the shares that streams keep, `rho_i = 1 - c sigmoid(logit_i)`, which start at 0.999. A site
  forgets at most the share c of a stream. With c = 0 streams forget nothing, and rho_i is 1.

With c = 0, the mean of the streams starts as the standard residual, so the model starts as one with
that residual. The source gives K, c and the initial value of rho_i only in an example. It does not
give s or the form of rho_i, which are our choice. The learning rate of these weights is that of the
model's other gains.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rmt_tpu import config as cfg
from rmt_tpu.layers.data_vectors import Read
from rmt_tpu.residual.protocols import Index, Row, Store, Written

_FORGOTTEN_AT_FIRST = 0.001


class WideState(NamedTuple):
    """The streams before the last output is written, and the weights for writing it.

    The streams are a tuple, because a TPU would copy all streams of a single array whenever they
    are joined or split.

    Attributes:
      streams: X_1 to X_K.
      write: w, the write weights.
      keep: rho, the shares that streams keep; None if streams forget nothing.
    """

    streams: tuple[Row, ...]
    write: Float[Array, " K"]
    keep: Float[Array, " K"] | None


class WideMix(nnx.Module):
    """The weights that one site learns, K numbers each.

    Attributes:
      read: r, the weights of the streams in the sublayer's input.
      write_logits: beta, which determines the weights for writing the sublayer's output.
      forget_logits: the logits of the shares that streams forget before that write; None if streams
        forget nothing.
    """

    def __init__(self, config: cfg.WideStreams):
        count, most = config.streams, config.forget
        learned = lambda x: nnx.Param(jnp.asarray(x, jnp.float32), role="gain", axes=("stream",))
        self.most = most
        self.read = learned(np.full(count, 1 / count))
        # A single stream has the logit 0, and so the write weight 1.
        self.write_logits = learned(config.spread * np.linspace(-1, 1, count) * (count > 1))
        # At initialisation, a stream forgets the share `most * sigmoid(first)`, which is set here.
        first = np.log(_FORGOTTEN_AT_FIRST / (most - _FORGOTTEN_AT_FIRST)) if most else None
        self.forget_logits = learned(np.full(count, first)) if most else None

    def weights(self) -> tuple[Float[Array, " K"], Float[Array, " K"] | None]:
        """Return a pair: the write weights w_i, and the shares rho_i that the streams keep.

        The second is None if c, the largest share that a stream may forget, is 0.
        """
        write = 2 * jax.nn.sigmoid(self.write_logits[...])
        if self.forget_logits is None:
            return write, None
        return write, 1 - self.most * jax.nn.sigmoid(self.forget_logits[...])


class WideStreams(nnx.Module):
    """The mixer for `config.WideStreams`.

    A mixer forms a sublayer's input from earlier outputs.
    """

    def __init__(self, config: cfg.ModelConfig):
        self.count, self.forgets = config.mixer.streams, config.mixer.forget > 0

    def start(
        self, store: Store, state: Float[Array, "key_batch seq *shape"], y: Written
    ) -> tuple[WideState, Written]:
        """Return K equal streams, and the embedding, which is written to all streams alike."""
        residual = store.hold(state)
        ones = jnp.ones(self.count, jnp.result_type(residual, jnp.float32))
        return WideState((residual,) * self.count, ones, ones if self.forgets else None), y

    @jax.named_scope("residual")
    def advance(
        self, store: Store, state: WideState, y: Written, site: nnx.Module, index: Index
    ) -> tuple[WideState, Read]:
        """Write the preceding output y to all streams, and read their weighted sum."""
        streams, write, keep = state
        term = store.write(jnp.zeros_like(streams[0]), y, site.writer)
        streams = tuple(
            ((x if keep is None else keep[i] * x) + write[i] * term).astype(x.dtype)
            for i, x in enumerate(streams)
        )
        last = site.mix is None
        read = jnp.full(self.count, 1 / self.count, write.dtype) if last else site.mix.read[...]
        # The barrier makes XLA compute u, the weighted sum of the streams, once. Without the
        # barrier, each pass of the norm would compute the sum again.
        u = sum(read[i] * x.astype(write.dtype) for i, x in enumerate(streams))
        # The final site's norm gets the sum before it is rounded to the dtype of data vectors.
        u = u if last else jax.lax.optimization_barrier(u.astype(y.dtype))
        z = store.read(u, site, y.dtype)
        if not last:
            write, keep = jax.tree.map(lambda x: x.astype(write.dtype), site.mix.weights())
        return WideState(streams, write, keep), z
