"""recipes.autotune: what is said before anything is compiled, and a table that is made."""

import json

import pytest

from pallas_kernels import tuned
from tests import cli


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--op=attention"], "give either --target, to compile"),
        (["--op=attention", "--target=v5e", "--device"], "give either --target, "),
        (["--op=attention", "--target=v5"], "--target 'v5' is unknown; did you mean 'v5"),
        (["--op=attention", "--target="], "--target= is empty; leave it out"),
        (["--target=v5e"], "give either --op=key_vector,"),
        (["--op=attention", "--from_preset=rmt-tiny", "--target=v5e"], "give either --op="),
        (["--op=atention", "--target=v5e"], "--op 'atention' is unknown; did you mean 'attention'"),
        (["--op=", "--target=v5e"], "--op= is empty; leave it out"),
        (["--from_preset=rmt-1b", "--target=v5e"], "rmt-1b' is unknown"),
        (
            ["--op=attention", "--device"],
            "--device: tuning does not support this machine's device, cpu; legal",
        ),
        pytest.param(
            ["--op=attention", "--target=h100", "--dry_run"],
            "--target=h100 has no tunable kernel for the given ops",
            marks=pytest.mark.slow,
        ),
        (
            ["--op=attention", "--target=v5e", "--kernel=zzz", "--dry_run"],
            "--kernel 'zzz' is unknown; legal: attention_backward, attention_blocks_backward,",
        ),
        (
            ["--op=attention", "--target=v5e", "--out=/tmp"],
            "error: --out=/tmp is a folder; legal: ",
        ),
        (["--op=attention", "--target=v5e", "--top=0"], "--top=0"),
        (
            ["--op=attention", "--target=v5e"],
            "--out, the file for the table, is needed when RMT_TPU_TUNED is off",
        ),
        (
            ["--op=attention", "--target=v5e", "--out=/proc/t.json"],
            "--out=/proc/t.json cannot be written",
        ),
        (["--op=attention", "--target=v5e", "--out=s3://b/t.json"], "--out='s3://b/t.json' cannot"),
    ],
)
def test_errors_are_one_line(flags, words):
    assert words in cli.fail("autotune", *flags)


def test_a_table_that_is_none(tmp_path):
    file = tmp_path / "t.json"
    file.write_text("mine")
    line = cli.fail("autotune", "--op=attention", "--target=v5e", f"--out={file}")
    assert "--out=" in line and "fix the file, or move it away" in line


@pytest.mark.slow
def test_dry_run():
    flags = ["--from_preset=rmt-tiny", "--target=v5e", "--seq_len=128", "--dry_run"]
    listed = json.loads(cli.succeed("autotune", *flags, "--json").stdout)
    kernels = {each["kernel"] for each in listed}
    expected = {"attention_forward", "attention_backward", "key_vector_forward"}
    assert expected | {"key_vector_rebuild"} == kernels
    for each in listed:
        assert each["target"] == "v5e" and each["candidates"] >= 1
        assert set(each["key"]) == set(tuned.KERNELS["tpu", each["kernel"]].key)
    text = cli.succeed("autotune", *flags, "--kernel=attention").stdout
    # Forward in training, with segments, and of a prompt.
    assert text.startswith("v5e (TPU v5 lite): 3 kernels\n  attention_forward alibi=True ")


@pytest.mark.compile
def test_a_kernel_is_tuned_without_a_device(tmp_path):
    out = tmp_path / "tuned.json"
    flags = ["--from_preset=rmt-tiny", "--seq_len=256", "--batch_size=2", "--target=v5e"]
    flags += ["--kernel=attention_backward", f"--out={out}"]
    done = cli.succeed("autotune", *flags)
    assert "1 of 2, default: compiled" in done.stdout and "2 of 2, queries=" in done.stdout
    log = (tmp_path / "tuned.json.log.jsonl").read_text()
    lines = [json.loads(line) for line in log.splitlines()]
    assert [line["fate"] for line in lines] == ["compiled", "compiled"]
    assert (tmp_path / "tuned.json.png").read_bytes().startswith(b"\x89PNG")
    again = cli.succeed("autotune", *flags, "--json")
    (kernel,) = json.loads(again.stdout)
    assert kernel["kernel"] == "attention_backward" and "of 2" not in again.stderr
    if kernel["entry"] is None:
        assert not out.exists() and "clearly faster than the default" in done.stdout
    else:
        (entry,) = tuned.parse(out.read_bytes(), "").entries
        assert json.loads(json.dumps(entry.json())) == kernel["entry"]
        assert entry.source == "estimated"
