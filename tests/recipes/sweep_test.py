"""recipes.sweep: trials are run folders, a sweep goes on, one that diverges is a row."""

import json

import pytest

from tests import cli

pytestmark = pytest.mark.xdist_group("recipes")

# A rate that no float32 stands.
RATES = "--sweep=train.optimizer.learning_rate=1e-2,1e30"
FLAGS = ["--preset=rmt-tiny", *cli.tiny("--steps=12", RATES, "--set=train.sample_tokens=0")]

# In the second of the trials, once.
SIGINT_IN_STEP = """
import os, signal
from rmt_tpu.training.loop import Loop
usual = Loop.take_step
def _step(self, train_step, step, batches):
    usual(self, train_step, step, batches)
    if self.step == 10 and "x2" in str(self.side_files._folder):
        os.kill(os.getpid(), signal.SIGINT)
Loop.take_step = _step
"""

# In place of training.
NO_TRAINING = """
from rmt_tpu.analysis import sweep
sweep.try_run = lambda config, folder, *, label: None
sweep.held_out_loss = lambda folder: 2.5
"""


def rows(folder):
    return json.loads((folder / "sweep.json").read_text())


def test_a_sweep_goes_on_and_survives_what_diverges(tmp_path):
    rate = RATES.replace("1e-2,1e30", "1e30")
    flags = [*FLAGS[:-2], rate, FLAGS[-1], f"--workdir={tmp_path}"]
    done = cli.succeed("sweep", *flags)
    assert "not finite in 5 steps in a row" in done.stderr
    (found,) = rows(tmp_path)
    assert found["variant"] == "model" and found["losses"] == [None]
    assert "| model | 1e+30 | 12 | not finite: 1 of 1 |" in done.stdout
    told = (tmp_path / "model" / "learning_rate=1e+30" / "diverged.txt").read_text()
    assert "not finite" in told
    again = cli.succeed("sweep", *flags)
    assert "compiled the train step" not in again.stderr
    assert rows(tmp_path) == [found]


@pytest.mark.parametrize(
    "flags, labels",
    [
        (
            ["--sweep=train.seed=1", "--steps=6", "--variant=x1", "--variant=x2 train.steps=9"],
            ["x1 | 1 | 6", "x2 | 1 | 9"],
        ),
        (["--sweep=train.steps=6,9"], ["model | 6 | 6", "model | 9 | 9"]),
    ],
)
def test_a_row_has_the_steps_of_its_own_runs(flags, labels, tmp_path):
    flags += [f"--data={cli.TEXT}", "--preset=rmt-tiny", f"--workdir={tmp_path}"]
    process = cli.start("sweep", *flags, first=NO_TRAINING)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert [row["steps"] for row in rows(tmp_path)] == [6, 9]
    assert all(f"| {label} | 2.5000 |" in out for label in labels)


@pytest.mark.slow
def test_halving_over_widths(tmp_path):
    variants = ["--variant=x1", "--variant=x2 model.store.key_dim=32 model.attention.window=40"]
    flags = [*FLAGS, *variants, "--search=halving", "--halving_factor=2"]
    flags += ["--set=model.parametrization=mup", f"--workdir={tmp_path}"]
    process = cli.start("sweep", *flags, first=SIGINT_IN_STEP)
    out, err = process.communicate()
    assert process.returncode == 130, err
    assert not (tmp_path / "sweep.json").exists()
    again = cli.run_line(out.splitlines()[-1])
    assert again.returncode == 0, again.stderr
    found = [(r["variant"], r["steps"], len(r["losses"])) for r in rows(tmp_path)]
    assert found == [(v, steps, 1) for v in ("x1", "x2") for steps in (6, 6, 12)]
    rates = [r["point"]["train.optimizer.learning_rate"] for r in rows(tmp_path)]
    assert rates == [1e-2, 1e30, 1e-2] * 2  # what diverged does not go on
    config = json.loads((tmp_path / "x2/12-steps/learning_rate=0.01/config.json").read_text())
    assert config["model"]["parametrization"]["base"] == ["store.key_dim=16"]
    assert config["model"]["store"]["key_dim"] == 32 and config["train"]["steps"] == 12


ERRORS = {
    "nothing": ([], ["--sweep is needed"]),
    "path": (["--sweep=train.stepz=1,2"], ["--sweep=train.stepz=1", "train 'stepz' is unknown"]),
    "value": (["--sweep=train.steps=1,x"], ["--sweep=train.steps=x", "whole number"]),
    "twice": (["--sweep=train.seed=1,2", "--sweep=train.seed=3"], ["--sweep", "twice"]),
    "trials": ([RATES, "--trials=3"], ["--trials=3", "grid"]),
    "no trials": ([RATES, "--search=random"], ["--trials, the number of points, is needed"]),
    "variant": ([RATES, "--variant=model.num_layers=2"], ["--variant=", "no name"]),
    "variants": ([RATES, "--variant=a", "--variant=a"], ["--variant", "same name"]),
    "one width": (["--coordinates=2"], ["--coordinates", "two or more widths"]),
}
NOW = ["path", "variant"]

SEED = "--sweep=train.seed=1,2"
SET_TWICE = {
    "seeds and sweep": ([SEED, "--seeds=0,1"], "--seeds and --sweep=train.seed both set"),
    "seeds and set": ([RATES, "--seeds=0", "--set=train.seed=3"], "--set=train.seed both set"),
    "seeds and variant": (
        [RATES, "--seeds=0,1", "--variant=a train.seed=3"],
        "--seeds and --variant=a train.seed both set train.seed; give one",
    ),
    "sweep and variant": ([SEED, "--variant=a train.seed=3"], "both set train.seed; give one"),
    "halving": (
        ["--search=halving", "--sweep=train.steps=4,8"],
        "--search=halving and --sweep=train.steps both set train.steps; give one",
    ),
    "a part": (
        [RATES, "--sweep=train.optimizer=adamw,muon"],
        "both set train.optimizer; give one",
    ),
    "a flag": (
        ["--sweep=train.steps=4,8", "--steps=6"],
        "--sweep=train.steps and --steps both set train.steps; give one",
    ),
    "a part of a set value": (
        ["--sweep=train.optimizer=adamw,muon", "--learning_rate=0.1"],
        "--sweep=train.optimizer and --learning_rate both set train.optimizer; give one",
    ),
}


@pytest.mark.parametrize("flags, words", SET_TWICE.values(), ids=SET_TWICE)
def test_what_is_set_twice_is_refused(flags, words, tmp_path):
    error = cli.fail("sweep", *flags, f"--workdir={tmp_path / 'new'}")
    assert words in error
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "flags, pieces",
    [
        pytest.param(*case, id=name, marks=() if name in NOW else pytest.mark.slow)
        for name, case in ERRORS.items()
    ],
)
def test_usage(flags, pieces, tmp_path):
    error = cli.fail("sweep", *flags, f"--workdir={tmp_path / 'new'}")
    assert all(piece in error for piece in pieces), error
    assert not (tmp_path / "new").exists()
