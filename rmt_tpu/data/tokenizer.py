"""Text to token ids and back: the bytes themselves, or a vocabulary of the tokenizers library."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int32, Integer

from rmt_tpu.errors import UsageError, unknown
from rmt_tpu.storage import Location, open_folder

FILE = "tokenizer.json"
GPT2_FILES = ("encoder.json", "vocab.bpe")

_BYTE = "byte"
_BYTE_FILE = {"kind": _BYTE}

Tokens = Integer[np.ndarray, " tokens"] | Sequence[int]


class Tokenizer(ABC):
    """Text to token ids and back.

    Attributes:
      name: what `load_tokenizer` makes it from.
      vocab_size: one more than the largest token id.
      bos: the token that starts a document. No text is encoded as it; it is decoded to nothing.
    """

    name: str
    vocab_size: int
    bos: int

    @abstractmethod
    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """The tokens of a text, without a BOS. Names of special tokens are text like any other.

        Raises:
          UsageError: the text has half a surrogate pair, which is no character.
        """

    def encode_all(self, texts: list[str]) -> Iterator[Int32[np.ndarray, " tokens"]]:
        """`encode` of each text, in order."""
        return map(self.encode, texts)

    @abstractmethod
    def decode_bytes(self, tokens: Tokens) -> bytes:
        """The UTF-8 of some tokens of a text, which may start or end within a character.

        The bytes of parts of a text add up to those of the whole, so a stream of tokens can be
        shown as it comes, through an incremental decoder.

        Raises:
          UsageError: a token is not of this vocabulary.
        """

    def decode(self, tokens: Tokens) -> str:
        """The text of the tokens; what is not UTF-8 becomes U+FFFD.

        Raises:
          UsageError: a token is not of this vocabulary.
        """
        return self.decode_bytes(tokens).decode("utf-8", errors="replace")

    @abstractmethod
    def fingerprint(self) -> str:
        """Hexadecimal, equal for tokenizers that encode alike, wherever they were loaded from."""

    @abstractmethod
    def to_json(self) -> str:
        """All that makes it, as text in JSON."""

    def save(self, folder: Location) -> None:
        """Writes `tokenizer.json`, all that `load_saved` needs.

        Raises:
          Fault: it cannot be written.
        """
        open_folder(folder).write(FILE, self.to_json().encode())

    def _checked(self, tokens: Tokens) -> Integer[np.ndarray, " tokens"]:
        array = np.asarray(tokens, np.int64)
        if (foreign := array[(array < 0) | (array >= self.vocab_size)]).size:
            raise UsageError(
                f"token {foreign[0]} is not of --tokenizer={self.name}; "
                f"legal: 0 to {self.vocab_size - 1}"
            )
        return array


class ByteTokenizer(Tokenizer):
    """Tokens 0 to 255 are the bytes of UTF-8, and 256 is BOS."""

    name = _BYTE
    vocab_size = 257
    bos = 256

    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        return np.frombuffer(utf8(text), np.uint8).astype(np.int32)

    def decode_bytes(self, tokens: Tokens) -> bytes:
        array = self._checked(tokens)
        return array[array != self.bos].astype(np.uint8).tobytes()

    def fingerprint(self) -> str:
        return digest(_BYTE_FILE)

    def to_json(self) -> str:
        return json.dumps(_BYTE_FILE) + "\n"


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that `--tokenizer` names.

    Args:
      spec: `byte`; or a folder with GPT-2's encoder.json and vocab.bpe, or with a tokenizer.json
        (this one also on gs://); or a file like tokenizer.json.

    Raises:
      UsageError: there is no such tokenizer, its files are damaged or have no BOS, or the
        tokenizers library is needed and not installed.
    """
    if spec == _BYTE:
        return ByteTokenizer()
    if spec.startswith("gs://"):
        return load_saved(spec)
    path = Path(spec).expanduser()
    if path.is_file():
        return _load_file(spec, path)
    if path.is_dir():
        return _load_folder(spec, path)
    legal = [_BYTE, f"a folder with {' and '.join(GPT2_FILES)}", f"the path of a {FILE}"]
    raise UsageError(unknown("--tokenizer", spec, legal))


def load_saved(folder: Location) -> Tokenizer:
    """The tokenizer that `save` wrote into a folder.

    Raises:
      UsageError: there is none, or its file is damaged.
    """
    folder = open_folder(folder)
    found = folder.read(FILE)
    if found is None:
        raise UsageError(f"{folder.url!r} has no {FILE}; legal: the folder of a run")
    return _from_json(f"{folder.url}/{FILE}", found.data)


def utf8(text: str) -> bytes:
    """The bytes of a text.

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
    """Hexadecimal hash of a JSON value."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def _load_folder(spec: str, folder: Path) -> Tokenizer:
    from rmt_tpu.data.bpe import BpeTokenizer

    if all((folder / name).is_file() for name in GPT2_FILES):
        return BpeTokenizer.from_gpt2_files(spec, *(folder / name for name in GPT2_FILES))
    if (folder / FILE).is_file():
        return _load_file(spec, folder / FILE)
    raise UsageError(
        f"--tokenizer={spec!r} is a folder without a tokenizer; "
        f"legal: one with {' and '.join(GPT2_FILES)}, or with {FILE}"
    )


def _load_file(spec: str, path: Path) -> Tokenizer:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _unreadable(spec, error) from None
    return _from_json(spec, content)


def _from_json(spec: str, content: bytes) -> Tokenizer:
    from rmt_tpu.data.bpe import BpeTokenizer

    try:
        text = content.decode("utf-8")
        if json.loads(text) == _BYTE_FILE:
            return ByteTokenizer()
    except ValueError as error:
        raise _unreadable(spec, error) from None
    return BpeTokenizer.from_json(spec, text)


def _unreadable(spec: str, error: Exception) -> UsageError:
    return UsageError(f"--tokenizer={spec!r} cannot be read ({error}); legal: a {FILE}")
