"""A writer for the parts of a token store.

A part has the tokens of some spans, which are ranges of bytes in the input files.

The content of a part depends only on the text and the arguments of the store. An attempt to write a
part has its own folder. The part is valid once its manifest, which is created last, names the
attempt. A valid part is therefore complete, even if a process was killed. The name of an attempt
depends only on the plan and the part, and each file is written as a whole. Several processes may
therefore write the same part without conflict, and files left by a killed process are overwritten.

The manifest has a digest of the bytes of each span. An existing part is kept only if its spans
still have the same digests, so that a store never mixes two versions of a file.
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

from rmt_tpu.data import tables
from rmt_tpu.data.batches import cut, rank
from rmt_tpu.data.chat import ChatTemplate, read_template
from rmt_tpu.data.corpus import read_span
from rmt_tpu.data.inputs import (
    BlockCallback,
    Span,
    check_unchanged,
    digest_of,
    new_digest,
    usage_errors,
)
from rmt_tpu.data.marked import Reading, encode_all, first_token
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

# At most these numbers of documents and of characters are tokenised at a time.
_BATCH_DOCUMENTS, _BATCH_CHARACTERS = 256, 2**20
# Progress is reported after this many bytes or seconds.
_REPORT_BYTES, _REPORT_SECONDS = 2**18, 0.5


class StoreOptions(NamedTuple):
    """Options that are the same for all parts of a token store.

    Attributes:
      source: the text source, for error messages.
      url: location of the store.
      seed: seed of the choice of held-out documents.
      eval_fraction: fraction of the documents to hold out.
      plan_id: checksum of the store's plan.
      text_field: name of the field or column that has the text.
      kind: the kind of the documents, such as "text"; see `marked.Reading`.
    """

    source: str
    url: str
    seed: int
    eval_fraction: float
    plan_id: int
    text_field: str = "text"
    kind: str = "text"


class DocumentCut(NamedTuple):
    """An instruction to hold out only the tail of a document.

    Attributes:
      rank: the rank (see `batches.rank`) of the document, in hexadecimal.
      share: fraction of the document's characters in the tail.
    """

    rank: str
    share: float


class PartJob(NamedTuple):
    """The task of writing one part of a store.

    Attributes:
      number: index of the part.
      spans: byte ranges of the input that the part covers.
      cut: the document to divide between training and held-out text, or None.
    """

    number: int
    spans: tuple[Span, ...]
    cut: DocumentCut | None

    @property
    def num_bytes(self) -> int:
        """Number of input bytes of the part, before decompression."""
        return sum(span.stop - span.start for span in self.spans)


class WrittenPart(NamedTuple):
    """A complete part of a store, with the statistics that are needed to complete the store.

    Attributes:
      part: the part's entry in the manifest of the store.
      characters: total number of characters in its documents.
      below: number of its documents that are held out. The rank of such a document, as a fraction,
        is below `StoreOptions.eval_fraction`.
      lowest: the lowest rank (see `batches.rank`) of its documents with at least two characters; ""
        if there are none.
      lowest_characters: total number of characters in the documents of the lowest rank.
      inputs: the digest of the input bytes of each span.
      kept: whether the part existed before this call of `prepare`.
    """

    part: Part
    characters: int
    below: int
    lowest: str
    lowest_characters: int
    inputs: list[str]
    kept: bool = False

    @classmethod
    def from_json(cls, content: dict) -> "WrittenPart":
        """Return the part that the content of a manifest describes.

        Raises:
          Fault, KeyError, TypeError: the content is not from the manifest of a part.
        """
        names = {name: content[name] for name in cls._fields}
        return cls(**names | {"part": Part.from_json(content["part"])})


def read_part_manifest(folder: Folder, number: int) -> WrittenPart | None:
    """Return the part that a part's manifest describes; None if there is no manifest yet."""
    content = read_sealed(folder, f"{part_name(number)}/{MANIFEST}")
    return content and WrittenPart.from_json(content)


def check_inputs(
    url: str,
    spans: tuple[Span, ...],
    digests: list[str],
    tick: Callable[[int], None],
    reading: Reading,
) -> None:
    """Check that the input files of a part were not edited since the part was written.

    Objects in a bucket are not checked, because an edit changes their generation, which is part of
    the plan.

    Args:
      url: URL of the store.
      spans: the spans from which the part was made.
      digests: the digests of the spans when the part was written.
      tick: a function that is called with the number of bytes that were checked.
      reading: the fields or columns that documents are read from.

    Raises:
      UsageError: a file was edited since then.
    """
    same_number = len(spans) == len(digests)
    for number, span in enumerate(spans):
        if span.in_bucket:
            tick(span.stop - span.start)
        elif not same_number or _digest_of(span, reading, tick) != digests[number]:
            raise UsageError(
                f"--output={url} was made from other input: the content of "
                f"{os.path.basename(span.path)!r} has changed. Give the same input and flags to "
                "resume, give another --output, or delete this folder"
            )


