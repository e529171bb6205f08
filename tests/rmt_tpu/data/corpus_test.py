"""Documents of files, of globs and of the standard library."""

import ast
import gzip
import json
import sys
import sysconfig
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from rmt_tpu.data import documents
from rmt_tpu.data.corpus import divide, read_span
from rmt_tpu.data.inputs import Problem, whole_span
from rmt_tpu.errors import UsageError


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a file in the folder that is the current one, and gives its name."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, content: str | bytes) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return name

    return write


def refusal(source: str, *, legal: bool = True) -> str:
    with pytest.raises(UsageError) as error:
        documents(source)
    message = str(error.value)
    assert message.startswith(f"--data={source!r}"), message
    assert "\n" not in message
    assert not legal or "legal" in message
    return message


def lines(*values: object) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def test_stdlib_is_modules_in_order_without_tests_and_installed_packages():
    found = documents("stdlib")
    root = Path(sysconfig.get_path("stdlib"))
    modules = ["abc.py", "asyncio/base_events.py", "json/decoder.py", "zipfile.py"]
    modules = [name for name in modules if (root / name).exists()]
    places = [found.index((root / name).read_text(encoding="utf-8")) for name in modules]
    assert places == sorted(places)
    assert len(modules) >= 3
    assert len(found) > 300
    tests = [*root.glob("test/test_a*.py"), *root.glob("idlelib/idle_test/test_a*.py")]
    assert not {test.read_text(encoding="utf-8") for test in tests} & set(found)
    assert Path(pytest.__file__).read_text(encoding="utf-8") not in found
    assert isinstance(ast.parse(found[0]), ast.Module)


def test_stdlib_leaves_out_what_is_not_its_text(write, tmp_path, monkeypatch):
    kept = {"b.py": "b = 1\n", "a/z.py": "z = 1\n"}
    for name, text in kept.items():
        write(name, text)
    left_out = ["site-packages", "dist-packages", "test", "a/tests", "idlelib/idle_test"]
    for folder in [*left_out, "lib2to3/tests/data", "__pycache__", "ensurepip/_bundled"]:
        write(f"{folder}/left_out.py", "left_out = 1\n")
    write("empty.py", "")
    write("latin.py", b"# \xe9\n")
    write("readme.txt", "no source\n")
    (tmp_path / "missing.py").symlink_to(tmp_path / "nowhere.py")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert documents("stdlib") == [kept["a/z.py"], kept["b.py"]]


def test_text_file_is_one_document_with_its_line_ends(write):
    assert documents(write("a.txt", "\ufeffone\r\ntwo é\n")) == ["one\r\ntwo é\n"]


def test_separator_lines_divide_a_text_file(write):
    text = (
        "<|endoftext|>\none\n<|endoftext|>\r\n \n<|endoftext|>\n"
        "two <|endoftext|>\n<|endoftext|> \n<|endoftext|>"
    )
    assert documents(write("a.txt", text)) == ["one\n", "two <|endoftext|>\n<|endoftext|> \n"]


def test_json_lines_are_documents(write):
    name = write("a.jsonl", '{"text": "a\u2028b"}\n\n{"id": 1, "text": "c\\nd"}\r\n{"text": ""}')
    assert documents(name) == ["a\u2028b", "c\nd"]


def test_compressed_files(write):
    text = write("a.txt.gz", gzip.compress(b"one\n<|endoftext|>\ntwo"))
    json_lines = write("b.JSONL.GZ", gzip.compress(b'{"text": "three"}\n'))
    assert documents(f"{text},{json_lines}") == ["one\n", "two", "three"]


def test_zstandard_files_of_one_frame_or_more(write):
    frames = [b"one\n<|endoftext|>\ntw", b"o" * 300_000, b"\n<|endoftext|>\nthree"]
    name = write("a.txt.zst", b"".join(map(zstandard.compress, frames)))
    assert documents(name) == ["one\n", "tw" + "o" * 300_000 + "\n", "three"]
    # Written as a stream: the frame does not say how large its content is.
    packer = zstandard.ZstdCompressor().compressobj()
    name = write("b.jsonl.zst", packer.compress(b'{"text": "a"}') + packer.flush())
    assert documents(name) == ["a"]


def test_zstandard_is_asked_for_where_it_is_missing(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert "pip install 'rmt_tpu[data]'" in refusal(write("a.txt.zst", b""), legal=False)


def test_order_is_as_given_and_globs_are_sorted_and_no_file_is_read_twice(write, tmp_path):
    for name in ["z.txt", "d/2.txt", "d/1.txt", "d/deep/er/0.txt", "other.jsonl"]:
        write(name, lines({"text": name}) if name.endswith("jsonl") else name)
    (tmp_path / "d/link.txt").symlink_to(tmp_path / "z.txt")
    assert documents("z.txt, d/**/*.txt,other.jsonl,d/1.txt,./z.txt") == [
        "z.txt", "d/1.txt", "d/2.txt", "d/deep/er/0.txt", "other.jsonl",
    ]  # fmt: skip


def test_a_name_with_brackets_is_a_name_first(write):
    assert documents(write("part[1].txt", "one")) == ["one"]


@pytest.mark.parametrize("source", ["missing.txt", "*.jsonl", "", "a.txt,missing.txt", "d*"])
def test_nothing_found(write, source):
    write("a.txt", "text")
    write("d/a.txt", "text")
    message = refusal(source)
    assert repr(source.split(",")[-1]) in message
    assert ".txt, .jsonl, .txt.gz, .jsonl.gz" in message


def test_a_folder_is_refused_with_the_glob_to_write(write):
    write("books/a.txt", "text")
    assert "'books/**/*.txt'" in refusal("books")


def test_unknown_extension(write):
    message = refusal(write("a.csv", "text"))
    assert "'a.csv'" in message and ".jsonl" in message


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_not_utf8_names_file_and_byte(write, pack):
    name = write("a.txt" if pack is bytes else "a.txt.gz", pack("\ufeffé".encode() + b"\xff"))
    assert f"'{name}' is not UTF-8 at byte 5, in line 1" in refusal(name)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress])
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_not_utf8_far_into_a_file_names_byte_and_line(write, kind, pack):
    good = lines(*({"text": "é" * 100} for _ in range(50))).encode()
    ending = {bytes: "", gzip.compress: ".gz", zstandard.compress: ".zst"}[pack]
    name = write(f"a.{kind}{ending}", pack(good + b'{"text": "\xe9"}\n' + good))
    byte = len(good) + len('{"text": "')
    assert f"'{name}' is not UTF-8 at byte {byte}, in line 51" in refusal(name)


