"""Text in a bucket: found by globs, read by ranges, and tokenised as if it lay in a folder."""

import gzip
import io
import json
import random
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from rmt_tpu.data import corpus, inputs, open_store, prepare
from rmt_tpu.data.token_store import PLAN, read_sealed
from rmt_tpu.errors import RunError, UsageError
from rmt_tpu.storage import Fault, Object, find_objects, open_folder
from tests import gcs_server


def some_texts(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    words = ["stone", "river", "über", "and"]
    return [f"{n} " + " ".join(draw.choices(words, k=draw.randint(4, 60))) for n in range(count)]


@pytest.fixture
def both(server, tmp_path) -> tuple[str, str]:
    """The same files in a folder and in the bucket, as globs."""
    lines = lambda texts: "".join(json.dumps({"text": t}) + "\n" for t in texts).encode()
    table = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": some_texts(50, 4)}), table, row_group_size=9)
    contents = {
        "e.parquet": table.getvalue(),
        "a.jsonl": lines(some_texts(40, 0)),
        "b.txt": "\n<|endoftext|>\n".join(some_texts(30, 1)).encode(),
        "deep/er/c.jsonl.gz": gzip.compress(lines(some_texts(20, 2))),
        "deep/d.txt.zst": zstandard.compress("\n<|endoftext|>\n".join(some_texts(9, 3)).encode()),
    }
    for name, content in contents.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(content)
        server.replace("bucket", f"in/{name}", content)
    globs = ["*.jsonl", "b.txt", "**/*.gz", "deep/*.zst", "*.parquet"]
    return tuple(",".join(f"{root}/{g}" for g in globs) for root in (tmp_path / "in", IN))


IN = "gs://bucket/in"


def make(source: str, output: Path | str, **options) -> prepare.Totals:
    options = {"workers": 1, "part_bytes": 2000, "eval_fraction": 0.2} | options
    return prepare.prepare(source, "byte", output, **options)


def stored(output) -> list[int]:
    streams = (getattr(open_store(str(output)), name) for name in ("train", "held_out"))
    return [s.read(np.zeros(1, np.int64), len(s))[0].tolist() for s in streams]


def test_the_store_of_a_bucket_is_that_of_a_folder(both, tmp_path):
    local, remote = both
    totals = make(remote, tmp_path / "remote")
    assert make(local, tmp_path / "local") == totals and totals.parts > 5
    assert stored(tmp_path / "local") == stored(tmp_path / "remote")
    assert make(remote, tmp_path / "remote") == totals._replace(kept=totals.parts)
    plans = [read_sealed(open_folder(tmp_path / name), PLAN) for name in ("local", "remote")]
    named = [[source[:2] for source in plan["sources"]] for plan in plans]
    assert named[0] == named[1]


def test_text_in_a_bucket_is_read_as_a_whole_too(both, monkeypatch):
    assert corpus.documents(both[1]) == corpus.documents(both[0])
    monkeypatch.setattr(corpus, "MOST_REMOTE", 1000)
    assert len(corpus.documents(both[0])) == 149
    with pytest.raises(UsageError, match="legal: at most 0 GiB, or a token store made"):
        corpus.documents(both[1])


@pytest.mark.slow
def test_processes_read_a_bucket_and_write_into_it(both, tmp_path):
    make(both[1], "gs://bucket/out", workers=2)
    make(both[0], tmp_path / "local")
    assert stored("gs://bucket/out") == stored(tmp_path / "local")


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("a.txt", "a.txt"),
        ("*.txt", "a.txt b[1].txt"),
        ("b[1].txt", "b[1].txt"),
        ("[ab]*", "a.txt b[1].txt"),
        ("?.txt", "a.txt"),
        ("*/*.txt", "d/c.txt"),
        ("**/*.txt", "a.txt b[1].txt d/c.txt d/e/f.txt"),
        ("d/**", "d/c.txt d/e/f.txt"),
        ("d/**/f.txt", "d/e/f.txt"),
        ("**/.*", "d/.hidden.txt"),
        ("x*", ""),
        ("d", ""),
    ],
)
def test_globs_match_as_in_a_folder(server, pattern, found):
    names = ["a.txt", "b[1].txt", "d/c.txt", "d/e/f.txt", "d/.hidden.txt", "d/.h/g.txt", "d/"]
    for name in names:
        server.replace("bucket", f"globs/{name}", b"text")
    urls = [
        o.url.removeprefix("gs://bucket/globs/")
        for o in find_objects("gs://bucket/globs/" + pattern)
    ]
    assert urls == found.split()


