"""recipes.evaluate: a trained run beside what knows less, and what it refuses."""

import json

import pytest

from rmt_tpu.config import Rope
from rmt_tpu.data import ByteTokenizer
from rmt_tpu.hub.folder import export
from tests import cli, models

pytestmark = pytest.mark.xdist_group("recipes")

WORDS = "the quick brown fox jumps over the lazy dog".split()


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """Questions about the text that the run was trained on."""
    folder = tmp_path_factory.mktemp("data")
    lines = [{"query": WORDS[n - 1], "choices": [WORDS[n], "xqzw"], "gold": 0} for n in range(1, 9)]
    texts = [{"text": " ".join(WORDS[: n + 1])} for n in range(1, 9)]
    for name, of_name in {"piqa": lines, "hellaswag": lines, "lambada_openai": texts}.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, of_name)))
    return folder


@pytest.mark.slow
def test_a_run_beside_what_knows_less(trained, data_dir, tmp_path):
    flags = (
        f"--workdir={trained}",
        "--tasks=hellaswag,lambada_openai",
        f"--data_dir={data_dir}",
        f"--text={cli.TEXT}",
        "--stride=8",
        "--against=unigram,untrained",
        f"--output={tmp_path}",
    )
    out = cli.succeed("evaluate", *flags).stdout
    assert "| hellaswag | acc | " in out and f"picture: {tmp_path}/plots/evaluation.png" in out
    told = json.loads((tmp_path / "evaluation.json").read_text())
    run, unigram, untrained = (told[name] for name in (trained.name, "unigram", "untrained"))
    perplexity = lambda results, name: results[2]["metrics"][name]["value"]
    for other in (unigram, untrained):
        for name in ("token_perplexity", "word_perplexity"):
            assert perplexity(run, name) < 0.8 * perplexity(other, name)
    assert run[0]["metrics"]["acc"]["value"] > untrained[0]["metrics"]["acc"]["value"]
    assert {r["step"] for r in run} == {cli.STEPS} and run[0]["contexts_cut"] == 0
    (word,) = [
        line
        for line in told[f"{trained.name} - unigram"]
        if (line["task"], line["metric"]) == ("text", "word_perplexity")
    ]
    assert word["value"] < 0 and word["p"] < 1e-9
    # All of it was answered, and kept in --output: nothing is asked again.
    kept = list((tmp_path / "evaluation").iterdir())
    assert len(kept) == 9 and sum(path.name.startswith("hellaswag-") for path in kept) == 3
    assert all(result["requests_answered_now"] == result["requests"] for result in run)
    cli.succeed("evaluate", *flags[:-2], f"--output={tmp_path}")
    (again,) = json.loads((tmp_path / "evaluation.json").read_text()).values()
    assert [r["requests_answered_now"] for r in again] == [0, 0, 0]
    assert [r["metrics"] for r in again] == [r["metrics"] for r in run]


@pytest.mark.slow
def test_a_folder_of_the_hub_is_compared_and_left_as_it_is(data_dir, tmp_path):
    """Its answers are kept in --output, whether it is the first model or the second."""
    hub, own = tmp_path / "hub", tmp_path / "own"
    vector = {"num_heads": 4, "inverse_layer_scaling": False, "positions": Rope()}
    decoder = models.byte_decoder(kind="vector", **vector)
    for folder in hub, own:
        export(decoder, ByteTokenizer(), folder, max_length=64, kind="rmt_tpu")
    files = {path.name for path in hub.iterdir()}
    out = f"--output={tmp_path / 'results'}"
    task = ("--tasks=piqa", f"--data_dir={data_dir}")
    cli.succeed("evaluate", f"--init_from={hub}", f"--against={own}", *task, out)
    assert {path.name for path in hub.iterdir()} == {path.name for path in own.iterdir()} == files
    assert any((tmp_path / "results/evaluation").iterdir())
    results = json.loads((tmp_path / "results/evaluation.json").read_text())
    assert results["hub"][0]["metrics"] == results["own"][0]["metrics"]


# When the model has answered its first batch, which is not written yet.
TERMINATED = """
import os, signal
from rmt_tpu.evaluation.scorer import Scorer
usual = Scorer.answers
def answers(self, requests):
    for batch in usual(self, requests):
        yield batch
        os.kill(os.getpid(), signal.SIGTERM)
Scorer.answers = answers
"""


