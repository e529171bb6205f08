"""What a run leaves beside its checkpoints, where it cannot be written or made."""

import json
from types import ModuleType

import pytest

import rmt_tpu
from rmt_tpu.config import overrides, presets
from rmt_tpu.errors import DivergedError
from rmt_tpu.runs import environment
from rmt_tpu.runs.metrics import read_metrics
from rmt_tpu.runs.side_files import SideFiles, archive_metrics, is_complete
from rmt_tpu.storage import Fault, open_folder
from rmt_tpu.storage.local import LocalFolder


@pytest.fixture
def told():
    return []


def side_files(folder, told, step=0):
    config = overrides.apply(presets.run("rmt-tiny"), {"train.tensorboard": "off"})
    return SideFiles(open_folder(folder), step, config, told.append)


def test_why_a_run_has_no_loss_is_kept(tmp_path, told):
    with pytest.raises(DivergedError), side_files(tmp_path, told):
        raise DivergedError("the loss was not finite")
    assert (tmp_path / "diverged.txt").read_text() == "the loss was not finite\n"
    with pytest.raises(KeyboardInterrupt), side_files(tmp_path / "other", told):
        raise KeyboardInterrupt
    assert not (tmp_path / "other" / "diverged.txt").exists()


def test_nothing_of_it_ends_a_run_and_each_is_told_once(tmp_path, told):
    for name in ("metrics.jsonl", "samples.txt", "starts.jsonl", "complete.json"):
        (tmp_path / name).mkdir()
    (tmp_path / "plots").write_text("no folder")

    def fail():
        raise MemoryError("no room for the cache")

    with side_files(tmp_path, told) as files:
        for step in (1, 2):
            files.write(step, {"train/loss": 1.0})
            files.draw(step)
            files.sample(step, fail)
            files.sample(step, lambda: "text")
        files.complete(2)
        assert not files.is_complete(2)
    notes = [line for line in told if line.startswith("note: ")]
    for piece in (
        "metrics.jsonl: Is a directory; the run continues, and retries this",
        "starts.jsonl cannot be written",
        "the loss curve cannot be drawn",
        "no text sample: MemoryError: no room for the cache; the run continues",
        "no text sample: " + str(tmp_path),
        "complete.json cannot be written",
    ):
        assert len([note for note in notes if piece in note]) == 1, (piece, told)


def test_samples_of_steps_that_come_again_are_forgotten(tmp_path, told):
    with side_files(tmp_path, told) as files:
        for step in (4, 8, 12):
            files.sample(step, lambda step=step: f"text\nof {step}")
    with side_files(tmp_path, told, step=8) as files:
        files.sample(12, lambda: "again")
    wanted = "== step 4 ==\ntext\nof 4\n== step 8 ==\ntext\nof 8\n== step 12 ==\nagain\n"
    assert (tmp_path / "samples.txt").read_text() == wanted
    with side_files(tmp_path, told):
        assert not (tmp_path / "samples.txt").exists()


def test_a_run_is_complete_at_its_own_last_step(tmp_path, told):
    with side_files(tmp_path, told) as files:
        assert not files.is_complete(8)
        files.complete(8)
        assert files.is_complete(8) and not files.is_complete(12)
    with side_files(tmp_path, told, step=8) as files:
        assert files.is_complete(8)
    with side_files(tmp_path, told, step=4) as files:  # its last checkpoint was damaged, say
        assert not files.is_complete(8)


def test_a_run_whose_last_rows_are_not_written_is_not_complete(tmp_path, told, monkeypatch):
    """Its rows would be lost, and nobody would evaluate the last step again."""
    append = LocalFolder.append

    def fail(self, name, data):
        if name == "metrics.jsonl":
            raise Fault(f"{self}/{name}: no answer")
        append(self, name, data)

    with monkeypatch.context() as patch, side_files(tmp_path, told) as files:
        patch.setattr(LocalFolder, "append", fail)
        files.write(8, {"eval/loss": 1.0})
        files.complete(8)
        assert not files.is_complete(8)
    assert told[-1] == (
        f"note: {tmp_path}/complete.json cannot be written: the last rows of metrics.jsonl are not "
        "written yet; the run continues"
    )
    with side_files(tmp_path, told, step=8) as files:
        files.write(8, {"eval/loss": 1.0})
        files.complete(8)
        assert files.is_complete(8)
    assert read_metrics(tmp_path) == [{"step": 8, "eval/loss": 1.0}]


def test_rows_that_a_failed_append_left_are_written_before_a_run_is_complete(
    tmp_path, told, monkeypatch
):
    append, failures = LocalFolder.append, [1]

    def fail_once(self, name, data):
        if name == "metrics.jsonl" and failures:
            raise Fault(f"{self}/{name}: {failures.pop()}")
        append(self, name, data)

    monkeypatch.setattr(LocalFolder, "append", fail_once)
    with side_files(tmp_path, told) as files:
        files.write(8, {"eval/loss": 1.0})
        files.complete(8)
        assert files.is_complete(8)
        assert read_metrics(tmp_path) == [{"step": 8, "eval/loss": 1.0}]


