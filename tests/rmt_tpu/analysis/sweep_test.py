"""What a sweep tries, how far each goes, and what is said of it."""

import json
import math

import numpy as np
import pytest

from rmt_tpu.analysis import sweep
from rmt_tpu.config import overrides
from rmt_tpu.config.presets import run as preset_run
from rmt_tpu.data import ByteTokenizer
from rmt_tpu.data.datasets import load_datasets
from rmt_tpu.errors import DivergedError, UsageError
from rmt_tpu.runs import workdir
from rmt_tpu.runs.side_files import SideFiles
from rmt_tpu.storage import open_folder
from rmt_tpu.training.run import resolve_auto
from rmt_tpu.training.start import text_of

RATE = "train.optimizer.learning_rate"


def test_spaces():
    rates = sweep.parse_space(f"{RATE}=log:1e-4..1e-1:4")
    assert rates == sweep.NumberRange(RATE, 1e-4, 0.1, log=True, count=4)
    assert rates.grid() == [1e-4, 1e-3, 1e-2, 1e-1]
    assert sweep.parse_space("a.b=linear:0..0.3:4").grid() == [0.0, 0.1, 0.2, 0.3]
    words = sweep.parse_space("model.norm=rmsnorm, layernorm")
    assert words == sweep.Choices("model.norm", ("rmsnorm", "layernorm"))
    assert sweep.parse_space("model.num_layers=2,4").grid() == [2, 4]
    points = sweep.grid([sweep.Choices("a.x", (1, 2)), sweep.Choices("b.y", ("u", "v"))])
    assert points == [{"a.x": x, "b.y": y} for x in (1, 2) for y in ("u", "v")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train.steps", "no path or no values"),
        ("=1,2", "no path or no values"),
        ("a=log:1..x", "is not a range; legal: path=log:1e-4..1e-1:7"),
        ("a=log:1e-3", "is not a range"),
        ("a=log:0..1:3", "for log, both above 0"),
        ("a=linear:2..1:3", "the second larger"),
        ("a=linear:0..inf:3", "the second larger"),
        ("a=linear:0..1:1", "2 to 10000 points"),
        ("a=linear:0..1:10001", "2 to 10000 points"),
        ("a=linear:0..1:0", "2 to 10000 points"),
        ("a=1,2,1", "repeats a value"),
    ],
)
def test_spaces_that_are_none(text, message):
    with pytest.raises(UsageError, match=message):
        sweep.parse_space(text)


def test_a_grid_needs_numbers_of_points():
    with pytest.raises(UsageError, match="needs a number of points for a grid"):
        sweep.grid([sweep.parse_space("a=log:1e-4..1e-1")])
    large = [sweep.parse_space(f"{name}=linear:0..1:101") for name in "ab"]
    with pytest.raises(UsageError, match="has 10201 points; legal: at most 10000 in a grid"):
        sweep.grid(large)


def test_points_that_are_close_have_folders_of_their_own():
    """Six digits of a name, or four of a range, would not tell them apart."""
    listed = sweep.grid([sweep.parse_space(f"{RATE}=0.12345678,0.12345679,1e-3")])
    names = [sweep.name_of(point).partition("=")[2] for point in listed]
    assert names == ["0.12345678", "0.12345679", "0.001"]
    (near,) = [sweep.parse_space(f"{RATE}=linear:0.1..0.10001:5")]
    assert near.grid() == pytest.approx(np.linspace(0.1, 0.10001, 5), abs=1e-6)
    assert len({sweep.name_of(point) for point in sweep.grid([near])}) == 5
    ulp = f"linear:0.1..{math.nextafter(0.1, 1)!r}:3"
    with pytest.raises(UsageError, match="more points than there are numbers from 0.1 to"):
        sweep.grid([sweep.parse_space(f"{RATE}={ulp}")])
    with pytest.raises(UsageError, match="share the folder source=u_v; legal: values"):
        sweep.grid([sweep.parse_space("data.source=u/v,u_v")])


