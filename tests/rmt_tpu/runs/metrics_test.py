"""The metrics: rows written twice, torn or damaged, numbers that are not finite, TensorBoard."""

import json
import struct
from pathlib import Path

import numpy as np
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c

from rmt_tpu.runs import plots, tensorboard
from rmt_tpu.runs.metrics import MetricsWriter
from rmt_tpu.runs.plots import plot_loss, read_metrics, series
from rmt_tpu.storage import open_folder


def write(folder, first_step, rows):
    writer = MetricsWriter(folder, first_step=first_step)
    for step, values in rows:
        writer.write(step, values)
    writer.close()


def test_the_later_row_of_a_step_counts(tmp_path):
    write(
        tmp_path, 1, [(1, {"train/loss": 3.0}), (2, {"train/loss": 2.0}), (2, {"eval/loss": 2.5})]
    )
    write(tmp_path, 3, [(2, {"train/loss": 1.5})])
    assert read_metrics(tmp_path) == [
        {"step": 1, "train/loss": 3.0},
        {"step": 2, "train/loss": 1.5, "eval/loss": 2.5},
    ]


def test_rows_of_steps_that_are_done_again_are_dropped(tmp_path):
    """The run may go on otherwise, and never write a row of these steps."""
    path = tmp_path / "metrics.jsonl"
    write(tmp_path, 1, [(step, {"train/loss": 1.0}) for step in range(1, 10)])
    with open(path, "ab") as file:
        file.write(b'\0\0\n{"step": 10, "tr')
    write(tmp_path, 5, [(6, {"eval/loss": 2.0})])
    told = []
    assert [row["step"] for row in read_metrics(tmp_path, report=told.append)] == [1, 2, 3, 4, 6]
    assert len(told) == 1 and series(read_metrics(tmp_path), "eval/loss") == ([6], [2.0])
    before = path.stat().st_mtime_ns, path.stat().st_ino
    write(tmp_path, 7, [])
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before  # nothing to drop


def test_a_torn_last_line_is_left_out_and_then_replaced(tmp_path):
    write(tmp_path, 1, [(1, {"train/loss": 3.0})])
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 2, "train/l')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]
    write(tmp_path, 2, [(2, {"train/loss": 2.0})])
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]


BAD = [
    b"nonsense",
    b"",
    b"\0\0\0",
    b"\xff\xfe",
    b'{"train/loss": 1.0}',
    b'{"step": "abc"}',
    b'{"step": null}',
    b'{"step": 1e999}',
    b'{"step": -1}',
    b'{"step": 1, "train/loss": [2]}',
    b'{"step": 1, "train/loss": 1' + 400 * b"0" + b"}",
    b"[" * 100_000,
    b"[1, 2]",
]


def test_lines_that_are_no_rows_are_passed_over_and_counted(tmp_path):
    lines = [b'{"step": 1, "train/loss": 3.0}', *BAD, b'{"step": 2, "train/loss": null}', b""]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    told = []
    rows = read_metrics(tmp_path, report=told.append)
    assert rows == [{"step": 1, "train/loss": 3.0}, {"step": 2, "train/loss": None}]
    assert len(told) == 1 and f"{len(BAD)} lines are not rows" in told[0] and "line 2" in told[0]


def test_a_file_that_cannot_be_written_is_told_once_and_written_later(tmp_path, monkeypatch):
    """For TensorBoard too: here the two are folders, on a full disk it is the same."""
    monkeypatch.setattr(tensorboard, "new_file", lambda: "board")
    (tmp_path / "metrics.jsonl").mkdir()
    (tmp_path / "board").mkdir()
    told = []
    writer = MetricsWriter(tmp_path, first_step=1, report=told.append)
    board = tensorboard.TensorBoard(open_folder(tmp_path), 1, told.append)
    for step in range(1, 40):  # more than any queue of TensorBoard's has room for
        writer.write(step, {"train/loss": 1.0})
        board.metrics(step, {"train/loss": 1.0})
    writer.flush()
    board.flush()
    said = [line for line in told if "continues, and retries" in line]
    assert ["board: Is a directory" in line for line in said] == [True, False]
    assert ["metrics.jsonl: Is a directory" in line for line in said] == [False, True]
    (tmp_path / "metrics.jsonl").rmdir()
    writer.close()
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(1, 40))


def test_what_is_not_finite_is_null_and_not_in_a_series(tmp_path):
    write(tmp_path, 1, [(1, {"train/loss": float("nan")}), (2, {"train/loss": 2.0})])
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert first == {"step": 1, "train/loss": None}
    assert series(read_metrics(tmp_path), "train/loss") == ([2], [2.0])


def test_the_loss_is_drawn(tmp_path):
    write(tmp_path, 1, [(1, {"train/loss": 3.0, "eval/loss": 3.1}), (2, {"train/loss": 2.0})])
    assert Path(plot_loss(tmp_path)).read_bytes().startswith(b"\x89PNG")


def test_loads_of_experts_are_drawn_below(tmp_path):
    write(tmp_path, 1, [(1, {"train/loss": 3.0})])
    plain = Path(plot_loss(tmp_path)).read_bytes()
    write(tmp_path, 2, [(2, {"train/experts/max_load": 1.5, "train/experts/worst_load": 2.0})])
    height = lambda png: int.from_bytes(png[20:24])
    assert height(Path(plot_loss(tmp_path)).read_bytes()) > height(plain)


def test_tensorboard_reads_what_is_written(tmp_path):
    board = tensorboard.TensorBoard(open_folder(tmp_path), 3, print)
    board.metrics(3, {"train/loss": 3.0, "optim/grad_norm": float("nan")})
    board.close(failed=False)
    (path,) = tmp_path.glob("tensorboard/events.out.tfevents.*")
    version, start, event = events(path.read_bytes())
    assert version.file_version == "brain.Event:2"
    assert (start.step, start.session_log.status) == (3, SessionLog.START)
    values = {value.tag: value.simple_value for value in event.summary.value}
    assert event.step == 3 and values["train/loss"] == 3.0
    assert np.isnan(values["optim/grad_norm"])


def test_tensorboard_has_config_picture_and_sample(tmp_path):
    write(tmp_path, 1, [(1, {"train/loss": 3.0})])
    png = Path(plot_loss(tmp_path)).read_bytes()
    board = tensorboard.TensorBoard(open_folder(tmp_path), 1, print)
    board.config({"model": {"dim": 8}})
    board.picture(4, "loss", png)
    board.text(5, "sample", "a <b>")
    board.close(failed=False)
    (path,) = tmp_path.glob("tensorboard/events.out.tfevents.*")
    config, picture, sample = (e.summary.value[0] for e in list(events(path.read_bytes()))[2:])
    assert (
        config.tensor.string_val[0] == b'    {\n      "model": {\n        "dim": 8\n      }\n    }'
    )
    assert config.metadata.plugin_data.plugin_name == "text"
    assert picture.image.encoded_image_string == png
    assert (picture.image.width, picture.image.height) == (1200, 675)
    assert sample.tensor.string_val[0] == b"a <b>"


def events(content):
    """Those of an event file: length, its checksum, the event, its checksum."""
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        data = content[12 : 12 + length]
        sums = struct.unpack("<I", content[8:12]) + struct.unpack("<I", content[12 + length :][:4])
        assert sums == (masked_crc32c(content[:8]), masked_crc32c(data))
        yield Event.FromString(data)
        content = content[16 + length :]


def test_a_long_name_fits_over_a_picture():
    assert plots.short("runs") == "runs"
    assert plots.short("a" * 100 + "z" * 100) == "a" * 28 + "..." + "z" * 28
