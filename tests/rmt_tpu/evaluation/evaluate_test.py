"""Answers are kept and asked for once; results are told as a table, a picture and JSON."""

import json
import os
import re
import socket
import time

import numpy as np
import pytest

from rmt_tpu import config as cfg
from rmt_tpu.data import ByteTokenizer
from rmt_tpu.errors import UsageError
from rmt_tpu.evaluation import report
from rmt_tpu.evaluation.documents import Source
from rmt_tpu.evaluation.evaluate import Subject, evaluate
from rmt_tpu.evaluation.report import by_position, comparison, write_report
from rmt_tpu.evaluation.scorer import Scorer
from rmt_tpu.evaluation.scores import TokenScores
from rmt_tpu.evaluation.tasks import TASKS, Document, whole_text
from rmt_tpu.storage import open_folder
from tests import models

QUESTIONS = [Document(((f"q{n}", " ab"), (f"q{n}", " c d")), n % 2, (2, 3)) for n in range(9)]
SOURCES = [
    Source("piqa", "choices", QUESTIONS, "data", TASKS["piqa"]),
    Source("text", "text", [whole_text("some words " * 5), whole_text("and more")], "texts"),
]


@pytest.fixture(scope="module")
def scorer():
    return Scorer.of(models.byte_decoder(positions=cfg.Rope()), 32, 100)


def subject(scorer, folder, **identity):
    identity = {"weights": "a", "tokenizer": "byte"} | identity
    return Subject("m", scorer, ByteTokenizer(), identity, open_folder(folder))


class Broken(Exception):
    pass


def test_what_was_answered_is_not_asked_again(scorer, tmp_path):
    calls = []

    def counted(tokens, targets):
        calls.append(tokens.shape)
        if len(calls) == 4:
            raise Broken
        return scorer.scores(tokens, targets)

    some = scorer._replace(scores=counted)
    with pytest.raises(Broken):
        evaluate(subject(some, tmp_path / "a"), SOURCES)
    (kept,) = (tmp_path / "a/evaluation").iterdir()  # of the first task: a batch was on its way
    before = kept.read_text()
    assert 3 <= len(before.splitlines()) < 18
    kept.write_text(before + '{"number": 0, "log_pro')  # killed in the middle of a line
    resumed = evaluate(subject(some, tmp_path / "a"), SOURCES)
    assert kept.read_text().startswith(before)
    whole = evaluate(subject(scorer, tmp_path / "b"), SOURCES)
    assert resumed[0].answered == 18 - len(before.splitlines())
    for one, other in zip(resumed, whole, strict=True):
        assert [m.value for m in one.metrics] == pytest.approx([m.value for m in other.metrics])
    calls.clear()
    again = evaluate(subject(some, tmp_path / "a"), SOURCES)
    assert not calls and [r.answered for r in again] == [0, 0]
    assert [m.value for r in again for m in r.metrics] == [
        m.value for r in resumed for m in r.metrics
    ]
    # Other weights have answers of their own.
    evaluate(subject(scorer, tmp_path / "a", weights="b"), SOURCES[:1])
    assert len(list((tmp_path / "a/evaluation").iterdir())) == 3


def test_answers_that_another_process_computes_are_not_computed_too(scorer, tmp_path):
    evaluate(subject(scorer, tmp_path), SOURCES[:1])
    (kept,) = (tmp_path / "evaluation").iterdir()
    record = {"host": socket.gethostname(), "pid": os.getppid(), "seen": time.time()}
    kept.with_name(f"{kept.name}.running.json").write_text(json.dumps(record))
    # All answers are there.
    assert [r.answered for r in evaluate(subject(scorer, tmp_path), SOURCES[:1])] == [0]
    lines = kept.read_text().splitlines(keepends=True)
    kept.write_text("".join(lines[:-1]))
    in_use = f"^--output={kept} is in use by process .*another --output"
    with pytest.raises(UsageError, match=in_use):
        evaluate(subject(scorer, tmp_path), SOURCES)
    assert sum(path.suffix == ".jsonl" for path in kept.parent.iterdir()) == 1


