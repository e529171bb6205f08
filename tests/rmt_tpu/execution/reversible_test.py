"""The residual rebuilt, not kept: exact walks, equal gradients, memory, and what it refuses."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pallas_kernels
from rmt_tpu import config as cfg
from rmt_tpu.errors import UsageError
from rmt_tpu.layers import choices
from rmt_tpu.residual import matrix
from tests import models
from tests.closeness import float64
from tests.tiers import later


@functools.cache
def compiled(config):
    graphdef, tokens = models.graph(config), models.tokens()
    weigh = np.random.default_rng(1).normal(size=(*tokens.shape, models.VOCAB))
    loss = lambda p: jnp.mean(jnp.asarray(weigh) * nnx.merge(graphdef, p)(tokens))
    return jax.jit(jax.value_and_grad(loss))


def gradients(config, params=None):
    """Loss, and its gradients; of the parameters that a decoder starts with if not of others."""
    return compiled(config)(models.split(config)[1] if params is None else params)


def relative_errors(got, wanted):
    """Of each array, as root mean squares."""
    rms = lambda x: np.sqrt(np.mean(np.square(x)))
    pairs = zip(jax.tree.leaves(float64(got)), jax.tree.leaves(float64(wanted)), strict=True)
    return [rms(a - b) / rms(b) for a, b in pairs]


@pytest.mark.parametrize(
    "positions, remat",
    [
        (cfg.Rope(), "reversible"),
        *later(
            (cfg.Alibi(), "reversible"),
            (cfg.Learned(32), "reversible"),
            (cfg.Rope(), "reversible_dots"),
        ),
    ],
    ids=lambda value: getattr(value, "kind", value),
)
def test_gradients_in_float64_are_those_of_the_ordinary_policy(positions, remat):
    with jax.enable_x64(True):
        config = models.model(positions=positions, compute_dtype="float64")
        params = models.random_parameters(config)
        ordinary = gradients(config, params=params)
        rebuilt = gradients(replace(config, remat=remat), params=params)
        assert rebuilt[0] == pytest.approx(float(ordinary[0]), rel=1e-14)
        assert max(relative_errors(rebuilt[1], ordinary[1])) < 1e-13


def test_a_large_residual_is_read_where_it_is_rebuilt(monkeypatch):
    """The gradients are the same; of two stacks, whose sites differ."""
    monkeypatch.setattr(choices, "MAX_VMEM_SHARE", 0)
    reads, again = [], matrix.Store.read_again
    monkeypatch.setattr(matrix.Store, "read_again", lambda *args: reads.append(1) or again(*args))
    attention, feed_forward = models.model(positions=cfg.Rope()).stacks[0].cores
    stacks = cfg.Stack((attention, feed_forward), 3), cfg.Stack((feed_forward, attention))
    with jax.enable_x64(True):
        config = models.model(compute_dtype="float64", stacks=stacks)
        params = models.random_parameters(config)
        ordinary = gradients(config, params=params)
        rebuilt = gradients(replace(config, remat="reversible"), params=params)
        assert max(relative_errors(rebuilt[1], ordinary[1])) < 1e-13
    # Of the final site, and where a stack ends.
    assert len(reads) == 3


@pytest.mark.slow
@pytest.mark.xdist_group("bfloat16")
def test_fixed_point_gradients_agree_with_those_of_a_float_residual():
    """In bfloat16 both are rounded, the float residual more: the fixed one is nearer to float32."""
    config = models.model(compute_dtype="bfloat16")
    exact = gradients(replace(config, compute_dtype="float32"))[1]
    ordinary = relative_errors(gradients(config)[1], exact)
    fixed = relative_errors(gradients(replace(config, remat="reversible"))[1], exact)
    assert np.mean(fixed) < 1.1 * np.mean(ordinary)


@jax.jit
def walk_down(start, keys, data, gain, read):
    def down(residual, written):
        residual, *seen = pallas_kernels.store_norm_retrieve_with_statistics(
            residual, *written, gain, read, norm="layernorm", epsilon=1e-6
        )
        return residual, seen

    return jax.lax.scan(down, start, (keys, data))


@jax.jit
def walk_up(last, statistics, keys, data, gain, read):
    def up(residual, kept):
        statistics, *written = kept
        options = dict(norm="layernorm")
        z = pallas_kernels.norm_retrieve_again(
            residual, statistics, gain, read, epsilon=1e-6, dtype=jnp.bfloat16, **options
        )
        zeros = jnp.zeros(residual.shape, jnp.bfloat16)
        undone = pallas_kernels.undo(
            residual, statistics, *written, gain, read, zeros, jnp.zeros_like(z), **options
        )
        return undone.rebuilt, z

    return jax.lax.scan(up, last, (statistics, keys, data), reverse=True)


@pytest.mark.xdist_group("walks")
@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_a_walk_over_48_sublayers_and_back_ends_where_it_began(scale):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(jnp.bfloat16)
    start = pallas_kernels.to_fixed_point(jnp.asarray(draw(2, 5, 8, 12), jnp.float32))
    keys = (scale * 3**-0.5 * rng.normal(size=(48, 3, 8))).astype(np.float32)
    data, gain = draw(48, 2, 5, 3, 12), np.ones((8, 12), np.float32)
    written = keys, data, gain, rng.normal(size=(4, 8)).astype(np.float32)
    last, (seen, statistics) = walk_down(start, *written)
    first, seen_again = walk_up(last, statistics, *written)
    np.testing.assert_array_equal(first, start)
    np.testing.assert_allclose(
        seen_again.astype(np.float32), seen.astype(np.float32), rtol=2**-7, atol=2**-7
    )
    assert np.abs(np.asarray(last, np.int32) - start).max() > 100 * scale


@pytest.mark.xdist_group("bfloat16")
def test_a_residual_beyond_its_range_makes_the_loss_nan():
    config = models.model(compute_dtype="bfloat16", remat="reversible")
    _, params = models.split(config)
    assert np.isfinite(gradients(config, params=params)[0])
    params = jax.tree.map(lambda p: p, params)
    sites = params["stacks"][0][1]["site"]
    sites["store_keys"] = sites["store_keys"].at[1].mul(1000.0)
    assert np.isnan(gradients(config, params=params)[0])
    # A float residual has no such range.
    assert np.isfinite(gradients(replace(config, remat="full"), params=params)[0])


def test_what_is_saved_does_not_grow_with_key_dim():
    def saved(remat, key_dim):
        config = models.model(
            compute_dtype="bfloat16", num_layers=8, remat=remat, store=cfg.MatrixStore(key_dim)
        )
        graphdef, params = nnx.split(models.abstract(config), nnx.Param)
        loss = lambda p: jnp.sum(nnx.merge(graphdef, p).features(models.tokens(4, 16)).z)
        pullback = jax.eval_shape(lambda p: jax.vjp(loss, p)[1], params)
        kept = [x for x in jax.tree.leaves(pullback) if x.dtype != jnp.float32]
        return sum(x.size * x.dtype.itemsize for x in kept)

    # One residual of int16 more, of 8 layers' worth of bfloat16.
    one = 4 * 16 * 16 * 6 * 2
    assert saved("reversible", 32) - saved("reversible", 16) <= one
    assert saved("full", 32) - saved("full", 16) >= 8 * one


def test_evaluation_and_decoding_compute_what_training_does():
    config = models.model(compute_dtype="bfloat16", remat="reversible")
    decoder, tokens = models.decoder(config), models.tokens()
    logits = jax.jit(decoder)(tokens)
    decoded, _ = jax.jit(decoder.decode)(tokens, decoder.empty_cache(2, 11))
    np.testing.assert_allclose(decoded, logits, atol=0.05)
    assert decoder.store.dtype == jnp.int16
    positions = jnp.arange(11)[None]
    np.testing.assert_allclose(jax.jit(decoder)(tokens, positions=positions), logits, atol=0.05)


def test_policies_and_dtypes_that_do_not_fit_are_refused():
    with pytest.raises(UsageError, match="needs a matrix store; legal .* dots, offload, full"):
        models.model("vector", remat="reversible_dots")
    with pytest.raises(UsageError, match="'bfloat16' .* drift .*; legal: auto, int16"):
        models.model(remat="reversible", store=cfg.MatrixStore(5, "bfloat16"))
    with pytest.raises(UsageError, match="'int16' .* only with remat='reversible'"):
        models.model(store=cfg.MatrixStore(5, "int16"))
    integers = jnp.zeros((2, 4, 5), jnp.int16)
    with pytest.raises(pallas_kernels.UnsupportedImplementation, match="reversible"):
        ones = jnp.ones((3, 4))
        jax.grad(
            lambda keys: pallas_kernels.store_norm_retrieve(
                integers, keys, jnp.ones((2, 3, 5)), jnp.ones((4, 5)), ones
            )[1].sum()
        )(ones)
