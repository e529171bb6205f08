"""Key-vector ops: write outer products into a residual matrix, normalise it, read it with keys.

Mak and Flanigan (2025), "Residual Matrix Transformers", equations 12, 13 and 18 to 27. Between two
sublayers the first one's output is written to the residual matrix and the second one's input is
read from it. `store_norm_retrieve` computes both at once, so that an implementation can read and
write the large residual only once.

Implementations: "xla" (plain JAX, on any platform), "mosaic_tpu" (TPU kernels), "triton" (GPU
kernels) and "pallas" (the kernels of the platform that the program is lowered for, plain JAX on
other platforms). The default, None, means the TPU kernels on a TPU and "xla" elsewhere; GPU kernels
have to be requested until they are measured.

`store_norm_retrieve`, `store` and `norm_retrieve` have gradients of every array in reverse mode:
jax.grad, jax.vjp, jax.jacrev. The gradients can be differentiated again only with "xla". Forward
mode first (jax.jvp, jax.jacfwd) raises a TypeError that says so. The other ops have no gradient;
the ops for a backward pass that a caller writes itself are in `rebuilding`.

With a `key_axis` an op is the work of one device in `jax.shard_map(.., check_vma=False)`, where K
is divided over that mesh axis of n devices. The residual then holds the B = n b rows of all devices
of the axis and the device's own slice of K: [B, N, K / n, V]. Keys and gain are the device's own
slices. Data, retrieved vectors and their cotangents belong to the device's own b rows:
[b, N, .., V]. Gradients of keys and gain are complete for the own slice and these rows. A site
costs an all-gather of the data, a reduce-scatter of the retrieved vectors and an all-gather of two
float32 per token. Its backward pass costs an all-gather of the cotangents, a reduce-scatter and an
equally small all-gather. See `sharded`.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int, Shaped

from pallas_kernels.arguments import Norm, check_array
from pallas_kernels.key_vector import calls, mosaic_tpu_decode, sharded, xla
from pallas_kernels.key_vector.calls import Call
from pallas_kernels.key_vector.interface import (
    FRACTION_BITS,
    Again,
    Backward,
    Gradients,
    Site,
    Statistics,
)
from pallas_kernels.key_vector.rebuilding import (
    norm_retrieve_again,
    store_backward,
    store_forward,
    store_norm_retrieve_with_statistics,
    undo,
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

_AT_LAYER = Implementations(xla, {"mosaic_tpu": mosaic_tpu_decode}, ("tpu",), name="key_vector_at")


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
    """Compute `X' = X + sum_r w_r (x) y_r` and `z_p = r_p . (gain * norm(X'))`: a site of an RMT.

    Args:
      residual: X, one `K x V` matrix per token, with any leading token axes; any float dtype, or
        int16 fixed point, whose writes `undo` reverts exactly. A token reads NaN if its int16
        residual leaves the range or spreads over less than two steps.
      store_keys: w, the key vectors of the R data vectors that are written.
      data: y, the R data vectors of each token.
      gain: the norm's gain; the norm runs over all `K * V` entries of a token together.
      read_keys: r, the key vectors of the P data vectors that are retrieved.
      norm: "layernorm" subtracts the mean first, "rmsnorm" does not.
      epsilon: the number added to the variance (layernorm) or mean square (rmsnorm); at least 0.
      fraction_bits: the fraction bits of an int16 residual. Its step is `2^-fraction_bits` and its
        range 2^15 steps to either side: 1/512 and 64 for the default of 9. All calls on a residual
        must use the same number.
      key_axis: the mesh axis over which K is divided, or None. With an axis there are exactly two
        token axes, and data and z belong to the device's own rows (see the module's docstring).
      implementation: None picks the best one for the platform that the program is lowered for.

    Returns:
      `X'` in the residual's dtype, and z in the data's dtype. Statistics and sums are at least
      float32; z is read from X' as rounded to the residual's dtype.

    Raises:
      UnsupportedImplementation: a named implementation cannot serve this call, or an int16 residual
        is differentiated: JAX has no gradients of integers (`undo` gives them).
      ValueError: shapes or dtypes do not fit, the norm is unknown, or epsilon is negative.
      TypeError: the op is differentiated in forward mode, or twice where it may be a kernel.
      NameError: `key_axis` is not an axis of an enclosing `jax.shard_map`.
    """
    site = Site(residual, store_keys, data, gain, read_keys)
    call = calls.checked(Call(norm, epsilon, implementation, None, key_axis, fraction_bits), site)
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
    """Compute `store_norm_retrieve` for a few tokens at one layer of stacked keys and gains.

    The op serves decoding. The TPU's kernel reads the layer's keys and gain where they lie in the
    stacks. Its time grows with each token: from 128 tokens in a sequence on, `store_norm_retrieve`
    is faster. The op is differentiable only with "xla".

    Args:
      layer: the index of the layer, below L.
      residual, data, norm, epsilon: as in `store_norm_retrieve`, but without int16 residuals;
        there is no `key_axis`.
      store_keys, gain, read_keys: the parameters of all layers.
      size_major: whether data and the retrieved vectors lie in memory as [V, R] and [V, P], like
        the vectors of a feed-forward network. It does not change the result.
      implementation: as in `store_norm_retrieve`, but this op has no "triton".

    Raises:
      UnsupportedImplementation: a named implementation cannot serve this call.
      ValueError: shapes or dtypes do not fit, the norm is unknown, or epsilon is negative.
      TypeError: the op is differentiated where it may be a kernel.
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
    calls.checked(Call(norm, epsilon, implementation), one)
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
    """Compute the write of `store_norm_retrieve`: `X + sum_r w_r (x) y_r` (equations 18 to 23)."""
    call = Call("layernorm", 0.0, implementation, None, key_axis, fraction_bits)
    call = calls.checked(call, Site(residual, store_keys, data), reads=False)
    return _store(call, Site(_flat(residual), store_keys, _flat(data))).reshape(residual.shape)


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
    """Compute the read: `r_p . (gain * norm(X))` (equations 22, 25, 27), in `dtype` or X's."""
    site = Site(residual, gain=gain, read_keys=read_keys)
    call = calls.checked(Call(norm, epsilon, implementation, None, key_axis, fraction_bits), site)
    call = call._replace(dtype=jnp.dtype(dtype or residual.dtype))
    retrieved = _norm_retrieve(call, site._replace(residual=_flat(residual)))[0]
    if call.key_axis is not None:
        return retrieved
    return retrieved.reshape(*residual.shape[:-2], *retrieved.shape[2:])


