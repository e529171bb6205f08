"""What a report of reading says of a store that is fast, and of one that is not."""

import json

import pytest

from rmt_tpu.analysis import reading
from rmt_tpu.data.prepare import prepare


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    texts = [f"{number} " + "word " * (number * 7 % 40) for number in range(80)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare(str(folder / "a.jsonl"), "byte", folder / "store", workers=1)
    return str(folder / "store")


class Clock:
    """In place of `time`: it goes on where it is told to."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def report(store: str, monkeypatch, read_seconds: float, step_tokens_per_second: float):
    """Of a store whose batches of 64 tokens take so long, one after the other."""
    clock = Clock()

    class Ahead:
        def __init__(self, read, start, advance, *, depth):
            self.read, self.at, self.advance, self.ready = read, start, advance, clock.now

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def next(self):
            self.ready = max(self.ready, clock.now - read_seconds) + read_seconds
            wait = max(0.0, self.ready - clock.now)
            clock.now += wait
            self.at += self.advance
            return self.read(self.at), wait

    monkeypatch.setattr(reading, "time", clock)
    monkeypatch.setattr(reading, "Prefetcher", Ahead)
    return reading.reading_report(
        store, batch_size=4, seq_len=16, seconds=1.0, step_tokens_per_second=step_tokens_per_second
    )


def test_a_fast_store_is_not_waited_for(store, monkeypatch):
    found = report(store, monkeypatch, read_seconds=1 / 64, step_tokens_per_second=64 * 16)
    assert found == (64 * 64, 64 * 16, 0.0, 16, 1.0)


def test_a_slow_store_is_waited_for(store, monkeypatch):
    found = report(store, monkeypatch, read_seconds=1 / 16, step_tokens_per_second=64 * 64)
    assert found.tokens_per_second == found.step_tokens_per_second == 64 * 16
    assert found.waited == 0.75 and found.batches == 16
