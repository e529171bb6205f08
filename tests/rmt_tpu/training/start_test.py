"""Runs that begin again at an older checkpoint, or as another run goes on."""

import functools
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import sharding
from rmt_tpu.analysis.dry_run import dry_run
from rmt_tpu.checkpoint import Checkpointer
from rmt_tpu.config import overrides
from rmt_tpu.config.presets import run as preset_run
from rmt_tpu.data import ByteTokenizer
from rmt_tpu.errors import UsageError
from rmt_tpu.hub.folder import export
from rmt_tpu.runs import workdir
from rmt_tpu.runs.metrics import read_metrics
from rmt_tpu.storage import open_folder
from rmt_tpu.training import trainer
from rmt_tpu.training.run import prepare, resolve_auto
from rmt_tpu.training.start import kept_values, warm_start_of
from tests import models

pytestmark = pytest.mark.xdist_group("start")  # one worker makes the run that all begin with


@pytest.fixture(autouse=True, scope="module")
def one_device():
    """And one program for all runs of one config."""
    one = sharding.make_mesh("data=1", jax.devices()[:1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.sharding, "make_mesh", lambda spec: one)
        patch.setattr(trainer, "prepare", functools.cache(prepare))
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog.\n" * 40)
    changes = {
        "model.num_layers": 1,
        "model.vocab_size": 257,
        "model.feed_forward.hidden_dim": 32,
        "data.source": str(text),
        "data.seq_len": 16,
        "train.batch_size": 2,
        "train.steps": 6,
        "train.checkpoint_every": 2,
        "train.eval_every": 2,
        "train.eval_batches": 1,
        "train.sample_tokens": 0,
    }
    return overrides.apply(preset_run("rmt-tiny"), changes)


@pytest.fixture(scope="module")
def whole(config, one_device, tmp_path_factory):
    """A run with checkpoints 2, 4 and 6."""
    run = tmp_path_factory.mktemp("whole")
    trainer.train(config, run)
    return run


def killed(*args):
    raise KeyboardInterrupt


def steps_of(run):
    return Checkpointer(str(run / "checkpoints")).steps()


def losses(run):
    rows = read_metrics(run)
    return [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]


@pytest.mark.slow
def test_a_run_goes_back_to_an_older_checkpoint(config, tmp_path, capsys, monkeypatch):
    """Killed after that it goes on from there; the same command again goes on, too."""
    config = overrides.apply(config, {"train.sample_tokens": 2})
    whole = tmp_path / "whole"
    trainer.train(config, whole)
    capsys.readouterr()
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(trainer, "SideFiles", killed)
        trainer.train(config, run, from_step=2)
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "going back" in line]
    assert told == (
        f"going back: {run} resumes from step 2; checkpoints 4, 6 and later metrics and "
        "samples are deleted"
    )
    assert steps_of(run) == [2]
    trainer.train(config, run)
    assert f"resuming {run} from step 2" in capsys.readouterr().err
    assert losses(run) == losses(whole) and steps_of(run) == [2, 4, 6]

    slower = overrides.apply(config, {"train.optimizer.learning_rate": 1e-4, "train.steps": 5})
    back = {"change_config": True, "from_step": 2}
    trainer.train(slower, run, **back)
    branch = losses(run)
    assert branch[:2] == losses(whole)[:2] and branch[3] != losses(whole)[3] and len(branch) == 5
    assert steps_of(run) == [2, 4, 5]
    assert "step 6" not in (run / "samples.txt").read_text()
    capsys.readouterr()
    trainer.train(slower, run, **back)
    said = capsys.readouterr().err
    assert f"resuming {run} from step 5, a branch from step 2" in said and "going back" not in said
    assert steps_of(run) == [2, 4, 5]


@pytest.fixture
def origin(whole, tmp_path):
    """The same run, when it was at step 4."""
    run = Path(shutil.copytree(whole, tmp_path / "origin"))
    shutil.rmtree(run / "checkpoints/6")
    return run


@pytest.mark.slow
def test_a_copy_goes_on_as_the_other_run_does(config, whole, origin, tmp_path, capsys, monkeypatch):
    """To the last bit of weights and moments; and what it is a copy of is needed once."""
    changes = {"train.init_from": str(origin), "train.with_optimizer": True}
    on, copy = overrides.apply(config, changes), tmp_path / "copy"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(trainer, "SideFiles", killed)
        trainer.train(on, copy)
    assert f"continuing {origin} from step 4, with its optimizer" in capsys.readouterr().err
    shutil.rmtree(origin)
    trainer.train(on, copy)
    assert f"resuming {copy} from step 4" in capsys.readouterr().err
    assert losses(copy) == losses(whole)[4:] and steps_of(copy) == [4, 6]
    ours, theirs = (Checkpointer(str(run / "checkpoints")) for run in (copy, whole))
    for step in (4, 6):
        names = theirs.arrays(step)
        assert ours.arrays(step).keys() == names.keys() and "optimizer" in str(list(names))
        for name in names:
            found, wanted = (c.array(name, step).read().result() for c in (ours, theirs))
            np.testing.assert_array_equal(found, wanted, err_msg=name)
        assert ours.meta(step)["windows_read"] == theirs.meta(step)["windows_read"] == 2 * step


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (-2, "the held-out tokens on which the run in --workdir=.* was evaluated: a file, "),
        (0, "the tokens that the run in --workdir=.* was trained on up to step 6: "),
    ],
)
def test_a_run_resumes_with_its_own_text(config, whole, place, reason):
    """The end of a document is held out, and a change there is noticed too."""
    source = Path(config.data.source)
    text = source.read_text()
    letters = list(text)
    letters[place] = "?"
    source.write_text("".join(letters))
    more = overrides.apply(config, {"train.steps": 8})
    with pytest.raises(UsageError, match=f"^--data={source} does not give {reason}.*--workdir$"):
        trainer.train(more, whole, change_config=True)
    source.write_text(text)


