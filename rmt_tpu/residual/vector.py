"""The vector store: a token's residual is a vector of size D, as in the Transformer.

Cores with heads read the vector with the matrices W_Q, W_K and W_V and write it with W_O (equations
7 and 9). Feed-forward, embedding and unembedding layers read and write the vector directly.
"""

import itertools
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, DTypeLike, Float

import pallas_kernels
import sharding
from pallas_kernels.target import target
from rmt_tpu import config as cfg
from rmt_tpu.layers import choices
from rmt_tpu.layers.data_vectors import HeadsLayout, Read
from rmt_tpu.layers.norm import normalize
from rmt_tpu.layers.parameters import Seed, bias, gain, parameter, storage_scale
from rmt_tpu.layers.products import times
from rmt_tpu.layers.stacks import Index, in_rows
from rmt_tpu.residual.place import Place
from rmt_tpu.residual.whole_tiles import tiles


class Site(nnx.Module):
    """The parameters that write one sublayer's output and read the next sublayer's input.

    Heads and head size share one axis in the matrices. Otherwise, a TPU would pad heads of size 64
    to 128.

    Attributes:
      write: W_O [H * D_h, D] after a core with heads; None if the vector is written directly.
      gain: the gain of the norm, [D]; None if the read has no norm.
      bias: the bias of the norm, [D], or None.
      read: W_Q, W_K and W_V, [3, D, H * D_h], before a core with heads; W_Q alone, [1, D, H * D_h],
        if there are fewer key and value heads than query heads; None if the vector is read
        directly. If the core has output gates, their matrix comes first.
      read_fewer: W_K and W_V, [2, D, G * D_h], if there are only G key and value heads; otherwise
        None.
    """

    MULTIPLIED: ClassVar[tuple[str, ...]] = ("write", "read", "read_fewer")

    def __init__(self, config: cfg.ModelConfig, seed: Seed, place: Place):
        self.begins_layer, self.reads = place.within == 0, place.reads
        self.write = self._write(config, seed, place.writes) if place.writes.heads else None
        normed = place.last or (config.mixer.adds_up and place.reads.normed)
        shape, axes = (config.store.dim,), ("width",)
        self.gain = gain(shape, axes=axes) if normed else None
        self.bias = bias(shape, axes=axes) if normed and config.norm_bias else None
        heads = place.reads.heads
        count = len(list(itertools.takewhile(lambda n: n == heads[0], heads)))
        alike, fewer = heads[:count], heads[count:]
        self.read = self._read(config, seed / "read", alike) if alike else None
        self.read_fewer = self._read(config, seed / "read_fewer", fewer) if fewer else None

    @property
    def writer(self) -> nnx.Param | None:
        """The matrix W_O that writes the preceding core's output; None for a direct write."""
        return self.write

    def _write(self, config: cfg.ModelConfig, seed: Seed, port: cfg.Port) -> nnx.Param:
        dim, heads_width = config.store.dim, sum(port.heads) * port.head_dim
        std = output_scale(config) * config.init_std * heads_width**-0.5
        axes = ("heads", "embed")
        return parameter(seed / "write", (heads_width, dim), std=std, role="hidden", axes=axes)

    def _read(self, config: cfg.ModelConfig, seed: Seed, heads: tuple[int, ...]) -> nnx.Param:
        dim = config.store.dim
        std = config.init_std * dim**-0.5
        axes = ("projection", "embed", "heads")
        shape = (len(heads), dim, heads[0] * self.reads.head_dim)
        return parameter(seed, shape, std=std, role="hidden", axes=axes)


# The weights that read and write heads are sharded over `tensor`. Each device therefore has its own
# share of the heads, for the tokens of all devices along `tensor`.
HEADS = HeadsLayout("head_major", projected=("tensor",))


def output_scale(config: cfg.ModelConfig) -> float:
    """Return the initial scale of weights that write to the residual.

    It is `1 / sqrt(2L)` if the mixer sums the outputs, and 1 otherwise.
    """
    return storage_scale(config.num_sublayers) if config.mixer.adds_up else 1.0


