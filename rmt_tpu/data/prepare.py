"""Preparation of a token store from text.

The work is divided into parts, can be distributed over processes and hosts, and can be resumed
after an interruption.
"""

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol, runtime_checkable

from rmt_tpu.data import plan as plans
from rmt_tpu.data.batches import any_loss
from rmt_tpu.data.inputs import Span, files, usage_errors
from rmt_tpu.data.marked import ANSWERS, USUAL_FIELD, Reading, find_template
from rmt_tpu.data.part_writer import (
    DocumentCut,
    PartJob,
    StoreOptions,
    WrittenPart,
    check_inputs,
    read_part_manifest,
)
from rmt_tpu.data.pool import run
from rmt_tpu.data.token_store import MANIFEST, PLAN, Part, SplitPart, TokenStore, read_sealed, seal
from rmt_tpu.data.tokenizer import digest
from rmt_tpu.data.tokenizer_files import load_tokenizer
from rmt_tpu.errors import RunError, UsageError, flag_errors
from rmt_tpu.storage import Folder, Location, open_folder

TOKENISING = "tokenising"
HOLDING_OUT = "holding out the tail of a document"
COMPARING = "comparing the input"

# Number of part manifests to read concurrently.
_READERS = 16
# Maximum seconds until a network file system shows a new file to all hosts.
SHARED_SECONDS = 10.0

# A function that displays progress, given the number of input bytes processed, the total number,
# and the current activity, which is TOKENISING, HOLDING_OUT or COMPARING.
Progress = Callable[[int, int, str], None]


class Totals(NamedTuple):
    """A summary of the content of a store.

    Attributes:
      parts: number of parts.
      kept: number of parts that already existed.
      train, held_out: total numbers of documents and tokens in each split. Their checksums are not
        computed, and are 0.
    """

    parts: int
    kept: int
    train: SplitPart
    held_out: SplitPart


@runtime_checkable
class ProcessGroup(Protocol):
    """The interface of a group of processes, such as one per host, that make a store together.

    Attributes:
      number: number of this process, from 0.
      count: total number of processes.
    """

    number: int
    count: int

    def gather(self, value: str, what: str) -> list[str]:
        """Return the values of all processes, once each has called this with the same `what`."""


class SingleProcess:
    """A process group with a single process, this one."""

    number, count = 0, 1

    def gather(self, value: str, what: str) -> list[str]:
        """Return `[value]`, because there is just one process."""
        return [value]


_SINGLE_PROCESS = SingleProcess()


