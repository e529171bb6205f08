"""Kimi's two files: the pattern, the order of merges, special tokens, and refused files."""

import base64
import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from rmt_tpu.data import load_saved, load_tokenizer
from rmt_tpu.data.tiktoken_file import library_tokenizer
from rmt_tpu.errors import UsageError

# Tokens of more than one byte. The rank of "ab" is below that of "bc", which is below that of
# "abc". "aaa" is a token in two ways, and "bcd" is only reached as a whole word.
PIECES = ["ab", "bc", "abc", "aa", "aaa", " a", "12", "東", "東京", "ing", "in", "'s", "\n\n"]
PIECES += ["bcd", "Ab", "  ", " 東", "x1", "123"]
RANKS = {bytes([byte]): byte for byte in range(256)}
# Some characters of these tokens have parts that are tokens, so that merges reach them.
for piece in PIECES:
    data = piece.encode()
    for part in (data[:2], data[:3], data[:4], data):
        RANKS.setdefault(part, len(RANKS))
FIRST = len(RANKS)
CONFIG = {
    "tokenizer_class": "TikTokenTokenizer",
    "bos_token": "[BOS]",
    "added_tokens_decoder": {
        str(FIRST): {"content": "[BOS]", "special": True},
        str(FIRST + 1): {"content": "[EOS]", "special": True},
        str(FIRST + 7): {"content": "<|tool|>", "special": False},
    },
}


def file_of(ranks) -> bytes:
    lines = [base64.b64encode(piece).decode() + f" {rank}\n" for piece, rank in ranks.items()]
    return "".join(lines).encode()


def write(folder, ranks=RANKS, config=CONFIG):
    (folder / "tiktoken.model").write_bytes(file_of(ranks))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write(tmp_path_factory.mktemp("kimi")))


def merged(word: bytes) -> list[int]:
    """The oracle: of adjacent pairs, the one of lowest rank is merged, the first of equals."""
    if word in RANKS:
        return [RANKS[word]]
    parts = [word[at : at + 1] for at in range(len(word))]
    while True:
        pairs = [(RANKS.get(parts[at] + parts[at + 1]), at) for at in range(len(parts) - 1)]
        pairs = [pair for pair in pairs if pair[0] is not None]
        if not pairs:
            return [RANKS[part] for part in parts]
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@settings(deadline=None)
@given(st.text("abc", max_size=12) | st.sampled_from(["bcd", "bcdd", "abcd"]))
def test_merges_follow_the_ranks(tokenizer, word):
    assert tokenizer.encode(word).tolist() == (merged(word.encode()) if word else [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("中文English混合", ["中文", "English", "混合"]),
        ("北京市 Pascal", ["北京市", " Pascal"]),
        (
            "It's HTTPServer, 12345!\n\n x",
            ["It's", " HTTPServer", ",", " ", "123", "45", "!\n\n", " x"],
        ),
        ("a   b\n  \nc  ", ["a", "  ", " b", "\n  \n", "c", "  "]),
        ("(hello) tab\tDon'T", ["(hello", ")", " tab", "\tDon'T"]),
    ],
)
def test_a_text_is_split_into_words(text, words):
    library = library_tokenizer(tokenizers, file_of(RANKS), json.dumps(CONFIG).encode())
    spans = [span for _, span in library.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[start:end] for start, end in spans] == words


def test_special_tokens_follow_the_ordinary_ones(tokenizer):
    assert tokenizer.vocab_size == FIRST + 256
    assert tokenizer.bos == tokenizer.token_id("[BOS]") == FIRST
    assert tokenizer.token_id("<|tool|>") == FIRST + 7
    assert tokenizer.token_name(FIRST + 2) == f"<|reserved_token_{FIRST + 2}|>"
    # The name of a special token in a text is ordinary text, and the file has no template.
    assert tokenizer.encode("[EOS]").max() < FIRST
    assert tokenizer.encode_special("a[EOS]").tolist() == [RANKS[b"a"], FIRST + 1]
    assert not tokenizer.template
    assert tokenizer.decode_bytes([FIRST, RANKS[b"abc"], FIRST + 7]) == b"abc<|tool|>"


@settings(deadline=None)
@given(st.text(max_size=30))
def test_a_text_is_the_text_of_its_tokens(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_run_folder_has_it_as_a_tokenizer_json(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    again = load_saved(tmp_path)
    assert again.fingerprint() == tokenizer.fingerprint()
    text = "東京 abc 1234's\n\n aaaa"
    assert again.encode(text).tolist() == tokenizer.encode(text).tolist()


@pytest.mark.slow
@settings(deadline=None, max_examples=2000)
@given(st.text(st.sampled_from("aAbBc '\n\t东京東1２.é́ǅʰ!"), max_size=40) | st.text(max_size=40))
def test_tokens_equal_those_of_tiktoken(tokenizer, text):
    """Compare with the tiktoken library, given the pattern that Moonshot AI published."""
    import tiktoken

    pattern = "|".join(
        [
            r"[\p{Han}]+",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
            r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
            r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ]
    )
    oracle = tiktoken.Encoding("kimi", pat_str=pattern, mergeable_ranks=RANKS, special_tokens={})
    assert tokenizer.encode(text).tolist() == oracle.encode_ordinary(text)


@pytest.mark.parametrize(
    ("ranks", "config", "message"),
    [
        (RANKS, None, "has tiktoken.model but no tokenizer_config.json; legal: both files"),
        (RANKS, CONFIG | {"tokenizer_class": "Other"}, "tokenizer_class 'Other'; legal: 'TikTok"),
        (RANKS, [], "tokenizer_config.json cannot be read (AttributeError"),
        (
            RANKS,
            CONFIG | {"added_tokens_decoder": {"3": {"content": "x"}}},
            "has the token id 3; legal",
        ),
        ({b"a": 0}, CONFIG, "has 1 tokens and lacks 255 of the 256 bytes; legal"),
        (RANKS | {b"zz": FIRST + 1}, CONFIG, "legal: a token for each byte, and the ranks 0, 1, 2"),
    ],
)
def test_what_is_no_tokenizer_is_refused(tmp_path, ranks, config, message):
    with pytest.raises(UsageError) as error:
        load_tokenizer(write(tmp_path, ranks, config))
    assert str(error.value).startswith(f"--tokenizer={str(tmp_path)!r}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_damaged_line_is_named(tmp_path):
    folder = write(tmp_path)
    with (tmp_path / "tiktoken.model").open("a") as file:
        file.write("!!! 3\n")
    with pytest.raises(UsageError, match=rf"line {FIRST + 1} of .* is b'!!! 3'; legal: a token in"):
        load_tokenizer(folder)
