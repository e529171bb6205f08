"""A pool that writes the parts of a token store, in this process or in several."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from rmt_tpu.data.part_writer import Done, Job, Work, Worker
from rmt_tpu.errors import RunError

_POLL_SECONDS = 0.2


def run(work: Work, jobs: list[Job], workers: int, progress: Callable[[int], None]) -> list[Done]:
    """Do the jobs; when this returns or raises, no process is left.

    Args:
      work: the options of all parts.
      jobs: the jobs in order.
      workers: number of processes; 1 is this one.
      progress: called now and then with the number of input bytes that are done.

    Raises:
      UsageError, RunError: see `prepare`.
    """
    workers = min(workers, len(jobs))
    if workers <= 1:
        finished = 0

        def tick(count: int) -> None:
            nonlocal finished
            finished += count
            progress(finished)

        worker = Worker(work, tick)
        return [worker.do(job) for job in jobs]
    spawn = multiprocessing.get_context("spawn")  # threads of tensorstore do not survive a fork
    finished, stop = spawn.Value("Q"), spawn.Event()
    pool = ProcessPoolExecutor(workers, spawn, _start_worker, (work, finished, stop))
    try:
        with _interrupts_later():
            futures = [pool.submit(_do_in_worker, job) for job in jobs]
        waiting = set(futures)
        while waiting:
            over, waiting = wait(waiting, _POLL_SECONDS)
            for future in over:
                future.result()
            progress(finished.value)
        return [future.result() for future in futures]
    except BrokenProcessPool:
        raise RunError(
            "a process that tokenises was killed, most likely for want of memory; run the same "
            "command again, with fewer --workers"
        ) from None
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _interrupts_later() -> Iterator[None]:
    """Keep Ctrl-C from processes started in the body; this process tells them to stop."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(work: Work, finished: Any, stop: Any) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each CPU
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def tick(count: int) -> None:
        if stop.is_set():
            raise RunError("stopped")
        with finished.get_lock():
            finished.value += count

    _worker = Worker(work, tick)


_worker: "Worker | None" = None


def _do_in_worker(job: Job) -> Done:
    assert _worker is not None
    return _worker.do(job)


def _end_with_parent() -> None:
    """End this worker when its parent is killed, or it would wait forever for the next job."""
    multiprocessing.parent_process().join()
    os._exit(1)