def prepare(
    source: str,
    tokenizer_spec: str,
    output: Location,
    *,
    eval_fraction: int | float = 0.02,
    seed: int = 0,
    workers: int | None = None,
    part_bytes: int | None = None,
    progress: Progress = lambda done, total, what: None,
    group: ProcessGroup = _SINGLE_PROCESS,
    text_field: str = USUAL_FIELD,
    kind: str = "text",
    chat_template: str = "",
) -> Totals:
    """Tokenise text into a token store, or resume an interrupted call with the same arguments.

    A document is held out if a hash of its text and the seed, as a fraction, is below
    `eval_fraction`. Equal documents therefore go to the same split. If no document is held out,
    because there are few of them, the tail of one document is held out. It has about the requested
    fraction of all text.

    The store always corresponds to the input as it is when this function returns. Existing parts
    are kept only if the bytes from which they were made still have the same digests. During the
    call, a file counts as unedited if its size, mtime and ctime are unchanged. Objects in a bucket
    are read at a fixed generation.

    The store is identical, byte for byte, for any number of processes.

    Args:
      source: the text source, as for `documents`.
      tokenizer_spec: the tokenizer, as for `load_tokenizer`.
      output: folder of the store, which must be the same for all processes of the group.
      eval_fraction: fraction of the documents to hold out, above 0 and at most 0.5.
      seed: seed of the choice of held-out documents.
      workers: number of worker processes that this process starts. None starts one per CPU. With 1,
        this process does all its work itself.
      part_bytes: number of input bytes per part; None chooses a number that depends on the size of
        the input.
      progress: a function that is called from time to time with the progress of this process's
        share.
      group: the processes that call this function with the same arguments.
      text_field: name of the field or column that has the text.
      kind: the kind of the documents; see `marked.Reading`. In documents of kinds other than
        "text", only parts have a loss.
      chat_template: path of a chat template for messages, in place of the tokenizer's.

    Returns:
      A summary of the store's content.

    Raises:
      UsageError: the input cannot be read, has too little text, has no answers to train on, or was
        edited since an earlier call that finished a part; the output cannot be written to or has
        other content; or the processes of the group have different arguments.
      RunError: the output cannot be written to any more, a process was lost, or the input was
        edited during the call.
    """
    _check_numbers(eval_fraction, workers)
    tokenizer, reading = load_tokenizer(tokenizer_spec), Reading(text_field, kind)
    template = find_template(kind, tokenizer, chat_template, "format")
    with usage_errors("input", source):
        found = files(source)
        part_bytes = part_bytes or plans.usual_part_bytes(sum(file.stop for file in found))
        parts = list(plans.parts(found, part_bytes))
    plan = plans.plan_of(
        found, len(parts), part_bytes, tokenizer, eval_fraction, seed, reading, template
    )
    with flag_errors("output"):
        folder = open_folder(output)
    _check_same_plan(group, plan, parts)
    if group.number == 0:
        plans.write(folder, plan, tokenizer, template)
    group.gather("", "writing the plan")
    _check_shared(folder, plan, group)
    options = StoreOptions(source, folder.url, seed, eval_fraction, plans.plan_id(plan), *reading)
    # Several processes keep the plan, because the others may still be working.
    with plans.deleted_unless_begun(folder, plan) if group.count == 1 else nullcontext():
        return _write_store(options, plan, found, parts, workers, progress, group)


def _write_store(
    options: StoreOptions,
    plan: dict[str, Any],
    found: list[Span],
    parts: list[tuple[Span, ...]],
    workers: int | None,
    progress: Progress,
    group: ProcessGroup,
) -> Totals:
    """Write this process's parts and, on process 0, the manifest; or check a complete store.

    Args:
      options: the options of all parts.
      plan: the store's plan, which is in its folder.
      found: the input files.
      parts: the parts of the input.
      workers, progress, group: see `prepare`.
    """
    folder, workers = open_folder(options.url), workers or os.cpu_count() or 1
    own = _share([sum(span.stop - span.start for span in part) for part in parts], group)
    if (complete := read_sealed(folder, MANIFEST)) is not None:
        _compare(options, parts, complete["inputs"], own, workers, progress)
        group.gather("", COMPARING)
        return _totals([Part.from_json(value) for value in complete["parts"]], len(parts))
    jobs = [PartJob(number, parts[number], None) for number in own]
    done = dict(zip(own, _run(options, jobs, workers, progress, TOKENISING), strict=True))
    kept = sum(d.kept for d in done.values())
    if cut := document_to_cut(list(done.values()), options.eval_fraction, group):
        rewrites = [job._replace(cut=cut) for job in jobs if done[job.number].lowest == cut.rank]
        rewritten = _run(options, rewrites, workers, progress, HOLDING_OUT)
        done |= {job.number: result for job, result in zip(rewrites, rewritten, strict=True)}
        kept = sum(d.kept for d in done.values())
    with usage_errors("input", options.source):
        if files(options.source) != found:
            raise RunError(
                f"--input={options.source!r} was edited during the command; restore its content "
                "and repeat the command, or give another --output"
            )
    kept = sum(int(value) for value in group.gather(str(kept), "the parts"))
    own_totals = ""
    if group.number == 0:
        totals = _complete(folder, plan, done, kept, options)
        own_totals = json.dumps(totals)
    parts_, kept, *splits = json.loads(group.gather(own_totals, "the manifest")[0])
    return Totals(parts_, kept, *(SplitPart(*split) for split in splits))


