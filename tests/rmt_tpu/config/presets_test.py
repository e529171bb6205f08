"""Presets are the papers' rows: sizes, and every name."""

import jax
import numpy as np
import pytest
from flax import nnx

import rmt_tpu
from rmt_tpu import cost as resources
from rmt_tpu.config.presets import run
from rmt_tpu.data import ByteTokenizer
from rmt_tpu.errors import UsageError
from tests.tiers import later

# Recomputed from the papers' shapes (untied, with norms and 512 positions), and as printed there.
PARAMETERS = {
    "gpt2-49m": (49.4e6, 49e6),
    "gpt2-160m": (162.5e6, 160e6),
    "gpt2-260m": (264.0e6, 260e6),
    "gpt2-405m": (405.5e6, 405e6),
    "rmt-46m": (45.9e6, 46e6),
    "rmt-134m": (134.3e6, 134e6),
    "rmt-206m": (206.3e6, 206e6),
    "rmt-305m": (305.1e6, 305e6),
}
RESIDUAL_SIZES = {"rmt-46m": 1024, "rmt-134m": 2048, "rmt-206m": 3072, "rmt-305m": 4096}


# One of each system and of each kind of cores, and one with learned positions.
FEW = ["rmt-46m", *(name for name in rmt_tpu.presets() if name.endswith("-tiny"))]


def count(name):
    """Parameters of the decoder itself, none of them allocated."""
    abstract = nnx.eval_shape(lambda: rmt_tpu.Decoder(rmt_tpu.preset(name), rngs=nnx.Rngs(0)))
    return sum(int(np.prod(p.shape)) for p in jax.tree.leaves(nnx.state(abstract)))


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts_are_the_papers(name):
    recomputed, printed = PARAMETERS[name]
    assert count(name) == pytest.approx(recomputed, rel=0.005)
    assert count(name) == pytest.approx(printed, rel=0.02)


@pytest.mark.parametrize("name", FEW + later(*(n for n in rmt_tpu.presets() if n not in FEW)))
def test_analytic_parameters_are_those_of_the_decoder(name):
    assert sum(resources.parameters(rmt_tpu.preset(name)).values()) == count(name)


@pytest.mark.parametrize(
    "name, parameters, active",
    [
        ("kimi-linear-48b-a3b", 49_122_681_728, 2_729.5),
        ("attnres-kimi-48b", 49_122_681_728 + 55 * 2 * 2304, 2_729.7),
        ("attnres-kimi-194m", 3_417_435_244, 190.7),
        ("attnres-kimi-241m", 4_254_517_237, 237.3),
        ("attnres-kimi-296m", 5_222_954_124, 291.9),
        ("attnres-kimi-436m", 7_696_133_744, 431.0),
        ("attnres-kimi-528m", 9_362_942_076, 522.6),
        # What the tensors of its files have, and the histograms of scores.
        ("k3-2.8t", 2_779_484_476_000 + 92 * 896 * 1024, 103_099.6),
    ],
)
def test_kimi_models_have_what_its_configuration_gives(name, parameters, active):
    """To the unit: KDA and MLA layers, experts, embeddings; 55 sites of a query and a gain."""
    config = rmt_tpu.preset(name)
    assert sum(resources.parameters(config).values()) == parameters
    assert resources.active_parameters(config) / 1e6 == pytest.approx(active, abs=0.06)


@pytest.mark.parametrize(
    "name, rate",
    [("gpt2-tiny", 5e-3), ("attnres-tiny", 5e-3), ("rmt-tiny", 2e-2), ("rmt-attnres-tiny", 2e-2)],
)
def test_tiny_models_have_the_rate_and_the_warmup_of_the_search(name, rate):
    optimizer = run(name).train.optimizer
    assert (optimizer.learning_rate, optimizer.warmup_fraction) == (rate, 0.2)


@pytest.mark.parametrize("name, parameters", {"gpt2-tiny": 853_376, "rmt-tiny": 596_352}.items())
def test_tiny_models_have_the_vocabulary_of_bytes(name, parameters):
    """As the command line and README's table have them."""
    config = rmt_tpu.preset(name)
    assert config.vocab_size == ByteTokenizer.vocab_size
    assert sum(resources.parameters(config).values()) == parameters


@pytest.mark.parametrize("name", RESIDUAL_SIZES)
def test_residual_sizes(name):
    assert rmt_tpu.preset(name).residual_size == RESIDUAL_SIZES[name]


def test_the_sweep_over_key_dim_has_the_papers_residual_sizes():
    names = ["rmt-134m-k6", "rmt-134m-k12", "rmt-134m-k24", "rmt-134m", "rmt-134m-k48"]
    sizes = [rmt_tpu.preset(name).residual_size for name in [*names, "rmt-134m-k64"]]
    assert sizes == [384, 768, 1536, 2048, 3072, 4096]


def test_training_budgets_are_the_papers():
    for name, tokens in {"gpt2-49m": 212e6, "rmt-134m": 1.1e9, "rmt-305m": 6.04e9}.items():
        config = run(name)
        trained = config.train.steps * config.train.batch_size * config.data.seq_len
        assert trained == pytest.approx(tokens, rel=0.001)


def test_sweeps_are_trained_as_appendix_c_says():
    """C.3 and C.4: 50,000 steps of 64 sequences of 512, at 1e-2."""
    for name in ("rmt-134m-k6", "rmt-134m-k64", "highway-191m", "depth-lstm-233m"):
        train = run(name).train
        assert (train.steps, train.batch_size) == (50_000, 64)
        assert train.optimizer.learning_rate == 1e-2
    assert run("rmt-134m").train.optimizer.learning_rate == 2e-3


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(UsageError, match="preset 'rmt-350m' is unknown; did you mean 'rmt-305m'"):
        rmt_tpu.preset("rmt-350m")
