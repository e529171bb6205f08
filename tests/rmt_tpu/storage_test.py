"""Folders, local and in a bucket: the same behaviour, whatever happens to requests on the way."""

import concurrent.futures
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts

from rmt_tpu import storage
from rmt_tpu.errors import UsageError
from tests import gcs_server

ROOT = Path(__file__).parents[2]
KINDS = ["local", "gs"]
LIMIT_SECONDS = 10  # of a first look that fails


@pytest.fixture(scope="module")
def module_server():
    with gcs_server.running() as server:
        yield server


@pytest.fixture
def server(module_server, monkeypatch):
    """With a new bucket for each test; nothing in the environment but where it is."""
    for name in ("TENSORSTORE_GCS_HTTP_URL", "GOOGLE_AUTH_TOKEN_FOR_TESTING"):
        monkeypatch.setenv(name, "")  # so that what was there comes back at the end
        monkeypatch.delenv(name)
    for name, value in module_server.environment().items():
        monkeypatch.setenv(name, value)
    module_server.faults.clear()
    module_server.requests.clear()
    module_server.bucket = f"bucket-{time.time_ns()}"
    module_server.create_bucket(module_server.bucket)
    return module_server


@pytest.fixture
def gs(server):
    return storage.open_folder(f"gs://{server.bucket}/some/run")


@pytest.fixture(params=KINDS)
def folder(request, tmp_path):
    if request.param == "local":
        return storage.open_folder(tmp_path / "some" / "run")
    return request.getfixturevalue("gs")


def at_once(function, count):
    """What `count` threads that begin together return."""
    start = threading.Barrier(count)

    def begin(index):
        start.wait()
        return function(index)

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


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
        won = [eval(process.communicate(timeout=60)[0]) for process in processes]
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
        assert folder.delete("a")
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
    def test_of_what_can_be_used(self, folder):
        for write in (False, True):
            folder.check(write=write)
        folder.write("a", b"1")
        folder.check(write=True)
        assert folder.names() == ["a"]

    def test_a_local_folder_that_cannot_be(self, tmp_path):
        (tmp_path / "file").write_bytes(b"")
        for name, write in (("file/run", True), ("file", False), ("file", True)):
            folder = storage.open_folder(tmp_path / name)
            with pytest.raises(UsageError) as error:
                folder.check(write=write)
            line(error, folder.url)

    @pytest.fixture(params=[False, True], ids=["read", "write"])
    def refused(self, request):
        """Checks a folder, which must be refused in time."""

        def check(url, *words):
            begin = time.monotonic()
            with pytest.raises(UsageError) as error:
                storage.open_folder(url).check(write=request.param)
            assert time.monotonic() - begin < LIMIT_SECONDS
            return line(error, url, *words)

        return check

    def test_a_missing_bucket(self, server, refused):
        refused("gs://no-such-bucket/run", "there is no bucket gs://no-such-bucket")
        refused(f"gs://{server.bucket}x/run", "there is no bucket", "name")

    def test_no_permission(self, server, gs, refused):
        denied = "bot@p.iam.gserviceaccount.com does not have storage.objects.list access"
        server.faults.append(gcs_server.fault((403, denied)))
        refused(gs.url, "no permission", denied)

    def test_permission_to_read_only(self, server, gs):
        denied = gcs_server.fault((403, "no storage.objects.create access"), method="POST")
        server.faults.append(denied)
        gs.check()
        with pytest.raises(UsageError) as error:
            gs.check(write=True)
        line(error, gs.url, "no permission", "storage.objects.create")

    def test_credentials_that_are_not_accepted(self, server, gs, refused):
        server.faults.append(gcs_server.fault((401, "Invalid Credentials")))
        refused(gs.url, "credentials")

    def test_a_service_that_has_no_time(self, server, gs, refused):
        server.faults.append(gcs_server.fault((503, "busy")))
        refused(gs.url, "503", "busy")

    def test_a_service_that_has_no_time_at_first(self, server, gs):
        server.faults.append(gcs_server.fault((503, "busy"), times=2))
        gs.check(write=True)

    def test_a_server_that_is_not_there(self, gs, refused, monkeypatch):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        refused(gs.url, "not to be reached")

    def test_a_server_that_does_not_answer(self, gs, refused, monkeypatch):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
            refused(gs.url, "not to be reached")

    def test_a_server_that_ends_every_connection(self, server, gs, refused):
        server.faults.append(gcs_server.fault(gcs_server.LOST_REQUEST))
        refused(gs.url, "not to be reached")


OPEN = """
import sys
from rmt_tpu import storage
from rmt_tpu.errors import UsageError
exec(sys.argv[1])
try:
    storage.open_folder("gs://bucket/run").check(write=True)
except UsageError as error:
    print(error)
"""


