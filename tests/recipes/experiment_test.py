"""recipes.experiment: searches, then arms at the best rates; shared runs; what goes on."""

import json
import re
import shlex

import pytest

from rmt_tpu.experiments.catalog import EXPERIMENTS
from tests import cli

PAGES = ("README.md", "docs/results.md", "docs/guides/reproduce.md")

pytestmark = pytest.mark.xdist_group("recipes")

# In place of training: the folder of a run that ended, whose loss says what was trained.
MADE_UP = """
import json
from rmt_tpu.analysis import sweep
from rmt_tpu.config import overrides
from rmt_tpu.training.trainer import Outcome
def train(config, folder, *, label, change_config=False):
    print("trained", label, config.train.steps, config.model.store.key_dim)
    rate = config.train.optimizer.learning_rate
    loss = 2 + abs(rate - 0.028) + config.train.seed - 0.01 * config.model.store.key_dim
    row = {"step": config.train.steps, "eval/loss": loss}
    config = json.dumps(overrides.to_json(sweep.resolved(config)))
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


def test_an_experiment_is_shared_and_goes_on(tmp_path):
    flags = ["growth", f"--workdir={tmp_path}", "--seeds=0,1", f"--data={cli.TEXT}"]
    trained, _ = made_up(*flags, "--only=searches/*")
    rates = (0.005, 0.012, 0.028, 0.067, 0.16)
    label = "searches/rmt/learning_rate={}/seed-0 540 12"
    assert trained == [label.format(rate) for rate in rates]
    trained, out = made_up(*flags)
    assert trained == [
        *(f"rmt-32-k4/seed-{seed} 960 4" for seed in (0, 1)),
        *(
            line
            for seed in (0, 1)
            for line in (
                f"rmt-32-k4-to-16/seed-{seed} before it grows 480 4",
                f"rmt-32-k4-to-16/seed-{seed} 960 16",
            )
        ),
        *(f"rmt-32/seed-{seed} 960 16" for seed in (0, 1)),
    ]
    folder = tmp_path / "tiny" / "growth"
    found = json.loads((folder / "results.json").read_text())
    assert [arm["held_out_losses"] for arm in found["arms"]] == [
        pytest.approx([loss, loss + 1]) for loss in (1.96, 1.84, 1.84)
    ]
    assert {arm["learning_rate"] for arm in found["arms"]} == {0.028}
    page = (folder / "results.md").read_text()
    assert "| rmt-32-k4 | **-0.1200 ± 0.0000** |" in page and "![" in page
    assert (folder / "results.png").read_bytes().startswith(b"\x89PNG")
    assert f"page: {folder}/results.md" in out
    # Another one has one of its searches, and two of its arms, already.
    trained, _ = made_up("rmt-key-dim", *flags[1:], "--only=rmt-32*")
    arms = {line.split("/")[0] for line in trained}
    assert arms == {f"rmt-32-k{k}" for k in (2, 4, 8, 32, 64)} - {"rmt-32-k4"}


def test_outcomes_are_carried_to_another_machine(tmp_path):
    """Of two machines, the second trains only what the first has no line of."""
    flags = ["growth", "--seeds=0", f"--data={cli.TEXT}", f"--outcomes={tmp_path}/lines.jsonl"]
    trained, _ = made_up(*flags, f"--workdir={tmp_path}/one", "--only=searches/*")
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert len(trained) == 5 == len({line["digest"] for line in lines})
    assert lines[2]["run"].endswith("0.028/seed-0") and lines[2]["loss"] == pytest.approx(1.88)
    trained, out = made_up(*flags, f"--workdir={tmp_path}/two")
    assert trained[0] == "rmt-32-k4/seed-0 960 4" and len(trained) == 4
    again, told = made_up(*flags, f"--workdir={tmp_path}/three")
    tables = lambda text: [line for line in text.splitlines() if line.startswith("|")]
    assert again == [] and tables(told) == tables(out) != []
    # What changes a number is another run, and other text too.
    changed, _ = made_up(*flags, f"--workdir={tmp_path}/three", "--set=train.optimizer.b2=0.9")
    assert len(changed) == 9
    (tmp_path / "lines.jsonl").write_text("{}\n")
    error = cli.fail("experiment", *flags, f"--workdir={tmp_path}/three", code=1)
    assert "lines.jsonl line 1 is no outcome of a run" in error


def test_commands_for_the_hosts_of_a_pod(tmp_path):
    """They train the very runs that the experiment then finds."""
    flags = ["growth", "--seeds=0", f"--data={cli.TEXT}", f"--workdir={tmp_path}/runs"]
    script = tmp_path / "next.sh"
    out = cli.succeed("experiment", *flags, f"--commands={script}").stdout
    lines = script.read_text().splitlines()[2:]
    assert out.startswith(f"5 runs are next, in {script}") and len(lines) == 5
    made_up(*flags, "--only=searches/*")
    cli.succeed("experiment", *flags, f"--commands={script}")
    small, before, grown, large = map(shlex.split, script.read_text().splitlines()[2:])
    assert before[4] == grown[4] != large[4] and grown[5:] == ["--change_config", "$@"]
    assert small[:3] == ["python", "-m", "recipes.train"]
    out = cli.succeed("train", *small[3:5], "--dry_run").stdout
    assert "960 steps of 16 x 64" in out and f"{tmp_path}/runs/tiny/text" in out
    missing = cli.fail("experiment", *flags, f"--commands={cli.TEXT}/next.sh")
    assert "--commands=" in missing and "Not a directory" in missing


def test_usage(tmp_path):
    workdir = f"--workdir={tmp_path / 'new'}"
    assert "legal: rmt-moments, " in cli.fail("experiment", workdir)
    assert "'ladders' is unknown" in cli.fail("experiment", "ladders", workdir)
    assert "argument 'x' is not a flag" in cli.fail("experiment", "ladder", "x", workdir)
    error = cli.fail("experiment", "ladder", "--only=rmt-16/*", workdir)
    assert "--only=rmt-16/* matches no run of ladder that can be trained now" in error
    assert "--only=a is of runs" in cli.fail("experiment", "rmt-counts", "--only=a", workdir)
    error = cli.fail("experiment", "rmt-tasks", f"--data_dir={tmp_path}", workdir)
    assert "has data of none of lambada_openai, arc_easy, " in error
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    error = cli.fail("experiment", "rmt-counts", f"--workdir={tmp_path}/file/x")
    assert "--workdir=" in error and "Not a directory" in error


@pytest.mark.parametrize("name", [e.name for e in EXPERIMENTS.values() if e.reports])
@pytest.mark.parametrize("scale", ["tiny", "paper"])
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
    done = cli.succeed("experiment", *flags, f"--workdir={tmp_path}")
    assert "run 8 of" not in done.stderr and "run 3 of 3: rmt-32/seed-0" in done.stderr
    assert "going on with another config: model.store.key_dim is 4 there, 16 here" in done.stderr
    again = cli.succeed("experiment", *flags, f"--workdir={tmp_path}")
    assert "compiling" not in again.stderr
    tables = lambda text: [line for line in text.splitlines() if line.startswith("|")]
    assert tables(again.stdout) == tables(done.stdout) != []


def test_computed(tmp_path):
    done = cli.succeed("experiment", "--name=rmt-counts", f"--workdir={tmp_path}")
    folder = tmp_path / "tiny" / "rmt-counts"
    assert f"picture: {folder}/figure_1.png" in done.stdout
    assert "| rmt-305m" in (folder / "results.md").read_text()
