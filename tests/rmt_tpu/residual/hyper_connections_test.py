"""Hyper-connections, mHC and mHC-lite: against their equations in float64."""

from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rmt_tpu import config as cfg
from rmt_tpu.errors import UsageError
from tests import models
from tests.rmt_tpu import plain
from tests.rmt_tpu.residual import checks
from tests.tiers import later

CASES = [
    cfg.MhcLite(streams=2),
    *later(cfg.HyperConnections(streams=2), cfg.Mhc(streams=2, rounds=2)),
    *later(cfg.HyperConnections(dynamic=False), cfg.HyperConnections(), cfg.Mhc(), cfg.MhcLite()),
]
VARIANTS = [
    cfg.HyperConnections(streams=3, tanh=False),
    cfg.Mhc(streams=2, rounds=3),
    cfg.MhcLite(streams=3, init="prenorm"),
]


def label(mixer):
    return "-".join(map(str, (mixer.kind, *vars(mixer).values())))


def connections(X, mix, mixer, config):
    """alpha, beta [.., m] and A [.., m, m] of streams X [.., m, D], by the equations."""
    m = mixer.streams
    if isinstance(mixer, cfg.HyperConnections):
        static = mix["static"] if mixer.dynamic else mix
        alpha, beta, A_T = static["read"], static["write"], static["mix"].T
        if not mixer.dynamic:
            return alpha, beta, A_T.T
        act = np.tanh if mixer.tanh else lambda x: x
        X_n = np.stack([plain.norm(x, mix["gain"], config) for x in np.moveaxis(X, -2, 0)], axis=-2)
        s_a, s_b = mix["scales"]
        w_m, w_b, W_r = mix["w"][:, 0], mix["w"][:, 1], mix["w"][:, 2:]
        alpha = alpha + s_a * act(X_n @ w_m)
        beta = beta + s_b * act(X_n @ w_b)
        return alpha, beta, np.swapaxes(A_T + s_a * act(X_n @ W_r), -1, -2)
    x = X.reshape(*X.shape[:-2], -1)
    x = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config.norm_epsilon)
    x = x * mix["gain"].reshape(-1)
    W = mix["w"].reshape(x.shape[-1], -1)
    a_pre, a_post, a_res = mix["scales"]
    alpha = checks.sigmoid(a_pre * x @ W[:, :m] + mix["read_bias"])
    beta = 2 * checks.sigmoid(a_post * x @ W[:, m : 2 * m] + mix["write_bias"])
    logits = np.exp(a_res * x @ W[:, 2 * m :] + mix["mix_bias"])
    if isinstance(mixer, cfg.Mhc):
        A = logits.reshape(*logits.shape[:-1], m, m)
        for _ in range(mixer.rounds):
            A = A / A.sum(axis=-2, keepdims=True)
            A = A / A.sum(axis=-1, keepdims=True)
        return alpha, beta, A
    weights = logits / logits.sum(axis=-1, keepdims=True)
    A = 0
    for k, order in enumerate(permutations(range(m))):
        P = np.zeros((m, m))
        P[np.arange(m), order] = 1
        A = A + weights[..., k, None, None] * P
    return alpha, beta, A


def reference(params, tokens, config):
    """u = alpha^T X; X' = A X + beta y^T."""
    mixer, now = config.mixer, {}

    def mix(k, site, written):
        y = written[-1]
        if k == 0:
            X = np.repeat(y[..., None, :], mixer.streams, axis=-2)
        else:
            X, beta, A = now["X"], now["beta"], now["A"]
            X = A @ X + beta[..., None] * y[..., None, :]
        if k == 2 * config.num_layers:
            return X.sum(axis=-2)
        alpha, beta, A = connections(X, site["mix"], mixer, config)
        now.update(X=X, beta=beta, A=A)
        return np.sum(alpha[..., None] * X, axis=-2)

    return plain.model(params, tokens, config, mix)


@pytest.mark.parametrize("mixer", CASES, ids=label)
def test_follows_the_equations(mixer):
    with jax.enable_x64(True):
        checks.assert_follows_equations(checks.model(mixer), reference)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", VARIANTS, ids=label)
def test_variants_follow_the_equations(mixer):
    with jax.enable_x64(True):
        config = checks.model(mixer, norm="rmsnorm")
        checks.assert_logits_follow_equations(config, reference)


@pytest.mark.slow
def test_remat_changes_nothing():
    with jax.enable_x64(True):
        checks.assert_remat_changes_nothing(checks.model(cfg.Mhc(streams=2, rounds=2)))


# Dtypes and errors -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "mixer", [cfg.HyperConnections(streams=2), *later(cfg.MhcLite())], ids=label
)
def test_streams_are_bfloat16_and_coefficients_float32(mixer):
    config = models.model("vector", mixer=mixer, compute_dtype="bfloat16")
    decoder = models.abstract(config)
    y = jnp.zeros((2, 11, 1, 20), jnp.bfloat16)
    state, _ = decoder.mixer.start(decoder.store, y[..., 0, :], y)
    assert {x.dtype for x in state.streams} == {jnp.dtype("bfloat16")}
    assert state.write.dtype == state.mix.dtype == jnp.float32
    logits, exact = checks.narrow_logits(config, reference)
    # Three layers of 8-bit rounding of order-one logits.
    assert 0 < np.abs(logits - exact).max() < 0.15


def test_errors():
    with pytest.raises(UsageError, match="HyperConnections.streams=0 must be positive"):
        cfg.HyperConnections(streams=0)
    with pytest.raises(UsageError, match="Mhc.rounds=0 must be positive"):
        cfg.Mhc(rounds=0)
    with pytest.raises(UsageError, match="MhcLite.streams=7 needs 7! permutations"):
        cfg.MhcLite(streams=7)