class TestCredentials:
    """Of the real service, which no test reaches; each in a process of its own."""

    def opened(self, tmp_path, first="", **env):
        """What is told, in how many seconds."""
        environment = {k: v for k, v in os.environ.items() if "GOOGLE" not in k}
        environment.pop("STORAGE_EMULATOR_HOST", None)
        environment |= {"HOME": str(tmp_path), "CLOUDSDK_CONFIG": str(tmp_path)}
        environment |= {"NO_GCE_CHECK": "true", "PYTHONWARNINGS": "error"}
        begin = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", OPEN, first],
            cwd=ROOT,
            env=environment | env,
            capture_output=True,
            encoding="utf-8",
            timeout=60,
        )
        seconds = time.monotonic() - begin
        assert (done.returncode, done.stderr) == (0, "")
        (told,) = done.stdout.splitlines()
        assert "SECRET" not in told and seconds < LIMIT_SECONDS + 4  # with its start
        return told

    def test_none(self, tmp_path):
        assert "gs:// needs credentials, and none were found" in self.opened(tmp_path)

    def test_none_where_a_machine_is_asked_that_does_not_answer(self, tmp_path):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            host = f"127.0.0.1:{listener.getsockname()[1]}"
            env = {"NO_GCE_CHECK": "false", "GCE_METADATA_HOST": host, "GCE_METADATA_IP": host}
            assert "none were found" in self.opened(tmp_path, **env)

    @pytest.mark.parametrize(
        "text", [None, "SECRET", '{"type": "SECRET", "private_key": "SECRET"}']
    )
    def test_a_key_file_that_is_none(self, tmp_path, text):
        file = tmp_path / "key.json"
        if text:
            file.write_text(text)
        told = self.opened(tmp_path, GOOGLE_APPLICATION_CREDENTIALS=str(file))
        assert f"GOOGLE_APPLICATION_CREDENTIALS={file} cannot be used" in told

    def test_a_client_that_is_not_installed(self, tmp_path):
        for module in ("google", "google.cloud.storage"):
            told = self.opened(tmp_path, first=f"sys.modules['{module}'] = None")
            assert "pip install 'rmt_tpu[gcs]'" in told


class TestLostAnswers:
    """The request was served, and the connection ended before its answer: it is sent again."""

    def lose(self, server, times=1, **of):
        server.faults.append(gcs_server.fault(gcs_server.LOST_ANSWER, times=times, **of))

    def test_of_create(self, server, gs):
        self.lose(server, method="POST", url="COMMIT")
        assert gs.create("COMMIT", b"mine")
        assert sum("POST" in request for request in server.requests) == 2
        assert content(gs, "COMMIT") == b"mine"

    def test_of_create_of_a_large_file(self, server, gs):
        data = os.urandom(9 * 2**20)
        for method in ("POST", "PUT"):
            self.lose(server, method=method)
        assert gs.create("a", data)
        assert content(gs, "a") == data

    def test_of_create_where_another_writer_was_first(self, server, gs):
        """The request is lost, and somebody else creates it before it comes again."""
        server.faults.append(gcs_server.fault(gcs_server.LOST_REQUEST, method="POST", times=1))
        name = "some/run/COMMIT"

        def other(method, url):
            if method == "POST" and not server.names(server.bucket):
                server.replace(server.bucket, name, b"other")

        server.faults.append(other)
        assert not gs.create("COMMIT", b"mine")
        assert server.read(server.bucket, name) == b"other"

    @pytest.mark.parametrize("request_of", ["/compose", "name=.*tail-", "DELETE", "first"])
    def test_of_append(self, server, gs, request_of):
        rows = b"" if request_of == "first" else b"1\n"
        if rows:
            gs.append("a", rows)
        of = {"url": request_of} if request_of not in ("DELETE", "first") else {}
        self.lose(server, method="DELETE" if request_of == "DELETE" else "POST", **of)
        before = len(server.requests)
        gs.append("a", b"2\n")
        assert content(gs, "a") == rows + b"2\n"
        assert server.names(server.bucket) == ["some/run/a"]
        assert len(server.requests) > before + 1

    def test_of_delete(self, server, gs):
        gs.write("a", b"1")
        generation = gs.read("a").generation
        self.lose(server, method="DELETE")
        assert gs.delete("a", generation=generation)
        assert gs.read("a") is None

    def test_of_read_write_and_names(self, server, gs):
        self.lose(server, times=2)
        gs.write("a", b"1")
        self.lose(server, times=1, url="alt=media")
        assert content(gs, "a") == b"1"
        self.lose(server)
        assert gs.names() == ["a"]


