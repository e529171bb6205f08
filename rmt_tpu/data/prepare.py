"""Text to a token store: in parts, by several processes, and from where it was after a kill."""

import contextlib
import itertools
import math
import multiprocessing
import os
import signal
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

from rmt_tpu.data.corpus import Span, files, problems, spans, whole
from rmt_tpu.data.part_writer import Cut, Done, Job, Work, Worker
from rmt_tpu.data.token_store import (
    MANIFEST,
    PLAN,
    Part,
    SplitPart,
    TokenizerOfStore,
    read_sealed,
    seal,
)
from rmt_tpu.data.tokenizer_files import load_tokenizer
from rmt_tpu.errors import RunError, UsageError, of_flag
from rmt_tpu.storage import Folder, Location, open_folder

# Parts are small enough to be done again and to be shared out, and not so small or so many that
# their files are in the way.
_LEAST_PART, _USUAL_PART, _MOST_PARTS = 2**20, 64 * 2**20, 4096

_HEAD = 2**16  # bytes of an input by which another one of the same size is noticed
_POLL_SECONDS = 0.2

Progress = Callable[[int, int], None]  # bytes of the input that are done, and all


class Totals(NamedTuple):
    """What is in a store.

    Attributes:
      parts: how many.
      kept: of these, how many were there before.
      train, held_out: documents, tokens, and 0 in place of a checksum.
    """

    parts: int
    kept: int
    train: SplitPart
    held_out: SplitPart


def prepare(
    source: str,
    tokenizer_spec: str,
    output: Location,
    *,
    eval_fraction: int | float = 0.02,
    seed: int = 0,
    workers: int | None = None,
    part_bytes: int | None = None,
    progress: Progress = lambda done, total: None,
) -> Totals:
    """Tokenises text into a token store, or goes on where the same call was interrupted.

    A document is held out if a hash of its text and the seed is below `eval_fraction`; so equal
    documents stay together. Where that holds out none (there are few), the tail of one is held
    out, of about that share of all the text.

    Args:
      source: see `documents`.
      tokenizer_spec: see `load_tokenizer`.
      output: folder of the store.
      eval_fraction: share of the documents to hold out, above 0, at most 0.5.
      seed: another seed holds out other documents.
      workers: processes; None is one for each CPU. 1 is this process.
      part_bytes: of the input for each part; None is what suits the input.
      progress: told now and then how far it is.

    Returns:
      What is in the store.

    Raises:
      UsageError: the input cannot be read or has too little text, or the output cannot be written
        or holds something else.
      RunError: the output cannot be written any more, or a process is lost.
    """
    if not 0 < eval_fraction <= 0.5:
        raise UsageError(f"--eval_fraction={eval_fraction} is out of range; legal: above 0, to 0.5")
    if workers is not None and workers < 1:
        raise UsageError(f"--workers={workers} is out of range; legal: 1 or more")
    tokenizer = load_tokenizer(tokenizer_spec)
    with problems("input", source):
        paths = files(source)
        sizes = [whole(path).stop for path in paths]
        part_bytes = part_bytes or _part_bytes(sum(sizes))
        parts = list(_parts(paths, part_bytes))
        plan = {
            "tokenizer": TokenizerOfStore.of(tokenizer)._asdict(),
            "eval_fraction": eval_fraction,
            "seed": seed,
            "part_bytes": part_bytes,
            "num_parts": len(parts),
            "sources": [_source(path) for path in paths],
        }
    with of_flag("output"):
        folder = open_folder(output)
        folder.check(write=True)
    if (complete := read_sealed(folder, MANIFEST)) is not None:
        _check_same(folder, complete.get("plan"), plan)
        done = [Part.from_json(value) for value in complete.get("parts", ())]
        return _totals(done, kept=len(done))
    if not folder.create(PLAN, seal(plan)):
        _check_same(folder, read_sealed(folder, PLAN), plan)
    tokenizer.save(folder)
    work = Work(source, folder.url, seed, eval_fraction, _plan_id(plan))
    jobs = [Job(number, of_part, None) for number, of_part in enumerate(parts)]
    workers = workers or os.cpu_count() or 1
    done = _run(work, jobs, workers, progress)
    if not any(d.below for d in done):
        done = _cut_a_tail(work, jobs, done, workers, progress)
    totals = _totals([d.part for d in done], kept=sum(d.kept for d in done))
    _check_totals(source, eval_fraction, seed, totals)
    content = {"plan": plan, "parts": [d.part.json() for d in done]}
    if not folder.create(MANIFEST, seal(content)):
        _check_same(folder, (read_sealed(folder, MANIFEST) or {}).get("plan"), plan)
    return totals


# The plan ------------------------------------------------------------------------------------


