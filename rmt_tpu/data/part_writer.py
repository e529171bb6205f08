"""A writer for one part of a token store: the text of some spans, tokenised.

The content of a part depends on the text and the tokenizer alone. It is written under the name of
an attempt, and counts once its manifest, which is created last, names that attempt. So parts that
count are whole, however and whenever a process ends. The name of an attempt follows from the plan,
and each of its files is written whole, with bytes that follow from the text. Therefore several
processes that do the same part do not disturb each other, and files that an ended process left are
overwritten.

The manifest has a digest of the bytes of each span, and an existing part counts only if its spans
still have these bytes. So a store never has parts of two versions of a file.
"""

import contextlib
import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts
from jaxtyping import Integer

from rmt_tpu.data.batches import cut, rank
from rmt_tpu.data.corpus import read_span
from rmt_tpu.data.inputs import Span, check_unchanged, digest_of, new_digest, problems
from rmt_tpu.data.token_store import (
    MANIFEST,
    SHARD,
    SPLITS,
    Part,
    SplitPart,
    TokenizerOfStore,
    array_spec,
    part_name,
    read_sealed,
    seal,
    split_folder,
    verify_part,
)
from rmt_tpu.data.tokenizer import Tokenizer
from rmt_tpu.data.tokenizer_files import load_saved
from rmt_tpu.errors import RmtError, RunError, UsageError
from rmt_tpu.storage import Fault, Folder, faults, open_folder

# Limits of the text that is tokenised at a time.
_BATCH_DOCUMENTS, _BATCH_CHARACTERS = 256, 2**20
# Progress is reported after this many bytes, or this long.
_TOLD_BYTES, _TOLD_SECONDS = 2**18, 0.5


class Work(NamedTuple):
    """Options that all parts have in common."""

    source: str
    url: str
    seed: int
    eval_fraction: float
    plan_id: int


class Cut(NamedTuple):
    """A cut: documents of this rank are divided, and a tail of this share is held out."""

    rank: str
    share: float


class Job(NamedTuple):
    number: int
    spans: tuple[Span, ...]
    cut: Cut | None

    @property
    def num_bytes(self) -> int:
        return sum(span.stop - span.start for span in self.spans)


class Done(NamedTuple):
    """A part that counts, with all that the whole store needs to know about it.

    Attributes:
      part: the entry for the manifest.
      characters: number of characters of its documents.
      below: number of documents whose hash is below the fraction.
      lowest: the least rank of its documents of two characters or more; "" if there are none.
      lowest_characters: number of characters of the documents of that rank.
      inputs: the digest of each of its spans.
      kept: whether it existed before.
    """

    part: Part
    characters: int
    below: int
    lowest: str
    lowest_characters: int
    inputs: list[str]
    kept: bool = False

    @classmethod
    def from_json(cls, content: dict) -> "Done":
        """Return the part that a manifest describes.

        Raises:
          Fault, KeyError, TypeError: it is not a part's manifest.
        """
        names = {name: content[name] for name in cls._fields}
        return cls(**names | {"part": Part.from_json(content["part"])})


def read_done(folder: Folder, number: int) -> Done | None:
    """Return the part in a manifest, or None if there is no manifest."""
    content = read_sealed(folder, f"{part_name(number)}/{MANIFEST}")
    return content and Done.from_json(content)


def check_inputs(
    url: str, spans: tuple[Span, ...], digests: list[str], tick: Callable[[int], None]
) -> None:
    """Check that the files of a part were not edited since it was written.

    For an object in a bucket this is not checked: an edit makes another generation, with which the
    plan differs.

    Args:
      url: URL of the store.
      spans: the spans from which a part of the store was made.
      digests: the digests that they had then.
      tick: see `Worker`.

    Raises:
      UsageError: a file was edited since.
    """
    same_number = len(spans) == len(digests)
    for number, span in enumerate(spans):
        if span.in_bucket:
            tick(span.stop - span.start)
        elif not same_number or digest_of(span, lambda block: tick(len(block))) != digests[number]:
            raise UsageError(
                f"--output={url} is of another command: the content of "
                f"{os.path.basename(span.path)!r} has changed. Give the same input and flags to go "
                "on, or another --output"
            )


