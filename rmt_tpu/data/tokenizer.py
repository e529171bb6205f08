"""Tokenizers, which map text to token ids and back: their interface, and one of bytes."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int32, Integer

from rmt_tpu.errors import UsageError
from rmt_tpu.storage import Location, open_folder

FILE = "tokenizer.json"

BYTE = "byte"
BYTE_FILE = {"kind": BYTE}

Tokens = Integer[np.ndarray, " tokens"] | Sequence[int]


class Unusable(Exception):
    """An error in a tokenizer's files; the caller adds where they come from."""


class Tokenizer(ABC):
    """A map from text to token ids and back.

    Attributes:
      name: the spec from which `load_tokenizer` makes it.
      vocab_size: one more than the largest token id.
      bos: the token that starts a document. No text is encoded as it, and it is decoded to nothing.
      ends: tokens, any of which ends a text: BOS, as in training here, unless a folder of the hub
        says otherwise.
      starts: whether BOS precedes each text, as in training here; a folder of the hub may say
        otherwise.
      gaps: ids below `vocab_size` that no token has.
      template: whether the tokenizer's own file puts BOS before a text.
    """

    name: str
    vocab_size: int
    bos: int
    ends: tuple[int, ...]
    starts: bool = True
    template: bool = True
    gaps: tuple[int, ...] = ()

    def begun(self, tokens: Tokens) -> Int32[np.ndarray, " read"]:
        """Return a text's tokens as a model reads them, after BOS if `starts` or if it is empty."""
        before = [self.bos] if self.starts or not len(tokens) else []
        return np.array([*before, *tokens], np.int32)

    def named(self, name: str) -> int | None:
        """Return the token with a name in `tokenizer.json`, if tokens have names, else None."""
        del name
        return None

    def spelled(self, token: int) -> str | None:
        """Return the name of a token in `tokenizer.json`, if tokens have names, else None."""
        del token
        return None

    @abstractmethod
    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """Return the tokens of a text, without a BOS. Names of special tokens are ordinary text.

        Raises:
          UsageError: the text has half a surrogate pair, which is no character.
        """

    def encode_all(self, texts: list[str]) -> Iterator[Int32[np.ndarray, " tokens"]]:
        """Encode each text, in order."""
        return map(self.encode, texts)

    @abstractmethod
    def decode_bytes(self, tokens: Tokens) -> bytes:
        """Return the UTF-8 of some tokens of a text, which may start or end within a character.

        The bytes of parts of a text add up to those of the whole, so a stream of tokens can be
        shown as it comes, through an incremental decoder.

        Raises:
          UsageError: a token is not in this vocabulary.
        """

    def decode(self, tokens: Tokens) -> str:
        """Return the text of the tokens; bytes that are not UTF-8 become U+FFFD.

        Raises:
          UsageError: a token is not in this vocabulary.
        """
        return self.decode_bytes(tokens).decode("utf-8", errors="replace")

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a hexadecimal hash, equal for tokenizers that encode alike, from any source."""

    @abstractmethod
    def to_json(self, *, template: bool = False) -> str:
        """Return the whole tokenizer as JSON text.

        Args:
          template: whether other programs should put BOS before each text, if `tokenizer.json` can
            say so.
        """

    def save(self, folder: Location, *, template: bool = False) -> None:
        """Write `tokenizer.json`, which has all that `load_saved` needs.

        Args:
          template: see `to_json`.

        Raises:
          Fault: it cannot be written.
        """
        open_folder(folder).write(FILE, self.to_json(template=template).encode())

    def _checked(self, tokens: Tokens) -> Integer[np.ndarray, " tokens"]:
        array = np.asarray(tokens, np.int64)
        if (foreign := array[(array < 0) | (array >= self.vocab_size)]).size:
            raise UsageError(
                f"token {foreign[0]} is not of --tokenizer={self.name}; "
                f"legal: 0 to {self.vocab_size - 1}"
            )
        return array


class ByteTokenizer(Tokenizer):
    """A tokenizer whose tokens 0 to 255 are the bytes of UTF-8, and 256 is BOS."""

    name = BYTE
    vocab_size = 257
    bos = 256
    ends = (256,)

    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        return np.frombuffer(utf8(text), np.uint8).astype(np.int32)

    def decode_bytes(self, tokens: Tokens) -> bytes:
        array = self._checked(tokens)
        return array[array != self.bos].astype(np.uint8).tobytes()

    def fingerprint(self) -> str:
        return digest(BYTE_FILE)

    def to_json(self, *, template: bool = False) -> str:
        return json.dumps(BYTE_FILE) + "\n"


def utf8(text: str) -> bytes:
    """Return the UTF-8 bytes of a text.

    Raises:
      UsageError: the text has half a surrogate pair, which is no character.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise UsageError(
            f"the text has half a surrogate pair, {half!a}, at character {error.start}; "
            "legal: Unicode text"
        ) from None


def digest(value: object) -> str:
    """Return a hexadecimal hash of a JSON value."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()
