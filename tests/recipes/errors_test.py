"""Every mistake is one line that names the flag or field, its value and what is legal."""

import json
import shutil

import pytest

from tests import cli

LONG = "x" * 600
# The name of no file. It also stands for a place that a user may not look at.
NAME = "n" * 256


pytestmark = pytest.mark.xdist_group("recipes")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder of files that no run can use."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "latin.txt").write_bytes("caf\u00e9\n".encode("latin-1") * 99)
    (folder / "table.csv").write_text("a,b\n1,2\n")
    (folder / "field.jsonl").write_text('{"body": "hello"}\n')
    (folder / "short.txt").write_text("hello\n")
    (folder / "config.txt").write_text("{num_layers: 2}")
    (folder / "list.json").write_text("[1, 2]")
    (folder / "empty.json").write_text("{}")
    return folder


TRAIN = {
    "preset": (
        ["--preset=rmt-tinny"],
        ["'rmt-tinny'", "did you mean 'rmt-tiny'", "gpt2-tiny", " in all)"],
    ),
    "unknown flag": (["--stepz=3"], ["--stepz", "did you mean '--steps'", "--data"]),
    "no number": (["--steps=abc"], ["--steps=abc", "whole number"]),
    "no finite number": (
        ["--distributed_timeout=nan"],
        ["--distributed_timeout=nan", "finite number"],
    ),
    "not positive": (["--steps=0"], ["--steps=0", "positive"]),
    "negative": (["--profile_steps=-1"], ["--profile_steps=-1", "non-negative"]),
    "path": (["--set=model.num_layer=3"], ["model 'num_layer'", "did you mean 'num_layers'"]),
    "no value": (["--set=model.num_layers"], ["--set='model.num_layers'", "path=value"]),
    "type": (["--set=model.num_layers=two"], ["model.num_layers='two'", "whole number"]),
    "choice": (
        ["--set=model.attention.positions=ropee"],
        ["model.attention.positions 'ropee'", "did you mean 'rope'", "learned, alibi, rope, none"],
    ),
    "no choice": (['--set=model.store={"kind": [1]}'], ["model.store", "vector, matrix"]),
    "no dim": (["--set=model.store=vector"], ["model.store needs dim", '"dim": 64']),
    "argument": (["extra"], ["'extra'", "--name=value"]),
    "no file": (["--data=nothing.txt"], ["--data='nothing.txt'", "no file", "stdlib", ".jsonl"]),
    "no match": (["--data={files}/*.text"], ["*.text", "no file", ".txt"]),
    "not UTF-8": (["--data={files}/latin.txt"], ["latin.txt", "UTF-8 at byte 3"]),
    "csv": (["--data={files}/table.csv"], ["table.csv", "legal: .txt, .jsonl"]),
    "no field": (["--data={files}/field.jsonl"], ["line 1", 'no field "text"', "'body'"]),
    "too short": (["--data={files}/short.txt"], ["short.txt has", "--seq_len=16", "more text"]),
    "tokenizer": (["--tokenizer=bite"], ["--tokenizer 'bite'", "byte", "vocab.bpe"]),
    "accumulate": (
        ["--batch_size=6", "--set=train.accumulate=4"],
        ["--batch_size=6", "4 accumulated parts", "4 or 8"],
    ),
    "axis": (["--mesh=model=1"], ["--mesh='model=1'", "'model'", "data, fsdp"]),
    "mesh": (["--mesh=data=8"], ["--mesh='data=8'", "8 devices", "there are 1"]),
    "positions": (
        [
            "--seq_len=40",
            "--set=model.attention.positions=learned",
            "--set=model.attention.positions.max_length=32",
        ],
        ["--seq_len=40", "at most 32", "max_length=40", "alibi"],
    ),
    "workdir": (["--workdir={files}/short.txt/run"], ["--workdir=", "is not a folder"]),
    "long workdir": ([f"--workdir={NAME}"], [f"--workdir={NAME} cannot be read: File name too lo"]),
    "long dry run": (["--dry_run", f"--workdir={NAME}"], [f"--workdir={NAME} cannot be read: F"]),
    "long origin": ([f"--init_from={NAME}"], [f"--init_from={NAME} cannot be read: File name too"]),
    "long tokenizer": (
        [f"--tokenizer={NAME}"],
        [f"--tokenizer='{NAME}': the tokenizer cannot be read (File name too long); legal: "],
    ),
    "no config": (["--config={files}/nothing.json"], ["--config=", "No such file"]),
    "not JSON": (["--config={files}/config.txt"], ["--config=", "config.txt is not JSON"]),
    "no object": (["--config={files}/list.json"], ["--config=", "list.json", "object"]),
    "no model": (
        ["--config={files}/empty.json"],
        ["--config=", "empty.json", "lacks required fields: model"],
    ),
}

