"""The formulas of costs, against the compiler and against sums by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from pallas_kernels.target import chip_of
from rmt_tpu import config as cfg
from rmt_tpu import cost as resources
from rmt_tpu.config import presets
from tests import models


@pytest.mark.parametrize("store", ["vector", "matrix"])
def test_flops_are_near_the_compilers(store):
    """Beside element-wise work and the embedding's look-up, which only one of them counts."""
    # One layer: the compiler counts the body of a scan once. Wide, so that products dominate.
    sizes = dict(num_layers=1, vocab_size=512, num_heads=8, head_dim=32)
    wide = {"matrix": cfg.MatrixStore(16), "vector": cfg.VectorStore(256)}[store]
    config = models.model(store, store=wide, feed_forward=cfg.FeedForward(512), **sizes)
    batch, seq = 2, 32
    graphdef, params = nnx.split(models.abstract(config))
    forward = jax.jit(lambda p, t: nnx.merge(graphdef, p)(t))
    counted = forward.lower(params, jax.ShapeDtypeStruct((batch, seq), jnp.int32)).compile()
    expected = batch * seq * resources.flops_per_token(config, seq)
    assert counted.cost_analysis()["flops"] == pytest.approx(expected, rel=0.15)


# By device kind: teraFLOP/s of dense bfloat16 products and GB/s of memory, from the makers' pages.
# A TPU7x device is half a chip. H100 PCIe and NVL have no bandwidth here.
PUBLISHED = {
    "TPU v4": (275, 1228),
    "TPU v5 lite": (197, 819),
    "TPU v5e": (197, 819),
    "TPU v5": (459, 2765),
    "TPU v5p": (459, 2765),
    "TPU v6e": (918, 1640),
    "TPU7x": (2307 / 2, 7380 / 2),
    "NVIDIA A100-SXM4-80GB": (312, 2039),
    "NVIDIA A100 80GB PCIe": (312, 1935),
    "NVIDIA A100-SXM4-40GB": (312, 1555),
    "NVIDIA A100-PCIE-40GB": (312, 1555),
    "NVIDIA H100 80GB HBM3": (989, 3352),
    "NVIDIA H100 PCIe": (756, None),
    "NVIDIA H100 NVL": (835, None),
    "NVIDIA H200": (989, 4800),
    "NVIDIA B200": (2250, 7700),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_device_kind_has_the_makers_figures(kind):
    flops, bandwidth = PUBLISHED[kind]
    assert resources.peak_flops(kind) == pytest.approx(flops * 1e12, rel=1e-3)
    if bandwidth is not None:
        assert chip_of(kind).bandwidth == pytest.approx(bandwidth * 1e9, rel=5e-3)


def test_an_unknown_device_has_no_peak():
    assert resources.peak_flops("cpu") is None


def test_the_mean_token_sees_half_of_its_window():
    """Of 512 tokens 256.5, of which logits, weighted values and softmax are linear."""
    config = presets.run("gpt2-405m").model
    whole, causal = (
        f(config, 512) for f in (resources.flops_per_token, resources.causal_flops_per_token)
    )
    layers, heads, size = 24, 16, 64
    unseen = layers * (4 * heads * size + 3 * heads) * (512 - 256.5)
    assert whole - causal == unseen
    # At 131,072 tokens that is most of what the larger count has.
    long = [
        f(presets.run("rmt-305m").model, 131072)
        for f in (resources.flops_per_token, resources.causal_flops_per_token)
    ]
    assert 1.9 < long[0] / long[1] < 2


def test_a_token_is_counted_with_what_its_window_has():
    """Compare layers with windows of 3 and 7, and without one, with a sum over all tokens."""
    cores = [cfg.Attention(2, 8, cfg.NoPositions(), window=w) for w in (3, None, 7)]
    layers = [(core, cfg.FeedForward(8)) for core in cores]
    config = cfg.ModelConfig(cfg.stacks(layers), cfg.VectorStore(16), vocab_size=11)
    assert cores[0].flops(16, 16, 100) == cores[1].flops(16, 16, 3) == 3 * 2 * (4 * 8 + 3)
    for length in (1, 3, 5, 7, 20):
        each = sum(resources.flops_per_token(config, n) for n in range(1, length + 1))
        assert resources.causal_flops_per_token(config, length) == each // length


def test_flops_of_latent_attention():
    """Of a token, with n of the sequence (H = 3, D_h = 5, D_r = 2, c = 7, q = 11, read 13)."""
    core = cfg.Mla(3, 5, kv_rank=7, rope_dim=2, query_rank=11)
    to_queries = 13 * 11 + 11 * 3 * (5 + 2)
    to_keys_and_values = 13 * (7 + 2) + 7 * 3 * (5 + 5)
    logits, values, softmax = 2 * (5 + 2), 2 * 5, 3
    expected = 2 * (to_queries + to_keys_and_values) + 17 * 3 * (logits + values + softmax)
    assert core.flops(19, 13, seq_len=17) == expected
    core = cfg.Mla(3, 5, kv_rank=7, rope_dim=2)
    assert core.flops(19, 13, 17) == expected - 2 * to_queries + 2 * 13 * 3 * (5 + 2)


def test_flops_of_delta_attention():
    """Of a token, in chunks of 64, whatever the sequence (H = 3, D_h = 5, rank 7, read 13)."""
    core = cfg.Kda(3, 5, conv_size=4, gate_rank=7)
    decays_and_output_gates = 2 * (2 * 13 * 7 + 2 * 7 * 3 * 5)
    betas = 2 * 13 * 3
    convolutions = 3 * 2 * 4 * (3 * 5)  # of queries, keys and values
    state = 3 * (6 * 5 * 5 + 3 * 64 * 5 + 64 * 64)
    for seq_len in (1, 1000):
        flops = core.flops(19, 13, seq_len)
        assert flops == decays_and_output_gates + betas + convolutions + state


def test_counts_of_gated_delta_net():
    """The core has 2 heads of keys, 4 of values of size 5, a decay a head, and gates."""
    shape = dict(num_key_heads=2, decays="heads", gates="full")
    core = cfg.Kda(4, 5, conv_size=3, **shape)
    taps, decays, betas = 3 * (2 * 2 + 4) * 5, 13 * 4 + 2 * 4, 13 * 4
    assert core.parameters(19, 13) == taps + decays + betas + 5
    products = 2 * (13 * 4 + 13 * 4) + 2 * taps
    assert core.flops(19, 13, 7) == products + 4 * (6 * 5 * 5 + 3 * 64 * 5 + 64 * 64)


def test_flops_of_experts():
    """Of a token: a router over all, and the experts that it meets (k = 3 of 11, 2 shared)."""
    core = cfg.Experts(num_experts=11, top_k=3, hidden_dim=7, shared=2)
    of_one = 2 * 13 * 7 + 2 * 13 * 7 + 2 * 7 * 19  # gate, up, down
    assert core.flops(19, 13, 17) == (3 + 2) * of_one + 2 * 13 * 11
    idle = core.parameters(19, 13) - core.active_parameters(19, 13)
    assert idle == (11 - 3) * (2 * 13 * 7 + 7 * 19)
    gated = dataclasses.replace(core, shared_gate=True)
    assert gated.parameters(19, 13) - core.parameters(19, 13) == 13
    assert gated.flops(19, 13, 17) - core.flops(19, 13, 17) == 2 * 13
