"""The loss on held-out text: of which windows it is."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from rmt_tpu import data
from rmt_tpu.config import overrides
from rmt_tpu.config.presets import run as preset_run
from rmt_tpu.data.datasets import Datasets, MixedHeldOut
from rmt_tpu.data.marked import CONTEXT
from rmt_tpu.training.evaluation import (
    HeldOutLoss,
    MixedHeldOutLoss,
    notes_without_loss,
    num_eval_windows,
)

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


def test_scalars_are_means_over_tokens_and_a_text_without_a_share_does_not_count(unannotated):
    """The text with share 0 has no token with a loss."""
    mesh = sharding.make_mesh("data=1", jax.devices()[:1])

    def loss(params, batch):
        of_tokens = {"twice": 2 * jnp.sum(jnp.ones_like(batch.weights))}
        return SimpleNamespace(cross_entropy=3 * jnp.sum(batch.weights), aux=of_tokens)

    class Masked(data.Windows):
        def in_order(self, *args, **more):
            batch = super().in_order(*args, **more)
            return batch._replace(weights=0 * batch.weights)

    run = SimpleNamespace(loss=loss, mesh=mesh, batch_sharding=sharding.batch_sharding(mesh))
    given = {"seq_len": SEQ, "batch_size": 8, "bos": 256, "seed": 0, "shuffle": False}
    read, masked = data.Windows(TOKENS, **given), Masked(TOKENS, **given)
    assert HeldOutLoss(run, read, WINDOWS)(0.0) == (pytest.approx(3), {"twice": 2.0}, {})
    alone = HeldOutLoss(run, masked, WINDOWS)(0.0)
    assert math.isnan(alone.loss) and alone.aux == {"twice": 2.0}
    mixed = MixedHeldOut("a", 1.0, read), MixedHeldOut("b", 0.0, masked)
    found = MixedHeldOutLoss(run, mixed, 2 * WINDOWS)(0.0)
    assert found.loss == pytest.approx(3) and math.isnan(found.texts["b"])


def test_a_held_out_loss_that_is_nan_is_explained():
    given = {"seq_len": SEQ, "batch_size": 8, "bos": 256, "seed": 0, "shuffle": False}
    read = data.Windows(TOKENS, **given)
    masked = data.Windows(TOKENS | CONTEXT, **given)
    notes = lambda *arguments: notes_without_loss(preset_run("rmt-tiny"), Datasets(*arguments))
    assert not notes(read, read) and not notes(
        read, read, (MixedHeldOut("a", 0.5, read), MixedHeldOut("b", 0.5, read))
    )
    (note,) = notes(read, masked)
    assert note.startswith(
        "note: no held-out token of --data=stdlib has a loss, so its loss is NaN"
    )
    mixed = MixedHeldOut("a", 0.5, masked), MixedHeldOut("b", 0.5, read)
    (note,) = notes(read, masked, mixed)
    assert note.startswith("note: no held-out token of a of --mixture has a loss")
