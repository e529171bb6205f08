"""Bytes, GPT-2's byte-level vocabulary and other tokenizer.json files."""

import codecs
import json
import sys

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from rmt_tpu.data import ByteTokenizer, load_saved, load_tokenizer
from rmt_tpu.data.bpe import BpeTokenizer
from rmt_tpu.data.marked import Marked, Piece, encode_all, have_loss, without_marks
from rmt_tpu.data.tokenizer import Unusable
from rmt_tpu.errors import UsageError

END = "<|endoftext|>"
TEXTS = ["", "Hello world", " a\r\n\tb ", "naïve 東京 👩‍👩‍👧", "\x00\x7f\xad", f"a{END}b"]


def byte_level():
    """A small vocabulary of GPT-2's kind."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(["Hello world, hello worlds", "naïve naïve 東京 東京"] * 9, trainer)
    return library


def sentence_pieces():
    """A small vocabulary of Llama's kind: U+2581 for a space, and bytes for unknown characters."""
    names = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += ["▁", "a", "b", "▁a", "▁ab", "ab", "<", "s", ">"]
    merges = [("▁", "a"), ("▁a", "b"), ("a", "b")]
    library = tokenizers.Tokenizer(
        models.BPE(
            {name: token for token, name in enumerate(names)},
            merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True,
        )
    )  # fmt: skip
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        + [decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<unk>", "<s>"])
    return library


TRAINED = ByteTokenizer(), BpeTokenizer("trained", byte_level())


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A folder with encoder.json and vocab.bpe."""
    folder = tmp_path_factory.mktemp("gpt2")
    model = json.loads(byte_level().to_str())["model"]
    (folder / "encoder.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    merges = "".join(" ".join(merge) + "\n" for merge in model["merges"])
    (folder / "vocab.bpe").write_text("#version: 0.2\n" + merges, encoding="utf-8")
    return str(folder)


def saved(folder, library) -> str:
    path = folder / "tokenizer.json"
    path.write_text(library.to_str(), encoding="utf-8")
    return str(path)


def refusal(call, *arguments) -> str:
    with pytest.raises(UsageError) as error:
        call(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def streamed(tokenizer, tokens) -> str:
    decoder = codecs.getincrementaldecoder("utf-8")()
    return "".join(
        decoder.decode(tokenizer.decode_bytes(tokens[i : i + 1])) for i in range(len(tokens))
    )


def test_bytes_are_the_tokens():
    tokenizer = load_tokenizer("byte")
    tokens = tokenizer.encode("aé")
    assert (tokens.tolist(), tokens.dtype) == ([97, 0xC3, 0xA9], np.int32)
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.bos) == ("byte", 257, 256)
    assert tokenizer.decode([256, 97, 0xC3, 256, 0xA9]) == "aé"
    assert tokenizer.decode(np.array([97, 0xC3], np.int32)) == "a\ufffd"


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.text())
def test_any_text_comes_back(text):
    for tokenizer in TRAINED:
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text == streamed(tokenizer, tokens)
        assert tokenizer.bos not in tokens
        assert all(0 <= token < tokenizer.vocab_size for token in tokens)


def test_gpt2_files_are_what_the_vocabulary_was_trained_as(gpt2):
    tokenizer = load_tokenizer(gpt2)
    library = byte_level()
    assert (tokenizer.name, tokenizer.vocab_size) == (gpt2, library.get_vocab_size())
    assert tokenizer.bos == library.token_to_id(END)
    for text in TEXTS[:-1]:
        assert tokenizer.encode(text).tolist() == library.encode(text).ids
    assert tokenizer.encode("Hello world").size < len("Hello world") / 2


def test_all_texts_at_once_are_each_text(gpt2):
    tokenizer = load_tokenizer(gpt2)
    texts = TEXTS * 50  # more than are encoded at a time
    assert [t.tolist() for t in tokenizer.encode_all(texts)] == [
        tokenizer.encode(text).tolist() for text in texts
    ]


def test_characters_of_several_tokens_have_exact_bytes(gpt2):
    tokenizer = load_tokenizer(gpt2)
    tokens = tokenizer.encode("👩")
    assert len(tokens) > 1
    assert tokenizer.decode(tokens[:1]) == "\ufffd"
    assert tokenizer.decode_bytes(tokens[:1])[:1] == b"\xf0"
    assert streamed(tokenizer, tokens) == "👩"


def test_the_name_of_a_special_token_is_text(gpt2):
    tokenizer = load_tokenizer(gpt2)
    tokens = tokenizer.encode(f"a{END}b")
    assert tokenizer.bos not in tokens
    assert tokenizer.decode(tokens) == f"a{END}b"
    assert tokenizer.decode([tokenizer.bos, *tokens.tolist(), tokenizer.bos]) == f"a{END}b"


def test_a_model_that_spells_its_bos_as_a_piece_still_encodes_it_as_text(tmp_path):
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("a", -1.0), ("<", -2.0), ("s", -2.0), (">", -2.0)]
    library = tokenizers.Tokenizer(models.Unigram(pieces, 0, False))
    library.decoder = decoders.Fuse()
    tokenizer = load_tokenizer(saved(tmp_path, library))
    assert tokenizer.bos == 1
    assert tokenizer.encode("a<s><s>a").tolist() == [2, 3, 4, 5, 3, 4, 5, 2]
    assert tokenizer.decode([1, 2, 3, 4, 5]) == "a<s>"


def test_sentence_pieces_stream_with_their_spaces_and_bytes(tmp_path):
    tokenizer = load_tokenizer(saved(tmp_path, sentence_pieces()))
    tokens = tokenizer.encode("ab ab é<s>")
    assert tokenizer.bos == 1 and tokenizer.bos not in tokens
    assert tokenizer.decode([1, *tokens.tolist()]) == "ab ab é<s>"
    assert tokenizer.decode_bytes(tokens[1:2]) == b" ab"
    assert streamed(tokenizer, tokens) == " ab ab é<s>"


def metaspace(scheme):
    """Return a tokenizer whose pre-tokenizer, as in newer files, writes the spaces."""
    library = sentence_pieces()
    library.normalizer = normalizers.Sequence([])
    library.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme)
    return library


@pytest.mark.parametrize(
    "made",
    [sentence_pieces, lambda: metaspace("first"), lambda: metaspace("always"), byte_level],
    ids=["prepend", "first", "always", "bytes"],
)
def test_pieces_of_a_document_join_without_a_space(made):
    """No token is of two pieces, also where the tokens of the whole text have one that is."""
    tokenizer = BpeTokenizer.from_json("x", made().to_str())
    name, bos = tokenizer.token_name, tokenizer.bos
    for texts in (("a", "b"), ("a b", " a", "\n", "b"), ("", "a", "", "\n.", "<s>")):
        document = Marked([Piece(text, text == "b") for text in texts], special=False)
        (tokens,) = encode_all([document], tokenizer)
        assert tokenizer.decode(without_marks(tokens)) == document
        assert [name(t) for t in tokens[have_loss(tokens)].tolist()] == ["b"] * texts.count("b")
        assert bos not in without_marks(tokens)
    tokens = tokenizer.encode_after(f"b{name(bos)}", special=True).tolist()
    assert [name(t) for t in tokens] == ["b", name(bos)]
    assert not tokenizer.encode_after("", special=True).size
    with pytest.raises(UsageError, match="unpaired surrogate"):
        tokenizer.encode_after("\ud800", special=False)


def test_the_name_of_bos_in_a_later_piece_is_text(tmp_path):
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("a", -1.0), ("<", -2.0), ("s", -2.0), (">", -2.0)]
    library = tokenizers.Tokenizer(models.Unigram([*pieces, ("▁", -1.0)], 0, False))
    library.pre_tokenizer = pre_tokenizers.Metaspace("▁")
    library.decoder = decoders.Metaspace("▁")
    tokenizer = load_tokenizer(saved(tmp_path, library))
    assert tokenizer.bos == 1
    assert tokenizer.bos not in tokenizer.encode_after("a<s>", special=False)
    assert tokenizer.encode_after("a<s>", special=True).tolist() == [2, 1]


def test_word_pieces_stream_with_their_joints(tmp_path):
    vocabulary = {"[UNK]": 0, "[BOS]": 1, "walk": 2, "##ing": 3, "on": 4}
    library = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.decoder = decoders.WordPiece()
    tokenizer = load_tokenizer(saved(tmp_path, library))
    tokens = tokenizer.encode("walking on")
    assert tokens.tolist() == [2, 3, 4]
    assert tokenizer.decode(tokens) == "walking on"
    assert streamed(tokenizer, tokens[1:]) == "ing on"


def test_stored_truncation_padding_and_templates_do_not_apply(tmp_path):
    library = byte_level()
    library.enable_truncation(2)
    library.enable_padding(length=9)
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, 0)]
    )
    tokenizer = load_tokenizer(saved(tmp_path, library))
    text = "Hello world, hello worlds"
    assert tokenizer.decode_bytes(tokenizer.encode(text)) == text.encode()
    assert tokenizer.bos not in tokenizer.encode(text)


def test_ids_with_gaps_are_below_vocab_size(tmp_path):
    library = tokenizers.Tokenizer(models.BPE({"a": 0, "<bos>": 7}, []))
    library.decoder = decoders.Fuse()
    tokenizer = load_tokenizer(saved(tmp_path, library))
    assert (tokenizer.bos, tokenizer.vocab_size, tokenizer.gaps) == (7, 8, (1, 2, 3, 4, 5, 6))
    assert tokenizer.decode_bytes([3, 0]) == b"a"


def test_saved_tokenizers_are_the_same(gpt2, tmp_path):
    pieces = BpeTokenizer("pieces", sentence_pieces())  # with several special tokens
    for tokenizer in ByteTokenizer(), load_tokenizer(gpt2), pieces:
        tokenizer.save(tmp_path)
        for again in load_saved(tmp_path), load_tokenizer(str(tmp_path)):
            assert again.fingerprint() == tokenizer.fingerprint()
            assert (again.bos, again.vocab_size) == (tokenizer.bos, tokenizer.vocab_size)
            for text in TEXTS:
                assert again.encode(text).tolist() == tokenizer.encode(text).tolist()


def test_fingerprints_tell_tokenizers_apart(gpt2):
    spaced, merged = byte_level(), byte_level()
    spaced.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    state = json.loads(merged.to_str())
    state["model"]["merges"].pop()
    merged = tokenizers.Tokenizer.from_str(json.dumps(state))
    found = [ByteTokenizer(), load_tokenizer(gpt2)]
    found += [BpeTokenizer("other", library) for library in (spaced, merged)]
    assert len({tokenizer.fingerprint() for tokenizer in found}) == len(found)


def test_added_tokens_of_spaces_are_streamed_as_spaces():
    """Gemma's indentation tokens are such tokens."""
    library = sentence_pieces()
    library.normalizer = normalizers.Replace(" ", "▁")
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    library.add_tokens([tokenizers.AddedToken(text, normalized=True) for text in ("▁▁", "\n\n")])
    tokenizer = BpeTokenizer("gemma", library)
    tokens = [tokenizer.token_id(name) for name in ("▁a", "\n\n", "▁▁", "b", "▁▁", "▁ab")]
    assert tokenizer.decode(tokens) == streamed(tokenizer, tokens) == " a\n\n  b   ab"


def test_tokenizers_without_spaces_or_with_bos_in_texts_are_refused():
    vocabulary = {"<|endoftext|>": 0, "a": 1, "a</w>": 2}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, [], end_of_word_suffix="</w>"))
    with pytest.raises(Unusable, match=r"^its words end with '</w>', and the spaces"):
        BpeTokenizer("clip", library)
    unknown = "<|endoftext|>"
    library = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token=unknown))
    with pytest.raises(Unusable, match="which starts a document, also stands for unknown"):
        BpeTokenizer("unknown", library)
    library.decoder = decoders.ByteLevel()
    assert BpeTokenizer("bytes", library).bos == 0


