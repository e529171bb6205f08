"""MUDD against its equations, in float64, on both stores."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rmt_tpu import config as cfg
from rmt_tpu import cost
from rmt_tpu.analysis import depth
from rmt_tpu.errors import UsageError
from rmt_tpu.residual import mudd
from rmt_tpu.training import depth_rate
from tests import models
from tests.closeness import assert_close
from tests.rmt_tpu import plain
from tests.rmt_tpu.residual import checks
from tests.tiers import later

GROUPED = cfg.Attention(4, 6, cfg.Rope(), False, num_kv_heads=2, query_key_norm=True, bias=True)
FORWARD = cfg.FeedForward(hidden_dim=22)
LAYER = (models.model().attention, FORWARD)
WIDER = (LAYER[0], cfg.FeedForward(hidden_dim=14))
# Layers of one kind; one layer; grouped queries; periods of two layers and several stacks; and a
# layer of attention alone.
STACKS = {
    "alike": (cfg.Stack(LAYER, 3),),
    "single": (cfg.Stack(LAYER),),
    "grouped": (cfg.Stack((GROUPED, FORWARD), 2),),
    "several": (cfg.Stack(LAYER), cfg.Stack((*LAYER, *WIDER), 2)),
    "attention": 2 * (cfg.Stack((LAYER[0], LAYER[0])),),
}
CASES = [("vector", "alike", "full")]
CASES += later(
    *(
        (store, stacks, remat)
        for store in ("vector", "matrix")
        for stacks in STACKS
        for remat in ("full", "blocks")
        if (store, stacks, remat) not in CASES and (remat == "full" or stacks == "several")
    )
)


def model(store, stacks="alike", **changes) -> cfg.ModelConfig:
    config = models.model(store, mixer=cfg.Mudd(), **changes)
    sizes = {"store": replace(config.store, vectors=3)} if store == "matrix" else {}
    return config.replace(stacks=STACKS[stacks], **sizes)


def weights(connections, x, epsilon):
    """A_i of X_i, [ways, sources, batch, seq]."""
    w_1, w_2 = connections["project_in"], connections["project_out"]
    flat = x.reshape(*x.shape[:2], -1)
    normed = flat / np.sqrt(np.mean(flat**2, axis=-1, keepdims=True) + epsilon)
    hidden = plain.gelu(normed @ w_1.reshape(-1, w_1.shape[-1]))
    dynamic = (hidden @ w_2.reshape(len(w_2), -1)).reshape(*x.shape[:2], *w_2.shape[1:])
    return np.moveaxis(dynamic + connections["static"], (0, 1), (2, 3))


def reference(params, tokens, config):
    """The equations, layer by layer."""
    connections, depth = params["mixer"]["connections"], config.num_sublayers

    def mix(k, site, written):
        outputs = [written[0]]
        for i in range(depth // 2 + 1):
            A = np.ones((4, 1, 1, 1))
            if i:
                A = weights(connections[i - 1], outputs[-1], config.norm_epsilon)
            wide = lambda a: a.reshape(*a.shape, *(written[0].ndim - 2) * (1,))
            *attended, u = (
                sum(wide(a) * x for a, x in zip(of_way, outputs, strict=True)) for of_way in A
            )
            if k == 2 * i:
                return u if k == depth else attended
            first = u + written[2 * i + 1]
            if k == 2 * i + 1:
                return first
            outputs.append(first + written[2 * i + 2])

    return plain.model(params, tokens, config, mix)


@pytest.mark.parametrize(("store", "stacks", "remat"), CASES)
def test_follows_the_equations(store, stacks, remat):
    with jax.enable_x64(True):
        config = model(store, stacks, compute_dtype="float64", remat=remat)
        checks.assert_follows_equations(config, reference)


@pytest.mark.slow
def test_follows_the_equations_with_biases_and_norms_of_outputs():
    attention = replace(LAYER[0], output_bias=True, normed="both")
    layer = (attention, cfg.FeedForward(22, normed="output", bias=True))
    with jax.enable_x64(True):
        config = model("vector", compute_dtype="float64", norm_bias=True)
        config = config.replace(stacks=(cfg.Stack(layer, 2),))
        checks.assert_follows_equations(config, reference)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["vector", "matrix"])
def test_equal_static_weights_of_all_ways_are_those_of_denseformer(store):
    with jax.enable_x64(True):
        config = models.model(store, mixer=cfg.Dense(), compute_dtype="float64", remat="full")
        params, a = models.random_parameters(config), []
        dense = params["mixer"]["weights"]
        expected = checks.logits(config, params)
        config = config.replace(mixer=cfg.Mudd())
        of_mudd = models.random_parameters(config)["mixer"]["connections"]
        for i, connections in of_mudd.items():
            a, dense = dense[: i + 2], dense[i + 2 :]
            connections["static"] = np.broadcast_to(a, connections["static"].shape)
            connections["project_out"] *= 0
        params["mixer"] = {"connections": of_mudd}
        assert_close(checks.logits(config, params), expected, 1e-11)


def test_starts_with_the_newest_output_in_every_way():
    _, params = models.split(model("matrix"))
    connections = params["mixer"]["connections"]
    assert list(connections) == [0, 1, 2]
    for i, ways in enumerate((4, 4, 1)):
        shapes = {"project_in": (5, 6, ways * (i + 2)), "static": (ways, i + 2)}
        shapes["project_out"] = (ways * (i + 2), ways, i + 2)
        assert {name: x.shape for name, x in connections[i].items()} == shapes
        newest = np.tile(np.arange(i + 2) == i + 1, (ways, 1))
        np.testing.assert_array_equal(connections[i]["static"], newest)
        assert not connections[i]["project_out"].any()
        assert 0.6 < 30**0.5 * np.std(connections[i]["project_in"]) < 1.4


def test_second_projections_have_a_rate_of_their_own():
    train = cfg.TrainConfig(batch_size=32, optimizer=cfg.AdamW(learning_rate=0.028))
    run = cfg.RunConfig(model=model("vector"), train=train, data=cfg.DataConfig(seq_len=32))
    # One step may move a weight of a sum over 4 ways x 3 outputs = 12 hidden units by 0.07.
    assert depth_rate.factors(run) == {"project_out": pytest.approx(0.07 / 0.028 / 12)}


@pytest.mark.parametrize(
    ("cores", "found"),
    [
        ((cfg.Kda(3, 6), FORWARD, *LAYER), "kda"),
        ((cfg.Mla(3, 6, kv_rank=4, rope_dim=2), FORWARD, FORWARD, FORWARD), "feed_forward, mla"),
        (LAYER[::-1], "feed_forward"),
    ],
)
def test_layers_that_do_not_begin_with_attention_are_refused(cores, found):
    with pytest.raises(UsageError, match=f"mixer=mudd .* some begin with {found}; legal: layers"):
        cfg.ModelConfig((cfg.Stack(cores),), cfg.VectorStore(20), cfg.Mudd())
    with pytest.raises(UsageError, match="mixer=mudd needs layers of two sublayers"):
        cfg.ModelConfig((cfg.Stack((*LAYER, FORWARD)),), cfg.VectorStore(20), cfg.Mudd())


@pytest.mark.slow
def test_weights_over_depth_are_means_over_tokens():
    with jax.enable_x64(True):
        config = model("vector", compute_dtype="float64")
        params = models.random_parameters(config)
        batch = jax.tree.map(jnp.asarray, models.batch())
        decoder = nnx.merge(models.graph(config), jax.tree.map(jnp.asarray, params))
        found = depth.measure(decoder, [batch]).weights
        trace = depth.unrolled(decoder, batch.inputs, segment_ids=batch.segment_ids)
    assert found.sites == [f"{n}{way}" for n in (1, 2, 3) for way in "qkvr"] + ["U"]
    assert found.sources == ["E", "1", "2", "3"] and found.signed
    outputs = [trace.residuals[k] for k in (0, 2, 4, 6)]
    for i, first in ((1, 4), (2, 8), (3, 12)):
        A = weights(params["mixer"]["connections"][i - 1], np.asarray(outputs[i]), 1e-6)
        for way, a in enumerate(A):
            expected = [float(x[batch.weights > 0].mean()) for x in a]
            assert found.mean[first + way] == pytest.approx(expected + (3 - i) * [None])


@pytest.mark.slow
def test_flops_are_near_the_compilers():
    """Of all sums, beside mean squares, activations and small things."""
    config = models.model("vector", num_layers=4, mixer=cfg.Mudd(), store=cfg.VectorStore(256))
    shape, counted = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32), 0
    for connections in models.abstract(config).mixer.connections:
        graphdef, params = nnx.split(connections)
        sources = connections.static.shape[1]

        def run(params, rows, graphdef=graphdef, sources=sources):
            weights = nnx.merge(graphdef, params).weights(rows[-1])
            return mudd._sums(weights, rows, sources, rows.dtype)[1]

        program = jax.jit(run).lower(params, shape(sources, 2, 16, 256)).compile()
        counted += program.cost_analysis()["flops"] / 32
    assert counted == pytest.approx(cost.forward_flops(config, 8)["mixer"], rel=0.05)
