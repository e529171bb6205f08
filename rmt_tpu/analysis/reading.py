"""How fast a token store is read, and whether a step would wait for it."""

import time
from typing import NamedTuple

from rmt_tpu.data import Prefetcher, Windows, open_store
from rmt_tpu.storage import Folder


class ReadingReport(NamedTuple):
    """How fast random windows come, and whether a step would wait for them.

    Attributes:
      tokens_per_second: as fast as they can be read, by two threads.
      step_tokens_per_second: at which they were then consumed.
      waited: share of the time in which the consumer waited.
      batches: consumed.
      seconds: that this took.
    """

    tokens_per_second: float
    step_tokens_per_second: float
    waited: float
    batches: int
    seconds: float


def reading_report(
    source: str | Folder,
    *,
    batch_size: int = 256,
    seq_len: int = 1024,
    step_tokens_per_second: int | float = 1e6,
    seconds: int | float = 10.0,
    depth: int = 3,
) -> ReadingReport:
    """Reads random windows as a run does: flat out, then with a consumer that computes in between.

    Args:
      source: of a store.
      batch_size, seq_len: of the batches.
      step_tokens_per_second: tokens that the consumer takes in a second; its steps are sleeps.
      seconds: for each of the two.
      depth: batches read ahead.

    Raises:
      UsageError, RunError: the store cannot be read, or has less than a window.
    """
    store = open_store(source)
    windows = Windows(
        store.train,
        seq_len=seq_len,
        batch_size=batch_size,
        bos=store.tokenizer.bos,
        seed=0,
        shuffle=True,
    )
    position, started, tokens = 0, time.monotonic(), batch_size * seq_len
    with Prefetcher(windows.batch_at, 0, batch_size, depth=depth) as ahead:
        while (elapsed := time.monotonic() - started) < seconds:
            ahead.next()
            position += batch_size
    flat_out = position * seq_len / elapsed
    waited, batches, step = 0.0, 0, tokens / step_tokens_per_second
    with Prefetcher(windows.batch_at, position, batch_size, depth=depth) as ahead:
        ahead.next()  # the first is read while a run compiles
        started = time.monotonic()
        while (elapsed := time.monotonic() - started) < seconds:
            time.sleep(step)
            waited += ahead.next()[1]
            batches += 1
    return ReadingReport(flat_out, tokens * batches / elapsed, waited / elapsed, batches, elapsed)