def test_sigterm_keeps_the_answers_so_far_and_says_how_to_resume(trained, data_dir, tmp_path):
    task = ("--tasks=piqa", f"--data_dir={data_dir}", f"--output={tmp_path}", "--batch_tokens=64")
    process = cli.start("evaluate", f"--workdir={trained}", *task, first=TERMINATED)
    _, said = process.communicate()
    assert process.returncode == 143
    assert "stopped; to resume:" in said.splitlines()[-2] and "--tasks=piqa" in said
    (kept,) = (tmp_path / "evaluation").iterdir()
    assert 1 <= len(kept.read_text().splitlines()) < 16


def test_a_model_that_cannot_read_a_task_is_named_before_the_first_is_run(
    trained, data_dir, tmp_path
):
    """The run could be scored; the model to compare with was made for 3 tokens."""
    vector = {"num_heads": 4, "inverse_layer_scaling": False, "positions": Rope()}
    decoder = models.byte_decoder(kind="vector", **vector)
    export(decoder, ByteTokenizer(), tmp_path / "short", max_length=3, kind="rmt_tpu")
    task = ("--tasks=lambada_openai", f"--data_dir={data_dir}", f"--output={tmp_path}/out")
    error = cli.fail("evaluate", f"--workdir={trained}", f"--against={tmp_path}/short", *task)
    assert error.startswith(
        f"error: {tmp_path}/short reads 3 tokens at once (its maximum length), which is less than "
        "the 6 tokens of the longest continuation of lambada_openai; legal: --max_length=6 or more"
    )
    assert not list((tmp_path / "out").iterdir())


def test_a_stride_that_another_model_cannot_use_is_refused_before_the_first_is_run(
    trained, tmp_path
):
    """The run reads 16 tokens at once; the model to compare with was made for 8."""
    vector = {"num_heads": 4, "inverse_layer_scaling": False, "positions": Rope()}
    decoder = models.byte_decoder(kind="vector", **vector)
    export(decoder, ByteTokenizer(), tmp_path / "short", max_length=8, kind="rmt_tpu")
    (tmp_path / "text.txt").write_text("some words")
    text = (f"--text={tmp_path}/text.txt", "--stride=16", f"--output={tmp_path}/out")
    error = cli.fail("evaluate", f"--workdir={trained}", f"--against={tmp_path}/short", *text)
    assert error == (
        "error: --stride=16 is more than the 8 tokens that short reads at once (--max_length); "
        "legal: 1 to 8"
    )
    assert not list((tmp_path / "out").iterdir())


def test_where_results_cannot_be_written_nothing_is_read(data_dir, tmp_path):
    """The folder of --output is tried first; it is below a file."""
    output = f"--output={data_dir}/piqa.jsonl/out"
    task = ("--tasks=piqa", f"--data_dir={data_dir}")
    error = cli.fail("evaluate", f"--workdir={tmp_path}/none", output, *task)
    assert error.startswith(f"error: {output} cannot be written to: ")
    assert not (tmp_path / "none").exists()


REFUSED = {
    "nothing": ([], ["--tasks or --text is needed"]),
    "no data": (["--tasks=piqa"], ["--tasks and --data_dir, the folder"]),
    "stride": (["--tasks=piqa", "--data_dir={data}", "--stride=3"], ["--stride=3 needs --text"]),
    "unknown": (["--tasks=pika", "--data_dir={data}"], ["'pika'", "did you mean 'piqa'"]),
    "no file": (["--tasks=arc_easy", "--data_dir={data}"], ["--data_dir=", "no arc_easy.jsonl"]),
    "length": (
        ["--tasks=piqa", "--data_dir={data}", "--max_length=65"],
        ["--max_length=65", "64 learned positions; legal: 1 to 64"],
    ),
    "short": (
        ["--tasks=lambada_openai", "--data_dir={data}", "--max_length=3"],
        [
            "--max_length=3",
            "6 tokens of the longest continuation of lambada_openai; legal: --max_length=6 or",
        ],
    ),
    "no other": (
        ["--tasks=piqa", "--data_dir={data}", "--against={data}"],
        ["--against=", "holds no run"],
    ),
    "mesh": (["--tasks=piqa", "--data_dir={data}", "--mesh=stage=2"], ["--mesh"]),
}


@pytest.mark.parametrize(
    "flags, pieces",
    [
        pytest.param(*case, id=name, marks=() if name == "no other" else pytest.mark.slow)
        for name, case in REFUSED.items()
    ],
)
def test_one_line(flags, pieces, trained, data_dir, tmp_path):
    flags = [flag.replace("{data}", str(data_dir)) for flag in flags]
    error = cli.fail("evaluate", f"--workdir={trained}", f"--output={tmp_path}", *flags)
    assert all(piece in error for piece in pieces), error