def test_what_a_run_was_trained_on_is_told(config, whole, tmp_path):
    """Its source may change when it resumes, so that files can be moved."""
    other = tmp_path / "other.txt"
    other.write_text(Path(config.data.source).read_text().upper())
    more = overrides.apply(config, {"train.steps": 8, "data.source": str(other)})
    reason = f'up to step 6: data.source is "{config.data.source}" there, "{other}" here; legal'
    with pytest.raises(UsageError, match=f"^--data={other} does not give the tokens .* {reason}"):
        trainer.train(more, whole, change_config=True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"model.num_layers": 2},
            "a different config: model.num_layers is 1 there, 2 here; give the same",
        ),
        (
            {"model.store.key_dim": 64},
            "different config: model.store.key_dim is 16 there, 64 here; .*grows in its own folder",
        ),
        (
            {"train.optimizer": "muon"},
            'a different config: train.optimizer.kind is "adamw" there, "muon" here',
        ),
        ({"train.seed": 3}, "a different config: train.seed is 0 there, 3 here; give the same"),
        (
            {"train.steps": 4},
            "is at step 4, and --steps=4 leaves no step to train; legal: more than 4",
        ),
    ],
)
def test_a_copy_of_another_run_is_refused(config, origin, tmp_path, changes, reason):
    began = {"train.init_from": str(origin), "train.with_optimizer": True}
    with pytest.raises(UsageError, match=f"^--init_from=.*/origin --with_optimizer: .*{reason}"):
        warm_start_of(overrides.apply(config, began | changes), open_folder(tmp_path / "copy"))


def test_a_copy_may_go_on_otherwise_where_a_run_may(config, origin, tmp_path):
    began = {"train.init_from": str(origin), "train.with_optimizer": True}
    other = {"train.optimizer.learning_rate": 1e-4, "train.steps": 9, "train.batch_size": 4}
    on = overrides.apply(config, began | other)
    assert warm_start_of(on, open_folder(tmp_path / "copy")).checkpoints.steps() == [2, 4]


def test_a_copy_has_what_the_other_run_chose_in_place_of_auto(config, whole, origin, tmp_path):
    """The other run has outgrown int16 here, so that its copy begins with float32."""
    stored = json.loads((origin / "config.json").read_text())
    stored["model"] |= {"compute_dtype": "bfloat16", "remat": "reversible"}
    stored["model"]["store"]["dtype"] = "float32"
    (origin / "config.json").write_text(json.dumps(stored))
    copy, began = open_folder(tmp_path / "copy"), {"train.init_from": str(origin)}
    narrow = {"model.compute_dtype": "bfloat16"}
    on = overrides.apply(config, narrow | began | {"train.with_optimizer": True})
    assert resolve_auto(on, kept_values(on, copy)).model.store.dtype == "float32"
    assert resolve_auto(on, kept_values(on, copy)).train.init_from == str(origin)
    weights = overrides.apply(config, narrow | began)
    assert resolve_auto(weights, kept_values(weights, copy)).model.store.dtype == "int16"
    own = open_folder(whole)
    assert kept_values(on, own) == workdir.resume_overrides(own)


def test_a_copy_with_a_freeze_that_is_over_is_refused(config, origin, tmp_path):
    began = {"train.init_from": str(origin), "train.with_optimizer": True}
    frozen = {"train.freeze": ["!unembedding/*"], "train.freeze_steps": 2}
    with pytest.raises(UsageError, match="has done 4, so that nothing would be frozen; legal: 5"):
        trainer.train(overrides.apply(config, began | frozen), tmp_path / "copy")
    assert not (tmp_path / "copy/checkpoints").exists()


def test_a_dry_run_of_fewer_steps_than_were_done_is_refused(config, whole):
    few = overrides.apply(config, {"train.steps": 4})
    for asked, done in ((None, 6), (6, 6)):
        with pytest.raises(
            UsageError, match=f"^train.steps=4: .* has a checkpoint of step {done};"
        ):
            dry_run(few, "x", open_folder(whole), change_config=True, from_step=asked)
    assert dry_run(few, "x", open_folder(whole), change_config=True, from_step=4)


def test_what_has_no_state_is_not_copied(config, whole, tmp_path):
    llama = overrides.apply(preset_run("llama-tiny"), {"model.num_layers": 1}).model
    export(models.decoder(llama), ByteTokenizer(), tmp_path / "hub", max_length=64)
    shutil.copytree(whole, tmp_path / "empty", ignore=shutil.ignore_patterns("checkpoints"))
    reasons = {"hub": "only weights; legal: a run folder", "empty": "no checkpoint in .*"}
    for name, reason in reasons.items():
        began = {"train.init_from": str(tmp_path / name), "train.with_optimizer": True}
        with pytest.raises(UsageError, match=f"^--init_from=.*{name} --with_optimizer: .*{reason}"):
            warm_start_of(overrides.apply(config, began), open_folder(tmp_path / "copy"))
    with pytest.raises(UsageError, match="^--with_optimizer needs --init_from=RUN, "):
        overrides.apply(config, {"train.with_optimizer": True})