def test_each_start_leaves_what_it_was_started_with(tmp_path, told):
    for step in (0, 8):
        with side_files(tmp_path, told, step=step):
            pass
    first, second = map(json.loads, (tmp_path / "starts.jsonl").read_text().splitlines())
    assert (first["from_step"], second["from_step"]) == (0, 8)
    assert {"jax", "python", "numpy"} <= second["versions"].keys()
    assert "pytest" in second["command"] or "-c" in second["command"]
    commit = second["git_commit"]
    assert commit is None or len(commit.removesuffix("-dirty")) == 40
    assert second["versions"]["rmt_tpu"] == rmt_tpu.__version__


def test_a_start_names_the_code(tmp_path):
    """A wheel has the commit that it was built from, and pip records its address and digest."""
    assert environment.code(tmp_path) == {"code": "files", "git_commit": None}
    (tmp_path / "rmt_tpu").mkdir()
    built = tmp_path / "rmt_tpu/build.json"
    built.write_text('{"version": "0.1.0", "git_commit": "0f1e"}')
    assert environment.code(tmp_path) == {"code": "wheel", "git_commit": "0f1e"}
    (tmp_path / "rmt_tpu-0.1.0.dist-info").mkdir()
    metadata = tmp_path / "rmt_tpu-0.1.0.dist-info/METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: rmt_tpu\nVersion: 0.1.0\n")
    assert environment.code(tmp_path) == {"code": "wheel", "git_commit": "0f1e"}
    record = {"url": "file:///a.whl", "archive_info": {"hashes": {"sha256": "ab"}}}
    metadata.with_name("direct_url.json").write_text(json.dumps(record))
    wheel = {"url": "file:///a.whl", "sha256": "ab"}
    assert environment.code(tmp_path) == {"code": "wheel", "git_commit": "0f1e", "wheel": wheel}
    (tmp_path / ".git").mkdir()  # but no repository
    assert environment.code(tmp_path) == {"code": "checkout", "git_commit": None}
    metadata.with_name("direct_url.json").write_text("[]")
    built.write_text("no JSON")
    (tmp_path / ".git").rmdir()
    assert environment.code(tmp_path) == {"code": "files", "git_commit": None}


def test_metrics_without_a_checkpoint_are_set_aside(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    for _ in range(2):
        archive_metrics(open_folder(tmp_path))
    assert not (tmp_path / "metrics.jsonl").exists()
    assert (tmp_path / "metrics.old.jsonl").read_text() == '{"step": 1}\n'


def test_a_hash_of_sources_changes_with_names_and_contents(tmp_path):
    (tmp_path / "__init__.py").write_text("")
    package = ModuleType("package")
    package.__file__ = str(tmp_path / "__init__.py")
    hashes = [environment.source_hash(package)]
    for name, text in [("a.py", "x = 1"), ("a.py", "x = 2"), ("notes.txt", "y"), ("a.py", "x = 1")]:
        (tmp_path / name).write_text(text)
        hashes.append(environment.source_hash(package))
    assert hashes[2] == hashes[3] and hashes[1] == hashes[4] and len(set(hashes)) == 3


def test_the_hash_of_a_module_is_of_its_file_alone(tmp_path):
    module = ModuleType("module")
    module.__file__ = str(tmp_path / "a.py")
    hashes = []
    for name, text in [("a.py", "x = 1"), ("b.py", "x = 2"), ("a.py", "x = 3")]:
        (tmp_path / name).write_text(text)
        hashes.append(environment.source_hash(module))
    assert hashes[0] == hashes[1] != hashes[2]


def test_rows_that_a_failed_append_left_are_written_when_files_are_flushed(
    tmp_path, told, monkeypatch
):
    def fail(self, name, data):
        raise Fault(f"{self}/{name}: no answer")

    with side_files(tmp_path, told) as files:
        with monkeypatch.context() as patch:
            patch.setattr(LocalFolder, "append", fail)
            files.write(8, {"eval/loss": 1.0})
        files.flush()
        assert read_metrics(tmp_path) == [{"step": 8, "eval/loss": 1.0}]


def test_a_later_step_is_forgotten_whatever_its_samples_are(tmp_path, told, monkeypatch):
    with side_files(tmp_path, told) as files:
        files.complete(8)
    read = LocalFolder.read

    def no_samples(self, name, **options):
        if name == "samples.txt":
            raise Fault("not there now")
        return read(self, name, **options)

    monkeypatch.setattr(LocalFolder, "read", no_samples)
    with side_files(tmp_path, told, step=3) as files:
        assert not files.is_complete(8) and "not there now" in told[-1]
    for damaged in (b"", b"[]", b'{"step": "8"}'):
        (tmp_path / "complete.json").write_bytes(damaged)
        with side_files(tmp_path, told, step=3) as files:
            assert not (tmp_path / "complete.json").exists()


def test_a_run_is_not_complete_on_another_amount_of_text(tmp_path, told):
    with side_files(tmp_path, told) as files:
        files.complete(8)
    config, folder = presets.run("rmt-tiny"), open_folder(tmp_path)
    assert is_complete(folder, config, 8) and not is_complete(folder, config, 9)
    assert not is_complete(folder, overrides.apply(config, {"train.eval_tokens": 64}), 8)
    (tmp_path / "complete.json").write_text('{"step": 8}')  # an older record
    assert is_complete(folder, overrides.apply(config, {"train.eval_tokens": 64}), 8)
