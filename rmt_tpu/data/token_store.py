"""A token store: tokens of any amount of text in a folder or bucket, which are read in place.

`recipes.prepare_data` writes these files:

    manifest.json              what is in it; created last, so a store without one is not complete
    plan.json                  what makes it: created first
    tokenizer.json
    parts/00000/manifest.json  of one part of the text; created when its arrays are whole
    parts/00000/<attempt>/train/tokens, train/offsets, eval/tokens, eval/offsets

Arrays are zarr3 with crc32c checksums. `tokens` (uint16, or uint32 for large vocabularies) has BOS
and the tokens of each document, one after the other. `offsets` (int64, documents + 1) has the
position of each document's BOS in it, and the end of the last document. The parts of a split, one
after the other, are one stream, equal to what `pack` makes of the same documents.
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
from rmt_tpu.data.tokenizer import Tokenizer
from rmt_tpu.errors import RunError, UsageError, of_flag
from rmt_tpu.storage import Fault, Folder, faults, open_folder

MANIFEST, PLAN = "manifest.json", "plan.json"
SPLITS = "train", "eval"
VERSION = 1

# A shard is a file, and a chunk (32 or 64 KiB) is the least that is read of it. So reading a window
# costs little more than its own tokens, and a store of a terabyte has no billion files.
SHARD, CHUNK = 2**24, 2**14

_KIND = "rmt_tpu token store"
_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
_ATTEMPT = re.compile(r"[0-9a-f]{12}")
_MANIFEST_BYTES = 256 * 2**20  # enough for about a million parts
# Room for the index of every shard that windows are read from: 16 KiB for 16 million tokens.
_CACHE_BYTES = 64 * 2**20


class SplitPart(NamedTuple):
    """The tokens of one split in one part.

    Attributes:
      documents: number of documents.
      tokens: number of tokens, including the BOS of each document.
      crc32: CRC-32 of the tokens as they are stored, little-endian.
    """

    documents: int
    tokens: int
    crc32: int


class Part(NamedTuple):
    """The entry of one part in a manifest.

    Attributes:
      attempt: the folder of its arrays.
      train, eval: its splits.
    """

    attempt: str
    train: SplitPart
    eval: SplitPart

    @classmethod
    def from_json(cls, value: Any) -> "Part":
        """Return the part in a JSON value.

        Raises:
          Fault: it is not a value that `json` returns.
        """
        try:
            splits = [SplitPart(**value[split]) for split in SPLITS]
            whole = all(type(n) is int and 0 <= n < 2**40 for split in splits for n in split)
            if whole and _ATTEMPT.fullmatch(value["attempt"]):
                return cls(value["attempt"], *splits)
        except (TypeError, KeyError):
            pass
        raise Fault("it lists a part that cannot be")

    def json(self) -> dict[str, Any]:
        """Return the part as a JSON value for `from_json`."""
        return {"attempt": self.attempt} | {s: getattr(self, s)._asdict() for s in SPLITS}


class TokenizerOfStore(NamedTuple):
    """The tokenizer by which a store was made; see `Tokenizer`."""

    name: str
    fingerprint: str
    vocab_size: int
    bos: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "TokenizerOfStore":
        return cls(
            tokenizer.name.rstrip("/").rpartition("/")[2],
            tokenizer.fingerprint(),
            tokenizer.vocab_size,
            tokenizer.bos,
        )

    @property
    def dtype(self) -> np.dtype:
        """The dtype in which tokens are stored."""
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)


class TokenStore:
    """A complete store.

    Attributes:
      url: URL of its folder.
      tokenizer: the tokenizer by which it was made.
      train: the stream to train on.
      held_out: the stream of the documents held out.
    """

    def __init__(self, folder: Folder, content: dict[str, Any]):
        self.url = folder.url
        try:
            self.tokenizer = TokenizerOfStore(**content["plan"]["tokenizer"])
            parts = [Part.from_json(value) for value in content["parts"]]
            vocabulary, bos = self.tokenizer.vocab_size, self.tokenizer.bos
            if not (type(vocabulary) is type(bos) is int and 0 <= bos < vocabulary <= 2**31):
                raise Fault("it lists a tokenizer that cannot be")
            if len(parts) != content["plan"]["num_parts"]:
                raise Fault("it does not list all parts")
        except (Fault, KeyError, TypeError) as error:
            raise RunError(f"{folder.url}/{MANIFEST} is damaged: {error}") from None
        self.train = TokenStream(folder, "train", parts, self.tokenizer)
        self.held_out = TokenStream(folder, "eval", parts, self.tokenizer)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Check that a tokenizer encodes like that of the store.

        Raises:
          UsageError: it encodes differently.
        """
        if tokenizer.fingerprint() != self.tokenizer.fingerprint:
            raise UsageError(
                f"--data={self.url} was made with the tokenizer {self.tokenizer.name!r} of "
                f"{self.tokenizer.vocab_size} tokens, and --tokenizer={tokenizer.name} of "
                f"{tokenizer.vocab_size} encodes otherwise; legal: --tokenizer={self.url}"
            )


