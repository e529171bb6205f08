"""What is said of losses: intervals, fits, shares, tables and pictures, of losses made up."""

import dataclasses
import json
import math
import typing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rmt_tpu.analysis.sweep import SweepRow, resolve_auto
from rmt_tpu.config import RunConfig, overrides
from rmt_tpu.errors import RunError
from rmt_tpu.experiments import (
    outcomes,
    pictures,
    plan,
    records,
    residual_size,
    results,
    runs,
    trained,
)
from rmt_tpu.experiments.outcomes import ArmOutcome
from rmt_tpu.experiments.plan import Arm
from rmt_tpu.runs.plots import save_picture
from rmt_tpu.storage import Fault, open_folder
from rmt_tpu.training import depth_rate

_DEFAULTS = Path(__file__).with_name("defaults.json")
ROOT = Path(__file__).parents[3]
SEEDS = (0, 1, 2)
TEXTS = (0.1, -0.05, 0.02)  # what a seed's held-out text adds to every loss


def made_up(arm: Arm, loss: float, *, noise=(0.0, 0.0, 0.0), weights=100, flops=1e9) -> ArmOutcome:
    losses = tuple(loss + a + b for a, b in zip(TEXTS, noise, strict=True))
    curves = tuple(([500, 1000], [value + 0.5, value]) for value in losses)
    return ArmOutcome(arm, 2 * weights, weights, 1000, flops, losses, curves)


CONFIG = trained.ladder("tiny").arms[0].config
A, B = Arm("a", CONFIG, "first"), Arm("b", CONFIG, "second", "a")


def test_an_interval_is_students():
    found = outcomes.estimate([1.0, 2.0, 4.0])
    # t of 95% with two degrees of freedom is 4.3027 (any table).
    assert found.mean == pytest.approx(7 / 3)
    assert found.half == pytest.approx(4.30265 * math.sqrt(7 / 3) / math.sqrt(3), rel=1e-5)
    assert not found.excludes_zero and outcomes.estimate([1.0, 1.1, 1.05]).excludes_zero
    alone = outcomes.estimate([3.0])
    assert math.isnan(alone.half) and not alone.excludes_zero and str(alone) == "+3.0000"


def test_differences_are_of_the_same_seed():
    one, other = made_up(B, 1.9, noise=(0.01, 0.0, -0.01)), made_up(A, 2.0)
    assert outcomes.differences(one, other) == pytest.approx([-0.09, -0.1, -0.11])
    lost = replace(other, losses=(*other.losses[:2], None))
    assert outcomes.differences(one, lost) == [] and not lost.complete


def test_the_share_of_tokens():
    """From 2.4 at 500 tokens to 1.9 at 1000, a straight line over log tokens is at 2.0 where
    `500 * 2^(0.4 / 0.5)` is."""
    one, other = made_up(B, 1.9), made_up(A, 2.0)
    assert outcomes.share_of_tokens(one, other) == pytest.approx(500 * 2**0.8 / 1000)
    assert outcomes.share_of_tokens(other, one) is None
    assert outcomes.share_of_tokens(made_up(B, 1.4), other) == pytest.approx(0.5)


@pytest.fixture
def ladder():
    """Losses that are `c x^-0.1` of FLOPs, of each seed with a factor of its own; the second
    system's are those of twice the FLOPs."""
    sizes = (1e9, 3e9, 1e10, 4e10)
    found = []
    for size, flops in enumerate(sizes):
        for system, gain, against in (("first", 1, None), ("second", 2, f"first-{size}")):
            losses = tuple(c * (gain * flops) ** -0.1 for c in (20.0, 21.0, 19.5))
            arm = Arm(f"{system}-{size}", CONFIG, system, against, paper=2.0)
            curves = tuple(([1000], [loss]) for loss in losses)
            weights = round(math.sqrt(flops))
            found.append(ArmOutcome(arm, 2 * weights, weights, 1000, flops, losses, curves))
    return found


