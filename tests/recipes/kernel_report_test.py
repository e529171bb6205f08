"""recipes.kernel_report: estimates for TPUs on a machine without one."""

import json
import subprocess
import sys

import pytest

from rmt_tpu.estimator.calibration import error_bar
from rmt_tpu.tables import fitted
from tests import cli

CASE = "K=64 V=64 R=16 P=16"


@pytest.mark.compile
def test_ops(tmp_path):
    flags = ("--op=key_vector", f"--case={CASE}", "--targets=v5e", f"--output={tmp_path}")
    done = cli.succeed("kernel_report", *flags)
    assert "v5e: 4/4" in done.stdout
    table = (tmp_path / "kernel_report.md").read_text()
    assert table in done.stdout
    assert "Estimated, not measured" in table and "jax 0." in table and "libtpu 0." in table
    content = json.loads((tmp_path / "kernel_report.json").read_text())
    assert content["versions"]["jax"] in table
    assert f"\n{error_bar(['v5e'])}\n" in table
    rows = {row["direction"]: row for row in content["rows"]}
    assert set(rows) == {"forward", "training"}
    for row in rows.values():
        assert row["failures"] == {}
        # Nothing moves less than the least, and no kernel uses more than the whole bandwidth.
        for cost in (row["cost"], row["portable_cost"]):
            assert cost["bytes"] >= row["work"]["bytes"]
        assert row["portable_bandwidth_use"] < row["bandwidth_use"] < 1
        assert row["speedup"] == row["portable_seconds"] / row["seconds"]
        assert f"| {row['speedup']:.2f} |" in table
    names = [kernel["name"] for kernel in rows["training"]["cost"]["kernels"]]
    assert len(names) == 2 and all(name in table for name in names)
    assert rows["training"]["seconds"] > 2 * rows["forward"]["seconds"]


@pytest.mark.compile
def test_steps(tmp_path):
    done = cli.succeed(
        "kernel_report",
        "--step",
        "--presets=gpt2-tiny",
        "--targets=v5e",
        "--batch_size=4",
        "--seq_len=128",
        "--set=model.vocab_size=512",
        "--set=gpt2-tiny:model.num_layers=3",
        f"--output={tmp_path}",
    )
    table = (tmp_path / "step_cost.md").read_text()
    assert table in done.stdout and "4 x 128 tokens" in table and "libtpu" in table
    assert "| million cycles | gpt2-tiny, v5e |" in table and "| 3 | feed_forward |" in table
    assert (tmp_path / "step_cost.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    content = json.loads((tmp_path / "step_cost.json").read_text())
    (step,) = content["steps"]
    assert step["preset"] == "gpt2-tiny" and step["target"] == "v5e" and step["tokens"] == 512
    assert "not measured" in content["how"] and f"\n{content['error_bar']}\n" in table
    assert f"| **whole step, best guess** | {step['cycles'] / 1e6:.1f} |" in table


def test_tables_fit_a_terminal():
    table = "| op | us, kernel | us, xla |\n|---|---|---|\n| attention | 1.5 | 22.25 |\n"
    text = f"# Ops\n\n{table}\nEnd\n"
    assert fitted(text, 40) == (
        "# Ops\n\n"
        "| op        | us, kernel | us, xla |\n"
        "| --------- | ---------- | ------- |\n"
        "| attention | 1.5        | 22.25   |\n\nEnd\n"
    )
    narrow = fitted(text, 30)
    assert "| attention | 1.5        |\n(columns only in the file: 1)\n" in narrow
    assert max(map(len, narrow.splitlines())) <= 30
    # A compiler's message in the last column may contain a bar, and a row may lack a column.
    odd = fitted("| op | why |\n|---|---|\n| a | INTERNAL: x|y |\n| b |\n", 40)
    assert odd.splitlines()[2:] == ["| a   | INTERNAL: x y |", "| b   |               |"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--targets=v7"], "--targets 'v7' is unknown; legal: v5e, v5p, v6e, tpu7x"),
        (["--targets="], "--targets= is empty; leave it out, or give: "),
        (["--op=key_vectors"],
         "--op 'key_vectors' is unknown; did you mean 'key_vector'? legal: all, "),
        (["--op=attention", "--case=H=1"], "--case 'H=1' is unknown; "),
        (["--step", "--presets=rmt-306m"], "did you mean 'rmt-305m'"),
        (["--step", "--presets=rmt-tiny,rmt-tiny"], "is empty or repeats a name"),
        (["--step", "--presets=rmt-tiny", "--set=model.nothing=1"], "'nothing' is unknown"),
        (["--step", "--presets=rmt-tiny", "--set=rmt-46m:model.num_layers=1"],
         "preset 'rmt-46m' is unknown"),
        (["--batch_size=many"], "--batch_size=many must be a whole number"),
        (["--presets=rmt-tiny"], "--presets has no effect here; legal: with --step, or"),
        (["--step", "--op=attention"], "--op has no effect here; legal: without --step, or"),
    ],
    ids=["target", "no target", "op", "case", "preset", "twice", "path", "path's preset", "number",
         "of steps", "of ops"],
)  # fmt: skip
def test_usage_errors(flags, message, tmp_path):
    assert message in cli.fail("kernel_report", *flags, f"--output={tmp_path}")


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    line = cli.fail("kernel_report", f"--output={tmp_path}/file/reports")
    assert "cannot be written" in line


def test_no_compiler(tmp_path):
    hide = (
        "import importlib.util as u; find = u.find_spec; "
        "u.find_spec = lambda name, *more: None if name == 'libtpu' else find(name, *more)"
    )
    flags = ("--targets=v5e", f"--output={tmp_path}")
    process = cli.start("kernel_report", *flags, first=hide)
    _, errors = process.communicate()
    assert process.returncode == 1
    assert errors.splitlines()[-1] == (
        "error: libtpu is not installed; pip install 'jax[tpu]' installs the TPU compiler"
    )


# A CPU in place of a GPU or a TPU.
MEASURED = """
import sys
import jax
from recipes import kernel_report
kernel_report.accelerator = lambda: jax.devices()[0]
flags = "--step --presets=gpt2-tiny --seq_len=32 --set=model.compute_dtype=float32"
flags += " --set=train.batch_size=2"
sys.argv = ["recipes/kernel_report.py", *flags.split(), "--output=" + sys.argv[1]]
kernel_report.run()
"""


@pytest.mark.slow
def test_steps_are_measured_where_there_is_a_device(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path)],
        cwd=cli.ROOT,
        env=cli.environment(),
        capture_output=True,
        encoding="utf-8",
        timeout=cli.TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "step_times.md").read_text()
    assert table in done.stdout and "Measured on cpu" in table and ". 2 x 32 tokens, " in table
    (step,) = json.loads((tmp_path / "step_times.json").read_text())["steps"]
    assert step["seconds"] > 0 and step["tokens"] == 64 and step["preset"].startswith("gpt2-tiny")
