"""All cores start from the values that they should: weights, gains, biases, and KDA's decays."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rmt_tpu import config as cfg
from rmt_tpu.cores import make_core
from rmt_tpu.layers.parameters import Seed

WIDTH, INIT_STD = 60, 0.3
# The deviation, times sqrt(fan-in), of a matrix whose products 4 sublayers add to the residual.
WRITES = INIT_STD * 4**-0.5
# The core and the fan-in of each weight that it draws. The deviation is `INIT_STD / sqrt(fan-in)`
# unless another number stands beside the fan-in. No two sizes of a weight are equal.
CASES = {
    "attention": (
        cfg.Attention(4, 32, cfg.Rope(), output_bias=True, bias=True, query_key_norm=True),
        {"w_out": (128, WRITES)},
    ),
    "normed attention": (cfg.Attention(4, 32, cfg.Rope(), normed="both"), {"w_out": (128, WRITES)}),
    "feed-forward": (
        cfg.FeedForward(128, bias=True, normed="both"),
        {"w_1": WIDTH, "w_2": (128, WRITES)},
    ),
    "gated feed-forward": (
        cfg.FeedForward(128, "swiglu"),
        {"w_1": WIDTH, "w_2": (128, WRITES)},
    ),
    "mla": (
        cfg.Mla(8, 16, kv_rank=12, rope_dim=4, query_rank=20, output_gate=True),
        {"w_q_down": WIDTH, "w_q": 20, "w_kv_down": WIDTH, "w_kv_up": 12, "w_gate": WIDTH},
    ),
    "mla without a query rank": (
        cfg.Mla(8, 16, kv_rank=12, rope_dim=4),
        {"w_q": WIDTH, "w_kv_down": WIDTH, "w_kv_up": 12},
    ),
    "kda": (
        cfg.Kda(30, 4, conv_size=3, gate_rank=10),
        {"w_decay_down": WIDTH, "w_decay_up": 10, "w_beta": WIDTH}
        | {"w_gate_down": WIDTH, "w_gate_up": 10, "taps": (3, 1.0)},
    ),
    "gated delta net": (
        cfg.Kda(30, 4, num_key_heads=15, decays="heads", gates="full", lower_bound=-5.0),
        {"w_decay": WIDTH, "w_beta": WIDTH} | {"taps": (4, 1.0), "value_taps": (4, 1.0)},
    ),
    "experts": (
        cfg.Experts(5, 2, 128, shared_gate=True, balance=cfg.Quantiles()),
        {"w_router": WIDTH, "w_1": WIDTH, "w_2": (128, WRITES), "w_shared_gate": WIDTH}
        | {"shared/w_1": WIDTH, "shared/w_2": (128, WRITES)},
    ),
    "latent experts": (
        cfg.Experts(5, 2, 128, shared=0, latent_dim=10, latent_norm=True),
        {"w_router": WIDTH, "w_down": WIDTH, "w_up": (10, WRITES), "w_1": 10, "w_2": 128},
    ),
}


@pytest.fixture(scope="module")
def drawn() -> dict[str, dict[str, np.ndarray]]:
    """The initial parameters by case and name, all from one program.

    Normal numbers are 1, so that a weight equals its standard deviation.
    """

    def draw(core):
        config = cfg.ModelConfig(
            (cfg.Stack((core, cfg.FeedForward(1)), 2),), cfg.VectorStore(WIDTH), init_std=INIT_STD
        )
        made = make_core(config, core, core, Seed(jax.random.key(0)), 0)
        return nnx.to_pure_dict(nnx.state(made, nnx.Param))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.random, "normal", lambda key, shape, dtype: jnp.ones(shape, dtype))
        of_all = jax.jit(lambda: [draw(core) for core, _ in CASES.values()])()
    named = lambda params: {
        "/".join(part.key for part in path): np.asarray(x)
        for path, x in jax.tree_util.tree_leaves_with_path(params)
    }
    return dict(zip(CASES, map(named, of_all), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_weights_have_the_deviation_of_their_fan_in(drawn, case):
    """All other parameters are gains of 1, or biases and statistics of 0."""
    weights, found = CASES[case][1], drawn[case]
    assert weights.keys() <= found.keys()
    for name in found.keys() - {"decay_bias", "log_rate"}:
        expected = 1.0 if "gain" in name else 0.0
        if name in weights:
            given = weights[name]
            fan_in, scale = given if isinstance(given, tuple) else (given, INIT_STD)
            expected = scale * fan_in**-0.5
        np.testing.assert_allclose(found[name], expected, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("case", ["kda", "gated delta net"])
def test_kda_begins_with_steps_and_rates_of_their_ranges(drawn, case):
    """Means are within 5 standard errors of those of uniform numbers."""
    error = lambda x, low, high: 5 * (high - low) / np.sqrt(12 * x.size)
    logs = np.log10(np.log1p(np.exp(drawn[case]["decay_bias"])))  # of softplus
    assert -3 - 1e-4 < logs.min() < logs.max() < -1 + 1e-4
    assert abs(logs.mean() + 2) < error(logs, -3, -1)
    rates = np.exp(drawn[case]["log_rate"])
    if CASES[case][0].lower_bound is not None:
        assert np.all(rates == 1)
        return
    assert 1 - 1e-4 < rates.min() < rates.max() < 16 + 1e-3
    assert abs(rates.mean() - 8.5) < error(rates, 1, 16)


def test_no_core_is_left_out():
    assert {type(core) for core, _ in CASES.values()} == {*get_args(cfg.Core)}