def test_draws_are_different_within_the_range_and_of_their_seed():
    spaces = [sweep.parse_space("a=log:1e-4..1e-1"), sweep.parse_space("b=1,2")]
    points = sweep.random_points(spaces, 40, seed=3)
    assert (
        sweep.random_points(spaces, 40, seed=3) == points != sweep.random_points(spaces, 40, seed=4)
    )
    assert len({sweep.name_of(point) for point in points}) == 40
    logs = np.log10([point["a"] for point in points])
    assert -4 <= logs.min() and logs.max() <= -1
    assert -3 < np.mean(logs) < -2  # the middle, of logarithms
    with pytest.raises(UsageError, match="--trials=3 is more than .* legal: up to 2"):
        sweep.random_points(spaces[1:], 3, seed=0)


def test_rungs():
    assert sweep.rungs(9, 900, 3) == [(9, 100), (3, 300), (1, 900)]
    assert sweep.rungs(5, 100, 2) == [(5, 12), (3, 25), (2, 50), (1, 100)]
    assert sweep.rungs(1, 7, 3) == [(1, 7)]
    assert sweep.rungs(9, 5, 3) == [(9, 1), (3, 2), (1, 5)]
    with pytest.raises(UsageError, match="^--steps=3 are too few .* 9 points .*legal: 9 or more"):
        sweep.rungs(9, 3, 3)


def test_names_of_folders():
    assert sweep.name_of({RATE: 0.001, "model.num_layers": 2}) == "learning_rate=0.001,num_layers=2"
    assert sweep.name_of({"a.x": 1, "b.x": "u/v"}) == "a.x=1,b.x=u_v"


def row(variant, rate, *losses, steps=10):
    return sweep.SweepRow(variant, {RATE: rate}, steps, list(range(len(losses))), list(losses))


def test_one_seed_that_diverged_is_the_worst():
    rows = [row("x1", 0.1, 2.0, None), row("x1", 0.2, 3.0, 4.0), row("x1", 0.3, 2.5, 3.5)]
    assert [r.point[RATE] for r in sweep.best(rows, 3)] == [0.3, 0.2, 0.1]
    assert rows[0].loss == math.inf and rows[1].loss == 3.5


def test_tables_and_picture(tmp_path):
    rows = [row("x1", 0.1, 2.0, 2.2), row("x1", 0.2, 3.0, None)]
    rows += [row("x2", 0.1, 2.5, 2.5), row("x2", 0.2, 1.5, 1.7)]
    text = sweep.write_sweep(rows, [sweep.parse_space(f"{RATE}=log:0.1..0.2:2")], tmp_path)
    assert "| x1 | 0.1 | 10 | 2.1000 (2.0000..2.2000) |" in text
    assert "| x1 | 0.2 | 10 | not finite: 1 of 2 |" in text
    assert "Mean (min..max) over seeds 0, 1." in text
    x1, x2 = text.splitlines()[-2:]
    assert x1 == "| x1 | learning_rate=0.1 | 2.1000 (2.0000..2.2000) | 2.1000 | 0.0000 |"
    assert x2 == "| x2 | learning_rate=0.2 | 1.6000 (1.5000..1.7000) | 2.5000 | 0.9000 |"
    assert (tmp_path / "sweep.md").read_text() == text
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_variants_with_other_numbers_of_steps_are_compared():
    rows = [row("x1", 0.1, 3.0, steps=5), row("x1", 0.2, 2.0, steps=5)]
    rows += [row("x1", 0.2, 1.9, steps=10), row("x2", 0.2, 1.5, steps=20)]
    assert sweep.transfer(rows).splitlines()[2:] == [
        "| x1 | learning_rate=0.2 | 1.9000 | 1.9000 | 0.0000 |",
        "| x2 | learning_rate=0.2 | 1.5000 | 1.5000 | 0.0000 |",
    ]


