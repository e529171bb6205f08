"""recipes.storage_report: what it measures is what was saved, and it leaves nothing behind."""

import json

import pytest

from tests import cli

SMALL = ("--gigabytes=0.01", "--arrays=3", "--rounds=1")
KINDS = ["Checkpointer", "Checkpointer, zstd", "Orbax, zstd (its default)", "Orbax"]


def flags_of(tmp_path, *flags):
    return (f"--folder={tmp_path / 'scratch'}", f"--output={tmp_path / 'reports'}", *flags)


def test_report(tmp_path):
    done = cli.succeed("storage_report", *flags_of(tmp_path, *SMALL))
    assert list((tmp_path / "scratch").iterdir()) == []
    content = json.loads((tmp_path / "reports/storage_report.json").read_text())
    rows = {row["name"]: row for row in content["rows"]}
    assert list(rows) == KINDS
    table = (tmp_path / "reports/storage_report.md").read_text()
    assert table in done.stdout and "tensorstore 0." in table and "orbax-checkpoint 0." in table
    for name, row in rows.items():
        assert 0 < row["blocked"] < row["save"] and row["restore"] > 0
        assert f"| {name} | {row['save']:.2f} |" in table
        # Random numbers: their exponents can be compressed. Beside them are small files.
        least = 0.85 if "zstd" in name else 1.0
        assert least * 0.99e7 < row["stored_bytes"] < 1.1e7
    assert (tmp_path / "reports/storage_report.png").read_bytes().startswith(b"\x89PNG")
    # Nothing but a line a measurement.
    assert len(done.stderr.splitlines()) == len(KINDS), done.stderr


def test_of_a_bucket(server):
    flags = ("--folder=gs://bucket/scratch", "--output=gs://bucket/reports", *SMALL)
    done = cli.succeed("storage_report", *flags)
    content = json.loads(server.read("bucket", "reports/storage_report.json"))
    assert server.names("bucket", "scratch/") == []
    assert [row["name"] for row in content["rows"]] == KINDS[:2]
    assert "picture: gs://bucket/reports/storage_report.png" in done.stdout


def test_what_comes_back_otherwise_is_an_error(tmp_path):
    change_a_number = (
        "from rmt_tpu.checkpoint import Checkpointer as C; usual = C.restore\n"
        "def restore(self, like):\n"
        "  step, tree, meta = usual(self, like)\n"
        "  return step, tree | {'layer_001': tree['layer_001'].at[2, 3].add(1)}, meta\n"
        "C.restore = restore"
    )
    process = cli.start("storage_report", *flags_of(tmp_path, *SMALL), first=change_a_number)
    _, errors = process.communicate()
    assert process.returncode == 1
    line = "error: Checkpointer: the restored arrays differ from the saved arrays"
    assert errors.splitlines()[-1] == line
    assert list((tmp_path / "scratch").iterdir()) == []


def test_no_orbax(tmp_path):
    hide = "import sys; sys.modules['orbax.checkpoint'] = None"
    process = cli.start("storage_report", *flags_of(tmp_path, *SMALL), first=hide)
    _, errors = process.communicate()
    assert process.returncode == 2
    assert errors == (
        "error: Orbax is not installed; pip install orbax-checkpoint, or give --noorbax\n"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gigabytes=0"], "--gigabytes=0.0 must be positive"),
        (["--rounds=-1"], "--rounds=-1 must be positive"),
        (["--gigabytes=1e9"], "GB free, but --gigabytes=1e+09 needs 2200000000.0"),
        (["--output=s3://bucket/reports"], "s3://bucket/reports"),
    ],
    ids=["gigabytes", "rounds", "too large", "output"],
)
def test_usage_errors(flags, message, tmp_path):
    assert message in cli.fail("storage_report", *flags_of(tmp_path), *flags)


def test_reading_of_a_store(tmp_path):
    store = tmp_path / "store"
    cli.succeed("prepare_data", f"--input={cli.TEXT}", "--tokenizer=byte", f"--output={store}")
    how = ("--batch_size=4", "--seq_len=16", "--seconds=0.2")
    said = cli.succeed("storage_report", f"--store={store}", *how).stdout
    assert f"{store}, batches of 4 x 16 tokens: " in said and "tokens/s without steps" in said
    error = cli.fail("storage_report", f"--store={tmp_path}", *how)
    assert f"--store={tmp_path} has no token store" in error
    assert "--folder" in cli.fail("storage_report")
