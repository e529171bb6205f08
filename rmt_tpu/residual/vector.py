"""The vector store: a token's residual is a vector of size D, as in the Transformer.

Attention reads it with matrices W_Q, W_K, W_V and writes it with W_O (equations 7 and 9);
feed-forward, embedding and unembedding layers read and write the vector itself.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

import sharding
from rmt_tpu import config as cfg
from rmt_tpu.layers.norm import normalize
from rmt_tpu.layers.parameters import Before, gain, parameter, storage_scale


class Site(nnx.Module):
    """One place where the vector is written by one sublayer and read by the next.

    Matrices have two axes: with heads of 64 minor, a TPU would pad each row of 64 to 128.

    Attributes:
      write: W_O [H * D_h, D] after attention; None where the vector itself is written.
      gain: of the norm, [D]; None where what is read is not normed.
      read: W_Q, W_K and W_V, [3, D, H * D_h], before attention; None where the vector itself is
        read.
    """

    def __init__(
        self,
        config: cfg.ModelConfig,
        rngs: nnx.Rngs,
        *,
        before: Before,
        layer_index: Int[Array, ""],
    ):
        self.write = self._write(config, rngs) if before == "feed_forward" else None
        # A depth-wise LSTM norms its gates and not what a sublayer reads.
        plain = isinstance(config.mixer, cfg.DepthLstm) and before != "unembedding"
        self.gain = None if plain else gain((config.store.dim,), axes=("width",))
        self.read = self._read(config, rngs) if before == "attention" else None

    @property
    def writer(self) -> nnx.Param | None:
        """How what was produced before this site is written."""
        return self.write

    def _write(self, config: cfg.ModelConfig, rngs: nnx.Rngs) -> nnx.Param:
        dim, heads_width = config.store.dim, _heads_width(config)
        std = output_scale(config) * config.init_std * heads_width**-0.5
        axes = ("heads", "embed")
        return parameter(rngs, (heads_width, dim), std=std, role="hidden", axes=axes)

    def _read(self, config: cfg.ModelConfig, rngs: nnx.Rngs) -> nnx.Param:
        dim, heads_width = config.store.dim, _heads_width(config)
        std = config.init_std * dim**-0.5
        axes = ("projection", "embed", "heads")
        return parameter(rngs, (3, dim, heads_width), std=std, role="hidden", axes=axes)


def output_scale(config: cfg.ModelConfig) -> float:
    """Of the weights that write to the residual: small where many writes are added up."""
    return 1.0 if isinstance(config.mixer, cfg.DepthLstm) else storage_scale(config.num_layers)


def _heads_width(config: cfg.ModelConfig) -> int:
    return config.attention.num_heads * config.attention.head_dim


class Store(nnx.Module):
    """`h += W_O y; z = W_QKV norm(h)`, or the vector itself.

    Where `tensor` divides heads, what attention reads and writes is of own heads, for the tokens of
    all its devices; the residual is of own tokens.
    """

    def __init__(
        self, config: cfg.ModelConfig, rngs: nnx.Rngs, *, dtype: DTypeLike, compute_dtype: DTypeLike
    ):
        self.dtype, self.compute_dtype = dtype, compute_dtype
        self.head_dim = config.attention.head_dim
        self.norm, self.epsilon = config.norm, config.norm_epsilon

    def start(
        self,
        tokens: Float[Array, "batch seq 1 D"],
        positions: Float[Array, "batch_or_1 seq 1 D"] | None,
    ) -> tuple[Float[Array, "batch seq D"], Float[Array, "batch seq 1 D"]]:
        """The positions as residual, and the tokens as what is to be written (equation 1)."""
        shape = (*tokens.shape[:2], tokens.shape[-1])
        if positions is None:
            return jnp.zeros(shape, tokens.dtype), tokens
        return jnp.broadcast_to(positions[..., 0, :], shape), tokens

    def hold(self, residual: Float[Array, "batch seq D"]) -> Float[Array, "batch seq D"]:
        """The residual in the dtype it is carried in."""
        return residual.astype(self.dtype)

    def add_and_read(
        self,
        residual: Float[Array, "batch seq D"],
        y: Float[Array, "batch y_seq vectors size"],
        site: Site,
    ) -> tuple[Float[Array, "batch seq D"], Float[Array, "batch z_seq reads read_size"]]:
        """Write y, then norm and read, at one site."""
        residual = self.write(residual, y, site.write)
        return residual, self.read(residual, site, y.dtype)

    @jax.named_scope("residual")
    def write(
        self,
        residual: Float[Array, "batch seq D"],
        y: Float[Array, "batch y_seq vectors size"],
        write: Float[Array, "heads_width D"] | nnx.Param | None,
    ) -> Float[Array, "batch seq D"]:
        """`h + W_O y`, or `h + y` where the vector itself is written."""
        return residual + self.written(y, write).astype(residual.dtype)

    def written(
        self,
        y: Float[Array, "batch y_seq vectors size"],
        write: Float[Array, "heads_width D"] | nnx.Param | None,
    ) -> Float[Array, "batch seq D"]:
        """What a write adds."""
        y = y.reshape(*y.shape[:-2], y.shape[-2] * y.shape[-1])
        if write is None:
            return y
        with jax.named_scope("projection"):
            write = sharding.gather(write[...].astype(y.dtype), "fsdp", axis=1)
            # Of own heads, for the tokens of all devices of `tensor`.
            return sharding.scatter_sum(jnp.dot(y, write), "tensor", axis=1)

    @jax.named_scope("residual")
    def read(
        self, residual: Float[Array, "batch seq D"], site: Site, dtype: DTypeLike
    ) -> Float[Array, "batch z_seq reads read_size"]:
        """`W_QKV norm(h)`, or `norm(h)` where the vector itself is read."""
        return self.project(self.norm_of(residual, site, dtype), site)

    def norm_of(
        self, residual: Float[Array, "batch seq D"], site: Site, dtype: DTypeLike
    ) -> Float[Array, "batch seq D"]:
        """`norm(h)` with the site's gain, or h where it has none."""
        if site.gain is None:
            return residual.astype(dtype)
        gain = site.gain[...]
        return normalize(residual, gain, norm=self.norm, epsilon=self.epsilon, dtype=dtype)

    def project(
        self, x: Float[Array, "batch seq D"], site: Site
    ) -> Float[Array, "batch z_seq reads read_size"]:
        """What the sublayer gets of the normed x."""
        if site.read is None:
            return x[..., None, :]
        with jax.named_scope("projection"):
            read = sharding.gather(site.read.astype(x.dtype), "fsdp", axis=1)
            x = jnp.dot(sharding.gather(x, "tensor", axis=1), jnp.concatenate(list(read), axis=-1))
        return x.reshape(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim)
