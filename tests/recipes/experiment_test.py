"""recipes.experiment: searches, then arms at the best rates; shared runs; what goes on."""

import json
import re
import shlex
import shutil

import pytest

from rmt_tpu.experiments.catalog import EXPERIMENTS
from tests import cli
from tests.tiers import later

PAGES = ("README.md", "docs/results.md", "docs/guides/reproduce.md")

pytestmark = pytest.mark.xdist_group("recipes")

# In place of training: the folder of a run that ended, whose loss says what was trained.
MADE_UP = """
import json
from rmt_tpu.analysis import sweep
from rmt_tpu.config import overrides
from rmt_tpu.training.trainer import Outcome
def train(config, folder, *, label, change_config=False):
    slots = getattr(config.model.store, "key_dim", 0)
    print("trained", label, config.train.steps, slots)
    rate = config.train.optimizer.learning_rate
    loss = 2 + abs(rate - 0.028) + config.train.seed - 0.01 * slots
    row = {"step": config.train.steps, "eval/loss": loss}
    config = json.dumps(overrides.to_json(sweep.resolve_auto(config)))
    folder.write("config.json", config.encode())
    folder.write("metrics.jsonl", (json.dumps(row) + "\\n").encode())
    folder.write("complete.json", json.dumps({"step": row["step"]}).encode())
    return Outcome(row["step"], None)
sweep.train = train
"""


def made_up(*flags):
    process = cli.start("experiment", *flags, first=MADE_UP)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return [line[8:] for line in out.splitlines() if line.startswith("trained ")], out


RATES = (0.005, 0.012, 0.028, 0.067, 0.16)
SMALL, LARGE = "rmt-32-slots-4", "rmt-32-slots-16"


def test_an_experiment_is_shared_and_goes_on(tmp_path):
    flags = ["growth", f"--workdir={tmp_path}", "--seeds=0,1", f"--data={cli.TEXT}"]
    trained, _ = made_up(*flags, f"--only=searches/{SMALL}/*")
    label = f"searches/{SMALL}/learning_rate={{}}/seed-{{}} 960 4"
    assert trained == [label.format(rate, seed) for rate in RATES for seed in (100, 101)]
    trained, out = made_up(*flags)
    assert all(line.startswith(f"searches/{LARGE}/") for line in trained[:10])
    assert trained[10:] == [
        *(f"{SMALL}/seed-{seed} 960 4" for seed in (0, 1)),
        *(
            f"{SMALL}-{arm}/seed-{seed} {part} {slots}"
            for arm, slots_after in (("held", 4), ("to-16", 16))
            for seed in (0, 1)
            for part, slots in (("before it grows 240", 4), ("960", slots_after))
        ),
        *(f"{LARGE}/seed-{seed} 960 16" for seed in (0, 1)),
    ]
    folder = tmp_path / "tiny" / "growth"
    found = json.loads((folder / "results.json").read_text())
    assert [arm["held_out_losses"] for arm in found["arms"]] == [
        pytest.approx([loss, loss + 1]) for loss in (1.96, 1.96, 1.84, 1.84)
    ]
    assert {arm["learning_rate"] for arm in found["arms"]} == {0.028}
    page = (folder / "results.md").read_text()
    assert f"| {SMALL}-held | -0.1200 ± 0.0000 |" in page and "![" in page
    assert (folder / "results.png").read_bytes().startswith(b"\x89PNG")
    assert f"page: {folder}/results.md" in out
    # Another one has two of its searches, and two of its arms, already.
    trained, _ = made_up("rmt-key-dim", *flags[1:], "--only=*rmt-32*")
    searches = {line.split("/")[1] for line in trained if line.startswith("searches/")}
    arms = {line.split("/")[0] for line in trained} - {"searches"}
    assert searches == {"rmt-32-slots-64"}
    assert arms == {f"rmt-32-slots-{slots}" for slots in (2, 8, 32, 64)}


def test_a_signal_stops_an_experiment(tmp_path):
    """The run that was stopped has no outcome yet, and the runs after it do not begin."""
    stops = MADE_UP.split("    rate =")[0]
    stops += "    import signal\n    return Outcome(1, signal.SIGTERM)\nsweep.train = train\n"
    flags = ["growth", f"--workdir={tmp_path}", f"--data={cli.TEXT}"]
    process = cli.start("experiment", *flags, f"--outcomes={tmp_path}/kept.jsonl", first=stops)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert out.count("trained ") == 1 and "stopped; to resume:\n" in out
    assert "run 2 of" not in err and not (tmp_path / "kept.jsonl").exists()


