"""Calls of key-vector ops: argument checks, dispatch to an implementation, and communication.

The keys may be sharded over a mesh axis, the key axis. The devices along it then exchange data and
cotangents. In this module, `data` has the batch rows of all these devices, and the retrieved
vectors have this device's rows. Without a key axis, nothing is exchanged, and `read`, the value
that `forward` returns for `backward`, is None.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import DTypeLike

from pallas_kernels.arguments import (
    Norm,
    check_array,
    check_epsilon,
    check_fraction_bits,
    check_norm,
    check_shapes,
    read_slices,
)
from pallas_kernels.key_vector import mosaic_gpu, mosaic_tpu, sharded, triton_gpu, xla
from pallas_kernels.key_vector.interface import (
    FRACTION_BITS,
    Gradients,
    SiteBackward,
    SiteOperands,
    Statistics,
)
from pallas_kernels.platform import Implementations

# A platform's kernels become the default once they are measured to be faster than plain JAX; see
# docs/benchmarks/kernels.md.
IMPLEMENTATIONS = Implementations(
    xla,
    {"mosaic_tpu": mosaic_tpu, "triton": triton_gpu},
    ("tpu",),
    name="key_vector",
    on_request={"mosaic_gpu": mosaic_gpu},
    deciding=("dtype",),
)


class KeyVectorCall(NamedTuple):
    """The static parameters of a call of a key-vector op, constant during tracing.

    Attributes:
      norm, epsilon, implementation, fraction_bits: as in `store_norm_retrieve`.
      dtype: the dtype of the retrieved vectors; None for the data's dtype.
      key_axis: the mesh axis over which K is sharded, or None.
    """

    norm: Norm
    epsilon: int | float
    implementation: str | None
    dtype: jnp.dtype | None = None
    key_axis: str | None = None
    fraction_bits: int = FRACTION_BITS


def run(call: KeyVectorCall, op: str, *operands, **options):
    """Run `op` with the implementation that `call` requests; None requests the fastest one."""
    return IMPLEMENTATIONS.run(call.implementation, op, *operands, **options)


def check(call: KeyVectorCall, site: SiteOperands, *, reads: bool = True) -> KeyVectorCall:
    """Check the static parameters and operands of a key-vector op, and return the parameters.

    A `key_axis` with only one device is replaced by None.
    """
    residual, store_keys, data, gain, read_keys = site
    check_norm(call.norm)
    check_fraction_bits(call.fraction_bits)
    check_epsilon("epsilon", call.epsilon)
    check_array("residual", residual, "... K V", or_int16=True)
    call = call._replace(key_axis=_check_axis(residual, call.key_axis))
    if reads:
        check_array("gain", gain, "K V")
        check_array("read_keys", read_keys, "P K")
        if gain.shape != residual.shape[-2:] or read_keys.shape[-1] != gain.shape[0]:
            raise ValueError(
                f"shapes do not fit: residual [..., K, V] has shape {residual.shape}, but gain "
                f"[K, V] has shape {gain.shape} and read_keys [P, K] have shape {read_keys.shape}"
            )
    if store_keys is not None or not reads:
        _check_store(residual, store_keys, data, call.key_axis)
    return call


def check_statistics(residual, statistics: Statistics) -> None:
    """Raise ValueError unless the statistics are of as many tokens as the residual [B, N, K, V]."""
    batch, *tokens = residual.shape[:-2]
    wanted = statistics.both, (batch, 2, *tokens)
    check_shapes(f"residual {list(residual.shape)}", statistics=wanted)


def check_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Return the dtype of retrieved vectors as a `jnp.dtype`.

    Raises:
      ValueError: the dtype is not a float dtype of 16 bits or more.
    """
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise ValueError(
            f"dtype={dtype} of retrieved vectors is not legal; legal: floats of 16 bits or more"
        )
    return dtype


