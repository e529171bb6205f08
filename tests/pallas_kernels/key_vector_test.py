"""The key-vector ops and their portable form against float64 NumPy, and what they refuse."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.key_vector import xla
from tests.closeness import assert_close
from tests.pallas_kernels import plain
from tests.pallas_kernels.key_vector_battery import Battery, Case
from tests.tiers import later

# Largest error allowed relative to the largest value, by dtype of residual and data.
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2, "float64": 1e-14}
SHAPES = {
    "one number": ((), 1, 1, 1, 1),
    "odd": ((7,), 5, 3, 2, 4),
    "two token axes": ((2, 3), 16, 8, 4, 12),
    "no token": ((0,), 4, 4, 2, 2),
}


def numpy_site(X, w, y, gain, r, norm, epsilon):
    """Equations 12 and 13 in float64, one token and one vector at a time."""
    K, V = gain.shape
    X_new = np.empty(X.shape)
    Z = np.empty((*X.shape[:-2], len(r), V))
    for token in np.ndindex(X.shape[:-2]):
        M = np.array(X[token], np.float64)
        for head in range(len(w)):
            M = M + np.outer(w[head], y[token][head])
        X_new[token] = M
        if norm == "layernorm":
            M = M - M.mean()
        M = gain * M / np.sqrt((M**2).mean() + epsilon)
        for p in range(len(r)):
            Z[token][p] = r[p] @ M
    return X_new, Z


def arguments(shape, dtype, parameters="float32", seed=0):
    tokens, K, V, R, P = shape
    rng = np.random.default_rng(seed)
    draw = lambda dtype, *size: rng.normal(size=size).astype(dtype)
    return (
        draw(dtype, *tokens, K, V),
        draw(parameters, R, K),
        draw(dtype, *tokens, R, V),
        draw(parameters, K, V),
        draw(parameters, P, K),
    )


def jitted(op, **options):
    return jax.jit(functools.partial(op, **options))


# Every pair of a shape and a dtype, a shape and a norm, a dtype and a norm; the others at night.
CASES = [
    pytest.param(
        *case,
        id="-".join(case),
        marks=() if sum(place) % 2 == 0 else pytest.mark.slow,
    )
    for place, case in zip(
        itertools.product(range(4), range(3), range(2)),
        itertools.product(SHAPES, ("float32", "bfloat16", "float64"), ("layernorm", "rmsnorm")),
        strict=True,
    )
]


@pytest.mark.parametrize("shape, dtype, norm", CASES)
def test_site_equals_numpy(shape, dtype, norm):
    args = arguments(SHAPES[shape], dtype, "float64" if dtype == "float64" else "float32")
    with jax.enable_x64(dtype == "float64"):
        op = jitted(pallas_kernels.store_norm_retrieve, norm=norm, epsilon=1e-6)
        X, Z = op(*args)
    expected_X, expected_Z = numpy_site(*args, norm, 1e-6)
    assert X.dtype == dtype and Z.dtype == dtype
    assert_close(X, expected_X, TOLERANCE[dtype])
    if shape != "one number" or norm == "rmsnorm":
        assert_close(Z, expected_Z, TOLERANCE[dtype])
    else:  # one number less its mean is nothing
        np.testing.assert_array_equal(Z, np.zeros_like(expected_Z))


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_gradients_of_every_input(norm):
    args = arguments(((3,), 5, 4, 2, 6), "float64", "float64")
    options = dict(norm=norm, epsilon=1e-6)

    @jax.jit
    def run(args, cotangents):
        op = functools.partial(pallas_kernels.store_norm_retrieve, **options)
        return jax.vjp(op, *args)[1](cotangents)

    rng = np.random.default_rng(1)
    cotangents = rng.normal(size=(3, 5, 4)), rng.normal(size=(3, 6, 4))
    with jax.enable_x64(True):
        got = run(args, cotangents)
    assert_close(got, plain.site(args, cotangents, **options)[1], 1e-13)


def objective(X, w, y, gain, r):
    X, Z = pallas_kernels.store_norm_retrieve(X, w, y, gain, r)
    return jnp.sum(jnp.sin(X)) + jnp.sum(jnp.cos(Z))


def test_gradients_of_shared_parameters_are_the_same_every_time():
    args = arguments(((64, 33), 8, 4, 2, 6), "float32")
    gradient = jax.jit(jax.grad(objective, argnums=(1, 3, 4)))
    first = gradient(*args)
    for _ in range(3):
        for a, b in zip(gradient(*args), first, strict=True):
            np.testing.assert_array_equal(a, b)


def test_halves_make_the_whole():
    X, w, y, gain, r = arguments(((4,), 6, 5, 3, 9), "bfloat16")
    whole = jitted(pallas_kernels.store_norm_retrieve)(X, w, y, gain, r)
    stored = jitted(pallas_kernels.store)(X, w, y)
    np.testing.assert_array_equal(whole[0], stored)
    read = jitted(pallas_kernels.norm_retrieve)(stored, gain, r)
    np.testing.assert_array_equal(whole[1], read)


def test_dtypes_of_residual_and_data_may_differ():
    X, w, y, gain, r = arguments(((4,), 6, 5, 3, 9), "float32")
    args = X, w, y.astype(jnp.bfloat16), gain, r
    X_new, Z = jax.eval_shape(pallas_kernels.store_norm_retrieve, *args)
    assert X_new.dtype == jnp.float32 and Z.dtype == jnp.bfloat16
    read = functools.partial(pallas_kernels.norm_retrieve, dtype=jnp.bfloat16)
    assert jax.eval_shape(read, X, gain, r).dtype == jnp.bfloat16


def test_named_portable_form_is_what_a_cpu_gets():
    args = arguments(((2,), 4, 4, 2, 2), "float32")
    named = jitted(pallas_kernels.store_norm_retrieve, implementation="xla")(*args)
    chosen = jitted(pallas_kernels.store_norm_retrieve)(*args)
    np.testing.assert_array_equal(named[1], chosen[1])


# The portable form -----------------------------------------------------------------------------

FLOATS = Case(2, 5, 16, 8, 4, 6, "float32", "float32", "layernorm")
HELD = Case(2, 5, 12, 6, 3, 7, "int16", "bfloat16", "layernorm", bits=17)
NARROW = FLOATS._replace(residual="bfloat16", data="bfloat16")


class TestPortable(Battery):
    module = xla
    cases = (
        HELD,
        *later((FLOATS,), (NARROW._replace(norm="rmsnorm"),), (HELD._replace(norm="rmsnorm"),)),
    )
    halves = tuple(later((FLOATS,), (HELD,)))
    spreads = (FLOATS,)
    shifted = tuple(later((NARROW,)))
    exact = held = (HELD,)
    repeated = tuple(later((NARROW,)))
    # XLA on the CPU may add up in another order.
    apart = 1e-6
    mean = 4e-7


# An int16 residual -----------------------------------------------------------------------------


def test_a_slice_may_be_small_but_the_whole_may_not():
    shape = ((4, 2), 16, 8, 2, 3)  # rows of both devices
    X, _, _, gain, r = arguments(shape, "float32")
    mesh = jax.make_mesh((2,), ("key",), axis_types=(jax.sharding.AxisType.Auto,))
    at, slots = jax.sharding.PartitionSpec, jax.sharding.PartitionSpec(None, "key")

    @jax.jit
    def read(X):
        held = pallas_kernels.to_fixed_point(X)
        ops = jax.shard_map(
            lambda *a: pallas_kernels.norm_retrieve(*a, dtype=jnp.float32, key_axis="key"),
            mesh=mesh,
            in_specs=(at(None, None, "key"), at("key"), slots),
            out_specs=at("key"),
            check_vma=False,
        )
        return ops(held, gain, r)

    half = X.copy()
    half[:, :, 8:] *= 1e-5
    assert jnp.isfinite(read(half)).all()
    assert jnp.isnan(read(np.float32(1e-5) * X)).all()


def test_a_token_that_is_not_a_number_is_none_in_fixed_point():
    X, w, y, gain, r = map(jnp.asarray, arguments(((1, 3), 4, 4, 2, 2), "float32"))
    held = pallas_kernels.to_fixed_point(X.at[0, 1].set(jnp.nan))
    _, z = pallas_kernels.store_norm_retrieve(held, w, y, gain, r, implementation="xla")
    assert np.isnan(z[0, 1]).all()
    assert np.isfinite(z[0, ::2]).all()


def test_legal_bits():
    args = map(jnp.asarray, arguments(((2,), 4, 4, 2, 2), "float32"))
    with pytest.raises(ValueError, match="fraction_bits=21 must be an integer from 0 to 20"):
        pallas_kernels.store_norm_retrieve(*args, fraction_bits=21)
