"""Key-vector ops: write outer products into a residual matrix, normalise it, read it with keys.

Mak and Flanigan (2025), "Residual Matrix Transformers", equations 12, 13 and 18 to 27. Between two
sublayers the residual matrix is written by the one and read by the next; `store_norm_retrieve` is
that whole span, so that an implementation can touch the big state once in and once out.

Implementations: "xla" (plain JAX, anywhere), "mosaic_tpu" (TPU kernels), "triton" (GPU kernels) and
"pallas" (the kernels of whatever platform the program is lowered for, plain JAX on others). None is
"xla", but the TPU kernels on a TPU; GPU kernels have to be asked for until they are measured.

`store_norm_retrieve`, `store` and `norm_retrieve` have gradients of every array in reverse mode:
jax.grad, jax.vjp, jax.jacrev. These are differentiated again only with "xla", and nothing is in
forward mode first (jax.jvp, jax.jacfwd): a TypeError says so. The others have no gradient.

With a `key_axis` an op is what one device does in `jax.shard_map(.., check_vma=False)`, K being
divided over that mesh axis of n devices. The residual is then that of the B = n b rows of all the
axis' devices and of the own slice of K: [B, N, K / n, V]; keys and gain are own slices; data and
retrieved vectors, and their cotangents, are of the own b rows: [b, N, .., V]. Gradients of keys and
gain are complete for the own slice and these rows. A site costs an all-gather of the data, a
reduce-scatter of what is retrieved and an all-gather of two float32 a token; its backward pass an
all-gather of the cotangents, a reduce-scatter, and an all-gather as small. See `sharded`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, DTypeLike, Float, Int, Shaped

from pallas_kernels.arguments import (
    Norm,
    Slot,
    check_array,
    check_epsilon,
    check_fraction_bits,
    check_norm,
    taken,
)
from pallas_kernels.key_vector import mosaic_tpu, mosaic_tpu_decode, sharded, triton_gpu, xla
from pallas_kernels.key_vector.interface import (
    FRACTION_BITS,
    Again,
    Backward,
    Gradients,
    Site,
    Statistics,
    Write,
)
from pallas_kernels.key_vector.xla import to_fixed_point
from pallas_kernels.platform import (
    Implementation,
    Implementations,
    UnsupportedImplementation,
    reverse_mode,
)

__all__ = [
    "FRACTION_BITS",
    "Again",
    "Gradients",
    "Statistics",
    "UnsupportedImplementation",
    "Write",
    "norm_retrieve",
    "norm_retrieve_again",
    "store",
    "store_backward",
    "store_forward",
    "store_norm_retrieve",
    "store_norm_retrieve_at",
    "store_norm_retrieve_with_statistics",
    "to_fixed_point",
    "undo",
]


@reverse_mode
def store_norm_retrieve(
    residual: Shaped[Array, "*tokens K V"],
    store_keys: Float[Array, "R K"],
    data: Float[Array, "*own_tokens R V"],
    gain: Float[Array, "K V"],
    read_keys: Float[Array, "P K"],
    *,
    norm: Norm = "layernorm",
    epsilon: int | float = 1e-6,
    fraction_bits: int = FRACTION_BITS,
    key_axis: str | None = None,
    implementation: Implementation | None = None,
) -> tuple[Shaped[Array, "*tokens K V"], Float[Array, "*own_tokens P V"]]:
    """`X' = X + sum_r w_r (x) y_r`, and `z_p = r_p . (gain * norm(X'))`: one site of an RMT.

    Args:
      residual: X, one `K x V` matrix a token, any leading token axes; any float dtype, or int16
        fixed point, whose writes `undo` takes back exactly. A token reads NaN if its int16 residual
        leaves the range, or spreads over less than two steps.
      store_keys: w, the key vectors of the R data vectors written.
      data: y, the R data vectors of each token.
      gain: the norm's gain; the norm runs over all `K * V` entries of a token together.
      read_keys: r, the key vectors of the P data vectors retrieved.
      norm: "layernorm" subtracts the mean first, "rmsnorm" does not.
      epsilon: added to the variance (layernorm) or mean square (rmsnorm); 0 or above.
      fraction_bits: of an int16 residual: steps of `2^-fraction_bits`, up to 2^15 of them either
        way; 1/512 and 64 for the default of 9. The same for all calls on a residual.
      key_axis: the mesh axis over which K is divided, if any; there are exactly two token axes
        then, and data and z are of the own rows (see the module's docstring).
      implementation: None picks what is best on the platform that the program is lowered for.

    Returns:
      `X'` in the residual's dtype, and z in the data's dtype. Statistics and sums are at least
      float32; z is read from X' as rounded to the residual's dtype.

    Raises:
      UnsupportedImplementation: a named implementation cannot serve this call, or an int16
        residual is differentiated: JAX has no gradients of integers (`undo` gives them).
      ValueError: shapes or dtypes do not fit, the norm is unknown, or epsilon is negative.
      TypeError: it is differentiated in forward mode, or twice by what may be a kernel.
      NameError: `key_axis` is no axis of a `jax.shard_map` around.
    """
    site = Site(residual, store_keys, data, gain, read_keys)
    call = _checked(_Call(norm, epsilon, implementation, None, key_axis, fraction_bits), site)
    site = site._replace(residual=_flat(residual), data=_flat(data))
    stored, retrieved = _store_norm_retrieve(call, site)
    lead = data.shape[:-2]
    return stored.reshape(residual.shape), retrieved.reshape(*lead, *retrieved.shape[2:])


def store_norm_retrieve_at(
    layer: int | Int[Array, ""],
    residual: Float[Array, "*tokens K V"],
    store_keys: Float[Array, "L R K"],
    data: Float[Array, "*tokens R V"],
    gain: Float[Array, "L K V"],
    read_keys: Float[Array, "L P K"],
    *,
    norm: Norm = "layernorm",
    epsilon: int | float = 1e-6,
    size_major: tuple[bool, bool] = (False, False),
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "*tokens K V"], Float[Array, "*tokens P V"]]:
    """`store_norm_retrieve` of a few tokens, as in decoding, at a layer of stacked keys and gains.

    The TPU's kernel takes the layer's where they lie, and its time grows with each token; from 128
    in a sequence on the other op's is faster. With "xla" alone it is differentiable.

    Args:
      layer: which of the L.
      residual, data, norm, epsilon: as of `store_norm_retrieve`; no int16, no `key_axis`.
      store_keys, gain, read_keys: of all layers.
      size_major: whether data, and what is retrieved, lie in memory as [V, R] and [V, P], as in a
        feed-forward network's vectors: the outcome is the same.
      implementation: as there; "triton" is none of this op.

    Raises:
      UnsupportedImplementation: a named implementation cannot serve this call.
      ValueError: shapes or dtypes do not fit, the norm is unknown, or epsilon is negative.
      TypeError: what may be a kernel is differentiated.
    """
    check_array("residual", residual, "... K V")
    for name, x, axes in (
        ("store_keys", store_keys, "L R K"),
        ("gain", gain, "L K V"),
        ("read_keys", read_keys, "L P K"),
    ):
        check_array(name, x, axes)
        if x.shape[0] != gain.shape[0]:
            raise ValueError(f"shapes do not fit: {name} [{axes}] is {x.shape}, gain {gain.shape}")
    one = Site(residual, store_keys[0], data, gain[0], read_keys[0])
    _checked(_Call(norm, epsilon, implementation), one)
    flat = lambda x: x.reshape(-1, *x.shape[-2:])
    site = Site(flat(residual), store_keys, flat(data), gain, read_keys)
    options = {"norm": norm, "epsilon": epsilon, "size_major": size_major}
    given = (implementation, "at_layer", site, jnp.asarray(layer, jnp.int32))
    stored, retrieved = _AT_LAYER.run(*given, **options)
    return stored.reshape(residual.shape), retrieved.reshape(*data.shape[:-2], *retrieved.shape[1:])


@reverse_mode
def store(
    residual: Shaped[Array, "*tokens K V"],
    store_keys: Float[Array, "R K"],
    data: Float[Array, "*own_tokens R V"],
    *,
    fraction_bits: int = FRACTION_BITS,
    key_axis: str | None = None,
    implementation: Implementation | None = None,
) -> Shaped[Array, "*tokens K V"]:
    """The writing half of `store_norm_retrieve`: `X + sum_r w_r (x) y_r` (equations 18 to 23)."""
    call = _Call("layernorm", 0.0, implementation, None, key_axis, fraction_bits)
    call = _checked(call, Site(residual, store_keys, data), reads=False)
    return _store(call, Site(_flat(residual), store_keys, _flat(data))).reshape(residual.shape)


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
    call = _Call("layernorm", 0.0, implementation, None, key_axis)
    call = _checked(call, Site(residual, store_keys, data), reads=False)
    site = _of_all_rows(Site(residual, store_keys, data), call.key_axis)
    given = () if empty is False else (None, None, jnp.asarray(empty))
    return _run(call, "forward", site, *given, in_place=in_place).residual


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
    call = _Call("layernorm", 0.0, implementation, None, key_axis)
    call = _checked(call, Site(d_stored, store_keys, data), reads=False)
    site = _of_all_rows(Site(None, store_keys, data), call.key_axis)
    g = _run(call, "backward", Backward(site, None, d_stored, None))
    return g.store_keys.astype(store_keys.dtype), sharded.scatter_sum(g.data, call.key_axis)


@reverse_mode
def norm_retrieve(
    residual: Shaped[Array, "*tokens K V"],
    gain: Float[Array, "K V"],
    read_keys: Float[Array, "P K"],
    *,
    norm: Norm = "layernorm",
    epsilon: int | float = 1e-6,
    dtype: DTypeLike | None = None,
    fraction_bits: int = FRACTION_BITS,
    key_axis: str | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "*own_tokens P V"]:
    """The reading half: `r_p . (gain * norm(X))` (equations 22, 25, 27), in `dtype` or X's."""
    site = Site(residual, gain=gain, read_keys=read_keys)
    call = _checked(_Call(norm, epsilon, implementation, None, key_axis, fraction_bits), site)
    call = call._replace(dtype=jnp.dtype(dtype or residual.dtype))
    retrieved = _norm_retrieve(call, site._replace(residual=_flat(residual)))[0]
    if call.key_axis is not None:
        return retrieved
    return retrieved.reshape(*residual.shape[:-2], *retrieved.shape[2:])


def store_norm_retrieve_with_statistics(
    residual: Shaped[Array, "B N K V"],
    store_keys: Float[Array, "R K"] | Slot,
    data: Float[Array, "b N R V"] | Slot,
    gain: Float[Array, "K V"] | Slot,
    read_keys: Float[Array, "P K"] | Slot,
    before: Write | None = None,
    *,
    norm: Norm,
    epsilon: int | float,
    fraction_bits: int = FRACTION_BITS,
    key_axis: str | None = None,
    keep: bool = True,
    implementation: Implementation | None = None,
) -> tuple[Shaped[Array, "B N K V"], Float[Array, "b N P V"], Statistics]:
    """`store_norm_retrieve`, and the statistics that `undo` takes: of all B rows.

    Two sites may write a large residual in one pass. The first does not `keep` it, and gives it as
    it was given; the second is told of that write `before` its own, and stores both.
    """
    site = Site(residual, store_keys, data, gain, read_keys)
    call = _checked(_Call(norm, epsilon, implementation, None, key_axis, fraction_bits), site)
    before = _checked_write(call, residual, before)
    given = _of_all_rows(site, call.key_axis), before
    stored, *read = _forward(call, True, *given, keep=keep)
    return stored if keep else residual, *read[:2]


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
    call = _checked(_Call(norm, epsilon, implementation, dtype, key_axis, fraction_bits), site)
    if call.key_axis is not None:
        return _norm_retrieve(call, taken(site))[0]
    out = _run(call, "forward", site, statistics, dtype=call.dtype, **_read_options(call))
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
    since: Write | None = None,
    keep: bool = True,
    implementation: Implementation | None = None,
) -> Gradients:
    """The cotangents of `store_norm_retrieve` and, in the same pass, the residual before it.

    `residual` is the residual *after* the store; `Gradients.rebuilt` is `X = X' - w^T y`, exact for
    an int16 residual, so that a backward pass needs no stored residuals. That is then read `again`,
    with the statistics that were taken of it: `Gradients.retrieved`, of the own rows.

    Of two sites that wrote in one pass, the second does not `keep` what is rebuilt; the first is
    given the residual that the second was, and with it what was stored `since` its own store.

    With a `key_axis` or `since`, what was `retrieved` with these statistics is needed too, of the
    own rows; with a `key_axis` the data are gathered again, and for layernorm P V numbers are
    summed over devices.

    Raises:
      ValueError: the shapes do not fit, the norm is unknown, or `retrieved` is missing.
    """
    site = Site(residual, store_keys, data, gain, read_keys)
    call = _checked(_Call(norm, 0.0, implementation, None, key_axis, fraction_bits), site)
    since = _checked_write(call, residual, since)
    if retrieved is None and (since is not None or call.key_axis is not None):
        raise ValueError("with a key_axis, or with since, undo needs what was retrieved")
    if again is not None:
        _checked(call, Site(residual, gain=again.gain, read_keys=again.read_keys))
    read, key_axis = None, call.key_axis
    if key_axis is not None:
        own = sharded.key_sums(*taken(site[3:]))
        sums = jax.lax.psum(own, key_axis) if norm == "layernorm" else None
        read = sharded.Read(retrieved, sums)
    site = _of_all_rows(site, key_axis)
    given = Backward(site, statistics, d_residual, d_retrieved, None, again, since)
    if key_axis is None:  # else its means are those of all slices
        given = given._replace(retrieved=retrieved)
    g = _backward(call, given, read, rebuild=True, keep=keep)
    if again is None:
        return g
    return g._replace(retrieved=sharded.scatter_sum(g.retrieved, key_axis))


