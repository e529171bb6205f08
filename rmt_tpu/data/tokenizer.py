"""The interface of tokenizers, which map text to token ids and back, and a byte tokenizer."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32, Integer

from rmt_tpu.errors import UsageError
from rmt_tpu.storage import Location, open_folder

FILE = "tokenizer.json"

BYTE = "byte"
BYTE_FILE = {"kind": BYTE}

Tokens = Integer[np.ndarray, " tokens"] | Sequence[int]


class Unusable(Exception):
    """An error in a tokenizer's files; the caller adds their location to the message."""


class Tokenizer(ABC):
    """A map from text to token ids and back.

    Attributes:
      name: the `spec` from which `load_tokenizer` loads the tokenizer.
      vocab_size: one more than the largest token id.
      bos: the token that starts a document. No text is encoded to this token, and it is decoded to
        an empty text.
      ends: the end tokens, each of which ends a text. By default, this is only BOS, which separates
        documents in training. A Hugging Face model may have other end tokens.
      starts: whether BOS is put before each text, as in training; a Hugging Face model may differ.
      gaps: ids below `vocab_size` that belong to no token.
      template: whether the tokenizer's file itself states that BOS is put before a text.
    """

    name: str
    vocab_size: int
    bos: int
    ends: tuple[int, ...]
    starts: bool = True
    template: bool = True
    gaps: tuple[int, ...] = ()

    def with_bos(self, tokens: Tokens) -> Int32[np.ndarray, " read"]:
        """Return the tokens of a text, preceded by BOS if `starts` is True or the text is empty."""
        before = [self.bos] if self.starts or not len(tokens) else []
        return np.array([*before, *tokens], np.int32)

    def token_id(self, name: str) -> int | None:
        """Return the token that has this name in `tokenizer.json`, or None if there is none."""
        del name
        return None

    def token_name(self, token: int) -> str | None:
        """Return the name of a token in `tokenizer.json`, or None if the token has no name."""
        del token
        return None

    @abstractmethod
    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """Return the tokens of a text, without BOS; names of special tokens count as ordinary text.

        Raises:
          UsageError: the text has an unpaired surrogate, which is not a character.
        """

    def encode_special(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """Return the tokens of a text; the name of a special token is encoded as that token.

        BOS is not added. A tokenizer without names of special tokens encodes the text as `encode`
        does.

        Raises:
          UsageError: the text has an unpaired surrogate, which is not a character.
        """
        return self.encode(text)

    def encode_after(self, text: str, *, special: bool) -> Int32[np.ndarray, " tokens"]:
        """Return the tokens of a text that continues another one, so that their texts join.

        Some tokenizers put a space before each text that they encode; here there is none.

        Args:
          text: the text.
          special: whether the name of a special token is encoded as that token.

        Raises:
          UsageError: the text has an unpaired surrogate, which is not a character.
        """
        return self.encode_special(text) if special else self.encode(text)

    def encode_all(self, texts: list[str]) -> Iterator[Int32[np.ndarray, " tokens"]]:
        """Yield the tokens of each text, in order."""
        return map(self.encode, texts)

    @abstractmethod
    def decode_bytes(self, tokens: Tokens) -> bytes:
        """Return the UTF-8 bytes of tokens, which may start or end within a character.

        The bytes of a text are the concatenated bytes of its tokens. A stream of tokens can
        therefore be displayed with an incremental UTF-8 decoder.

        Raises:
          UsageError: a token is not in the vocabulary.
        """

    def decode(self, tokens: Tokens) -> str:
        """Return the text of tokens; bytes that are not valid UTF-8 become U+FFFD.

        Raises:
          UsageError: a token is not in the vocabulary.
        """
        return self.decode_bytes(tokens).decode("utf-8", errors="replace")

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a hexadecimal hash that is equal for tokenizers that encode text identically."""

    @abstractmethod
    def to_json(self, *, template: bool = False) -> str:
        """Return the complete tokenizer as JSON text.

        Args:
          template: whether the JSON tells other programs to put BOS before each text, if the format
            allows this.
        """

    def save(self, folder: Location, *, template: bool = False) -> None:
        """Write `tokenizer.json`, from which `load_saved` loads the tokenizer.

        Args:
          folder: the folder to write to.
          template: see `to_json`.

        Raises:
          Fault: the file cannot be written.
        """
        open_folder(folder).write(FILE, self.to_json(template=template).encode())

    def _checked(self, tokens: Tokens) -> Integer[np.ndarray, " tokens"]:
        array = np.asarray(tokens, np.int64)
        if (foreign := array[(array < 0) | (array >= self.vocab_size)]).size:
            raise UsageError(
                f"token {foreign[0]} is not in --tokenizer={self.name}; "
                f"legal: 0 to {self.vocab_size - 1}"
            )
        return array


class ByteTokenizer(Tokenizer):
    """A tokenizer whose tokens 0 to 255 are the bytes of UTF-8 text; token 256 is BOS."""

    name = BYTE
    vocab_size = 257
    bos = 256
    ends = (256,)

    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """Return the UTF-8 bytes of a text as tokens."""
        return np.frombuffer(utf8(text), np.uint8).astype(np.int32)

    def decode_bytes(self, tokens: Tokens) -> bytes:
        """Return the bytes of tokens; BOS adds no bytes."""
        array = self._checked(tokens)
        return array[array != self.bos].astype(np.uint8).tobytes()

    def fingerprint(self) -> str:
        """Return the hash of the constant that identifies this tokenizer."""
        return digest(BYTE_FILE)

    def to_json(self, *, template: bool = False) -> str:
        """Return the constant JSON that identifies this tokenizer.

        Args:
          template: whether to return the tokenizer in the format of the tokenizers library instead,
            for other programs. This form puts BOS before each text.
        """
        if not template:
            return json.dumps(BYTE_FILE) + "\n"
        return json.dumps(byte_library_file(), indent=2, ensure_ascii=False) + "\n"


def byte_names() -> list[str]:
    """Return the names of a byte tokenizer's tokens in other programs.

    Each byte is named by one character, as in GPT-2's vocabulary. The name of a printable Latin-1
    byte is the character itself. The names of the other bytes are consecutive characters from
    U+0100 onwards.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    names = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    return [*names, "<|endoftext|>"]


def byte_library_file() -> dict[str, Any]:
    """Return the content of a tokenizer.json that makes other programs use the bytes as tokens.

    It is a BPE tokenizer without merges, which puts BOS before each text.
    """
    bos, names = ByteTokenizer.bos, byte_names()
    name = names[bos]
    level = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    text = [{"Sequence": {"id": "A", "type_id": 0}}]
    before = [{"SpecialToken": {"id": name, "type_id": 0}}]
    special = {"id": name, "ids": [bos], "tokens": [name]}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": bos, "content": name, **flags, "special": True}],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", **level},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": before + text,
            "pair": before + text + [{"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {name: special},
        },
        "decoder": {"type": "ByteLevel", **level},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {name: token for token, name in enumerate(names)},
            "merges": [],
        },
    }


def utf8(text: str) -> bytes:
    """Return the UTF-8 bytes of a text.

    Raises:
      UsageError: the text has an unpaired surrogate, which is not a character.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise UsageError(
            f"the text has an unpaired surrogate, {half!a}, at character {error.start}; "
            "legal: Unicode text"
        ) from None


def digest(value: object) -> str:
    """Return a hexadecimal hash of a JSON value."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()
