"""Documents of files, of globs and of the standard library."""

import ast
import gzip
import json
import sysconfig
from pathlib import Path

import pytest

from rmt_tpu.data import documents
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


def refusal(source: str) -> str:
    with pytest.raises(UsageError) as error:
        documents(source)
    message = str(error.value)
    assert message.startswith(f"--data={source!r}"), message
    assert "\n" not in message
    assert "legal" in message or "write which" in message
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
    assert f"'{name}' is not UTF-8 at byte 5" in refusal(name)


@pytest.mark.parametrize(
    "content",
    [b"text", gzip.compress(b"text")[:-4], gzip.compress(b"text")[:10] + b"\xff" * 20],
    ids=["not compressed", "cut off", "overwritten"],
)
def test_damaged_compression(write, content):
    assert "'a.txt.gz' cannot be read" in refusal(write("a.txt.gz", content))


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
        (r'{"text": "ab\ud800"}', "half a surrogate pair at character 2"),
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