def _of_all_rows(site: Site | Write, key_axis: str | None) -> Site | Write:
    """With the data of all devices along the axis, if there is one."""
    if key_axis is None:
        return site
    site = taken(site)
    return site._replace(data=sharded.gather(site.data, key_axis))


def _checked_write(call: "_Call", residual, write: Write | None) -> Write | None:
    """Of all rows."""
    if write is None:
        return None
    _check_store(residual, *write, call.key_axis)
    return _of_all_rows(write, call.key_axis)


class _Call(NamedTuple):
    """What a call is beside its arrays."""

    norm: Norm
    epsilon: int | float
    implementation: str | None
    dtype: jnp.dtype | None = None
    key_axis: str | None = None
    fraction_bits: int = FRACTION_BITS


# The ops over two token axes, with their gradients -------------------------------------------

# `data` inside is that of all rows, the retrieved vectors are those of the own; without a key axis
# these are the same, and `read` is None.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _store_norm_retrieve(call, site):
    site = site._replace(data=sharded.gather(site.data, call.key_axis))
    return _forward(call, True, site)[:2]


def _store_norm_retrieve_forward(call, site):
    _refuse_integers(site.residual)
    # Not in place: where this is differentiated, the residual before is often needed as well.
    site = site._replace(data=sharded.gather(site.data, call.key_axis))
    stored, retrieved, statistics, read = _forward(call, False, site)
    return (stored, retrieved), (site._replace(residual=stored), statistics, read)


