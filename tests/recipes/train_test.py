"""recipes.train: what a run leaves behind, and what its numbers depend on."""

import json
import os
import pty
import subprocess
import sys

import numpy as np
import pytest

from rmt_tpu.training.metrics import read_metrics, series
from tests import cli

ROW = {
    "step",
    "train/loss",
    "train/z_loss",
    "train/skipped_steps",
    "optim/learning_rate",
    "optim/grad_norm",
    "throughput/tokens_per_second",
    "throughput/step_seconds",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return cli.train(tmp_path_factory.mktemp("run"), "--eval_every=20")


@pytest.fixture(scope="module")
def batch_of_8(tmp_path_factory):
    return cli.train(tmp_path_factory.mktemp("batch"), "--batch_size=8")


def losses(workdir):
    return series(read_metrics(workdir), "train/loss")[1]


def test_files(run):
    assert (run / "plots/loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert (run / "samples.txt").read_text(encoding="utf-8").strip()
    assert (run / f"checkpoints/{cli.STEPS}/COMMIT").exists()
    assert list(run.glob("tensorboard/events.out.tfevents.*"))
    assert not list(run.glob(".*")), "a temporary file is left"
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    assert config["model"]["store"]["kind"] == "matrix"
    assert config["train"]["steps"] == cli.STEPS


def test_a_row_for_every_step(run):
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == list(range(1, cli.STEPS + 1))
    assert all(ROW <= row.keys() for row in rows)
    assert [row["step"] for row in rows if "eval/loss" in row] == [20, 40, cli.STEPS]
    row = rows[9]
    assert row["throughput/tokens_per_second"] == pytest.approx(
        4 * 16 / row["throughput/step_seconds"]
    )


def test_loss_falls(run):
    assert losses(run)[0] > 5.5  # about log 257
    assert np.mean(losses(run)[-5:]) < 3.2
    assert cli.curves(run)["eval/loss"][1][-1] < 3.2


def test_config_file_reproduces_the_run(run, tmp_path):
    # Compiled anew: the same numbers do not come from the same compiled program alone.
    cli.succeed(
        "train",
        f"--config={run / 'config.json'}",
        f"--workdir={tmp_path}",
        env={"JAX_ENABLE_COMPILATION_CACHE": "false"},
    )
    assert cli.curves(tmp_path) == cli.curves(run)
    assert (tmp_path / "config.json").read_text() == (run / "config.json").read_text()
    assert (tmp_path / "samples.txt").read_text() == (run / "samples.txt").read_text()


def test_config_file_keeps_its_vocabulary(run, tmp_path):
    """It need not be that of the tokenizer, which has 257 tokens."""
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    config["model"]["vocab_size"] = 300
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    error = cli.fail("train", f"--config={tmp_path / 'config.json'}", f"--workdir={run}")
    assert "model.vocab_size is 257 there, 300 here" in error


def test_same_command_again_is_complete(run):
    before = (run / "metrics.jsonl").read_bytes()
    done = cli.succeed("train", *cli.TINY, "--eval_every=20", f"--workdir={run}")
    assert f"{run} is complete at step {cli.STEPS}" in done.stderr
    assert (run / "metrics.jsonl").read_bytes() == before


def test_log_every_and_profile(run, tmp_path):
    cli.train(tmp_path, "--log_every=20", "--profile_steps=2")
    steps, values = cli.curves(tmp_path)["train/loss"]
    assert steps == [20, 40, cli.STEPS]
    assert values == [losses(run)[step - 1] for step in steps]
    assert list(tmp_path.glob("profile/**/*.xplane.pb"))


def test_another_seed_is_another_run(run, tmp_path):
    cli.train(tmp_path, "--seed=1")
    assert not set(losses(tmp_path)) & set(losses(run))


def test_accumulation_changes_nothing(batch_of_8, tmp_path):
    cli.train(tmp_path, "--batch_size=8", "--set=train.accumulate=4")
    np.testing.assert_allclose(losses(tmp_path), losses(batch_of_8), rtol=1e-5)


def test_devices_change_nothing(batch_of_8, tmp_path):
    cli.train(tmp_path, "--batch_size=8", "--mesh=data=2,fsdp=4", devices=8)
    np.testing.assert_allclose(losses(tmp_path), losses(batch_of_8), rtol=1e-5)


def test_progress_bar_on_a_terminal(tmp_path):
    ours, theirs = pty.openpty()
    flags = [*cli.TINY, f"--workdir={tmp_path}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "recipes.train", *flags],
        cwd=cli.ROOT,
        env=cli.environment() | {"TERM": "xterm", "COLUMNS": "120"},
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    # The end of a terminal is an error, on Linux, and no bytes elsewhere.
    try:
        while piece := os.read(ours, 65536):
            shown += piece
    except OSError:
        pass
    os.close(ours)
    assert process.wait(timeout=60) == 0, shown
    assert f"{cli.STEPS}/{cli.STEPS}" in shown.decode() and "tokens/s" in shown.decode()


def test_help_lists_the_flags():
    done = cli.run("train", "--help")
    assert all(f"  --{name}:" in done.stdout for name in ("preset", "data", "steps", "set", "mesh"))
