"""Tokenizers from the tokenizers library, loaded from a tokenizer.json or another format."""

import json
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from rmt_tpu.data import tiktoken_file
from rmt_tpu.data.tokenizer import Tokenizer, Tokens, Unusable, byte_names, digest, utf8

# Names of BOS (the token that starts a document) in common vocabularies, the most common first.
# They are used if the tokenizer's file does not state which token precedes a text.
BOS_NAMES = ("<|endoftext|>", "<s>", "<|begin_of_text|>", "[BOS]", "<bos>")

# Maximum number of token ids. The model has an embedding for each id, and the tokenizers library
# silently reduces ids modulo 2^32.
_MOST_TOKENS = 2**24

_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
# The tokens of this text are part of a tokenizer's fingerprint. They differ between tokenizers with
# the same vocabulary, but different normalizers or pre-tokenizers.
_PROBE = "Hello  World's 1234 x_y,\n\té 東京 ﬁ"
# Characters after which a text can be encoded as the continuation of another one. The first one is
# used that does not share a token with the text.
_BEFORE = "\n", ".", "a", "0", "("
# Number of texts to encode at a time. It keeps all cores busy, and two copies of the tokens fit
# into memory.
_CHUNK = 256


class BpeTokenizer(Tokenizer):
    """A tokenizer of the tokenizers library, loaded from a tokenizer.json or another format."""

    def __init__(self, name: str, library: Any):
        """Wrap a tokenizer from the library, and make its BOS a special token.

        Args:
          name: the value of --tokenizer.
          library: a `tokenizers.Tokenizer`, which is modified.

        Raises:
          Unusable: the tokenizer does not put a token before texts and its vocabulary has none of
            `BOS_NAMES`, a token id is negative or too large, words end with a suffix, or BOS stands
            for unknown characters.
        """
        from tokenizers import AddedToken

        self.name = name
        # Many tokenizer.json files request padding, or truncation, which would silently shorten
        # documents.
        library.no_truncation()
        library.no_padding()
        there = (n for n in BOS_NAMES if library.token_to_id(n) is not None)
        before = _bos_of_template(library)
        self.template = before is not None
        self._bos_name = before or next(there, "")
        if not self._bos_name:
            raise Unusable(
                "the vocabulary has no token that starts a document; "
                f"legal: a vocabulary with one of {', '.join(BOS_NAMES)}"
            )
        library.add_special_tokens([AddedToken(self._bos_name, special=True, normalized=False)])
        # Encode the name of a special token in a text as ordinary text.
        library.encode_special_tokens = True
        self.bos = library.token_to_id(self._bos_name)
        self.ends = (self.bos,)
        # `vocab_size` may exceed the number of tokens, because some ids may belong to no token.
        vocabulary = library.get_vocab(with_added_tokens=True)
        _check_ids(vocabulary)
        self.vocab_size = 1 + max(vocabulary.values())
        there = np.zeros(self.vocab_size, bool)
        there[list(vocabulary.values())] = True
        self.gaps = tuple(np.flatnonzero(~there).tolist())
        self._library = library
        self._check_model()

    @classmethod
    def from_gpt2_files(cls, name: str, encoder: Path, merges: Path) -> "BpeTokenizer":
        """Create a tokenizer from GPT-2's `encoder.json` and `vocab.bpe`.

        Raises:
          Unusable: a file is damaged, or the library is not installed.
        """
        tokenizers = _import()
        try:
            library = tokenizers.Tokenizer(
                tokenizers.models.BPE.from_file(str(encoder), str(merges))
            )
        except Exception as error:  # The library raises no narrower class of errors.
            raise _damaged(error) from None
        # Check the ids in the file, because the library has already reduced them modulo 2^32.
        _check_ids(json.loads(encoder.read_text(encoding="utf-8")))
        library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = tokenizers.decoders.ByteLevel()
        library.add_special_tokens([BOS_NAMES[0]])
        return cls(name, library)

    @classmethod
    def from_json(cls, name: str, text: str) -> "BpeTokenizer":
        """Create a tokenizer from the content of a `tokenizer.json`.

        Raises:
          Unusable: the content is damaged or has no BOS, or the library is not installed.
        """
        tokenizers = _import()
        try:
            library = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # The library raises no narrower class of errors.
            raise _damaged(error) from None
        return cls(name, library)

    @classmethod
    def from_tiktoken_files(cls, name: str, ranks: bytes, config: bytes | None) -> "BpeTokenizer":
        """Create a tokenizer from the content of `tiktoken.model` and `tokenizer_config.json`.

        Raises:
          Unusable: a file is missing or damaged, the config names an unknown tokenizer class, or
            the library is not installed.
        """
        return cls(name, tiktoken_file.library_tokenizer(_import(), ranks, config))

    def token_id(self, name: str) -> int | None:
        """Return the token that has this name, or None if there is none."""
        return self._library.token_to_id(name)

    def token_name(self, token: int) -> str | None:
        """Return the name of a token, or None if it is not in the vocabulary."""
        return self._library.id_to_token(token)

    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """Return the tokens of a text without BOS."""
        return next(self.encode_all([text]))

    def encode_special(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """Return the tokens of a text; the name of a special token is encoded as that token.

        BOS is not added, but it is among the tokens if its name is in the text.
        """
        utf8(text)
        ids = self._special_library.encode(text, add_special_tokens=False).ids
        return np.array(ids, np.int32)

    def encode_after(self, text: str, *, special: bool) -> Int32[np.ndarray, " tokens"]:
        """Return the tokens of a text that continues another one, so that their texts join.

        If the tokenizer puts a space before a text, the text is encoded after another character,
        whose tokens are then removed.
        """
        utf8(text)
        library = self._special_library if special else self._library
        for before in _BEFORE if text and self._puts_space else ():
            encoding = library.encode(before + text, add_special_tokens=False)
            count = sum(begin < len(before) for begin, _ in encoding.offsets)
            tokens = np.array(encoding.ids[count:], np.int32)
            divides = all(end <= len(before) for _, end in encoding.offsets[:count])
            joins = text[0].isspace() or not self.decode_bytes(tokens[:1]).startswith(b" ")
            # Without `special`, the name of BOS in a text is no BOS; `encode` sees to that.
            if divides and joins and (special or self.bos not in tokens):
                return tokens
        return super().encode_after(text, special=special)

    def encode_all(self, texts: list[str]) -> Iterator[Int32[np.ndarray, " tokens"]]:
        """Encode texts in parallel on all cores, and yield the tokens of each text in order."""
        for start in range(0, len(texts), _CHUNK):
            chunk = texts[start : start + _CHUNK]
            for text in chunk:
                utf8(text)
            for text, tokens in zip(chunk, self._encode(chunk), strict=True):
                yield self._encode_without_bos(text) if self.bos in tokens else tokens

    def decode_bytes(self, tokens: Tokens) -> bytes:
        """Return the concatenated bytes that the tokens represent."""
        return b"".join([self._pieces[token] for token in self._checked(tokens).tolist()])

    def decode(self, tokens: Tokens) -> str:
        """Return the text of tokens.

        If token names spell bytes, the bytes are decoded as UTF-8. Otherwise the decoder of the
        tokenizers library decodes the tokens.
        """
        if self._is_byte_level:
            return super().decode(tokens)
        # Decode with the library, whose decoder may strip a space at the start of a text.
        return self._library.decode(self._checked(tokens).tolist(), skip_special_tokens=True)

    def fingerprint(self) -> str:
        """Return a hash of the vocabulary, merges, added tokens, BOS and a sample encoding."""
        model = self._json["model"]
        # Some versions of the library write a merge as "a b", others as ["a", "b"].
        merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges", [])]
        added = self._library.get_added_tokens_decoder()
        added = {token: added[token].content for token in added}
        return digest([model["vocab"], merges, added, self.bos, self.encode(_PROBE).tolist()])

    def to_json(self, *, template: bool = False) -> str:
        """Return the tokenizer in the JSON format of the tokenizers library.

        Args:
          template: whether to append a post-processor that puts BOS before each text.
        """
        if not template or self.template:
            return self._library.to_str()
        processors = _import().processors
        library = _import().Tokenizer.from_str(self._library.to_str())
        bos_ids = [(self._bos_name, self.bos)]
        pair = f"{self._bos_name} $A {self._bos_name} $B"
        single = f"{self._bos_name} $A"
        puts = processors.TemplateProcessing(single=single, pair=pair, special_tokens=bos_ids)
        others = [] if library.post_processor is None else [library.post_processor]
        library.post_processor = processors.Sequence([*others, puts])
        return library.to_str()

    def _check_model(self):
        """Raise Unusable if tokens have no text of their own, or if a text may contain BOS."""
        model = self._library.model
        if suffix := getattr(model, "end_of_word_suffix", None):
            raise Unusable(
                f"its words end with {suffix!r}, and the spaces between words belong to no token; "
                "legal: a tokenizer whose tokens contain the spaces"
            )
        unknown, by_bytes = (getattr(model, n, None) for n in ("unk_token", "byte_fallback"))
        if unknown == self._bos_name and not (by_bytes or self._is_byte_level):
            raise Unusable(
                f"{unknown}, which starts a document, also stands for unknown characters; legal: "
                "another token for these, or a vocabulary with a token for each byte"
            )

    def _encode(self, texts: list[str]) -> list[Int32[np.ndarray, " _"]]:
        encodings = self._library.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def _encode_without_bos(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """Encode a text in which the name of BOS is ordinary text."""
        first, rest = map(re.escape, (self._bos_name[0], self._bos_name[1:]))
        parts = re.split(f"(?<={first})(?={rest})", text)
        return np.concatenate(self._encode(parts))

    @cached_property
    def _special_library(self) -> Any:
        """A copy of the library's tokenizer that encodes the names of special tokens as tokens."""
        copy = _import().Tokenizer.from_str(self._library.to_str())
        copy.encode_special_tokens = False
        return copy

    @cached_property
    def _json(self) -> dict[str, Any]:
        return json.loads(self._library.to_str())

    @cached_property
    def _puts_space(self) -> bool:
        """Whether the tokenizer puts a space before a text, as SentencePiece does."""
        return self.decode_bytes(self.encode("a")).startswith(b" ")

    @cached_property
    def _is_byte_level(self) -> bool:
        """Whether token names are spelled in GPT-2's alphabet, which has a letter for each byte."""
        parts = [self._json[part] or {} for part in ("decoder", "pre_tokenizer", "normalizer")]
        nested = [
            inner
            for part in parts
            for key in ("decoders", "pretokenizers", "normalizers")
            for inner in part.get(key, [])
        ]
        return any(part.get("type") == "ByteLevel" for part in parts + nested)

    @cached_property
    def _pieces(self) -> list[bytes]:
        """The bytes that each token represents, in the order of token ids."""
        pieces = [b""] * self.vocab_size
        spell = self._byte_level_piece if self._is_byte_level else self._other_piece
        for name, token in self._library.get_vocab(with_added_tokens=True).items():
            pieces[token] = spell(name, token)
        for token, added in self._library.get_added_tokens_decoder().items():
            if added.special:
                pieces[token] = b""
            elif self._is_byte_level:
                pieces[token] = added.content.encode()
        return pieces

    def _byte_level_piece(self, name: str, token: int) -> bytes:
        try:
            return bytes([_BYTE_OF[letter] for letter in name])
        except KeyError:  # The name has a character outside the alphabet.
            return name.encode()

    def _other_piece(self, name: str, token: int) -> bytes:
        """Return the bytes that a token adds to the text before it.

        The token is decoded after another token, because the library's decoder may strip a space at
        the start of a text.
        """
        if self._json["model"].get("byte_fallback") and (byte := _FALLBACK.fullmatch(name)):
            return bytes([int(byte[1], 16)])
        before, length = self._prefix
        return self._library.decode([*before, token])[length:].encode()

    @cached_property
    def _prefix(self) -> tuple[list[int], int]:
        """An alphanumeric token that is decoded before another token, and the length of its text.

        The token is a list of one id, or an empty list if the vocabulary has no such token.
        """
        vocabulary = self._library.get_vocab(with_added_tokens=False)
        plain = sorted(name for name in vocabulary if name.isascii() and name.isalnum())
        before = [vocabulary[name] for name in plain[:1]]
        return before, len(self._library.decode(before))


def _import() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise Unusable("the tokenizers library is needed: pip install 'rmt_tpu[data]'") from None
    return tokenizers


def _damaged(error: Exception) -> Unusable:
    return Unusable(
        f"the tokenizer cannot be loaded ({' '.join(str(error).split())}); legal: undamaged files"
    )


def _bos_of_template(library: Any) -> str | None:
    """Return the name of the token that the library puts before a text, if it puts exactly one."""
    ids, bare = (library.encode("a", add_special_tokens=added).ids for added in (True, False))
    more = len(ids) - len(bare)
    lead = next((n for n in range(more + 1) if ids[n : n + len(bare)] == bare), 0)
    return library.id_to_token(ids[0]) if lead == 1 else None


def _check_ids(vocabulary: dict[str, int]) -> None:
    for name, token in vocabulary.items():
        if not 0 <= token < _MOST_TOKENS:
            raise Unusable(
                f"the token {name!r} has the id {token}, which is out of range; "
                f"legal: 0 to {_MOST_TOKENS - 1}"
            )


# This is GPT-2's alphabet, which has a letter for each byte.
_BYTE_OF = {letter: byte for byte, letter in enumerate(byte_names()[:256])}