class Worker:
    """A worker that does one part after the other."""

    def __init__(self, work: Work, tick: Callable[[int], None]):
        """Take the options of the work.

        Args:
          work: the options of all parts.
          tick: called with the number of input bytes that are done; an error that it raises ends
            the work.
        """
        self._work, self._told = work, tick
        self._below = int(work.eval_fraction * 2**128)
        self._not_told, self._when_told = 0, time.monotonic()

    @cached_property
    def _folder(self) -> Folder:
        return open_folder(self._work.url)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_saved(self._folder)

    @cached_property
    def _dtype(self) -> np.dtype:
        return TokenizerOfStore.of(self._tokenizer).dtype

    def do(self, job: Job) -> Done:
        """Write a part, if it does not exist yet, and delete what ended attempts left."""
        name = part_name(job.number)
        if (done := self._finished(job)) is not None:
            with problems("input", self._work.source):
                check_inputs(self._work.url, job.spans, done.inputs, self._tick)
        else:
            done = self._write(job, _attempt(self._work.plan_id, job))
            content = {"plan": self._work.plan_id, "cut": job.cut, **done._asdict()}
            content |= {"part": done.part.json(), "kept": True}
            if not self._folder.create(f"{name}/{MANIFEST}", seal(content)):
                # Another process was faster; parts are the same whichever process writes them.
                if (done := self._finished(job)) is None:
                    raise RunError(f"{self._folder.url}/{name} is written by another command too")
        for attempt in self._folder.names(name):
            if attempt.endswith("/") and attempt != f"{done.part.attempt}/":
                self._folder.delete_folder(f"{name}/{attempt.rstrip('/')}")
        self._tell()
        return done

    def _tick(self, count: int) -> None:
        self._not_told += count
        if self._not_told >= _TOLD_BYTES or time.monotonic() - self._when_told >= _TOLD_SECONDS:
            self._tell()

    def _tell(self) -> None:
        self._told(self._not_told)
        self._not_told, self._when_told = 0, time.monotonic()

    def _finished(self, job: Job) -> Done | None:
        """Return the part if it is whole and of this plan and cut; else delete its manifest."""
        name = f"{part_name(job.number)}/{MANIFEST}"
        try:
            if (content := read_sealed(self._folder, name)) is None:
                return None
        except Fault:
            raise  # it could not be read, which does not mean that it is damaged
        except RmtError:
            content = {}
        with contextlib.suppress(Fault, KeyError, TypeError):
            same_plan = content.pop("plan") == self._work.plan_id
            its_cut = content.pop("cut")
            done = Done.from_json(content)
            # If no cut is asked for, an earlier one is not undone: what has to be known of the part
            # does not depend on it.
            if same_plan and (job.cut is None or its_cut == list(job.cut)):
                verify_part(self._folder, job.number, done.part, self._dtype)
                return done
        self._folder.delete(name)
        return None

    def _write(self, job: Job, attempt: str) -> Done:
        def check() -> None:
            for span in job.spans:
                check_unchanged(span)

        writers = {
            split: _SplitWriter(
                split_folder(self._folder, job.number, attempt, split),
                self._dtype,
                self._tokenizer.bos,
                check,
            )
            for split in SPLITS
        }
        census, inputs = _Census(), []
        for texts in self._batches(job.spans, inputs):
            divided = [item for text in texts for item in self._divide(text, job.cut, census)]
            encoded = self._tokenizer.encode_all([text for _, text in divided])
            for (split, _), tokens in zip(divided, encoded, strict=True):
                writers[split].append(tokens)
        splits = {split: writer.finish() for split, writer in writers.items()}
        return Done(Part(attempt, **splits), **vars(census), inputs=inputs)

    def _divide(self, text: str, of_cut: Cut | None, census: "_Census") -> list[tuple[str, str]]:
        """Return the split of a document, with its text; for a document that is cut, both."""
        of_text = rank(text, self._work.seed)
        is_below = int.from_bytes(of_text) < self._below
        census.count(text, of_text.hex(), is_below)
        if of_cut and of_text.hex() == of_cut.rank:
            return list(zip(SPLITS, cut(text, of_cut.share), strict=True))
        return [(SPLITS[is_below], text)]

    def _batches(self, of_part: tuple[Span, ...], inputs: list[str]) -> Iterator[list[str]]:
        """Yield the documents of some spans in batches that keep a tokenizer busy.

        When the last batch comes, `inputs` has the digest of each span.
        """
        with problems("input", self._work.source):
            texts: list[str] = []
            size = 0
            for span in of_part:
                digest = new_digest()

                def seen(block: bytes, digest: Any = digest) -> None:
                    digest.update(block)
                    self._tick(len(block))

                for text in read_span(span, seen):
                    texts.append(text)
                    size += len(text)
                    if len(texts) >= _BATCH_DOCUMENTS or size >= _BATCH_CHARACTERS:
                        yield texts
                        texts, size = [], 0
                inputs.append(digest.hexdigest())
            yield texts


