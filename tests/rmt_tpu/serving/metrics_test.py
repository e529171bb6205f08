"""Figures of a server: what they count, and that nothing but them needs their package."""

import asyncio
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rmt_tpu.data import ByteTokenizer
from rmt_tpu.generation import Completion, Engine
from rmt_tpu.serving import metrics
from rmt_tpu.serving.app import Front
from rmt_tpu.serving.fields import Refusal
from rmt_tpu.serving.metrics import Metrics, Stopwatch
from rmt_tpu.serving.protocol import ServedModel
from rmt_tpu.serving.worker import Piece, Worker

SERVED = ServedModel("tiny", ByteTokenizer(), max_length=64, max_tokens=60, max_texts=5)


def worker(numbers: list[int | None]) -> Worker:
    engine = object.__new__(Engine)
    engine.slots, engine.numbers = len(numbers), numbers
    return Worker(engine, ByteTokenizer())


def figures(page: bytes) -> dict[str, float]:
    """By name, with the labels behind it."""
    families = text_string_to_metric_families(page.decode())
    samples = [sample for family in families for sample in family.samples]
    return {"".join([s.name, *(f",{v}" for v in s.labels.values())]): s.value for s in samples}


@pytest.fixture
def clock(monkeypatch):
    """A time that the test sets."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now.seconds)
    return now


def piece(index: int, tokens: int, finish: str | None = None) -> Piece:
    return Piece(index, Completion(0, tokens=[5] * tokens, finish=finish), None)


def test_slots_and_the_queue():
    state = SimpleNamespace(texts=5)
    numbers = [3, None, 4]
    counted = Metrics(worker(numbers), lambda: state.texts)
    found = figures(counted.page()[0])
    assert (found["rmt_slots"], found["rmt_slots_used"], found["rmt_queued_texts"]) == (3, 2, 3)
    numbers[:] = [None] * 3
    state.texts = 0
    found = figures(counted.page()[0])
    assert (found["rmt_slots_used"], found["rmt_queued_texts"]) == (0, 0)


def test_tokens_and_their_times(clock):
    """Of two texts: one ends, and the client of the other goes."""
    counted = Metrics(worker([None]), lambda: 0)
    watch = Stopwatch(counted, 2, 7)
    clock.seconds += 0.3
    watch.add(piece(0, 1))
    clock.seconds += 0.2
    watch.add(piece(0, 4))  # 0.05 s each
    watch.add(piece(1, 1))
    clock.seconds += 0.6
    watch.add(piece(0, 2, "stop"))  # 0.3 s each
    watch.add(piece(1, 0))
    watch.close()
    watch.close()
    watch.add(piece(1, 3, "length"))  # nobody waits for it any more
    found = figures(counted.page()[0])
    assert found["rmt_first_token_seconds_count"] == 2
    assert found["rmt_first_token_seconds_sum"] == pytest.approx(0.3 + 0.5)
    assert found["rmt_first_token_seconds_bucket,0.25"] == 0
    assert found["rmt_first_token_seconds_bucket,0.5"] == 2
    assert found["rmt_token_seconds_count"] == 6
    assert found["rmt_token_seconds_sum"] == pytest.approx(0.2 + 0.6)
    assert found["rmt_token_seconds_bucket,0.1"] == 4
    assert (found["rmt_prompt_tokens_total"], found["rmt_new_tokens_total"]) == (7, 8)
    assert (found["rmt_texts_total,stop"], found["rmt_texts_total,none"]) == (1, 1)


def test_tokens_per_second_are_those_of_the_last_seconds(clock):
    counted = Metrics(worker([None]), lambda: 0)
    speed = lambda: figures(counted.page()[0])["rmt_tokens_per_second"]
    assert speed() == 0
    counted.tokens(30)
    clock.seconds += 6
    counted.tokens(20)
    assert speed() == 5
    clock.seconds += 5
    assert speed() == 2
    clock.seconds += 6
    assert speed() == 0


def endpoint(front: Front, path: str):
    (found,) = [route for route in front.app.routes if route.path == path]
    return asyncio.run(found.endpoint(None))


def test_without_the_extra_the_line_names_it(monkeypatch):
    monkeypatch.setattr(Metrics, "installed", staticmethod(lambda: False))
    front = Front(worker([None]), SERVED, max_body=100)
    assert front.metrics is None
    line = r"^metrics need prometheus_client on the server: pip install 'rmt_tpu\[metrics\]'$"
    with pytest.raises(Refusal, match=line) as refused:
        endpoint(front, "/metrics")
    assert refused.value.status == 501
    front.metrics = Metrics(worker([None]), lambda: 0)
    response = endpoint(front, "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert "rmt_slots" in response.body.decode()
