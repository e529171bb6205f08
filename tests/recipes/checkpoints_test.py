"""Checkpoints of a run: when they are taken, which stay, and what a run may go on with."""

import json
import shutil

import numpy as np
import pytest

from rmt_tpu.runs.metrics import read_metrics
from tests import cli

STEPS = f"--steps={cli.STEPS}"

# The COMMIT of one step cannot be written, as on a full disk.
FULL_DISK = """
from rmt_tpu.storage import Fault
from rmt_tpu.storage.local import LocalFolder
usual = LocalFolder.create
def create(self, name, data):
    if f"{self}/{name}".endswith("checkpoints/6/COMMIT"):
        raise Fault(f"{self}/{name}: No space left on device")
    return usual(self, name, data)
LocalFolder.create = create
"""


pytestmark = pytest.mark.xdist_group("recipes")


def steps(workdir):
    return sorted(int(path.parent.name) for path in workdir.glob("checkpoints/*/COMMIT"))


def as_of_step(run, step, copy):
    """A copy of a run that was killed after the checkpoint of `step`."""
    shutil.copytree(run, copy)
    for later in steps(copy):
        if later > step:
            shutil.rmtree(copy / f"checkpoints/{later}")
    (copy / "samples.txt").unlink()
    return copy


def losses(workdir):
    return {r["step"]: r["train/loss"] for r in read_metrics(workdir) if "train/loss" in r}


@pytest.mark.slow
def test_the_last_every_and_best_stay(tmp_path):
    flags = (
        *("--checkpoint_every=4", "--eval_every=4", "--set=train.keep_checkpoints=1"),
        *("--set=train.keep_every=16", "--set=train.keep_best=2"),
    )
    cli.train(tmp_path, *flags)
    held_out = {r["step"]: r["eval/loss"] for r in read_metrics(tmp_path) if "eval/loss" in r}
    best = sorted(held_out, key=held_out.get)[:2]
    assert steps(tmp_path) == sorted({16, 32, cli.STEPS, *best})


@pytest.mark.slow
def test_by_the_clock(tmp_path):
    flags = ("--checkpoint_every=0", "--set=train.checkpoint_seconds=1e-3")
    cli.train(tmp_path, *flags, "--set=train.keep_checkpoints=99")
    assert len(steps(tmp_path)) > 3


@pytest.mark.slow
def test_what_is_saved_is_told(trained_and_told):
    _, done = trained_and_told
    lines = [line for line in done.stderr.splitlines() if line.startswith("saved step")]
    assert lines[-1].startswith(f"saved step {cli.STEPS}: ")
    assert all(" MB in " in line and "training waited" in line for line in lines)


@pytest.mark.slow
def test_a_save_that_fails_ends_the_run(tmp_path):
    flags = (*cli.TINY, "--preset=rmt-tiny", "--checkpoint_every=3", f"--workdir={tmp_path}")
    process = cli.start("train", *flags, first=FULL_DISK)
    _, errors = process.communicate()
    assert process.returncode == 1, errors
    error = errors.splitlines()[-1]
    assert error.startswith("error: cannot save step 6") and "No space left on device" in error
    assert steps(tmp_path) == [3]
    # It did not go on unsaved: the loop is at most a step or two ahead of the thread.
    assert max(losses(tmp_path)) < cli.STEPS


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, said",
    [
        (["--batch_size=8"], "train.batch_size is 4 there, 8 here"),
        (["--set=model.store.dtype=bfloat16"], 'model.store.dtype is "float32" there, "bfloat16"'),
        (["--set=model.store.key_dim=40"], "model.store.key_dim is 16 there, 40 here"),
    ],
    ids=["batch", "dtype", "key_dim"],
)
def test_another_config_is_taken_when_that_is_wanted(trained, flags, said, tmp_path):
    copy = as_of_step(trained, 40, tmp_path / "copy")
    flags = (*cli.TINY, *flags, f"--workdir={copy}")
    error = cli.fail("train", *flags)
    assert said in error and "--change_config" in error
    before = json.loads((copy / "config.json").read_text())
    done = cli.succeed("train", *flags, "--change_config")
    assert f"continuing with a different config: {said}" in done.stderr
    assert f"resuming {copy} from step 40" in done.stderr
    after = json.loads((copy / "config.json").read_text())
    assert before != after
    (note,) = (copy / "config_changes.jsonl").read_text().splitlines()
    assert said in json.loads(note)["changes"][0]
    assert max(losses(copy)) == cli.STEPS
    assert cli.succeed("generate", f"--workdir={copy}", "--max_tokens=2").stdout


@pytest.mark.slow
def test_a_wider_residual_is_the_same_function(trained, tmp_path):
    copy = as_of_step(trained, 40, tmp_path / "copy")
    cli.train(copy, "--set=model.store.key_dim=32", "--change_config")
    ours, theirs = losses(copy), losses(trained)
    # The first step is of the same function on the same batch; then the new slots take part.
    np.testing.assert_allclose(ours[41], theirs[41], rtol=2e-6)
    assert ours[cli.STEPS] != theirs[cli.STEPS]


@pytest.mark.slow
def test_a_narrower_residual_is_refused_and_nothing_changed(trained, tmp_path):
    copy = as_of_step(trained, 40, tmp_path / "copy")
    before = (copy / "config.json").read_bytes()
    flags = (*cli.TINY, "--set=model.store.key_dim=8", "--change_config", f"--workdir={copy}")
    error = cli.fail("train", *flags)
    assert "model.store.key_dim=8" in error and "16, or 32 and more" in error
    assert (copy / "config.json").read_bytes() == before
    cli.train(copy, "--checkpoint_every=20", "--eval_every=20")
    assert losses(copy) == losses(trained)


def test_another_model_is_refused_even_so(trained):
    flags = cli.tiny("--set=model.num_layers=3", "--change_config", f"--workdir={trained}")
    error = cli.fail("train", *flags)
    assert "model.num_layers is 2 there, 3 here" in error and "--change_config" not in error


@pytest.mark.slow
def test_on_another_mesh_without_further_ado(trained, tmp_path):
    copy = as_of_step(trained, 40, tmp_path / "copy")
    cli.train(copy, "--mesh=data=2,fsdp=2", devices=4)
    ours, theirs = losses(copy), losses(trained)
    np.testing.assert_allclose(
        [ours[step] for step in sorted(ours)], [theirs[step] for step in sorted(theirs)], rtol=1e-5
    )


@pytest.mark.slow
def test_more_steps_go_on_where_a_run_was_complete(trained, tmp_path):
    copy = shutil.copytree(trained, tmp_path / "copy")
    cli.train(copy, "--steps=52", "--change_config")
    assert max(losses(copy)) == 52
    assert [r["step"] for r in read_metrics(copy) if "eval/loss" in r][-1] == 52