def _attempt(plan_id: int, job: Job) -> str:
    """Return the name of a job's attempt, which does not depend on the process."""
    of = json.dumps([plan_id, job.number, job.cut])
    return hashlib.blake2b(of.encode(), digest_size=6).hexdigest()


class _Census:
    """Counts of documents, with attributes named as in `Done`."""

    def __init__(self):
        self.characters = self.below = self.lowest_characters = 0
        self.lowest = ""

    def count(self, text: str, rank: str, is_below: bool) -> None:
        self.characters += len(text)
        self.below += is_below
        # A single character cannot be cut.
        if len(text) > 1 and (not self.lowest or rank <= self.lowest):
            before = self.lowest_characters if rank == self.lowest else 0
            self.lowest, self.lowest_characters = rank, before + len(text)


class _SplitWriter:
    """A writer of one split of a part, document by document."""

    def __init__(self, folder: Folder, dtype: np.dtype, bos: int, check: Callable[[], None]):
        self._bos = np.array([bos], dtype)
        self._tokens = _ArrayWriter(folder, "tokens", dtype, check)
        self._offsets = _ArrayWriter(folder, "offsets", dtype, check)
        self._documents = self._crc32 = 0

    def append(self, tokens: Integer[np.ndarray, " tokens"]) -> None:
        stored = np.concatenate([self._bos, tokens.astype(self._bos.dtype)])
        self._offsets.append(np.array([self._tokens.size], np.int64))
        self._tokens.append(stored)
        self._documents += 1
        self._crc32 = zlib.crc32(stored, self._crc32)

    def finish(self) -> SplitPart:
        """Write what is left. A split without documents has no arrays."""
        if self._documents:
            self._offsets.append(np.array([self._tokens.size], np.int64))
            self._tokens.finish()
            self._offsets.finish()
        return SplitPart(self._documents, self._tokens.size, self._crc32)


class _ArrayWriter:
    """An array that grows by whole shards, each of which is a file that is written once."""

    def __init__(self, folder: Folder, name: str, dtype: np.dtype, check: Callable[[], None]):
        """Begin an empty array.

        Args:
          folder: folder of the split.
          name: "tokens" or "offsets".
          dtype: dtype of the tokens.
          check: called before each file is written; an error that it raises ends the work.
        """
        self._folder, self._name, self._dtype, self._check = folder, name, dtype, check
        self._held = np.empty(SHARD, dtype if name == "tokens" else np.int64)
        self._num_held = self._shards = self.size = 0

    def append(self, values: Integer[np.ndarray, " n"]) -> None:
        while len(values):
            taken, values = np.split(values, [SHARD - self._num_held])
            self._held[self._num_held : self._num_held + len(taken)] = taken
            self._num_held += len(taken)
            self.size += len(taken)
            if self._num_held == SHARD:
                self._write_shard()

    def finish(self) -> None:
        """Write the last shard and the array's metadata."""
        if self._num_held:
            self._write_shard()
        self._write("zarr.json", self._encoded(self.size, None)["zarr.json"])

    def _write_shard(self) -> None:
        shard = self._encoded(self._num_held, self._held[: self._num_held])["c/0"]
        self._write(f"c/{self._shards}", shard)
        self._shards, self._num_held = self._shards + 1, 0

    def _encoded(self, size: int, values: Integer[np.ndarray, " size"] | None) -> dict[str, bytes]:
        """Return the files of an array of this size, as tensorstore writes them."""
        memory, context = {"driver": "memory"}, ts.Context()
        spec = array_spec(self._folder, self._name, self._dtype, size) | {"kvstore": memory}
        array = ts.open(spec, create=True, context=context).result()
        if values is not None:
            array.write(values).result()
        files = ts.KvStore.open(memory, context=context).result()
        return {name.decode(): files.read(name).result().value for name in files.list().result()}

    def _write(self, name: str, data: bytes) -> None:
        self._check()
        with faults(f"{self._folder.url}/{self._name}: "):
            self._files.write(f"{self._name}/{name}", data).result()

    @cached_property
    def _files(self) -> ts.KvStore:
        return ts.KvStore.open(self._folder.kvstore(), context=self._folder.context()).result()
