"""recipes.preflight: a run on a pod that is not there."""

import json

import pytest

from tests import cli
from tests.tiers import later

SMALL = ("--preset=rmt-tiny", "--topology=v5e:2x2", "--set=model.num_layers=2", "--batch_size=8")


@pytest.mark.compile
def test_a_step_that_fits(tmp_path):
    flags = (*SMALL, "--mesh=data=2,fsdp=2", "--json=-", f"--output={tmp_path}/new")
    done = cli.succeed("preflight", *flags)
    # Nothing else is on stdout.
    values = json.loads(done.stdout)
    assert json.loads((tmp_path / "new" / "preflight.json").read_text()) == values
    assert (tmp_path / "new" / "preflight.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert values["topology"] == "v5e:2x2" and values["devices"] == 4 and values["fits"]
    assert values["mesh"]["data"] == values["mesh"]["fsdp"] == 2
    assert values["config"]["train"]["batch_size"] == 8
    assert values["config"]["model"]["num_layers"] == 2 and values["advice"] == []
    assert values["used_bytes"] == sum(values["memory_bytes"].values()) < values["hbm_bytes"]
    axes = {(sent["kind"], sent["axes"]) for sent in values["collectives"]}
    assert {("all-gather", "fsdp"), ("all-reduce", "data")} <= axes
    seconds = values["estimated_seconds"]
    assert 0 < seconds["parts"]["residual"] < seconds["total"] and 0 < seconds["mfu"] < 1
    assert set(values["versions"]) == {"jax", "libtpu"}


@pytest.mark.compile
def test_a_part_of_a_prompt():
    flags = (*SMALL[:3], "--mesh=data=2,tensor=2", "--prompt=4096", "--json=-")
    values = json.loads(cli.succeed("preflight", *flags).stdout)
    assert values["prompt"] == {"tokens": 4096, "part": 2048, "rows": None} and values["fits"]
    # Keys and values of two layers and two of four heads of 32; beside them there are no moments.
    memory = values["memory_bytes"]
    assert memory["cache"] == pytest.approx(2 * 2 * 4096 * 2 * 128, rel=0.01)
    assert memory["parameters"] > 0 == memory["optimizer"] == memory["activations"]
    assert 0 < values["estimated_seconds"]["mfu"] < 1


@pytest.mark.compile
def test_new_tokens_of_rows():
    flags = (*SMALL[:3], "--mesh=data=2,tensor=2", "--prompt=4096", "--decode=6", "--json=-")
    values = json.loads(cli.succeed("preflight", *flags).stdout)
    assert values["prompt"] == {"tokens": 4096, "part": 2048, "rows": 6} and values["fits"]
    # Of three rows a device.
    assert values["memory_bytes"]["cache"] == pytest.approx(3 * 2 * 2 * 4096 * 2 * 128, rel=0.01)
    assert 0 < values["estimated_seconds"]["mfu"] < 1


@pytest.mark.compile
def test_a_step_that_does_not_fit(tmp_path):
    flags = (*SMALL, "--mesh=data=4", "--batch_size=131072", f"--json={tmp_path}/all.json")
    flags = (*flags, "--set=model.remat=full")
    done = cli.run("preflight", *flags)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("rmt-tiny on v5e:2x2: DOES NOT FIT, ")
    assert "Traceback" not in done.stderr and "error:" not in done.stderr
    values = json.loads((tmp_path / "all.json").read_text())
    assert not values["fits"] and values["used_bytes"] > values["hbm_bytes"] == 15.75 * 2**30
    assert values["estimated_seconds"] is None
    # The residuals of the forward pass: one of each layer, with all of its rows.
    kept = [b for b in values["buffers"] if b["kind"] == "activations"][0]
    # By what makes it: the kernel of the site, or the sum that the scan begins with.
    assert kept["shape"] == "bf16[2,32768,128,16,32]" and kept["name"].endswith("(forward)")
    assert kept["bytes"] == 2 * 2 * 32768 * 128 * 16 * 32
    given = [step["flags"] for step in values["advice"]]
    assert given[0] == "--set=model.remat=reversible"
    assert given[1].startswith("--set=train.accumulate=")
    for i, flag in enumerate(given, start=1):
        assert any(line.strip().startswith(f"{i}. {flag}: ") for line in lines)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--topology is needed; legal: v5e:AxB"),
        (["--topology=v5e:3x3"], "--topology='v5e:3x3' is not a topology of v5e; legal: v5e:AxB"),
        (["--topology=v5e:2x2", "--preset=rmt-306m"], "did you mean 'rmt-305m'"),
        (
            ["--topology=v5e:2x2", "--preset=rmt-tiny", "--config=c.json"],
            "both set the model; give one",
        ),
        ([*SMALL, "--mesh=data=3"], "--mesh='data=3' needs 3 devices, but there are 4"),
        ([*SMALL, "--part=512"], "--part=512 needs --prompt"),
        (
            [*SMALL, "--prompt=64", "--part=65"],
            "--part=65 is more than --prompt=64; legal: up to 64",
        ),
        ([*SMALL, f"--prompt={2**40}"], "--prompt=1099511627776: 1099511627776 is not an integer"),
        ([*SMALL, "--decode=4"], "--decode=4 needs --prompt, and cannot be used with --part"),
        *later(
            (
                [*SMALL, "--prompt=64", "--decode=3"],
                "--decode=3 cannot be divided evenly over the 4 devices of the mesh axes data and "
                "fsdp; legal: ",
            )
        ),
        (
            ["--topology=v5e:2x2", "--preset=rmt-305m", "--prompt=4096"],
            "--prompt=4096 is more than the model's 512 learned positions; legal: up to 512, or",
        ),
        *later(([*SMALL, "--batch_size=6"], "--batch_size=6 is not divisible")),
    ],
    ids=[
        "no topology",
        "topology",
        "preset",
        "preset and config",
        "mesh",
        "part",
        "part of less",
        "long prompt",
        "decode",
        "rows",
        "prompt",
        "batch size",
    ],
)
def test_usage_errors(flags, message):
    assert message in cli.fail("preflight", *flags)


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    line = cli.fail("preflight", *SMALL, f"--output={tmp_path}/file/reports")
    assert "cannot be written" in line
    # The file is tried before minutes of compiling, too.
    done = cli.run("preflight", *SMALL, f"--json={tmp_path}/file/report.json")
    assert done.returncode == 2 and "compiling" not in done.stderr
    assert f"--json={tmp_path}/file/report.json cannot be written: " in done.stderr


@pytest.mark.parametrize(
    "recipe, flag", [("preflight", "output"), ("preflight", "json"), ("kernel_report", "output")]
)
def test_files_on_other_machines_are_refused(recipe, flag, tmp_path):
    """They would become files of a local folder `gs:`."""
    first = f"import os; os.chdir({str(tmp_path)!r})"
    flags = SMALL if recipe == "preflight" else ("--targets=v5e",)
    process = cli.start(recipe, *flags, f"--{flag}=gs://b/x", first=first)
    errors = process.communicate()[1]
    assert process.returncode == 2
    assert errors == f"error: --{flag}=gs://b/x must be a path on this machine\n"
    assert not list(tmp_path.iterdir())


def test_no_compiler_for_gpus():
    hide = (
        "import importlib.util as u; find = u.find_spec; "
        "u.find_spec = lambda name, *more: None if 'cuda1' in name else find(name, *more)"
    )
    process = cli.start("preflight", "--preset=rmt-tiny", "--topology=h100", first=hide)
    _, errors = process.communicate()
    assert process.returncode == 1
    line = errors.splitlines()[-1]
    assert line.startswith("error: jax's CUDA plugin is not installed; pip install --no-deps jax-")
