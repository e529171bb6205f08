"""recipes.prepare_data as a person runs it, and recipes.train on what it leaves."""

import json
import os
import pty
import random
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from rmt_tpu.data import ByteTokenizer, documents, open_store, pack, read_template
from rmt_tpu.data.token_store import read_sealed, seal
from rmt_tpu.runs.metrics import read_metrics, series
from rmt_tpu.storage import open_folder
from tests import cli

pytestmark = pytest.mark.xdist_group("recipes")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """10 MB, in 10 parts."""
    folder = tmp_path_factory.mktemp("text")
    draw = random.Random(0)
    words = ["stone ", "river ", "über ", "and ", "lines\n"]
    for number in range(9):
        texts = ("".join(draw.choices(words, k=4000)) + f"{number} {n}" for n in range(47))
        path = folder / f"{number}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return f"{folder}/*.jsonl"


@pytest.fixture(scope="module")
def store(source, tmp_path_factory):
    """A store that tests only read."""
    output = tmp_path_factory.mktemp("store") / "words"
    done = prepare(source, output, "--workers=1")
    assert f"{output} is complete: 10 parts" in done.stdout
    return output


def prepare(source: str, output: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return cli.succeed("prepare_data", *flags(source, output), *more)


def flags(source: str, output: Path) -> list[str]:
    return [f"--input={source}", f"--output={output}", "--eval_fraction=0.05", "--workers=2"]


def start(source: str, output: Path, first: str = "") -> cli.Process:
    """As the first of a process group of its own."""
    return cli.start("prepare_data", *flags(source, output), first=first, leads=True)


def content(store: Path) -> list[int]:
    opened = open_store(str(store))
    return [opened.train.checksum(), opened.held_out.checksum()]


def test_all_text_is_in_the_store_once(store, source):
    opened = open_store(str(store))
    streams = [s.read(np.zeros(1, np.int64), len(s))[0] for s in (opened.train, opened.held_out)]
    expected = pack(documents(source), ByteTokenizer()).tokens
    assert sum(map(len, streams)) == len(expected)
    counts = sum(np.bincount(stream, minlength=257) for stream in streams)
    np.testing.assert_array_equal(counts, np.bincount(expected, minlength=257))


def members(group: int) -> bool:
    """Whether a process of the group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition) -> None:
    end = time.monotonic() + cli.TIMEOUT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, 3])
def test_killed_anywhere_the_same_command_ends_with_the_same_store(source, store, tmp_path, kills):
    """At instants from the first part on; and the workers of a killed process do not stay."""
    output, draw = tmp_path / "store", random.Random(1)
    manifests = lambda: len(list(output.glob("parts/*/manifest.json")))
    kept = [0]
    for _ in range(kills):
        process = start(source, output)
        wait_until(lambda p=process: manifests() > kept[-1] or p.poll() is not None)
        time.sleep(draw.uniform(0, 0.05))
        process.kill()
        process.communicate()
        wait_until(lambda p=process: not members(p.pid))
        kept.append(manifests())
    assert kept[1] >= 1 and kept == sorted(kept)
    assert f"10 parts, {kept[-1]} from an earlier start" in prepare(source, output).stdout
    assert content(output) == content(store)
    assert sorted(p.name for p in output.iterdir()) == sorted(p.name for p in store.iterdir())
    for part in output.glob("parts/*"):
        assert len(list(part.iterdir())) == 2, "the manifest, and one attempt"


