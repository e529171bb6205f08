"""The speed of reading a token store, and whether a step would wait for it."""

import time
from typing import NamedTuple

from rmt_tpu.data import Prefetcher, Windows, open_store
from rmt_tpu.storage import Folder


class ReadingReport(NamedTuple):
    """The speed of reading random windows, and the time that a step waits for them.

    Attributes:
      tokens_per_second: the tokens per second of two threads that read as fast as they can.
      step_tokens_per_second: the tokens per second of the consumer.
      waited: the share of time in which the consumer waited.
      batches: how many batches were consumed.
      seconds: how long this took.
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
    """Read random windows as a run does: at full speed, then with a consumer that computes.

    Args:
      source: the location of the store.
      batch_size, seq_len: the sizes of the batches.
      step_tokens_per_second: tokens that the consumer takes in a second; its steps are sleeps.
      seconds: how long each of the two lasts.
      depth: how many batches are read ahead.

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
        ahead.next()  # a run reads the first batch while it compiles
        started = time.monotonic()
        while (elapsed := time.monotonic() - started) < seconds:
            time.sleep(step)
            waited += ahead.next()[1]
            batches += 1
    return ReadingReport(flat_out, tokens * batches / elapsed, waited / elapsed, batches, elapsed)