GENERATE = {
    "no workdir": ([], ["--workdir is needed"]),
    "two folders": (
        ["--workdir=a", "--init_from=b"],
        ["--workdir=a and --init_from=b both set the model; give one"],
    ),
    "no run": (["--workdir={files}"], ["--workdir=", "holds no run", "config.json"]),
    "long workdir": ([f"--workdir={NAME}"], [f"--workdir={NAME} cannot be read: File name too lo"]),
    "long origin": ([f"--init_from={NAME}"], [f"--init_from={NAME} cannot be read: File name too"]),
    "long prompts": (
        ["--workdir={run}", f"--prompts={NAME}", "--output={files}/answers.jsonl"],
        [f"--prompts={NAME} cannot be read: File name too long"],
    ),
    "long output": (
        ["--workdir={run}", "--prompts={files}/short.txt", f"--output={NAME}"],
        [f"--output={NAME} cannot be read: File name too long"],
    ),
    "no step": (
        ["--workdir={run}", "--step=7"],
        ["--step=7 is not a checkpoint", "available: 20, 40, 48"],
    ),
    "prompt": (["--workdir={run}", f"--prompt={LONG}"], ["--prompt", "601 tokens", "at most 64"]),
    "temperature": (["--workdir={run}", "--temperature=-1"], ["--temperature=-1", "at least 0"]),
    "no number": (["--workdir={run}", "--temperature=hot"], ["--temperature=hot", "a number"]),
    "top_p": (["--workdir={run}", "--top_p=0"], ["--top_p=0", "above 0, at most 1"]),
    "top_k": (["--workdir={run}", "--top_k=-1"], ["--top_k=-1", "at least 0"]),
    "max_tokens": (["--workdir={run}", "--max_tokens=0"], ["--max_tokens=0", "positive"]),
}

COMPARE = {
    "twice": (["--presets=rmt-tiny,rmt-tiny"], ["--presets=rmt-tiny,rmt-tiny", "different"]),
    "unknown": (["--presets=rmt-tiny,gpt2-tinny"], ["'gpt2-tinny'", "did you mean 'gpt2-tiny'"]),
}

OTHERS = {
    "compare": (["--presets=rmt-tiny", f"--workdir={NAME}"], ["--workdir=nnn", "cannot be read"]),
    "sweep": (
        ["--sweep=train.steps=1,2", f"--workdir={NAME}"],
        ["--workdir=nnn", "cannot be read: File name too long"],
    ),
    "experiment": (["rmt-scaling", f"--workdir={NAME}"], [f"--workdir={NAME} cannot be read"]),
    "evaluate": ([f"--workdir={NAME}", "--text=stdlib"], [f"--workdir={NAME} cannot be read"]),
    "serve": ([f"--workdir={NAME}"], [f"--workdir={NAME} cannot be read"]),
}