def test_a_glob_of_names_does_not_list_folders(server):
    for number in range(5):
        server.replace("bucket", f"in/deep/{number}.txt", b"text")
    server.replace("bucket", "in/a.txt", b"text")
    server.requests.clear()
    assert len(find_objects("gs://bucket/in/*.txt")) == 1
    assert any("delimiter=/" in url for _, url in server.requests)


def test_what_is_not_there_and_what_is_stored_otherwise(server, tmp_path, monkeypatch):
    server.replace("bucket", "in/a.csv", b"text")
    for source, said in {
        "gs://bucket/in/b.txt": "'gs://bucket/in/b.txt' matches no file",
        "gs://bucket/in/*.csv": "'gs://bucket/in/a.csv' has an unknown suffix",
        "gs://no-such-bucket/a.txt": "no bucket gs://no-such-bucket",
        "gs://No/a.txt": "has an illegal bucket name",
    }.items():
        with pytest.raises(UsageError, match="--input=") as error:
            make(source, tmp_path / "store")
        assert said in str(error.value) and "\n" not in str(error.value)
    packed = Object("gs://bucket/in/a.txt", 4, "", 1, "gzip")
    monkeypatch.setattr(inputs, "find_objects", lambda url: [packed])
    with pytest.raises(UsageError, match="is stored with the Content-Encoding 'gzip'"):
        make("gs://bucket/in/a.txt", tmp_path / "store")


def test_another_object_of_the_same_name_is_another_input(both, server, tmp_path):
    make(both[1], tmp_path / "store")
    content = server.read("bucket", "in/a.jsonl")
    server.replace("bucket", "in/a.jsonl", content)
    with pytest.raises(UsageError, match="'a.jsonl' was written again, with the same content"):
        make(both[1], tmp_path / "store")
    server.replace("bucket", "in/a.jsonl", content.replace(b"stone", b"stein"))
    with pytest.raises(UsageError, match="the content of 'a.jsonl' has changed"):
        make(both[1], tmp_path / "store")


@pytest.mark.parametrize("at", [0, 100_000])
def test_an_object_that_is_replaced_while_it_is_read(server, monkeypatch, at):
    monkeypatch.setattr(inputs, "AHEAD", 4096)
    content = b"".join(b'{"text": "%d"}\n' % n for n in range(10_000))
    server.replace("bucket", "in/a.jsonl", content)
    (span,) = inputs.files("gs://bucket/in/a.jsonl")
    texts = corpus.read_span(span)
    for _ in range(at // 20):
        next(texts)
    server.replace("bucket", "in/a.jsonl", content)
    with pytest.raises(Fault, match="gs://bucket/in/a.jsonl was replaced or deleted"):
        list(texts)


def test_an_object_that_is_replaced_behind_the_reader_is_noticed(
    both, server, tmp_path, monkeypatch
):
    check = prepare.document_to_cut

    def late(*arguments):
        server.replace("bucket", "in/b.txt", b"other text")
        return check(*arguments)

    monkeypatch.setattr(prepare, "document_to_cut", late)
    with pytest.raises(RunError, match="was edited during the command"):
        make(both[1], tmp_path / "store")


def test_it_is_read_in_ranges_and_a_busy_service_is_asked_again(server, monkeypatch):
    monkeypatch.setattr(inputs, "AHEAD", 4096)
    content = b"".join(b'{"text": "%d"}\n' % n for n in range(2000))
    server.replace("bucket", "in/a.jsonl", content)
    (span,) = inputs.files("gs://bucket/in/a.jsonl")
    server.faults.append(gcs_server.fault((503, "busy"), method="GET", url="a.jsonl", times=2))
    server.requests.clear()
    assert list(corpus.read_span(span)) == [str(n) for n in range(2000)]
    assert len(server.requests) == 2 + -(-len(content) // 4096)
