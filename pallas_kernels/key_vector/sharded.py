"""Communication for key-vector ops whose keys are sharded along K over a mesh axis of n devices.

Each device has K / n rows of the residual matrix of every token of all n devices, and the same
slice of every key and of the gain. A write needs no communication once the device has the data of
all tokens. Let r be the read keys, X the residual, `G = r * gain`, and let d be the index of a
device. The retrieved vectors are a sum over the devices' slices of K:

    z = rstd sum_k G_k (X_k - mean) = rstd (sum_d A_d + sum_d (mean_d - mean) B_d)

Here mean_d is the mean of the entries of slice d. `A_d` is the sum of `G_k (X_k - mean_d)` over
slice d, which a kernel returns if called with `scale=False`. `B_d` is the sum of `G_k` over slice
d. A site therefore needs an all-gather of the data, a reduce-scatter of A, and an all-gather of B
and of two numbers per token. A large mean causes no cancellation, because the slice's mean is
subtracted before A is rounded. The variance is the mean of the variances within slices plus the
variance of the slices' means.

The backward pass needs the means of `a` and of `a n` over all of K, with `a = G^T dz`,
`n = norm(X)` and dz the cotangent of z. They equal `<dz, sum_d B_d> / (K V)` and
`<dz, z> / (K V)`. Each device computes them for its own tokens, without the residual, and the
results are all-gathered.

If the key axis is None, K is not sharded, and the functions of this module do not communicate.
Otherwise they must run in `jax.shard_map`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from pallas_kernels.arguments import Norm
from pallas_kernels.key_vector.interface import Means, Statistics


class Read(NamedTuple):
    """The results of a read that its backward pass needs, in addition to residual and statistics.

    Attributes:
      retrieved: the vectors retrieved for this device's batch rows.
      sums: the sums `sum_k r_pk gain_kv` over all of K, or None for rmsnorm, which does not need
        them.
    """

    retrieved: Float[Array, "b N P V"]
    sums: Float[Array, "P V"] | None


def size(key_axis: str | None) -> int:
    """Return the number of devices over which K is sharded."""
    return 1 if key_axis is None else jax.lax.axis_size(key_axis)


def gather(x: Shaped[Array, "b *rest"], key_axis: str | None) -> Shaped[Array, "B *rest"]:
    """All-gather x, this device's batch rows, and return the batch rows of all devices."""
    if key_axis is None:
        return x
    every = lambda x: jax.lax.all_gather(x, key_axis, axis=0, tiled=True)
    if x.ndim != 4:
        return every(x)
    # The kernels use the memory layout [b, V, P, N]. Without these transposes, the TPU compiler
    # would gather in another layout, and then copy the rows of all devices. With them, it copies
    # only this device's rows.
    tokens_last = lambda x: jnp.transpose(x, (0, 3, 2, 1))
    on_tpu = lambda x: tokens_last(every(tokens_last(x)))
    return jax.lax.platform_dependent(x, tpu=on_tpu, default=every)


def scatter_sum(x: Float[Array, "B *rest"], key_axis: str | None) -> Float[Array, "b *rest"]:
    """Sum x over devices and return this device's batch rows of the sum (a reduce-scatter).

    This is the transpose of `gather`.
    """
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
    """Combine the devices' reads of their slices of K into the read of the whole residual.

    Args:
      retrieved: the vectors read from this device's slice of K, for the batch rows of all devices.
        These are the `A_d` in the module's docstring. The slice's mean is subtracted, and the
        factor rstd is missing.
      statistics: the statistics of this device's slice, with the epsilon of the whole read.
      gain, read_keys: this device's slices of the parameters.
      key_axis: the mesh axis over which K is sharded.
      norm: the norm of the read.
      least: the minimum valid value of a token's variance plus epsilon. If the value is smaller,
        the token's retrieved vectors are NaN. None means no minimum.

    Returns:
      The retrieved vectors of this device's batch rows, in the dtype of `retrieved`; and the
      statistics of the whole residual, for the rows of all devices. A token's statistics are NaN if
      they are NaN for any device's slice.
    """
    mean, rstd = statistics.mean, statistics.rstd
    shape, tokens = mean.shape, mean.size
    centred = norm == "layernorm"
    sent = [1 / jnp.square(rstd)]
    if centred:
        sent += [mean, key_sums(gain, read_keys).astype(mean.dtype)]
    slices = jax.lax.all_gather(jnp.concatenate([x.ravel() for x in sent]), key_axis)
    # This is the mean over slices of `variance + epsilon`, or of `mean square + epsilon` for
    # rmsnorm. Each slice's term contains epsilon, so their mean contains it exactly once.
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
        # The terms are added in a loop, because XLA fuses additions, but would write the result of
        # a matrix product to memory.
        for above_d, sums_d in zip(own(above), each, strict=True):
            read = read + above_d * sums_d
    read = (own(rstd) * read).astype(retrieved.dtype)
    return Read(read, sums), Statistics.of(mean, rstd)


def key_sums(gain: Float[Array, "K V"], read_keys: Float[Array, "P K"]) -> Float[Array, "P V"]:
    """Compute `sum_k r_pk gain_kv`, with r the read keys, over this device's slice of K.

    The result is at least float32.
    """
    dtype = jnp.result_type(jnp.float32, gain, read_keys)
    return jnp.einsum("pk,kv->pv", read_keys.astype(dtype), gain.astype(dtype), precision="highest")


def means(d_retrieved: Float[Array, "b N P V"], read: Read, K: int, key_axis: str) -> Means:
    """Compute the backward pass's `Means` over all `K * V` entries of each token.

    Each device computes the means for its own batch rows. The result contains the means for the
    rows of all devices.
    """
    dtype = jnp.result_type(jnp.float32, d_retrieved)
    dz, count = d_retrieved.astype(dtype), K * d_retrieved.shape[3]
    own = [jnp.sum(dz * read.retrieved.astype(dtype), axis=(2, 3)) / count]
    if read.sums is not None:
        own.append(jnp.sum(dz * read.sums.astype(dtype), axis=(2, 3)) / count)
    every = gather(jnp.stack(own, axis=1), key_axis)
    return Means(every[:, 1] if read.sums is not None else None, every[:, 0])
