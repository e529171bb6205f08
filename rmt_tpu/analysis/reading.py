"""A measurement of how fast a token store is read, and how long train steps wait for it."""

import time
from typing import NamedTuple

from rmt_tpu.data import Prefetcher, Windows, open_store
from rmt_tpu.storage import Folder


class ReadingReport(NamedTuple):
    """How fast random windows of tokens are read, and how long a consumer waits for them.

    Attributes:
      tokens_per_second: the speed of two threads that read as fast as they can.
      step_tokens_per_second: the speed of the consumer, including the time that it waits.
      waited: the fraction of the time that the consumer spent waiting for batches.
      batches: the number of batches that were consumed.
      seconds: the duration of the measurement with a consumer, in seconds.
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
    """Measure how fast random windows of tokens are read.

    The windows are read as in a training run. They are first read as fast as possible, and then by
    a consumer that simulates train steps.

    Args:
      source: the location of the token store.
      batch_size, seq_len: the number of windows per batch, and the number of tokens per window.
      step_tokens_per_second: the number of tokens per second that the consumer takes. It sleeps
        instead of computing.
      seconds: the duration of each of the two measurements, in seconds.
      depth: the number of batches to read ahead.

    Raises:
      UsageError, RunError: the store cannot be read, or is shorter than one window.
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
        # The first batch is not measured, because a run reads it while it compiles.
        ahead.next()
        started = time.monotonic()
        while (elapsed := time.monotonic() - started) < seconds:
            time.sleep(step)
            waited += ahead.next()[1]
            batches += 1
    return ReadingReport(flat_out, tokens * batches / elapsed, waited / elapsed, batches, elapsed)
