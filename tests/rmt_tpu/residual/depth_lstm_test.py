"""Depth-wise LSTM: against its equations in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rmt_tpu import config as cfg
from rmt_tpu import cost
from rmt_tpu.errors import UsageError
from tests import models
from tests.rmt_tpu import plain
from tests.rmt_tpu.residual import checks


def reference(params, tokens, config):
    """The cell's equations, layer by layer."""
    store, s = plain.Vector(config), checks.sigmoid
    norm = lambda x, gain: plain.norm(x, gain, config)
    embedding = params["embedding"]
    o = embedding["tokens"][tokens] + embedding["positions"][: tokens.shape[1]]
    c = o if config.mixer.cell_start == "embedding" else np.zeros_like(o)
    for l in range(config.num_layers):
        layer = jax.tree.map(lambda p, l=l: p[l], params["stacks"][0])
        attention_site, site = layer[0]["site"], layer[1]["site"]
        a = plain.attention(*store.heads(o, attention_site, config.attention), divisor=l + 1)
        a = a.reshape(o.shape[:2] + (-1,)) @ site["write"]
        z = np.concatenate([a, o], axis=-1)
        W_i, W_f, W_o = np.split(site["mix"]["gates"], 3, axis=-1)
        gain_i, gain_f, gain_o = site["mix"]["gate_gains"]
        i = s(norm(z @ W_i, gain_i))
        g = s(norm(z @ W_f, gain_f) + config.mixer.forget_offset)
        q = s(norm(z @ W_o, gain_o))
        feed_forward = layer[1]["core"]
        hidden = norm(z @ feed_forward["w_1"], feed_forward["hidden_gain"])
        t = plain.gelu(hidden) @ feed_forward["w_2"]
        c = g * c + i * t
        o = q * c
    return norm(o, params["final_site"]["gain"]) @ params["unembedding"]["kernel"]


def test_follows_the_equations():
    with jax.enable_x64(True):
        checks.assert_follows_equations(checks.model(cfg.DepthLstm()), reference)


@pytest.mark.slow
@pytest.mark.parametrize("cell_start", ["zero", "embedding"])
@pytest.mark.parametrize("forget_offset", [1.0, -0.5])
def test_variants_follow_the_equations(forget_offset, cell_start):
    mixer = cfg.DepthLstm(forget_offset=forget_offset, cell_start=cell_start)
    with jax.enable_x64(True):
        config = checks.model(mixer, norm="rmsnorm")
        checks.assert_logits_follow_equations(config, reference)


@pytest.mark.slow
def test_remat_changes_nothing():
    with jax.enable_x64(True):
        checks.assert_remat_changes_nothing(checks.model(cfg.DepthLstm()))


@pytest.mark.slow
def test_no_weight_starts_smaller_by_depth():
    """There is no sum over depth to keep small. Fan in of the gates and of W_1 is 2 D."""
    sizes = {"store": cfg.VectorStore(120), "feed_forward": cfg.FeedForward(160), "num_layers": 12}
    params = models.split(models.model("vector", mixer=cfg.DepthLstm(), num_heads=20, **sizes))[1]
    layer = params["stacks"][0]
    gates = layer[1]["site"]["mix"]["gates"]
    # At least 170,000 samples each: a standard deviation is known to 0.2%.
    for weights, fan_in in (
        (layer[1]["site"]["write"], 120),
        (layer[1]["core"]["w_1"], 240),
        (layer[1]["core"]["w_2"], 160),
        (gates, 240),
    ):
        assert weights.std() == pytest.approx(fan_in**-0.5, rel=0.01)
    assert "gain" not in layer[0]["site"] and "gain" in params["final_site"]


def test_a_forget_gate_far_open_keeps_the_cell():
    """With `c_0 = x_0`, g = 1 and no feed-forward output, only the output gate is left."""
    with jax.enable_x64(True):
        config = checks.model(cfg.DepthLstm(cell_start="embedding", forget_offset=1e3))
        params = models.random_parameters(config)
        params["stacks"][0][1]["core"]["w_2"] *= 0
        mix = params["stacks"][0][1]["site"]["mix"]
        mix["gate_gains"][:, 2] = 0  # q = s(0) = 1/2, which the final norm takes out again
        got = checks.normed_output(config, params)[..., 0, :]
        embedding = params["embedding"]
        x = embedding["tokens"][models.tokens()] + embedding["positions"][:11]
        gain = params["final_site"]["gain"]
        expected = plain.norm(x / 2, gain, config)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


@pytest.mark.slow
def test_bfloat16_state():
    config = models.model("vector", mixer=cfg.DepthLstm(), compute_dtype="bfloat16")
    logits, exact = checks.narrow_logits(config, reference)
    assert logits.dtype == jnp.float32
    # Three layers of 8-bit rounding of order-one logits.
    assert 0 < np.abs(logits - exact).max() < 0.15


def test_feed_forward_layers_may_differ_but_end_every_layer():
    config = models.model("vector", mixer=cfg.DepthLstm())
    attention, wide = config.attention, cfg.FeedForward(30)
    gated = cfg.FeedForward(30, "swiglu")  # only the second core of a layer must have no gate
    two = config.replace(
        stacks=(*config.stacks, cfg.Stack((attention, wide)), cfg.Stack((gated, wide)))
    )
    params = nnx.to_pure_dict(nnx.state(models.abstract(two), nnx.Param))
    assert sum(cost.parameters(two).values()) == sum(p.size for p in jax.tree.leaves(params))
    graphdef = models.graph(two)
    logits = jax.eval_shape(lambda p: nnx.merge(graphdef, p)(models.tokens()), params)
    assert logits.shape[-1] == models.VOCAB
    experts = cfg.Experts(4, 2, 10)
    for cores, named in (
        ((attention, attention), "attention"),
        ((wide, attention), "attention"),
        ((attention, experts), "experts"),  # its gate is not what is wrong
    ):
        with pytest.raises(UsageError, match=f"end with feed_forward, but .* {named}; legal"):
            config.replace(stacks=(cfg.Stack(cores),))
