"""The tokenizer of Kimi and Moonlight models, loaded from two files.

`tiktoken.model` has one line per token, with its bytes in base64 and its rank, which is its id.
Ranks also order merges. Of all adjacent pairs whose concatenation is a token, the pair whose token
has the lowest rank is merged first. `tokenizer_config.json` names the special tokens, whose ids
follow those of `tiktoken.model`.

The tokenizers library encodes with the same vocabulary, merges and pattern, so that the tokenizer
can be saved as a tokenizer.json.
"""

import base64
import json
from typing import Any

from rmt_tpu.data.tokenizer import Unusable, byte_names

RANKS_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"

_CLASS = "TikTokenTokenizer"
# Number of ids after the ordinary tokens. Ids without a name in the config are reserved.
_SPECIAL_TOKENS = 256
# This regular expression splits a text into pieces, and only bytes within one piece are merged. A
# piece is a run of Chinese characters, a word with an optional contraction, up to three digits,
# punctuation or white space.
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE, _AFTER = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        f"{_BEFORE}{_UPPER}*{_LOWER}+{_AFTER}",
        f"{_BEFORE}{_UPPER}+{_LOWER}*{_AFTER}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def library_tokenizer(tokenizers: Any, ranks_file: bytes, config_file: bytes | None) -> Any:
    """Return a `tokenizers.Tokenizer` that encodes as the model's own tokenizer does.

    Args:
      tokenizers: the module of the tokenizers library.
      ranks_file: the content of `tiktoken.model`.
      config_file: the content of `tokenizer_config.json`, or None if there is no such file.

    Raises:
      Unusable: a file is missing or damaged, or the config names another tokenizer class, whose
        pattern is unknown.
    """
    ranks = _ranks(ranks_file)
    added = _added_tokens(config_file, len(ranks))
    names = byte_names()
    spell = lambda piece: "".join(names[byte] for byte in piece)
    merges = [(spell(left), spell(right)) for left, right in _merges(ranks)]
    vocabulary = {spell(piece): rank for piece, rank in ranks.items()}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, ignore_merges=True))
    split, level = tokenizers.pre_tokenizers.Split, tokenizers.pre_tokenizers.ByteLevel
    library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            split(tokenizers.Regex(_PATTERN), behavior="isolated"),
            level(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_tokens(
        [tokenizers.AddedToken(name, special=special, normalized=False) for name, special in added]
    )
    return library


def _ranks(content: bytes) -> dict[bytes, int]:
    """Return a dict from the bytes of each token to its rank, in ascending order of rank."""
    ranks = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            piece, rank = line.split()
            ranks[base64.b64decode(piece, validate=True)] = int(rank)
        except ValueError:
            raise Unusable(
                f"line {number} of {RANKS_FILE} is {line[:40]!r}; "
                "legal: a token in base64, a space and its rank"
            ) from None
    ranks = dict(sorted(ranks.items(), key=lambda item: item[1]))
    missing = sum(bytes([byte]) not in ranks for byte in range(256))
    if missing or list(ranks.values()) != list(range(len(ranks))):
        raise Unusable(
            f"{RANKS_FILE} has {len(ranks)} tokens and lacks {missing} of the 256 bytes; "
            "legal: a token for each byte, and the ranks 0, 1, 2 and so on"
        )
    return ranks


def _added_tokens(content: bytes | None, first: int) -> list[tuple[str, bool]]:
    """Return the name of each id from `first` on, with True if it is a special token."""
    if content is None:
        raise Unusable(f"the folder has {RANKS_FILE} but no {CONFIG_FILE}; legal: both files")
    try:
        config = json.loads(content)
        kind = config.get("tokenizer_class")
        named = {
            int(token): (entry["content"], bool(entry.get("special", True)))
            for token, entry in config.get("added_tokens_decoder", {}).items()
        }
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise Unusable(f"{CONFIG_FILE} cannot be read ({error!r}); legal: a JSON object") from None
    if kind != _CLASS:
        raise Unusable(
            f"{CONFIG_FILE} has the tokenizer_class {kind!r}; legal: {_CLASS!r}, as in all folders "
            f"with {RANKS_FILE}"
        )
    ids = range(first, first + _SPECIAL_TOKENS)
    if outside := [token for token in named if token not in ids]:
        raise Unusable(
            f"added_tokens_decoder in {CONFIG_FILE} has the token id {outside[0]}; "
            f"legal: {ids[0]} to {ids[-1]}, the ids after those of {RANKS_FILE}"
        )
    return [named.get(token, (f"<|reserved_token_{token}|>", True)) for token in ids]


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return the pairs of tokens whose concatenation is a token, ordered by that token's rank."""
    pairs = []
    for piece in ranks:
        splits = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        splits = [(left, right) for left, right in splits if left in ranks and right in ranks]
        pairs += sorted(splits, key=lambda split: (ranks[split[0]], ranks[split[1]]))
    return pairs