def _store_norm_retrieve_backward(call, saved, cotangents):
    site, statistics, read = saved
    g = _backward(call, Backward(site, statistics, *cotangents), read)
    return (_of_parameters(site, g.residual, g.data, g),)


def _of_parameters(site, d_residual, d_data, g):
    """The cotangents of a site, those of its keys and its gain in their dtypes."""
    own = lambda d, x: None if x is None else d.astype(x.dtype)
    return Site(
        d_residual,
        own(g.store_keys, site.store_keys),
        d_data,
        own(g.gain, site.gain),
        own(g.read_keys, site.read_keys),
    )


_store_norm_retrieve.defvjp(_store_norm_retrieve_forward, _store_norm_retrieve_backward)


def _forward(call, in_place, site, before=None, *, keep=True):
    options = {"in_place": in_place, "keep": keep} | _read_options(call)
    out = _run(call, "forward", site, None, before, **options)
    return out.residual, *_of_all_slices(call, site, out)


def _of_all_slices(call, site, out):
    """What is retrieved and the statistics of all of K, and what `_backward` takes as `read`."""
    if call.key_axis is None:
        return out.retrieved, out.statistics, None
    args = (out.retrieved, out.statistics, site.gain, site.read_keys, call.key_axis)
    integer = site.residual.dtype == jnp.int16
    least = xla.least_variance(call.fraction_bits) + call.epsilon if integer else None
    read, statistics = sharded.all_slices(*args, norm=call.norm, least=least)
    return read.retrieved, statistics, read


