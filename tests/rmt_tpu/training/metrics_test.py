"""The metrics file: rows written twice, rows torn, numbers that are not finite."""

import json
from pathlib import Path

import pytest

from rmt_tpu.errors import RunError
from rmt_tpu.training.metrics import MetricsWriter
from rmt_tpu.training.plots import plot_loss, read_metrics, series


def write(folder, first_step, rows):
    writer = MetricsWriter(folder, first_step=first_step)
    for step, values in rows:
        writer.write(step, values)
    writer.close()


def test_the_later_row_of_a_step_counts(tmp_path):
    write(
        tmp_path, 1, [(1, {"train/loss": 3.0}), (2, {"train/loss": 2.0}), (2, {"eval/loss": 2.5})]
    )
    write(tmp_path, 2, [(2, {"train/loss": 1.5})])
    assert read_metrics(tmp_path) == [
        {"step": 1, "train/loss": 3.0},
        {"step": 2, "train/loss": 1.5, "eval/loss": 2.5},
    ]


def test_a_torn_last_line_is_left_out_and_then_replaced(tmp_path):
    write(tmp_path, 1, [(1, {"train/loss": 3.0})])
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 2, "train/l')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]
    write(tmp_path, 2, [(2, {"train/loss": 2.0})])
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n')
    with pytest.raises(RunError, match=r"metrics.jsonl:2 is not a row"):
        read_metrics(tmp_path)


def test_what_is_not_finite_is_null_and_not_in_a_series(tmp_path):
    write(tmp_path, 1, [(1, {"train/loss": float("nan")}), (2, {"train/loss": 2.0})])
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert first == {"step": 1, "train/loss": None}
    assert series(read_metrics(tmp_path), "train/loss") == ([2], [2.0])


def test_the_loss_is_drawn_and_boarded(tmp_path):
    write(tmp_path, 1, [(1, {"train/loss": 3.0, "eval/loss": 3.1}), (2, {"train/loss": 2.0})])
    assert Path(plot_loss(tmp_path)).read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "tensorboard").glob("events.*"))
