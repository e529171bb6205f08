"""Runs on mixtures of texts: killed, resumed, with other shares, and from one text on."""

import functools
import random
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import sharding
from rmt_tpu.checkpoint import Checkpointer
from rmt_tpu.config import overrides
from rmt_tpu.config.presets import run as preset_run
from rmt_tpu.data import ByteTokenizer
from rmt_tpu.data.datasets import load_datasets
from rmt_tpu.errors import UsageError
from rmt_tpu.runs.metrics import read_metrics
from rmt_tpu.training import trainer
from rmt_tpu.training.loop import Loop
from rmt_tpu.training.run import prepare
from tests import cli

pytestmark = pytest.mark.xdist_group("mixture")  # one worker makes the run that all begin with

BATCH, SEQ_LEN = 4, 16
MAKE_MESH = sharding.make_mesh  # a fixture replaces it


@pytest.fixture(autouse=True, scope="module")
def one_device():
    """Train on one device, with one program for all runs of a config."""
    one = sharding.make_mesh("data=1", jax.devices()[:1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.sharding, "make_mesh", lambda spec: one)
        patch.setattr(trainer, "prepare", functools.cache(prepare))
        yield


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, str]:
    folder, found = tmp_path_factory.mktemp("text"), {}
    for name, words in {
        "web": "stone river over",
        "books": "and then there",
        "code": "if x :",
    }.items():
        draw = random.Random(name)
        found[name] = str(folder / f"{name}.txt")
        Path(found[name]).write_text(" ".join(draw.choices(words.split(), k=400)))
    return found


@pytest.fixture(scope="module")
def config(sources):
    changes = {
        "model.num_layers": 1,
        "model.vocab_size": 257,
        "model.feed_forward.hidden_dim": 32,
        "data.source": sources["web"],
        "data.seq_len": SEQ_LEN,
        "train.batch_size": BATCH,
        "train.steps": 8,
        "train.checkpoint_every": 2,
        "train.keep_checkpoints": 9,
        "train.eval_every": 4,
        "train.eval_tokens": 64,
        "train.sample_tokens": 0,
    }
    return overrides.apply(preset_run("rmt-tiny"), changes)


def mixed(config, sources, **shares):
    mixture = [{"source": sources[name], "share": share} for name, share in shares.items()]
    return overrides.apply(config, {"data.mixture": mixture})


@pytest.fixture(scope="module")
def whole(config, sources, one_device, tmp_path_factory):
    run = tmp_path_factory.mktemp("whole")
    trainer.train(mixed(config, sources, web=0.75, books=0.25), run)
    return run


def numbers(run, to: int = 99):
    """The rows of metrics to a step without what depends on the machine."""
    return [
        {k: v for k, v in row.items() if not k.startswith("throughput/")}
        for row in read_metrics(run)
        if row["step"] <= to
    ]


def tokens(run, step: int) -> list[float]:
    row = next(row for row in read_metrics(run) if row["step"] == step)
    return [v for k, v in row.items() if k.startswith("data/") and k.endswith("/tokens")]


def killed_at(patch, step: int) -> None:
    usual = Loop.take_step

    def run_step(self, train_step, number, batches):
        usual(self, train_step, number, batches)
        if number == step:
            self.checkpoints.wait()  # a thread outlives what kills a process
            raise KeyboardInterrupt

    patch.setattr(Loop, "take_step", run_step)


def at_step(whole, to: Path, step: int) -> Path:
    """A copy of a run, as it was at a step."""
    run = Path(shutil.copytree(whole, to))
    for other in Checkpointer(str(run / "checkpoints")).steps():
        if other > step:
            shutil.rmtree(run / f"checkpoints/{other}")
    return run


def test_metrics_give_tokens_epochs_and_losses_of_each_text(whole):
    rows = numbers(whole)
    assert [tokens(whole, step) for step in (1, 2, 8)] == [[48, 16], [96, 32], [384, 128]]
    assert rows[-1]["data/web.txt/epochs"] == pytest.approx(384 / 2100, rel=0.2)
    for row in rows:  # each batch has three windows of one text and one of the other
        expected = 0.75 * row["train/loss/web.txt"] + 0.25 * row["train/loss/books.txt"]
        assert row["train/loss"] == pytest.approx(expected, rel=1e-6)
        assert row["train/loss/web.txt"] != row["train/loss/books.txt"]
    for row in (rows[3], rows[7]):
        expected = 0.75 * row["eval/loss/web.txt"] + 0.25 * row["eval/loss/books.txt"]
        assert row["eval/loss"] == pytest.approx(expected, rel=1e-12)
        assert row["eval/loss/web.txt"] != row["eval/loss/books.txt"]


