"""recipes.decode_report: steps timed here, and estimated for a TPU that is not there."""

import json

import pytest

from tests import cli
from tests.tiers import later

SMALL = "--set=model.num_layers=1"


@pytest.mark.slow
def test_timed_here(tmp_path):
    flags = ("--presets=rmt-tiny", "--target=host", "--batch=2", "--context=40", SMALL)
    files = (f"--output={tmp_path}/decode.md", f"--picture={tmp_path}/decode.png", "--json")
    wide = "--set=rmt-tiny:model.feed_forward.hidden_dim=32"
    done = cli.succeed("decode_report", *flags, wide, "--repeats=2", *files)
    values = json.loads(done.stdout)
    (row,) = values["rows"]
    assert row["case"]["changes"] == {"model.num_layers": 1, "model.feed_forward.hidden_dim": 32}
    assert row["least"]["cache"] == 2 * 40 * 2 * 4 * 32 * 4 and row["capacity"] == 64
    assert len(row["times"]) == 2 and all(0 < time < 1 for time in row["times"])
    table = (tmp_path / "decode.md").read_text()
    assert f"| rmt-tiny | 2 | 40 | 0 | - | {row['seconds'] * 1e3:.3f} | - |" in table
    assert "Timed on this machine" in table and values["versions"]["jax"] in table
    assert (tmp_path / "decode.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert done.stderr.splitlines()[0].startswith("cpu: rmt-tiny 2 40: ")


@pytest.mark.compile
def test_estimated(tmp_path):
    flags = ("--presets=llama-tiny", "--target=v5e", "--batch=2,1", "--context=64", SMALL)
    done = cli.succeed("decode_report", *flags, "--largest=2", f"--output={tmp_path}/decode.md")
    table = (tmp_path / "decode.md").read_text()
    assert table in done.stdout and "libtpu" in table and "Estimated, not measured" in table
    assert table.index("| llama-tiny | 1 | 64 |") < table.index("| llama-tiny | 2 | 64 |")
    assert table.count("## Most expensive instructions of 8 steps: llama-tiny") == 2
    assert done.stderr.splitlines()[0].startswith("v5e: 1/2 llama-tiny 1 64: ")


REFUSED = [
    (["--presets=rmt-tinny"], "did you mean 'rmt-tiny'"),
    (["--target=v7"], "--target 'v7' is unknown; legal: v5e, v5p, v6e, tpu7x, host"),
    (["--batch=32,0"], "--batch=0 must be a whole number from 1 to 1,048,576"),
    (
        ["--context=512,8192"],
        "--context=8192 is beyond the learned positions of gpt2-405m, rmt-305m; legal: up to 512",
    ),
    *later(
        (["--presets=rmt-tiny,rmt-tiny"], "is empty or repeats a name"),
        (["--target="], "--target= is empty; leave it out"),
        (["--context=many"], "--context=many must be a whole number from 1"),
        (["--batch="], "--batch= is empty; leave it out"),
        (["--set=model.nothing=1"], "'nothing' is unknown"),
        (["--set=rmt-tiny:model.num_layers=1"], "preset 'rmt-tiny' is unknown"),
        (["--output=decode.txt"], "--output=decode.txt must end in .md"),
    ),
]


@pytest.mark.parametrize("flags, message", REFUSED)
def test_usage_errors(flags, message):
    assert message in cli.fail("decode_report", *flags)


def test_what_does_not_fit_is_an_error_where_nothing_else_is_left():
    flags = ("--presets=gpt2-405m", "--target=host", "--batch=1048576")
    line = cli.fail("decode_report", *flags, code=1)
    assert line.startswith(
        "error: no decode step could be timed or estimated; for example, gpt2-405m does not fit: "
        "weights and cache take"
    )
