"""recipes.train: what a run leaves behind, and what its numbers depend on."""

import json
import os
import pty
import shlex
import sys

import numpy as np
import pytest

from rmt_tpu.runs.metrics import read_metrics, series
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


pytestmark = pytest.mark.xdist_group("recipes")


@pytest.fixture(scope="module")
def batch_of_8(tmp_path_factory):
    return cli.train(tmp_path_factory.mktemp("batch"), "--batch_size=8")


def losses(workdir):
    return series(read_metrics(workdir), "train/loss")[1]


def test_files(trained):
    assert (trained / "plots/loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert (trained / "samples.txt").read_text(encoding="utf-8").strip()
    assert (trained / f"checkpoints/{cli.STEPS}/COMMIT").exists()
    assert list(trained.glob("tensorboard/events.out.tfevents.*"))
    assert not list(trained.glob(".*")), "a temporary file is left"
    config = json.loads((trained / "config.json").read_text(encoding="utf-8"))
    assert config["model"]["store"]["kind"] == "matrix"
    assert config["train"]["steps"] == cli.STEPS


def test_a_row_for_every_step(trained):
    rows = read_metrics(trained)
    assert [row["step"] for row in rows] == list(range(1, cli.STEPS + 1))
    assert all(ROW <= row.keys() for row in rows)
    assert [row["step"] for row in rows if "eval/loss" in row] == [20, 40, cli.STEPS]
    row = rows[9]
    assert row["throughput/tokens_per_second"] == pytest.approx(
        4 * 16 / row["throughput/step_seconds"]
    )


@pytest.mark.slow
def test_a_reader_of_its_lines_who_has_seen_enough_ends_no_run(tmp_path):
    """All of it is there, and its exit code says so, as a supervisor asks for."""
    flags = [*cli.TINY, *cli.SELDOM, f"--workdir={tmp_path / 'run'}"]
    command = shlex.join([sys.executable, "-m", "recipes.train", *flags])
    line = f"{command} 2>&1 | head -4; exit ${{PIPESTATUS[0]}}"
    done = cli.run_line(shlex.join(["bash", "-c", line]))
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 4
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, cli.STEPS + 1))
    assert (tmp_path / f"run/checkpoints/{cli.STEPS}/COMMIT").exists()
    assert (tmp_path / "run/complete.json").exists()


def test_loss_falls(trained):
    assert losses(trained)[0] > 5.5  # about log 257
    assert np.mean(losses(trained)[-5:]) < 3.2
    assert cli.curves(trained)["eval/loss"][1][-1] < 3.2


@pytest.mark.slow
def test_config_file_reproduces_the_run(trained, tmp_path):
    # Compiled anew: the same numbers do not come from the same compiled program alone.
    cli.succeed(
        "train",
        f"--config={trained / 'config.json'}",
        f"--workdir={tmp_path}",
        env={"JAX_ENABLE_COMPILATION_CACHE": "false"},
    )
    assert cli.curves(tmp_path) == cli.curves(trained)
    assert (tmp_path / "config.json").read_text() == (trained / "config.json").read_text()
    assert (tmp_path / "samples.txt").read_text() == (trained / "samples.txt").read_text()


def test_config_file_keeps_its_vocabulary(trained, tmp_path):
    """It need not be that of the tokenizer, which has 257 tokens."""
    config = json.loads((trained / "config.json").read_text(encoding="utf-8"))
    config["model"]["vocab_size"] = 300
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    error = cli.fail("train", f"--config={tmp_path / 'config.json'}", f"--workdir={trained}")
    assert "model.vocab_size is 257 there, 300 here" in error


def test_same_command_again_is_complete(trained):
    before = (trained / "metrics.jsonl").read_bytes()
    done = cli.succeed(
        "train", *cli.TINY, "--checkpoint_every=20", "--eval_every=20", f"--workdir={trained}"
    )
    assert f"{trained} is complete at step {cli.STEPS}" in done.stderr
    assert (trained / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_log_every_and_profile(trained, tmp_path):
    cli.train(tmp_path, "--log_every=20", "--profile_steps=2")
    steps, values = cli.curves(tmp_path)["train/loss"]
    assert steps == [20, 40, cli.STEPS]
    assert values == [losses(trained)[step - 1] for step in steps]
    assert list(tmp_path.glob("profile/**/*.xplane.pb"))


@pytest.mark.slow
def test_another_seed_is_another_run(trained, tmp_path):
    cli.train(tmp_path, "--seed=1")
    assert not set(losses(tmp_path)) & set(losses(trained))


@pytest.mark.slow
def test_accumulation_changes_nothing(batch_of_8, tmp_path):
    cli.train(tmp_path, "--batch_size=8", "--set=train.accumulate=4")
    np.testing.assert_allclose(losses(tmp_path), losses(batch_of_8), rtol=1e-5)


@pytest.mark.slow
def test_devices_change_nothing(batch_of_8, tmp_path):
    cli.train(tmp_path, "--batch_size=8", "--mesh=data=2,fsdp=4", devices=8)
    np.testing.assert_allclose(losses(tmp_path), losses(batch_of_8), rtol=1e-5)


@pytest.mark.slow
def test_progress_bar_on_a_terminal(tmp_path):
    ours, theirs = pty.openpty()
    terminal = {"TERM": "xterm", "COLUMNS": "120"}
    flags = [*cli.TINY, f"--workdir={tmp_path}"]
    process = cli.start("train", *flags, env=terminal, stderr=theirs)
    os.close(theirs)
    shown = b""
    # The end of a terminal is an error, on Linux, and no bytes elsewhere.
    try:
        while piece := os.read(ours, 65536):
            shown += piece
    except OSError:
        pass
    os.close(ours)
    assert process.wait() == 0, shown
    assert f"{cli.STEPS}/{cli.STEPS}" in shown.decode() and "tokens/s" in shown.decode()


def test_help_lists_the_flags():
    done = cli.run("train", "--help", anew=True)
    assert all(f"  --{name}:" in done.stdout for name in ("preset", "data", "steps", "set", "mesh"))