def test_a_killed_run_goes_on_as_if_it_was_not(config, sources, whole, tmp_path, monkeypatch):
    same = mixed(config, sources, web=0.75, books=0.25)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        killed_at(patch, 5)
        trainer.train(same, tmp_path)
    assert Checkpointer(str(tmp_path / "checkpoints")).steps()[-1] == 4
    trainer.train(same, tmp_path)
    assert numbers(tmp_path) == numbers(whole)


@pytest.mark.slow
def test_shares_change_at_a_step(config, sources, whole, tmp_path, monkeypatch):
    """With a text that comes and one that rests; killed after that, the run goes on the same."""
    run = at_step(whole, tmp_path / "run", 4)
    other = mixed(config, sources, web=0.0, books=0.5, code=0.5)
    with pytest.raises(UsageError, match="--change_config to continue with these"):
        trainer.train(other, run, change_config=False)
    trainer.train(other, run, change_config=True)
    assert numbers(run, 3) == numbers(whole, 3)
    found = [tokens(run, step) for step in (4, 5, 8)]
    assert found == [[192, 64], [192, 96, 32], [192, 192, 128]]
    last = numbers(run)[-1]
    assert last["eval/loss"] == pytest.approx(
        (last["eval/loss/books.txt"] + last["eval/loss/code.txt"]) / 2, rel=1e-12
    )
    again = at_step(whole, tmp_path / "again", 4)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        killed_at(patch, 7)
        trainer.train(other, again, change_config=True)
    trainer.train(other, again)
    assert numbers(again) == numbers(run)


@pytest.mark.slow
def test_a_run_of_one_text_goes_on_with_a_mixture_and_not_back(config, sources, whole, tmp_path):
    run = tmp_path / "run"
    trainer.train(overrides.apply(config, {"train.steps": 4}), run)
    both = mixed(config, sources, web=0.5, code=0.5)
    trainer.train(both, run, change_config=True)
    assert tokens(run, 8) == [256 + 128, 128] and tokens(run, 4) == []
    with pytest.raises(
        UsageError, match="was trained on a mixture up to step 8; legal: --mixture="
    ):
        trainer.train(config, run, change_config=True)


def test_a_text_that_was_edited_is_refused(config, sources, whole, tmp_path):
    run = at_step(whole, tmp_path / "run", 4)
    text = Path(sources["books"]).read_text()
    try:
        Path(sources["books"]).write_text(text.replace("then", "when"))
        with pytest.raises(
            UsageError, match="tokens of .*books.txt are not those that the run was"
        ):
            trainer.train(mixed(config, sources, web=0.75, books=0.25), run)
        # The end of the only document is held out.
        Path(sources["books"]).write_text(f"{text[:-2]}??")
        with pytest.raises(
            UsageError, match="^--mixture: books.txt does not give the held-out tokens on which"
        ):
            trainer.train(mixed(config, sources, web=0.75, books=0.25), run)
    finally:
        Path(sources["books"]).write_text(text)


@pytest.mark.slow
def test_losses_of_texts_do_not_depend_on_the_mesh(config, sources):
    """Nor on accumulation and chunks of the loss; without texts in a batch there are none."""
    changes = {"train.batch_size": 8, "model.vocab_size": 257}
    base = overrides.apply(mixed(config, sources, web=0.5, books=0.25, code=0.25), changes)
    batch = load_datasets(base, ByteTokenizer()).train.batch_at(0)
    found = []
    for mesh, accumulate in ("data=1", 1), ("data=2,sequence=2", 2):
        divided = overrides.apply(base, {"train.mesh": mesh, "train.accumulate": accumulate})
        count = 1 if accumulate == 1 else 4
        run = prepare(divided, MAKE_MESH(mesh, jax.devices()[:count]))
        params = jax.jit(run.init)().params
        _, loss = jax.jit(run.gradients)(params, batch)
        found.append(np.asarray(loss.texts))
        assert jax.eval_shape(run.gradients, params, batch._replace(texts=None))[1].texts == ()
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)
    np.testing.assert_allclose(found[0][1], [0.5, 0.25, 0.25])
    assert found[0][0].sum() == pytest.approx(float(loss.cross_entropy), rel=1e-5)


@pytest.mark.slow
def test_processes_train_as_one(sources, tmp_path):
    """One, two and four, with one device each of four; and the flag as a person writes it."""
    flags = (
        *(flag for flag in cli.TINY if not flag.startswith("--data=")),
        f"--mixture={sources['web']}=0.7,{sources['books']}=0.2,{sources['code']}=0.1",
        "--preset=rmt-tiny",
        "--batch_size=8",
        "--steps=4",
        "--eval_every=2",
        "--mesh=data=4",
    )
    found = []
    for count in 1, 2, 4:
        run = tmp_path / str(count)
        ends = cli.launch(count, *flags, f"--workdir={run}", devices=4)
        assert [code for code, *_ in ends] == [0] * count, ends
        found.append(numbers(run))
    assert found[0] == found[1] == found[2]
    assert tokens(tmp_path / "4", 4) == [23 * 16, 6 * 16, 3 * 16]