class Store(nnx.Module):
    """The store `h += W_O y; z = W_QKV norm(h)`, where W_O and W_QKV are absent without heads.

    If heads are sharded over the mesh axis `tensor`, then y and z contain this device's heads for
    the tokens of all devices along that axis. The residual h contains only this device's tokens.
    """

    def __init__(
        self, config: cfg.ModelConfig, seed: Seed, *, dtype: DTypeLike, compute_dtype: DTypeLike
    ):
        self.dtype, self.compute_dtype = dtype, compute_dtype
        self.norm, self.epsilon = config.norm, config.norm_epsilon
        self.tiles = tiles(config)

    def start(
        self,
        tokens: Float[Array, "batch seq 1 D"],
        positions: Float[Array, "batch_or_1 seq 1 D"] | None,
    ) -> tuple[Float[Array, "batch seq D"], Float[Array, "batch seq 1 D"]]:
        """Return the residual before the first write, and the vectors that are written first.

        The residual contains the positions' embeddings, or zeros if positions are not learned. The
        vectors that are written first are the tokens' embeddings (equation 1).
        """
        shape = (*tokens.shape[:2], tokens.shape[-1])
        if positions is None:
            return jnp.zeros(shape, tokens.dtype), tokens
        return jnp.broadcast_to(positions[..., 0, :], shape), tokens

    def hold(self, residual: Float[Array, "batch seq D"]) -> Float[Array, "batch seq held"]:
        """Return the residual in the dtype and the padded width that layers pass on."""
        return self.tiles.pad(residual.astype(self.dtype))

    def add_and_read(
        self,
        residual: Float[Array, "batch seq D"],
        y: Float[Array, "batch seq_or_gathered vectors size"],
        site: Site,
    ) -> tuple[Float[Array, "batch seq D"], Read]:
        """Write the output y to the residual at one site, and read the next sublayer's input."""
        residual = self.write(residual, y, site.write)
        return residual, self.read(residual, site, y.dtype)

    @jax.named_scope("residual")
    def write(
        self,
        residual: Float[Array, "batch seq held"],
        y: Float[Array, "batch seq_or_gathered vectors size"],
        writer: Float[Array, "heads_width D"] | nnx.Param | None,
    ) -> Float[Array, "batch seq held"]:
        """Write the output y: compute `h + W_O y`, or `h + y` if the writer W_O is None.

        h is the residual.
        """
        term = self.tiles.pad(self.write_term(y, writer).astype(residual.dtype))
        written = residual + term
        if choices.kept_in_rows(target()).value:
            written = in_rows(written)
        return checkpoint_name(written, "residual")

    def write_term(
        self,
        y: Float[Array, "batch seq_or_gathered vectors size"],
        writer: Float[Array, "heads_width D"] | nnx.Param | None,
    ) -> Float[Array, "batch seq D"]:
        """Return the term that a write of the output y adds to the residual."""
        y = y.reshape(*y.shape[:-2], y.shape[-2] * y.shape[-1])
        if writer is None:
            return y
        with jax.named_scope("projection"):
            # y contains this device's heads, for the tokens of all devices along `tensor`. The
            # sum over devices completes the product, and each device gets the sum for its own
            # tokens.
            return sharding.scatter_sum(times(y, writer, gathered=-1), "tensor", axis=1)

    @jax.named_scope("residual")
    def read(self, residual: Float[Array, "batch seq held"], site: Site, dtype: DTypeLike) -> Read:
        """Read a sublayer's input: compute `W_QKV norm(h)`, with h the residual.

        A sublayer without heads reads `norm(h)` directly.
        """
        return self.project(self.apply_norm(residual[..., : self.tiles.size], site, dtype), site)

    @jax.named_scope("residual")
    def read_groups(
        self, residuals: Sequence[Float[Array, "batch seq held"]], site: Site, dtype: DTypeLike
    ) -> Read:
        """Read queries, keys and values from different residuals; see `protocols.Store`."""
        residuals = (h[..., : self.tiles.size] for h in residuals)
        normed = [self.apply_norm(h, site, dtype) for h in residuals]
        with jax.named_scope("projection"):
            groups = zip(normed, _matrices(site, dtype), strict=True)
            read = [jnp.dot(sharding.gather(x, "tensor", axis=1), w) for x, w in groups]
            return Read(_heads(jnp.concatenate(read, axis=-1), site))

    @jax.named_scope("residual")
    def merge_and_read(
        self,
        sealed: tuple[Float[Array, "sites batch seq held"], Float[Array, "batch seq"], Index],
        current: Float[Array, "batch seq held"],
        query: Float[Array, " held"],
        site: Site,
        *,
        active: Bool[Array, ""] | bool,
        epsilon: int | float,
    ) -> tuple[Float[Array, "sites batch seq held"], Float[Array, "batch seq held"], Read]:
        """Finish attention over depth at one site (phase two), and project the normalised result.

        See `protocols.Store`.
        """
        mixed, log_sums, place = sealed
        mixed, current, z = pallas_kernels.depth_attention_merge(
            mixed,
            log_sums,
            place,
            current,
            query,
            self.tiles.scale_and_pad(site.gain[...]),
            active=active,
            norm=self.norm,
            epsilon=epsilon,
            norm_epsilon=self.tiles.epsilon(self.epsilon),
        )
        # Without the barrier, XLA would keep the kernel's single token axis in the products with z,
        # and would have to transpose the other factors.
        z = jax.lax.optimization_barrier(z)
        z = z[..., : self.tiles.size].astype(self.compute_dtype)
        return mixed, current, self.project(_plus_bias(z, site), site)

    def decode_params(
        self, queries: Float[Array, "repeat held"], site: Site
    ) -> Float[Array, "repeat 2 held"]:
        """Return a site's parameters for decode steps: see `protocols.StepwiseStore`."""
        return jnp.stack([queries, self.tiles.scale_and_pad(site.gain[...])], axis=1)

    @jax.named_scope("residual")
    def decode_merge_and_read(
        self,
        sealed: tuple[Float[Array, "sites batch seq held"], Float[Array, "sites batch seq"], Index],
        current: Float[Array, "batch seq held"],
        parameters: pallas_kernels.StackSlice,
        site: Site,
        *,
        active: Bool[Array, ""] | bool,
        epsilon: int | float,
    ) -> Read:
        """Mix and read as `merge_and_read` does, for the few tokens of a decode step.

        `parameters` is the site's slice of the result of `decode_params`.
        """
        mixed, log_sums, place = sealed
        z = pallas_kernels.depth_attention_merge_at(
            *(parameters.index, parameters.stack, mixed, log_sums, place, current),
            active=active,
            norm=self.norm,
            epsilon=epsilon,
            norm_epsilon=self.tiles.epsilon(self.epsilon),
        )
        z = jax.lax.optimization_barrier(z).astype(self.compute_dtype)
        return self.project(_plus_bias(z, site), site)

    def apply_norm(
        self, residual: Float[Array, "batch seq D"], site: Site, dtype: DTypeLike
    ) -> Float[Array, "batch seq D"]:
        """Compute `norm(h)` with the site's gain; return the residual h if the site has no gain.

        The bias of the norm is added if the site has a bias.
        """
        if site.gain is None:
            return residual.astype(dtype)
        gain, bias = site.gain[...], None if site.bias is None else site.bias[...]
        norm = {"norm": self.norm, "epsilon": self.epsilon, "dtype": dtype}
        return normalize(residual, gain, **norm, bias=bias)

    def project(self, x: Float[Array, "batch seq D"], site: Site) -> Read:
        """Return the sublayer's input, computed from the normed residual x."""
        residual = x[..., None, :] if site.reads.residual else None
        if site.read is None:
            return Read(residual=residual)
        with jax.named_scope("projection"):
            x = sharding.gather(x, "tensor", axis=1)
            x = times(x, *_weights(site), gathered=-2)
        return Read(_heads(x, site), residual)


def _plus_bias(z: Float[Array, "batch seq D"], site: Site) -> Float[Array, "batch seq D"]:
    """Add the bias of a site's norm, if there is a bias, to the output of a kernel."""
    return z if site.bias is None else z + site.bias[...].astype(z.dtype)


def _weights(site: Site) -> list[nnx.Param]:
    """Return the weight matrices that a site uses to read heads, such as W_Q, W_K and W_V."""
    return [w for w in (site.read, site.read_fewer) if w is not None]


def _matrices(site: Site, dtype: DTypeLike) -> list[Float[Array, "D heads_width"]]:
    """Return the matrix of each group of heads that a core reads, such as W_Q, W_K and W_V."""
    values = (pallas_kernels.read_slices(w.get_value()) for w in _weights(site))
    stacked = (sharding.gather(w.astype(dtype), "fsdp", axis=1) for w in values)
    return [w for group in stacked for w in group]


def _heads(x: Float[Array, "batch seq width"], site: Site) -> Float[Array, "batch seq heads size"]:
    """Split the last axis into the heads that the site's core reads."""
    head_dim = site.reads.head_dim
    return x.reshape(*x.shape[:-1], x.shape[-1] // head_dim, head_dim)