def _backward(call, given, read, *, rebuild=False, keep=True):
    of_all = _to_all_slices(call, given.site.residual, read, given.d_retrieved)
    given = given._replace(d_retrieved=of_all[0], means=of_all[1])
    options = {"rebuild": rebuild, "keep": keep, "fraction_bits": call.fraction_bits}
    g = _run(call, "backward", given, norm=call.norm, **options)
    return g._replace(data=sharded.scatter_sum(g.data, call.key_axis))


def _to_all_slices(call, residual, read, d_retrieved):
    """The cotangents of all rows, and the means for them if they are not those of the slice."""
    if read is None:
        return d_retrieved, None
    K = residual.shape[2] * sharded.size(call.key_axis)
    means = sharded.means(d_retrieved, read, K, call.key_axis)
    return sharded.gather(d_retrieved, call.key_axis), means


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _store(call, site):
    site = site._replace(data=sharded.gather(site.data, call.key_axis))
    return _store_all(call, True, site)


def _store_all(call, in_place, site):
    options = {"in_place": in_place, "fraction_bits": call.fraction_bits}
    return _run(call, "forward", site, **options).residual


def _store_forward(call, site):
    _refuse_integers(site.residual)
    site = site._replace(data=sharded.gather(site.data, call.key_axis))
    # Not in place, as above.
    return _store_all(call, False, site), site._replace(residual=None)