class TokenStream:
    """One split of a store as one stream; a `Stream` for `Windows`."""

    def __init__(
        self, folder: Folder, split: str, parts: Sequence[Part], tokenizer: TokenizerOfStore
    ):
        """Describe the stream; this opens no array yet.

        Args:
          folder: folder of the store.
          split: "train" or "eval".
          parts: all parts of the store.
          tokenizer: the tokenizer of the store.
        """
        self._folder, self._split, self._parts = folder, split, parts
        self._dtype, self._vocab_size = tokenizer.dtype, tokenizer.vocab_size
        of_parts = [getattr(part, split) for part in parts]
        # The position in the stream at which each part begins, and the end of the last one.
        self._begins = np.cumsum([0, *(p.tokens for p in of_parts)], dtype=np.int64)
        self._documents = np.cumsum([0, *(p.documents for p in of_parts)], dtype=np.int64)
        self._checksum = zlib.crc32(json.dumps([[p.tokens, p.crc32] for p in of_parts]).encode())
        self._open: dict[tuple[int, str], ts.Future] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._begins[-1])

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return int(self._documents[-1])

    def checksum(self) -> int:
        """Return the CRC-32 of the checksums of all parts, from the manifest: nothing is read."""
        return self._checksum

    def read(
        self, starts: Int64[np.ndarray, " rows"], length: int
    ) -> Int32[np.ndarray, "rows length"]:
        """Return `length` tokens from each of `starts` on, all read at once, with 0 past the end.

        Raises:
          Fault: an array is damaged or missing, or is not what the manifest says.
        """
        out = np.zeros((len(starts), length), np.int32)
        pieces = [
            (row, *piece)
            for row, start in enumerate(starts.tolist())
            for piece in self._pieces(start, min(start + length, len(self)))
        ]
        # Begin every open and every read before waiting for the first.
        for number in dict.fromkeys(piece[2] for piece in pieces):
            self._begin_opening(number, "tokens")
        arrays = {number: self._array(number, "tokens") for _, _, number, _, _ in pieces}
        with ts.Batch() as batch:
            reads = [arrays[number][a:b].read(batch=batch) for _, _, number, a, b in pieces]
        for (row, at, number, a, b), read in zip(pieces, reads, strict=True):
            with faults(f"{self._name(number, 'tokens')}: "):
                out[row, at : at + b - a] = read.result()
        if out.size and not (0 <= out.min() and out.max() < self._vocab_size):
            raise Fault(f"{self._folder.url} has tokens that are not of its tokenizer")
        return out

    def document(self, number: int) -> Int32[np.ndarray, " tokens"]:
        """Return the tokens of one document, with its BOS, for evaluation document by document.

        Args:
          number: number of the document, from 0 to `num_documents - 1`.

        Raises:
          Fault: see `read`.
        """
        if not 0 <= number < self.num_documents:
            raise IndexError(f"document {number} of {self.num_documents}")
        part = int(np.searchsorted(self._documents, number, side="right")) - 1
        at = number - int(self._documents[part])
        name = self._name(part, "offsets")
        with faults(f"{name}: "):
            start, stop = self._array(part, "offsets")[at : at + 2].read().result().tolist()
        tokens = int(self._begins[part + 1] - self._begins[part])
        if not 0 <= start < stop <= tokens:
            raise Fault(f"{name}: document {number} cannot be of tokens {start} to {stop}")
        start = np.array([start + self._begins[part]], np.int64)
        return self.read(start, stop - int(start[0] - self._begins[part]))[0]

    def _pieces(self, start: int, stop: int) -> list[tuple[int, int, int, int]]:
        """Return the pieces of a range: offset in the row, part, and its tokens `a` to `b`."""
        pieces, at = [], start
        number = int(np.searchsorted(self._begins, start, side="right")) - 1
        while at < stop:
            begin, end = int(self._begins[number]), int(self._begins[number + 1])
            if at < end:  # a part may have no tokens of this split
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
                # A complete store never changes.
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
    """Return whether `--data` names a store, complete or not, in a local or gs:// folder."""
    if source.startswith("gs://"):
        return not any(piece.strip().lower().endswith(SUFFIXES) for piece in source.split(","))
    folder = os.path.expanduser(source)
    return any(os.path.isfile(os.path.join(folder, name)) for name in (MANIFEST, PLAN))


