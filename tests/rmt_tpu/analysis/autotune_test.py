"""Tuning with a compiler that only seems to be there: table, log, what is resumed."""

import dataclasses
import json
import os

import pytest
from matplotlib.figure import Figure

from pallas_kernels import tuned
from pallas_kernels.target import lowering_for
from rmt_tpu import kernel_tables
from rmt_tpu.analysis import autotune, autotune_report, kernel_problems
from rmt_tpu.analysis.autotune import TrialLog, Tuner
from rmt_tpu.errors import UsageError
from rmt_tpu.estimator import DEVICES
from rmt_tpu.estimator.calibration import error_bar
from rmt_tpu.estimator.search import Rating, Refusal, Timing, Trial
from rmt_tpu.estimator.spaces import Problem

KEY = {
    "heads": 4, "size": 64, "dtype": "bfloat16", "rows": "size_major", "alibi": False,
    "segments": True,
}  # fmt: skip


def problem(tokens: int) -> Problem:
    return Problem("tpu_v5_lite", "tpu", "attention_forward", tuned.items(KEY), tokens)


class Compiler:
    """Fewer queries are faster; counts what it is asked."""

    def __init__(self, stop_at: int = 99):
        self.asked, self.stop_at, self.now = [], stop_at, 0.0

    def rate(self, problem, blocks):
        self.asked.append((problem.tokens, blocks.queries))
        self.now += 1
        if len(self.asked) == self.stop_at:
            raise KeyboardInterrupt
        if (problem.tokens, blocks.queries) == (768, 256):
            return Refusal("time limit", "no result within 120 s")
        return Rating(1e-6 * blocks.queries, blocks.queries)


@pytest.fixture
def out(tmp_path):
    return str(tmp_path / "table.json")


def tune(out, *tokens, compiler=None, seconds=100.0, resume=True, **options):
    compiler = compiler or Compiler()
    log = TrialLog(out, resume)
    tuner = Tuner(out, log, compiler.rate, clock=lambda: compiler.now, **options)
    return list(tuner.run([problem(n) for n in tokens], seconds)), compiler