def test_fingerprint_of_bytes_never_changes():
    assert ByteTokenizer().fingerprint() == "bbdff1b47667a68e0cb0d8932814a0e7"


@pytest.mark.parametrize("token", [-1, 257])
def test_foreign_tokens_are_refused(token):
    message = refusal(ByteTokenizer().decode, [0, token])
    assert f"token {token} " in message and "legal: 0 to 256" in message


def test_half_a_surrogate_pair_is_refused(gpt2):
    for tokenizer in ByteTokenizer(), load_tokenizer(gpt2):
        assert r"'\ud800', at character 1" in refusal(tokenizer.encode, "a\ud800")


def test_unknown_spec_names_what_is_legal():
    message = refusal(load_tokenizer, "bytes")
    assert "--tokenizer 'bytes'" in message and "did you mean 'byte'" in message
    assert "encoder.json" in message and "tokenizer.json" in message


def test_folders_without_a_tokenizer(tmp_path):
    (tmp_path / "encoder.json").write_text("{}")
    assert "encoder.json and vocab.bpe" in refusal(load_tokenizer, str(tmp_path))
    assert refusal(load_saved, tmp_path) == f"{tmp_path}: tokenizer.json is missing"


@pytest.mark.parametrize("content", [b"{", b"{}", b"[1]", b"\xff"])
def test_damaged_files(tmp_path, content):
    for name in "encoder.json", "vocab.bpe", "tokenizer.json":
        (tmp_path / name).write_bytes(content)
    assert str(tmp_path) in refusal(load_tokenizer, str(tmp_path / "tokenizer.json"))
    assert str(tmp_path) in refusal(load_saved, tmp_path)