def _part_bytes(total: int) -> int:
    return max(min(max(total // 64, _LEAST_PART), _USUAL_PART), math.ceil(total / _MOST_PARTS))


def _parts(paths: list[str], part_bytes: int) -> Iterator[tuple[Span, ...]]:
    """Spans of one file or of several small ones."""
    part, size = [], 0
    for span in itertools.chain.from_iterable(spans(path, part_bytes) for path in paths):
        part.append(span)
        size += span.stop - span.start
        if size >= part_bytes:
            yield tuple(part)
            part, size = [], 0
    if part:
        yield tuple(part)


def _source(path: str) -> list[Any]:
    """Name, size, and by what else the file is known; not where it lies, which is nobody's."""
    with open(path, "rb") as file:
        head = file.read(_HEAD)
        return [os.path.basename(path), os.fstat(file.fileno()).st_size, zlib.crc32(head)]


def _plan_id(plan: dict[str, Any]) -> int:
    return zlib.crc32(seal(plan))


def _check_same(folder: Folder, old: Any, new: dict[str, Any]) -> None:
    if old == new:
        return
    old = old if isinstance(old, dict) else {}
    different = [
        f"{name} {old.get(name)} is now {new[name]}"
        for name in ("eval_fraction", "seed", "part_bytes")
        if old.get(name) != new[name]
    ]
    if (tokenizer := old.get("tokenizer")) != new["tokenizer"]:
        tokenizer = tokenizer.get("name") if isinstance(tokenizer, dict) else None
        again = " of other files" if tokenizer == new["tokenizer"]["name"] else ""
        different.append(f"tokenizer {tokenizer} is now {new['tokenizer']['name']}{again}")
    if (sources := old.get("sources")) != new["sources"]:
        different.append(_different_input(sources, new["sources"]))
    raise UsageError(
        f"--output={folder.url} is of another command: {'; '.join(different) or 'another plan'}. "
        "Give the same input and flags to go on, or another --output"
    )


def _different_input(old: Any, new: list[list[Any]]) -> str:
    if not isinstance(old, list) or len(old) != len(new):
        count = len(old) if isinstance(old, list) else 0
        return f"the input of {count} files is now of {len(new)}"
    was, now = next((was, now) for was, now in zip(old, new, strict=True) if was != now)
    if was[:2] == now[:2]:
        return f"the content of {now[0]!r} has changed"
    return f"the input {was[0]!r} of {was[1]} bytes is now {now[0]!r} of {now[1]}"


def _totals(parts: list[Part], kept: int) -> Totals:
    add = lambda splits: SplitPart(
        sum(s.documents for s in splits), sum(s.tokens for s in splits), 0
    )
    return Totals(len(parts), kept, add([p.train for p in parts]), add([p.eval for p in parts]))


def _check_totals(source: str, eval_fraction: float, seed: int, totals: Totals) -> None:
    if not totals.train.documents + totals.held_out.documents:
        raise UsageError(
            f"--input={source!r} has no text: legal is at least one non-empty document"
        )
    if not totals.held_out.documents:
        raise UsageError(
            f"nothing of --input={source!r} can be held out: no document has two characters; "
            "legal: more text, in another --output"
        )
    if not totals.train.documents:
        raise UsageError(
            f"all {totals.held_out.documents} documents of --input={source!r} are held out at "
            f"--eval_fraction={eval_fraction} --seed={seed}; legal: more documents, or less to "
            "hold out, in another --output"
        )


# The parts -----------------------------------------------------------------------------------


def _cut_a_tail(
    work: Work, jobs: list[Job], done: list[Done], workers: int, progress: Progress
) -> list[Done]:
    """Does those parts again whose document is to lose its tail to the held-out split."""
    lowest = min((d.lowest for d in done if d.lowest), default="")
    if not lowest:
        return done
    characters = sum(d.lowest_characters for d in done if d.lowest == lowest)
    share = work.eval_fraction * sum(d.characters for d in done) / characters
    of_cut = Cut(lowest, min(share, 0.5))
    again = [job._replace(cut=of_cut) for job in jobs if done[job.number].lowest == lowest]
    before = sum(job.num_bytes for job in jobs)
    more = lambda finished, total: progress(before + finished, before + total)
    for job, result in zip(again, _run(work, again, workers, more), strict=True):
        done[job.number] = result
    return done


def _run(work: Work, jobs: list[Job], workers: int, progress: Progress) -> list[Done]:
    """Does the jobs; when it returns or raises, no process is left."""
    total = sum(job.num_bytes for job in jobs)
    workers = min(workers, len(jobs))
    if workers <= 1:
        finished = 0

        def tick(count: int) -> None:
            nonlocal finished
            finished += count
            progress(finished, total)

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
            progress(finished.value, total)
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
    """Processes that are started in here never get a Ctrl-C, which this one tells them of."""
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
    """A worker would wait for ever for the next job of a process that was killed."""
    multiprocessing.parent_process().join()
    os._exit(1)
