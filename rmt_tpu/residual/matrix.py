"""The matrix store: a token's residual is a matrix `D_k x D_v`, as in the RMT.

Every sublayer reads data vectors from the matrix with retrieval keys. It writes R data vectors to
the matrix, each as an outer product with a storage key. These learned key vectors replace the
weight matrices W_Q, W_K, W_V and W_O of a Transformer. See Mak and Flanigan (2025), equations 12 to
27.

On a mesh with an axis `key`, D_k is divided over the devices along it. In shapes, `local_D_k` is
the size of a device's slice, and `key_batch` is the batch of all these devices together.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, DTypeLike, Float, Shaped

import pallas_kernels
import sharding
from pallas_kernels import StackSlice
from rmt_tpu import config as cfg
from rmt_tpu.layers.choices import few_tokens
from rmt_tpu.layers.data_vectors import HeadsLayout, Read
from rmt_tpu.layers.parameters import (
    Seed,
    gain,
    key_init_scale,
    read_keys,
    storage_scale,
    store_keys,
)
from rmt_tpu.layers.stacks import Index
from rmt_tpu.residual import fixed_point
from rmt_tpu.residual.place import Place


class Site(nnx.Module):
    """The parameters that write one sublayer's output and read the next sublayer's input.

    Attributes:
      store_keys: the storage keys, [R, D_k]: w_O after a core with heads, w_FF after a feed-forward
        layer, or w_E in the first site, which writes the embedding.
      gain: the gain of the norm, [D_k, D_v].
      read_keys: the retrieval keys: r_Q, r_K and r_V as [3 H, D_k] before a core with heads; r_FF
        or r_U, [R, D_k], if the next core reads the residual without heads.
      size_major: whether the site writes vectors without heads, and whether it reads such vectors.
        Both are in the order of `data_vectors.concatenate`.
    """

    def __init__(self, config: cfg.ModelConfig, seed: Seed, place: Place):
        rank, size = config.data_shape
        base_rank, key_dim = config.base_model.data_shape[0], config.store.key_dim
        # The first site writes the embedding, which is not scaled down like the outputs of
        # sublayers.
        scale = jnp.where(place.index == 0, 1.0, storage_scale(config.num_sublayers))
        writes, reads = place.writes.vectors(rank), place.reads.vectors(rank)
        of_base = (place.base_writes or place.writes).vectors(base_rank)
        scale *= key_init_scale(config, writes, of_base, writes=True)
        self.store_keys = store_keys(seed / "store_keys", writes, key_dim, scale=scale)
        self.gain = gain((key_dim, size), axes=("key", "head"))
        of_base = (place.base_reads or place.reads).vectors(base_rank)
        scale = key_init_scale(config, reads, of_base, writes=False)
        self.read_keys = read_keys(seed / "read_keys", reads, key_dim, scale=scale)
        self.begins_layer, self.reads = place.within == 0, place.reads
        self.size_major = not sum(place.writes.heads), not sum(place.reads.heads)

    @property
    def writer(self) -> nnx.Param:
        """The storage keys with which this site writes the output of the preceding core."""
        return self.store_keys

    def split(self, vectors: Float[Array, "batch seq reads D_v"]) -> Read:
        """Split the vectors read with the site's keys into the parts of the next core's input.

        A core may read vectors of heads, vectors without heads, or both.
        """
        heads = sum(self.reads.heads)
        if not self.reads.residual:
            return Read(heads=vectors)
        if not heads:
            return Read(residual=vectors)
        return Read(vectors[:, :, :heads], vectors[:, :, heads:])

    def join(self, read: Read) -> Float[Array, "batch seq reads D_v"]:
        """Join the parts of a core's input into one array of vectors; the inverse of `split`."""
        return jnp.concatenate([part for part in read if part is not None], axis=2)


# Key vectors are not sharded by heads, so each device reads and writes all heads of its own tokens.
HEADS = HeadsLayout("size_major")


def output_scale(config: cfg.ModelConfig) -> float:
    """Return 1, the initial scale of the weights that produce a sublayer's output.

    In an RMT, the storage keys scale the output down when it is written to the residual.
    """
    return 1.0


