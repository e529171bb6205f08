"""Trackers: what they record, also in a run that resumes, and what happens if they fail."""

import json
import struct
import sys
import threading
import types

import pytest

from rmt_tpu.config import overrides, presets
from rmt_tpu.errors import UsageError
from rmt_tpu.runs import tensorboard, trackers, weights_and_biases
from rmt_tpu.runs.metrics import read_metrics
from rmt_tpu.runs.side_files import SideFiles, archive_metrics
from rmt_tpu.storage import open_folder
from tests import cli, wheels


def config(**train):
    changes = {"train.tensorboard": "off"} | {f"train.{name}": v for name, v in train.items()}
    return overrides.apply(presets.run("rmt-tiny"), changes)


class StandIn(types.ModuleType):
    """A module in place of wandb, with the functions that are used, which keeps their arguments."""

    def __init__(self):
        super().__init__("wandb")
        self.__spec__ = types.SimpleNamespace()
        self.starts, self.rows, self.axes, self.ends, self.configs = [], [], [], [], []
        self.broken = None

    def init(self, **options):
        assert {"project", "id", "name", "resume", "dir", "settings"} == options.keys()
        self.starts.append(options)
        run = types.SimpleNamespace(url=None, dir="there", config=types.SimpleNamespace())
        run.define_metric = lambda name, step_metric=None: self.axes.append((name, step_metric))
        run.config.update = lambda values, allow_val_change: self.configs.append(values)
        run.log, run.finish = self.log, lambda exit_code: self.ends.append(exit_code)
        return run

    def log(self, values):
        if self.broken:
            raise self.broken
        self.rows.append(values)

    def Settings(self, **options):
        return options

    def Image(self, path):
        with open(path, "rb") as file:
            return file.read()

    def Html(self, page):
        return page


@pytest.fixture
def wandb(monkeypatch):
    module = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", module)
    for name in ("WANDB_PROJECT", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    return module


def test_records_of_tensorboard(tmp_path):
    """An event file has what TensorBoard is to show, at its step."""
    from tensorboardX.proto.event_pb2 import Event

    png = bytes(16) + struct.pack(">II", 30, 20)
    tracker = tensorboard.TensorBoard(open_folder(tmp_path), 7, print)
    tracker.config({"seed": 3})
    tracker.metrics(8, {"loss": 2.5, "rate": 0.5})
    tracker.picture(9, "curve", png)
    tracker.text(10, "sample", "once")
    tracker.close(failed=False)
    (file,) = (tmp_path / "tensorboard").iterdir()
    content, events = file.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        events.append(Event.FromString(content[12 : 12 + length]))
        content = content[16 + length :]
    first, session, config, metrics, picture, sample = events
    assert first.file_version == "brain.Event:2"
    assert session.step == 7 and session.session_log.status == session.session_log.START
    assert config.step == 0 and config.summary.value[0].tag == "config/text_summary"
    assert config.summary.value[0].tensor.string_val == [b'    {\n      "seed": 3\n    }']
    values = [(value.tag, value.simple_value) for value in metrics.summary.value]
    assert metrics.step == 8 and values == [("loss", 2.5), ("rate", 0.5)]
    (shown,) = picture.summary.value
    assert (picture.step, shown.tag, shown.image.width, shown.image.height) == (9, "curve", 30, 20)
    assert shown.image.encoded_image_string == png and shown.image.colorspace == 4
    assert sample.step == 10 and sample.summary.value[0].tensor.string_val == [b"once"]


def start(folder, told, step=0):
    return SideFiles(open_folder(folder), step, config(tracker="wandb"), told.append)


def test_a_run_goes_on_in_the_same_tracked_run(wandb, tmp_path):
    told = []
    with start(tmp_path, told) as files:
        files.write(1, {"train/loss": 3.0})
        files.draw(1)
        files.sample(1, lambda: "a <b>")
    assert wandb.configs == [overrides.to_json(config(tracker="wandb"))]
    assert wandb.axes == [("step", None), ("*", "step")]
    row, picture, sample = wandb.rows
    assert row == {"step": 1, "train/loss": 3.0}
    assert picture == {"step": 1, "loss": (tmp_path / "plots/loss.png").read_bytes()}
    assert sample == {"step": 1, "sample": "<pre>a &lt;b&gt;</pre>"}
    assert wandb.ends == [0] and "wandb: there" in told

    with pytest.raises(KeyError), start(tmp_path, told, step=1):
        raise KeyError("wrong")
    assert wandb.ends == [0, 1]
    first, second = wandb.starts
    assert first == second and first["resume"] == "allow" and first["project"] == "rmt_tpu"
    assert first["id"] == json.loads((tmp_path / "trackers.json").read_text())["wandb"]
    assert (first["name"], str(first["dir"])) == (tmp_path.name, str(tmp_path))

    archive_metrics(open_folder(tmp_path))  # another run begins in the folder
    with start(tmp_path, told):
        pass
    assert wandb.starts[2]["id"] != first["id"]


def test_a_tracker_that_fails_is_reported_once_and_left_out(wandb, tmp_path):
    told = []
    with start(tmp_path, told) as files:
        files.write(1, {"train/loss": 3.0})
        wandb.broken = OSError("no\nroute")
        for step in (2, 3):
            files.write(step, {"train/loss": 3.0})
    assert len(wandb.rows) == 1 and wandb.ends == []
    notes = [line for line in told if line.startswith("note: ")]
    assert notes == [
        "note: the tracker wandb has failed: OSError: no route; the run continues without it"
    ]
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]


