"""Hierarchical aggregation: against its equations in float64, over depths and group sizes."""

import jax
import numpy as np
import pytest

from rmt_tpu import config as cfg
from rmt_tpu.errors import UsageError
from tests import models
from tests.closeness import assert_close
from tests.rmt_tpu import plain
from tests.rmt_tpu.residual import checks
from tests.tiers import later

# Layers, and a node after every so many: with layers left over, one node, a node a layer.
CASES = [
    (6, cfg.Hierarchical(hidden_dim=9)),
    *later((4, cfg.Hierarchical(hidden_dim=7)), (6, cfg.Hierarchical(hidden_dim=9, shared=True))),
]
VARIANTS = [
    (5, cfg.Hierarchical(hidden_dim=7)),
    (4, cfg.Hierarchical(hidden_dim=7, every=3)),
    (3, cfg.Hierarchical(hidden_dim=7, every=3)),
    (3, cfg.Hierarchical(hidden_dim=7, every=1)),
]
label = lambda x: f"{x}" if isinstance(x, int) else f"{x.every}-{x.shared}"


def aggregate(node, inputs, config):
    """AGG."""
    v = np.concatenate(inputs, axis=-1)
    return plain.norm(
        checks.sigmoid(v @ node["w_a"]) @ node["w_b"] + sum(inputs), node["gain"], config
    )


def node_parameters(params, i, shared):
    """Of node i, from 1."""
    if i == 1:
        return params["mixer"]["first"]
    return jax.tree.map(lambda p: p[0 if shared else i - 2], params["mixer"]["others"])


def reference(params, tokens, config):
    """H after every layer, A after every group of layers."""
    mixer, now = config.mixer, {"H": []}

    def mix(k, site, written):
        now["h"] = written[-1] if k == 0 else now["h"] + written[-1]
        if k > 0 and k % 2 == 0:
            now["H"].append(now["h"])
            layers = k // 2
            if layers % mixer.every == 0:
                i = layers // mixer.every
                inputs = now["H"][-mixer.every :] + ([now["A"]] if i > 1 else [])
                node = node_parameters(params, i, mixer.shared)
                now["h"] = now["A"] = aggregate(node, inputs, config)
        return now["h"]

    return plain.model(params, tokens, config, mix)


@pytest.mark.parametrize("layers, mixer", CASES, ids=label)
def test_follows_the_equations(layers, mixer):
    with jax.enable_x64(True):
        checks.assert_follows_equations(checks.model(mixer, num_layers=layers), reference)


@pytest.mark.slow
@pytest.mark.parametrize("layers, mixer", VARIANTS, ids=label)
def test_variants_follow_the_equations(layers, mixer):
    with jax.enable_x64(True):
        config = checks.model(mixer, norm="rmsnorm", num_layers=layers)
        checks.assert_logits_follow_equations(config, reference)


@pytest.mark.slow
def test_remat_changes_nothing():
    with jax.enable_x64(True):
        checks.assert_remat_changes_nothing(checks.model(cfg.Hierarchical(), num_layers=4))


def test_a_node_without_weights_norms_the_sum():
    """`W_b = 0`: AGG is the norm of its inputs' sum."""
    with jax.enable_x64(True):
        config = checks.model(cfg.Hierarchical(), num_layers=4)
        params = models.random_parameters(config)
        for node in params["mixer"].values():
            node["w_b"][:] = 0
        logits = checks.logits(config, params)
        only_sums = jax.tree.map(np.copy, params)
        for node in only_sums["mixer"].values():
            node["w_a"][:] = 0  # without influence
        expected = reference(only_sums, np.asarray(models.tokens()), config)
        assert_close(logits, expected, 1e-11)


@pytest.mark.slow
def test_nodes_share_weights_only_when_told_to():
    config = lambda shared: models.model(
        "vector", num_layers=6, mixer=cfg.Hierarchical(shared=shared)
    )
    own = models.split(config(False))[1]["mixer"]["others"]["w_a"]
    assert own.shape == (2, 3 * 20, 128)
    assert np.abs(own[0] - own[1]).min() > 0
    assert models.abstract(config(True)).mixer.others.w_a.shape == (1, 3 * 20, 128)


def test_more_layers_to_a_node_than_there_are():
    with pytest.raises(UsageError, match="Hierarchical.every=4 is more than num_layers=3"):
        models.model("vector", mixer=cfg.Hierarchical(every=4))
