"""Highway Transformer: against its equations in float64, in every form."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rmt_tpu import config as cfg
from tests import models
from tests.rmt_tpu import plain
from tests.rmt_tpu.residual import checks
from tests.tiers import later

CASES = [
    cfg.Highway(form="carry", input="raw"),
    *later(cfg.Highway(form="gated", activation="tanh"), cfg.Highway()),
]
VARIANTS = [
    cfg.Highway(input="raw", activation="tanh"),
    cfg.Highway(form="carry", activation="tanh"),
    cfg.Highway(form="gated", input="raw"),
]
label = lambda mixer: f"{mixer.form}-{mixer.input}-{mixer.activation}"


def reference(params, tokens, config):
    """The equations of each form, one sublayer after the other."""
    mixer, before = config.mixer, {}

    def mix(k, site, written):
        y = written[-1]
        if k == 0:
            h = y
        else:
            h, T, v = before["h"], before["T"], before["v"]
            h = {
                "add": h + y + T * v,
                "carry": (1 - T) * h + y + T * v,
                "gated": h + (1 - T) * y + T * v,
            }[mixer.form]
        if k < 2 * config.num_layers:
            x = plain.norm(h, site["gain"], config) if mixer.input == "normed" else h
            w_1, w_2 = np.split(site["mix"]["gate_and_value"], 2, axis=-1)
            activation = {"sigmoid": checks.sigmoid, "tanh": np.tanh}[mixer.activation]
            before.update(h=h, T=activation(x @ w_1), v=x @ w_2)
        return h

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
        checks.assert_remat_changes_nothing(checks.model(cfg.Highway(form="gated")))


def test_without_values_it_is_the_plain_model():
    """`W_2 = 0` leaves `h + y`: exactly, for what is added is 0."""
    config = models.model("vector", mixer=cfg.Highway())
    params = jax.tree.map(np.float32, models.random_parameters(config))
    for sublayer in params["stacks"][0].values():
        sublayer["site"]["mix"]["gate_and_value"][..., config.store.dim :] = 0
    plain_config = dataclasses.replace(config, mixer=cfg.Sum())
    expected = checks.normed_output(plain_config, checks.plain_parameters(params))
    np.testing.assert_array_equal(checks.normed_output(config, params), expected)


@pytest.mark.slow
def test_starts_as_linear_layers_do():
    config = models.model("vector", mixer=cfg.Highway(), store=cfg.VectorStore(300), init_std=0.5)
    params = models.split(config)[1]
    w = params["stacks"][0][0]["site"]["mix"]["gate_and_value"]
    assert w.shape == (3, 300, 600) and "mix" not in params["final_site"]
    # 540,000 samples: the estimate's own standard deviation is 0.1%.
    assert jnp.std(w) == pytest.approx(0.5 * 300**-0.5, rel=0.01)