@pytest.mark.parametrize(
    "content",
    [b"text", gzip.compress(b"text")[:-4], gzip.compress(b"text")[:10] + b"\xff" * 20],
    ids=["not compressed", "cut off", "overwritten"],
)
def test_damaged_compression(write, content):
    assert "'a.txt.gz' cannot be read" in refusal(write("a.txt.gz", content))


@pytest.mark.parametrize(
    "damage",
    [lambda c: b"text", lambda c: c[:-4], lambda c: c + c[:10], lambda c: c[:12] + b"\xff" * 20],
    ids=["not compressed", "cut off", "cut off in the second frame", "overwritten"],
)
def test_damaged_zstandard(write, damage):
    content = damage(zstandard.compress(b"text of several words " * 9))
    assert "'a.txt.zst' cannot be read" in refusal(write("a.txt.zst", content))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{'text': 1}", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "is a JSON list"),
        ('"text"', "is a JSON str"),
        ('{"Text": "a", "n": 1}', "fields: 'Text' (str), 'n' (int)"),
        ('{"text": null}', "fields: 'text' (NoneType)"),
        ("{}", "fields: none"),
        (r'{"text": "ab\ud800"}', "an unpaired surrogate at character 2"),
    ],
)
def test_bad_json_lines_name_file_and_line(write, line, said):
    message = refusal(write("a.jsonl", lines({"text": "good"}) + "\n" + line + "\n"))
    assert "'a.jsonl' line 3" in message
    assert said in message


def test_no_text_at_all(write):
    write("a.txt", " \n<|endoftext|>\n")
    write("b.jsonl", lines({"text": ""}))
    assert "has no text" in refusal("a.txt,b.jsonl")


# Parts of a file -----------------------------------------------------------------------------

texts = st.lists(st.text(st.sampled_from("aé\n\r<|"), max_size=20), max_size=12)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(texts, st.integers(1, 60), st.sampled_from(["txt", "jsonl"]), st.booleans())
def test_spans_have_every_document_once_in_order(tmp_path_factory, texts, size, kind, bom):
    path = tmp_path_factory.mktemp("spans") / f"a.{kind}"
    separator = "<|endoftext|>\n"
    content = lines(*({"text": t} for t in texts)) if kind == "jsonl" else separator.join(texts)
    path.write_bytes(("\ufeff" * bom + content).encode())
    of_whole = list(read_span(whole_span(str(path))))
    parts = list(divide(whole_span(str(path)), size))
    assert [text for part in parts for text in read_span(part)] == of_whole
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert (parts[0].start, parts[-1].stop) == (0, path.stat().st_size)
    if kind == "jsonl":
        assert of_whole == [t for t in texts if t.strip()]


def test_spans_are_about_as_large_as_asked_for(write):
    document = "word " * 19 + "line\n"  # 100 bytes
    for name, content in {
        "a.txt": "<|endoftext|>\n".join([document] * 100),
        "a.jsonl": lines(*({"text": document} for _ in range(100))),
    }.items():
        sizes = [part.stop - part.start for part in divide(whole_span(write(name, content)), 1000)]
        assert len(sizes) >= 8 and all(1000 <= size <= 1300 for size in sizes[:-1])


def test_a_compressed_file_and_a_single_document_are_one_span(write):
    document = "line\n" * 1000
    assert len(list(divide(whole_span(write("a.txt", document)), 100))) == 1
    packed = write("b.txt.gz", gzip.compress(document.encode()))
    assert len(list(divide(whole_span(packed), 10))) == 1


def test_a_bad_line_of_a_later_span_has_its_number_in_the_file(write):
    name = write("a.jsonl", lines(*({"text": "good"} for _ in range(40))) + "[1]\n")
    *good, last = divide(whole_span(name), 100)
    assert good
    with pytest.raises(Problem, match="'a.jsonl' line 41: the line is a JSON list"):
        list(read_span(last))


def test_all_bytes_are_seen_once_and_in_order(write):
    content = lines(*({"text": "word " * n} for n in range(1, 50)))
    for name, packed in {
        "a.jsonl": content.encode(),
        "a.jsonl.gz": gzip.compress(content.encode()),
        "a.jsonl.zst": zstandard.compress(content.encode()),
    }.items():
        for span in divide(whole_span(write(name, packed)), 2000):
            seen = []
            list(read_span(span, seen.append))
            assert b"".join(seen) == packed[span.start : span.stop]