def test_a_fit_finds_what_was_put_in(ladder):
    found = outcomes.fit([o for o in ladder if o.arm.system == "first"], "flops")
    np.testing.assert_allclose(found.slopes, [-0.1] * 3, rtol=1e-9)
    np.testing.assert_allclose(np.exp(found.intercepts), [20, 21, 19.5], rtol=1e-9)
    np.testing.assert_allclose(found.at(1e9), [c * 1e9**-0.1 for c in (20, 21, 19.5)])
    np.testing.assert_allclose(np.exp(found.reaching(found.at(7e9))), [7e9] * 3)
    assert outcomes.fit(ladder[:2], "flops") is None
    table = results.fits_table(ladder).splitlines()
    assert "| second | -0.1000 ± 0.0000 | -0.2000 ± 0.0000 |" in table[3]
    assert "| 2.00 times (2.00..2.00) | 1.41 times (1.41..1.41) |" in table[3]
    assert table[2].endswith("| 1.00 times (1.00..1.00) | 1.00 times (1.00..1.00) |")


def test_a_fit_may_have_more_seeds_than_the_largest_model(ladder):
    """Without the first system's largest model, whose run diverged, it has three."""
    for index, losses in ((6, (2.0, None)), (7, ladder[7].losses[:2])):
        ladder[index] = replace(ladder[index], losses=losses)
    table = results.fits_table(ladder).splitlines()
    assert table[2].endswith("|  |  |")
    assert "| 2.00 times (2.00..2.00) | 1.41 times (1.41..1.41) |" in table[3]


@pytest.mark.parametrize(("slope", "shown"), [(1e-6, "over 1e6 times"), (-0.1, "no size would do")])
def test_a_flat_fit_says_that_hardly_any_size_would_do(ladder, slope, shown):
    for index, outcome in enumerate(ladder):
        if outcome.arm.system == "first":
            losses = tuple(c * outcome.flops**-slope for c in (20.0, 21.0, 19.5))
            ladder[index] = replace(outcome, losses=losses)
    assert f"| {shown}" in results.fits_table(ladder).splitlines()[3]


def test_a_page(ladder):
    of = replace(
        trained.ladder("tiny"),
        arms=tuple(o.arm for o in ladder),
        searches={"first": plan.Search(CONFIG, ())},
        registered=(),
    )
    rates = {1e-3: 2.5, 1e-2: 2.2, 1e-1: None}
    rows = [
        SweepRow("first", {"train.optimizer.learning_rate": rate}, 10, [0], [loss])
        for rate, loss in rates.items()
    ]
    page = results.page(of, SEEDS, ladder, rows)
    assert "| first | 2.5000 | **2.2000** | diverged |" in page.text
    assert page.text.count("| **-") == 4  # every difference leaves out 0
    assert [arm["held_out_losses"] for arm in page.numbers["arms"]][0] == list(ladder[0].losses)
    chosen = results.with_best(CONFIG, of, of.arms[0], {"first": rows})
    assert chosen.train.optimizer.learning_rate == 1e-2


def test_a_search_over_two_values_and_the_mean_of_two():
    rows = {
        name: [
            SweepRow(name, point, 10, [7], [3.0 - bonus * (point == best)])
            for bonus, best in [(1, good)]
            for point in plan.points(rate=(0.01, 0.04), depth_rate=(1.0, 0.01))
        ]
        for name, good in {
            "shallow": {plan.RATE: 0.04, plan.DEPTH_RATE: 1.0},
            "deep": {plan.RATE: 0.01, plan.DEPTH_RATE: 0.01},
        }.items()
    }
    arm = Arm("a", CONFIG, "x", searches=("shallow", "deep"))
    chosen = results.with_best(CONFIG, plan.Plan((arm,)), arm, rows)
    assert chosen.train.optimizer.learning_rate == pytest.approx(0.02)
    assert chosen.train.depth_rate == pytest.approx(0.1)
    table = results.searches_table([row for of in rows.values() for row in of])
    assert table.count(" (edge)") == 2
    table = table.replace(" (edge)", "").splitlines()
    assert table[0] == "| search | 0.01 | 0.04 |"
    assert table[2] == "| shallow, depth_rate=1 | 3.0000 | **2.0000** |"
    assert table[5] == "| deep, depth_rate=0.01 | **2.0000** | 3.0000 |"