def _check_numbers(eval_fraction: int | float, workers: int | None) -> None:
    """Raise UsageError if a number is out of range."""
    if not 0 < eval_fraction <= 0.5:
        raise UsageError(f"--eval_fraction={eval_fraction} is out of range; legal: 0 < x <= 0.5")
    if workers is not None and workers < 1:
        raise UsageError(f"--workers={workers} is out of range; legal: 1 or more")


# Checking that all processes agree ------------------------------------------------------------


def _check_same_plan(
    group: ProcessGroup, plan: dict[str, Any], parts: list[tuple[Span, ...]]
) -> None:
    """Check that all processes of the group have the same plan.

    Raises:
      UsageError: the plan of another process differs from the plan of this one.
    """
    own = {f"--{name}": digest(plan[name]) for name in ("tokenizer", "eval_fraction", "seed")}
    sizes = [[span[1:3] for span in part] for part in parts]
    own["--text_field"] = digest(plan.get("text_field", USUAL_FIELD))
    own["--format"] = digest(plan.get("format"))
    own["--chat_template"] = digest(plan.get("chat_template"))
    own["--input"] = digest([plan["sources"], plan["part_bytes"], sizes])
    first, *others = map(json.loads, group.gather(json.dumps(own), "comparing the plan"))
    for number, other in enumerate(others, 1):
        for name in own:
            if other[name] != first[name]:
                raise UsageError(
                    f"{name} differs between process {number} and process 0; start all processes "
                    "with the same flags and the same files"
                )


def _check_shared(folder: Folder, plan: dict[str, Any], group: ProcessGroup) -> None:
    """Check that this process sees the plan that process 0 wrote into the folder.

    Raises:
      UsageError: this process does not see the same folder as process 0.
    """
    if group.count == 1:
        return
    until = time.monotonic() + SHARED_SECONDS
    while read_sealed(folder, PLAN) != plan and not read_sealed(folder, MANIFEST):
        if time.monotonic() > until:
            raise UsageError(
                f"--output={folder.url} is not the same folder on process {group.number} "
                "as on process 0; legal: a folder on a file system that all hosts share, or gs://"
            )
        time.sleep(0.1)


def _share(sizes: list[int], group: ProcessGroup) -> list[int]:
    """Return the numbers of the parts that this process writes.

    Parts are assigned in descending order of size, each to the process with the fewest bytes so
    far.
    """
    loads, own = [0] * group.count, []
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        least = loads.index(min(loads))
        loads[least] += sizes[number]
        if least == group.number:
            own.append(number)
    return sorted(own)


def document_to_cut(
    done: list[WrittenPart], eval_fraction: int | float, group: ProcessGroup
) -> DocumentCut | None:
    """Return the document whose tail is held out, or None if whole documents are held out.

    The result is the same on all processes.

    Args:
      done: the parts that this process wrote.
      eval_fraction: fraction of the text to hold out.
      group: all processes.
    """
    lowest = min((d.lowest for d in done if d.lowest), default="")
    own = {
        "below": sum(d.below for d in done),
        "characters": sum(d.characters for d in done),
        "lowest": lowest,
        "lowest_characters": sum(d.lowest_characters for d in done if d.lowest == lowest),
    }
    found = list(map(json.loads, group.gather(json.dumps(own), "tokenising the text")))
    lowest = min((each["lowest"] for each in found if each["lowest"]), default="")
    if not lowest or any(each["below"] for each in found):
        return None
    characters = sum(each["lowest_characters"] for each in found if each["lowest"] == lowest)
    share = eval_fraction * sum(each["characters"] for each in found) / characters
    return DocumentCut(lowest, min(share, 0.5))


