"""What the sites of hyper-connections make of the streams: where they start, and how they mix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rmt_tpu import config as cfg
from rmt_tpu.layers.parameters import Seed
from rmt_tpu.residual import hyper_connections
from tests import models


def made(mixer, index, *, moved=0.0):
    """Coefficients that a site makes of random streams, in float32."""
    config = models.model("vector", mixer=mixer)
    seed = Seed(jax.random.key(0))
    graphdef, state = nnx.split(hyper_connections.make_mix(config, seed, index=index))
    rng = np.random.default_rng(0)
    noise = lambda p: p + moved * rng.normal(size=p.shape).astype(np.float32)
    X = tuple(rng.normal(size=(mixer.streams, 2, 50, 20)).astype(np.float32))
    return jax.jit(lambda s, X: nnx.merge(graphdef, s)(X))(jax.tree.map(noise, state), X)


@pytest.mark.slow
def test_homes_take_turns():
    for index in (0, 3, 6):
        home = index % 4
        alpha = made(cfg.HyperConnections(), jnp.int32(index)).read[:, 0, 0]
        np.testing.assert_array_equal(alpha, np.eye(4)[home])
        got = made(cfg.Mhc(), jnp.int32(index))
        # s(3) and s(-3); exp(6) beside three times 1. float32 rounding.
        np.testing.assert_allclose(got.read[:, 1, 1], 0.0474 + 0.9051 * np.eye(4)[home], atol=1e-4)
        np.testing.assert_allclose(got.write, 1, atol=1e-6)
        np.testing.assert_allclose(np.diagonal(got.mix), 0.9926, atol=1e-4)
        got = made(cfg.MhcLite(), jnp.int32(index))
        np.testing.assert_allclose(got.read.sum(0), 1.538, atol=1e-3)
        np.testing.assert_allclose(got.write[home], 1.462, atol=1e-3)
        np.testing.assert_allclose(got.write.mean(0), 0.77, atol=2e-3)
        np.testing.assert_allclose(np.diagonal(got.mix), 0.9940, atol=1e-4)
        np.testing.assert_allclose(got.mix[0, 1], 0.0020, atol=1e-4)


# The mixing matrix -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5])
def test_mhc_lite_is_doubly_stochastic(m):
    """To float32 rounding."""
    A = made(cfg.MhcLite(streams=m), jnp.int32(1), moved=1.0).mix
    assert A.shape == (m, m, 2, 50) and A.dtype == jnp.float32
    assert m == 1 or A[0, 0].std() > 1e-2
    for axis in (0, 1):
        np.testing.assert_allclose(A.sum(axis), 1, atol=1e-6)


def test_sinkhorn_averages_exactly():
    """Over the streams that are read; over those written only nearly, and better with more rounds.

    At logits of unit size the largest error of 20,000 matrices is some 4e-3 after 20 rounds.
    """
    logits = np.random.default_rng(0).normal(size=(4, 4, 100, 200)).astype(np.float32)
    errors = []
    for rounds in (5, 20):
        A = jax.jit(hyper_connections.sinkhorn, static_argnums=1)(logits, rounds)
        np.testing.assert_allclose(A.sum(axis=1), 1, atol=1e-6)
        errors.append(np.abs(A.sum(axis=0) - 1))
    assert errors[1].max() < 4e-3 and errors[1].mean() < 2e-6
    assert errors[1].mean() < 0.1 * errors[0].mean()


def test_sinkhorn_of_large_logits_is_finite():
    logits = jnp.zeros((4, 4, 1, 1)).at[1].set(1e4).at[:, 2].add(-1e4)
    A = hyper_connections.sinkhorn(logits, 20)
    np.testing.assert_allclose(A.sum(axis=1), 1, atol=1e-6)


@pytest.mark.parametrize(
    "mixer", [cfg.Mhc(streams=1), cfg.MhcLite(streams=1)], ids=lambda m: m.kind
)
def test_one_stream_keeps_all_of_itself(mixer):
    np.testing.assert_array_equal(made(mixer, jnp.int32(0), moved=1.0).mix, 1)
