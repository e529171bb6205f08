"""A wheel in an environment of its own trains where there is no checkout."""

import hashlib
import json
import zipfile

import pytest

from rmt_tpu.hub.own import CODE
from rmt_tpu.runs import environment
from rmt_tpu.runs.metrics import read_metrics
from tests import wheels


@pytest.mark.slow
@pytest.mark.xdist_group("wheel")
def test_a_wheel_trains_without_the_checkout(tmp_path):
    """Its environment has the wheel and its requirements from the package index, and no more."""
    wheel = wheels.build(tmp_path / "dist")
    code = {f"rmt_tpu/hub/torch/{name}.py" for name in CODE}  # for exported folders
    assert code <= {*zipfile.ZipFile(wheel).namelist()}
    commands = wheels.install(tmp_path / "venv", str(wheel))
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    flags = ["--preset=rmt-tiny", "--data=stdlib", "--steps=3", "--workdir=runs/a"]
    wheels.succeed(commands / "rmt-train", *flags, cwd=folder)
    assert [row["step"] for row in read_metrics(folder / "runs/a")] == [1, 2, 3]

    start = json.loads((folder / "runs/a/starts.jsonl").read_text())
    assert start["code"] == "wheel"
    assert start["git_commit"] == environment.code(wheels.ROOT)["git_commit"]
    assert start["wheel"]["sha256"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert start["versions"]["rmt_tpu"] in wheel.name

    programs = sorted(commands.glob("rmt-*"))
    assert len(programs) > 15
    for program in programs:
        assert "--" in wheels.succeed(program, "--help", cwd=folder), program
