"""Parquet and Arrow files: their documents, their division at groups, and what is refused."""

import builtins
import contextlib
import io
import json
import random
from pathlib import Path

import fsspec
import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from rmt_tpu.data import corpus, documents, inputs, is_store, open_store, prepare
from rmt_tpu.data.corpus import divide, read_span
from rmt_tpu.data.inputs import files, whole_span
from rmt_tpu.errors import UsageError
from rmt_tpu.storage import Fault

KINDS = ["parquet", "arrow", "stream.arrow"]


def some_texts(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    words = ["stone", "river", "über", "and"]
    return [f"{n} " + " ".join(draw.choices(words, k=draw.randint(4, 60))) for n in range(count)]


def write(path: Path, texts: list, *, rows: int = 7, column: str = "text", type=None) -> str:
    """Write a table with a column of numbers and a column of texts, in groups of some rows."""
    array = pyarrow.array(texts, type or pyarrow.string())
    table = pyarrow.table({"id": list(range(len(texts))), column: array})
    path.write_bytes(encoded(table, path.name, rows))
    return str(path)


def encoded(table: pyarrow.Table, name: str, rows: int) -> bytes:
    out = io.BytesIO()
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(table, out, row_group_size=rows)
        return out.getvalue()
    new = pyarrow.ipc.new_stream if name.endswith("stream.arrow") else pyarrow.ipc.new_file
    with new(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return out.getvalue()


def refusal(source: str, **options) -> str:
    with pytest.raises(UsageError) as error:
        documents(source, **options)
    message = str(error.value)
    assert message.startswith(f"--data={source!r}: ") and "\n" not in message
    return message


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_documents_in_order_without_nulls_and_white_space(tmp_path, kind):
    texts = some_texts(600, 0)
    path = write(tmp_path / f"a.{kind}", [*texts[:300], None, " \n", *texts[300:]], rows=290)
    assert documents(path) == texts
    assert (
        not is_store(path) and not is_store("gs://b/a.parquet") and not is_store("gs://b/*.arrow")
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "type",
    [
        pyarrow.large_string(),
        pyarrow.binary(),
        pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    ],
    ids=str,
)
def test_any_type_of_text_is_read(tmp_path, kind, type):
    texts = ["one é", "two", "one é"]
    column = pyarrow.array(texts)
    path = tmp_path / f"a.{kind}"
    table = pyarrow.table(
        {"text": column.cast(type) if "dict" not in str(type) else column.dictionary_encode()}
    )
    path.write_bytes(encoded(table, path.name, 2))
    assert documents(str(path)) == texts


def test_the_field_of_text_may_be_named(tmp_path):
    (tmp_path / "b.jsonl").write_text(json.dumps({"body": "three", "text": "no"}) + "\n")
    write(tmp_path / "a.parquet", ["one", "two"], column="body")
    source = f"{tmp_path}/*.parquet,{tmp_path}/b.jsonl"
    assert documents(source, text_field="body") == ["one", "two", "three"]
    message = refusal(source)
    assert "has no column 'text' of strings; columns: 'id' (int64), 'body' (string);" in message
    assert "--text_field=NAME" in message
    assert "has no column 'id' of strings" in refusal(source, text_field="id")
    assert 'has no field "x" that is a string' in refusal(f"{tmp_path}/b.jsonl", text_field="x")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_bytes", [1, 700, 10**6])
def test_spans_have_whole_groups_and_every_document_once(tmp_path, kind, num_bytes):
    texts = some_texts(100, 1)
    whole = whole_span(write(tmp_path / f"a.{kind}", texts, rows=8))
    spans = list(divide(whole, num_bytes))
    assert spans[0].start == 0 and spans[-1].stop == whole.stop
    assert [s.stop for s in spans[:-1]] == [s.start for s in spans[1:]]
    found = [list(read_span(span)) for span in spans]
    assert sum(found, []) == texts
    expected = {1: 13, 10**6: 1}.get(num_bytes, len(spans)) if kind != KINDS[2] else 1
    assert len(spans) == expected
    if num_bytes == 1 and kind != KINDS[2]:
        assert {len(texts) for texts in found[:-1]} == {8}


@pytest.mark.parametrize("kind", KINDS)
def test_all_stored_bytes_are_accounted_for(tmp_path, kind):
    whole = whole_span(write(tmp_path / f"a.{kind}", some_texts(1000, 2), rows=400))
    for num_bytes in 10**6, 1:
        for span in divide(whole, num_bytes):
            told = []
            list(read_span(span, lambda block, stored, told=told: told.append(stored)))
            assert sum(told) == span.stop - span.start and min(told) >= 0
            assert len(told) > 2 or kind != "parquet" or num_bytes == 1


@pytest.mark.parametrize("kind", KINDS)
def test_tables_without_rows_have_no_text(tmp_path, kind):
    empty = write(tmp_path / f"a.{kind}", [])
    assert list(divide(whole_span(empty), 1)) == [whole_span(empty)]
    assert "has no text" in str(pytest.raises(UsageError, documents, empty).value)


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_tables_are_refused_in_a_line(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    write(path, some_texts(300, 3), rows=50)
    content, draw = path.read_bytes(), random.Random(4)
    for damaged in b"", content[:-100], content[: len(content) // 2], b"text" * 100:
        if kind == KINDS[2] and damaged == content[:-100]:
            continue
        path.write_bytes(damaged)
        assert f"{str(path)!r} cannot be read: " in refusal(str(path))
    for _ in range(150):  # whatever is damaged, the process lives on
        at = draw.randrange(len(content))
        path.write_bytes(content[:at] + draw.randbytes(4) + content[at + 4 :])
        try:
            documents(str(path))
        except UsageError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_storage_stays_what_it_is(tmp_path, kind, monkeypatch):
    """Whatever pyarrow makes of it: an object in a bucket may be replaced while it is read."""
    path = write(tmp_path / f"a.{kind}", some_texts(900, 3), rows=300)

    class Replaced(io.FileIO):
        def readinto(self, buffer):
            if self.tell() >= 8192:
                raise Fault(f"{path} was replaced")
            return super().readinto(memoryview(buffer)[:4096])

    @contextlib.contextmanager
    def open_stored(span, *, look=False):
        with Replaced(span.path) as file:
            file.seek(0)
            yield io.BufferedReader(file, 4096)

    monkeypatch.setattr("rmt_tpu.data.tables.open_stored", open_stored)
    with pytest.raises(Fault, match=r"^/.*a\.\S+ was replaced$"):
        list(read_span(whole_span(path)))


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = write(tmp_path / "a.parquet", [b"good", b"b\xff"], type=pyarrow.binary())
    assert "is not UTF-8 in row group 1, row 1 or later" in refusal(path)


def test_a_document_that_is_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("rmt_tpu.data.tables.LONGEST_DOCUMENT", 10)
    path = write(tmp_path / "a.parquet", ["x" * 10, "x" * 11])
    assert "a document of more than 10 characters" in refusal(path)


def test_without_the_libraries_a_line_names_the_extra(tmp_path, monkeypatch):
    path, usual = write(tmp_path / "a.parquet", ["text"]), builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] in ("pyarrow", "fsspec"):
            raise ImportError(name=name)
        return usual(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "needs pyarrow: pip install 'rmt_tpu[parquet]'" in refusal(path)
    assert "fsspec is needed: pip install 'rmt_tpu[parquet]'" in refusal("s3://b/a.parquet")


# fsspec URLs ----------------------------------------------------------------------------------


@pytest.fixture
def memory():
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/", recursive=True)


def test_files_of_any_file_system_are_found_and_read(tmp_path, memory):
    texts = some_texts(90, 5)
    write(tmp_path / "a.parquet", texts[:50])
    memory.pipe("/in/deep/a.parquet", (tmp_path / "a.parquet").read_bytes())
    memory.pipe("/in/b.txt", "\n<|endoftext|>\n".join(texts[50:]).encode())
    memory.pipe("/in/c.csv", b"text")
    source = "memory://in/**/*.parquet,memory://in/b.txt"
    found = documents(source)
    assert [text.strip() for text in found] == texts
    assert [span.path for span in files(source)] == [
        "memory:///in/deep/a.parquet",
        "memory://in/b.txt",
    ]
    assert documents(f"file://{tmp_path}/*.parquet") == texts[:50]
    for source, said in {
        "memory://in/x.txt": "'memory://in/x.txt' matches no file",
        "memory://in/*.jsonl": "matches no file",
        "memory://in/c.csv": "has an unknown suffix",
        "memory://in": "the URL is that of a folder",
        "nonsense://a.txt": "Protocol not known: nonsense",
    }.items():
        assert said in refusal(source)


def test_much_remote_text_is_for_a_token_store(memory, monkeypatch):
    memory.pipe("/in/b.txt", b"text")
    monkeypatch.setattr(corpus, "MOST_REMOTE", 3)
    message = refusal("memory://in/b.txt")
    assert "recipes.prepare_data" in message


def test_an_error_of_a_file_system_is_a_line(memory, monkeypatch):
    memory.pipe("/in/b.txt", b"text\n")

    class Broken(fsspec.implementations.memory.MemoryFile):
        def read(self, size=-1):
            raise RuntimeError("no\nanswer")

    monkeypatch.setattr(type(memory), "open", lambda self, path, mode: Broken())
    assert "'memory://in/b.txt' cannot be read: RuntimeError: no answer" in refusal(
        "memory://in/b.txt"
    )


# Token stores ----------------------------------------------------------------------------------


def make(source: str, output: Path, **options) -> prepare.Totals:
    options = {"workers": 1, "part_bytes": 2000, "eval_fraction": 0.2} | options
    return prepare.prepare(source, "byte", output, **options)


def stored(output: Path) -> list[list[int]]:
    streams = (getattr(open_store(str(output)), name) for name in ("train", "held_out"))
    return [s.read(np.zeros(1, np.int64), len(s))[0].tolist() for s in streams]


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def source(tmp_path) -> str:
    (tmp_path / "in").mkdir()
    for number, kind in enumerate(KINDS):
        write(tmp_path / "in" / f"{number}.{kind}", some_texts(120, number), rows=10)
    return f"{tmp_path}/in/*"


def test_a_store_has_the_documents_of_its_tables(source, tmp_path):
    """Those that a store of .jsonl files has, in more parts than there are files."""
    totals = make(source, tmp_path / "store")
    assert totals.parts > 8
    (tmp_path / "lines.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in documents(source))
    )
    make(f"{tmp_path}/lines.jsonl", tmp_path / "lines")
    assert stored(tmp_path / "store") == stored(tmp_path / "lines")
    assert make(source, tmp_path / "store") == totals._replace(kept=totals.parts)


def test_a_killed_command_goes_on_and_ends_with_the_same_bytes(source, tmp_path, monkeypatch):
    totals, usual = make(source, tmp_path / "whole"), prepare.run

    def run(options, jobs, *args):
        usual(options, jobs[: len(jobs) // 2], *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "run", run)
        with pytest.raises(KeyboardInterrupt):
            make(source, tmp_path / "store")
    again = make(source, tmp_path / "store")
    assert again == totals._replace(kept=totals.parts // 2) and 0 < again.kept < again.parts
    assert content(tmp_path / "store") == content(tmp_path / "whole")


@pytest.mark.slow
def test_any_number_of_workers_makes_the_same_bytes(source, tmp_path):
    for workers in 1, 2, 4:
        make(source, tmp_path / str(workers), workers=workers)
        assert content(tmp_path / str(workers)) == content(tmp_path / "1")


@pytest.mark.parametrize("kind", KINDS)
def test_an_edited_table_is_refused_by_its_text(tmp_path, kind):
    """Of the same size; other columns do not count."""
    path, texts = tmp_path / f"a.{kind}", some_texts(120, 0)
    write(path, texts, rows=10)
    totals = make(str(path), tmp_path / "store")
    write(path, texts, rows=10)
    assert make(str(path), tmp_path / "store").kept == totals.parts
    size = path.stat().st_size
    write(path, [t.replace("stone", "stony") for t in texts], rows=10)
    with pytest.raises(UsageError, match=f"'a.{kind}'"):
        make(str(path), tmp_path / "store")
    assert kind == "parquet" or path.stat().st_size == size


def test_a_store_knows_the_field_of_its_text(tmp_path):
    path = write(tmp_path / "a.parquet", some_texts(50, 0), column="body")
    make(path, tmp_path / "store", text_field="body")
    with pytest.raises(UsageError, match="text_field body is now text"):
        make(path, tmp_path / "store")
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": t}) + "\n" for t in some_texts(50, 0)))
    make(str(lines), tmp_path / "lines")
    assert "text_field" not in (tmp_path / "lines" / "plan.json").read_text()


def test_a_store_of_an_address_is_that_of_a_folder(source, tmp_path, memory):
    for path in Path(source).parent.iterdir():
        memory.pipe(f"/in/{path.name}", path.read_bytes())
    totals = make("memory://in/*", tmp_path / "remote")
    make(source, tmp_path / "local")
    assert content(tmp_path / "remote") == content(tmp_path / "local")
    assert make("memory://in/*", tmp_path / "remote").kept == totals.parts
    changed = [t.replace("stone", "stony") for t in some_texts(120, 1)]
    write(tmp_path / "in" / "1.arrow", changed, rows=10)
    memory.pipe("/in/1.arrow", (tmp_path / "in" / "1.arrow").read_bytes())
    with pytest.raises(UsageError, match="the content of '1.arrow' has changed"):
        make("memory://in/*", tmp_path / "remote")


def test_an_address_that_is_edited_meanwhile_is_noticed(tmp_path, memory, monkeypatch):
    memory.pipe("/in/a.txt", b"one two\n<|endoftext|>\nthree four")
    usual = prepare.document_to_cut

    def late(*arguments):
        memory.pipe("/in/a.txt", b"one two\n<|endoftext|>\nthree five")
        return usual(*arguments)

    monkeypatch.setattr(prepare, "document_to_cut", late)
    with pytest.raises(inputs.RunError, match="was edited during the command"):
        make("memory://in/a.txt", tmp_path / "store", eval_fraction=0.5)
