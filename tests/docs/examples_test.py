"""The example in plain JAX computes what the product's decoder and its training step compute."""

import dataclasses
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import rmt_tpu
from rmt_tpu import config as cfg
from rmt_tpu.data import Batch
from rmt_tpu.layers.parameters import metadata
from rmt_tpu.training.optimizer import make_optimizer
from rmt_tpu.training.step import batch_loss
from tests import models
from tests.closeness import assert_close
from tests.tiers import later

# The source tree itself: under Bazel, this file is a link to there.
EXAMPLE = Path(__file__).resolve().parents[2] / "docs/examples/rmt_in_200_lines.py"
# float64, relative to the largest entry of each array: rounding over some hundred operations.
BOUND = 1e-10
# Of 4 heads ALiBi has slopes that float32, in which the product has them, holds exactly.
LAYERS, RANK, KEY_DIM, VALUE_DIM, HIDDEN_DIM, VOCAB, LENGTH = 2, 4, 5, 6, 10, 13, 7


@pytest.fixture(scope="module")
def example():
    """Load the example by its path, as a module."""
    spec = importlib.util.spec_from_file_location("rmt_in_200_lines", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small(positions: cfg.Positions) -> cfg.ModelConfig:
    """Return the preset rmt-tiny made smaller, in float64, with training's schedule."""
    tiny = rmt_tpu.preset("rmt-tiny")
    attention = dataclasses.replace(
        tiny.attention, num_heads=RANK, head_dim=VALUE_DIM, positions=positions
    )
    return tiny.replace(
        num_layers=LAYERS,
        attention=attention,
        feed_forward=dataclasses.replace(tiny.feed_forward, hidden_dim=HIDDEN_DIM),
        store=cfg.MatrixStore(KEY_DIM),
        vocab_size=VOCAB,
        compute_dtype="float64",
        remat="reversible",
    )


def converted(params: dict) -> dict:
    """Convert a decoder's parameters, or gradients of them, to the example's dict.

    A site's storage keys write what the sublayer before it has computed. The decoder has data
    vectors side by side, entry `v * R + r`; the example keeps the axes R and D_v apart.
    """
    attention, feed_forward = params["stacks"][0][0], params["stacks"][0][1]
    embedding, last = params["embedding"], params["final_site"]
    written = jnp.concatenate([attention["site"]["store_keys"], last["store_keys"][None]])
    r_Q, r_K, r_V = jnp.split(attention["site"]["read_keys"], 3, axis=1)

    def apart(x, axis):
        axis = axis % x.ndim
        shape = (*x.shape[:axis], VALUE_DIM, RANK, *x.shape[axis + 1 :])
        return x.reshape(shape).swapaxes(axis, axis + 1)

    found = {
        "E": apart(embedding["tokens"], -1),
        "w_E": written[0],
        "gain_A": attention["site"]["gain"],
        "r_Q": r_Q,
        "r_K": r_K,
        "r_V": r_V,
        "w_O": feed_forward["site"]["store_keys"],
        "gain_FF": feed_forward["site"]["gain"],
        "r_FF": feed_forward["site"]["read_keys"],
        "W_1": apart(feed_forward["core"]["w_1"], -2),
        "W_2": apart(feed_forward["core"]["w_2"], -1),
        "w_FF": written[1:],
        "gain_U": last["gain"],
        "r_U": last["read_keys"],
        "W_U": apart(params["unembedding"]["kernel"], -2),
    }
    if "positions" in embedding:
        positions = apart(embedding["positions"], -1)
        found |= {"P": positions, "w_PE": params["store"]["position_keys"]}
    return found


@pytest.mark.parametrize(
    "positions", [cfg.Alibi(), *later(cfg.Learned(LENGTH))], ids=lambda positions: positions.kind
)
def test_it_equals_the_product_in_float64(example, positions):
    """Compare logits, loss, gradients, and parameters after one step of AdamW."""
    rng = np.random.default_rng(0)
    tokens, targets = jnp.asarray(rng.integers(0, VOCAB, (2, 2, LENGTH), dtype=np.int32))
    ones = jnp.ones_like(tokens)
    config = example.Config(
        vocab_size=VOCAB,
        length=LENGTH,
        layers=LAYERS,
        rank=RANK,
        key_dim=KEY_DIM,
        value_dim=VALUE_DIM,
        hidden_dim=HIDDEN_DIM,
        alibi=isinstance(positions, cfg.Alibi),
        steps=20,  # the first has the peak
        learning_rate=2**-7,  # which float32 holds: a schedule is of int32, and so in float32
        weight_decay=0.1,
        z_loss=1e-2,
    )
    with jax.enable_x64(True):
        params = jax.tree.map(jnp.asarray, models.random_parameters(small(positions)))
        found = jax.jit(lambda params: of_example(example, config, params, tokens, targets))(
            converted(params)
        )
        batch = Batch(tokens, targets, ones, ones.astype(jnp.float64))
        wanted = jax.jit(lambda params: of_product(small(positions), config, params, batch))(params)
        assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype("float64")}
        logits, loss, gradients, after = wanted
        wanted = logits, loss, converted(gradients), converted(after)
        assert_close(found, wanted, BOUND)
        moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), wanted[3], converted(params))
        assert min(moved.values()) > 1e-3


