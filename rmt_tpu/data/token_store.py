"""A token store: the tokens of a text of any size, stored in a local folder or a bucket.

`recipes.prepare_data` writes these files:

    manifest.json              the list of parts; created last, when the store is complete
    plan.json                  the arguments of the preparation; created first
    tokenizer.json
    parts/00000/manifest.json  the description of one part; created when its arrays are complete
    parts/00000/<attempt>/train/tokens, train/offsets, eval/tokens, eval/offsets

Arrays have the zarr3 format with crc32c checksums. `tokens` (uint16, or uint32 for a large
vocabulary) contains BOS and the tokens of each document in turn. `offsets` (int64, number of
documents + 1) contains the position of each document's BOS in `tokens`, and the end of the last
document. The concatenation of all parts of a split is the token stream, which equals the result of
`pack` for the same documents.
"""

import json
import os
import re
import threading
import zlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts
from jaxtyping import Int32, Int64

from rmt_tpu.data.inputs import SUFFIXES
from rmt_tpu.data.marked import without_marks
from rmt_tpu.data.tokenizer import Tokenizer
from rmt_tpu.errors import RunError, UsageError, flag_errors
from rmt_tpu.storage import Fault, Folder, faults, open_folder

MANIFEST, PLAN, PARTS = "manifest.json", "plan.json", "parts"
SPLITS = "train", "eval"
VERSION = 1

# Numbers of tokens in a shard and in a chunk. A shard is one file; large shards keep the number of
# files low. A chunk (32 or 64 KiB) is the smallest unit that can be read; with small chunks, little
# is read beyond the tokens of a window.
SHARD, CHUNK = 2**24, 2**14

_KIND = "rmt_tpu token store"
_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
_ATTEMPT = re.compile(r"[0-9a-f]{12}")
# Maximum size of a manifest in bytes, enough for a million parts.
_MANIFEST_BYTES = 256 * 2**20
# Size in bytes of the cache for the shards' indices. The index of a shard has 16 KiB for 16 million
# tokens.
_CACHE_BYTES = 64 * 2**20


class SplitPart(NamedTuple):
    """A summary of one split within one part.

    Attributes:
      documents: number of documents.
      tokens: number of tokens, including the BOS of each document.
      crc32: CRC-32 of the stored, little-endian tokens.
    """

    documents: int
    tokens: int
    crc32: int


class Part(NamedTuple):
    """The entry for one part in a manifest.

    Attributes:
      attempt: name of the folder that has the part's arrays.
      train, eval: summaries of the two splits.
    """

    attempt: str
    train: SplitPart
    eval: SplitPart

    @classmethod
    def from_json(cls, value: Any) -> "Part":
        """Return the part that a JSON value from `json` describes.

        Raises:
          Fault: the value does not describe a part.
        """
        try:
            splits = [SplitPart(**value[split]) for split in SPLITS]
            whole = all(type(n) is int and 0 <= n < 2**40 for split in splits for n in split)
            if whole and _ATTEMPT.fullmatch(value["attempt"]):
                return cls(value["attempt"], *splits)
        except (TypeError, KeyError):
            pass
        raise Fault("the manifest lists a part with invalid fields")

    def json(self) -> dict[str, Any]:
        """Return a JSON value that describes the part, for `from_json`."""
        return {"attempt": self.attempt} | {s: getattr(self, s)._asdict() for s in SPLITS}


class TokenizerOfStore(NamedTuple):
    """A store's record of the tokenizer that encoded its text; for the fields see `Tokenizer`."""

    name: str
    fingerprint: str
    vocab_size: int
    bos: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "TokenizerOfStore":
        """Return the record of a tokenizer; its name is the last part of the tokenizer's path."""
        return cls(
            tokenizer.name.rstrip("/").rpartition("/")[2],
            tokenizer.fingerprint(),
            tokenizer.vocab_size,
            tokenizer.bos,
        )

    def dtype(self, *, has_marks: bool = False) -> np.dtype:
        """Return the dtype of stored tokens.

        It is uint32 for tokens with marks and for vocabularies of more than 65,536 tokens, and
        otherwise uint16.
        """
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 and not has_marks else np.uint32)


