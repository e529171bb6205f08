"""Folders, local and in a bucket: the same behaviour, whatever happens to requests on the way."""

import os
import re
import resource
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts

from rmt_tpu import storage
from rmt_tpu.errors import UsageError
from tests.gcs_clients import at_once
from tests.tiers import later

ROOT = Path(__file__).parents[3]
KINDS = ["local", "gs"]


@pytest.fixture
def gs(server):
    return storage.open_folder(f"gs://{server.bucket}/some/run")


@pytest.fixture(params=KINDS)
def folder(request, tmp_path):
    if request.param == "local":
        return storage.open_folder(tmp_path / "some" / "run")
    return request.getfixturevalue("gs")


def content(folder, name):
    found = folder.read(name)
    return None if found is None else found.data


def line(error, *words):
    """The message of an error, which is one line with these words and without what is secret."""
    message = str(error.value)
    assert "\n" not in message and len(message) < 500
    for word in words:
        assert word in message
    assert not re.search(r"https?://|upload_id|Bearer|SECRET", message)
    return message


class TestFiles:
    def test_what_is_written_is_read(self, folder):
        assert folder.read("a.json") is None
        for data in (b"", b"{}", bytes(range(256)) * 40):
            folder.write("a.json", data)
            assert content(folder, "a.json") == data
        folder.write("deep/er/a b+ä.txt", b"1")
        assert content(folder, "deep/er/a b+ä.txt") == b"1"
        assert content(folder.child("deep").child("er"), "a b+ä.txt") == b"1"
        assert content(folder, "deep/er/none") is content(folder, "deep") is None

    def test_a_file_of_more_than_the_limit_is_refused(self, folder):
        folder.write("a", b"x" * 1000)
        assert len(folder.read("a", limit=1000).data) == 1000
        with pytest.raises(storage.Fault) as error:
            folder.read("a", limit=999)
        line(error, f"{folder.url}/a", "1000 bytes", "999")

    def test_large_files(self, folder):
        data = os.urandom(9 * 2**20)  # which the client sends in another way than small ones
        folder.write("a", data)
        assert content(folder, "a") == data
        assert folder.create("b", data)
        assert not folder.create("a", data[:-1])

    def test_a_reader_sees_the_old_file_or_the_new_one(self, folder):
        versions = [bytes([i]) * 300_000 for i in range(20)]
        folder.write("a", versions[0])
        done = threading.Event()

        def write(_):
            for version in versions:
                folder.write("a", version)
            done.set()

        def read(_):
            seen = 0
            while not done.is_set() or not seen:
                assert content(folder, "a") in versions
                seen += 1

        at_once(lambda index: write(index) if index == 0 else read(index), 3)

    def test_a_file_is_replaced_only_as_it_was_read(self, folder):
        folder.write("a", b"1")
        old = folder.read("a").generation
        assert folder.replace("a", b"2", generation=old)
        assert not folder.replace("a", b"3", generation=old)
        assert folder.replace("a", b"2", generation=old)  # said twice: its answer was lost
        assert content(folder, "a") == b"2"

    def test_generations_are_of_the_file_as_it_was_read(self, folder):
        folder.write("a", b"1")
        first = folder.read("a").generation
        assert folder.read("a").generation == first
        folder.write("a", b"1")
        assert folder.read("a").generation != first


class TestCreate:
    def test_only_where_nothing_is(self, folder):
        assert folder.create("COMMIT", b"mine")
        assert not folder.create("COMMIT", b"other")
        assert content(folder, "COMMIT") == b"mine"
        assert folder.create("COMMIT", b"mine")  # as when it is repeated
        assert folder.delete("COMMIT")
        assert folder.create("COMMIT", b"other")

    def test_exactly_one_of_many_succeeds(self, folder):
        for name in ("a", "b", "c"):
            won = at_once(lambda i, name=name: folder.create(name, str(i).encode()), 12)
            assert won.count(True) == 1
            assert content(folder, name) == str(won.index(True)).encode()

    @pytest.mark.parametrize("folder", ["local", *later("gs")], indirect=True)
    def test_exactly_one_of_several_processes_succeeds(self, folder):
        code = (
            "import sys; from rmt_tpu import storage; folder = storage.open_folder(sys.argv[1])\n"
            "print('ready', flush=True); sys.stdin.readline()\n"
            "print([folder.create(str(i), sys.argv[2].encode()) for i in range(20)])"
        )
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", code, folder.url, str(index)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                encoding="utf-8",
            )
            for index in range(2)
        ]
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        won = [eval(process.communicate(timeout=600)[0]) for process in processes]
        for i, (first, second) in enumerate(zip(*won, strict=True)):
            assert first != second
            assert content(folder, str(i)) == (b"0" if first else b"1")


class TestAppend:
    def test_rows_come_in_order(self, folder):
        rows = [f'{{"step": {i}}}\n'.encode() for i in range(5)]
        for count, row in enumerate(rows, start=1):
            folder.append("metrics.jsonl", row)
            assert content(folder, "metrics.jsonl") == b"".join(rows[:count])
        assert folder.names() == ["metrics.jsonl"]

    def test_on_what_was_written_whole(self, folder):
        folder.write("a", b"1\n")
        folder.append("a", b"2\n")
        folder.append("a", b"")
        assert content(folder, "a") == b"1\n2\n"


