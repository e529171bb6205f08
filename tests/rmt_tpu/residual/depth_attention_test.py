"""Attention over depth and DenseFormer: against their equations, on both stores, in float64."""

import jax
import pytest

from rmt_tpu import config as cfg
from rmt_tpu.residual import whole_tiles
from tests import models
from tests.rmt_tpu.residual import checks, over_depth
from tests.tiers import later

LAYERS = 4
FULL = {
    "full": cfg.FullAttention(),
    "full, passes of one layer": cfg.FullAttention(phase_layers=1),
    "full, one pass": cfg.FullAttention(phase_layers=LAYERS),
    "full, passes that do not divide": cfg.FullAttention(phase_layers=3, key_gain=False),
}
BLOCKS = {
    "2 sublayers": cfg.BlockAttention(sublayers_per_block=2),
    "1 layer": cfg.BlockAttention(layers_per_block=1),
    "3 sublayers": cfg.BlockAttention(sublayers_per_block=3),
    "6 sublayers, 2 left over": cfg.BlockAttention(sublayers_per_block=6),
    "5 sublayers": cfg.BlockAttention(num_blocks=2),
    "1 block": cfg.BlockAttention(num_blocks=1),
    "no gain": cfg.BlockAttention(num_blocks=4, key_gain=False),
}
DENSE = {
    "dense": cfg.Dense(),
    "dense, dilated": cfg.Dense(dilation=2),
    "dense, every other layer": cfg.Dense(dilation=2, period=2),
}
ABLATIONS = {
    "input query": cfg.FullAttention(query="input"),
    "scalars": cfg.FullAttention(query="scalars"),
    "sigmoid": cfg.FullAttention(weights="sigmoid"),
    "no key norm": cfg.FullAttention(key_norm=False),
    "heads": cfg.FullAttention(num_heads=2),
    "window": cfg.FullAttention(window=3),
    "blocks, input query": cfg.BlockAttention(sublayers_per_block=3, query="input"),
    "blocks, scalars": cfg.BlockAttention(sublayers_per_block=4, query="scalars"),
    "blocks, heads, no key norm": cfg.BlockAttention(
        sublayers_per_block=4, num_heads=2, key_norm=False
    ),
}
OPTIONS = {
    "mean": cfg.BlockAttention(sublayers_per_block=2, query="none"),
    "mean of 3 sublayers": cfg.BlockAttention(sublayers_per_block=3, query="none"),
    "full mean": cfg.FullAttention(query="none"),
    "sigmoid mean": cfg.BlockAttention(sublayers_per_block=3, query="none", weights="sigmoid"),
}
# Of released models and other trainers. The last two are open-attention-residuals' and marin's.
TRAINERS = {
    "bias": cfg.FullAttention(newest_bias=3.0),
    "blocks, bias": cfg.BlockAttention(sublayers_per_block=3, newest_bias=3.0),
    "biases alone": cfg.BlockAttention(sublayers_per_block=3, newest_bias=1.0, query="none"),
    "bias, sigmoid, heads": cfg.FullAttention(newest_bias=1.0, weights="sigmoid", num_heads=2),
    "cumulative": cfg.BlockAttention(sublayers_per_block=3, cumulative=True),
    "cumulative, window": cfg.FullAttention(cumulative=True, window=3),
    "cumulative, input query": cfg.FullAttention(cumulative=True, query="input"),
    "cumulative, scalars": cfg.BlockAttention(
        sublayers_per_block=3, cumulative=True, query="scalars", newest_bias=1.0
    ),
    "cumulative, sigmoid": cfg.FullAttention(cumulative=True, weights="sigmoid", newest_bias=1.0),
    "cumulative, output sum": cfg.FullAttention(cumulative=True, output_site="sum"),
    "output sum": cfg.BlockAttention(sublayers_per_block=3, output_site="sum"),
    "output newest": cfg.BlockAttention(sublayers_per_block=3, output_site="newest"),
    "full, output newest": cfg.FullAttention(output_site="newest"),
    "output sum, scalars": cfg.FullAttention(query="scalars", output_site="sum"),
    "normed embedding": cfg.BlockAttention(sublayers_per_block=3, normed_embedding=True),
    "full, normed embedding": cfg.FullAttention(normed_embedding=True),
    "normed embedding, heads": cfg.FullAttention(normed_embedding=True, num_heads=2),
    "open": cfg.BlockAttention(
        num_blocks=2, newest_bias=3.0, cumulative=True, output_site="newest"
    ),
    "marin": cfg.BlockAttention(
        num_blocks=2, key_gain=False, normed_embedding=True, output_site="sum"
    ),
}


ALL = FULL | BLOCKS | DENSE | ABLATIONS | OPTIONS | TRAINERS
MATRIX = ["full", "3 sublayers", "6 sublayers, 2 left over", "dense", "input query", *OPTIONS]
MATRIX += ["blocks, bias", "full, normed embedding", "open", "marin"]
SYSTEMS = [("vector", name) for name in ALL] + [("matrix", name) for name in MATRIX]
# Both stores and both backward schedules.
FAST = [
    ("vector", "full", "full"),
    ("matrix", "6 sublayers, 2 left over", "full"),
    ("vector", "dense, dilated", "blocks"),
    ("vector", "open", "full"),
    ("vector", "marin", "full"),
]
EVERY = [(*system, remat) for system in SYSTEMS for remat in ("full", "blocks")]


@pytest.mark.parametrize(
    ("store", "name", "remat"), FAST + later(*(case for case in EVERY if case not in FAST))
)
def test_equals_the_equations_and_so_do_its_gradients(store, name, remat):
    """Logits, and the gradients by both backward schedules, in float64."""
    with jax.enable_x64(True):
        config = models.model(
            store, num_layers=LAYERS, mixer=ALL[name], remat=remat, compute_dtype="float64"
        )
        checks.assert_follows_equations(config, over_depth.reference)


@pytest.mark.slow
def test_a_stack_of_one_layer_may_end_with_attention():
    """Then its first site writes directly, and the site after it by W_O."""
    with jax.enable_x64(True):
        config = checks.model(cfg.Dense(), remat="full")
        attention = config.attention
        config = config.replace(stacks=2 * (cfg.Stack((attention, attention)),))
        checks.assert_follows_equations(config, over_depth.reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["6 sublayers, 2 left over", *later("2 sublayers", "full", "marin")]
)
def test_vectors_held_in_whole_tiles_are_the_same_vectors(name):
    """120 numbers held as 128; and means that are subtracted are of 120, which are held so."""
    with jax.enable_x64(True):
        config = models.model(
            "vector",
            num_layers=LAYERS,
            store=cfg.VectorStore(120),
            mixer=ALL[name],
            norm="rmsnorm",
            compute_dtype="float64",
        )
        assert whole_tiles.tiles(config) == (120, 128)
        checks.assert_follows_equations(config, over_depth.reference)
    for changes in ({"norm": "layernorm"}, {"mixer": cfg.Sum()}, {"store": cfg.VectorStore(12)}):
        kept = whole_tiles.tiles(config.replace(**changes))
        assert kept.size == kept.padded