# When the first part is done, and at most a few of the others are begun.
SIGNAL_IN_WORK = """
import os, signal
from rmt_tpu.data import pool
usual = pool.wait
def wait(*args):
    over, waiting = usual(*args)
    if over:
        {send}
    return over, waiting
pool.wait = wait
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "send",
    [
        pytest.param("os.killpg(0, signal.SIGINT)", id="Ctrl-C"),
        pytest.param("os.kill(os.getpid(), signal.SIGTERM)", id="SIGTERM"),
    ],
)
def test_a_signal_ends_all_processes(source, tmp_path, send):
    output = tmp_path / "store"
    process = start(source, output, first=SIGNAL_IN_WORK.format(send=send))
    _, said = process.communicate()
    wait_until(lambda: not members(process.pid))
    assert process.returncode == 130, said
    # Where the machine is slow, there is progress before.
    lines = [line for line in said.splitlines() if not line.startswith("tokenising: ")]
    assert lines == ["error: interrupted"]
    assert 0 < len(list(output.glob("parts/*/manifest.json"))) < 10


@pytest.mark.parametrize(
    ("given", "legal"),
    [
        (["--text_field=body"], "--input with .jsonl, .parquet or .arrow files and the format"),
        (["--text_field=body", "--format=completion", "--input=a.jsonl"], "--input with .jsonl"),
        (["--chat_template=t"], "--format=messages, or leave out --chat_template"),
    ],
)
def test_a_flag_without_an_effect_is_refused(tmp_path, given, legal):
    message = cli.fail("prepare_data", "--input=a.txt", f"--output={tmp_path}/store", *given)
    name, _, value = given[0].partition("=")
    assert message.startswith(f"error: {name}={value!r} has no effect on this input; ")
    assert f"legal: {legal}" in message
    assert not list(tmp_path.iterdir())


def test_a_run_of_a_column_has_the_text_of_its_store(tmp_path):
    table = pyarrow.table({"id": range(40), "body": [f"line {n}\n" * 9 for n in range(40)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    source = f"{tmp_path}/a.parquet"
    done = cli.succeed(
        "prepare_data", f"--input={source}", "--text_field=body", f"--output={tmp_path}/store"
    )
    assert f"{tmp_path}/store is complete" in done.stdout
    run = f"--workdir={tmp_path}/run"  # the default may hold a run of `make train`
    flags = "train", "--preset=rmt-tiny", f"--data={source}", "--dry_run", "--seq_len=64", run
    assert '"text_field": "body"' in cli.succeed(*flags, "--text_field=body").stdout
    assert "has no column 'text' of strings" in cli.fail(*flags)


def test_held_out_conversations_without_answers_are_told(tmp_path):
    source, template = tmp_path / "talks.jsonl", tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}")
    roles = ["assistant", *["user"] * 59]  # the first conversation is not held out
    rows = [{"messages": [{"role": r, "content": f"{n}"}]} for n, r in enumerate(roles)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    form = [f"--input={source}", "--format=messages", f"--chat_template={template}"]
    done = cli.succeed("prepare_data", *form, f"--output={tmp_path}/store")
    assert done.stdout.splitlines()[-1].startswith(
        "note: no held-out token has a loss; only messages of the role "
    )


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere():
    first = (
        "sys.argv = ['prepare_data']; import recipes.prepare_data as recipe\n"
        "with recipe._Progress(line_seconds=0.0) as progress:\n"
        "    progress.update(1_500_000, 3_000_000, 'tokenising')\n"
        "sys.exit()\n"
    )
    _, errors = cli.start("prepare_data", first=first).communicate()
    assert errors == "tokenising: 1.5 of 3.0 MB (50%)\n"
    main, terminal = pty.openpty()
    env = {"TERM": "xterm", "COLUMNS": "100"}
    assert cli.start("prepare_data", first=first, env=env, stderr=terminal).wait() == 0
    os.close(terminal)
    shown = os.read(main, 2**16).decode()
    os.close(main)
    assert "tokenising" in shown and "1.5/3.0 MB" in shown and "━" in shown


@pytest.fixture(scope="module")
def trained_from_copy(store, tmp_path_factory):
    """A run on a copy of the store, its flags, and the copy."""
    folder = tmp_path_factory.mktemp("from_copy")
    copy = shutil.copytree(store, folder / "store")
    flags = [*cli.TINY, f"--data={copy}", "--checkpoint_every=10"]
    cli.succeed("train", *flags, f"--workdir={folder / 'once'}")
    return folder / "once", flags, copy


@pytest.mark.slow
def test_a_run_trains_from_a_store(trained_from_copy):
    """The tokenizer is the store's."""
    once, _, copy = trained_from_copy
    rows = read_metrics(once)
    assert all(row["throughput/data_wait_seconds"] >= 0 for row in rows)
    config = json.loads((once / "config.json").read_text())
    assert config["data"]["tokenizer"] == str(copy) and config["model"]["vocab_size"] == 257


@pytest.mark.slow
def test_a_run_from_a_store_goes_on_where_it_was(trained_from_copy, tmp_path):
    """The same numbers, with a kill in between and without."""
    once, flags, copy = trained_from_copy
    twice = tmp_path / "twice"
    process = cli.start("train", *flags, f"--workdir={twice}")
    wait_until(lambda: list(twice.glob("checkpoints/10/COMMIT")))
    process.kill()
    process.communicate()
    cli.succeed("train", *flags, f"--workdir={twice}")
    assert cli.curves(twice) == cli.curves(once)
    # Other text under the name of the store is noticed, and nothing of it is read for that.
    content = read_sealed(open_folder(copy), "manifest.json")
    content["parts"][3]["train"]["crc32"] ^= 1
    (copy / "manifest.json").write_bytes(seal(content))
    message = cli.fail("train", *flags, f"--workdir={twice}", "--steps=60", "--change_config")
    assert "does not give the tokens that the run" in message