# The ops over two token axes, with their gradients -------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _store_norm_retrieve(call, site):
    site = site._replace(data=sharded.gather(site.data, call.key_axis))
    return calls.forward(call, True, site)[:2]


def _store_norm_retrieve_forward(call, site):
    _refuse_integers(site.residual)
    # The write is not in place: a differentiated caller often needs the old residual as well.
    site = site._replace(data=sharded.gather(site.data, call.key_axis))
    stored, retrieved, statistics, read = calls.forward(call, False, site)
    return (stored, retrieved), (site._replace(residual=stored), statistics, read)


def _store_norm_retrieve_backward(call, saved, cotangents):
    site, statistics, read = saved
    g = calls.backward(call, Backward(site, statistics, *cotangents), read)
    return (_of_parameters(site, g.residual, g.data, g),)


def _of_parameters(site, d_residual, d_data, g):
    """Return the cotangents of a site, with keys and gain in their parameters' dtypes."""
    own = lambda d, x: None if x is None else d.astype(x.dtype)
    return Site(
        d_residual,
        own(g.store_keys, site.store_keys),
        d_data,
        own(g.gain, site.gain),
        own(g.read_keys, site.read_keys),
    )


_store_norm_retrieve.defvjp(_store_norm_retrieve_forward, _store_norm_retrieve_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _store(call, site):
    site = site._replace(data=sharded.gather(site.data, call.key_axis))
    return _store_all(call, True, site)


def _store_all(call, in_place, site):
    options = {"in_place": in_place, "fraction_bits": call.fraction_bits}
    return calls.run(call, "forward", site, **options).residual


def _store_forward(call, site):
    _refuse_integers(site.residual)
    site = site._replace(data=sharded.gather(site.data, call.key_axis))
    # The write is not in place, for the same reason as in `_store_norm_retrieve_forward`.
    return _store_all(call, False, site), site._replace(residual=None)


def _store_backward(call, site, d_stored):
    g = calls.run(call, "backward", Backward(site, None, d_stored, None))
    return (_of_parameters(site, d_stored, sharded.scatter_sum(g.data, call.key_axis), g),)


_store.defvjp(_store_forward, _store_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm_retrieve(call, site):
    return calls.read(call, site)[:2]


def _norm_retrieve_forward(call, site):
    _refuse_integers(site.residual)
    retrieved, statistics, read = calls.read(call, site)
    return (retrieved, statistics), (site, statistics, read)


def _norm_retrieve_backward(call, saved, cotangents):
    site, statistics, read = saved
    d_retrieved, means = calls.to_all_slices(call, site.residual, read, cotangents[0])
    given = Backward(site, statistics, None, d_retrieved, means)
    g = calls.run(call, "backward", given, norm=call.norm)
    return (_of_parameters(site, g.residual.astype(site.residual.dtype), None, g),)


_norm_retrieve.defvjp(_norm_retrieve_forward, _norm_retrieve_backward)


def _refuse_integers(residual):
    if not jnp.issubdtype(residual.dtype, jnp.floating):
        raise UnsupportedImplementation(
            f"a residual of {residual.dtype} cannot be differentiated by jax.grad, which has no "
            "gradients of integers; use `undo`, or remat='reversible' in a model"
        )


def _flat(x: Array) -> Array:
    """Reshape x to exactly two token axes."""
    *lead, a, b = x.shape
    if len(lead) < 2:
        return x.reshape(1, *(lead or (1,)), a, b)
    return x.reshape(math.prod(lead[:-1]), lead[-1], a, b)