def _complete(
    folder: Folder,
    plan: dict[str, Any],
    done: dict[int, WrittenPart],
    kept: int,
    options: StoreOptions,
) -> Totals:
    """Create the manifest of the store from all parts, and return a summary of the store.

    Args:
      folder: folder of the store.
      plan: the store's plan.
      done: maps part numbers to the parts that this process wrote. Parts of other processes are
        read from their manifests.
      kept: number of parts that existed before this call of `prepare`.
      options: the options of all parts.

    Raises:
      UsageError: the text has too few documents, or no token to train on has a loss.
      RunError: a part that another process wrote is missing.
    """

    def wait_for_part(number: int) -> WrittenPart:
        if number in done:
            return done[number]
        until = time.monotonic() + SHARED_SECONDS
        while (found := read_part_manifest(folder, number)) is None:
            if time.monotonic() > until:
                raise RunError(
                    f"{folder.url} does not show part {number}, which another process wrote; "
                    "legal: a folder that all processes share"
                )
            time.sleep(0.1)
        return found

    with ThreadPoolExecutor(_READERS) as pool:
        found = list(pool.map(wait_for_part, range(plan["num_parts"])))
    totals = _totals([d.part for d in found], kept)
    _check_totals(options.source, plan["eval_fraction"], plan["seed"], totals)
    content = {
        "plan": plan,
        "parts": [d.part.json() for d in found],
        "inputs": [d.inputs for d in found],
    }
    if options.kind != "text" and not any_loss(TokenStore(folder, content).train):
        raise UsageError(
            f"--input={options.source!r}: no token to train on has a loss; legal: text with "
            f"{ANSWERS}, in another --output"
        )
    if not folder.create(MANIFEST, seal(content)):
        plans.check_same(folder, (read_sealed(folder, MANIFEST) or {}).get("plan"), plan)
    return totals


# Writing and checking parts -------------------------------------------------------------------


def _run(
    options: StoreOptions, jobs: list[PartJob], workers: int, progress: Progress, what: str
) -> list[WrittenPart]:
    total = sum(job.num_bytes for job in jobs)
    return run(options, jobs, workers, lambda finished: progress(finished, total, what))


def _compare(
    options: StoreOptions,
    parts: list[tuple[Span, ...]],
    digests: list[list[str]],
    own: list[int],
    workers: int,
    progress: Progress,
) -> None:
    """Check that the input of the parts `own` is unchanged since the store was made."""
    total, finished = sum(span.stop - span.start for n in own for span in parts[n]), 0

    def tick(count: int) -> None:
        nonlocal finished
        finished += count  # No lock is needed, because the number is only displayed.
        progress(finished, total, COMPARING)

    pool = ThreadPoolExecutor(workers)
    try:
        with usage_errors("input", options.source):
            check = lambda n: check_inputs(
                options.url, parts[n], digests[n], tick, Reading(options.text_field, options.kind)
            )
            for _ in pool.map(check, own):
                pass
    finally:
        pool.shutdown(cancel_futures=True)


def _totals(parts: list[Part], kept: int) -> Totals:
    add = lambda splits: SplitPart(
        sum(s.documents for s in splits), sum(s.tokens for s in splits), 0
    )
    return Totals(len(parts), kept, add([p.train for p in parts]), add([p.eval for p in parts]))


def _check_totals(source: str, eval_fraction: float, seed: int, totals: Totals) -> None:
    if not totals.train.documents + totals.held_out.documents:
        raise UsageError(f"--input={source!r} has no text; legal: at least one non-empty document")
    if not totals.held_out.documents:
        raise UsageError(
            f"--input={source!r} has no document of two or more characters, so nothing can be "
            "held out; legal: more text, in another --output"
        )
    if not totals.train.documents:
        raise UsageError(
            f"all {totals.held_out.documents} documents of --input={source!r} are held out at "
            f"--eval_fraction={eval_fraction} --seed={seed}; legal: more documents, or a smaller "
            "--eval_fraction, in another --output"
        )
