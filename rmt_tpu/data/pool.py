"""A pool of workers that write the parts of a token store, in this process or in several."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from rmt_tpu.data.part_writer import PartJob, PartWriter, StoreOptions, WrittenPart
from rmt_tpu.errors import RunError

_POLL_SECONDS = 0.2


def run(
    options: StoreOptions, jobs: list[PartJob], workers: int, progress: Callable[[int], None]
) -> list[WrittenPart]:
    """Run the jobs, and stop all started processes before returning or raising an error.

    Args:
      options: the options of all parts.
      jobs: the jobs; each job writes one part.
      workers: number of processes; 1 runs the jobs in this process.
      progress: a function that is called from time to time with the number of input bytes processed
        so far.

    Returns:
      The written parts, in the order of the jobs.

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

        worker = PartWriter(options, tick)
        return [worker.write_part(job) for job in jobs]
    # Do not fork, because a forked process would lack the threads that tensorstore needs.
    spawn = multiprocessing.get_context("spawn")
    finished, stop = spawn.Value("Q"), spawn.Event()
    pool = ProcessPoolExecutor(workers, spawn, _start_worker, (options, finished, stop))
    try:
        with _interrupts_blocked():
            futures = [pool.submit(_write_in_worker, job) for job in jobs]
        waiting = set(futures)
        while waiting:
            finished_jobs, waiting = wait(waiting, _POLL_SECONDS)
            for future in finished_jobs:
                future.result()
            progress(finished.value)
        return [future.result() for future in futures]
    except BrokenProcessPool:
        raise RunError(
            "a tokenising process was killed, probably because memory ran out; repeat the command "
            "with fewer --workers"
        ) from None
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block SIGINT in processes that the `with` body starts, which this process stops itself."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(options: StoreOptions, finished: Any, stop: Any) -> None:
    global _worker
    # Use one thread per process, because there is already one process per CPU.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def tick(count: int) -> None:
        if stop.is_set():
            raise RunError("the tokenising process was stopped")
        with finished.get_lock():
            finished.value += count

    _worker = PartWriter(options, tick)


_worker: PartWriter | None = None


def _write_in_worker(job: PartJob) -> WrittenPart:
    assert _worker is not None
    return _worker.write_part(job)


def _end_with_parent() -> None:
    """Exit when the parent process is killed; otherwise this worker would wait forever for jobs."""
    multiprocessing.parent_process().join()
    os._exit(1)
