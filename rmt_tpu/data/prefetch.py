"""A prefetcher that reads the next batches in the background while training steps run."""

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")

# Maximum seconds that `close` waits for reads in progress.
CLOSE_SECONDS = 5.0


class Prefetcher(Generic[T]):
    """A reader that calls `read(start)`, `read(start + advance)`, ... ahead of time in threads.

    The results are returned in order.

        with Prefetcher(read, start=windows_read, advance=batch_size) as ahead:
            batch, wait_seconds = ahead.next()

    Batches that were read but not used have no effect: a resumed run creates a new prefetcher that
    starts after the last used batch.
    """

    def __init__(
        self,
        read: Callable[[int], T],
        start: int,
        advance: int,
        *,
        depth: int = 3,
        threads: int = 2,
    ):
        """Start reading the first batches in the background.

        Args:
          read: a function that returns the batch at a position; several threads call it
            concurrently.
          start: the first position.
          advance: the difference between consecutive positions.
          depth: maximum number of batches that are waiting or being read; at least 1.
          threads: number of threads that read; at least 1.
        """
        if depth < 1 or threads < 1:
            raise ValueError(f"depth={depth} and threads={threads} must be 1 or more")
        self._positions = itertools.count(start, advance)
        self._wanted: queue.SimpleQueue[tuple[int, Future] | None] = queue.SimpleQueue()
        self._ahead: deque[Future] = deque()
        # Use daemon threads, so that a read that hangs does not keep the process from exiting.
        self._threads = [
            threading.Thread(target=_work, args=(read, self._wanted), daemon=True)
            for _ in range(min(threads, depth))
        ]
        for _ in range(depth):
            self._ask()
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> "Prefetcher[T]":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def next(self) -> tuple[T, float]:
        """Return the next batch, and the number of seconds that this call waited for it.

        Raises:
          RunError, UsageError: `read` raised this error for the batch. Every later call raises it
            again.
        """
        first, wait_seconds = self._ahead[0], 0.0
        if not first.done():
            started = time.monotonic()
            first.exception()
            wait_seconds = time.monotonic() - started
        batch = first.result()
        self._ahead.popleft()
        self._ask()
        return batch, wait_seconds

    def close(self) -> None:
        """Discard unused batches and wait for reads in progress; may be called more than once."""
        for future in self._ahead:
            future.cancel()
        for _ in self._threads:
            self._wanted.put(None)
        until = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _ask(self) -> None:
        future: Future = Future()
        self._ahead.append(future)
        self._wanted.put((next(self._positions), future))


def _work(read: Callable[[int], T], wanted: queue.SimpleQueue) -> None:
    while (item := wanted.get()) is not None:
        position, future = item
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(read(position))
        except BaseException as error:  # Prefetcher.next raises the error.
            future.set_exception(error)
