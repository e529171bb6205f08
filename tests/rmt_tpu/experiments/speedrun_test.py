"""Speedruns: what a track fixes, its text, and the figure of a run."""

import dataclasses
import hashlib
import json
import zipfile
from pathlib import Path

import pytest

from rmt_tpu import data
from rmt_tpu.config import overrides, presets
from rmt_tpu.errors import UsageError
from rmt_tpu.experiments import speedrun
from rmt_tpu.experiments.speedrun import TRACKS, PinnedText, Result
from rmt_tpu.runs.metrics import read_metrics
from rmt_tpu.storage import open_folder
from rmt_tpu.training.run import resolve_auto
from tests import cli

CPU = TRACKS["cpu"]
FILES = {f"a/{n}.py": f"x = {n}\n" * (20 + n) for n in range(60)}


@pytest.fixture
def small(tmp_path):
    """A track of the same kind, with a small text, whose wheel is there."""
    wheel = tmp_path / "a-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in reversed(FILES.items()):
            archive.writestr(name, text)
        archive.writestr("a/more.txt", "not read")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    text = PinnedText("a==1", wheel.name, digest, 0, 0)
    track = CPU._replace(
        text=text, loss=1.5, seq_len=16, eval_tokens=64, eval_every=2, start={"train.batch_size": 2}
    )
    with pytest.raises(UsageError, match="does not have the tokens .*legal: 0 and 0"):
        speedrun.prepare_text(track, str(wheel), open_folder(tmp_path / "first"))
    store = data.open_store(str(tmp_path / "first/text"))
    sums = {"train": store.train.checksum(), "held_out": store.held_out.checksum()}
    return track._replace(text=text._replace(**sums)), wheel


def test_the_text_is_the_python_files_of_the_pinned_wheel(small, tmp_path):
    track, wheel = small
    folder = open_folder(tmp_path / "run")
    with pytest.raises(
        UsageError, match="needs --text=a-1-.*; pip download --no-deps a==1 downloads"
    ):
        speedrun.prepare_text(track, None, folder)
    other = tmp_path / "other.whl"
    other.write_bytes(b"other")
    with pytest.raises(UsageError, match="has the SHA-256 digest .*; legal: a-1-py3"):
        speedrun.prepare_text(track, str(other), folder)
    with pytest.raises(UsageError, match="--text=nowhere: No such file"):
        speedrun.prepare_text(track, "nowhere", folder)
    # An interrupted command leaves a store without its manifest, which the next one completes.
    source = speedrun.prepare_text(track, str(wheel), folder)
    folder.child("text").delete("manifest.json")
    assert speedrun.prepare_text(track, str(wheel), folder) == source
    assert speedrun.prepare_text(track, None, folder) == source  # it is there
    store, found = data.open_store(source), []
    for stream in (store.train, store.held_out):
        found += [stream.document(n) for n in range(stream.num_documents)]
    texts = [data.ByteTokenizer().decode(tokens) for tokens in found]
    assert sorted(texts) == sorted(FILES.values()) and store.held_out.num_documents


def test_an_entry_may_not_change_what_is_fixed():
    speedrun.check_fixed(CPU, ["train.steps", "model.mixer", "train.optimizer.learning_rate"])
    for path in (*CPU.fixed, "data.source", "data.tokenizer", "data.mixture"):
        with pytest.raises(UsageError, match=f"--track=cpu fixes {path}; legal: entries"):
            speedrun.check_fixed(CPU, ["train.steps", path])
    speedrun.check_fixed(TRACKS["tpu"], ["data.source"])
    for path in ("train.init_from", "train.with_optimizer", "train"):
        with pytest.raises(UsageError, match=f"--track=tpu fixes {path}; legal: entries"):
            speedrun.check_fixed(TRACKS["tpu"], [path])