def test_a_tracker_that_cannot_begin_ends_no_run(wandb, tmp_path):
    told = []
    wandb.Settings = None
    with start(tmp_path, told) as files:
        files.write(1, {"train/loss": 3.0})
    assert len([line for line in told if "the tracker wandb has failed" in line]) == 1


def test_an_upload_that_hangs_ends_no_run(wandb, tmp_path, monkeypatch):
    told, release = [], threading.Event()
    monkeypatch.setattr(weights_and_biases, "FINISH_SECONDS", 0.05)
    init = wandb.init

    def hanging(**options):
        run = init(**options)
        run.finish = lambda exit_code: release.wait()
        return run

    wandb.init = hanging
    with start(tmp_path, told):
        pass
    release.set()
    error = "TimeoutError: the upload to Weights & Biases did not finish within 0 s"
    assert [line for line in told if error in line]


def test_names_of_trackers_are_checked(monkeypatch):
    monkeypatch.setattr(weights_and_biases, "is_installed", lambda: True)
    wanted = lambda **train: trackers.wanted(config(**train).train)
    assert wanted() == () and wanted(tensorboard="on") == ("tensorboard",)
    assert wanted(tensorboard="auto", tracker="wandb") == ("tensorboard", "wandb")
    both = wanted(tensorboard="auto", tracker="wandb, tensorboard")
    assert both == ("wandb", "tensorboard")
    for tracker, legal in {
        "wandb,": "legal: tensorboard",
        "x": "legal",
        "wandb,wandb": "leg",
    }.items():
        with pytest.raises(UsageError, match=f"train.tracker='{tracker}' is .*; {legal}"):
            config(tracker=tracker)
    with pytest.raises(UsageError, match="tensorboard' and --tensorboard=off contradict"):
        config(tracker="tensorboard")
    monkeypatch.setattr(weights_and_biases, "is_installed", lambda: False)
    with pytest.raises(UsageError, match="--tracker=wandb needs wandb: pip install"):
        wanted(tracker="wandb")


def test_tensorboard_is_wanted_where_it_can_be(monkeypatch):
    monkeypatch.setattr(tensorboard, "is_installed", lambda: False)
    assert not trackers.wanted(config(tensorboard="auto").train)
    for train, flag in (
        ({"tensorboard": "on"}, "--tensorboard=on"),
        ({"tensorboard": "auto", "tracker": "tensorboard"}, "--tracker=tensorboard"),
    ):
        with pytest.raises(UsageError, match=f"{flag} needs tensorboardX: pip install"):
            trackers.wanted(config(**train).train)


def records(content):
    """Return the records of a file of wandb: LevelDB's log format, after a header of 7 bytes.

    Each piece has a checksum, its length, and whether it is a whole record (1), the first piece (2)
    of one, one in the middle (3) or the last (4). No piece crosses a border of 32 KiB.
    """
    at, whole = 7, b""
    while at + 7 <= len(content):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


@pytest.mark.slow
def test_wandb_itself_records_a_run_offline(tmp_path):
    """Two starts of a run leave records of one tracked run, with metrics, picture and sample."""
    from wandb.proto.wandb_internal_pb2 import Record

    flags = [*cli.TINY[:-2], f"--data={cli.TEXT}", f"--workdir={tmp_path}", "--tracker=wandb"]
    for steps in (3, 5):
        wheels.succeed(
            *(sys.executable, "-m", "recipes.train", "--preset=rmt-tiny", "--change_config"),
            *(*flags, f"--steps={steps}"),
            cwd=wheels.ROOT,
            env={"WANDB_MODE": "offline", "JAX_PLATFORMS": "cpu"},
        )
    run_id = json.loads((tmp_path / "trackers.json").read_text())["wandb"]
    rows = []
    files = sorted(tmp_path.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert len(files) == 2
    for file in files:
        for record in map(Record.FromString, records(file.read_bytes())):
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({i.key or "/".join(i.nested_key): i.value_json for i in items})
    losses = [row for row in rows if "train/loss" in row]
    assert [int(row["step"]) for row in losses] == [1, 2, 3, 4, 5]
    assert {"loss", "sample"} <= {name.split("/")[0] for row in rows for name in row}