def word_tokenizer(folder: Path) -> Path:
    import tokenizers

    vocabulary = {"<s>": 0, "<unk>": 1, "river": 2}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    return folder


def test_errors_are_one_line(store, source, tmp_path):
    """What each command names; exit code 2 and no traceback is what `fail` asks for."""
    words = word_tokenizer(tmp_path / "words")
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(b'{"text": "good"}\n{"text": "\xff"}\n')
    half = tmp_path / "half"
    half.mkdir()
    (half / "plan.json").write_bytes((store / "plan.json").read_bytes())
    run = [*cli.TINY, f"--workdir={tmp_path / 'run'}"]
    for recipe, command, said in [
        ("prepare_data", [f"--input={tmp_path}/no.txt", "--output=x"], "matches no file"),
        ("prepare_data", ["--output=x"], "--input is needed"),
        ("prepare_data", ["--input=stdlib"], "--output is needed"),
        ("prepare_data", [f"--input={bad}", f"--output={tmp_path}/x"], "line 2"),
        ("prepare_data", [*flags(source, store), "--seed=1"], "seed 0 is now 1"),
        (
            "prepare_data",
            [*flags(source, store), f"--tokenizer={words}"],
            "tokenizer byte is now words",
        ),
        ("prepare_data", ["--input=stdlib", "--output=s3://b/x"], "gs://bucket/path"),
        ("prepare_data", ["--input=stdlib", "--output=x", "--seed=a"], "must be a whole number"),
        ("train", [*run, f"--data={half}"], "is not complete; run recipes.prepare_data again"),
        ("train", [*run, f"--data={store}", f"--tokenizer={words}"], "encodes text differently"),
    ]:
        assert said in cli.fail(recipe, *command), command


@pytest.mark.slow
def test_completions_are_trained_on_alone(tmp_path):
    """A step whose batch has no token with a loss is not skipped, and changes little."""
    source = tmp_path / "sums.jsonl"
    rows = ({"prompt": f"{n:070}", "completion": "yes"} for n in range(60))
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [f"--input={source}", "--format=completion", f"--output={tmp_path}/store"]
    cli.succeed("prepare_data", *flags)
    done = cli.run("prepare_data", *flags[:1], flags[2])
    assert done.returncode == 2 and "format completion is now text" in done.stderr
    tiny = [flag for flag in cli.TINY if not flag.startswith(("--data", "--batch_size"))]
    found = []
    for number, data in enumerate((f"{tmp_path}/store", str(source))):
        workdir, more = tmp_path / f"run{number}", [f"--data={data}", "--batch_size=1"]
        form = ["--format=completion"] if number else []
        cli.succeed("train", "--preset=rmt-tiny", *tiny, *more, *form, f"--workdir={workdir}")
        rows = read_metrics(workdir)
        assert rows[-1]["train/skipped_steps"] == 0
        found.append(series(rows, "train/loss")[1])
        assert 0.0 in found[-1] and max(found[-1]) > 3
    assert len(found[0]) == len(found[1]) == cli.STEPS


@pytest.mark.slow
def test_a_run_of_conversations_keeps_the_template_for_the_server(tmp_path):
    source, template = tmp_path / "talks.jsonl", tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}")
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    rows = ({"messages": [*talk, {"role": "user", "content": f"{n}"}]} for n in range(60))
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    form = ["--format=messages", f"--chat_template={template}"]
    cli.succeed("prepare_data", f"--input={source}", *form, f"--output={tmp_path}/store")
    tiny = [flag for flag in cli.TINY if not flag.startswith(("--data", "--seq_len"))]
    for number, data in enumerate((f"{tmp_path}/store", str(source))):
        more = [f"--data={data}", "--seq_len=64", *(form if number else [])]
        run = tmp_path / f"run{number}"
        cli.succeed("train", "--preset=rmt-tiny", *tiny, *more, f"--workdir={run}")
        found = read_template(open_folder(run), ByteTokenizer())
        assert found.render(talk) == "user: Hi;assistant: Yes?;"
        _, losses = series(read_metrics(run), "train/loss")
        assert losses[-1] < losses[0] / 2
