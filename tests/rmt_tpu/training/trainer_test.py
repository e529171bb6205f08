"""The training loop, in this process: what comes before what, and how it ends."""

import json
import os
import shutil
import signal
import socket
import time

import jax
import pytest

import sharding
from rmt_tpu import memory
from rmt_tpu.checkpoint import Checkpointer
from rmt_tpu.config import overrides
from rmt_tpu.config.presets import run as preset_run
from rmt_tpu.errors import DivergedError, RunError, UsageError
from rmt_tpu.runs import side_files, workdir
from rmt_tpu.runs.metrics import read_metrics, series
from rmt_tpu.storage import Fault, open_folder
from rmt_tpu.storage.local import LocalFolder
from rmt_tpu.training import loop, trainer

TEXT = "the quick brown fox jumps over the lazy dog.\n" * 40


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    one = sharding.make_mesh("data=1", jax.devices()[:1])
    monkeypatch.setattr(trainer.sharding, "make_mesh", lambda spec: one)


@pytest.fixture
def config(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    return overrides.apply(
        preset_run("rmt-tiny"),
        {
            "model.num_layers": 1,
            "model.vocab_size": 257,
            "model.feed_forward.hidden_dim": 32,
            "data.source": str(text),
            "data.seq_len": 16,
            "train.batch_size": 2,
            "train.steps": 6,
            "train.checkpoint_every": 2,
            "train.eval_every": 2,
            "train.eval_batches": 1,
            "train.sample_tokens": 2,
        },
    )


@pytest.mark.slow
def test_a_run_stops_at_a_loss_and_may_continue(config, tmp_path):
    """The loss of a new model is about 5.6, so that the first evaluation reaches 9 and not 1."""
    run = tmp_path / "run"
    assert trainer.train(config, run, stop_loss=9.0) == (2, None)
    assert Checkpointer(str(run / "checkpoints")).steps() == [2]
    assert trainer.train(config, run, stop_loss=1.0) == (6, None)
    assert series(read_metrics(run), "eval/loss")[0] == [2, 4, 6]
    fewer = overrides.apply(config, {"train.steps": 4})
    said = f"^train.steps=4: {run} has a checkpoint of step 6; legal: 6 or more, or an older "
    with pytest.raises(UsageError, match=said):
        trainer.train(fewer, run, change_config=True)
    assert workdir.read_config(run).train.steps == 6


@pytest.mark.slow
def test_nothing_but_a_save_that_fails_ends_a_run(config, tmp_path, monkeypatch, capsys):
    """And not even one start after that: the paths may be others, and side files damaged."""
    run, order = tmp_path / "run", []
    begin_save, plot_loss, create = (
        Checkpointer.begin_save,
        side_files.plot_loss,
        LocalFolder.create,
    )

    def save(self, step, *args, **options):
        order.append(f"save {step}")
        return begin_save(self, step, *args, **options)

    def plot(*args, **options):
        order.append("draw")
        return plot_loss(*args, **options)

    def full(self, name, data):
        if name == "6/COMMIT":
            raise Fault(f"{self}/{name}: No space left on device")
        return create(self, name, data)

    def no_text(*args):
        raise MemoryError("no room for the cache")

    monkeypatch.setattr(Checkpointer, "begin_save", save)
    monkeypatch.setattr(side_files, "plot_loss", plot)
    monkeypatch.setattr(LocalFolder, "create", full)
    monkeypatch.setattr(loop, "sample_text", no_text)
    run.mkdir()
    (run / "plots").write_text("no folder")
    (run / "metrics.jsonl").write_bytes(b"\0\0\0\n")
    with pytest.raises(
        RunError, match="cannot save step 6 .* No space left .*checkpoint is of st.* 4"
    ):
        trainer.train(config, run, label="tiny")
    assert order == ["save 2", "draw", "save 4", "draw", "save 6"]
    said = capsys.readouterr().err.splitlines()
    assert (
        said[0].startswith("tiny: ")
        and " parameters on 1 cpu device, 32 tokens per step" in said[0]
    )
    assert said[0].endswith("192 in 6 steps; reading data")
    # Each save that ended well is told, also one that ended between two looks.
    assert [line.split(":")[0] for line in said if "saved" in line] == [
        "saved step 2",
        "saved step 4",
    ]
    assert len([line for line in said if "1 line is not a row of metrics" in line]) == 1
    assert len([line for line in said if "the loss curve cannot be drawn" in line]) == 1

    monkeypatch.setattr(LocalFolder, "create", create)
    (tmp_path / "moved").mkdir()
    moved = (tmp_path / "text.txt").rename(tmp_path / "moved" / "text.txt")
    elsewhere = overrides.apply(config, {"data.source": f"{moved.parent}//text.txt"})
    saved = []  # the steps of which it is told that nothing would be lost any more
    outcome = trainer.train(
        elsewhere,
        run,
        label="tiny",
        on_saved=lambda step: saved.extend([step, *Checkpointer(str(run / "checkpoints")).steps()]),
    )
    assert saved == [6, 2, 4, 6] and not (run / "samples.txt").exists()
    said = capsys.readouterr().err
    assert outcome == (6, None) and f"resuming {run} from step 4" in said
    assert "note: no text sample: MemoryError: no room for the cache; the run continues" in said
    assert [row["step"] for row in read_metrics(run, report=order.append)] == list(range(1, 7))
    assert json.loads((run / "config.json").read_text())["data"]["source"].endswith("//text.txt")
    assert trainer.train(elsewhere, run, on_saved=saved.append).step == saved.pop() == 6
    assert f"{run} is complete at step 6" in capsys.readouterr().err
    assert not (run / "running.json").exists()


def test_a_run_that_lives_keeps_its_folder(config, tmp_path):
    """Before its first checkpoint too: nothing there is changed, and the presence file stays."""
    run = open_folder(tmp_path / "run")
    workdir.open_workdir(run, overrides.apply(config, {"train.seed": 1}))
    word = {"host": socket.gethostname(), "pid": os.getppid(), "seen": time.time()}
    run.write("running.json", json.dumps(word).encode())
    run.write("metrics.jsonl", b'{"step": 1}\n')
    before = {name: run.read(name).data for name in run.names()}
    with pytest.raises(UsageError, match=f"is in use by process {os.getppid()} on "):
        trainer.train(config, run)
    assert {name: run.read(name).data for name in run.names()} == before
    # A process on another host keeps the folder, too, however often the command is repeated.
    run.write("running.json", json.dumps(word | {"host": "elsewhere"}).encode())
    before = {name: run.read(name).data for name in run.names()}
    for _ in range(2):
        with pytest.raises(UsageError, match="is in use by .* on elsewhere .*a different config"):
            trainer.train(config, run)
        assert {name: run.read(name).data for name in run.names()} == before


@pytest.mark.slow
def test_a_residual_that_outgrows_int16_goes_on_in_float32(config, tmp_path, capsys):
    """From a checkpoint of its own; the same flags resume what came of it."""
    few = {"model.compute_dtype": "bfloat16", "model.store.fraction_bits": 15}  # up to 1
    few |= {"train.max_bad_steps": 2, "train.checkpoint_every": 0, "train.eval_every": 0}
    narrow, run = overrides.apply(config, few), tmp_path / "run"
    assert trainer.train(narrow, run).step == 6
    said = capsys.readouterr().err
    assert (
        "step 2: 2 steps skipped; the residual has outgrown int16 (fixed-point steps of "
        "2^-15, up to +-1) and continues in float32" in said
    )
    assert f"resuming {run} from step 3" in said
    assert json.loads((run / "config.json").read_text())["model"]["store"]["dtype"] == "float32"
    losses = {row["step"]: row["train/loss"] for row in read_metrics(run)}
    assert len(losses) == 6
    assert [step for step, loss in losses.items() if loss is None or loss != loss] == [1, 2, 3]
    more = overrides.apply(narrow, {"train.steps": 8})
    assert trainer.train(more, run, change_config=True).step == 8
    said = capsys.readouterr().err
    assert f"resuming {run} from step 6" in said and "store.dtype" not in said
    # Asked for by name, it is not left.
    held = {"model.store.dtype": "int16", "model.remat": "reversible"}
    with pytest.raises(DivergedError, match="2 steps in a row.*; or the residual does not fit int"):
        trainer.train(overrides.apply(narrow, held), tmp_path / "held")


@pytest.mark.parametrize(
    ("in_a_row", "skipped", "step", "is_left"),
    [(4, 9, 50, False), (5, 5, 50, True), (1, 10, 1000, True), (1, 10, 1001, False)],
)
def test_how_many_skipped_steps_int16_is_left_for(in_a_row, skipped, step, is_left):
    assert loop.has_overflowed(5, in_a_row, skipped, step) == is_left


@pytest.mark.parametrize("path", ["train.batch_size", "model.num_layers"])
def test_what_no_machine_can_hold_is_refused(config, tmp_path, path):
    huge = overrides.apply(config, {path: 10**9})
    with pytest.raises(RunError, match=r"^--batch_size=.* needs at least .* GB on this machine"):
        trainer.train(huge, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_memory_that_is_out_is_one_line(config, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "machine_bytes", lambda: 2**80)
    huge = overrides.apply(config, {"model.num_layers": 10**9})
    with pytest.raises(RunError, match=r"^out of memory \(.*bytes\): use a smaller .*--batch"):
        trainer.train(huge, tmp_path / "run")
    # Nothing of it is there, so that a smaller one may take its place.
    assert not open_folder(tmp_path / "run").names("checkpoints")


@pytest.mark.slow
def test_in_bfloat16_too_a_run_that_resumes_is_the_same(config, tmp_path):
    """A checkpoint has no copies of weights: they are made again."""
    config = overrides.apply(config, {"model.compute_dtype": "bfloat16", "train.steps": 4})
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    trainer.train(config, whole)
    assert not any("copies" in str(file) for file in (whole / "checkpoints").rglob("*"))
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints/4")
    trainer.train(config, resumed)
    rows = [read_metrics(open_folder(folder)) for folder in (whole, resumed)]
    of_rows = [[row["train/loss"] for row in of if "train/loss" in row] for of in rows]
    assert len(of_rows[0]) == 4 and of_rows[0] == of_rows[1]


@pytest.mark.slow
@pytest.mark.parametrize("log_every", [1, 4, 7])
def test_saves_and_evaluations_do_not_depend_on_how_often_a_run_logs(config, tmp_path, log_every):
    every = {"train.log_every": log_every, "train.eval_every": 3, "train.checkpoint_every": 2}
    trainer.train(overrides.apply(config, every), tmp_path / "run")
    run = open_folder(tmp_path / "run")
    assert workdir.open_checkpoints(run).steps() == [2, 4, 6]
    assert series(read_metrics(run), "eval/loss")[0] == [3, 6]


@pytest.mark.slow
def test_what_a_stop_left_unevaluated_is_evaluated_when_the_run_resumes(
    config, tmp_path, monkeypatch
):
    config = overrides.apply(config, {"train.steps": 4, "train.sample_tokens": 0})
    trainer.train(config, tmp_path / "whole")
    take_step = loop.Loop.take_step

    def stopped(self, train_step, step, batches):
        take_step(self, train_step, step, batches)
        if step == 2:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Loop, "take_step", stopped)
        assert trainer.train(config, tmp_path / "run") == (2, signal.SIGTERM)
    assert series(read_metrics(tmp_path / "run"), "eval/loss") == ([], [])
    trainer.train(config, tmp_path / "run")
    found, wanted = (series(read_metrics(tmp_path / run), "eval/loss") for run in ("run", "whole"))
    assert found == wanted and found[0] == [2, 4]