def test_searched_steps_are_points_of_one_line(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(sweep, "save_picture", lambda figure, *where: drawn.append(figure))
    losses = {4: 1.5, 8: 2.5}
    rows = [sweep.SweepRow("m", {"train.steps": n}, n, [0], [loss]) for n, loss in losses.items()]
    text = sweep.write_sweep(rows, [sweep.parse_space("train.steps=4,8")], tmp_path)
    assert text.splitlines()[-1].startswith("| m | steps=4 | 1.5000 |")
    (line, *_) = drawn[0].axes[0].get_legend_handles_labels()[0]
    assert list(line.lines[0].get_xdata()) == [4, 8]


def test_that_a_run_diverged_is_not_said_of_another_one_in_its_folder(tmp_path, monkeypatch):
    """With another config it trains there, and has a loss."""
    folder, config = open_folder(tmp_path), preset_run("rmt-tiny")
    diverges = [True]

    def train(config, folder, *, label):
        workdir.write_config(folder, config)
        folder.delete("diverged.txt")
        with SideFiles(folder, 0, config, print):
            if diverges.pop():
                raise DivergedError("not finite")
        folder.write("metrics.jsonl", b'{"step": %d, "eval/loss": 2.5}\n' % config.train.steps)

    monkeypatch.setattr(sweep, "train", train)
    monkeypatch.setattr(sweep, "resolve_auto", lambda config, kept, devices: config)
    sweep.try_run(config, folder, label="a")
    sweep.try_run(config, folder, label="a")  # is settled
    assert diverges == [] and sweep.held_out_loss(folder) is None
    diverges.append(False)
    other = overrides.apply(config, {"train.seed": 1})
    sweep.try_run(other, folder, label="a")
    assert sweep.held_out_loss(folder) == 2.5


def test_a_settled_run_of_another_text_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("stone river over and " * 400)
    folder = open_folder(tmp_path / "run")
    config = overrides.apply(
        preset_run("rmt-tiny"),
        {"data.source": f"{tmp_path}/a.txt", "model.vocab_size": 257, "data.seq_len": 16},
    )
    tokenizer = ByteTokenizer()
    meta = {"held_out": dict(text_of(tokenizer, load_datasets(config, tokenizer)).held_out)}
    workdir.write_config(folder, config)
    workdir.open_checkpoints(folder).save(1, {"w": np.zeros(2)}, meta)
    folder.write("complete.json", json.dumps({"step": config.train.steps}).encode())
    monkeypatch.setattr(sweep, "resolve_auto", lambda config, kept, devices: config)
    assert sweep.try_run(config, folder, label="a") is None
    (tmp_path / "b.txt").write_text("and then there " * 500)
    other = overrides.apply(config, {"data.source": f"{tmp_path}/b.txt"})
    with pytest.raises(
        UsageError, match="^--data=.*b.txt is not the text that the run in .*run has"
    ):
        sweep.try_run(other, folder, label="a")


def test_a_settled_run_is_found_where_its_mesh_does_not_fit(tmp_path):
    """A machine with other devices makes the table of a sweep from the run folders."""
    folder = open_folder(tmp_path)
    config = overrides.apply(preset_run("rmt-tiny"), {"train.mesh": "fsdp=64"})
    chosen = overrides.apply(resolve_auto(config), {"train.accumulate": 2})
    workdir.write_config(folder, chosen)
    workdir.open_checkpoints(folder).save(config.train.steps, {"w": np.zeros(2)}, {})
    folder.write("complete.json", json.dumps({"step": config.train.steps}).encode())
    assert sweep.is_settled(config, folder)
    assert not sweep.is_settled(overrides.apply(config, {RATE: 0.3}), folder)


@pytest.mark.parametrize(("path", "line"), [("train.batch_size", "-"), ("train.seed", "None")])
def test_a_picture_of_whole_numbers_has_whole_ticks(tmp_path, monkeypatch, path, line):
    """And joins no points between which there is nothing."""
    drawn = []
    monkeypatch.setattr(sweep, "save_picture", lambda figure, *where: drawn.append(figure))
    rows = [sweep.SweepRow("model", {path: value}, 4, [0], [2.0 + value]) for value in (1, 2)]
    sweep.write_sweep(rows, [sweep.parse_space(f"{path}=1,2")], tmp_path)
    axes = drawn[0].axes[0]
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
    assert axes.lines[0].get_linestyle() == line