@pytest.mark.slow
def test_outcomes_are_carried_to_another_machine(tmp_path):
    """Of two machines, the second trains only what the first has no line of."""
    flags = ["growth", "--seeds=0", f"--data={cli.TEXT}", f"--outcomes={tmp_path}/lines.jsonl"]
    trained, _ = made_up(*flags, f"--workdir={tmp_path}/one", "--only=searches/*")
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert len(trained) == 20 == len({line["digest"] for line in lines})
    assert lines[4]["run"].endswith("0.028/seed-100") and lines[4]["loss"] == pytest.approx(101.96)
    trained, out = made_up(*flags, f"--workdir={tmp_path}/two")
    assert trained[0] == f"{SMALL}/seed-0 960 4" and len(trained) == 6
    again, told = made_up(*flags, f"--workdir={tmp_path}/three")
    tables = lambda text: [line for line in text.splitlines() if line.startswith("|")]
    assert again == [] and tables(told) == tables(out) != []
    # What changes a number is another run, and other text too.
    changed, _ = made_up(*flags, f"--workdir={tmp_path}/three", "--set=train.optimizer.b2=0.9")
    assert len(changed) == 26
    (tmp_path / "lines.jsonl").write_text("{}\n")
    error = cli.fail("experiment", *flags, f"--workdir={tmp_path}/three", code=1)
    assert "lines.jsonl line 1 is not the outcome of a run" in error


@pytest.mark.slow
def test_commands_for_the_hosts_of_a_pod(tmp_path):
    """They train the very runs that the experiment then finds."""
    flags = ["growth", "--seeds=0", f"--data={cli.TEXT}", f"--workdir={tmp_path}/runs"]
    script = tmp_path / "next.sh"
    out = cli.succeed("experiment", *flags, f"--commands={script}").stdout
    lines = script.read_text().splitlines()[1:]
    assert out.startswith(f"runs to train: 20, in {script}") and len(lines) == 20
    first = shlex.split(lines[0])
    assert first[:3] == ["python", "-m", "recipes.train"] and first[5:7] == ["$@", "||"]
    out = cli.succeed("train", *first[3:5], "--dry_run").stdout
    assert "960 steps of 16 x 64" in out and f"{tmp_path}/runs/tiny/text" in out
    made_up(*flags, "--only=searches/*")
    grows = cli.fail("experiment", *flags, f"--commands={script}")
    assert f"cannot be used for runs that grow during training, like {SMALL}-held/seed-0" in grows
    # Where nothing is left, nothing is in the script.
    flags = ["rmt-largest", *flags[1:]]
    made_up(*flags)
    cli.succeed("experiment", *flags, f"--commands={script}")
    assert script.read_text().splitlines() == ["#!/usr/bin/env bash"]
    missing = cli.fail("experiment", *flags, f"--commands={cli.TEXT}/next.sh")
    assert "--commands=" in missing and "Not a directory" in missing


