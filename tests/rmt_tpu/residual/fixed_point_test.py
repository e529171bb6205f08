"""In which steps an int16 residual is held, by the config, and what becomes of one too small."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rmt_tpu
from rmt_tpu import config as cfg
from rmt_tpu.decoder import residual_dtype
from rmt_tpu.errors import UsageError
from rmt_tpu.residual import fixed_point
from tests import models


def reversible(init_std=1.0, dtype="auto", bits=None, **changes):
    store = cfg.MatrixStore(5, dtype, bits)
    options = {"compute_dtype": "bfloat16", "remat": "reversible"} | changes
    return models.model(init_std=init_std, store=store, **options)


def test_steps_follow_the_size_of_the_residual_and_those_of_the_papers_are_one_in_128():
    for name in rmt_tpu.presets():
        config = rmt_tpu.preset(name)
        if isinstance(config.store, cfg.MatrixStore):
            assert fixed_point.fraction_bits(config) == 7 and fixed_point.fits_int16(config)
    assert [fixed_point.fraction_bits(reversible(std)) for std in (0.1, 1.0, 3.0)] == [8, 7, 5]
    mup = cfg.MuP(input_multiplier=30.0)
    assert fixed_point.fraction_bits(reversible(0.15, parametrization=mup)) == 5
    assert fixed_point.fraction_bits(reversible(bits=12)) == 12
    assert "2^-12, up to +-8" in fixed_point.describe(reversible(bits=12))


def test_tied_and_scaled_embeddings_have_their_own_size():
    layers = {"positions": cfg.Rope(), "compute_dtype": "bfloat16"}
    first = lambda **changes: fixed_point.expected_sizes(reversible(**changes))[0]
    # Of 3 heads of 6: tied embeddings start at 18^-1/2, positions at 1.
    assert first(tied_embeddings=True, **layers) == pytest.approx(18**-0.5)
    assert first(tied_embeddings=True) == pytest.approx((1 + 1 / 18) ** 0.5)
    assert first(embedding_scale=30.0, **layers) == pytest.approx(30.0)
    assert first(embedding_scale=3.0) == pytest.approx(10**0.5)
    tied = rmt_tpu.preset("rmt-llama-134m").replace(tied_embeddings=True)
    assert not fixed_point.fits_int16(tied)
    assert fixed_point.fits_int16(tied.replace(embedding_scale=tied.width**0.5))


def test_keys_that_mup_starts_smaller_or_larger_make_a_smaller_or_larger_residual():
    """R is 3, and D_k is 5; the factor of keys that write is `1 / (1 + sqrt(R / D_k))`."""
    plain = fixed_point.expected_sizes(reversible())
    for base, ratio, bits in (("store.key_dim=1", 3 / 1, 6), ("store.key_dim=80", 3 / 80, 8)):
        config = reversible(parametrization=cfg.MuP((base,)))
        factor = (1 + ratio**0.5) / (1 + (3 / 5) ** 0.5)
        expected = tuple(factor * size for size in plain)
        assert fixed_point.expected_sizes(config) == pytest.approx(expected)
        assert fixed_point.fraction_bits(config) == bits
    grown = cfg.MuP(("store.key_dim=10", "attention.num_heads=6"))
    assert fixed_point.expected_sizes(reversible(parametrization=grown)) == plain


@pytest.mark.slow
@pytest.mark.parametrize("parametrization", [cfg.Standard(), cfg.MuP(("store.key_dim=1",))])
def test_expected_sizes_are_those_of_a_new_model(parametrization):
    config = reversible(0.5, parametrization=parametrization)
    config = config.replace(remat="full", compute_dtype="float32", num_layers=3)
    first, last = fixed_point.expected_sizes(config)
    decoder = models.decoder(config)
    tokens, positions = decoder.embedding(models.tokens(8), jnp.arange(11)[None], jnp.float32)
    state, y = decoder.store.start(tokens, positions)
    site = jax.tree.map(lambda x: x[0], nnx.state(decoder.stacks[0][0].site))
    written = jnp.einsum("rk,bnrv->bnkv", site.store_keys[...], y)
    rms = float(jnp.sqrt(jnp.mean(jnp.square(state + written))))
    # Of 3 x 5 keys and 61 tokens: they are drawn, and few.
    assert first == pytest.approx(rms, rel=0.35)
    assert first < last < 2 * first + 1


def test_a_residual_that_starts_too_small_is_float32_by_itself():
    assert residual_dtype(reversible(1.0)) == jnp.int16
    assert residual_dtype(reversible(1e-3)) == jnp.float32
    assert residual_dtype(reversible(1e3)) == jnp.float32
    assert residual_dtype(reversible(1e-3, bits=16)) == jnp.int16


def test_a_model_that_is_not_trained_has_a_residual_of_floats():
    used = fixed_point.with_float_residual(reversible())
    assert (used.remat, residual_dtype(used)) == ("full", jnp.bfloat16)
    dtype_of = lambda name: residual_dtype(fixed_point.with_float_residual(reversible(dtype=name)))
    assert dtype_of("int16") == jnp.bfloat16
    assert dtype_of("float32") == jnp.float32
    plain = reversible(remat="dots")
    assert fixed_point.with_float_residual(plain) is plain


@pytest.mark.parametrize("bits", [-1, 21])
def test_bits_out_of_range_are_refused(bits):
    with pytest.raises(UsageError, match=f"fraction_bits={bits} must be from 0 to 20"):
        cfg.MatrixStore(5, "int16", bits)


@pytest.mark.slow
def test_a_small_residual_is_as_good_as_in_float_or_the_loss_is_nan():
    def logits(config):
        graphdef = nnx.graphdef(nnx.eval_shape(lambda: rmt_tpu.Decoder(config, rngs=nnx.Rngs(0))))
        run = lambda p, tokens: nnx.merge(graphdef, p)(tokens)
        return np.asarray(jax.jit(run)(params, models.tokens()))

    plain = replace(reversible(1e-3), remat="full", compute_dtype="float32")
    params = models.split(plain)[1]
    exact = logits(plain)
    error = lambda config: np.std(logits(config) - exact) / np.std(exact)
    # bfloat16 rounds weights and data: about 1%.
    assert error(reversible(1e-3)) < 0.03
    assert np.isnan(logits(reversible(1e-3, "int16", 9))).all()
