"""recipes.depth_report: runs side by side."""

import json

import pytest

from tests import cli

pytestmark = pytest.mark.xdist_group("recipes")

# The later --steps counts.
FLAGS = ("--steps=3", "--eval_every=3", "--checkpoint_every=3")
REPORT = ("--batches=2", "--batch_size=2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A standard residual, and attention over depth."""
    folder = tmp_path_factory.mktemp("runs")
    blocks = '{"kind": "block_attention", "num_blocks": 2}'
    mixers = {"plain": "sum", "blocks": blocks}
    return [
        cli.train(folder / name, *FLAGS, f"--set=model.mixer={mixer}", preset="gpt2-tiny")
        for name, mixer in mixers.items()
    ]


@pytest.mark.slow
def test_report(runs):
    done = cli.succeed("depth_report", f"--workdir={','.join(map(str, runs))}", *REPORT)
    picture = runs[0] / "plots" / "depth.png"
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert str(picture) in done.stdout
    profiles = {
        row.pop("run"): row for row in json.loads((picture.parent / "depth.json").read_text())
    }
    assert list(profiles) == ["plain", "blocks"]
    for name, profile in profiles.items():
        # Two batches of two windows of 16, fewer where the held-out text ends.
        assert 32 < profile["tokens"] <= 64
        for quantity in ("output", "residual", "gradient"):
            assert len(profile[quantity]) == 5 and min(profile[quantity]) > 0
        line = next(row for row in done.stdout.splitlines() if row.startswith(f"| {name} "))
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        assert cells[1] == f"{profile['loss']:.4f}"
        assert cells[2] == ", ".join(f"{profile['output'][k]:.3g}" for k in (1, -1))
        assert (cells[4] == "") == (name == "plain")
    assert profiles["plain"]["weights"] is None
    # Of two sublayers each.
    weights = profiles["blocks"]["weights"]
    assert [len([w for w in row if w is not None]) for row in weights["mean"]] == [1, 2, 2, 3, 3]


def test_output(trained, tmp_path):
    picture = tmp_path / "new" / "picture.png"
    done = cli.succeed("depth_report", f"--workdir={trained}", f"--output={picture}", *REPORT)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and str(picture) in done.stdout
    (profile,) = json.loads(picture.with_suffix(".json").read_text())
    assert profile["run"] == trained.name and 32 < profile["tokens"] <= 64
    for quantity in ("output", "residual", "gradient"):
        assert len(profile[quantity]) == 5 and min(profile[quantity]) > 0
    assert f"| {trained.name} | {profile['loss']:.4f} |" in done.stdout


ERRORS = {
    "no workdir": ([], ["--workdir is needed"]),
    "no run": (["--workdir={run},{run}/plots"], ["plots", "holds no run", "config.json"]),
    "twice": (["--workdir={run},{run}"], ["--workdir=", "different"]),
    "step": (["--workdir={run}", "--step=2"], ["--step=2", "available: 20, 40, 48"]),
    "batches": (["--workdir={run}", "--batches=0"], ["--batches=0", "positive"]),
    "output": (["--workdir={run}", "--output={run}/depth.pdf"], ["--output=", ".png"]),
    "no folder": (
        ["--workdir={run}", "--output={run}/config.json/x.png", *REPORT],
        ["--output={run}/config.json/x.png cannot be written to: "],
    ),
}


@pytest.mark.parametrize(
    "flags, pieces",
    [pytest.param(*case, id=name) for name, case in ERRORS.items()],
)
def test_usage(flags, pieces, trained):
    error = cli.fail("depth_report", *(flag.replace("{run}", str(trained)) for flag in flags))
    assert all(piece.replace("{run}", str(trained)) in error for piece in pieces), error


READ_ONLY = """
from rmt_tpu.errors import UsageError
from rmt_tpu.storage.local import LocalFolder
def check(self, *, write=False):
    if write:
        raise UsageError(f"{self.url} cannot be written to: Read-only file system")
LocalFolder.check = check
"""


def test_a_read_only_run_is_told_before_a_checkpoint_is_read(trained):
    """The run has no checkpoint of step 2."""
    process = cli.start("depth_report", f"--workdir={trained}", "--step=2", first=READ_ONLY)
    error = process.communicate()[1]
    assert process.returncode == 2
    assert error == (
        f"error: --workdir={trained} cannot be written to: Read-only file system; legal: --output "
        "with a .png file for the picture\n"
    )