def test_batches_are_of_all_sources(scorer, tmp_path):
    shapes = []
    counted = lambda tokens, targets: shapes.append(tokens.shape) or scorer.scores(tokens, targets)
    some = scorer._replace(scores=counted)
    few = [SOURCES[0]._replace(name=f"{n}", documents=QUESTIONS[:n]) for n in (1, 2)]
    results = evaluate(subject(some, tmp_path), [*SOURCES, *few])
    assert [result.requests for result in results] == [18, 3, 2, 4]
    assert shapes == 9 * [(3, 32)]  # and not 6 + 1 + 1 + 2
    assert all(result.seconds > 0 for result in results)


def test_results_are_told(scorer, tmp_path, monkeypatch):
    drawn, save = [], report.save_picture
    note = lambda figure, *where: (drawn.append(figure), save(figure, *where))[1]
    monkeypatch.setattr(report, "save_picture", note)
    one = evaluate(subject(scorer, tmp_path / "a"), SOURCES)
    even = scorer._replace(scores=lambda *given: scorer.scores(given[0] * 0, given[1]))
    other = evaluate(subject(even, tmp_path / "b", weights="b"), SOURCES)
    text = write_report({"one": one, "other": other}, open_folder(tmp_path))
    assert (tmp_path / "evaluation.md").read_text() == text
    assert (tmp_path / "plots/evaluation.png").stat().st_size > 5000
    acc = one[0].metrics[0]
    shares, positions = drawn[0].axes
    assert shares.get_legend_handles_labels()[1] == ["one", "other"]
    assert 100 * acc.value in [bar.get_width() for bar in shares.patches]
    assert positions.get_legend_handles_labels()[1] == ["one text", "other text"]
    row = f"| piqa | acc | {100 * acc.value:.2f}% | {100 * acc.error:.2f} | 9 | document | "
    assert row + "61.9%, 63.7% |" in text
    assert "| piqa | acc | one | " not in text and "| task | metric | one | other |" in text
    told = json.loads((tmp_path / "evaluation.json").read_text())
    assert told["one"][0]["metrics"]["acc"] == acc.json()
    assert told["one"][0]["prompt_version"] == 1.0 and told["one"][0]["weights"] == "a"
    # Tokens of two tokenizers are not compared, words and bytes are.
    metric_names = lambda told: [line["metric"] for line in told["one - other"][3:]]
    assert "token_perplexity" in metric_names(told)
    foreign = evaluate(subject(even, tmp_path / "b", tokenizer="other"), SOURCES)
    write_report({"one": one, "other": foreign}, open_folder(tmp_path))
    told = json.loads((tmp_path / "evaluation.json").read_text())
    assert metric_names(told) == ["word_perplexity", "byte_perplexity", "bits_per_byte"]


def test_different_windows_of_a_single_text_are_not_paired(tmp_path):
    """One model reads three windows of 8 tokens, or two of 16; another has its own tokens."""
    text = [Source("text", "text", [whole_text("some words of text")], "text")]
    log = lambda targets: np.where(targets >= 0, np.float32(-targets), 0).astype(np.float32)
    scores = lambda tokens, targets: TokenScores(log(targets), targets > 99)
    result = lambda name, length, **identity: evaluate(
        subject(Scorer(scores, length), tmp_path / name, max_length=length, **identity), text
    )
    short = result("short", 8)
    row = lambda others: comparison("a", short, "b", others).split("\n")[3]
    number = r"-?[\d.]+"
    unpaired = rf"\| text \| byte_perplexity \| .* \| [+-][\d.]+ \|  \| {number} \|  \|  \|"
    assert re.fullmatch(unpaired, row(result("long", 16)))
    assert re.fullmatch(unpaired, row(result("foreign", 8, tokenizer="other")))
    paired = unpaired.replace(r"\|  \| ", rf"\| {number} \| ", 1)
    assert re.match(paired.removesuffix(r"\|  \|  \|"), row(result("same", 8, weights="b")))


def test_nats_by_position_are_those_of_windows(scorer, tmp_path):
    (result,) = evaluate(subject(scorer, tmp_path), SOURCES[1:], stride=8)
    nats, tokens = result.by_position
    assert tokens.sum() == result.tokens == 55 + 8
    assert nats.sum() == pytest.approx(result.metrics[0].total.sum(), rel=1e-6)
    assert tokens[0] == 0 and tokens[1] == 2 and tokens[25:33].tolist() == [3, *7 * [4]]
    places, means = by_position(result.by_position)
    assert places[0] == 1 and means[0] == pytest.approx(nats[1] / 2)
