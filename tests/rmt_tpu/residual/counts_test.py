"""Parameters and FLOPs of every mixer: exact totals, the formulas, and the compiler."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rmt_tpu
from rmt_tpu import config as cfg
from rmt_tpu import cost as resources
from tests import models
from tests.rmt_tpu.residual import over_depth

# At the shape of gpt2-160m; recomputed by hand from the equations.
TOTALS = [
    (cfg.Sum(), 162_541_824),
    (cfg.Highway(), 190_853_376),
    (cfg.DepthLstm(), 233_366_784),
    (cfg.Hierarchical(hidden_dim=3072), 216_810_240),
    (cfg.Hierarchical(), 164_807_424),
    (cfg.Dense(), 162_541_914),
    (cfg.Mudd(), 162_799_226),
    (cfg.HyperConnections(dynamic=False), 162_542_400),
    (cfg.HyperConnections(), 162_671_472),
    (cfg.Mhc(), 164_385_672),
    (cfg.MhcLite(), 164_975_688),
    (cfg.FullAttention(), 162_580_224),
    (cfg.BlockAttention(), 162_580_224),
    (cfg.BlockAttention(query="none"), 162_541_824),
    (cfg.DeltaAttention(), 162_580_249),
    (cfg.WideStreams(), 162_542_016),
    (cfg.ResidualScalars(), 162_541_872),
]
OPTIONS = [
    cfg.FullAttention(key_gain=False),
    cfg.FullAttention(query="input", window=2),
    cfg.FullAttention(query="scalars"),
    cfg.FullAttention(query="none"),
    cfg.FullAttention(query="scalars", window=2),
    cfg.FullAttention(key_norm=False),
    cfg.FullAttention(newest_bias=3.0),
    cfg.FullAttention(newest_bias=3.0, query="none", output_site="sum"),
    cfg.FullAttention(query="scalars", output_site="sum"),
    cfg.BlockAttention(num_blocks=3, cumulative=True, output_site="newest", newest_bias=0.0),
    cfg.BlockAttention(num_blocks=3, output_site="sum", normed_embedding=True),
    cfg.BlockAttention(sublayers_per_block=4, query="scalars"),
    cfg.BlockAttention(num_blocks=3, query="input"),
    cfg.DeltaAttention(num_blocks=3, null_source=0.0),
    cfg.DeltaAttention(sublayers_per_block=1, key_gain=False),
    cfg.Mudd(),
    cfg.Dense(dilation=2),
    cfg.Dense(dilation=4, period=5),
    cfg.HyperConnections(streams=2),
    cfg.Mhc(streams=3),
    cfg.MhcLite(streams=3, init="prenorm"),
    cfg.WideStreams(streams=3),
    cfg.WideStreams(streams=2, forget=0.1),
    cfg.ResidualScalars(scalars=False),
    cfg.ResidualScalars(values=False),
    cfg.Highway(form="gated", input="raw"),
    cfg.Hierarchical(every=1),
    cfg.Hierarchical(every=4),
    cfg.Hierarchical(shared=True, hidden_dim=5),
]
label = lambda mixer: f"{mixer.kind}-" + "-".join(str(v) for v in vars(mixer).values())


def count(config: cfg.ModelConfig) -> int:
    """Parameters of the decoder itself, none of them allocated."""
    params = nnx.state(models.abstract(config), nnx.Param)
    return sum(int(np.prod(p.shape)) for p in jax.tree.leaves(params))


@pytest.mark.parametrize("mixer, total", TOTALS, ids=lambda x: x if isinstance(x, int) else x.kind)
def test_totals_at_160m(mixer, total):
    config = replace(rmt_tpu.preset("gpt2-160m"), mixer=mixer)
    assert count(config) == total
    assert sum(resources.parameters(config).values()) == total


@pytest.mark.parametrize("mixer", OPTIONS, ids=label)
def test_formulas_follow_the_options(mixer):
    config = models.model("vector", num_layers=7, mixer=mixer)
    assert sum(resources.parameters(config).values()) == count(config)


@pytest.mark.parametrize("normed", ["input", "output", "both"])
def test_formulas_with_biases_and_norms_of_outputs(normed):
    attention = cfg.Attention(3, 6, cfg.Rope(), num_kv_heads=1, output_bias=True, normed=normed)
    over_heads = {"query_key_norm": True, "query_key_norm_over": "heads"}
    attention = replace(attention, **over_heads)
    for activation in ("gelu_tanh", "swiglu"):
        layer = attention, cfg.FeedForward(22, activation, bias=True, normed=normed)
        config = models.model("vector").replace(stacks=(cfg.Stack(layer, 3),), norm_bias=True)
        assert sum(resources.parameters(config).values()) == count(config)
        site = replace(
            config, stacks=(cfg.Stack((replace(attention, output_bias=False), layer[1]), 3),)
        )
        same = normed == "input"  # W_O is of the site then
        flops = [resources.forward_flops(c, 9) for c in (config, site)]
        assert sum(flops[0].values()) == sum(flops[1].values())
        assert (flops[0]["attention"] > flops[1]["attention"]) == same


@pytest.mark.parametrize(
    "mixer",
    [cfg.FullAttention(), cfg.Dense(), cfg.Mudd(), cfg.WideStreams(), cfg.ResidualScalars()],
    ids=label,
)
def test_formulas_over_a_matrix_store(mixer):
    config = models.model("matrix", num_layers=4, mixer=mixer)
    assert sum(resources.parameters(config).values()) == count(config)


@pytest.mark.parametrize("layers, mixer, weights", [
    (12, cfg.Dense(), 90),
    (12, cfg.Dense(dilation=2), 48),
    (12, cfg.Dense(dilation=4), 27),
    (12, cfg.Dense(dilation=2, period=2), 27),
    (12, cfg.Dense(period=4), 27),
    (12, cfg.Dense(dilation=4, period=5), 5),
])  # fmt: skip
def test_dense_weights_are_the_papers(layers, mixer, weights):
    config = models.model("vector", num_layers=layers, mixer=mixer)
    assert resources.parameters(config)["mixer"] == weights


def first_of(stacked: nnx.Module) -> nnx.Module:
    """The first of stacked modules."""
    graphdef, state = nnx.split(stacked)
    return nnx.merge(graphdef, jax.tree.map(lambda p: p[0], state))


@functools.cache
def site_flops(config: cfg.ModelConfig) -> float:
    """Of the site before a feed-forward layer, for one token, by the compiler."""
    graphdef, params = nnx.split(models.abstract(config))
    shape = lambda *sizes: jax.ShapeDtypeStruct((2, 16, *sizes), jnp.float32)
    z, heads = shape(1, config.store.dim), (config.attention.num_heads, config.attention.head_dim)

    def before(params, h, z):
        decoder = nnx.merge(graphdef, params)
        state, _ = decoder.mixer.start(decoder.store, h, z)
        if isinstance(config.mixer, cfg.DepthLstm):
            site = first_of(decoder.stacks[0][0]).site
            state, _ = decoder.mixer.advance(decoder.store, state, z, site, 0)
        return state

    def advance(params, state, y):
        decoder = nnx.merge(graphdef, params)
        site = first_of(decoder.stacks[0][1]).site
        return decoder.mixer.advance(decoder.store, state, y, site, jnp.int32(1))

    state = jax.eval_shape(before, params, shape(config.store.dim), z)
    program = jax.jit(advance).lower(params, state, shape(*heads)).compile()
    return program.cost_analysis()["flops"] / 32


@pytest.mark.slow
@pytest.mark.parametrize(
    "mixer, tolerance",
    [
        (cfg.Highway(), 0.05),
        (cfg.Highway(form="gated"), 0.05),
        (cfg.DepthLstm(), 0.05),
        # The norm of each stream, which is not counted: 8 FLOPs a number beside 24. (Of static ones
        # the compiler writes the streams twice, rather than read them.)
        (cfg.HyperConnections(), 0.4),
        (cfg.Mhc(), 0.1),
        (cfg.MhcLite(), 0.1),
    ],
    ids=lambda x: label(x) if isinstance(x, cfg.Mixer) else "",
)
def test_flops_are_near_the_compilers(mixer, tolerance):
    """What a mixer adds to a site of the plain model, beside activations and other small things."""
    # One narrow head, so that the mixer is most of it.
    sizes = dict(num_layers=1, num_heads=1, head_dim=8, store=cfg.VectorStore(256))
    config = models.model("vector", mixer=mixer, **sizes)
    added = site_flops(config) - site_flops(replace(config, mixer=cfg.Sum()))
    sites = 1 if isinstance(mixer, cfg.DepthLstm) else 2
    expected = resources.forward_flops(config, 8)["mixer"] / sites
    assert added == pytest.approx(expected, rel=tolerance)


def test_flops_of_nodes_are_near_the_compilers():
    config = models.model(
        "vector", num_layers=4, mixer=cfg.Hierarchical(), store=cfg.VectorStore(256)
    )
    mixer, counted = models.abstract(config).mixer, 0
    x = jax.ShapeDtypeStruct((2, 16, 256), jnp.float32)
    for module, inputs, node in ((mixer.first, 2, lambda m: m), (mixer.others, 3, first_of)):
        graphdef, params = nnx.split(module)
        apply = lambda p, x, g=graphdef, node=node: node(nnx.merge(g, p))(x)
        program = jax.jit(apply).lower(params, [x] * inputs).compile()
        counted += program.cost_analysis()["flops"] / 32
    assert counted == pytest.approx(resources.forward_flops(config, 8)["mixer"], rel=0.05)


def test_flops_of_depth_attention():
    """A logit and a term of the sum for each source: 4 D."""
    D, L = 20, 6
    flops = lambda mixer: resources.forward_flops(
        models.model("vector", num_layers=L, mixer=mixer), 8
    )["mixer"]
    assert flops(cfg.FullAttention()) == 4 * D * sum(range(1, 2 * L + 2))
    assert flops(cfg.FullAttention(query="none")) == 2 * D * sum(range(1, 2 * L + 2))
    assert flops(cfg.FullAttention(window=1)) == 4 * D * (1 + 2 * 2 * L)
    # Sites of 4 sublayers see 1 source more each time, and the first of a block no running sum.
    blocks = [1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4]
    assert flops(cfg.BlockAttention(sublayers_per_block=4)) == 4 * D * sum(blocks)
    # Additions make sources cumulative, and sum 4 rows at an output site without attention.
    block = functools.partial(cfg.BlockAttention, sublayers_per_block=4)
    assert flops(block(output_site="newest")) == 4 * D * sum(blocks[:-1])
    assert flops(block(output_site="sum")) == 4 * D * sum(blocks[:-1]) + 4 * D
    # With cumulative sources, sites 0, 4, 8 and 12 also attend to the sum so far.
    assert flops(block(cumulative=True)) == 5 * D * sum(blocks) + 4 * D * 4
    newest = block(cumulative=True, output_site="newest")
    assert flops(newest) == 5 * D * sum(blocks[:-1]) + 4 * D * 3 + 4 * D
    for mixer in (block(), block(cumulative=True), cfg.FullAttention(cumulative=True)):
        mix = lambda k, n=2 * L, mixer=mixer: (
            len(over_depth.plain_sources_of(k, mixer.sublayers_a_block(n)))
            + (mixer.cumulative and over_depth.has_ended(k, mixer, n))
        )
        adds = mixer.cumulative * D * sum(mixer.sources(2 * L))
        assert flops(mixer) == 4 * D * sum(map(mix, range(2 * L + 1))) + adds
    # A term of the sum and a logit for each delta, and the gate.
    sites = 2 * L + 1
    deltas = sum(blocks) - sites
    assert flops(cfg.DeltaAttention(sublayers_per_block=4)) == 4 * D * deltas + 2 * D * sites
    assert flops(cfg.Dense()) == 2 * D * 27
    # Networks from D numbers to as many hidden units as weights, and a term for each weight.
    weights = [4 * n for n in range(2, L + 1)] + [L + 1]
    assert flops(cfg.Mudd()) == sum(2 * (D * n + n * n + D * n) for n in weights)