def open_store(source: str | Folder) -> TokenStore:
    """Open the store in a folder.

    Raises:
      UsageError: there is none, or it is not complete; or see `Folder.check`.
      RunError: its manifest is damaged.
    """
    with of_flag("data"):
        folder = open_folder(source)
        folder.check()
    content = read_sealed(folder, MANIFEST)
    if content is None:
        if folder.read(PLAN, limit=_MANIFEST_BYTES) is None:
            raise UsageError(
                f"--data={folder.url} holds no token store: there is no {MANIFEST}; legal: the "
                "--output of recipes.prepare_data"
            )
        raise UsageError(f"--data={folder.url} is not complete: run prepare_data again")
    return TokenStore(folder, content)


def verify_part(folder: Folder, number: int, part: Part, tokens: np.dtype) -> None:
    """Check one part by reading all of it.

    Args:
      folder: folder of the store.
      number: number of the part.
      part: the part as its manifest describes it.
      tokens: dtype of the tokens.

    Raises:
      Fault: it is damaged.
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
                raise Fault(f"{what}: its checksum does not match")


def array_spec(folder: Folder, name: str, tokens: np.dtype, size: int) -> dict[str, Any]:
    """Return the tensorstore spec of a split's array; opening an array that differs from it fails.

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
        # By default a chunk of zeros is not stored and a missing chunk is read as zeros, so that a
        # lost file would go unnoticed.
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }


def part_name(number: int) -> str:
    """Return the name of a part's folder."""
    return f"parts/{number:05}"


def split_folder(folder: Folder, number: int, attempt: str, split: str) -> Folder:
    """Return the folder of a split's arrays."""
    return folder.child(f"{part_name(number)}/{attempt}/{split}")


def seal(content: dict[str, Any]) -> bytes:
    """Return the bytes of a manifest: its content and a checksum of the content."""
    sealed = {"kind": _KIND, "version": VERSION, "crc32": _crc32(content), "content": content}
    return (json.dumps(sealed) + "\n").encode()


def read_sealed(folder: Folder, name: str) -> dict[str, Any] | None:
    """Return the content of a manifest, or None if there is none.

    Raises:
      UsageError: it is of something else than a store, or of another version.
      RunError: it is damaged.
    """
    found = folder.read(name, limit=_MANIFEST_BYTES)
    if found is None:
        return None
    try:
        sealed = json.loads(found.data)
        if type(sealed) is dict and sealed.get("kind") != _KIND:
            raise UsageError(f"{folder.url}/{name} is not of a token store; legal: another folder")
        if sealed["version"] != VERSION:
            raise UsageError(
                f"{folder.url}: token store version {sealed['version']!r} is not {VERSION}, which "
                "is read here"
            )
        content = sealed["content"]
        if sealed["crc32"] == _crc32(content) and type(content) is dict:
            return content
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise RunError(f"{folder.url}/{name} is damaged: its checksum does not match")


def _crc32(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