def test_configs_of_all_tracks_and_their_estimates():
    """The FLOPs of the first entries, from a formula of its own: 6 N per token and attention."""
    for track in TRACKS.values():
        config = speedrun.entry(track, presets.run(track.preset), "stdlib")
        assert config.data.seq_len == track.seq_len and config.train.log_every == 1
        assert config.train.eval_tokens >= 2**16 and track.loss > 1
        assert config.train.steps % track.eval_every == 0
    tpu = TRACKS["tpu"]
    config = speedrun.entry(tpu, presets.run(tpu.preset), "stdlib")
    tokens = 6000 * 512 * 1024
    matrices = 152.7e6 - 38.6e6  # the embedding is looked up
    roughly = (6 * matrices + 6 * 12 * 1024 * 768 * 2) * tokens
    assert speedrun.train_flops(config) == pytest.approx(roughly, rel=0.05)
    assert tpu.hours() == pytest.approx(roughly / 3600 / tpu.flops_per_second, rel=0.05)
    assert CPU.hours() is None
    assert speedrun.list_tracks().count("\n") == 2


def result(name, seed, reached, seconds, loss=1.4):
    return Result(
        "cpu", name, seed, reached, 10, loss, 100, 1000 * seed, seconds, 5, "1 x cpu", None
    )


def test_the_table_has_the_fastest_entry_first():
    runs = [
        result("a", 1, True, 30.0),
        result("b", 1, True, 10.0),
        result("b", 2, True, 20.0),
        result("c", 1, True, 1.0),
        result("c", 2, False, 600.0, loss=1.6),
        result("d", 1, False, 600.0, loss=1.7),
    ]
    rows = [line.split(" | ") for line in speedrun.table(CPU, runs).splitlines()[2:]]
    assert [row[0].strip("| ") for row in rows] == ["b", "a", "c", "d"]
    assert rows[0][2:5] == ["2 of 2", "15", "1.5e03"]
    assert rows[2][2:] == ["1 of 2", "1", "1e03", "1.6000 |"]
    assert rows[3][2:] == ["0 of 1", "", "", "1.7000 |"]


def test_the_guide_has_the_table_of_the_entries():
    docs = Path(__file__).resolve().parents[3] / "docs"
    rows = json.loads((docs / "outcomes/speedrun_cpu.json").read_text(encoding="utf-8"))
    table = speedrun.table(TRACKS["cpu"], [Result(**row) for row in rows])
    assert table in (docs / "guides/speedrun.md").read_text(encoding="utf-8")


def metrics(folder, seconds, losses):
    rows = [{"step": n, "throughput/step_seconds": s} for n, s in enumerate(seconds, 1)]
    rows += [{"step": step, "eval/loss": loss} for step, loss in losses.items()]
    folder.write("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())


@pytest.fixture
def run(small, tmp_path):
    """Make the folder of a run of a small track, with only the files that are read."""
    track, folder = small[0]._replace(text=None), open_folder(tmp_path / "run")
    config = speedrun.entry(track, presets.run("gpt2-tiny"), "stdlib")
    config = overrides.apply(config, {"train.steps": 6, "train.seed": 3})
    folder.write("config.json", json.dumps(overrides.to_json(config)).encode())
    folder.write("starts.jsonl", b'{"devices": "2 x cpu", "git_commit": "ab"}\n')
    return track, folder, config


def test_the_figure_is_the_time_and_flops_up_to_the_loss(run):
    track, folder, config = run
    metrics(folder, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], {2: 1.6, 4: 1.5, 6: 1.4})
    found = speedrun.measure(track, "gpt2-tiny", folder)
    assert (found.reached, found.step, found.loss, found.seconds) == (True, 4, 1.5, 10.0)
    assert found.tokens == 4 * 2 * 16 and found.seed == 3
    assert found.flops * 6 == speedrun.train_flops(config) * 4
    assert (found.devices, found.git_commit) == ("2 x cpu", "ab")
    late = speedrun.measure(track._replace(seconds=9.0), "gpt2-tiny", folder)
    assert (late.reached, late.step, late.loss) == (False, 6, 1.4)
    text = speedrun.write_results(track, [found], folder)
    assert "| gpt2-tiny | 853,376 | 1 of 1 | 10 | " in text
    assert json.loads(folder.read("speedrun.json").data) == [dataclasses.asdict(found)]


