"""Tasks that are asked while a run goes on, on any mesh it can have."""

import json
import sys

import jax
import numpy as np
import pytest

import sharding
from rmt_tpu import config as cfg
from rmt_tpu.config import overrides
from rmt_tpu.config.presets import run as preset_run
from rmt_tpu.data.batches import Batch
from rmt_tpu.errors import UsageError
from rmt_tpu.evaluation import subjects
from rmt_tpu.evaluation.documents import find_tasks, read_task
from rmt_tpu.evaluation.evaluate import evaluate
from rmt_tpu.runs.metrics import read_metrics
from rmt_tpu.training import trainer
from rmt_tpu.training.run import prepare
from tests import models
from tests.closeness import assert_close

PIPELINE = "stage=2,data=2,tensor=2"
TEXT = "the quick brown fox jumps over the lazy dog.\n" * 40


@pytest.fixture
def config(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    line = {"query": "the quick", "choices": ["brown", "fox"], "gold": 0}
    lines = [line | {"gold": n % 2, "query": TEXT[n : n + 9].strip()} for n in range(12)]
    (tmp_path / "piqa.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return overrides.apply(
        preset_run("gpt2-tiny"),
        {
            "model.num_layers": 2,
            "model.vocab_size": 257,
            "model.feed_forward.hidden_dim": 32,
            "data.source": str(tmp_path / "text.txt"),
            "data.seq_len": 32,
            "train.batch_size": 4,
            "train.steps": 3,
            "train.eval_batches": 1,
            "train.sample_tokens": 0,
            "train.mesh": PIPELINE,
            "train.eval_tasks": "piqa",
            "train.eval_tasks_every": 2,
            "train.eval_tasks_limit": 10,
            "train.eval_data_dir": str(tmp_path),
        },
    )


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [PIPELINE, "data=2,fsdp=2,sequence=2"])
def test_live_parameters_give_what_the_checkpoint_does(config, tmp_path, mesh):
    trainer.train(overrides.apply(config, {"train.mesh": mesh}), tmp_path / "run", label="tiny")
    rows = [row for row in read_metrics(tmp_path / "run") if "eval/piqa/acc" in row]
    assert [row["step"] for row in rows] == [2, 3]
    source = read_task(*find_tasks(["piqa"]), str(tmp_path), 10)
    (result,) = evaluate(subjects.run_subject(tmp_path / "run"), [source])
    for metric in result.metrics:
        assert rows[-1][f"eval/piqa/{metric.name}"] == pytest.approx(metric.value)
        # Of differences of values, and so as far off as these.
        error = pytest.approx(metric.error, abs=1e-6 * abs(metric.value))
        assert rows[-1][f"eval/piqa/{metric.name}_stderr"] == error


def test_scores_of_a_text_do_not_depend_on_the_other_texts():
    """Training would drop half of the choices, and other ones if the texts are reversed."""
    core = cfg.Experts(4, 2, 6, shared=0, capacity=0.5)
    model = cfg.ModelConfig((cfg.Stack((core,)),), cfg.VectorStore(8), vocab_size=models.VOCAB + 1)
    train = cfg.TrainConfig(batch_size=4, mesh="expert=2")
    config = cfg.RunConfig(model, train, cfg.DataConfig(seq_len=8))
    run = prepare(config, sharding.make_mesh("expert=2", jax.devices()[:2]))
    params = jax.tree.map(np.float32, models.random_parameters(model))
    params = jax.device_put(params, run.state_shardings.params)
    texts, scores = np.asarray(models.tokens(4, 9)), jax.jit(run.scores)

    def score(texts):
        given = jax.device_put((texts[:, :-1], texts[:, 1:]), run.batch_sharding)
        return np.asarray(scores(params, *given).log_probability)

    assert_close(score(texts), score(texts[::-1])[::-1], 1e-5)

    # Rows that only fill a held-out batch take no expert from the others.
    loss, weights = jax.jit(run.loss), np.repeat([[1.0], [1.0], [0.0], [0.0]], 8, axis=1)

    def held_out(texts):
        one_document = np.ones((4, 8), np.int32)
        batch = Batch(texts[:, :-1], texts[:, 1:], one_document, weights.astype(np.float32))
        return np.asarray(loss(params, jax.device_put(batch, run.batch_sharding)).cross_entropy)

    filled = np.concatenate([texts[:2], np.zeros_like(texts[2:])])
    assert_close(held_out(texts), held_out(filled), 1e-5)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"train.eval_tasks": "pika"}, "--eval_tasks 'pika' is unknown; did you mean 'piqa'"),
        ({"train.eval_data_dir": ""}, "--eval_tasks and --eval_data_dir must be given together"),
        (
            {"train.eval_data_dir": "nowhere"},
            "--eval_data_dir='nowhere': the folder has no piqa.jsonl",
        ),
        ({"train.eval_data_dir": "hub"}, "--eval_data_dir=hub needs the package datasets"),
        ({"data.seq_len": 4}, "--seq_len=4 is less than the 6 tokens of the longest continuation"),
        ({"train.eval_tasks": "wikitext"}, "--eval_tasks=wikitext has no tokens to score; legal"),
    ],
)
def test_what_cannot_be_asked_is_told_before_the_run_begins(
    config, tmp_path, monkeypatch, changes, message
):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "wikitext.jsonl").write_text('{"page": ""}')
    with pytest.raises(UsageError, match=message):
        trainer.train(overrides.apply(config, changes), tmp_path / "run", label="tiny")
    assert not (tmp_path / "run").exists()
