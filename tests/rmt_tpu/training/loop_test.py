"""The training loop with a step that is a plain function: what a signal to stop does to it."""

import signal
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import sharding
from pallas_kernels import tuned
from rmt_tpu.checkpoint import Checkpointer, Saved
from rmt_tpu.config import overrides
from rmt_tpu.config.presets import run as preset_run
from rmt_tpu.data import ByteTokenizer, Windows
from rmt_tpu.data.datasets import Datasets
from rmt_tpu.runs.side_files import SideFiles
from rmt_tpu.storage import open_folder
from rmt_tpu.training import loop
from rmt_tpu.training.kernel_blocks import FILE, KernelBlocks
from rmt_tpu.training.loop import Int16Overflow, Loop, LoopInputs
from rmt_tpu.training.progress import TrainingProgress
from rmt_tpu.training.spikes import GoBack, SpikeState, Spread
from rmt_tpu.training.start import Start, Text


class State(NamedTuple):
    """A train state whose only parameter is the number of its steps."""

    params: int
    copies: Any = None


class Checkpoints(Checkpointer):
    """The checkpoints of a run, in memory."""

    def __init__(self, events):
        self.events, self.saved, self.last = events, {}, None

    def begin_save(self, step, state, meta, **_):
        self.events.append(f"save {step}")
        self.saved[step] = state, meta
        self.last = Saved(step, 0, 0.0, 0.0)

    def check(self):
        last, self.last = self.last, None
        return last

    wait = check


class Metrics(SideFiles):
    """The rows of a run's metrics, in memory."""

    def __init__(self, events):
        self.events, self.rows = events, {}

    def write(self, step, values):
        kept = {name: x for name, x in values.items() if not name.startswith("throughput/")}
        self.rows.setdefault(step, {}).update(kept)

    def sample(self, step, make):
        self.events.append(f"sample {step}")

    def flush(self):
        pass

    def is_complete(self, steps):
        return False

    draw = write_spike = complete = lambda self, about: None


class Run:
    """A run that can be started several times, with the `events` of all starts.

    Args:
      monkeypatch: the fixture, which replaces the loss on held-out text.
      changes: changes to the config.
      norm: the gradient norm of each step that has another one than 1.
      skipped: the number of steps in a row that were skipped, by step.
      signals: events (such as "step 5") at which SIGTERM arrives, each once.
    """

    def __init__(self, monkeypatch, changes, *, norm=None, skipped=None, signals=()):
        defaults = {
            "train.steps": 8,
            "train.batch_size": 2,
            "train.checkpoint_every": 2,
            "train.eval_every": 0,
            "train.sample_tokens": 0,
            "data.seq_len": 4,
        }
        self.config = overrides.apply(preset_run("rmt-tiny"), defaults | changes)
        self.norm, self.skipped, self.left = norm or {}, skipped or {}, list(signals)
        self.events = []
        self.checkpoints, self.side_files = Checkpoints(self.events), Metrics(self.events)
        monkeypatch.setattr(loop, "HeldOutLoss", lambda *_: self.held_out_loss)
        self.start = Start(State(0), 0, 0, spikes=SpikeState(Spread(0.0, 0.01, 60)))

    def happens(self, event):
        self.events.append(event)
        if event in self.left:
            self.left.remove(event)
            signal.raise_signal(signal.SIGTERM)

    def step(self, state, batch):
        step = state.params + 1
        self.happens(f"step {step}")
        skipped = self.skipped.get(step, 0)
        metrics = {"train/loss": 9 / step, "optim/grad_norm": self.norm.get(step, 1.0)}
        metrics |= {"train/skipped_in_a_row": skipped, "train/skipped_steps": skipped}
        return State(step), metrics

    def held_out_loss(self, params):
        self.happens(f"loss {params}")
        return 10 / params, {}, {}

    def tasks(self, params):
        self.happens(f"tasks {params}")
        return {"eval/piqa/acc": params / 100}

    def loop(self, may_overflow=False):
        mesh = sharding.make_mesh("data=1", jax.devices()[:1])
        compiled = SimpleNamespace(compile=lambda: self.step)
        model = SimpleNamespace(
            mesh=mesh,
            batch_sharding=NamedSharding(mesh, PartitionSpec()),
            jitted_step=lambda: SimpleNamespace(lower=lambda *_: compiled),
        )
        tokens = np.zeros(40, np.int32)
        train = Windows(tokens, seq_len=4, batch_size=2, bos=256, seed=0, shuffle=True)
        text = Text(ByteTokenizer(), 0, {}, train)
        return Loop(
            LoopInputs(self.config, model, text, Datasets(train, None, None), self.tasks),
            self.start,
            self.checkpoints,
            self.side_files,
            KernelBlocks(open_folder("unused"), print, tuned.Table(FILE), []),
            TrainingProgress(self.config.train.steps, "run", show=False),
            may_overflow,
        )

    def resume(self):
        step, (state, meta) = max(self.checkpoints.saved.items())
        own = self.start._replace(state=state, step=step, windows_read=meta["windows_read"])
        self.start = own._replace(unevaluated=tuple(meta.get("unevaluated", ())))

    def train(self, tmp_path, may_overflow=False, stop_loss=0.0):
        on_saved = lambda step: self.events.append(f"told {step}")
        return self.loop(may_overflow).run(0, open_folder(tmp_path), on_saved, stop_loss)


