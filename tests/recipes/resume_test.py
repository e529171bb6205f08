"""A run that is stopped, killed or damaged anywhere ends with the numbers of one that is not."""

import random
import re
import shlex
import sys
import time

import pytest

from tests import cli

pytestmark = pytest.mark.xdist_group("recipes")

PRESETS = ["rmt-tiny", pytest.param("gpt2-tiny", marks=pytest.mark.slow)]

# What makes a process end itself at an exact instant of its run.
SIGNAL_IN_STEP = """
import os, signal
from rmt_tpu.training.loop import Loop
usual = Loop.take_step
def _step(self, train_step, step, batches):
    usual(self, train_step, step, batches)
    if step == {step}:
        os.kill(os.getpid(), signal.{signal})
Loop.take_step = _step
"""
KILL_AFTER_SAVE = """
import os
from rmt_tpu.checkpoint import Checkpointer
usual = Checkpointer.begin_save
def begin_save(self, step, *args, **options):
    usual(self, step, *args, **options)
    if step == {step}:
        self.wait()
        os.kill(os.getpid(), 9)
Checkpointer.begin_save = begin_save
"""
KILL_IN_SAVE = """
import os
from rmt_tpu.storage.local import LocalFolder
usual = LocalFolder.create
def create(self, name, data):
    if f"{{self}}/{{name}}".endswith("checkpoints/{step}/COMMIT"):
        os.kill(os.getpid(), 9)
    return usual(self, name, data)
LocalFolder.create = create
"""
KILL_IN_ROW = """
import os
from rmt_tpu.checkpoint import Checkpointer
from rmt_tpu.storage.local import LocalFolder
# Saves are complete at once, so that it is known which ones a kill leaves.
Checkpointer.begin_save = Checkpointer.save
usual = LocalFolder.append
def append(self, name, data):
    if name == "metrics.jsonl" and data.startswith(b'{{"step": {step},'):
        usual(self, name, data[:20])
        os.kill(os.getpid(), 9)
    usual(self, name, data)
LocalFolder.append = append
"""


@pytest.fixture(scope="module", params=PRESETS)
def preset(request):
    return request.param


@pytest.fixture(scope="module")
def uninterrupted(preset, often_saved, tmp_path_factory):
    if preset == "rmt-tiny":
        return often_saved
    return cli.train(tmp_path_factory.mktemp(preset), *cli.OFTEN, preset=preset)


def start(workdir, preset, *flags, **options):
    flags = (f"--preset={preset}", *cli.TINY, *cli.OFTEN, *flags, f"--workdir={workdir}")
    return cli.start("train", *flags, **options)


def assert_same_run(workdir, uninterrupted):
    assert cli.curves(workdir) == cli.curves(uninterrupted)
    assert (workdir / "samples.txt").read_text() == (uninterrupted / "samples.txt").read_text()


@pytest.fixture(scope="module")
def seldom_saved(preset, trained, tmp_path_factory):
    if preset == "rmt-tiny":
        return trained
    return cli.train(tmp_path_factory.mktemp(preset), *cli.SELDOM, preset=preset)


def test_signal(preset, seldom_saved, tmp_path):
    signal = {"rmt-tiny": "SIGINT", "gpt2-tiny": "SIGTERM"}[preset]
    # A step with an evaluation, whose row must not get lost.
    first = SIGNAL_IN_STEP.format(step=20, signal=signal)
    code = {"SIGINT": 130, "SIGTERM": 75}[signal]
    process = start(tmp_path, preset, *cli.SELDOM, "--stopped_exit_code=75", first=first)
    out, err = process.communicate()
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert f"stopped at step 20, saved in {tmp_path}" in out
    assert (tmp_path / "checkpoints/20/COMMIT").exists()
    assert cli.curves(tmp_path)["train/loss"][0] == list(range(1, 21))

    line = out.splitlines()[-1]
    if preset == "rmt-tiny":  # by what has the imports; a shell takes the other's line, at night
        *command, recipe = shlex.split(line)[:3]
        assert command == [sys.executable, "-m"]
        again = cli.run(recipe.removeprefix("recipes."), *shlex.split(line)[3:])
    else:
        again = cli.run_line(line)
    assert again.returncode == 0, again.stderr
    assert f"resuming {tmp_path} from step 20" in again.stderr
    assert_same_run(tmp_path, seldom_saved)


@pytest.mark.slow
def test_kills_and_damage(preset, uninterrupted, tmp_path):
    kills = [
        (KILL_AFTER_SAVE, 24, None),  # a step with an evaluation
        (KILL_IN_SAVE, 36, 24),  # all arrays of the checkpoint are there, but it does not count
        (KILL_IN_ROW, 44, 30),
    ]
    for code, step, resumed_from in kills:
        process = start(tmp_path, preset, first=code.format(step=step))
        _, err = process.communicate()
        assert process.returncode == -9, err
        assert (f"from step {resumed_from}" in err) == (resumed_from is not None)
    assert not (tmp_path / "metrics.jsonl").read_bytes().endswith(b"\n"), "no line is torn"
    cli.damage(tmp_path, 42)
    process = start(tmp_path, preset)
    _, err = process.communicate()
    assert process.returncode == 0, err
    (line,) = [line for line in err.splitlines() if line.startswith("damaged checkpoint")]
    assert re.search("step 42: .*params/unembedding/kernel", line)
    assert f"resuming {tmp_path} from step 36" in err
    assert_same_run(tmp_path, uninterrupted)


@pytest.mark.slow
def test_kill_anywhere(preset, uninterrupted, tmp_path):
    """Whatever it is in: starting, compiling, a step, a save, a plot."""
    rng = random.Random(0)

    def rows():
        path = tmp_path / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    killed = 0
    for _ in range(6):
        process = start(tmp_path, preset, "--checkpoint_every=3")
        # Half of them some rows into the steps, half of them from the start on.
        until = rows() + rng.randrange(1, 12) if rng.random() < 0.5 else 0
        while rows() < until and process.poll() is None:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.05 if until else 1.5))
        process.kill()
        process.communicate()
        killed += process.returncode == -9
    assert killed >= 3
    process = start(tmp_path, preset)
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert_same_run(tmp_path, uninterrupted)


@pytest.mark.slow
def test_text_that_has_changed_is_refused(tmp_path):
    text, workdir = tmp_path / "text.txt", tmp_path / "run"
    text.write_text(cli.TEXT.read_text())
    cli.train(workdir, f"--data={text}")
    before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    text.write_text(cli.TEXT.read_text().replace("fox", "ox"))
    flags = (*cli.TINY, f"--data={text}", f"--workdir={workdir}")
    error = cli.fail("train", "--preset=rmt-tiny", *flags)
    assert f"--data={text}" in error and f"--workdir={workdir}" in error and "step 48" in error
    assert before == {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