def test_an_edge_is_one_of_the_rates_that_the_search_itself_tried():
    losses = {"wide": {0.02: 2.0, 0.04: 3.0}, "low": {0.01: 3.0, 0.02: 2.0, 0.04: 3.0}}
    rows = [
        SweepRow(name, {plan.RATE: rate}, 10, [7], [loss])
        for name, of in losses.items()
        for rate, loss in of.items()
    ]
    lines = results.searches_table(rows).splitlines()
    assert lines[0] == "| search | 0.01 | 0.02 | 0.04 |"
    assert lines[2:] == [
        "| wide |  | **2.0000** (edge) | 3.0000 |",
        "| low | 3.0000 | **2.0000** | 3.0000 |",
    ]


def test_a_plan_of_searches_alone_has_a_page_and_a_picture():
    points = plan.points(rate=(0.01, 0.04), depth_rate=(1.0, 0.1))
    rows = [SweepRow("deep", point, 10, [7], [2.0 + i]) for i, point in enumerate(points)]
    rows += [SweepRow("plain", {plan.RATE: 0.01}, 10, [7], [None])]
    page = results.page(plan.Plan((), notes=("Only searches.",)), SEEDS, [], rows)
    assert page.text.startswith("Only searches.\n\nSearch (") and "| arm |" not in page.text
    deep, plain = page.pictures["results.png"]().axes
    assert [list(line.get_xdata()) for line in deep.lines] == [[1.0, 0.1]] * 2
    assert [list(line.get_ydata()) for line in deep.lines] == [[2.0, 3.0], [4.0, 5.0]]
    assert len(plain.lines[0].get_xdata()) == 0  # its only run diverged


def test_a_search_without_a_result_gives_no_rate():
    rows = [SweepRow("first", {plan.RATE: rate}, 10, [0], [None]) for rate in (0.1, 0.2)]
    with pytest.raises(RunError, match="the search first diverged, so a has no learning rate"):
        results.with_best(CONFIG, plan.Plan((A,)), replace(A, searches=("first",)), {"first": rows})


def test_p_is_students_and_holms():
    values = [-0.02, -0.01, -0.03, 0.005, -0.015]
    found = outcomes.paired_test(values)
    s = math.sqrt(sum((x + 0.014) ** 2 for x in values) / 4)
    t = 0.014 / (s / math.sqrt(5))
    # Of four degrees of freedom the integral has a closed form (Abramowitz and Stegun 26.7.4).
    cosine = 1 / math.sqrt(1 + t**2 / 4)
    within = t / 2 * cosine * (1 + cosine**2 / 2)
    assert found.deviation == pytest.approx(s) and found.p == pytest.approx(1 - within)
    assert outcomes.paired_test([0.1, 0.1]).p < 1e-9 and outcomes.paired_test([0.0, 0.0]).p == 1
    assert outcomes.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert outcomes.holm([0.9, 0.8]) == [1.0, 1.0] and outcomes.holm([]) == []


def test_what_is_detectable_is_found_four_times_in_five():
    values = np.array([-0.02, -0.01, -0.03, 0.005])
    found = outcomes.paired_test(values.tolist())
    drawn = np.random.default_rng(0).normal(found.detectable, found.deviation, (100_000, 4))
    t = drawn.mean(1) / (drawn.std(1, ddof=1) / 2)
    assert np.mean(np.abs(t) > 3.18245) == pytest.approx(0.8, abs=0.005)  # any table


def test_what_was_registered_is_tested_and_nothing_else_is_bold():
    noise = (0.01, -0.01, 0.0)
    other = made_up(A, 2.0)
    told = [other, made_up(B, 1.9, noise=noise), made_up(replace(B, name="c"), 1.8, noise=noise)]
    of = plan.Plan((A, B), registered=("b",))
    page = results.page(of, SEEDS, told, [])
    assert page.text.count("**") == 2
    line = next(line for line in page.text.splitlines() if line.startswith("| b | a | **"))
    lost = replace(told[2], losses=(None, 1.8, 1.8))
    table = results.tests_table(replace(of, registered=("b", "c")), [*told[:2], lost])
    assert "| c | a | none (diverged, or only one seed) |" in table
    assert "| 0.0033 | 0.0066 |" in table, "of a family of two"
    assert line.startswith("| b | a | **-0.1000 ± 0.0248** | 0.0100 | 0.0033 | 0.0033 |")


