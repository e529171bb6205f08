"""What balances experts moves in every layer that has it, and is in a checkpoint."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from rmt_tpu import config as cfg
from rmt_tpu import data
from rmt_tpu.checkpoint import Checkpointer
from rmt_tpu.training.run import prepare, resolve_auto

ATTENTION = cfg.Attention(2, 4, cfg.Rope(), False)
STEPS = 3  # odd: no choice can have risen as often as it fell, nor is the mean a whole number


@pytest.mark.slow
@pytest.mark.parametrize(
    ("balance", "moves"), [(cfg.SignRule(rate=0.1), "load"), (cfg.Quantiles(), "seen")]
)
def test_every_bias_moves_and_is_on_the_disk(balance, moves, tmp_path):
    """Beside layers without experts, and with experts that have no bias to move."""
    biased, plain = (
        cfg.Experts(6, 2, 5, balance=balance),
        cfg.Experts(5, 3, 4, balance=cfg.BalanceLoss()),
    )
    dense = cfg.FeedForward(8)
    stacks = (
        cfg.Stack((ATTENTION, dense)),
        cfg.Stack((ATTENTION, biased, plain, dense, biased), 2),
    )
    model = cfg.ModelConfig(stacks, cfg.VectorStore(12), vocab_size=32)
    train = cfg.TrainConfig(batch_size=4, steps=STEPS, mesh="data=1")
    config = resolve_auto(cfg.RunConfig(model, train, cfg.DataConfig(seq_len=16)))
    run = prepare(config, sharding.make_mesh("data=1", jax.devices()[:1]))
    state = run.jitted_init()()
    step, rng = run.jitted_step(), np.random.default_rng(0)
    for _ in range(STEPS):
        tokens = jnp.asarray(rng.integers(0, 32, (4, 17)), jnp.int32)
        segments, weights = jnp.ones((4, 16), jnp.int32), jnp.ones((4, 16), jnp.float32)
        batch = data.Batch(tokens[:, :-1], tokens[:, 1:], segments, weights)
        state, metrics = step(state, batch)
    checkpoints = Checkpointer(str(tmp_path))
    checkpoints.save(STEPS, state._replace(copies={}), {})
    names = [name for name in checkpoints.arrays() if re.fullmatch(rf"params/.*/{moves}", name)]
    found = {name: checkpoints.array(name).read().result() for name in names}
    of = {f"params/stacks/1/{number}/core/{moves}" for number in (1, 4)}
    assert of <= found.keys()
    for name, array in found.items():
        biggest = np.abs(array).reshape(2, -1).max(axis=-1)
        assert (biggest > 0).all() if name in of else (biggest == 0).all(), name
    assert metrics["train/experts/max_load"] > 0
