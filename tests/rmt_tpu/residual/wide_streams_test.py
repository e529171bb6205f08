"""Wide streams against their equations, in float64, on both stores."""

import dataclasses

import jax
import numpy as np
import pytest

from rmt_tpu import config as cfg
from rmt_tpu.errors import UsageError
from tests import models
from tests.rmt_tpu import plain
from tests.rmt_tpu.residual import checks
from tests.tiers import later

CASES = [
    ("vector", cfg.WideStreams(streams=3, forget=0.2)),
    *later(
        ("matrix", cfg.WideStreams(streams=2, forget=0.1)),
        ("vector", cfg.WideStreams(streams=1)),
        ("vector", cfg.WideStreams(spread=0.0)),
        ("matrix", cfg.WideStreams(streams=8)),
    ),
]
label = lambda x: x if isinstance(x, str) else f"{x.streams}-{x.spread}-{x.forget}"


def reference(params, tokens, config):
    """The equations, stream by stream."""
    mixer, now = config.mixer, {}
    depth, indices = config.num_sublayers, range(config.mixer.streams)

    def mix(k, site, written):
        y = written[-1]
        if k == 0:
            now["X"] = [y for _ in indices]
        else:
            now["X"] = [now["rho"][i] * now["X"][i] + now["w"][i] * y for i in indices]
        if k == depth:
            return sum(now["X"]) / mixer.streams
        learned = site["mix"]
        now["w"] = 2 * checks.sigmoid(learned["write_logits"])
        now["rho"] = np.ones(mixer.streams)
        if mixer.forget:
            now["rho"] = 1 - mixer.forget * checks.sigmoid(learned["forget_logits"])
        return sum(learned["read"][i] * now["X"][i] for i in indices)

    return plain.model(params, tokens, config, mix)


@pytest.mark.parametrize(("store", "mixer"), CASES, ids=label)
def test_follows_the_equations(store, mixer):
    with jax.enable_x64(True):
        config = models.model(store, mixer=mixer, compute_dtype="float64", remat="none")
        checks.assert_follows_equations(config, reference)


@pytest.mark.slow
def test_remat_changes_nothing():
    with jax.enable_x64(True):
        checks.assert_remat_changes_nothing(checks.model(cfg.WideStreams(forget=0.1)))


def test_starts_with_weights_of_mean_1_that_keep_all_but_a_thousandth():
    mixer = cfg.WideStreams(streams=5, spread=2.0, forget=0.1)
    _, params = models.split(models.model("vector", mixer=mixer))
    mix = params["stacks"][0][0]["site"]["mix"]
    write = 2 * checks.sigmoid(np.asarray(mix["write_logits"]))
    # float32: a few roundings of numbers of order one.
    np.testing.assert_allclose(write.mean(-1), 1, atol=1e-6)
    assert (np.diff(write) > 0).all()
    kept = 1 - 0.1 * checks.sigmoid(np.asarray(mix["forget_logits"]))
    np.testing.assert_allclose(kept, 0.999, atol=1e-6)
    np.testing.assert_allclose(mix["read"], 1 / 5, atol=1e-7)
    assert "mix" not in params["final_site"]


def test_a_share_too_small_for_the_start_is_refused():
    with pytest.raises(UsageError, match=r"WideStreams.forget=0.001 is too small.* at least 0.002"):
        dataclasses.replace(cfg.WideStreams(), forget=0.001)