def test_a_run_with_another_config_is_not_taken_for_the_entry(run):
    """A changed rate or batch size makes another entry, whose run must not be left out."""
    _, folder, config = run
    folder.write("config.json", json.dumps(overrides.to_json(resolve_auto(config))).encode())
    metrics(folder, [1.0, 2.0], {2: 1.5})
    # It was killed between its evaluation and its first checkpoint, and trains again.
    assert not speedrun.has_reached(config, folder, 1.5)
    folder.write("checkpoints/2/COMMIT", b"{}")
    assert speedrun.has_reached(config, folder, 1.5)
    assert not speedrun.has_reached(config, folder, 1.4)
    for change in ({"train.optimizer.learning_rate": 4e-3}, {"train.batch_size": 4}):
        assert not speedrun.has_reached(overrides.apply(config, change), folder, 1.5)


def test_runs_of_other_tracks_and_unfinished_runs_have_no_figure(run):
    track, folder, _ = run
    metrics(folder, [1.0, 2.0], {})
    with pytest.raises(UsageError, match="has no evaluation results; legal: the folder of a run"):
        speedrun.measure(track, "a", folder)
    rows = ({"step": step, "throughput/step_seconds": 1.0} for step in (1, 3))
    folder.write("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    with pytest.raises(UsageError, match="does not have the time of every step"):
        speedrun.measure(track, "a", folder)
    wanted = "not a run of --track=cpu: it has a different data.seq_len"
    with pytest.raises(UsageError, match=wanted):
        speedrun.measure(track._replace(seq_len=32), "a", folder)


def test_the_command_reports_what_is_missing(tmp_path):
    assert "tpu: one TPU host" in cli.succeed("speedrun", "--list").stdout
    workdir = f"--workdir={tmp_path}"
    assert "needs --text=django-5.2.8" in cli.fail("speedrun", workdir)
    assert "--track=cpu fixes data.seq_len" in cli.fail("speedrun", workdir, "--seq_len=64")
    assert "--track=tpu needs --data" in cli.fail("speedrun", workdir, "--track=tpu")


@pytest.mark.slow
def test_an_entry_from_the_text_to_the_table(small, tmp_path, monkeypatch):
    """The track has a small text and an easy loss; the recipe trains in this process."""
    track, wheel = small
    track = track._replace(loss=5.9, start={"train.batch_size": 2, "train.steps": 4})
    first = (
        "from rmt_tpu.experiments import speedrun\n"
        f"speedrun.TRACKS['cpu'] = speedrun.Track(*{tuple(track._replace(text=None))!r})"
        f"._replace(text=speedrun.PinnedText(*{tuple(track.text)!r}))\n"
    )
    flags = [f"--text={wheel}", "--presets=gpt2-tiny", "--seeds=0,1", f"--workdir={tmp_path}/s"]
    process = cli.start("speedrun", *flags, "--learning_rate=0.01", first=first)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "| gpt2-tiny | 853,376 | 2 of 2 |" in output
    rows = json.loads((tmp_path / "s/speedrun.json").read_text())
    assert [row["seed"] for row in rows] == [0, 1] and all(row["loss"] <= 5.9 for row in rows)
    # The runs stopped at the first evaluation, and the same command trains no further.
    process = cli.start("speedrun", *flags, "--learning_rate=0.01", first=first)
    assert process.communicate()[0] == output
    for seed in (0, 1):
        assert read_metrics(tmp_path / f"s/gpt2-tiny/seed-{seed}")[-1]["step"] == 2
    process = cli.start("speedrun", *flags, "--learning_rate=0.02", first=first)
    error = process.communicate()[1]
    assert process.returncode == 2 and "holds a run with a different config" in error