@pytest.mark.parametrize("signals", [(), ("step 5",), ("step 6",)])
def test_a_signal_is_obeyed_when_a_spike_sends_the_run_back(monkeypatch, tmp_path, signals):
    """Step 5 spikes, which is found before its checkpoint or while step 6 is under way."""
    run = Run(monkeypatch, {"train.spike_restarts": 1}, norm={5: 50.0}, signals=signals)
    if signals:
        assert run.train(tmp_path) == (4, signal.SIGTERM)
        assert run.events[-1] == "told 4"
    else:
        with pytest.raises(GoBack):
            run.train(tmp_path)


@pytest.mark.parametrize("stops", [False, True])
def test_a_signal_is_obeyed_when_the_residual_outgrows_int16(monkeypatch, tmp_path, stops):
    """It arrives in the last save, when the step's own decision not to stop is made."""
    run = Run(monkeypatch, {"train.max_bad_steps": 2}, skipped={2: 1, 3: 2})
    check = run.checkpoints.check

    def wait():
        run.happens("wait")
        return check()

    run.checkpoints.wait, run.left = wait, ["wait"] * stops
    if stops:
        assert run.train(tmp_path, may_overflow=True) == (4, signal.SIGTERM)
        assert run.events[-3:] == ["save 4", "wait", "told 4"]
    else:
        with pytest.raises(Int16Overflow):
            run.train(tmp_path, may_overflow=True)


def test_a_run_that_goes_back_from_a_spike_stays_on_its_branch(monkeypatch, tmp_path):
    """Without its mark in later checkpoints, the same command with --from_step=4 deletes them."""
    run = Run(monkeypatch, {"train.spike_restarts": 1}, norm={5: 50.0})
    at_4 = run.start._replace(state=State(4), step=4, windows_read=8)
    run.start = at_4._replace(branch=4)  # of a checkpoint that knows of no branch
    with pytest.raises(GoBack) as back:
        run.train(tmp_path)
    run.start, run.norm = at_4.after(back.value), {}
    assert run.train(tmp_path) == (8, None)
    branches = {step: meta["branch"] for step, (_, meta) in run.checkpoints.saved.items()}
    assert branches == {6: 4, 8: 4}
    assert run.checkpoints.saved[8][1]["windows_read"] == 2 * (5 + 4)


EVALUATED = {"train.eval_every": 2, "train.eval_tasks_every": 4, "train.checkpoint_every": 0}
EVALUATED |= {"train.eval_tasks": "piqa", "train.eval_data_dir": "unused"}


@pytest.mark.parametrize(
    ("arrives", "then"),
    [
        ("step 4", ["step 4", "save 4", "told 4", "loss 4", "tasks 4", "step 5"]),
        ("loss 4", ["loss 4", "save 4", "told 4", "tasks 4", "step 5"]),
        ("tasks 4", ["loss 4", "tasks 4", "save 4", "told 4", "step 5"]),
        ("step 3", ["step 3", "save 3", "told 3", "step 4"]),
    ],
)
def test_a_stop_saves_first_and_evaluates_when_the_run_resumes(
    monkeypatch, tmp_path, arrives, then
):
    whole = Run(monkeypatch, EVALUATED)
    assert whole.train(tmp_path) == (8, None)
    run = Run(monkeypatch, EVALUATED, signals=[arrives])
    step = int(arrives[-1])
    assert run.train(tmp_path) == (step, signal.SIGTERM)
    run.resume()
    assert run.train(tmp_path) == (8, None)
    first = run.events.index(then[0])
    assert run.events[first : first + len(then)] == then
    assert run.side_files.rows == whole.side_files.rows
    assert {"train/loss", "eval/loss", "eval/piqa/acc"} <= run.side_files.rows[4].keys()


@pytest.mark.parametrize("arrives", ["step 8", "wait"])
def test_a_stop_in_the_last_step_is_told_to_those_who_train_the_next_run(
    monkeypatch, tmp_path, arrives
):
    """The signal arrives in the step or in its save, and the run is complete all the same."""
    run = Run(monkeypatch, {}, signals=[arrives])
    check = run.checkpoints.check

    def wait():
        run.happens("wait")
        return check()

    run.checkpoints.wait = wait
    assert run.train(tmp_path) == (8, signal.SIGTERM)
    assert run.events[-2:] == ["told 8", "loss 8"]


def test_a_stop_at_the_loss_of_a_run_is_found_when_it_resumes(monkeypatch, tmp_path):
    run = Run(monkeypatch, EVALUATED, signals=["step 4"])
    assert run.train(tmp_path, stop_loss=2.5) == (4, signal.SIGTERM)
    run.resume()
    assert run.train(tmp_path, stop_loss=2.5) == (4, None)
    assert "step 5" not in run.events
