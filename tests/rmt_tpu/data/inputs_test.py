"""Files that a source names: which they are, and what of them is refused at once."""

import gzip
import json
import os

import pytest
import zstandard

from rmt_tpu.data import corpus, documents, inputs, is_store
from rmt_tpu.data.inputs import _TappedFile, _Zstandard
from rmt_tpu.errors import UsageError


def refusal(source: str) -> str:
    with pytest.raises(UsageError) as error:
        documents(source)
    message = str(error.value)
    assert message.startswith(f"--data={source!r}: ") and "\n" not in message
    return message


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_name_may_have_commas(here):
    for name in "a,b.txt", "c.txt", "d, e,f.txt":
        (here / name).write_text(name)
    source = "a,b.txt,c.txt, d, e,f.txt"
    assert documents(source) == ["a,b.txt", "c.txt", "d, e,f.txt"]
    assert documents("?,b.txt,c.txt") == ["a,b.txt", "c.txt"]
    assert "'x.txt' matches no file" in refusal("a,b.txt,x.txt,c.txt")
    assert ": an empty item next to a comma matches no file" in refusal("c.txt,")
    (here / "a").write_text("")
    assert "'a' has an unknown suffix" in refusal("a,b.txt")


def test_a_name_that_cannot_be_looked_up_is_told(here):
    """It may be too long, and then the names after its comma are not taken as a part of it."""
    long = "a" * 200
    assert f"'{long * 2}.txt' cannot be read: File name too long" in refusal(f"{long * 2}.txt")
    assert f"'{long}' matches no file" in refusal(f"{long},{long}.txt")
    (here / "loop.txt").symlink_to("loop.txt")
    assert "'loop.txt' cannot be read: Too many levels of symbolic links" in refusal("loop.txt")


def test_a_pipe_is_refused_at_once(here):
    os.mkfifo("x.txt")
    assert "'x.txt' is not a regular file" in refusal("x.txt")
    os.symlink("/dev/null", "null.txt")
    assert "'null.txt' is not a regular file" in refusal("null.txt")
    (here / "y.txt").write_text("text")
    assert documents("*.txt") == ["text"]


@pytest.mark.parametrize("source", ["gs://b/x.txt", "gs://b/x/*.jsonl.gz", "gs://b/x.TXT,y.txt"])
def test_text_in_a_bucket_is_no_store(source):
    assert not is_store(source)


def test_a_store_may_have_a_comma_in_its_name(here):
    (here / "a,b").mkdir()
    (here / "a,b" / "plan.json").write_text("")
    assert is_store("a,b") and is_store("gs://b/x") and not is_store("s3://b/x")


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress])
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_a_line_that_is_too_long_is_refused_with_its_number(here, monkeypatch, kind, pack):
    monkeypatch.setattr(corpus, "LONGEST_LINE", 1000)
    ending = {bytes: "", gzip.compress: ".gz", zstandard.compress: ".zst"}[pack]
    name = f"a.{kind}{ending}"
    good = json.dumps({"text": "x" * (1000 - 13)}).encode() + b"\n"
    assert len(good) == 1000
    (here / name).write_bytes(pack(good * 3))
    assert documents(name)
    (here / name).write_bytes(pack(good * 3 + b"x" * 5000))
    assert f"'{name}' line 4 is longer than 1000 bytes" in refusal(name)


@pytest.mark.parametrize("line", [b"\n", b"lines of text\n"])
def test_a_document_that_is_too_long_is_refused_with_its_line(here, monkeypatch, line):
    monkeypatch.setattr(corpus, "LONGEST_DOCUMENT", 1000)
    first = b"one\n<|endoftext|>\n"
    (here / "a.txt.zst").write_bytes(zstandard.compress(first + line * (1000 // len(line))))
    assert documents("a.txt.zst")[0] == "one\n"
    (here / "a.txt.zst").write_bytes(zstandard.compress(first + line * 2000))
    message = refusal("a.txt.zst")
    assert "a document of more than 1000 bytes, which starts in line 3;" in message


def test_little_is_unpacked_at_a_time(here):
    """Of 300 MB in 9 KB, which the library would unpack at once."""
    (here / "a.jsonl.zst").write_bytes(zstandard.compress(b"x" * 3 * 10**8))
    most, unpacked = 0, 0
    with open("a.jsonl.zst", "rb") as file:
        reader = _Zstandard(_TappedFile(file, lambda block: None), "a.jsonl.zst")
        buffer = bytearray(2**20)
        while count := reader.readinto(buffer):
            unpacked += count
            most = max(most, len(reader._unpacked))
    assert unpacked == 3 * 10**8 and most <= 2**25


def test_a_reader_is_told_while_much_is_unpacked(here, monkeypatch):
    (here / "a.txt.gz").write_bytes(gzip.compress(b"line\n" * 20_000))

    def told():
        blocks = []
        list(corpus.read_span(inputs.whole_span("a.txt.gz"), blocks.append))
        assert b"".join(blocks) == (here / "a.txt.gz").read_bytes()
        return blocks.count(b"")

    of_little = told()
    monkeypatch.setattr(corpus, "SIGN_OF_LIFE", 10_000)
    assert told() == of_little + 10


def test_a_long_line_is_passed_over_in_pieces(here, monkeypatch):
    """Where a file is divided; a piece of it that looks like a separator is none."""
    monkeypatch.setattr(corpus, "SKIP_BYTES", 15)
    text = "x" * 90 + "<|endoftext|>\n" + "y" * 90 + "\n<|endoftext|>\n" + "z" * 90
    (here / "a.txt").write_text(text)
    whole = inputs.whole_span("a.txt")
    for size in (1, 30, 75, 100, 200):
        spans = list(corpus.divide(whole, size))
        assert [d for span in spans for d in corpus.read_span(span)] == list(
            corpus.read_span(whole)
        )


def test_a_line_of_many_fields_is_told_in_a_line(here):
    (here / "a.jsonl").write_text(json.dumps({f"{n}" * 100: n for n in range(100)}))
    assert len(refusal("a.jsonl")) < 900
