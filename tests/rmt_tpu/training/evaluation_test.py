"""The loss on held-out text: of which windows it is."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from rmt_tpu import data
from rmt_tpu.config import overrides
from rmt_tpu.config.presets import run as preset_run
from rmt_tpu.training.evaluation import HeldOutLoss, num_eval_windows

SEQ, WINDOWS = 8, 21
TOKENS = np.random.default_rng(0).integers(0, 250, SEQ * WINDOWS, np.int32)  # the last is padded


@pytest.mark.parametrize("tokens", [SEQ * 5, SEQ * 12 + 3, SEQ * 1000, 1])
def test_it_is_of_the_same_text_for_every_batch_size(tokens, unannotated):
    """A loss that tells every token: one window more or less, or one twice, is seen."""
    mesh = sharding.make_mesh("data=1", jax.devices()[:1])

    def loss(params, batch):
        of_each = params * jnp.sin(7.0 * batch.inputs + batch.targets) + batch.segment_ids
        return SimpleNamespace(cross_entropy=jnp.sum(of_each * batch.weights), aux={})

    run = SimpleNamespace(loss=loss, mesh=mesh, batch_sharding=sharding.batch_sharding(mesh))
    asked = min(max(tokens // SEQ, 1), WINDOWS) * SEQ
    inputs, targets = TOKENS[:-1][:asked], TOKENS[1:][:asked]
    expected = np.mean(2.0 * np.sin(7.0 * inputs + targets) + 1)
    for batch_size in 2, 8, 32:
        changes = {"train.batch_size": batch_size, "train.eval_tokens": tokens, "data.seq_len": SEQ}
        number = num_eval_windows(overrides.apply(preset_run("rmt-tiny"), changes))
        given = {"seq_len": SEQ, "batch_size": batch_size, "bos": 256, "seed": 0}
        windows = data.Windows(TOKENS, shuffle=False, **given)
        found = HeldOutLoss(run, windows, number)(np.float32(2))
        assert abs(found.loss - expected) < 1e-5


def test_a_preset_reads_as_much_as_it_did():
    config = preset_run("rmt-tiny")
    assert num_eval_windows(config) == 8 * config.train.batch_size
    assert num_eval_windows(overrides.apply(config, {"train.eval_batches": 3})) == 3 * 16
