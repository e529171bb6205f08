"""Key-vector ops: write vectors to a residual matrix under keys, normalise it and read it by key.

Mak and Flanigan (2025), "Residual Matrix Transformers" (RMT), equations 12, 13 and 18 to 27. Each
token has a residual matrix. A *site* is the place between two sublayers. There, the output vectors
of the first sublayer are written ("stored") to the matrix, and the input vectors of the second are
read ("retrieved") from it. `store_norm_retrieve` computes a whole site, so that the large residual
is read and written only once.

Implementations: "xla" is plain JAX and runs on every platform. "mosaic_tpu" has TPU kernels,
"triton" has GPU kernels, and "mosaic_gpu" has kernels for GPUs of compute capability 9.0. "pallas"
uses "mosaic_tpu" on a TPU, "triton" on a GPU, and "xla" elsewhere. The default, None, uses the TPU
kernels on a TPU and "xla" elsewhere.

`store_norm_retrieve`, `store` and `norm_retrieve` support reverse-mode differentiation (jax.grad,
jax.vjp, jax.jacrev) with respect to all array arguments. Second derivatives are supported only by
"xla". Forward mode (jax.jvp, jax.jacfwd) raises a TypeError. The ops in `rebuilding` have no
gradients. A caller uses them to write its own backward pass.

Sharded keys: if `key_axis` names a mesh axis of n devices, K is sharded over that axis, and an op
runs on each device within `jax.shard_map(.., check_vma=False)`. Each device has b batch rows of its
own; together, the devices have B = n b rows. The data, the retrieved vectors and their cotangents
are [b, N, .., V], for the device's own rows. Keys and gain are the device's slices along K. The
residual is [B, N, K / n, V]: the rows of all devices, and the device's slice of K. The gradients of
keys and gain cover this slice and all B rows. A site communicates an all-gather of the data, a
reduce-scatter of the retrieved vectors, and an all-gather of two float32 numbers per token. Its
backward pass communicates an all-gather of the cotangents, a reduce-scatter of the data's
cotangents, and an all-gather of at most two float32 numbers per token. See `sharded`.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int, Shaped

from pallas_kernels.arguments import Norm, check_array, check_stack
from pallas_kernels.key_vector import calls, mosaic_tpu_decode, sharded, xla
from pallas_kernels.key_vector.calls import KeyVectorCall
from pallas_kernels.key_vector.interface import (
    FRACTION_BITS,
    Gradients,
    Reread,
    SiteBackward,
    SiteOperands,
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
    "Reread",
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
    data: Float[Array, "*local_tokens R V"],
    gain: Float[Array, "K V"],
    read_keys: Float[Array, "P K"],
    *,
    norm: Norm = "layernorm",
    epsilon: int | float = 1e-6,
    fraction_bits: int = FRACTION_BITS,
    key_axis: str | None = None,
    implementation: Implementation | None = None,
) -> tuple[Shaped[Array, "*tokens K V"], Float[Array, "*local_tokens P V"]]:
    """Compute one site of an RMT: write vectors to the residual, normalise it and read vectors.

    A site lies between two sublayers of an RMT (Residual Matrix Transformer). It stores the output
    vectors of the first and retrieves the input vectors of the second. Let X be the residual, w the
    store keys, y the data and r the read keys. The result for a token is

        X' = X + sum_r w_r (x) y_r          z_p = r_p . (gain * norm(X'))

    where (x) is the outer product.

    Args:
      residual: X, one `K x V` matrix per token, with any leading token axes. The dtype is a float
        dtype, or int16 for fixed point. `undo` recovers an int16 X exactly. A token's z is NaN if
        its int16 residual overflows. It is also NaN if the standard deviation (for rmsnorm, the
        root mean square) of the residual's entries is less than two fixed-point steps.
      store_keys: w, the keys under which the R data vectors are written.
      data: y, the R data vectors per token.
      gain: the norm's gain. The norm is computed over all `K * V` entries of a token together.
      read_keys: r, the keys with which P vectors are retrieved.
      norm: "layernorm" subtracts the mean first; "rmsnorm" does not.
      epsilon: the number added to the variance (layernorm) or mean square (rmsnorm); at least 0.
      fraction_bits: the number of fraction bits of an int16 residual. The fixed-point step is
        `2^-fraction_bits`, and values are at most 2^15 steps from 0. By default, the step is 1/512,
        and values are from -64 to 64. All calls on one residual must use the same number.
      key_axis: the mesh axis over which K is sharded, or None (see the module's docstring). With an
        axis, there must be exactly two token axes.
      implementation: None selects the fastest one for the platform that the program is lowered for.

    Returns:
      `X'` in the residual's dtype and z in the data's dtype. Statistics and sums are computed in
      at least float32. z is read from X' after rounding to the residual's dtype.

    Raises:
      UnsupportedImplementation: the requested implementation does not support this call, or the op
        is differentiated with an int16 residual. JAX has no gradients with respect to integers;
        use `undo` instead.
      ValueError: shapes or dtypes do not fit, the norm is unknown, or epsilon is negative.
      TypeError: the op is differentiated in forward mode, or differentiated twice when a kernel may
        compute it.
      NameError: `key_axis` is not an axis of an enclosing `jax.shard_map`.
    """
    site = SiteOperands(residual, store_keys, data, gain, read_keys)
    call = calls.check(
        KeyVectorCall(norm, epsilon, implementation, None, key_axis, fraction_bits), site
    )
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
    """Compute `store_norm_retrieve` for a few tokens, with one layer of stacked parameters.

    This op is for decoding. The TPU kernel reads the layer's keys and gain directly from the stacks
    of all layers. Its run time grows with the number of tokens, so `store_norm_retrieve` is faster
    for sequences of 128 tokens or more. The op is differentiable only with "xla".

    Args:
      layer: the index of the layer, from 0 to L - 1.
      residual, data, norm, epsilon: as in `store_norm_retrieve`, but int16 residuals are not
        supported.
      store_keys, gain, read_keys: the parameters of all L layers, stacked.
      size_major: two booleans: whether the memory layout of the data is [V, R], and whether that of
        the retrieved vectors is [V, P], as for a feed-forward network. They do not change the
        result.
      implementation: as in `store_norm_retrieve`, but this op has no GPU kernels.

    Raises:
      UnsupportedImplementation: the requested implementation does not support this call.
      ValueError: shapes or dtypes do not fit, the norm is unknown, or epsilon is negative.
      TypeError: the op is differentiated when a kernel may compute it.
    """
    check_array("residual", residual, "... K V")
    for name, x, axes in (
        ("store_keys", store_keys, "L R K"),
        ("gain", gain, "L K V"),
        ("read_keys", read_keys, "L P K"),
    ):
        check_array(name, x, axes)
        check_stack(name, x, axes)
        if x.shape[0] != gain.shape[0]:
            raise ValueError(
                f"shapes do not fit: {name} [{axes}] has shape {x.shape}, but gain [L K V] has "
                f"shape {gain.shape}"
            )
    one = SiteOperands(residual, store_keys[0], data, gain[0], read_keys[0])
    calls.check(KeyVectorCall(norm, epsilon, implementation), one)
    flat = lambda x: x.reshape(-1, *x.shape[-2:])
    site = SiteOperands(flat(residual), store_keys, flat(data), gain, read_keys)
    options = {"norm": norm, "epsilon": epsilon, "size_major": size_major}
    run = functools.partial(_AT_LAYER.run, implementation, "at_layer")
    stored, retrieved = run(site, jnp.asarray(layer, jnp.int32), **options)
    return stored.reshape(residual.shape), retrieved.reshape(*data.shape[:-2], *retrieved.shape[1:])


@reverse_mode
def store(
    residual: Shaped[Array, "*tokens K V"],
    store_keys: Float[Array, "R K"],
    data: Float[Array, "*local_tokens R V"],
    *,
    fraction_bits: int = FRACTION_BITS,
    key_axis: str | None = None,
    implementation: Implementation | None = None,
) -> Shaped[Array, "*tokens K V"]:
    """Compute only the write of a site: `X + sum_r w_r (x) y_r` (equations 18 to 23).

    X is the residual, w the store keys and y the data, as in `store_norm_retrieve`.
    """
    call = KeyVectorCall("layernorm", 0.0, implementation, None, key_axis, fraction_bits)
    call = calls.check(call, SiteOperands(residual, store_keys, data), reads=False)
    return _store(call, SiteOperands(_flat(residual), store_keys, _flat(data))).reshape(
        residual.shape
    )


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
) -> Float[Array, "*local_tokens P V"]:
    """Compute only the read of a site: `r_p . (gain * norm(X))` (equations 22, 25, 27).

    X is the residual and r the read keys, as in `store_norm_retrieve`. The result has the dtype
    `dtype`, or that of the residual if `dtype` is None. An int16 residual needs a `dtype`.
    """
    site = SiteOperands(residual, gain=gain, read_keys=read_keys)
    call = calls.check(
        KeyVectorCall(norm, epsilon, implementation, None, key_axis, fraction_bits), site
    )
    call = call._replace(dtype=calls.check_dtype(dtype or residual.dtype))
    retrieved = _norm_retrieve(call, site._replace(residual=_flat(residual)))[0]
    if call.key_axis is not None:
        return retrieved
    return retrieved.reshape(*residual.shape[:-2], *retrieved.shape[2:])


# The ops and their gradients, for arrays with two token axes ----------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _store_norm_retrieve(call, site):
    site = site._replace(data=sharded.gather(site.data, call.key_axis))
    return calls.forward(call, True, site)[:2]


def _store_norm_retrieve_forward(call, site):
    _refuse_integers(site.residual)
    # The residual is not overwritten in place, because differentiated code often needs the old one.
    # XLA would then have to copy it first.
    site = site._replace(data=sharded.gather(site.data, call.key_axis))
    stored, retrieved, statistics, read = calls.forward(call, False, site)
    return (stored, retrieved), (site._replace(residual=stored), statistics, read)


def _store_norm_retrieve_backward(call, saved, cotangents):
    site, statistics, read = saved
    g = calls.backward(call, SiteBackward(site, statistics, *cotangents), read)
    return (_of_parameters(site, g.residual, g.data, g),)


def _of_parameters(site, d_residual, d_data, g):
    """Return the cotangents of `site`, those of parameters in the dtype of the parameter."""
    own = lambda d, x: None if x is None else d.astype(x.dtype)
    return SiteOperands(
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
    # The residual is not overwritten in place, because differentiated code often needs the old one.
    return _store_all(call, False, site), site._replace(residual=None)


def _store_backward(call, site, d_stored):
    g = calls.run(call, "backward", SiteBackward(site, None, d_stored, None))
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
    operands = SiteBackward(site, statistics, None, d_retrieved, means)
    g = calls.run(call, "backward", operands, norm=call.norm)
    return (_of_parameters(site, g.residual.astype(site.residual.dtype), None, g),)


_norm_retrieve.defvjp(_norm_retrieve_forward, _norm_retrieve_backward)


def _refuse_integers(residual):
    if not jnp.issubdtype(residual.dtype, jnp.floating):
        raise UnsupportedImplementation(
            f"the residual has dtype {residual.dtype}, which jax.grad does not support; legal: a "
            "float dtype; for int16 use `undo`, or a reversible remat in a model"
        )


def _flat(x: Array) -> Array:
    """Reshape x to exactly two token axes."""
    *lead, a, b = x.shape
    if len(lead) < 2:
        return x.reshape(1, *(lead or (1,)), a, b)
    return x.reshape(math.prod(lead[:-1]), lead[-1], a, b)
