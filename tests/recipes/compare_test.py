"""recipes.compare: two models on the same tokens."""

import json
import subprocess

import pytest

from rmt_tpu.training.metrics import read_metrics, series
from tests import cli

PRESETS = ["gpt2-tiny", "rmt-tiny"]
FLAGS = [f"--presets={','.join(PRESETS)}", *cli.TINY, "--eval_every=24"]

# In the second of the two runs.
SIGINT_IN_STEP = """
import os, signal
from rmt_tpu.training.trainer import _Loop
usual = _Loop._step
def _step(self, train_step, step):
    usual(self, train_step, step)
    if step == 10 and self.folder.name == "rmt-tiny":
        os.kill(os.getpid(), signal.SIGINT)
_Loop._step = _step
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    return folder, cli.succeed("compare", *FLAGS, f"--workdir={folder}")


def results(folder):
    """comparison.json without what depends on the machine."""
    rows = json.loads((folder / "comparison.json").read_text())
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def test_files(done):
    folder, process = done
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    table = (folder / "comparison.md").read_text()
    assert table in process.stdout
    head, _, *rows = table.splitlines()
    columns = "preset parameters residual tokens FLOPs seconds train_loss held_out"
    assert [c.strip().replace(" ", "_") for c in head.split("|")[1:-1]] == columns.split()
    assert [row.split("|")[1].strip() for row in rows] == PRESETS


def test_numbers(done):
    folder, _ = done
    gpt2, rmt = results(folder)
    assert gpt2["tokens"] == rmt["tokens"] == cli.STEPS * 4 * 16
    assert gpt2["residual_size"] == 128  # the preset's D
    assert rmt["residual_size"] == 16 * 8  # the preset's D_k, and D_v of the flags
    for name, row in zip(PRESETS, (gpt2, rmt), strict=True):
        rows = read_metrics(folder / name)
        assert row["held_out_loss"] == series(rows, "eval/loss")[1][-1]
        last_tenth = series(rows, "train/loss")[1][-(cli.STEPS // 10) :]
        assert row["train_loss"] == pytest.approx(sum(last_tenth) / len(last_tenth))


def test_interrupted(done, tmp_path):
    process = cli.start("compare", *FLAGS, f"--workdir={tmp_path}", first=SIGINT_IN_STEP)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert not (tmp_path / "comparison.json").exists()
    again = subprocess.run(
        out.splitlines()[-1],
        shell=True,
        cwd=cli.ROOT,
        env=cli.environment(),
        capture_output=True,
        encoding="utf-8",
    )
    assert again.returncode == 0, again.stderr
    assert "gpt2-tiny is complete" in again.stderr
    assert results(tmp_path) == results(done[0])
