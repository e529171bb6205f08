"""An int16 residual in steps of any size: exact both ways, and NaN where it does not fit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.key_vector import mosaic_tpu, triton_gpu, xla
from tests.pallas_kernels.halves import Halves
from tests.tiers import later

K, V, R, P = 16, 8, 2, 3
IMPLEMENTATIONS = {
    "xla": (Halves(xla), {}, 3),
    "mosaic_tpu": (Halves(mosaic_tpu), {"interpret": True}, 128),
    "triton": (Halves(triton_gpu), {"interpret": True}, 3),
}


def arguments(tokens, size):
    """Of a residual and writes of this size, in bfloat16 data."""
    rng = np.random.default_rng(0)
    draw = lambda dtype, *shape: jnp.asarray(rng.normal(size=shape), dtype)
    X, data = size * draw("float32", 1, tokens, K, V), size * draw("float32", 1, tokens, R, V)
    w, gain, r = draw("float32", R, K), draw("float32", K, V), draw("float32", P, K)
    return X, w, data.astype(jnp.bfloat16), gain, r


@pytest.mark.parametrize("name", ["xla", "mosaic_tpu", *later("triton")])
def test_finer_steps_hold_a_small_residual_exactly_both_ways(name):
    module, options, tokens = IMPLEMENTATIONS[name]
    bits, norm = 17, "layernorm"  # steps of 8e-6, up to 0.25
    X, w, data, gain, r = arguments(tokens, 0.01)
    held = pallas_kernels.to_fixed_point(X, bits)
    options = options | {"norm": norm, "fraction_bits": bits}
    run = jax.jit(functools.partial(module.store_norm_retrieve, epsilon=1e-6, **options))
    stored, z, statistics = run(held, w, data, gain, r)
    plain = IMPLEMENTATIONS["xla"][0].store_norm_retrieve
    _, expected, _ = plain(X, w, data, gain, r, norm=norm, epsilon=1e-6)
    # Rounding is 2e-4 of it, bfloat16 keys and products 4e-3.
    error = jnp.abs(z.astype(jnp.float32) - expected.astype(jnp.float32)).max()
    assert error < 2e-2 * jnp.abs(expected).max()

    back = jax.jit(functools.partial(module.backward, rebuild=True, **options))
    zeros = jnp.zeros(held.shape, jnp.bfloat16)
    undone = back(stored, statistics, w, data, gain, r, zeros, jnp.zeros_like(z))
    np.testing.assert_array_equal(undone.rebuilt, held)
    assert jnp.abs(stored.astype(jnp.int32) - held).max() > 1000


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_token_of_less_than_two_steps_or_out_of_range_reads_nan(name):
    module, options, tokens = IMPLEMENTATIONS[name]
    X, w, data, gain, r = arguments(tokens, 1.0)
    # In steps of 1/512: all of it rounds to 0, most of it does, some of it does, and it fits not.
    sizes = jnp.ones(tokens).at[:3].set(jnp.asarray([1e-5, 1e-3, 1.0]))
    X, data = (x * sizes[:, None, None] for x in (X, data.astype(jnp.float32)))
    read = jax.jit(
        functools.partial(module.store_norm_retrieve, norm="rmsnorm", epsilon=1e-6, **options)
    )
    held = pallas_kernels.to_fixed_point(X)
    _, z, _ = read(held, w, data, gain, r)
    lost = jnp.isnan(z).all(axis=(0, 2, 3))
    np.testing.assert_array_equal(lost[:3], [True, True, False])
    assert jnp.isnan(z).any(axis=(0, 2, 3)).sum() == 2
    _, z, _ = read(held, w, data * jnp.where(sizes == 1, 100, 1)[:, None, None], gain, r)
    assert jnp.isnan(z).all()


def test_a_slice_may_be_small_but_the_whole_may_not():
    X, w, data, gain, r = arguments(2, 1.0)
    mesh = jax.make_mesh((2,), ("key",), axis_types=(jax.sharding.AxisType.Auto,))
    at, slots = jax.sharding.PartitionSpec, jax.sharding.PartitionSpec(None, "key")

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

    X = jnp.concatenate([X, X])  # rows of both devices
    half = X.at[:, :, K // 2 :].multiply(1e-5)
    assert jnp.isfinite(jax.jit(read)(half)).all()
    assert jnp.isnan(jax.jit(read)(1e-5 * X)).all()


def test_legal_bits():
    X, w, data, gain, r = arguments(2, 1.0)
    with pytest.raises(ValueError, match="fraction_bits=21 must be an integer from 0 to 20"):
        pallas_kernels.store_norm_retrieve(X, w, data, gain, r, fraction_bits=21)