def _digest_of(span: Span, reading: Reading, tick: Callable[[int], None]) -> str:
    """Return the digest of a span's bytes, or for a table the digest of the texts in the span."""
    if not tables.is_table(span.path):
        return digest_of(span, lambda block: tick(len(block)))
    digest = new_digest()
    for _ in read_span(span, _digesting(digest, tick), reading=reading):
        pass
    return digest.hexdigest()


def _digesting(digest: Any, tick: Callable[[int], None]) -> BlockCallback:
    """Return a function that adds blocks to a digest and reports how many bytes were read."""

    def on_block(block: bytes, stored: int | None = None) -> None:
        digest.update(block)
        tick(len(block) if stored is None else stored)

    return on_block


class PartWriter:
    """A writer that creates the parts of a token store, one after the other."""

    def __init__(self, options: StoreOptions, tick: Callable[[int], None]):
        """Create a writer of parts.

        Args:
          options: the options of all parts.
          tick: a function that is called with the number of input bytes processed since its last
            call. An error that it raises stops the work.
        """
        self._options, self._on_progress = options, tick
        self._reading = Reading(options.text_field, options.kind)
        self._below = int(options.eval_fraction * 2**128)
        self._unreported, self._reported_at = 0, time.monotonic()

    @cached_property
    def _folder(self) -> Folder:
        return open_folder(self._options.url)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_saved(self._folder)

    @cached_property
    def _dtype(self) -> np.dtype:
        has_marks = self._reading.has_marks
        return TokenizerOfStore.of(self._tokenizer).dtype(has_marks=has_marks)

    @cached_property
    def _template(self) -> ChatTemplate | None:
        """The chat template of conversations, which is in the folder of the store."""
        if self._options.kind != "messages":
            return None
        return read_template(self._folder, self._tokenizer)

    def write_part(self, job: PartJob) -> WrittenPart:
        """Write a part unless a valid one exists, and delete files that other attempts left."""
        name = part_name(job.number)
        if (done := self._existing_part(job)) is not None:
            with usage_errors("input", self._options.source):
                check_inputs(
                    self._options.url,
                    job.spans,
                    done.inputs,
                    self._tick,
                    self._reading,
                )
        else:
            done = self.write_anew(job, _attempt(self._options.plan_id, job))
            content = {"plan": self._options.plan_id, "cut": job.cut, **done._asdict()}
            content |= {"part": done.part.json(), "kept": True}
            if not self._folder.create(f"{name}/{MANIFEST}", seal(content)):
                # Another process has written the part first. Its part is identical, so use it.
                if (done := self._existing_part(job)) is None:
                    raise RunError(
                        f"another command is also writing {self._folder.url}/{name}; run only one "
                        "command at a time"
                    )
        for attempt in self._folder.names(name):
            if attempt.endswith("/") and attempt != f"{done.part.attempt}/":
                self._folder.delete_folder(f"{name}/{attempt.rstrip('/')}")
        self._report()
        return done

    def _tick(self, count: int) -> None:
        self._unreported += count
        if (
            self._unreported >= _REPORT_BYTES
            or time.monotonic() - self._reported_at >= _REPORT_SECONDS
        ):
            self._report()

    def _report(self) -> None:
        self._on_progress(self._unreported)
        self._unreported, self._reported_at = 0, time.monotonic()

    def _existing_part(self, job: PartJob) -> WrittenPart | None:
        """Return the part that already exists in the store, or None if it is not valid for the job.

        If the part is damaged, or was written for a different plan or cut, its manifest is also
        deleted.
        """
        name = f"{part_name(job.number)}/{MANIFEST}"
        try:
            if (content := read_sealed(self._folder, name)) is None:
                return None
        except Fault:
            # Keep the manifest, because it may be undamaged although it could not be read from
            # storage.
            raise
        except RmtError:
            content = {}
        with contextlib.suppress(Fault, KeyError, TypeError):
            same_plan = content.pop("plan") == self._options.plan_id
            cut_of_part = content.pop("cut")
            done = WrittenPart.from_json(content)
            # If the job has no cut, a part with a cut is accepted too, because the statistics in
            # `WrittenPart` do not depend on the cut.
            if same_plan and (job.cut is None or cut_of_part == list(job.cut)):
                verify_part(self._folder, job.number, done.part, self._dtype)
                return done
        self._folder.delete(name)
        return None

    def write_anew(self, job: PartJob, attempt: str) -> WrittenPart:
        """Write a part into new folders, whose names contain `attempt`."""

        def check() -> None:
            for span in job.spans:
                check_unchanged(span)

        writers = {
            split: _SplitWriter(
                split_folder(self._folder, job.number, attempt, split),
                self._dtype,
                first_token(self._tokenizer, self._options.kind),
                check,
            )
            for split in SPLITS
        }
        statistics, inputs = _Statistics(), []
        for texts in self._batches(job.spans, inputs):
            divided = [item for text in texts for item in self._divide(text, job.cut, statistics)]
            encoded = encode_all([text for _, text in divided], self._tokenizer)
            for (split, _), tokens in zip(divided, encoded, strict=True):
                writers[split].append(tokens)
        splits = {split: writer.finish() for split, writer in writers.items()}
        return WrittenPart(Part(attempt, **splits), **vars(statistics), inputs=inputs)

    def _divide(
        self, text: str, document_cut: DocumentCut | None, statistics: "_Statistics"
    ) -> list[tuple[str, str]]:
        """Return (split, text) for a document, or two such pairs if the document is cut."""
        rank_of_text = rank(text, self._options.seed)
        is_below = int.from_bytes(rank_of_text) < self._below
        statistics.count(text, rank_of_text.hex(), is_below)
        if document_cut and rank_of_text.hex() == document_cut.rank:
            return list(zip(SPLITS, cut(text, document_cut.share), strict=True))
        return [(SPLITS[is_below], text)]

    def _batches(self, spans: tuple[Span, ...], inputs: list[str]) -> Iterator[list[str]]:
        """Yield the documents of some spans, in batches that are large enough for the tokenizer.

        The digest of each span is appended to `inputs`, which is complete when the last batch is
        yielded.
        """
        with usage_errors("input", self._options.source):
            texts: list[str] = []
            size = 0
            for span in spans:
                digest = new_digest()
                on_block = _digesting(digest, self._tick)
                for raw in read_span(span, on_block, reading=self._reading):
                    text = self._reading.document(raw, self._template)
                    texts.append(text)
                    size += len(text)
                    if len(texts) >= _BATCH_DOCUMENTS or size >= _BATCH_CHARACTERS:
                        yield texts
                        texts, size = [], 0
                inputs.append(digest.hexdigest())
            yield texts


