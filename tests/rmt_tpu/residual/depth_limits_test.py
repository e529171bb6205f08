"""Attention over depth where it must equal something simpler, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rmt_tpu import config as cfg
from rmt_tpu.errors import UsageError
from rmt_tpu.layers import stacks
from tests import models
from tests.rmt_tpu.residual import checks
from tests.tiers import later


@pytest.mark.slow
@pytest.mark.parametrize("store", ["vector", "matrix"])
def test_blocks_of_one_sublayer_are_full_attention(store):
    full = models.model(store, mixer=cfg.FullAttention())
    blocks = models.model(store, mixer=cfg.BlockAttention(sublayers_per_block=1))
    params = jax.tree.map(np.float32, models.random_parameters(full))
    np.testing.assert_array_equal(
        checks.normed_output(blocks, params), checks.normed_output(full, params)
    )


@pytest.mark.slow
def test_the_first_query_is_never_used():
    """Its one source is the embedding, whatever it is."""
    config = models.model("vector", mixer=cfg.BlockAttention(layers_per_block=1))
    params = jax.tree.map(np.float32, models.random_parameters(config))
    gradient, _ = checks.gradients_and_logits(config)(params)
    of_layers = np.asarray(gradient["stacks"][0][0]["site"]["mix"]["query"])
    assert (of_layers[0] == 0).all()
    assert (np.abs(of_layers[1:]).max(axis=1) > 1e-4).all()


@pytest.mark.parametrize("store", later("vector", "matrix"))
def test_the_newest_cumulative_source_alone_is_the_plain_residual(store):
    """With a bias of 60, in float64: other sources have weights below 1e-20."""
    with jax.enable_x64(True):
        mixer = cfg.BlockAttention(
            sublayers_per_block=3, newest_bias=60.0, cumulative=True, output_site="newest"
        )
        plain, config = (
            models.model(store, mixer=mixer, compute_dtype="float64")
            for mixer in (cfg.Sum(), mixer)
        )
        params = models.random_parameters(config)
        bias = lambda path, x: np.full_like(x, 60) if path[-1].key == "newest_bias" else x
        params = jax.tree_util.tree_map_with_path(bias, params)
        found = checks.normed_output(config, params)
        expected = checks.normed_output(plain, checks.plain_parameters(params))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11 * np.abs(expected).max())


def test_a_taken_slice_gives_its_gradient_to_the_stack():
    stack = np.arange(12, dtype=np.float32).reshape(4, 3)

    def objective(stack):
        total = 0.0
        for i in (2, 0, 1, 3):
            stack, row = stacks.slice_once(stack, jnp.int32(i))
            total = total + jnp.sum((i + 1) * jnp.sin(row))
        return total

    expected = (np.arange(4.0)[:, None] + 1) * np.cos(stack)
    np.testing.assert_allclose(jax.jit(jax.grad(objective))(stack), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("mixer", "message"),
    [
        (cfg.Dense(period=4), "Dense.period=4 is more than num_layers=3; legal: 1 to 3"),
        (cfg.Dense(dilation=4), "Dense.dilation=4 is more than num_layers=3; legal: 1 to 3"),
        (cfg.BlockAttention(num_blocks=5), "num_blocks=5 cannot divide 6 .* legal: 3 or 6"),
        (cfg.BlockAttention(sublayers_per_block=7), "per_block=7 .* 6 sublayers; legal: 1 to 6"),
        (cfg.BlockAttention(layers_per_block=4), "per_block=4 .* 3 layers; legal: 1 to 3"),
        (cfg.FullAttention(window=7), "window=7 is more than the 6 sublayers .* legal: 1 to 6"),
        (cfg.FullAttention(phase_layers=4), "phase_layers=4 is more than num_layers=3"),
        (cfg.FullAttention(num_heads=3), "num_heads=3 does not divide the residual's 20 numbers"),
    ],
)
def test_what_does_not_fit_the_depth_is_refused_in_one_line(mixer, message):
    with pytest.raises(UsageError, match=message) as error:
        models.model("vector", mixer=mixer)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("mixer", "message"),
    [
        (cfg.FullAttention(phase_layers=1), "than num_layers=0; legal: null for an auto"),
        (cfg.BlockAttention(layers_per_block=1), "0 layers; legal: null, or sublayers_per_block=1"),
    ],
)
def test_a_model_of_one_sublayer_has_no_layers_to_count(mixer, message):
    stacks = (cfg.Stack((cfg.Attention(2, 4),)),)
    with pytest.raises(UsageError, match=message):
        cfg.ModelConfig(stacks, cfg.VectorStore(8), mixer)


def test_means_have_no_keys():
    with pytest.raises(UsageError, match="FullAttention.query='none' has no keys.*num_heads=2;"):
        cfg.FullAttention(query="none", num_heads=2)
    with pytest.raises(UsageError, match="BlockAttention.query='none' has no keys.*=False and"):
        cfg.BlockAttention(query="none", key_norm=False)


def test_learned_logits_have_no_keys():
    with pytest.raises(UsageError, match="FullAttention.query='scalars' has no keys.*heads=2;"):
        cfg.FullAttention(query="scalars", num_heads=2)
    with pytest.raises(UsageError, match="BlockAttention.query='scalars' has no keys.*=False and"):
        cfg.BlockAttention(query="scalars", key_norm=False)


def test_two_block_sizes_are_refused():
    with pytest.raises(UsageError, match="num_blocks=2 and layers_per_block=1 both set"):
        cfg.BlockAttention(num_blocks=2, layers_per_block=1)


@pytest.mark.parametrize("name", ["hc", "mhc", "mhc-lite", "highway", "lstm", "hierarchical"])
def test_some_mixers_need_a_vector_store(name):
    mixer = models.MIXERS[name]
    message = f"mixer={mixer.kind} is defined for a vector store only; legal .*: sum, "
    with pytest.raises(UsageError, match=message):
        models.model("matrix", mixer=mixer)


def test_policies_that_do_not_go_with_a_mixer_are_refused():
    with pytest.raises(
        UsageError,
        match="remat='none' cannot be used with mixer=dense; legal: dots, offload, full, blocks",
    ):
        models.model("vector", mixer=cfg.Dense(), remat="none")
    with pytest.raises(
        UsageError, match="remat='blocks' cannot be used with mixer=sum; legal: none, dots"
    ):
        models.model("vector", remat="blocks")


def test_blocks_can_be_counted_in_layers_or_sublayers():
    sizes = [
        cfg.BlockAttention(**{name: size}).sublayers_a_block(48)
        for name, size in [("num_blocks", 8), ("sublayers_per_block", 6), ("layers_per_block", 3)]
    ]
    assert sizes == [6, 6, 6]
    assert cfg.BlockAttention().sublayers_a_block(48) == 6
    # 10 sublayers in eight blocks, or in four: the last one is smaller.
    sizes = [cfg.BlockAttention(num_blocks=n).sublayers_a_block(10) for n in (None, 4)]
    assert sizes == [2, 3]
    # 93 layers in blocks of 12: seven full ones after the embedding, and 9 layers in the last.
    config = models.model("vector", num_layers=93, mixer=cfg.BlockAttention(layers_per_block=12))
    assert -(-2 * 93 // config.mixer.sublayers_a_block(2 * 93)) == 8
