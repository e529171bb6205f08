"""Key-vector ops for a backward pass of one's own, which rebuilds the residual or keeps writes.

They have no gradients, and give what such a pass needs: statistics, slots of stacks, cotangents.
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
    """`store` of what may lie in a stack, for a backward pass of one's own: see `store_backward`.

    Where it is `empty` the residual counts as zeros, whatever it holds. `in_place` may write over
    it, which a caller that still needs it pays for with a copy.
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
    """Cotangents of a store's keys and data, from that of the residual, which is also that before.

    `dw = sum y dX^T` and `dy = w dX`.
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
    """`store_norm_retrieve`, and the statistics that `undo` takes: of all B rows."""
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
    """What `store_norm_retrieve_with_statistics` retrieved of the residual that it left.

    With its statistics, which cost a pass over the residual; but for a `key_axis`, where they are
    of the whole and a slice is read about its own mean.
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
    """The cotangents of `store_norm_retrieve` and, in the same pass, the residual before it.

    `residual` is the residual *after* the store; `Gradients.rebuilt` is `X = X' - w^T y`, exact for
    an int16 residual, so that a backward pass needs no stored residuals. That is then read `again`,
    with the statistics that were taken of it: `Gradients.retrieved`, of the own rows.

    With a `key_axis`, what was `retrieved` with these statistics is needed too, of the own rows;
    the data are gathered again, and for layernorm P V numbers are summed over devices. Without a
    `key_axis` it saves kernels that work in slabs a read of the residual.

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
    if key_axis is None:  # else its means are those of all slices
        given = given._replace(retrieved=retrieved)
    g = calls.backward(call, given, read, rebuild=True)
    if again is None:
        return g
    return g._replace(retrieved=sharded.scatter_sum(g.retrieved, key_axis))
