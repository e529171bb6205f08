"""Batches read ahead: in order, bounded, exact on resume, and errors where they belong."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from rmt_tpu.data import Windows
from rmt_tpu.data.prefetch import Prefetcher
from rmt_tpu.errors import RunError


def take(prefetcher: Prefetcher, count: int) -> list:
    return [prefetcher.next()[0] for _ in range(count)]


def until(condition) -> None:
    """Waits for what another thread does."""
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize(("depth", "threads"), [(1, 1), (2, 1), (4, 2), (3, 8)])
def test_batches_come_in_order_however_long_each_takes(depth, threads):
    delays = np.random.default_rng(0).uniform(0, 0.005, 60)

    def read(position: int) -> int:
        time.sleep(delays[(position - 7) // 5])
        return position

    with Prefetcher(read, 7, 5, depth=depth, threads=threads) as ahead:
        assert take(ahead, 40) == list(range(7, 7 + 40 * 5, 5))


def test_no_more_than_depth_is_read_ahead():
    begun = []

    def read(position: int) -> int:
        begun.append(position)
        return position

    with Prefetcher(read, 0, 1, depth=3, threads=2) as ahead:
        until(lambda: len(begun) == 3)
        time.sleep(0.05)
        assert sorted(begun) == [0, 1, 2]
        take(ahead, 2)
        until(lambda: len(begun) == 5)
        time.sleep(0.05)
        assert sorted(begun) == [0, 1, 2, 3, 4]


def test_resuming_from_what_was_taken_repeats_and_skips_nothing():
    """Batch sizes change at each resume, and each time some batches were read and not taken."""
    stream = np.arange(401, dtype=np.int32)
    windows = lambda batch_size: Windows(
        stream, seq_len=4, batch_size=batch_size, bos=0, seed=3, shuffle=True
    )
    position, seen = 0, []
    for batch_size, batches in (4, 5), (10, 3), (1, 7), (3, 11), (5, 2):
        with Prefetcher(windows(batch_size).batch_at, position, batch_size, depth=4) as ahead:
            for batch in take(ahead, batches):
                seen += batch.inputs[:, 0].tolist()
        position += batch_size * batches
    assert position == windows(1).num_windows == 100
    assert sorted(seen) == list(range(0, 400, 4))


def test_waiting_is_measured_and_is_none_when_the_batch_is_there(monkeypatch):
    waits, now = threading.Event(), 10.0

    def monotonic() -> float:
        waits.set()
        return now

    def read(position: int) -> int:
        nonlocal now
        waits.wait()
        now += 0.25 * (position == 0)
        return position

    monkeypatch.setattr("rmt_tpu.data.prefetch.time", SimpleNamespace(monotonic=monotonic))
    with Prefetcher(read, 0, 1, depth=2, threads=1) as ahead:
        assert ahead.next() == (0, 0.25)
        until(lambda: all(future.done() for future in ahead._ahead))
        assert ahead.next() == (1, 0.0)


def test_an_error_is_raised_in_its_place_and_stays():
    def read(position: int) -> int:
        if position == 2:
            raise RunError("a chunk is damaged")
        return position

    with Prefetcher(read, 0, 1, depth=4, threads=1) as ahead:
        assert take(ahead, 2) == [0, 1]
        for _ in range(2):
            with pytest.raises(RunError, match="a chunk is damaged"):
                ahead.next()


def test_closing_ends_the_threads_with_nothing_more_read(monkeypatch):
    monkeypatch.setattr("rmt_tpu.data.prefetch.CLOSE_SECONDS", 600)
    begun, opened = [], []

    def read(position: int) -> int:
        begun.append(position)
        until(lambda: opened and opened[0]._ahead[-1].cancelled())  # it is being closed
        return position

    before = threading.active_count()
    with Prefetcher(read, 0, 1, depth=4, threads=1) as ahead:
        opened.append(ahead)
        until(lambda: begun)
    assert threading.active_count() == before
    assert begun == [0]
    ahead.close()


def test_a_read_that_hangs_does_not_keep_a_run_from_ending(monkeypatch):
    monkeypatch.setattr("rmt_tpu.data.prefetch.CLOSE_SECONDS", 0.1)
    hang, ended = threading.Event(), []
    with Prefetcher(lambda position: ended.append(hang.wait(600)), 0, 1):
        pass
    assert not ended
    hang.set()


@pytest.mark.parametrize("options", [{"depth": 0}, {"threads": 0}])
def test_sizes_below_one_are_refused(options):
    with pytest.raises(ValueError, match="must be 1 or more"):
        Prefetcher(lambda position: position, 0, 1, **options)