def _check_axis(residual, key_axis) -> str | None:
    n = sharded.size(key_axis)
    if n == 1:
        return None
    if residual.ndim != 4 or residual.shape[0] % n:
        raise ValueError(
            f"shapes do not fit: with key_axis={key_axis!r} of {n} devices, residual [B, N, K, V] "
            f"must contain the batch rows of all {n} devices, but has shape {residual.shape}"
        )
    return key_axis


def _check_store(residual, store_keys, data, key_axis) -> None:
    check_array("store_keys", store_keys, "R K")
    check_array("data", data, "... R V")
    R, K = store_keys.shape
    *tokens, _, V = residual.shape
    if key_axis is not None:
        tokens[0] //= sharded.size(key_axis)
    if residual.shape[-2] != K or data.shape != (*tokens, R, V):
        raise ValueError(
            f"shapes do not fit: residual [..., K, V] has shape {residual.shape}, but store_keys "
            f"[R, K] have shape {store_keys.shape} and data [..., R, V] has shape {data.shape}"
        )


def of_all_rows(site: SiteOperands, key_axis: str | None) -> SiteOperands:
    """Return `site` with the data gathered from all devices along `key_axis`.

    Without an axis, `site` is returned unchanged.
    """
    if key_axis is None:
        return site
    site = read_slices(site)
    return site._replace(data=sharded.gather(site.data, key_axis))


def read_options(call: KeyVectorCall) -> dict:
    """Return the keyword arguments that an implementation's `forward` needs for a read."""
    return {
        "norm": call.norm,
        "epsilon": call.epsilon,
        "scale": call.key_axis is None,
        "fraction_bits": call.fraction_bits,
    }


def forward(call: KeyVectorCall, in_place: bool, site: SiteOperands):
    """Compute a whole site: write to the residual, normalise it and read from it.

    Returns:
      The stored residual, the retrieved vectors, the statistics, and `read`, a value that
      `backward` needs (a `sharded.Read`, or None without a key axis).
    """
    out = run(call, "forward", site, in_place=in_place, **read_options(call))
    return out.residual, *_of_all_slices(call, site, out)


def read(call: KeyVectorCall, site: SiteOperands):
    """Compute a read from the residual without a store.

    Returns:
      The retrieved vectors, the statistics, and `read`, a value that `backward` needs (a
      `sharded.Read`, or None without a key axis).
    """
    out = run(call, "forward", site, dtype=call.dtype, **read_options(call))
    return _of_all_slices(call, site, out)


def _of_all_slices(call, site, out):
    """Combine the vectors and statistics that all devices read from their slices of K."""
    if call.key_axis is None:
        return out.retrieved, out.statistics, None
    args = (out.retrieved, out.statistics, site.gain, site.read_keys, call.key_axis)
    integer = site.residual.dtype == jnp.int16
    least = xla.least_variance(call.fraction_bits) + call.epsilon if integer else None
    read, statistics = sharded.all_slices(*args, norm=call.norm, least=least)
    return read.retrieved, statistics, read


def backward(call: KeyVectorCall, operands: SiteBackward, read, *, rebuild=False) -> Gradients:
    """Return the cotangents of a whole site, which is a store followed by a read.

    The gradient of the norm needs two means over all of K. With a key axis, the devices compute
    these means first.
    """
    of_all = to_all_slices(call, operands.site.residual, read, operands.d_retrieved)
    operands = operands._replace(d_retrieved=of_all[0], means=of_all[1])
    options = {"rebuild": rebuild, "fraction_bits": call.fraction_bits}
    g = run(call, "backward", operands, norm=call.norm, **options)
    return g._replace(data=sharded.scatter_sum(g.data, call.key_axis))


def to_all_slices(call: KeyVectorCall, residual, read, d_retrieved):
    """Gather all devices' cotangents of the retrieved vectors, and compute the `Means`.

    The means are over all of K. Without a key axis, the cotangents are returned unchanged and the
    means are None.
    """
    if read is None:
        return d_retrieved, None
    K = residual.shape[2] * sharded.size(call.key_axis)
    means = sharded.means(d_retrieved, read, K, call.key_axis)
    return sharded.gather(d_retrieved, call.key_axis), means