def test_text_is_one_for_all_runs_of_a_folder(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox\n" * 100)
    flags = ["growth", "--seeds=0", f"--data={text}", f"--commands={tmp_path}/next.sh"]
    cli.succeed("experiment", *flags, f"--workdir={tmp_path}/runs")
    text.write_text("the lazy dog\n" * 100)
    error = cli.fail("experiment", *flags, f"--workdir={tmp_path}/runs")
    assert f"--data={text} is not what other runs of this --workdir read (the input" in error
    store = f"--data={tmp_path}/runs/tiny/text"
    line = {"digest": "", "steps": [4], "losses": [2.5], "loss": 2.5, "text": 7}
    (tmp_path / "lines.jsonl").write_text(json.dumps(line) + "\n")
    lines = f"--outcomes={tmp_path}/lines.jsonl"
    out = cli.succeed(
        "experiment", *flags[:2], store, flags[3], f"--workdir={tmp_path}/runs", lines
    ).stdout
    assert f"{lines} has runs, but none that read this text" in out
    (tmp_path / "runs/tiny/text.json").write_text("1")
    error = cli.fail("experiment", *flags[:2], store, f"--workdir={tmp_path}/runs")
    assert f"{store} is not the text that the runs of {tmp_path}/runs/tiny read" in error
    (tmp_path / "older/tiny/runs/rmt-32").mkdir(parents=True)
    error = cli.fail("experiment", *flags, f"--workdir={tmp_path}/older")
    assert "has runs of an older version" in error
    flags[2] = "--data=no.txt"
    error = cli.fail("experiment", *flags, f"--workdir={tmp_path}/other")
    assert "--data='no.txt': 'no.txt' matches no file" in error
    error = cli.fail("experiment", *flags, f"--workdir={text}/x")
    assert "--workdir=" in error and "Not a directory" in error


@pytest.mark.slow
def test_a_script_goes_on_after_a_run_that_diverged(tmp_path):
    """And the experiment counts that run as one that has ended."""
    script = tmp_path / "next.sh"
    flags = ["cores", "--seeds=0", "--only=llama-tiny/*", f"--data={cli.TEXT}", "--steps=2"]
    flags += ["--batch_size=2", "--seq_len=16", "--set=train.z_loss=1e38"]
    flags += ["--set=train.max_bad_steps=1", f"--workdir={tmp_path}/runs"]
    cli.succeed("experiment", *flags, f"--commands={script}")
    _, command = script.read_text().splitlines()
    assert command.endswith('"$@" || (($? == 1)) || exit')
    error = cli.fail("train", *shlex.split(command)[3:5], code=1)
    assert "was not finite in 1 steps in a row" in error
    assert cli.succeed("experiment", *flags, f"--commands={script}").stdout == ""
    assert len(script.read_text().splitlines()) == 1


def test_usage(tmp_path):
    workdir = f"--workdir={tmp_path / 'new'}"
    assert "legal: rmt-moments, " in cli.fail("experiment", workdir)
    assert "'ladders' is unknown" in cli.fail("experiment", "ladders", workdir)
    assert "argument 'x' is not a flag" in cli.fail("experiment", "ladder", "x", workdir)
    error = cli.fail("experiment", "ladder", "--only=rmt-16/*", workdir)
    assert "--only=rmt-16/* matches no run of ladder that can be trained now" in error
    assert "--only=a selects runs" in cli.fail("experiment", "rmt-counts", "--only=a", workdir)
    error = cli.fail("experiment", "rmt-tasks", f"--data_dir={tmp_path}", workdir)
    assert "has no data for lambada_openai, arc_easy, " in error
    for file in (f"{tmp_path}/lines.jsonl/", str(tmp_path)):
        error = cli.fail("experiment", "ladder", f"--outcomes={file}", workdir)
        assert f"--outcomes={file} is a folder; legal: a new or existing file" in error
    error = cli.fail("experiment", "ladder", "--learning_rate=0.1", workdir)
    assert "--learning_rate cannot be given, because ladder searches train.optimizer" in error
    error = cli.fail("experiment", "ladder", "--seeds=7,100", workdir)
    assert "--seeds contains 100, which a search uses" in error
    error = cli.fail("experiment", "growth", "--steps=3", workdir)
    assert "--steps=3 is too few for a model that grows; legal: 4 or more" in error
    error = cli.fail("experiment", "ladder", "--commands=gs://a/b", f"--data={cli.TEXT}", workdir)
    assert "--commands=gs://a/b must be a path on this machine" in error
    shutil.rmtree(tmp_path / "new")
    assert not (tmp_path / "new").exists() and not [*tmp_path.iterdir()]
    (tmp_path / "file").write_text("")
    error = cli.fail("experiment", "rmt-counts", f"--workdir={tmp_path}/file/x")
    assert "--workdir=" in error and "Not a directory" in error


@pytest.mark.parametrize("name", [e.name for e in EXPERIMENTS.values() if e.reports])
@pytest.mark.parametrize("scale", ["tiny", *later("paper")])
def test_reports_are_commands_that_there_are(name, scale):
    """Each flag is known and its value legal: nothing is wrong but what comes last."""
    for recipe, *given in EXPERIMENTS[name].reports(scale, lambda arm: f"runs/{arm}"):
        assert "zzz" in cli.fail(recipe, *given, "--zzz=1")


def test_documents_name_what_there_is():
    text = "".join((cli.ROOT / page).read_text() for page in PAGES)
    named = set(re.findall(r"recipes\.experiment ([a-z][\w-]*)", text))
    assert named and named <= EXPERIMENTS.keys()


@pytest.mark.slow
def test_jobs_and_growth(tmp_path):
    """Really trained, two at a time, and then another time, with nothing left to do."""
    flags = ["growth", "--jobs=2", "--seeds=0", "--steps=4", "--data=" + str(cli.TEXT)]
    done = cli.succeed("experiment", *flags, f"--workdir={tmp_path}", env=cli.KEEP_NONE)
    assert f"run 4 of 4: {LARGE}/seed-0" in done.stderr
    said = "continuing with a different config: model.store.key_dim is 4 there, 16 here"
    assert said in done.stderr
    again = cli.succeed("experiment", *flags, f"--workdir={tmp_path}")
    assert "compiling" not in again.stderr
    tables = lambda text: [line for line in text.splitlines() if line.startswith("|")]
    assert tables(again.stdout) == tables(done.stdout) != []


def test_computed(tmp_path):
    done = cli.succeed("experiment", "--name=rmt-counts", f"--workdir={tmp_path}")
    folder = tmp_path / "tiny" / "rmt-counts"
    assert f"picture: {folder}/figure_1.png" in done.stdout
    assert "| rmt-305m" in (folder / "results.md").read_text()
