"""Key-vector ops with the keys' entries K divided over the n devices along a mesh axis.

A device holds its own K / n rows of the residual matrices of all n devices' tokens, and its own
slice of every key and of the gain. Writing is local once the device has all tokens' data. The
retrieved vectors are a sum over slices d,

    z = rstd sum_k G_k (X_k - mean) = rstd (sum_d A_d + sum_d (mean_d - mean) B_d)

with `G = r * gain`, `A_d` a slice's own part about its own mean, which a kernel returns without
`scale`, and `B_d = sum_k G_k` over the slice. A site therefore costs an all-gather of the data and
a reduce-scatter of A, which are the two halves of an all-reduce, and in addition to the latter an
all-gather of B and of two numbers per token. A slice's own mean is subtracted before A is rounded,
and a variance is the sum of the variance within slices and the variance of their means, so a large
mean cancels no digits.

The backward pass of a kernel needs the means of a and of a n, with `a = G^T dz` and `n = norm(X)`,
over all of K. They are `<dz, sum_d B_d> / (K V)` and `<dz, z> / (K V)`: a device computes them for
its own tokens without the residual, and they are gathered.

If the key axis is None, K is not divided and nothing is exchanged. With an axis, these functions
run in `jax.shard_map`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from pallas_kernels.arguments import Norm
from pallas_kernels.key_vector.interface import Means, Statistics


class Read(NamedTuple):
    """Results of a read that its backward pass needs, with the residual and the statistics.

    `retrieved` holds the vectors of the device's own rows. `sums` is `sum_k r_pk gain_kv` over all
    of K, or None for rmsnorm, which does not need it.
    """

    retrieved: Float[Array, "b N P V"]
    sums: Float[Array, "P V"] | None


def size(key_axis: str | None) -> int:
    """Return the number of devices over which K is divided."""
    return 1 if key_axis is None else jax.lax.axis_size(key_axis)


def gather(x: Shaped[Array, "b *rest"], key_axis: str | None) -> Shaped[Array, "B *rest"]:
    """Gather each device's own rows and return the rows of all devices."""
    if key_axis is None:
        return x
    every = lambda x: jax.lax.all_gather(x, key_axis, axis=0, tiled=True)
    if x.ndim != 4:
        return every(x)
    # A TPU's compiler would gather [b, N, P, V] in its own choice of layout and then copy all rows
    # to the kernels' layout, that of [b, V, P, N]. This way it copies only the device's own rows.
    tokens_last = lambda x: jnp.transpose(x, (0, 3, 2, 1))
    on_tpu = lambda x: tokens_last(every(tokens_last(x)))
    return jax.lax.platform_dependent(x, tpu=on_tpu, default=every)


def scatter_sum(x: Float[Array, "B *rest"], key_axis: str | None) -> Float[Array, "b *rest"]:
    """Return the own rows of the sum over devices: the transpose of `gather`."""
    if key_axis is None:
        return x
    return jax.lax.psum_scatter(x, key_axis, scatter_dimension=0, tiled=True)


def all_slices(
    retrieved: Float[Array, "B N P V"],
    statistics: Statistics,
    gain: Float[Array, "K V"],
    read_keys: Float[Array, "P K"],
    key_axis: str,
    *,
    norm: Norm,
    least: float | None = None,
) -> tuple[Read, Statistics]:
    """Return what the own rows read from the whole residual, given what all rows read from a slice.

    Args:
      retrieved: A of the own slice about its own mean, without the factor rstd, for all rows.
      statistics: the own slice's statistics, with the epsilon of the whole.
      gain, read_keys: the own slices of the parameters.
      key_axis: the mesh axis.
      norm: the norm of the read.
      least: a token whose variance plus epsilon is less than this reads NaN; None for no limit.

    Returns:
      The retrieved vectors of the own rows, in the dtype of `retrieved`; and the statistics of the
      whole residual, for all rows. If one slice's statistics are NaN, so are the whole's.
    """
    mean, rstd = statistics.mean, statistics.rstd
    shape, tokens = mean.shape, mean.size
    centred = norm == "layernorm"
    sent = [1 / jnp.square(rstd)]
    if centred:
        sent += [mean, key_sums(gain, read_keys).astype(mean.dtype)]
    slices = jax.lax.all_gather(jnp.concatenate([x.ravel() for x in sent]), key_axis)
    # The mean of `variance + epsilon`, or of the mean square plus epsilon: epsilon is in each
    # slice's number, and so it is in their mean.
    square = jnp.mean(slices[:, :tokens], axis=0).reshape(shape)
    if centred:
        means = slices[:, tokens : 2 * tokens].reshape(-1, *shape)
        mean = jnp.mean(means, axis=0)
        above = means - mean
        square = square + jnp.mean(jnp.square(above), axis=0)
    rstd = jax.lax.rsqrt(square)
    if least is not None:
        rstd = jnp.where(square >= least, rstd, jnp.nan)

    total = scatter_sum(retrieved, key_axis)
    first = jax.lax.axis_index(key_axis) * total.shape[0]
    own = lambda x: jax.lax.dynamic_slice_in_dim(x, first, total.shape[0], axis=-2)[..., None, None]
    read, sums = total.astype(rstd.dtype), None
    if centred:
        each = slices[:, 2 * tokens :].reshape(-1, *total.shape[2:])
        sums = jnp.sum(each, axis=0)
        # The terms are added one by one because they fuse; a product with few terms would be
        # written to memory.
        for above_d, sums_d in zip(own(above), each, strict=True):
            read = read + above_d * sums_d
    read = (own(rstd) * read).astype(retrieved.dtype)
    return Read(read, sums), Statistics.of(mean, rstd)


def key_sums(gain: Float[Array, "K V"], read_keys: Float[Array, "P K"]) -> Float[Array, "P V"]:
    """Compute `sum_k r_pk gain_kv` over the own slice, at least float32."""
    dtype = jnp.result_type(jnp.float32, gain, read_keys)
    return jnp.einsum("pk,kv->pv", read_keys.astype(dtype), gain.astype(dtype), precision="highest")


def means(d_retrieved: Float[Array, "b N P V"], read: Read, K: int, key_axis: str) -> Means:
    """Return all rows' means over the whole residual of `K * V` entries, from the own rows."""
    dtype = jnp.result_type(jnp.float32, d_retrieved)
    dz, count = d_retrieved.astype(dtype), K * d_retrieved.shape[3]
    own = [jnp.sum(dz * read.retrieved.astype(dtype), axis=(2, 3)) / count]
    if read.sums is not None:
        own.append(jnp.sum(dz * read.sums.astype(dtype), axis=(2, 3)) / count)
    every = gather(jnp.stack(own, axis=1), key_axis)
    return Means(every[:, 1] if read.sums is not None else None, every[:, 0])
