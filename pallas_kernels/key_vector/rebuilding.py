"""Key-vector ops for a backward pass that a caller writes itself and that rebuilds the residual.

These ops have no gradients. They return what such a backward pass needs, like statistics and
cotangents, and take slots of stacks. A backward pass that keeps the writes uses them too.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Shaped

from pallas_kernels.arguments import Norm, Slot, taken
from pallas_kernels.key_vector import calls, sharded
from pallas_kernels.key_vector.calls import Call
from pallas_kernels.key_vector.interface import (
    FRACTION_BITS,
    Again,
    Backward,
    Gradients,
    Site,
    Statistics,
)
from pallas_kernels.platform import Implementation


def store_forward(
    residual: Float[Array, "B N K V"],
    store_keys: Float[Array, "R K"],
    data: Float[Array, "b N R V"] | Slot,
    *,
    empty: Bool[Array, ""] | bool = False,
    in_place: bool = True,
    key_axis: str | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B N K V"]:
    """Compute `store` with data that may lie in a stack; its backward pass is `store_backward`.

    If `empty` is true, the residual counts as zeros whatever it holds. `in_place` may overwrite the
    residual, which costs a copy if the caller still needs it.
    """
    call = Call("layernorm", 0.0, implementation, None, key_axis)
    call = calls.checked(call, Site(residual, store_keys, data), reads=False)
    site = calls.of_all_rows(Site(residual, store_keys, data), call.key_axis)
    given = () if empty is False else (None, jnp.asarray(empty))
    return calls.run(call, "forward", site, *given, in_place=in_place).residual


def store_backward(
    store_keys: Float[Array, "R K"],
    data: Float[Array, "b N R V"] | Slot,
    d_stored: Float[Array, "B N K V"],
    *,
    key_axis: str | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "R K"], Float[Array, "b N R V"]]:
    """Return the cotangents of a store's keys and data, from the stored residual's cotangent.

    `dw = sum y dX^T` and `dy = w dX`. The cotangent of the residual before the store equals that of
    the stored one.
    """
    call = Call("layernorm", 0.0, implementation, None, key_axis)
    call = calls.checked(call, Site(d_stored, store_keys, data), reads=False)
    site = calls.of_all_rows(Site(None, store_keys, data), call.key_axis)
    g = calls.run(call, "backward", Backward(site, None, d_stored, None))
    return g.store_keys.astype(store_keys.dtype), sharded.scatter_sum(g.data, call.key_axis)


def store_norm_retrieve_with_statistics(
    residual: Shaped[Array, "B N K V"],
    store_keys: Float[Array, "R K"] | Slot,
    data: Float[Array, "b N R V"] | Slot,
    gain: Float[Array, "K V"] | Slot,
    read_keys: Float[Array, "P K"] | Slot,
    *,
    norm: Norm,
    epsilon: int | float,
    fraction_bits: int = FRACTION_BITS,
    key_axis: str | None = None,
    implementation: Implementation | None = None,
) -> tuple[Shaped[Array, "B N K V"], Float[Array, "b N P V"], Statistics]:
    """Compute `store_norm_retrieve`, and the statistics of all B rows that `undo` takes."""
    site = Site(residual, store_keys, data, gain, read_keys)
    call = calls.checked(Call(norm, epsilon, implementation, None, key_axis, fraction_bits), site)
    return calls.forward(call, True, calls.of_all_rows(site, call.key_axis))[:3]


def norm_retrieve_again(
    residual: Shaped[Array, "B N K V"],
    statistics: Statistics,
    gain: Float[Array, "K V"] | Slot,
    read_keys: Float[Array, "P K"] | Slot,
    *,
    norm: Norm,
    epsilon: int | float,
    dtype: DTypeLike,
    fraction_bits: int = FRACTION_BITS,
    key_axis: str | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "b N P V"]:
    """Return what `store_norm_retrieve_with_statistics` retrieved from the residual it returned.

    The given statistics save a pass over the residual. With a `key_axis` they are not used, because
    they belong to the whole residual, while a slice is read about its own mean.
    """
    site, dtype = Site(residual, gain=gain, read_keys=read_keys), jnp.dtype(dtype)
    call = calls.checked(Call(norm, epsilon, implementation, dtype, key_axis, fraction_bits), site)
    if call.key_axis is not None:
        return calls.read(call, taken(site))[0]
    out = calls.run(call, "forward", site, statistics, dtype=call.dtype, **calls.read_options(call))
    return out.retrieved


def undo(
    residual: Shaped[Array, "B N K V"],
    statistics: Statistics,
    store_keys: Float[Array, "R K"] | Slot,
    data: Float[Array, "b N R V"] | Slot,
    gain: Float[Array, "K V"] | Slot,
    read_keys: Float[Array, "P K"] | Slot,
    d_residual: Float[Array, "B N K V"],
    d_retrieved: Float[Array, "b N P V"],
    *,
    norm: Norm,
    fraction_bits: int = FRACTION_BITS,
    key_axis: str | None = None,
    retrieved: Float[Array, "b N P V"] | None = None,
    again: Again | None = None,
    implementation: Implementation | None = None,
) -> Gradients:
    """Return the cotangents of `store_norm_retrieve` and the residual before it, in the same pass.

    `residual` is the residual *after* the store; `Gradients.rebuilt` is `X = X' - w^T y`, exact for
    an int16 residual, so that a backward pass needs no saved residuals. If `again` is given, the
    rebuilt residual is also read with the statistics in `again`: `Gradients.retrieved` holds the
    result for the device's own rows.

    With a `key_axis`, `retrieved` is required: the vectors of the own rows that were retrieved with
    these statistics. The data are gathered again, and for layernorm P V numbers are summed over
    devices. Without a `key_axis`, `retrieved` saves a read of the residual in kernels that work in
    slabs.

    Raises:
      ValueError: the shapes do not fit, the norm is unknown, or `retrieved` is missing.
    """
    site = Site(residual, store_keys, data, gain, read_keys)
    call = calls.checked(Call(norm, 0.0, implementation, None, key_axis, fraction_bits), site)
    if retrieved is None and call.key_axis is not None:
        raise ValueError("with a key_axis, undo needs what was retrieved")
    if again is not None:
        calls.checked(call, Site(residual, gain=again.gain, read_keys=again.read_keys))
    read, key_axis = None, call.key_axis
    if key_axis is not None:
        own = sharded.key_sums(*taken(site[3:]))
        sums = jax.lax.psum(own, key_axis) if norm == "layernorm" else None
        read = sharded.Read(retrieved, sums)
    site = calls.of_all_rows(site, key_axis)
    given = Backward(site, statistics, d_residual, d_retrieved, None, again)
    if key_axis is None:  # With an axis, `calls.backward` takes the means over all slices.
        given = given._replace(retrieved=retrieved)
    g = calls.backward(call, given, read, rebuild=True)
    if again is None:
        return g
    return g._replace(retrieved=sharded.scatter_sum(g.retrieved, key_axis))