class TokenStore:
    """A complete token store, open for reading.

    Attributes:
      url: location of the store.
      tokenizer: the store's record of the tokenizer that encoded its text.
      train: the stream of training documents.
      held_out: the stream of held-out documents.
      has_marks: whether only parts of the documents have a loss.
    """

    def __init__(self, folder: Folder, content: dict[str, Any]):
        self.url = folder.url
        try:
            self.tokenizer = TokenizerOfStore(**content["plan"]["tokenizer"])
            parts = [Part.from_json(value) for value in content["parts"]]
            vocabulary, bos = self.tokenizer.vocab_size, self.tokenizer.bos
            if not (type(vocabulary) is type(bos) is int and 0 <= bos < vocabulary <= 2**31):
                raise Fault("the manifest describes the tokenizer with invalid fields")
            self.has_marks = "format" in content["plan"]
            if len(parts) != content["plan"]["num_parts"]:
                raise Fault("the manifest does not list all parts")
        except (Fault, KeyError, TypeError) as error:
            raise RunError(f"{folder.url}/{MANIFEST} is damaged: {error}") from None
        own = parts, self.tokenizer, self.has_marks
        self.train = TokenStream(folder, "train", *own)
        self.held_out = TokenStream(folder, "eval", *own)

    def has_tokenizer(self, tokenizer: Tokenizer) -> bool:
        """Return whether a tokenizer encodes text like the tokenizer of the store."""
        return tokenizer.fingerprint() == self.tokenizer.fingerprint