def test_damaged_gpt2_files(tmp_path):
    (tmp_path / "encoder.json").write_text("{")
    (tmp_path / "vocab.bpe").write_text("")
    assert f"--tokenizer={str(tmp_path)!r}: the tokenizer cannot be loaded" in refusal(
        load_tokenizer, str(tmp_path)
    )


@pytest.mark.parametrize(
    "template, bos",
    [("<s> $A", 2), ("<s> $A <bos>", 2), ("$A <s>", 7), ("<s> <bos> $A", 7), (None, 7)],
)
def test_the_token_that_a_template_puts_first_is_bos(tmp_path, template, bos):
    """And it is kept with what is saved; without one the likeliest name is."""
    library = tokenizers.Tokenizer(
        models.BPE({"a": 0, "b": 1, "<s>": 2, "<|endoftext|>": 7, "<bos>": 8}, [])
    )
    if template is not None:
        special = [("<s>", 2), ("<bos>", 8)]
        library.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=special
        )
    found = load_tokenizer(saved(tmp_path, library))
    assert found.bos == bos and found.encode("ab").tolist() == [0, 1]
    found.save(tmp_path / "again")
    assert load_saved(tmp_path / "again").bos == bos


def test_no_bos_names_those_that_are_known(tmp_path):
    library = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    assert "<|begin_of_text|>" in refusal(load_tokenizer, saved(tmp_path, library))


def test_without_the_library_the_extra_is_named(gpt2, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    message = refusal(load_tokenizer, gpt2)
    assert message == (
        f"--tokenizer={gpt2!r}: the tokenizers library is needed: pip install 'rmt_tpu[data]'"
    )
    assert load_tokenizer("byte").bos == 256