class TestDelete:
    def test_whatever_is_there(self, folder):
        assert folder.delete("a") and folder.delete("b/c")
        assert not folder.local_path or not (folder.local_path / "b").exists()
        folder.write("a", b"1")
        assert folder.delete("a")
        assert folder.read("a") is None

    def test_only_the_generation_that_was_read(self, folder):
        folder.write("a", b"1")
        old = folder.read("a").generation
        folder.write("a", b"2")
        assert not folder.delete("a", generation=old)
        assert content(folder, "a") == b"2"
        assert folder.delete("a", generation=folder.read("a").generation)
        assert folder.read("a") is None
        assert folder.delete("a", generation=old)


class TestNames:
    def test_files_and_folders_of_one_level(self, folder):
        assert folder.names() == folder.names("absent") == []
        for name in ("b", "a/1", "a/2/x", "ab/3", "a0"):
            folder.write(name, b"1")
        assert folder.names() == ["a/", "a0", "ab/", "b"]
        assert folder.names("a") == ["1", "2/"]
        assert folder.child("a").names("2") == ["x"]
        assert folder.names("b") == []

    def test_more_than_one_page(self, folder, request):
        names = sorted(f"{i:04d}" for i in range(1100))
        if folder.local_path:
            (folder.local_path / "12").mkdir(parents=True)
            for name in names:
                (folder.local_path / "12" / name).write_bytes(b"")
        else:
            server = request.getfixturevalue("server")
            for name in names:
                server.replace(server.bucket, f"some/run/12/{name}", b"")
        assert folder.names("12") == names
        folder.delete_folder("12")
        assert folder.names("12") == folder.names() == []

    def test_deletion_of_a_folder_spares_names_that_begin_alike(self, folder):
        others = ["a.txt", "a0", "ab/1", "a-/1", "b", "A/1"]
        for name in [*others, "a/1", "a/2/3/4", "a/ä b"]:
            folder.write(name, b"1")
        folder.delete_folder("a")
        folder.delete_folder("absent")
        assert all(content(folder, name) == b"1" for name in others)
        assert len(folder.names()) == len(others)

    def test_deletion_by_two_at_once(self, folder):
        for index in range(30):
            folder.write(f"a/{index % 3}/{index}", b"1")
        at_once(lambda _: folder.delete_folder("a"), 3)
        assert folder.names() == []


class TestArrays:
    def test_tensorstore_writes_and_reads_them(self, folder):
        values = np.arange(600, dtype=np.float32).reshape(20, 30)
        kvstore = folder.child("x").kvstore()
        assert kvstore["path"].endswith("some/run/x/")
        spec = {"driver": "zarr3", "kvstore": kvstore}
        new = {"create": True, "dtype": ts.float32, "shape": values.shape}
        ts.open(spec, context=folder.context(), **new).result().write(values).result()
        old = ts.open(spec, context=folder.context()).result()
        np.testing.assert_array_equal(old[3:5].read().result(), values[3:5])
        assert folder.names("x") == ["c/", "zarr.json"]


class TestNamesThatAreRefused:
    BAD = ["..", "../a", "a/../../b", "/etc/passwd", "", "a//b", "a/", ".", "gs://b/c", "C:\\x"]
    BAD += ["a\0b", "a\nb", "\udc80"]

    @pytest.mark.parametrize("name", BAD)
    def test_by_every_method(self, folder, name):
        folder.write("a", b"1")
        for use in (
            folder.child,
            folder.read,
            folder.delete,
            folder.delete_folder,
            lambda n: folder.write(n, b""),
            lambda n: folder.create(n, b""),
            lambda n: folder.append(n, b""),
            lambda n: folder.names(n) if n else folder.child(n),
        ):
            with pytest.raises(UsageError):
                use(name)
        assert folder.names() == ["a"]

    @pytest.mark.parametrize(
        "url",
        ["", "s3://bucket/a", "file:///tmp/a", "http://host/a", "gs:/bucket/a", "GS://bucket/a"]
        + ["gs://", "gs:///a", "gs://Bucket/a", "gs://ab/a", "gs://my bucket/a", "gs://googbucket"]
        + ["gs://bucket/../a", "gs://bucket/a/../../b", "gs://bucket//a", "gs://bucket/a\nb"],
    )
    def test_urls(self, server, url):
        with pytest.raises(UsageError) as error:
            storage.open_folder(url)
        assert "legal" in str(error.value) and "\n" not in str(error.value)
        assert server.requests == []

    def test_urls_that_are_accepted(self, server, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for url in ("runs/a", "./a", "/tmp/a", "~/a", "gs://my-bucket.b_1", "gs://bucket/a/"):
            folder = storage.open_folder(url)
            assert folder.url.rstrip("/") == url.rstrip("/")
            assert storage.open_folder(folder) is folder
        assert server.requests == [] and not list(tmp_path.iterdir())


class TestCheck:
    def test_leaves_nothing_behind(self, folder):
        for write in (False, True):
            folder.check(write=write)
        folder.write("a", b"1")
        folder.check(write=True)
        assert folder.names() == ["a"]


class TestFullDisk:
    @pytest.fixture
    def full(self):
        """No file may become longer than 100 kB, which is an error like that of a full disk."""
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        yield
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def test_what_was_there_stays(self, tmp_path, full):
        folder = storage.open_folder(tmp_path)
        folder.write("a", b"1\n")
        for use in (folder.write, folder.append, lambda _, data: folder.create("b", data)):
            with pytest.raises(storage.Fault) as error:
                use("a", b"x" * 200_000)
            line(error, folder.url)
            assert content(folder, "a") == b"1\n"
        assert folder.names() == ["a"]
        folder.append("a", b"2\n")
        assert content(folder, "a") == b"1\n2\n"