def of_example(example, config, params, tokens, targets):
    """Return the example's logits, loss, gradients and parameters after a step."""
    logits = example.model(config, params, tokens)
    gradients = jax.grad(example.loss)(params, config, tokens, targets)
    state = example.optimizer(config).init(params)
    after, _, loss = example.train_step(config, params, state, tokens, targets)
    return logits, loss, gradients, after


def of_product(model, config, params, batch):
    """Return what `of_example` does, from the decoder and the optimizer of training."""
    abstract = models.abstract(model)
    graphdef = nnx.graphdef(abstract)
    logits = nnx.merge(graphdef, params)(batch.inputs)

    def mean_loss(params):
        summed = batch_loss(graphdef, params, batch, z_loss=config.z_loss)
        return summed.objective / batch.inputs.size

    loss, gradients = jax.value_and_grad(mean_loss)(params)
    optimizer = product_optimizer(config, metadata(abstract, "role"), metadata(abstract, "axes"))
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    return logits, loss, gradients, optax.apply_updates(params, updates)


def product_optimizer(config, roles, axes):
    """Make AdamW as training does, with the example's numbers."""
    adamw = cfg.AdamW(learning_rate=config.learning_rate, weight_decay=config.weight_decay)
    rates = jax.tree.map(lambda _: 1.0, roles)
    return make_optimizer(adamw, steps=config.steps, roles=roles, axes=axes, rates=rates)


def test_its_learning_rate_is_that_of_training(example):
    """Compare all steps of a run: each is as long as its rate, where the gradient stays 1."""
    config = example.Config(steps=40, weight_decay=0.0)

    def run(optimizer):
        params = {"w_O": jnp.zeros(1)}

        def step(carry, _):
            params, state = carry
            updates, state = optimizer.update({"w_O": jnp.ones(1)}, state, params)
            return (optax.apply_updates(params, updates), state), updates["w_O"][0]

        return jax.lax.scan(step, (params, optimizer.init(params)), length=config.steps)[1]

    wanted = product_optimizer(config, {"w_O": "keys"}, {"w_O": ("head", "key")})
    lengths = -np.asarray(jax.jit(lambda: run(wanted))())
    found = -np.asarray(jax.jit(lambda: run(example.optimizer(config)))())
    np.testing.assert_allclose(found, lengths, rtol=1e-5)  # float32
    assert lengths.argmax() == 1 and lengths[-1] < 0.2 * lengths[1]


@pytest.mark.slow
def test_it_trains_and_prints_the_loss(example, capsys):
    """Train a model of some thousand numbers for 40 steps, in which its loss falls."""
    sizes = {"length": 8, "layers": 1, "rank": 2, "key_dim": 2, "value_dim": 2, "hidden_dim": 4}
    example.main(example.Config(**sizes, batch_size=4, steps=40))
    first, *lines = capsys.readouterr().out.splitlines()
    assert "parameters" in first
    losses = [float(line.split()[-1]) for line in lines]
    assert [line.split()[1] for line in lines] == ["20", "40"]
    assert losses[1] < losses[0] - 0.1


def test_it_is_at_most_200_lines_and_knows_nothing_of_this_package():
    text = EXAMPLE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    assert not any(name in text for name in ("rmt_tpu", "pallas_kernels", "sharding"))
