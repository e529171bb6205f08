"""Estimates beside published times: the statistics by hand, and what the data says of the model."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from rmt_tpu.estimator import DEVICES, MODELS, calibrate, calibration, published
from rmt_tpu.estimator.calibration import PublishedCall, agreement, error_bar, rows, spearman
from rmt_tpu.estimator.cost import Work

# In the source tree itself: under Bazel, this file is a link to there.
DOCUMENT = Path(__file__).resolve().parents[3] / "docs/benchmarks/estimates.md"


def test_the_correlation_of_ranks():
    assert spearman([1, 2, 3, 4], [10, 20, 40, 30]) == pytest.approx(0.8)
    assert spearman([1, 2, 3], [9, 4, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 2], [1, 2, 3]) == pytest.approx(0.75**0.5)  # two share a rank


def row(published: float, *works: Work) -> PublishedCall:
    return PublishedCall(
        "v6e", "norm", {"shape": [8, 2]}, published, 1, 1, tuple((w, 2) for w in works)
    )


def seconds(kind: str, schedule: float, hbm: float) -> Work:
    """As cycles of v6e."""
    clock = DEVICES["v6e"].clock
    return Work(kind, None, schedule * clock, 0.0, hbm * clock, 0.0)


def test_the_agreement_by_hand():
    # Each runs twice: a second of schedule where four were measured, two of bytes where two were.
    given = [row(4.0, seconds("other", 1, 0.5)), row(2.0, seconds("other", 1, 2))]
    assert [r.ratio() for r in given] == pytest.approx([0.5, 2])
    found = agreement(given)
    assert (found.calls, found.mean, found.spread) == (2, pytest.approx(1), pytest.approx(2))
    assert (found.least, found.most) == pytest.approx((0.5, 2))
    assert found.rank_correlation == pytest.approx(-1)
    kernel = row(4.0, seconds("kernel", 1, 0.5))
    assert kernel.is_kernel and not given[0].is_kernel
    assert kernel.ratio("most") == pytest.approx(0.75)
    assert agreement([]) is None


def test_the_rows_are_whole():
    content = calibration.PATH.read_text(encoding="utf-8")
    values = json.loads(content)
    assert calibration.text(values, rows()) == content
    assert values["versions"].keys() == {"jax", "libtpu"} and "tokamax" in values["source"]
    assert len({(r.target, r.op, json.dumps(r.arguments)) for r in rows()}) == len(rows())
    for r in rows():
        assert hasattr(published, r.op) and 0 < r.published < 1 and r.work
        estimates = [r.estimated(model) for model in MODELS]
        assert 0 < estimates[0] <= estimates[1] <= estimates[2]
        assert all(work.kind in ("kernel", "matmul", "other") for work, _ in r.work)


@pytest.mark.parametrize("target", ["v5p", "v6e", "tpu7x"])
def test_the_best_guess_spreads_least(target):
    """Of what XLA computes, where its own estimate is another way; a factor cancels in ratios."""
    mine = [r for r in rows() if r.target == target and not r.is_kernel]
    cycles = lambda r: sum((w.hbm if w.estimate is None else w.estimate) * n for w, n in r.work)
    by_xla = [cycles(r) / DEVICES[target].clock / r.published for r in mine]
    best = agreement(mine)
    assert best.spread < np.exp(np.std(np.log(by_xla)))
    assert best.spread < agreement(mine, "most").spread
    assert abs(np.log(best.mean)) < abs(np.mean(np.log(by_xla)))


def test_what_is_said_is_what_the_rows_give():
    written = DOCUMENT.read_text(encoding="utf-8")
    assert all(part in written for part in calibration.table().split("\n\n"))
    found = agreement([r for r in rows() if r.target == "v6e"])
    line = error_bar(["v6e", "v4", "v6e", "h100"])
    assert line == (
        f"estimates; the best guess was {found.least:.1f} to {found.most:.1f} (mean "
        f"{found.mean:.2f}) times the measured times of {found.calls} calls on v6e; not compared "
        "with measured times on v4, h100 (docs/benchmarks/estimates.md)"
    )
    never = "estimates; not compared with measured times on v4 (docs/benchmarks/estimates.md)"
    assert error_bar(["v4"]) == never


def test_rows_are_made_again_only_with_the_kernels_that_were_timed(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert calibrate.main() == 1
    words = "tokamax is not installed; pip install tokamax==0.0.12 installs the kernels\n"
    assert capsys.readouterr().err == words
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(sys, "argv", ["calibrate", "v7"])
    assert calibrate.main() == 2
    assert capsys.readouterr().err == "'v7' has no calibration rows; legal: v5e, v5p, v6e, tpu7x\n"


SLOW = ("cross_entropy", "cross_entropy_gradient", "causal_attention", "causal_attention_gradient")
QUICK = ("norm", "norm_gradient", "gated_linear_unit", "ragged_dot")


@pytest.mark.compile
@pytest.mark.parametrize("op", [*QUICK, *(pytest.param(op, marks=pytest.mark.slow) for op in SLOW)])
def test_a_call_compiled_today_is_as_its_row_says(op):
    """The shortest of a chip; what needs the kernels that were timed is for `calibrate` alone."""
    kept = min((r for r in rows() if (r.target, r.op) == ("v6e", op)), key=lambda r: r.published)
    (again,) = calibrate.compiled([kept])
    assert again.bytes == pytest.approx(kept.bytes, rel=0.01)
    for model in MODELS:
        assert again.ratio(model) == pytest.approx(kept.ratio(model), rel=0.05)
