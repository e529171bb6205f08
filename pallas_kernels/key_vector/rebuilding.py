"""Key-vector ops for a custom backward pass that rebuilds residuals instead of saving them.

These ops have no gradients themselves. They return the statistics and cotangents that a
hand-written backward pass needs, and accept `StackSlice`s in place of most arrays.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Shaped

from pallas_kernels.arguments import Norm, StackSlice, check_shapes, read_slices
from pallas_kernels.key_vector import calls, sharded
from pallas_kernels.key_vector.calls import KeyVectorCall
from pallas_kernels.key_vector.interface import (
    FRACTION_BITS,
    Gradients,
    Reread,
    SiteBackward,
    SiteOperands,
    Statistics,
)
from pallas_kernels.platform import Implementation


def store_forward(
    residual: Float[Array, "B N K V"],
    store_keys: Float[Array, "R K"],
    data: Float[Array, "b N R V"] | StackSlice,
    *,
    empty: Bool[Array, ""] | bool = False,
    in_place: bool = True,
    key_axis: str | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B N K V"]:
    """Compute `store` with data that may be a `StackSlice`. `store_backward` is the backward pass.

    Args:
      residual, store_keys, data, key_axis, implementation: as in `store`.
      empty: whether to treat the residual as zeros, whatever it contains.
      in_place: whether a kernel may overwrite the residual. This costs a copy if the caller still
        uses the residual afterwards.
    """
    call = KeyVectorCall("layernorm", 0.0, implementation, None, key_axis)
    call = calls.check(call, SiteOperands(residual, store_keys, data), reads=False)
    site = calls.of_all_rows(SiteOperands(residual, store_keys, data), call.key_axis)
    no_statistics = None
    operands = (site,) if empty is False else (site, no_statistics, jnp.asarray(empty))
    return calls.run(call, "forward", *operands, in_place=in_place).residual


def store_backward(
    store_keys: Float[Array, "R K"],
    data: Float[Array, "b N R V"] | StackSlice,
    d_stored: Float[Array, "B N K V"],
    *,
    key_axis: str | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "R K"], Float[Array, "b N R V"]]:
    """Return the cotangents of a store's keys and data.

    Let w be the keys, y the data and dX the cotangent `d_stored` of the stored residual. The
    results are `dw = sum y dX^T`, summed over tokens, and `dy = w dX`. The cotangent of the
    residual before the store is dX itself.
    """
    call = KeyVectorCall("layernorm", 0.0, implementation, None, key_axis)
    call = calls.check(call, SiteOperands(d_stored, store_keys, data), reads=False)
    site = calls.of_all_rows(SiteOperands(None, store_keys, data), call.key_axis)
    g = calls.run(call, "backward", SiteBackward(site, None, d_stored, None))
    return g.store_keys.astype(store_keys.dtype), sharded.scatter_sum(g.data, call.key_axis)


def store_norm_retrieve_with_statistics(
    residual: Shaped[Array, "B N K V"],
    store_keys: Float[Array, "R K"] | StackSlice,
    data: Float[Array, "b N R V"] | StackSlice,
    gain: Float[Array, "K V"] | StackSlice,
    read_keys: Float[Array, "P K"] | StackSlice,
    *,
    norm: Norm,
    epsilon: int | float,
    fraction_bits: int = FRACTION_BITS,
    key_axis: str | None = None,
    implementation: Implementation | None = None,
) -> tuple[Shaped[Array, "B N K V"], Float[Array, "b N P V"], Statistics]:
    """Compute `store_norm_retrieve`, and also return the statistics that `undo` needs.

    The statistics describe the stored residual, for all B batch rows.
    """
    site = SiteOperands(residual, store_keys, data, gain, read_keys)
    call = calls.check(
        KeyVectorCall(norm, epsilon, implementation, None, key_axis, fraction_bits), site
    )
    return calls.forward(call, True, calls.of_all_rows(site, call.key_axis))[:3]


def norm_retrieve_again(
    residual: Shaped[Array, "B N K V"],
    statistics: Statistics,
    gain: Float[Array, "K V"] | StackSlice,
    read_keys: Float[Array, "P K"] | StackSlice,
    *,
    norm: Norm,
    epsilon: int | float,
    dtype: DTypeLike,
    fraction_bits: int = FRACTION_BITS,
    key_axis: str | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "b N P V"]:
    """Repeat the read of `store_norm_retrieve_with_statistics`.

    Args:
      residual, statistics: the stored residual and its statistics, both as that op returned them.
        The statistics save a pass over the residual. They are not used with a `key_axis`, because
        each device then needs the statistics of its own slice of K.
      gain, read_keys, norm, epsilon, fraction_bits, key_axis, implementation: as passed to that op.
      dtype: the dtype of the result.

    Returns:
      The retrieved vectors.

    Raises:
      ValueError: the shapes do not fit, or the norm is unknown.
    """
    site, dtype = SiteOperands(residual, gain=gain, read_keys=read_keys), calls.check_dtype(dtype)
    call = calls.check(
        KeyVectorCall(norm, epsilon, implementation, dtype, key_axis, fraction_bits), site
    )
    calls.check_statistics(residual, statistics)
    if call.key_axis is not None:
        return calls.read(call, read_slices(site))[0]
    out = calls.run(call, "forward", site, statistics, dtype=call.dtype, **calls.read_options(call))
    return out.retrieved


def undo(
    residual: Shaped[Array, "B N K V"],
    statistics: Statistics,
    store_keys: Float[Array, "R K"] | StackSlice,
    data: Float[Array, "b N R V"] | StackSlice,
    gain: Float[Array, "K V"] | StackSlice,
    read_keys: Float[Array, "P K"] | StackSlice,
    d_residual: Float[Array, "B N K V"],
    d_retrieved: Float[Array, "b N P V"],
    *,
    norm: Norm,
    fraction_bits: int = FRACTION_BITS,
    key_axis: str | None = None,
    retrieved: Float[Array, "b N P V"] | None = None,
    again: Reread | None = None,
    implementation: Implementation | None = None,
) -> Gradients:
    """Compute the backward pass of `store_norm_retrieve`, and undo its write to the residual.

    The op makes one pass over the residual, and lets a backward pass do without saved residuals.
    With a `key_axis`, the data are all-gathered again, and for layernorm a float32 array [P, V] is
    summed over devices.

    Args:
      residual: X', the residual *after* the store.
      statistics: the statistics of X', from `store_norm_retrieve_with_statistics`.
      store_keys, data, gain, read_keys, norm, fraction_bits, key_axis, implementation: as passed to
        `store_norm_retrieve_with_statistics`.
      d_residual: the cotangent of X'.
      d_retrieved: the cotangent of the retrieved vectors.
      retrieved: the vectors that were retrieved for this device's batch rows. They are required
        with a `key_axis`. Otherwise they are optional, and save a read of the residual in kernels
        that process V in slabs.
      again: the operands of a read from the rebuilt residual, or None.

    Returns:
      The cotangents, with `rebuilt` set to `X = X' - w^T y`, where w are the store keys and y the
      data. `rebuilt` is exact for an int16 residual. `retrieved` contains the vectors that `again`
      reads for this device's batch rows.

    Raises:
      ValueError: the shapes do not fit, the norm is unknown, or `retrieved` is missing.
    """
    site = SiteOperands(residual, store_keys, data, gain, read_keys)
    call = calls.check(
        KeyVectorCall(norm, 0.0, implementation, None, key_axis, fraction_bits), site
    )
    calls.check_statistics(residual, statistics)
    own = data.shape[:-2] if call.key_axis is not None else residual.shape[:-2]
    of_reads = (*own, read_keys.shape[0], residual.shape[-1])
    check_shapes(
        f"residual {list(residual.shape)} and read_keys {list(read_keys.shape)}",
        d_residual=(d_residual, residual.shape),
        d_retrieved=(d_retrieved, of_reads),
        retrieved=(retrieved, of_reads),
    )
    if retrieved is None and call.key_axis is not None:
        raise ValueError("retrieved is None; with a key_axis, undo needs the argument `retrieved`")
    if again is not None:
        calls.check(call, SiteOperands(residual, gain=again.gain, read_keys=again.read_keys))
    read, key_axis = None, call.key_axis
    if key_axis is not None:
        own = sharded.key_sums(*read_slices(site[3:]))
        sums = jax.lax.psum(own, key_axis) if norm == "layernorm" else None
        read = sharded.Read(retrieved, sums)
    site = calls.of_all_rows(site, key_axis)
    operands = SiteBackward(site, statistics, d_residual, d_retrieved, None, again)
    # With a key axis, `calls.backward` computes the means from the retrieved vectors in `read`.
    if key_axis is None:
        operands = operands._replace(retrieved=retrieved)
    g = calls.backward(call, operands, read, rebuild=True)
    if again is None:
        return g
    return g._replace(retrieved=sharded.scatter_sum(g.retrieved, key_axis))