class TestFaults:
    def uses(self, gs):
        return {
            "read": lambda: gs.read("a"),
            "write": lambda: gs.write("a", b"2"),
            "write large": lambda: gs.write("a", bytes(9 * 2**20)),
            "create": lambda: gs.create("b", b"2"),
            "append": lambda: gs.append("a", b"2"),
            "delete": lambda: gs.delete("a"),
            "names": lambda: gs.names(),
            "delete_folder": lambda: gs.delete_folder("folder"),
        }

    def test_busy_at_first(self, server, gs):
        for name, use in self.uses(gs).items():
            server.replace(server.bucket, "some/run/a", b"1")
            server.replace(server.bucket, "some/run/folder/1", b"1")
            busy = gcs_server.fault((503, "busy"), times=1)
            server.faults[:] = [busy]
            use()
            assert busy("", "") is None, name  # it has happened
            server.faults.clear()
            assert content(gs, "a") is None if name == "delete" else content(gs, "a")
        assert server.names(server.bucket) == ["some/run/a", "some/run/b"]

    def test_forbidden(self, server, gs):
        server.replace(server.bucket, "some/run/a", b"1")
        server.replace(server.bucket, "some/run/folder/1", b"1")
        server.faults.append(gcs_server.fault((403, "bot has no access")))
        for use in self.uses(gs).values():
            with pytest.raises(storage.Fault) as error:
                use()
            line(error, gs.url, "no permission", "bot has no access")

    def test_forbidden_in_the_middle(self, server, gs):
        """Of an upload whose URL is a credential; of a deletion that was allowed to list."""
        server.replace(server.bucket, "some/run/folder/1", b"1")
        for method in ("PUT", "DELETE"):
            server.faults.append(gcs_server.fault((403, "bot has no access"), method=method))
        with pytest.raises(storage.Fault) as error:
            gs.write("a", bytes(9 * 2**20))
        line(error, f"{gs.url}/a", "no permission", "bot has no access")
        with pytest.raises(storage.Fault) as error:
            gs.delete_folder("folder")
        line(error, f"{gs.url}/folder", "bot has no access")
        assert server.names(server.bucket) == ["some/run/folder/1"]

    def test_of_a_missing_bucket(self, server):
        missing = storage.open_folder("gs://no-such-bucket/run")
        for name, use in self.uses(missing).items():
            if name in ("read", "delete"):  # the service does not tell it from a missing file
                assert use() is (None if name == "read" else True)
                continue
            with pytest.raises(storage.Fault) as error:
                use()
            line(error, "there is no bucket gs://no-such-bucket")

    def test_of_tensorstore(self, server, gs):
        server.faults.append(gcs_server.fault((403, "bot has no access")))
        spec = {"driver": "zarr3", "kvstore": gs.kvstore()}
        with pytest.raises(storage.Fault) as error, storage.faults(f"{gs.url}: "):
            ts.open(spec, context=gs.context()).result()
        line(error, gs.url, "bot has no access")

    def test_tensorstore_is_patient_with_a_busy_service(self, server, gs):
        server.faults.append(gcs_server.fault((503, "busy"), times=4))
        store = ts.KvStore.open(gs.kvstore(), context=gs.context()).result()
        store["a"] = b"1"
        assert store["a"] == content(gs, "a") == b"1"

    def test_what_arrives_damaged_is_not_returned(self, server, gs):
        gs.write("a", b"1" * 1000)
        server._storage.resource(server.bucket, "some/run/a")["crc32c"] = "AAAAAA=="
        with pytest.raises(storage.Fault) as error:
            gs.read("a")
        line(error, f"{gs.url}/a", "checksum")

    def test_a_file_that_is_replaced_or_deleted_while_it_is_read(self, server, gs):
        name = "some/run/a"

        def replaced(method, url):
            if "alt=media" in url and server.read(server.bucket, name) == b"old":
                server.replace(server.bucket, name, b"new and longer")

        def deleted(method, url):
            if "alt=media" in url and server.names(server.bucket):
                server.remove(server.bucket, name)

        gs.write("a", b"old")
        server.faults[:] = [replaced]
        assert content(gs, "a") == b"new and longer"
        server.faults[:] = [deleted]
        assert gs.read("a") is None

    def test_another_writer_who_appends_is_noticed(self, server, gs):
        gs.write("a", b"1\n")

        def other(method, url):
            if "/compose" in url and server.read(server.bucket, "some/run/a") == b"1\n":
                server.replace(server.bucket, "some/run/a", b"1\nother\n")

        server.faults.append(other)
        with pytest.raises(storage.Fault) as error:
            gs.append("a", b"2\n")
        line(error, f"{gs.url}/a", "another writer")
        assert server.names(server.bucket) == ["some/run/a"]
        assert content(gs, "a") == b"1\nother\n"

    def test_what_a_killed_append_leaves_is_no_name(self, server, gs):
        gs.append("a", b"1\n")
        server.faults.append(gcs_server.fault((403, "no"), method="DELETE"))
        gs.append("a", b"2\n")
        assert len(server.names(server.bucket)) == 2
        assert gs.names() == ["a"] and content(gs, "a") == b"1\n2\n"


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
