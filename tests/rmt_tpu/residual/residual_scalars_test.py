"""Residual scalars and the value residual against their equations, in float64, on both stores."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rmt_tpu import config as cfg
from rmt_tpu import cost
from rmt_tpu.errors import UsageError
from rmt_tpu.training import depth_rate
from tests import models
from tests.rmt_tpu import plain
from tests.rmt_tpu.residual import checks
from tests.tiers import later

BOTH = cfg.ResidualScalars()
SCALARS, VALUES = cfg.ResidualScalars(values=False), cfg.ResidualScalars(scalars=False)
GROUPED = cfg.Attention(4, 6, cfg.Rope(), False, num_kv_heads=2, query_key_norm=True, bias=True)
FORWARD = cfg.FeedForward(hidden_dim=22)
LAYER = (models.model().attention, FORWARD)
# Layers of one kind; grouped queries; and a first layer without attention, and a last one that ends
# with it.
STACKS = {
    "alike": (cfg.Stack(LAYER, 3),),
    "grouped": (cfg.Stack((GROUPED, FORWARD), 2),),
    "later": (cfg.Stack((FORWARD, FORWARD)), cfg.Stack(LAYER, 2), cfg.Stack(LAYER[::-1])),
}
CASES = [
    ("vector", BOTH, "alike"),
    *later(
        ("matrix", BOTH, "alike"),
        ("vector", SCALARS, "alike"),
        ("matrix", SCALARS, "alike"),
        ("vector", VALUES, "alike"),
        ("matrix", VALUES, "alike"),
        ("vector", BOTH, "grouped"),
        ("matrix", BOTH, "grouped"),
        ("vector", BOTH, "later"),
        ("matrix", VALUES, "later"),
    ),
]


def label(x):
    if isinstance(x, str):
        return x
    return " and ".join(name for name in ("scalars", "values") if getattr(x, name))


def model(store, mixer, stacks="alike", **changes) -> cfg.ModelConfig:
    config = models.model(store, **changes)
    sizes = {"store": replace(config.store, vectors=3)} if store == "matrix" else {}
    return config.replace(stacks=STACKS[stacks], mixer=mixer, **sizes)


def reference(params, tokens, config):
    """The equations, layer by layer."""
    mixer, depth, now = config.mixer, config.num_sublayers, {}

    def mix(k, site, written):
        now["h"] = now["h"] + written[k] if k else written[0]
        if mixer.scalars and k % 2 == 0 and k < depth:
            a, b = (site["mix"][f"{name}_scale"] for name in ("residual", "embedding"))
            now["h"] = a * now["h"] + b * written[0]
        return now["h"]

    def values(site, v):
        if not mixer.values:
            return v
        if "v" not in now:
            now["v"] = v
            return v
        return site["mix"]["first_value_scale"] * now["v"] + site["mix"]["value_scale"] * v

    return plain.model(params, tokens, config, mix, values)


@pytest.mark.parametrize(("store", "mixer", "stacks"), CASES, ids=label)
def test_follows_the_equations(store, mixer, stacks):
    with jax.enable_x64(True):
        config = model(store, mixer, stacks, compute_dtype="float64", remat="none")
        checks.assert_follows_equations(config, reference)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", [BOTH, SCALARS, VALUES], ids=label)
def test_remat_changes_nothing(mixer):
    with jax.enable_x64(True):
        checks.assert_remat_changes_nothing(checks.model(mixer))


def test_starts_with_the_configured_scales_where_they_are_used():
    mixer = cfg.ResidualScalars(
        residual_scale=1.1, embedding_scale=0.1, first_value_scale=0.5, value_scale=0.5
    )
    _, params = models.split(model("vector", mixer))
    attention, forward = params["stacks"][0].values()
    scales = {"residual": 1.1, "embedding": 0.1, "first_value": 0.5, "value": 0.5}
    assert attention["site"]["mix"].keys() == {f"{name}_scale" for name in scales}
    for name, scale in scales.items():
        np.testing.assert_array_equal(
            attention["site"]["mix"][f"{name}_scale"], np.full(3, scale, np.float32)
        )
    assert not forward["site"].get("mix") and not params["final_site"].get("mix")


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({}, "starts as the plain model"),
        ({"value_scale": 0.5, "first_value_scale": 0.5}, "does not start as the plain model"),
        ({"value_scale": 0.5, "values": False}, "starts as the plain model"),
        ({"embedding_scale": 0.1}, "does not start as the plain model"),
        ({"embedding_scale": 0.1, "scalars": False}, "starts as the plain model"),
    ],
)
def test_reports_say_how_it_starts(changes, note):
    assert cfg.ResidualScalars(**changes).note == f"{note}; its factors do not decay"


def test_only_the_scale_of_the_residual_learns_at_a_rate_of_its_own():
    def factors(mixer, **train):
        config = model("vector", mixer).replace(stacks=(cfg.Stack(LAYER, 48),))
        train = cfg.TrainConfig(batch_size=32, optimizer=cfg.AdamW(learning_rate=0.028), **train)
        run = cfg.RunConfig(model=config, train=train, data=cfg.DataConfig(seq_len=32))
        return depth_rate.factors(run)

    # One step may move the logarithm of the residual's scale by 0.07 over all 48 layers.
    assert factors(BOTH) == {"residual_scale": pytest.approx(0.07 / 0.028 / 48)}
    assert factors(BOTH, depth_rate=0.01) == {"residual_scale": pytest.approx(0.01)}
    assert factors(VALUES) == {}


@pytest.mark.parametrize(
    ("cores", "found"),
    [
        ((cfg.Kda(3, 6), FORWARD, *LAYER), "attention with 3 value heads of 6, kda"),
        ((cfg.Mla(3, 6, kv_rank=4, rope_dim=2), FORWARD), "mla"),
        ((GROUPED, FORWARD, *LAYER), "attention with 2 value heads of 6, .* 3 value heads of 6"),
        ((FORWARD, FORWARD), "no attention"),
    ],
)
def test_values_of_other_shapes_are_refused(cores, found):
    build = lambda mixer: cfg.ModelConfig((cfg.Stack(cores),), cfg.VectorStore(20), mixer)
    with pytest.raises(UsageError, match=rf"ResidualScalars.values=True .* {found}; legal: False"):
        build(BOTH)
    assert build(SCALARS).mixer == SCALARS  # scalars need no values


def test_scalars_need_layers_of_two_sublayers_and_values_do_not():
    cores = (*LAYER, FORWARD)
    build = lambda mixer: cfg.ModelConfig((cfg.Stack(cores, 2),), cfg.VectorStore(20), mixer)
    with pytest.raises(UsageError, match="mixer=residual_scalars needs layers of two sublayers"):
        build(BOTH)
    assert cost.parameters(build(VALUES))["mixer"] == 2 * 2


def test_neither_option_is_refused():
    with pytest.raises(
        UsageError, match=r"ResidualScalars.scalars=False with values=False .*mixer=sum"
    ):
        cfg.ResidualScalars(scalars=False, values=False)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", [BOTH, SCALARS, VALUES], ids=label)
def test_flops_are_near_the_compilers(mixer):
    """The FLOPs that the mixer adds to an attention site after the first are those it declares."""
    sizes = {"num_layers": 2, "num_heads": 2, "head_dim": 64, "store": cfg.VectorStore(256)}
    config = models.model("vector", mixer=mixer, **sizes)
    added = _site_flops(config) - _site_flops(config.replace(mixer=cfg.Sum()))
    # Each weighted sum of two arrays is counted as 4 FLOPs a number, and is a sum of two products.
    # The compiler counts 1 FLOP a number for the choice of x_0, and for each of the two choices of
    # values. It also adds W_O y to h twice: once for x_0, and once for the scaled residual.
    others = 2 * mixer.scalars * 256 + 2 * mixer.values * 128
    products = cost.forward_flops(config, 8)["mixer"] / 2 * 3 / 4
    assert added == pytest.approx(products + others, rel=0.02)


def _site_flops(config: cfg.ModelConfig) -> float:
    """Per token, by the compiler."""
    graphdef, params = nnx.split(models.abstract(config))
    shape = lambda *sizes: jax.ShapeDtypeStruct((2, 16, *sizes), jnp.float32)
    h, y = shape(256), shape(1, 256)

    def start(params, h, y):
        decoder = nnx.merge(graphdef, params)
        return decoder.mixer.start(decoder.store, h, y)[0]

    def advance(params, state, y, index):
        decoder = nnx.merge(graphdef, params)
        stacked, state_of_site = nnx.split(decoder.stacks[0][0].site)
        site = nnx.merge(stacked, jax.tree.map(lambda p: p[1], state_of_site))
        return decoder.mixer.advance(decoder.store, state, y, site, index)

    state = jax.eval_shape(start, params, h, y)
    lowered = jax.jit(advance).lower(params, state, y, jax.ShapeDtypeStruct((), jnp.int32))
    return lowered.compile().cost_analysis()["flops"] / 32