# One of each kind; what refuses the others is shown by tests of its own, without a program.
NOW = [f"train: {name}" for name in ("preset", "unknown flag", "type", "choice", "csv", "mesh")]
NOW += [f"train: {name}" for name in ("accumulate", "workdir", "not JSON")]
NOW += [f"train: long {name}" for name in ("workdir", "dry run", "origin", "tokenizer")]
NOW += [f"generate: long {name}" for name in ("workdir", "origin", "prompts", "output")]
NOW += [f"generate: {name}" for name in ("no run", "no step", "prompt", "top_p")]
NOW += ["compare: unknown"]
CASES = [
    pytest.param(
        *(recipe, flags, pieces),
        id=f"{recipe}: {name}",
        marks=() if f"{recipe}: {name}" in NOW else pytest.mark.slow,
    )
    for recipe, cases in [
        ("train", TRAIN),
        ("generate", GENERATE),
        ("compare", COMPARE),
    ]
    for name, (flags, pieces) in cases.items()
]
CASES += [
    pytest.param(recipe, *case, id=f"{recipe}: long workdir") for recipe, case in OTHERS.items()
]


@pytest.mark.parametrize("recipe, flags, pieces", CASES)
def test_usage(recipe, flags, pieces, trained, files, tmp_path):
    flags = [flag.replace("{run}", str(trained)).replace("{files}", str(files)) for flag in flags]
    if recipe == "train":
        flags = [f"--data={cli.TEXT}", "--seq_len=16", f"--workdir={tmp_path / 'new'}", *flags]
    error = cli.fail(recipe, *flags)
    assert all(piece in error for piece in pieces), error
    assert len(error) < 500
    assert not (tmp_path / "new").exists(), "a refused command leaves nothing behind"


def test_batch_does_not_divide_over_devices(tmp_path):
    flags = ("--batch_size=6", "--mesh=data=8", f"--workdir={tmp_path}")
    error = cli.fail("train", *cli.TINY, *flags, devices=8)
    assert "--batch_size=6" in error and "mesh axes data=8" in error and "nearest legal: 8" in error


def test_workdir_of_another_config(trained):
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    flags = (*cli.TINY, "--seed=1", "--set=model.store.key_dim=8", f"--workdir={trained}")
    error = cli.fail("train", *flags)
    assert "model.store.key_dim is 16 there, 8 here; train.seed is 0 there, 1 here" in error
    assert "another --workdir" in error
    assert before == {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "recipe, text, why",
    [
        ("train", "{", "not JSON"),
        ("train", '{"modle": 1}', "did you mean 'model'"),
        ("generate", "{", "not JSON"),
        ("generate", '{"modle": 1}', "did you mean 'model'"),
    ],
)
def test_damaged_config(recipe, text, why, tmp_path):
    (tmp_path / "config.json").write_text(text)
    flags = cli.TINY if recipe == "train" else ()
    error = cli.fail(recipe, *flags, f"--workdir={tmp_path}")
    assert str(tmp_path) in error
    assert len(error.replace(str(tmp_path), "")) < 300
    assert why in error
    assert (tmp_path / "config.json").read_text() == text


def test_config_with_an_unknown_field(trained, tmp_path):
    config = json.loads((trained / "config.json").read_text())
    config["train"]["stepz"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    error = cli.fail("train", f"--config={tmp_path / 'config.json'}", f"--workdir={trained}")
    assert "field of train 'stepz'" in error and "did you mean 'steps'" in error


@pytest.mark.parametrize("recipe", ["train", "generate"])
def test_all_checkpoints_damaged(trained, recipe, tmp_path):
    copy = shutil.copytree(trained, tmp_path / "copy")
    for step in (20, 40, cli.STEPS):
        cli.damage(copy, step)
    flags = (*cli.TINY, "--checkpoint_every=20") if recipe == "train" else ()
    error = cli.fail(recipe, *flags, f"--workdir={copy}", code=1)
    assert f"no undamaged checkpoint in {copy / 'checkpoints'}" in error
    assert "step 20: " in error and "params/unembedding/kernel" in error


@pytest.mark.slow
def test_loss_is_not_finite(tmp_path):
    # The first step is taken; what it makes of the parameters has no finite loss.
    flags = ("--set=train.optimizer.learning_rate=1e30", "--checkpoint_every=1")
    error = cli.fail("train", *cli.TINY, *flags, f"--workdir={tmp_path}", code=1)
    assert "not finite in 5 steps in a row, up to step 6; the last checkpoint is of step" in error
    assert "--set=train.optimizer.learning_rate" in error
    steps, _ = cli.curves(tmp_path)["train/loss"]
    assert steps == [1]
