"""Spikes of the gradient norm, and what a run does about them."""

import json
import math

import jax
import numpy as np
import pytest

import sharding
from rmt_tpu import data
from rmt_tpu.config import overrides, presets
from rmt_tpu.errors import DivergedError
from rmt_tpu.runs import workdir
from rmt_tpu.runs.metrics import read_metrics
from rmt_tpu.storage import open_folder
from rmt_tpu.training import trainer
from rmt_tpu.training.loop import Loop
from rmt_tpu.training.spikes import SpikeState, Spread


def test_the_spread_is_the_mean_and_variance_at_first():
    """In the first 50 steps the spread is that of all norms so far, and nothing is a spike."""
    norms = np.exp(np.random.default_rng(0).normal(0.3, 0.4, 50))
    spread = Spread()
    for norm in norms.tolist():
        assert spread.deviations(norm) is None
        spread = spread.counting(norm)
    assert spread.count == 50
    assert spread.mean == pytest.approx(np.log(norms).mean(), rel=1e-12)
    assert spread.variance == pytest.approx(np.log(norms).var(), rel=1e-12)
    above = math.exp(spread.mean + 3 * math.sqrt(spread.variance))
    assert spread.deviations(above) == pytest.approx(3, rel=1e-9)


def test_a_spike_hardly_changes_the_spread_and_a_new_level_becomes_usual():
    spread = Spread()
    for _ in range(100):
        spread = spread.counting(1.0)
    assert spread.deviations(1.0) == 0 and spread.deviations(1.02) < 1  # the least deviation
    after = spread.counting(1e6)
    assert spread.deviations(1e6) > 200 and after.deviations(1e6) > 100
    for _ in range(400):
        spread = spread.counting(3.0)
    assert abs(spread.deviations(3.0)) < 1


def test_a_spike_counts_as_four_deviations_in_a_mean_over_200_steps():
    spread = Spread()
    for _ in range(400):
        spread = spread.counting(1.0)
    assert (spread.mean, spread.variance) == (0, 0)
    after, weight, change = spread.counting(1e6), 1 / 200, 4 * 0.05
    assert after.mean == pytest.approx(weight * change, rel=1e-12)
    assert after.variance == pytest.approx((1 - weight) * weight * change**2, rel=1e-12)


def test_a_norm_that_is_not_finite_is_no_spike_and_is_not_counted():
    spread = Spread(0.0, 1.0, 60)
    for norm in (math.nan, math.inf, 0.0):
        assert spread.deviations(norm) is None and spread.counting(norm) == spread


def test_a_checkpoint_keeps_the_state():
    state = SpikeState(Spread(0.1, 0.2, 3), 2)
    assert SpikeState.of_meta(json.loads(json.dumps(state.meta()))) == state
    assert SpikeState.of_meta(None) == SpikeState()


TEXT = "the quick brown fox jumps over the lazy dog.\n" * 40


@pytest.fixture
def config(tmp_path, monkeypatch):
    one = sharding.make_mesh("data=1", jax.devices()[:1])
    monkeypatch.setattr(trainer.sharding, "make_mesh", lambda spec: one)
    (tmp_path / "text.txt").write_text(TEXT)
    return overrides.apply(
        presets.run("rmt-tiny"),
        {
            "model.num_layers": 1,
            "model.vocab_size": 257,
            "model.feed_forward.hidden_dim": 16,
            "data.source": str(tmp_path / "text.txt"),
            "data.seq_len": 16,
            "train.batch_size": 2,
            "train.steps": 8,
            "train.checkpoint_every": 2,
            "train.eval_every": 0,
            "train.eval_batches": 1,
            "train.sample_tokens": 0,
            "train.tensorboard": "off",
        },
    )


def with_spikes_at(monkeypatch, steps, norm=50.0):
    """Make some steps of the next runs have this gradient norm, once for each time in the list."""
    left = list(steps)
    watch = Loop.watch_gradient_norm

    def watched(self, found):
        spread = Spread(math.log(found), 0.01, 60)
        self.spikes = self.spikes._replace(spread=spread)
        if self.step in left:
            left.remove(self.step)
            return watch(self, found * norm)
        return watch(self, found)

    monkeypatch.setattr(Loop, "watch_gradient_norm", watched)


def windows_read(folder):
    return workdir.open_checkpoints(open_folder(folder)).meta()["windows_read"]


def test_a_run_goes_back_from_a_spike_with_other_data(config, tmp_path, monkeypatch, capsys):
    """Step 5 is done again, from the checkpoint of step 4, with the windows after its own.

    The third time is too often, although the checkpoint is older than the first.
    """
    read = []
    batch_at = data.Windows.batch_at
    record = lambda self, position, rows: read.append(position) or batch_at(self, position, rows)
    monkeypatch.setattr(data.Windows, "batch_at", record)
    with_spikes_at(monkeypatch, [5, 5, 5])
    config = overrides.apply(config, {"train.spike_restarts": 2})
    assert trainer.train(config, tmp_path / "run").step == 8
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, 9))
    # Four steps up to the checkpoint, step 5 twice, whose data are left out, and four more steps.
    assert windows_read(tmp_path / "run") == 2 * (4 + 2 + 4)
    spikes = map(json.loads, (tmp_path / "run/spikes.jsonl").read_text().splitlines())
    found = [(spike["step"], spike["back_to"], spike["windows_read"]) for spike in spikes]
    assert found == [(5, 4, 10), (5, 4, 12)]
    again = read[len(read) - read[::-1].index(12) - 1 :]
    assert {12, 14, 16, 18} <= set(again) and not {8, 10} & set(again)
    said = capsys.readouterr().err
    assert "step 5: the gradient norm " in said and "; the last checkpoint is of step 4" in said
    assert "resuming" in said and said.count("train.spike_restarts=2 is reached") == 1


@pytest.mark.slow
def test_without_the_flag_a_spike_is_only_printed(config, tmp_path, monkeypatch, capsys):
    with_spikes_at(monkeypatch, [5])
    assert trainer.train(config, tmp_path / "run").step == 8
    assert windows_read(tmp_path / "run") == 16 and not (tmp_path / "run/spikes.jsonl").exists()
    assert (
        "is a spike, 39.1 standard deviations above its running mean\n" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_a_run_goes_back_so_often_and_not_without_a_checkpoint(
    config, tmp_path, monkeypatch, capsys
):
    with_spikes_at(monkeypatch, [1, 3, 7])
    config = overrides.apply(config, {"train.spike_restarts": 1})
    assert trainer.train(config, tmp_path / "run").step == 8
    said = capsys.readouterr().err
    assert "step 1: " in said and "there is no checkpoint yet" in said
    assert "train.spike_restarts=1 is reached" in said
    assert windows_read(tmp_path / "run") == 2 * (2 + 1 + 6)


@pytest.mark.slow
def test_a_run_that_diverges_goes_back_first(config, tmp_path):
    changes = {"train.spike_restarts": 1, "train.optimizer.learning_rate": 1e30}
    config = overrides.apply(config, changes | {"train.checkpoint_every": 1})
    with pytest.raises(DivergedError):
        trainer.train(overrides.apply(config, {"train.steps": 30}), tmp_path / "run")
    (spike,) = map(json.loads, (tmp_path / "run/spikes.jsonl").read_text().splitlines())
    assert "is not finite" in spike["why"]