def test_the_share_of_flops():
    """Of an arm that reads twice the tokens, 1.5 times the FLOPs, and is there after a quarter."""
    other = made_up(A, 2.0)
    curves = tuple(([500, 1000, 2000], [loss, loss - 0.1, loss - 0.2]) for loss in other.losses)
    one = replace(made_up(B, 1.8, flops=1.5e9), tokens=2000, curves=curves)
    assert "| 50%, 38% |" in results.arms_table([other, one], SEEDS)


def test_what_runs_left(tmp_path):
    folder = open_folder(tmp_path)
    rows = [{"step": step, "eval/loss": loss} for step, loss in ((4, 3.0), (960, 2.5))]
    folder.write("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    folder.write("complete.json", json.dumps({"step": 960}).encode())
    arm = Arm("rmt", residual_size.growth("tiny").arms[-1].config, "rmt")
    config = json.dumps(overrides.to_json(resolve_auto(arm.config)))
    folder.write("config.json", config.encode())
    found = outcomes.arm_outcome(arm, [records.read_record(folder)] * 2)
    assert found.losses == (2.5, 2.5) and found.curves == (([4096, 983_040], [3.0, 2.5]),) * 2
    model = arm.config.model
    assert found.parameters - found.weights == 2 * model.vocab_size * model.width
    assert found.tokens == 983_040 and found.flops == plan.flops(arm.config)


def test_a_record_is_written_after_that_of_another_process(tmp_path, monkeypatch):
    folder, refused = open_folder(tmp_path), [True, True]
    append = type(folder).append

    def once_free(self, name, data):
        if refused:
            refused.pop()
            raise Fault(f"{name}: another process is writing to this file")
        append(self, name, data)

    monkeypatch.setattr(type(folder), "append", once_free)
    monkeypatch.setattr(records, "WAITS", (0.0, 0.0, 0.0))
    record = records.Record([4, 8], [3.0, 2.5], 2.5)
    records.Records(folder, "lines.jsonl", 7).add("a/seed-0", CONFIG, record)
    assert not refused
    assert records.Records(folder, "lines.jsonl", 7).find(CONFIG) == record
    other = records.Records(folder, "lines.jsonl", 8)
    assert other.find(CONFIG) is None and other.has_only_other_texts
    assert not records.Records(folder, "lines.jsonl", 7).has_only_other_texts
    assert not records.Records(folder, "none.jsonl", 8).has_only_other_texts, "it has no runs"
    seed = overrides.apply(CONFIG, {"train.seed": 5})
    elsewhere = overrides.apply(CONFIG, {"data.source": "gs://b/c", "train.log_every": 9})
    less = overrides.apply(CONFIG, {"train.eval_tokens": 64})
    known = [records.Records(folder, "lines.jsonl", 7).find(c) for c in (seed, elsewhere, less)]
    assert known == [None, record, None]
    # Cut off behind its last line, as by an editor, it is mended by the next.
    file = tmp_path / "lines.jsonl"
    file.write_text(file.read_text().rstrip("\n"))
    refused.clear()
    records.Records(folder, "lines.jsonl", 7).add("a/seed-5", seed, record)
    assert records.Records(folder, "lines.jsonl", 7).find(seed) == record
    for damaged in (
        b"\xff\xfe\n",
        b"[1]\n",
        b'{"digest": "a", "steps": 5, "losses": "x", "loss": 1, "text": 7}\n',
    ):
        file.write_bytes(damaged)
        with pytest.raises(RunError, match="line 1 is not the outcome of a run; legal: lines that"):
            records.Records(folder, "lines.jsonl", 7)


def test_a_run_that_another_process_recorded_is_not_recorded_twice(tmp_path):
    """Each process of --jobs reads the file at its start, before the other processes end."""
    folder = open_folder(tmp_path)
    config = resolve_auto(residual_size.growth("tiny").arms[0].config)
    run = runs.PlannedRun("a/seed-0", folder.child("a"), config, None)
    rows = [{"step": config.train.steps, "eval/loss": 2.5}]
    run.folder.write("metrics.jsonl", (json.dumps(rows[0]) + "\n").encode())
    run.folder.write("complete.json", json.dumps({"step": config.train.steps}).encode())
    run.folder.write("config.json", json.dumps(overrides.to_json(config)).encode())
    both = [
        runs.PlannedRuns(
            plan.Plan(()), (), lambda c: c, folder, records.Records(folder, "lines.jsonl", 7)
        )
        for _ in range(2)
    ]
    assert [of.settled(run) for of in both] == [True, True]
    lines = (tmp_path / "lines.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [2.5]


def test_a_run_whose_folder_is_read_needs_more_than_a_record(tmp_path):
    """A machine that has only the records trains the first seed again, whose folder is read."""
    folder = open_folder(tmp_path)
    config = resolve_auto(residual_size.growth("tiny").arms[0].config)
    of = plan.Plan((Arm("a", config, "first"),))
    lines = records.Records(folder, "lines.jsonl", 7)
    make = lambda *reports: runs.PlannedRuns(of, (0, 1), lambda c: c, folder, lines, *reports)
    ((_, first),) = make().arm_runs({})
    steps = config.train.steps
    for run in first:
        lines.add(run.label, run.config, records.Record([steps], [2.5], 2.5))
    assert [make().settled(run) for run in first] == [True, True]
    planned = make(True)
    ((_, read),) = planned.arm_runs({})
    assert [planned.settled(run) for run in read] == [False, True]
    assert [planned.is_recorded(run) for run in read] == [True, True]
    read[0].folder.write("complete.json", json.dumps({"step": steps}).encode())
    read[0].folder.write("config.json", json.dumps(overrides.to_json(read[0].config)).encode())
    assert planned.settled(read[0])


def test_the_rule_of_a_rate_is_part_of_what_a_run_is(tmp_path, monkeypatch):
    folder, config = open_folder(tmp_path), trained.attnres_scaling("tiny").arms[1].config
    known = records.Records(folder, "lines.jsonl", 7)
    known.add("a", config, records.Record([4], [2.5], 2.5))
    assert known.find(config)
    monkeypatch.setattr(depth_rate, "BOUND", 0.05)
    assert known.find(config) is None


def _config_classes(kind, found):
    """Collect the config classes that a type contains, including those in unions and tuples."""
    if dataclasses.is_dataclass(kind) and kind not in found:
        found.add(kind)
        for hint in typing.get_type_hints(kind).values():
            _config_classes(hint, found)
    for inner in typing.get_args(kind):
        _config_classes(inner, found)
    return found


def test_a_field_that_is_added_with_a_default_leaves_the_digests(tmp_path):
    """Lines in docs/outcomes would otherwise be lost with every new config field."""
    known = records.Records(open_folder(tmp_path), "lines.jsonl", 7)
    digest = known._digest(CONFIG, None)
    former = CONFIG.train.optimizer
    longer = dataclasses.make_dataclass(
        "Added", [("new", int, 3)], bases=(type(former),), frozen=True
    )
    optimizer = lambda **new: longer(**vars(former), **new)
    with_field = lambda **new: replace(
        CONFIG, train=replace(CONFIG.train, optimizer=optimizer(**new))
    )
    assert known._digest(with_field(), None) == digest
    assert known._digest(with_field(new=4), None) != digest


def test_a_config_within_a_tuple_that_gets_a_field_leaves_the_digests():
    """A core of `model.stacks` is such a config."""

    stacks = dataclasses.make_dataclass("Model", [("stacks", tuple)], frozen=True)

    def changed(**fields):
        added = [(name, int, dataclasses.field(default=3)) for name in fields]
        cls = dataclasses.make_dataclass("Core", [("width", int), *added], frozen=True)
        return dict(records._changed(stacks(((cls(4, **fields),),))))

    assert changed(new=3) == changed() == {"stacks": [[{"width": 4}]]}
    assert changed(new=4)["stacks"] == [[{"width": 4, "new": 4}]]


def test_defaults_stay_because_digests_leave_them_out():
    """A line in docs/outcomes/ names only values that differ from defaults.

    A default that changes therefore changes which run a line describes. Give the field that needs
    it another name, or train the runs in docs/outcomes/ again. Fields that are new are added to the
    file: `python -m tests.rmt_tpu.experiments.outcomes_test` writes it.
    """
    pinned = json.loads(_DEFAULTS.read_text())
    found = _defaults()
    changed = {name for name in pinned if name in found and found[name] != pinned[name]}
    assert not changed, changed
    assert not set(found) - set(pinned), "fields to add to defaults.json"


def test_the_kept_outcomes_are_those_of_the_plans(tmp_path):
    """The searches of Figures 2 and 3 are in docs/outcomes, and are not trained again."""
    lines = (ROOT / "docs/outcomes/tiny.jsonl").read_text().splitlines()
    kept = {line["run"]: line["digest"] for line in map(json.loads, lines)}
    known = records.Records(open_folder(tmp_path), "lines.jsonl", json.loads(lines[0])["text"])
    in_float32 = lambda config: overrides.apply(config, {"model.compute_dtype": "float32"})
    planned = runs.PlannedRuns(
        trained.rmt_scaling("tiny"), (), in_float32, open_folder(tmp_path), None
    )
    found = {run.label: known._digest(run.config, None) for run in planned.search_runs()}
    assert found and found == {label: kept[label] for label in found}


def test_parts_that_a_device_chose_leave_the_digest(tmp_path):
    """One part, the number of old lines and of most devices, is as good as no number."""
    known = records.Records(open_folder(tmp_path), "lines.jsonl", 7)
    in_parts = lambda n: known._digest(overrides.apply(CONFIG, {"train.accumulate": n}), None)
    assert in_parts(None) == in_parts(1) != in_parts(2)


def _defaults():
    found = {}
    for cls in _config_classes(RunConfig, set()):
        for field in dataclasses.fields(cls):
            default = records._default(field)
            if default is not dataclasses.MISSING:
                found[f"{cls.__name__}.{field.name}"] = overrides.to_json(default)
    return json.loads(json.dumps(dict(sorted(found.items()))))


def test_what_is_not_sure_or_diverged(ladder):
    one, other = made_up(B, 1.99, noise=(0.1, 0.0, -0.1)), made_up(A, 2.0)
    lines = results.arms_table([other, one], SEEDS).splitlines()
    assert "| a | -0.0100 ± 0.2484 |" in lines[3] and "**" not in lines[3]
    lost = replace(one, losses=(None, 2.0, 2.1))
    assert "| diverged: 1 of 3 | a |  |  |" in results.arms_table([other, lost], SEEDS)


def test_arms_with_fewer_seeds_are_named():
    few = [made_up(replace(arm, num_seeds=2), 2.0) for arm in (A, B)]
    table = lambda *outcomes: results.arms_table(outcomes, SEEDS)
    assert "over seeds 0, 1, 2 (b: only 0, 1), nats" in table(made_up(A, 2.0), few[1])
    assert "over seeds 0, 1, 2 (a, b: only 0, 1), nats" in table(*few)
    every = replace(A, num_seeds=3)
    assert "over seeds 0, 1, 2, nats" in table(made_up(every, 2.0))


PLANS = {
    "fits": ("ladder", {}),
    "x": ("attnres-block-size", {}),
    "differences": ("rmt-variants", {}),
}


@pytest.mark.parametrize(
    "make", [trained.ladder, residual_size.rmt_key_dim, trained.attnres_ablations]
)
def test_pictures(make, tmp_path):
    plan = make("tiny")
    rng = np.random.default_rng(0)
    found = [
        made_up(arm, 2 - 0.05 * i, noise=rng.normal(0, 0.01, 3), weights=100 * 2**i, flops=2.0**i)
        for i, arm in enumerate(plan.arms)
    ]
    found[2] = replace(found[2], losses=(None, 2.0, 2.1))
    path = save_picture(pictures.draw(plan, found), open_folder(tmp_path), "results.png")
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG"), path


if __name__ == "__main__":
    _DEFAULTS.write_text(json.dumps(_defaults(), indent=1) + "\n")