def _attempt(plan_id: int, job: PartJob) -> str:
    """Return the name of the attempt for a job, which is the same in every process."""
    key = json.dumps([plan_id, job.number, job.cut])
    return hashlib.blake2b(key.encode(), digest_size=6).hexdigest()


class _Statistics:
    """Statistics of the documents in a part, with attributes that `WrittenPart` describes."""

    def __init__(self):
        self.characters = self.below = self.lowest_characters = 0
        self.lowest = ""

    def count(self, text: str, rank: str, is_below: bool) -> None:
        self.characters += len(text)
        self.below += is_below
        # Ignore a document with a single character, because it cannot be cut in two.
        if len(text) > 1 and (not self.lowest or rank <= self.lowest):
            before = self.lowest_characters if rank == self.lowest else 0
            self.lowest, self.lowest_characters = rank, before + len(text)


class _SplitWriter:
    """A writer for one split of a part, to which documents are appended."""

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
        """Write the buffered tokens and offsets; a split without documents gets no arrays."""
        if self._documents:
            self._offsets.append(np.array([self._tokens.size], np.int64))
            self._tokens.finish()
            self._offsets.finish()
        return SplitPart(self._documents, self._tokens.size, self._crc32)


class _ArrayWriter:
    """A writer for an array to which numbers are appended; it writes one file per full shard."""

    def __init__(self, folder: Folder, name: str, dtype: np.dtype, check: Callable[[], None]):
        """Create a writer for an empty array.

        Args:
          folder: folder of the split.
          name: "tokens" or "offsets".
          dtype: dtype of the tokens.
          check: a function that is called before each file is written. An error that it raises
            stops the work.
        """
        self._folder, self._name, self._dtype, self._check = folder, name, dtype, check
        self._buffer = np.empty(SHARD, dtype if name == "tokens" else np.int64)
        self._buffered = self._shards = self.size = 0

    def append(self, values: Integer[np.ndarray, " n"]) -> None:
        while len(values):
            chunk, values = np.split(values, [SHARD - self._buffered])
            self._buffer[self._buffered : self._buffered + len(chunk)] = chunk
            self._buffered += len(chunk)
            self.size += len(chunk)
            if self._buffered == SHARD:
                self._write_shard()

    def finish(self) -> None:
        """Write the last shard and the array's metadata."""
        if self._buffered:
            self._write_shard()
        self._write("zarr.json", self._encoded(self.size, None)["zarr.json"])

    def _write_shard(self) -> None:
        shard = self._encoded(self._buffered, self._buffer[: self._buffered])["c/0"]
        self._write(f"c/{self._shards}", shard)
        self._shards, self._buffered = self._shards + 1, 0

    def _encoded(self, size: int, values: Integer[np.ndarray, " size"] | None) -> dict[str, bytes]:
        """Return the content of each file that tensorstore writes for an array of this size."""
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