def lines(out):
    with open(f"{out}.log.jsonl", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def test_what_is_faster_goes_into_the_table_and_everything_into_the_log(out):
    told = []
    (done,), compiler = tune(out, 768, progress=told.append)
    assert compiler.asked == [(768, 256), (768, 384), (768, 768), (768, 128)]
    # The default is the first, and has no time here: any other is better.
    assert done.result.default.fate == "time limit" and done.result.gain is None
    (entry,) = kernel_tables.read(out).entries
    assert entry == done.entry and dict(entry.blocks) == {"queries": 128}
    assert (entry.source, entry.seconds, entry.default_seconds) == ("estimated", (128e-6,), ())
    assert dict(entry.default_blocks) == {"queries": 256} and dict(entry.versions)["jax"]
    assert [line["fate"] for line in lines(out)] == ["time limit", *["compiled"] * 3]
    assert len(told) == 4 and told[0].endswith("default: time limit (no result within 120 s)")
    with tuned.tuned(kernel_tables.read(out)), lowering_for("TPU v5 lite"):
        found = tuned.look_up(problem(768).tuned_kernel, KEY, 768, problem(768).default())
    assert found.queries == 128


def test_the_same_command_goes_on_where_it_was_stopped(out):
    stopped = Compiler(stop_at=3)
    with pytest.raises(KeyboardInterrupt):
        tune(out, 512, 1024, compiler=stopped)
    assert len(lines(out)) == 2
    with open(f"{out}.log.jsonl", "a") as file:
        file.write('{"blocks": {"queries": 1\n[]\n')  # cut off, and something else
        file.write('{"kernel_version": 99}\n')
    done, again = tune(out, 512, 1024)
    assert not set(again.asked) & set(stopped.asked[:2]) and len(done) == 2
    assert [dict(d.entry.blocks)["queries"] for d in done] == [128, 128]
    assert done[0].result.gain == pytest.approx(0.5)
    # And a third time all is there.
    done, third = tune(out, 512, 1024)
    assert third.asked == [] and [d.note for d in done] == ["already in the table"] * 2
    done, fourth = tune(out, 512, resume=False, refresh=True)
    assert len(fourth.asked) == 3 and done[0].entry is not None and len(lines(out)) == 3


def test_an_old_entry_is_told_of_and_one_of_another_kernel_tuned_again(out):
    (done,), _ = tune(out, 512)
    old = {"versions": (("jax", "0.1"),)}
    kernel_tables.add(out, [tuned.Entry(**(vars(done.entry) | old))])
    (again,), compiler = tune(out, 512)
    assert (
        again.note == "already in the table (other versions; see --refresh)" and not compiler.asked
    )
    kernel_tables.add(out, [tuned.Entry(**(vars(done.entry) | {"kernel_version": 99}))])
    (again,), _ = tune(out, 512)
    assert again.entry == done.entry
    # On a device, an estimate is no reason to leave it at that.
    timer = lambda problem, chosen: {b: Timing((1e-6 * b.queries,) * 3) for b in chosen}
    (again,), _ = tune(out, 512, timer=timer, top=1)
    assert again.entry.source == "measured" and again.result.measured
    assert kernel_tables.read(out).entries[0].source == "measured"


def test_the_time_is_shared(out):
    done, compiler = tune(out, 512, 1024, seconds=4.0)
    assert [tokens for tokens, _ in compiler.asked] == [512, 512, 1024, 1024]
    assert [d.result.left for d in done] == [1, 2]
    assert "2 searches were not finished within --budget_minutes" in autotune_report.summary(
        done, out
    )


def test_the_report(out, tmp_path):
    done, _ = tune(out, 512, 768)
    text = autotune_report.table(done)
    assert "| 256.0 | 128.0 | 50.0% | - | queries=128 | estimated |" in text
    summary = autotune_report.summary(done, out)
    assert summary.startswith("2 of 2 kernels have better block sizes")
    assert f"\n{error_bar(['v5e'])}" in summary
    values = json.loads(json.dumps(autotune_report.values(done)))
    assert values[0]["gain"] == pytest.approx(0.5) and values[0]["best"] == {"queries": 128}
    assert autotune_report.draw(done, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
    same, _ = tune(out, 512)
    assert "already in the table" in autotune_report.table(same)
    assert autotune_report.summary(same, out) == f"1 of 1 kernels were already in {out}"
    assert not autotune_report.draw(same, tmp_path / "none.png")
    alone, _ = tune(str(tmp_path / "other.json"), 128)
    assert "clearly faster than the default" in autotune_report.summary(alone, out)


def test_a_picture_of_measured_times_has_no_estimates(out, tmp_path, monkeypatch):
    """The search has three candidates, and times the default and one other."""
    timer = lambda problem, chosen: {b: Timing((1e-6 * b.queries,) * 3) for b in chosen}
    done, _ = tune(out, 512, timer=timer, top=1)
    assert sum(bool(t.estimate) for t in done[0].result.trials) == 3
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *given, **more: drawn.append(figure))
    assert autotune_report.draw(done, tmp_path / "picture.png")
    candidates, best, _ = drawn[0].axes[0].lines
    assert sorted(candidates.get_xdata()) == [0.5, 1.0] and list(best.get_xdata()) == [0.5]


@pytest.mark.slow
def test_kernels_of_ops_are_those_of_the_target():
    """Sizes as the kernels have them; a GPU's are found though nobody takes them unasked."""
    on = {
        name: kernel_problems.problems_of_ops(["key_vector"], DEVICES[name])
        for name in ("v5e", "h200")
    }
    assert {p.device for p in on["v5e"]} == {"tpu_v5_lite"}
    assert {p.kernel for p in on["v5e"]} == {"key_vector_forward", "key_vector_backward"}
    assert {p.tokens for p in on["v5e"]} == {512} and len(on["v5e"]) == 2 * 4
    assert {(p.device, p.platform, p.tokens) for p in on["h200"]} == {("nvidia_h200", "cuda", 8192)}


def test_what_can_be_no_table(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="fix the file, or move it away"):
        autotune.check_table(str(tmp_path / "file"))
    with pytest.raises(UsageError, match="cannot be written to"):
        autotune.check_table(str(tmp_path / "file" / "table.json"))
    for folder in (tmp_path, f"{tmp_path}{os.sep}"):
        with pytest.raises(UsageError, match=f"^{folder} is a folder; legal: "):
            autotune.check_table(str(folder))


def test_on_a_gpu_an_entry_says_what_is_faster(out):
    """Also where no blocks are faster than the default."""
    key = tuned.items({"K": 64, "V": 64, "R": 0, "P": 16, "dtype": "bfloat16"})
    given = Problem("nvidia_h200", "cuda", "key_vector_read", key, 8192)
    for plain, name in ((2e-3, "triton"), (1e-3, "xla")):
        timer = lambda problem, chosen, s=plain: (
            {b: Timing((1e-3,) * 3) for b in chosen} | {None: Timing((s,) * 3)}
        )
        rate = lambda problem, blocks: Rating(1e-3)
        tuner = Tuner(out, TrialLog(out, True), rate, timer, 1, refresh=True, clock=lambda: 0.0)
        (done,) = tuner.run([given], -1.0)
        (entry,) = kernel_tables.read(out).entries
        assert entry == done.entry and entry.implementation == name
        assert entry.blocks == entry.default_blocks
        assert f"default ({name} is faster)" in autotune_report.table([done])
        summary = autotune_report.summary([done], out)
        assert summary.startswith("none of 1 kernels has block sizes clearly faster")
        assert ("plain JAX is faster than 1" in summary) == (name == "xla")
    # Blocks that are better than the default, of a kernel that programs do not use.
    fast = {b: Timing((2e-3,) * 3) for b in given.candidates()} | {None: Timing((5e-4,) * 3)}
    fast[given.candidates()[1]] = Timing((1e-3,) * 3)
    tuner = dataclasses.replace(tuner, timer=lambda problem, chosen: {b: fast[b] for b in fast})
    (done,) = tuner.run([given], 100.0)
    assert done.entry.blocks != done.entry.default_blocks
    assert autotune_report.summary([done], out).startswith("none of 1 kernels")


@pytest.mark.parametrize("timing", [Timing(wrong="NaN"), Timing(failed="RuntimeError: no room")])
def test_a_default_that_fails_on_the_device_has_no_time(out, timing):
    """A default that failed gets no entry, which would end the search for good."""
    key = tuned.items({"K": 64, "V": 64, "R": 0, "P": 16, "dtype": "bfloat16"})
    given = Problem("nvidia_h200", "cuda", "key_vector_read", key, 8192)
    timer = lambda problem, chosen: {chosen[0]: timing, None: Timing((1e-3,) * 3)}
    log = TrialLog(out, True)
    tuner = Tuner(out, log, lambda *given: Rating(1e-3), timer, 1, clock=lambda: 0.0)
    (done,) = tuner.run([given], -1.0)
    assert done.entry is None and not kernel_tables.read(out).entries
    (_, _, row) = autotune_report.table([done]).splitlines()
    why = timing.wrong or timing.failed
    fate = "wrong" if timing.wrong else "failed"
    assert row.endswith(f"| - | - | - | - | none: {fate}: {why} | - |")
    assert "the default of 1 has no time" in autotune_report.summary([done], out)
    (values,) = autotune_report.values([done])
    assert (values["default_seconds"], values["default_why"]) == (None, why)


def test_what_failed_or_took_too_long_is_tried_again(out):
    log, given = TrialLog(out, True), problem(512)
    fates = [Trial(b, "compiled", estimate=1.0) for b in given.candidates()]
    log.write(given, *fates)
    for fate in ("time limit", "failed", "no room", "unrated"):
        log.write(given, Trial(given.candidates()[1], fate))
        known = TrialLog(out, True).known(given)
        retried = set(given.candidates()) - known.keys()
        assert retried == ({given.candidates()[1]} if fate in ("time limit", "failed") else set())


@pytest.mark.parametrize(
    "timing", [Timing((3e-3,) * 3), Timing(wrong="NaN")], ids=["slow", "wrong"]
)
def test_a_default_that_wins_a_measurement_replaces_what_tables_list(out, timing):
    """The package lists other blocks; they are timed although their estimate is poor."""
    (shipped, *_) = tuned.package_table("tpu7x", "depth_attention_partial").entries
    given = Problem("tpu7x", "tpu", shipped.kernel, shipped.key, shipped.tokens)
    kernel, key, default = given.tuned_kernel, dict(given.key), given.default()
    listed = kernel.build_blocks(dict(shipped.blocks))
    rate = lambda problem, blocks: Rating(9.0 if blocks == listed else 1.0)
    timer = lambda problem, chosen: (
        {b: Timing((1e-3,) * 3) for b in chosen} | ({listed: timing} if listed in chosen else {})
    )
    tuner = Tuner(out, TrialLog(out, True), rate, timer, 1, clock=lambda: 0.0)
    (done,) = tuner.run([given], -1.0)
    (entry,) = kernel_tables.read(out).entries
    assert entry == done.entry and entry.source == "measured"
    assert entry.blocks == entry.default_blocks == tuned.items(tuned.fields(default))
    assert {t.blocks: t.fate for t in done.result.trials}[listed] in ("timed", "wrong")
    assert "| default | measured |" in autotune_report.table([done])
    with lowering_for("TPU7x"):
        assert tuned.look_up(kernel, key, given.tokens, default) == listed
        with tuned.tuned(kernel_tables.read(out)):
            assert tuned.look_up(kernel, key, given.tokens, default) == default
    (again,) = tuner.run([given], -1.0)
    assert again.note == "already in the table"


def test_a_refresh_replaces_or_removes_the_old_entry(out):
    (old,), _ = tune(out, 512)
    assert dict(old.entry.blocks) == {"queries": 128}
    same = lambda problem, chosen: {b: Timing((1e-3,) * 3) for b in chosen}
    (done,), _ = tune(out, 512, timer=same, refresh=True)
    (entry,) = kernel_tables.read(out).entries
    assert entry == done.entry and entry.blocks == entry.default_blocks
    # An estimate replaces it as well; where no time is known, the old entry stays.
    kernel_tables.add(out, [old.entry])
    for rating, blocks in ((Rating(None), old.entry.blocks), (Rating(1.0), entry.default_blocks)):
        compiler = Compiler()
        compiler.rate = lambda problem, blocks, rating=rating: rating
        tune(out, 512, compiler=compiler, refresh=True, resume=False)
        assert kernel_tables.read(out).entries[0].blocks == blocks
    # If the default fails, no blocks are used.
    wrong = lambda problem, chosen: {chosen[0]: Timing(wrong="NaN")}
    (done,), _ = tune(out, 512, timer=wrong, refresh=True)
    assert done.entry is None and not kernel_tables.read(out).entries


def test_an_estimate_does_not_replace_a_measurement_of_another_table(out):
    (found,), _ = tune(out, 512)
    os.remove(out)
    for source, written in (("measured", 0), ("estimated", 1)):
        entry = dataclasses.replace(found.entry, source=source)
        compiler = Compiler()
        compiler.rate = lambda problem, blocks: Rating(1.0)
        with tuned.tuned(tuned.Table("other", (entry,))):
            tune(out, 512, compiler=compiler, resume=False)
        assert len(kernel_tables.read(out).entries) == written