def _store_backward(call, site, d_stored):
    g = _run(call, "backward", Backward(site, None, d_stored, None))
    return (_of_parameters(site, d_stored, sharded.scatter_sum(g.data, call.key_axis), g),)


_store.defvjp(_store_forward, _store_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm_retrieve(call, site):
    return _read(call, site)[:2]


def _read_options(call):
    return {
        "norm": call.norm,
        "epsilon": call.epsilon,
        "scale": call.key_axis is None,
        "fraction_bits": call.fraction_bits,
    }


def _read(call, site):
    out = _run(call, "forward", site, dtype=call.dtype, **_read_options(call))
    return _of_all_slices(call, site, out)


def _norm_retrieve_forward(call, site):
    _refuse_integers(site.residual)
    retrieved, statistics, read = _read(call, site)
    return (retrieved, statistics), (site, statistics, read)


def _norm_retrieve_backward(call, saved, cotangents):
    site, statistics, read = saved
    d_retrieved, means = _to_all_slices(call, site.residual, read, cotangents[0])
    given = Backward(site, statistics, None, d_retrieved, means)
    g = _run(call, "backward", given, norm=call.norm)
    return (_of_parameters(site, g.residual.astype(site.residual.dtype), None, g),)


_norm_retrieve.defvjp(_norm_retrieve_forward, _norm_retrieve_backward)

# Which implementation ------------------------------------------------------------------------

# A kernel becomes the default where it is shown to be faster: see docs/benchmarks/kernels.md.
_IMPLEMENTATIONS = Implementations(xla, {"mosaic_tpu": mosaic_tpu, "triton": triton_gpu}, ("tpu",))
_AT_LAYER = Implementations(xla, {"mosaic_tpu": mosaic_tpu_decode}, ("tpu",))


def _run(call: _Call, op: str, *operands, **options):
    return _IMPLEMENTATIONS.run(call.implementation, op, *operands, **options)


def _refuse_integers(residual):
    if not jnp.issubdtype(residual.dtype, jnp.floating):
        raise UnsupportedImplementation(
            f"a residual of {residual.dtype} cannot be differentiated by jax.grad, which has no "
            "gradients of integers; use `undo`, or remat='reversible' in a model"
        )


def _flat(x: Array) -> Array:
    """Exactly two token axes."""
    *lead, a, b = x.shape
    if len(lead) < 2:
        return x.reshape(1, *(lead or (1,)), a, b)
    return x.reshape(int(np.prod(lead[:-1])), lead[-1], a, b)


def _checked(call: _Call, site: Site, *, reads: bool = True) -> _Call:
    """With a key axis of None if it divides nothing."""
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
                f"shapes do not fit: residual [..., K, V] is {residual.shape}, gain [K, V] is "
                f"{gain.shape}, read_keys [P, K] is {read_keys.shape}"
            )
    if store_keys is not None or not reads:
        _check_store(residual, store_keys, data, call.key_axis)
    return call


def _check_axis(residual, key_axis) -> str | None:
    n = sharded.size(key_axis)
    if n == 1:
        return None
    if residual.ndim != 4 or residual.shape[0] % n:
        raise ValueError(
            f"shapes do not fit: over key_axis={key_axis!r} of {n} devices, residual [B, N, K, V] "
            f"has the rows of all of them, but is {residual.shape}"
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
            "shapes do not fit: residual [..., K, V] is "
            f"{residual.shape}, store_keys [R, K] is {store_keys.shape}, "
            f"data [..., R, V] is {data.shape}"
        )
