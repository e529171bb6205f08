"""recipes.compare: models on the same tokens."""

import json
import re
from dataclasses import replace

import pytest

from rmt_tpu.analysis.compare import (
    RunResult,
    line_style,
    markdown,
    notes,
    over_seeds,
    run_result,
    write_comparison,
)
from rmt_tpu.config import MatrixStore, MhcLite, overrides
from rmt_tpu.config.presets import presets, run
from rmt_tpu.runs import workdir
from rmt_tpu.runs.metrics import read_metrics, series
from rmt_tpu.storage import open_folder
from tests import cli

pytestmark = pytest.mark.xdist_group("recipes")

PRESETS = ["gpt2-tiny", "rmt-tiny"]
FLAGS = [f"--presets={','.join(PRESETS)}", *cli.TINY, "--eval_every=24"]

# In the second of the two runs.
SIGINT_IN_STEP = """
import os, signal
from rmt_tpu.training.loop import Loop
usual = Loop.take_step
def _step(self, train_step, step, batches):
    usual(self, train_step, step, batches)
    steps.append(step)
    if steps.count(10) == 2:
        os.kill(os.getpid(), signal.SIGINT)
Loop.take_step, steps = _step, []
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    return folder, cli.succeed("compare", *FLAGS, f"--workdir={folder}")


def results(folder):
    """comparison.json without what depends on the machine."""
    rows = json.loads((folder / "comparison.json").read_text())
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


@pytest.mark.slow
def test_files(done):
    folder, process = done
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    table = (folder / "comparison.md").read_text()
    assert table in process.stdout
    head, _, *rows = table.split("\n\n")[0].splitlines()
    columns = "preset parameters residual tokens FLOPs seconds train_loss held-out_loss"
    assert [c.strip().replace(" ", "_") for c in head.split("|")[1:-1]] == columns.split()
    assert [row.split("|")[1].strip() for row in rows] == PRESETS
    for preset in PRESETS:  # and what differs beside the system
        assert f"\n- {preset}: " in table


@pytest.mark.slow
def test_numbers(done):
    folder, _ = done
    gpt2, rmt = results(folder)
    assert gpt2["tokens"] == rmt["tokens"] == cli.STEPS * 4 * 16
    assert gpt2["residual_size"] == 128  # the preset's D
    assert rmt["residual_size"] == 16 * 8  # the preset's D_k, and D_v of the flags
    for name, row in zip(PRESETS, (gpt2, rmt), strict=True):
        rows = read_metrics(folder / name)
        assert row["held_out_loss"] == series(rows, "eval/loss")[1][-1]
        last_tenth = series(rows, "train/loss")[1][-(cli.STEPS // 10) :]
        assert row["train_loss"] == pytest.approx(sum(last_tenth) / len(last_tenth))


@pytest.mark.slow
def test_each_preset_has_its_own_optimizer(done):
    folder, _ = done
    trains = [json.loads((folder / name / "config.json").read_text())["train"] for name in PRESETS]
    for name, train in zip(PRESETS, trains, strict=True):
        rate = run(name).train.optimizer.learning_rate
        assert train.pop("optimizer")["learning_rate"] == rate
    assert trains[0] == trains[1]


@pytest.mark.slow
def test_interrupted(done, tmp_path):
    process = cli.start("compare", *FLAGS, f"--workdir={tmp_path}", first=SIGINT_IN_STEP)
    out, err = process.communicate()
    assert process.returncode == 130, err
    assert not (tmp_path / "comparison.json").exists()
    again = cli.run_line(out.splitlines()[-1])
    assert again.returncode == 0, again.stderr
    assert "gpt2-tiny is complete" in again.stderr
    assert results(tmp_path) == results(done[0])


@pytest.mark.parametrize(
    ("patterns", "presets"),
    [
        pytest.param("rmt-tin?", ["rmt-tiny"], id="one"),
        pytest.param("rmt-tin?,gpt2-tiny", PRESETS, id="two"),
    ],
)
@pytest.mark.slow
def test_seeds(tmp_path, patterns, presets):
    flags = (f"--presets={patterns}", "--seeds=3,5", *cli.TINY, "--by_loss")
    done = cli.succeed("compare", *flags, f"--workdir={tmp_path}")
    # In the order in which the patterns name them.
    named = sorted(presets, key=lambda name: name != "rmt-tiny")
    runs = [f"{name} seed-{seed}" for name in named for seed in (3, 5)]
    told = [line for line in done.stderr.splitlines() if line.startswith("run ")]
    assert told == [f"run {i} of {len(runs)}: {label}" for i, label in enumerate(runs, start=1)]
    out = done.stdout
    assert re.fullmatch(rf"{len(runs)} runs in \d+:\d\d:\d\d", out.splitlines()[-1])
    rows = json.loads((tmp_path / "comparison.json").read_text())
    assert sorted((r["name"], r["seed"]) for r in rows) == [
        (name, seed) for name in presets for seed in (3, 5)
    ]
    held_out = {}
    for row in rows:
        metrics = read_metrics(tmp_path / row["name"] / f"seed-{row['seed']}")
        assert row["held_out_loss"] == series(metrics, "eval/loss")[1][-1]
        held_out.setdefault(row["name"], []).append(row["held_out_loss"])
    assert all(len(set(losses)) == 2 for losses in held_out.values())
    by_loss = sorted(presets, key=lambda name: sum(held_out[name]))
    assert list(held_out) == by_loss
    table = (tmp_path / "comparison.md").read_text()
    assert table in out and "over seeds 3, 5;" in table
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    lines = table.splitlines()[2 : 2 + len(presets)]
    assert [line.split("|")[1].strip() for line in lines] == by_loss
    for name, line in zip(by_loss, lines, strict=True):
        least, most = sorted(held_out[name])
        expected = f"{(least + most) / 2:.4f} ({least:.4f}..{most:.4f})"
        assert line.split("|")[-2].strip() == expected


def test_the_seconds_are_those_of_all_steps(tmp_path):
    """Only the 100th and the last of 105 steps have rows of metrics."""
    config = overrides.apply(run("gpt2-tiny"), {"train.steps": 105, "train.log_every": 100})
    folder = open_folder(tmp_path)
    folder.write("config.json", json.dumps(overrides.to_json(config)).encode())
    rows = [{"step": 100, "throughput/step_seconds": 3.0, "train/loss": 2.0}]
    rows += [{"step": 105, "throughput/step_seconds": 5.0, "train/loss": 2.0, "eval/loss": 2.5}]
    folder.write("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    assert run_result("a", folder).seconds == 105 * 4.0


def test_spread():
    numbers = {"parameters": 1200, "residual_size": 8, "tokens": 64, "flops": 10**6}
    losses = {0: (2.0, 2.5), 1: (2.25, 3.0), 4: (2.125, 2.0)}
    runs = [
        RunResult("a", seed, **numbers, seconds=seed + 0.5, train_loss=t, held_out_loss=h)
        for seed, (t, h) in losses.items()
    ]
    row, _, note = markdown({"a": runs}).splitlines()[2:]
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[0] == "a" and cells[5] == "2.2"
    assert cells[6:] == ["2.1250 (2.0000..2.2500)", "2.5000 (2.0000..3.0000)"]
    assert "over seeds 0, 1, 4;" in note
    single = markdown({"a": runs[:1]})
    assert single.splitlines()[-1].endswith("| 0.5 | 2.0000 | 2.5000 |")


def test_curves_over_seeds(tmp_path):
    """Of steps that all runs have."""
    curves = {"a": {10: 3.0, 20: 2.0, 30: 1.0}, "b": {10: 2.0, 15: 9.0, 20: 1.5}}
    for name, points in curves.items():
        (tmp_path / name).mkdir()
        rows = [json.dumps({"step": s, "eval/loss": loss}) + "\n" for s, loss in points.items()]
        (tmp_path / name / "metrics.jsonl").write_text("".join(rows))
    got = over_seeds([tmp_path / name for name in curves], "eval/loss")
    assert got == ([10, 20], [2.5, 1.75], [2.0, 1.5], [3.0, 2.0])


@pytest.mark.slow
def test_pictures_of_many_systems(tmp_path):
    """What each reached, and how in a panel of its own."""
    names = ["gpt2-tiny", "rmt-tiny", "hc-tiny", "mhc-tiny", "attnres-tiny"]
    runs = {}
    for i, name in enumerate(names):
        runs[name] = [tmp_path / name / f"seed-{seed}" for seed in (0, 1)]
        for seed, folder in enumerate(runs[name]):
            folder.mkdir(parents=True)
            config = overrides.to_json(run(name))
            (folder / "config.json").write_text(json.dumps(config))
            rows = [
                {"step": s, "eval/loss": 3.0 - i / s + seed, "train/loss": 2.0} for s in (10, 20)
            ]
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / "metrics.jsonl").write_text(lines)
    write_comparison(runs, tmp_path, by_loss=True)
    for picture in ("comparison.png", "curves.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_line_styles_differ():
    styles = [tuple(line_style(index).values()) for index in range(40)]
    assert len(set(styles)) == 40


def test_notes_of_every_system():
    """One line for those alike; every mixer but the plain sum says what is special about it."""
    configs = {name: run(name) for name in presets() if name.endswith("-tiny")}
    lines = [line for line in notes(configs).splitlines() if line.startswith("- ")]
    named = [name for line in lines for name in line[2:].partition(":")[0].split(", ")]
    assert sorted(named) == sorted(configs)
    assert len({line.partition(":")[2] for line in lines}) == len(lines)
    plain = next(line.partition(":")[2] for line in lines if "gpt2-tiny" in line)
    for name, config in configs.items():
        if config.model.mixer.kind != "sum":
            line = next(li for li in lines if name in li[2:].partition(":")[0].split(", "))
            assert line.partition(":")[2] != plain
    twice = {"a": configs["gpt2-tiny"], "b": configs["gpt2-tiny"]}
    assert notes(twice).splitlines()[-1].startswith("- a, b: ")
    assert MhcLite(init="paper").note != MhcLite(init="prenorm").note
    store = replace(configs["gpt2-tiny"].model, store=MatrixStore(8))
    assert "keys have a separate scale" in notes({"c": replace(configs["gpt2-tiny"], model=store)})


ERRORS = {
    "seeds twice": (["--seeds=1,1"], ["--seeds=1,1", "different"]),
    "no seeds": (["--seeds="], ["--seeds= is empty"]),
    "not numbers": (["--seeds=1,x"], ["--seeds=1,x", "whole numbers"]),
    "both": (["--seeds=1,2", "--seed=3"], ["--seeds=1,2", "--seed=3", "give one"]),
    "pattern": (["--presets=*-tinny"], ["--presets '*-tinny'", "unknown", "gpt2-tiny"]),
}


@pytest.mark.parametrize("flags, pieces", ERRORS.values(), ids=list(ERRORS))
def test_usage(flags, pieces, tmp_path):
    error = cli.fail("compare", *flags, f"--workdir={tmp_path / 'new'}")
    assert all(piece in error for piece in pieces), error
    assert not (tmp_path / "new").exists()


def test_a_last_loss_that_is_not_finite_is_told(tmp_path):
    """No earlier loss takes its place, and a system without any loss is still in the table."""
    config = overrides.apply(run("rmt-tiny"), {"train.steps": 4, "model.vocab_size": 257})
    runs = {}
    for name, losses in {"good": (3.0, 2.0), "bad": (5.5, None), "none": (None, None)}.items():
        folder = open_folder(tmp_path / name)
        workdir.write_config(folder, config)
        rows = [{"step": 1, "train/loss": 1.0}]
        rows += [{"step": 2 * i, "eval/loss": loss} for i, loss in enumerate(losses, 1)]
        folder.write("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
        runs[name] = [folder]
    text = write_comparison(runs, tmp_path, by_loss=True)
    assert [line.split(" | ")[0] for line in text.splitlines()[2:5]] == [
        "| good",
        "| bad",
        "| none",
    ]
    told = json.loads((tmp_path / "comparison.json").read_text())
    assert [row["held_out_loss"] for row in told] == [2.0, None, None]


@pytest.mark.slow
def test_a_run_that_diverges_leaves_the_others_alone(tmp_path):
    """Both are trained and in the table, although they diverge, and a lower rate trains both."""
    done = cli.succeed("compare", *FLAGS, f"--workdir={tmp_path}", "--learning_rate=1e30")
    for preset in PRESETS:
        assert re.search(rf"^.*{preset}: .*not finite", done.stderr, re.MULTILINE), done.stderr
    rows = {row["name"]: row for row in results(tmp_path)}
    for preset in PRESETS:
        assert rows[preset]["held_out_loss"] is rows[preset]["train_loss"] is None
    assert (tmp_path / "comparison.md").read_text().count("| nan | nan |") == 2
    again = cli.succeed("compare", *FLAGS, f"--workdir={tmp_path}", "--learning_rate=1e30")
    assert again.stderr.count(" diverged before") == 2
    cli.succeed("compare", *FLAGS, f"--workdir={tmp_path}")
    rows = {row["name"]: row for row in results(tmp_path)}
    assert all(rows[preset]["held_out_loss"] < 6 for preset in PRESETS)