class Store(nnx.Module):
    """The store `X += w^T y; z = r norm(X)`, one call to `pallas_kernels.store_norm_retrieve`.

    X is the residual, w are a site's storage keys and r its retrieval keys. On a mesh with a `key`
    axis, each device has a slice of D_k for the batch of all devices along that axis.

    Attributes:
      position_keys: w_PE, [R, D_k], if positions are learned; otherwise None.
    """

    def __init__(
        self, config: cfg.ModelConfig, seed: Seed, *, dtype: DTypeLike, compute_dtype: DTypeLike
    ):
        rank, _ = config.data_shape
        self.dtype, self.compute_dtype = dtype, compute_dtype
        self.fraction_bits = fixed_point.fraction_bits(config)
        self.key_dim = config.store.key_dim
        self.norm, self.epsilon = config.norm, config.norm_epsilon
        learned = config.learned_positions is not None
        own, base_rank = seed / "position_keys", config.base_model.data_shape[0]
        scale = key_init_scale(config, rank, base_rank, writes=True)
        self.position_keys = store_keys(own, rank, self.key_dim, scale=scale) if learned else None

    def start(
        self,
        tokens: Float[Array, "batch seq R D_v"],
        positions: Float[Array, "batch_or_1 seq R D_v"] | None,
    ) -> tuple[Float[Array, "key_batch seq local_D_k D_v"], Float[Array, "batch seq R D_v"]]:
        """Return the residual before the first write, and the data vectors that are written first.

        The residual is `X = w_PE^T P` (equation 19), with P the positions' data vectors, or zeros
        if positions are not learned. The vectors that are written first are the tokens' data
        vectors (equation 18).
        """
        # Each device has its own slice of D_k, for the batch of all devices along the `key` axis.
        devices = sharding.axis_size("key")
        batch, seq, _, size = tokens.shape
        shape = (devices * batch, seq, self.key_dim // devices, size)
        if positions is None:
            return jnp.zeros(shape, tokens.dtype), tokens
        if positions.shape[0] > 1 or "key" in sharding.token_axes():
            positions = sharding.gather(positions, "key", axis=0)
        empty = jnp.zeros((*positions.shape[:2], *shape[2:]), tokens.dtype)
        # This write happens once per step and is usually small, so a kernel would save no time.
        written = pallas_kernels.store(
            empty, self.position_keys[...], positions, implementation="xla"
        )
        # On TPUs, tokens are the last axis of the residual. Broadcasting in this layout lets the
        # backward pass sum the residual's gradient before it transposes the sum.
        rows, *own = shape
        last = jnp.broadcast_to(jnp.moveaxis(written, 1, -1), (rows, *own[1:], seq))
        return jnp.moveaxis(last, -1, 1), tokens

    def hold(
        self, residual: Float[Array, "key_batch seq local_D_k D_v"]
    ) -> Shaped[Array, "key_batch seq local_D_k D_v"]:
        """Return the residual in the dtype that layers pass on, such as int16."""
        if self.dtype == jnp.int16:
            return pallas_kernels.to_fixed_point(residual, self.fraction_bits)
        return residual.astype(self.dtype)

    @jax.named_scope("residual")
    def add_and_read(
        self,
        residual: Shaped[Array, "key_batch seq local_D_k D_v"],
        y: Float[Array, "batch seq R D_v"],
        site: Site | StackSlice,
    ) -> tuple[Shaped[Array, "key_batch seq local_D_k D_v"], Read]:
        """Write y with the storage keys, normalize the residual, and read with the retrieval keys.

        If `site` is a slice of a stack of sites, a kernel for decode steps reads the keys directly
        from the stack: see `reads_stacks`.
        """
        if isinstance(site, StackSlice):
            stacked, layer = site
            store_keys, gain, read_keys = _parameters(stacked)
            residual, z = pallas_kernels.store_norm_retrieve_at(
                *(layer, residual, store_keys, y, gain, read_keys),
                norm=self.norm,
                epsilon=self.epsilon,
                size_major=stacked.size_major,
            )
            return residual, stacked.split(z)
        store_keys, gain, read_keys = _parameters(site)
        residual, z = pallas_kernels.store_norm_retrieve(
            residual, store_keys, y, gain, read_keys, **self._options()
        )
        return residual, site.split(z)

    @jax.named_scope("residual")
    def add_and_read_with_statistics(
        self,
        residual: Shaped[Array, "key_batch seq local_D_k D_v"],
        y: StackSlice,
        site: Site | StackSlice,
    ) -> tuple[Shaped[Array, "key_batch seq local_D_k D_v"], Read, pallas_kernels.Statistics]:
        """Write y and read as `add_and_read` does, and also return the statistics of the norm."""
        store_keys, gain, read_keys = _parameters(site)
        residual, z, statistics = pallas_kernels.store_norm_retrieve_with_statistics(
            residual, store_keys, y, gain, read_keys, **self._options()
        )
        return residual, _module(site).split(z), statistics

    @jax.named_scope("residual")
    def write(
        self,
        residual: Float[Array, "key_batch seq local_D_k D_v"],
        y: Float[Array, "batch seq R D_v"],
        writer: Float[Array, "R local_D_k"] | nnx.Param,
    ) -> Float[Array, "key_batch seq local_D_k D_v"]:
        """Write the output y: compute `X + w^T y`, with X the residual and w the storage keys."""
        return pallas_kernels.store(residual, writer[...], y, key_axis=_key_axis())

    @jax.named_scope("residual")
    def write_saved(
        self,
        residual: Float[Array, "key_batch seq local_D_k D_v"],
        y: StackSlice,
        writer: Float[Array, "R local_D_k"],
        *,
        empty: Bool[Array, ""] | bool,
        in_place: bool = True,
    ) -> Float[Array, "key_batch seq local_D_k D_v"]:
        """Write a saved output y: compute `X + w^T y`, or `w^T y` if `empty` is true.

        X is the residual, and `writer` contains the storage keys w of y.
        """
        options = {"empty": empty, "in_place": in_place, "key_axis": _key_axis()}
        return pallas_kernels.store_forward(residual, writer, y, **options)

    @jax.named_scope("residual")
    def write_saved_backward(
        self,
        y: StackSlice,
        writer: Float[Array, "R local_D_k"],
        d_residual: Float[Array, "key_batch seq local_D_k D_v"],
    ) -> tuple[Float[Array, "batch seq R D_v"], Float[Array, "R local_D_k"]]:
        """Return the cotangents of y and w for the write `X + w^T y`.

        They are `dy = w dX`, and `dw = y dX^T` summed over tokens. X is the residual, y an output
        and w the writer.
        """
        d_writer, d_y = pallas_kernels.store_backward(writer, y, d_residual, key_axis=_key_axis())
        return d_y, d_writer

    @jax.named_scope("residual")
    def read(
        self, residual: Float[Array, "key_batch seq local_D_k D_v"], site: Site, dtype: DTypeLike
    ) -> Read:
        """Read a sublayer's input: compute `r norm(X)`.

        X is the residual, and r are the site's retrieval keys.
        """
        _, gain, read_keys = _parameters(site)
        z = pallas_kernels.norm_retrieve(residual, gain, read_keys, dtype=dtype, **self._options())
        return site.split(z)

    @jax.named_scope("residual")
    def read_groups(
        self,
        residuals: Sequence[Float[Array, "key_batch seq local_D_k D_v"]],
        site: Site,
        dtype: DTypeLike,
    ) -> Read:
        """Read queries, keys and values from different residuals; see `protocols.Store`."""
        _, gain, read_keys = _parameters(site)
        keys = jnp.split(read_keys, np.cumsum(site.reads.heads)[:-1])
        options = {"dtype": dtype} | self._options()
        groups = zip(residuals, keys, strict=True)
        read = [pallas_kernels.norm_retrieve(x, gain, r, **options) for x, r in groups]
        return Read(heads=jnp.concatenate(read, axis=2))

    @jax.named_scope("residual")
    def merge_and_read(
        self,
        sealed: tuple[Float[Array, "sites batch seq D_k D_v"], Float[Array, "batch seq"], Index],
        current: Float[Array, "batch seq D_k D_v"],
        query: Float[Array, "D_k D_v"],
        site: Site,
        *,
        active: Bool[Array, ""] | bool,
        epsilon: int | float,
    ) -> tuple[Float[Array, "sites batch seq D_k D_v"], Float[Array, "batch seq D_k D_v"], Read]:
        """Finish attention over depth at one site (phase two), and read the normalised result.

        See `protocols.Store`.
        """
        _, gain, read_keys = _parameters(site)
        mixed, current, z = pallas_kernels.depth_attention_merge_read(
            *(*sealed, current, query, gain, read_keys),
            active=active,
            norm=self.norm,
            epsilon=epsilon,
            norm_epsilon=self.epsilon,
            dtype=self.compute_dtype,
        )
        return mixed, current, site.split(z)

    @jax.named_scope("residual")
    def read_again(
        self,
        residual: Shaped[Array, "key_batch seq local_D_k D_v"],
        site: Site | StackSlice,
        statistics: pallas_kernels.Statistics,
        dtype: DTypeLike,
    ) -> Read:
        """Repeat the read that `add_and_read` did, from the residual that it returned.

        `statistics` are the norm's statistics from that read.
        """
        _, gain, read_keys = _parameters(site)
        z = pallas_kernels.norm_retrieve_again(
            residual, statistics, gain, read_keys, dtype=dtype, **self._options()
        )
        return _module(site).split(z)

    @jax.named_scope("residual")
    def undo(
        self,
        residual: Shaped[Array, "key_batch seq local_D_k D_v"],
        y: StackSlice,
        site: Site | StackSlice,
        z: Read,
        statistics: pallas_kernels.Statistics,
        cotangents: tuple[Float[Array, "key_batch seq local_D_k D_v"], Read],
        before: tuple[Site | StackSlice, pallas_kernels.Statistics] | None = None,
    ) -> tuple[
        Shaped[Array, "key_batch seq local_D_k D_v"],
        Float[Array, "key_batch seq local_D_k D_v"],
        Float[Array, "batch seq R D_v"],
        dict[str, Array],
        Read | None,
    ]:
        """Run `add_and_read` backwards from the residual that it returned.

        Returns:
          The residual before `add_and_read`; the cotangents of that residual, of y and of the
          site's parameters; and the preceding site's read of that residual (None if `before` is
          None).
        """
        store_keys, gain, read_keys = _parameters(site)
        d_residual, d_z = cotangents
        again = None
        if before is not None:
            again = pallas_kernels.Reread(*_parameters(before[0])[1:], before[1])
        g = pallas_kernels.undo(
            residual,
            statistics,
            store_keys,
            y,
            gain,
            read_keys,
            d_residual,
            _module(site).join(d_z),
            norm=self.norm,
            fraction_bits=self.fraction_bits,
            key_axis=_key_axis(),
            retrieved=_module(site).join(z),
            again=again,
        )
        d_site = {"store_keys": g.store_keys, "gain": g.gain, "read_keys": g.read_keys}
        z_before = None if before is None else _module(before[0]).split(g.retrieved)
        return g.rebuilt, g.residual, g.data, d_site, z_before

    def reads_stacks(self, residual: Shaped[Array, "key_batch seq local_D_k D_v"]) -> bool:
        """Return whether the decode-step kernel that reads from stacks supports this residual."""
        return few_tokens(residual.shape[1]) and self.dtype != jnp.int16 and _key_axis() is None

    def _options(self):
        return {
            "norm": self.norm,
            "epsilon": self.epsilon,
            "fraction_bits": self.fraction_bits,
            "key_axis": _key_axis(),
        }


def _key_axis() -> str | None:
    """Return the name of the mesh axis that shards D_k; None if the mesh does not shard D_k."""
    return "key" if sharding.axis_size("key") > 1 else None


def _module(site: Site | StackSlice) -> Site:
    """Return the site; if `site` is a slice of a stack of sites, return the stack."""
    return site.stack if isinstance(site, StackSlice) else site


def _parameters(site: Site | StackSlice) -> tuple[Array, ...] | tuple[StackSlice, ...]:
    """Return the site's storage keys, gain of the norm, and retrieval keys.

    If the site is a slice of a stack of sites, the parameters are slices of their stacks.
    """
    if isinstance(site, StackSlice):
        return tuple(StackSlice(x, site.index) for x in _parameters(site.stack))
    return site.store_keys[...], site.gain[...], site.read_keys[...]