class TokenStream:
    """The token stream of one split, over all parts of a store; it implements `Stream`."""

    def __init__(
        self,
        folder: Folder,
        split: str,
        parts: Sequence[Part],
        tokenizer: TokenizerOfStore,
        has_marks: bool = False,
    ):
        """Create the stream without opening any array.

        Args:
          folder: folder of the store.
          split: "train" or "eval".
          parts: all parts of the store.
          tokenizer: the tokenizer of the store.
          has_marks: whether tokens without a loss have the bit `marked.CONTEXT`.
        """
        self._folder, self._split, self._parts = folder, split, parts
        self._dtype = tokenizer.dtype(has_marks=has_marks)
        self._vocab_size, self._has_marks = tokenizer.vocab_size, has_marks
        of_parts = [getattr(part, split) for part in parts]
        # The position in the stream of the first token of each part, and the end of the last part.
        self._begins = np.cumsum([0, *(p.tokens for p in of_parts)], dtype=np.int64)
        self._documents = np.cumsum([0, *(p.documents for p in of_parts)], dtype=np.int64)
        self._checksum = zlib.crc32(json.dumps([[p.tokens, p.crc32] for p in of_parts]).encode())
        self._open: dict[tuple[int, str], ts.Future] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._begins[-1])

    @property
    def num_documents(self) -> int:
        """Number of documents of the split, over all parts."""
        return int(self._documents[-1])

    def checksum(self) -> int:
        """Return the CRC-32 of the checksums of all parts, which the manifest contains."""
        return self._checksum

    def read(
        self, starts: Int64[np.ndarray, " rows"], length: int
    ) -> Int32[np.ndarray, "rows length"]:
        """Return `length` tokens from each position in `starts` onwards, with 0 beyond the end.

        All rows are read concurrently.

        Raises:
          Fault: an array is damaged or missing, or does not match the manifest.
        """
        out = np.zeros((len(starts), length), np.int32)
        pieces = [
            (row, *piece)
            for row, start in enumerate(starts.tolist())
            for piece in self._pieces(start, min(start + length, len(self)))
        ]
        # Start opening all arrays, and then start all reads, before waiting for the first result.
        for number in dict.fromkeys(piece[2] for piece in pieces):
            self._begin_opening(number, "tokens")
        arrays = {number: self._array(number, "tokens") for _, _, number, _, _ in pieces}
        with ts.Batch() as batch:
            reads = [arrays[number][a:b].read(batch=batch) for _, _, number, a, b in pieces]
        for (row, at, number, a, b), read in zip(pieces, reads, strict=True):
            with faults(f"{self._name(number, 'tokens')}: "):
                out[row, at : at + b - a] = read.result()
        plain = without_marks(out) if self._has_marks else out
        if out.size and not (0 <= out.min() and plain.max() < self._vocab_size):
            raise Fault(f"{self._folder.url} has tokens that are not in its vocabulary")
        return out

    def document(self, number: int) -> Int32[np.ndarray, " tokens"]:
        """Return the tokens of one document, including its BOS.

        Args:
          number: number of the document, from 0 to `num_documents - 1`.

        Raises:
          Fault: see `read`.
        """
        if not 0 <= number < self.num_documents:
            raise IndexError(
                f"document {number} does not exist; legal: 0 to {self.num_documents - 1}"
            )
        part = int(np.searchsorted(self._documents, number, side="right")) - 1
        at = number - int(self._documents[part])
        name = self._name(part, "offsets")
        with faults(f"{name}: "):
            start, stop = self._array(part, "offsets")[at : at + 2].read().result().tolist()
        tokens = int(self._begins[part + 1] - self._begins[part])
        if not 0 <= start < stop <= tokens:
            raise Fault(f"{name}: document {number} has impossible bounds, {start} to {stop}")
        start = np.array([start + self._begins[part]], np.int64)
        tokens = self.read(start, stop - int(start[0] - self._begins[part]))[0]
        return without_marks(tokens)

    def bounds(self) -> Int64[np.ndarray, " documents_plus_1"]:
        """Return the position of the first token of each document, and the end of the stream.

        Raises:
          Fault: see `read`.
        """
        found = []
        for number, part in enumerate(self._parts):
            documents, name = getattr(part, self._split).documents, self._name(number, "offsets")
            if documents:
                with faults(f"{name}: "):
                    offsets = self._array(number, "offsets")[:documents].read().result()
                found.append(np.asarray(offsets) + self._begins[number])
        bounds = np.concatenate([*found, [len(self)]]).astype(np.int64)
        if (np.diff(bounds) <= 0).any() or bounds[0] != 0:
            raise Fault(f"{self._folder.url} has documents with impossible bounds")
        return bounds

    def _pieces(self, start: int, stop: int) -> list[tuple[int, int, int, int]]:
        """Split a range of positions in the stream at the boundaries of parts.

        Returns:
          A tuple for each piece: its offset from `start`, the number of the part, and the start and
          stop of the piece within the part.
        """
        pieces, at = [], start
        number = int(np.searchsorted(self._begins, start, side="right")) - 1
        while at < stop:
            begin, end = int(self._begins[number]), int(self._begins[number + 1])
            if at < end:  # Skip parts that have no tokens of this split.
                pieces.append((at - start, number, at - begin, min(stop, end) - begin))
                at = min(stop, end)
            number += 1
        return pieces

    def _begin_opening(self, number: int, array: str) -> ts.Future:
        with self._lock:
            if (number, array) not in self._open:
                part = getattr(self._parts[number], self._split)
                folder = split_folder(
                    self._folder, number, self._parts[number].attempt, self._split
                )
                size = part.tokens if array == "tokens" else part.documents + 1
                spec = array_spec(folder, array, self._dtype, size)
                # Do not check whether a cached file has changed, because a complete store never
                # changes.
                spec |= {"recheck_cached_data": False, "recheck_cached_metadata": False}
                self._open[number, array] = ts.open(spec, open=True, context=self._context)
            return self._open[number, array]

    def _array(self, number: int, array: str) -> ts.TensorStore:
        with faults(f"{self._name(number, array)}: "):
            return self._begin_opening(number, array).result()

    def _name(self, number: int, array: str) -> str:
        return f"{self._split} {array} of part {number} of {self._folder.url}"

    @cached_property
    def _context(self) -> ts.Context:
        return ts.Context(
            {"cache_pool": {"total_bytes_limit": _CACHE_BYTES}}, parent=self._folder.context()
        )


def is_store(source: str) -> bool:
    """Return whether the value of `--data` names a token store, which may be incomplete."""
    if source.startswith("gs://"):
        return not any(piece.strip().lower().endswith(SUFFIXES) for piece in source.split(","))
    folder = os.path.expanduser(source)
    return any(os.path.isfile(os.path.join(folder, name)) for name in (MANIFEST, PLAN))


def open_store(source: str | Folder, flag: str = "data") -> TokenStore:
    """Open the token store in a folder.

    Args:
      source: the folder.
      flag: the command-line flag that set the folder, for error messages.

    Raises:
      UsageError: the folder has no store or an incomplete one, or cannot be read.
      RunError: the manifest of the store is damaged.
    """
    with flag_errors(flag):
        folder = open_folder(source)
        folder.check()
    content = read_sealed(folder, MANIFEST)
    if content is None:
        if folder.read(PLAN, limit=_MANIFEST_BYTES) is None:
            raise UsageError(
                f"--{flag}={folder.url} has no token store: there is no {MANIFEST}; legal: the "
                "--output of recipes.prepare_data"
            )
        raise UsageError(f"--{flag}={folder.url} is not complete; run recipes.prepare_data again")
    return TokenStore(folder, content)


def verify_part(folder: Folder, number: int, part: Part, tokens: np.dtype) -> None:
    """Check that a part is undamaged by reading all of its arrays.

    Args:
      folder: folder of the store.
      number: number of the part.
      part: the part as its manifest describes it.
      tokens: dtype of the tokens.

    Raises:
      Fault: the part is damaged.
    """
    for split in SPLITS:
        of_split = getattr(part, split)
        sizes = {"tokens": of_split.tokens, "offsets": of_split.documents + 1}
        for name, size in sizes.items() if of_split.documents else ():
            what, crc32 = f"{split} {name} of part {number} of {folder.url}", 0
            of = split_folder(folder, number, part.attempt, split)
            with faults(f"{what}: "):
                spec = array_spec(of, name, tokens, size)
                array = ts.open(spec, open=True, context=folder.context()).result()
                for start in range(0, size, SHARD):
                    read = array[start : min(start + SHARD, size)].read().result()
                    crc32 = zlib.crc32(np.ascontiguousarray(read), crc32)
            if name == "tokens" and crc32 != of_split.crc32:
                raise Fault(f"{what}: the checksum does not match that of the manifest")


def array_spec(folder: Folder, name: str, tokens: np.dtype, size: int) -> dict[str, Any]:
    """Return the tensorstore spec of an array.

    An array whose metadata differ from the spec cannot be opened with it.

    Args:
      folder: folder of the split.
      name: "tokens" or "offsets".
      tokens: dtype of the tokens.
      size: size of the array.
    """
    kvstore = folder.kvstore()
    chunks = {"chunk_shape": [CHUNK], "codecs": _CODECS, "index_codecs": _CODECS}
    return {
        "driver": "zarr3",
        "kvstore": {**kvstore, "path": f"{kvstore['path']}{name}/"},
        "metadata": {
            "shape": [size],
            "data_type": tokens.name if name == "tokens" else "int64",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [SHARD]}},
            "codecs": [
                {
                    "name": "sharding_indexed",
                    "configuration": {**chunks, "index_location": "end"},
                }
            ],
        },
        # By default, tensorstore does not store chunks of zeros, and reads missing chunks as zeros.
        # A lost file would then go unnoticed.
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }


def part_name(number: int) -> str:
    """Return the name of the folder for the part with this number."""
    return f"{PARTS}/{number:05}"


def split_folder(folder: Folder, number: int, attempt: str, split: str) -> Folder:
    """Return the folder that has the arrays of one split of a part."""
    return folder.child(f"{part_name(number)}/{attempt}/{split}")


def seal(content: dict[str, Any]) -> bytes:
    """Encode a manifest as bytes that include a checksum of its content."""
    sealed = {"kind": _KIND, "version": VERSION, "crc32": _crc32(content), "content": content}
    return (json.dumps(sealed) + "\n").encode()


def read_sealed(folder: Folder, name: str) -> dict[str, Any] | None:
    """Return the content of a file that was encoded by `seal`, or None if there is no such file.

    Raises:
      UsageError: the file does not belong to a token store, or has a different version.
      RunError: the file is damaged.
    """
    found = folder.read(name, limit=_MANIFEST_BYTES)
    if found is None:
        return None
    try:
        sealed = json.loads(found.data)
        if type(sealed) is dict and sealed.get("kind") != _KIND:
            raise UsageError(
                f"{folder.url}/{name} was written by another program; legal: another folder"
            )
        if sealed["version"] != VERSION:
            raise UsageError(
                f"{folder.url}: token store version {sealed['version']!r} cannot be read; "
                f"legal: {VERSION}"
            )
        content = sealed["content"]
        if sealed["crc32"] == _crc32(content) and type(content) is dict:
            return content
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise RunError(f"{folder.url}/{name} is damaged: its checksum does not match")


def _crc32(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
