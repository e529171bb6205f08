"""Folders in a bucket whose service fails, or is not heard: one line, or all is well."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tensorstore as ts

from rmt_tpu import storage
from rmt_tpu.errors import UsageError
from tests import gcs_server
from tests.tiers import later

ROOT = Path(__file__).parents[3]
# Of a first look that fails: less than clients try for when nobody tells them otherwise.
LIMIT_SECONDS = 110


@pytest.fixture
def gs(server):
    return storage.open_folder(f"gs://{server.bucket}/some/run")


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


class TestCheck:
    def test_a_local_folder_that_cannot_be(self, tmp_path):
        (tmp_path / "file").write_bytes(b"")
        for name, write in (("file/run", True), ("file", False), ("file", True)):
            folder = storage.open_folder(tmp_path / name)
            with pytest.raises(UsageError) as error:
                folder.check(write=write)
            line(error, folder.url)

    @pytest.fixture(params=[True, *later(False)], ids=["write", "read"])
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

    @pytest.mark.slow
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
        refused(gs.url, "cannot be reached")

    def test_a_server_that_does_not_answer(self, gs, refused, monkeypatch):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
            refused(gs.url, "cannot be reached")

    @pytest.mark.slow
    def test_a_server_that_ends_every_connection(self, server, gs, refused):
        server.faults.append(gcs_server.fault(gcs_server.LOST_REQUEST))
        refused(gs.url, "cannot be reached")


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
            timeout=600,
        )
        seconds = time.monotonic() - begin
        assert (done.returncode, done.stderr) == (0, "")
        (told,) = done.stdout.splitlines()
        assert "SECRET" not in told and seconds < LIMIT_SECONDS
        return told

    def test_none(self, tmp_path):
        assert " needs credentials, and none were found" in self.opened(tmp_path)

    @pytest.mark.slow
    def test_none_where_a_machine_is_asked_that_does_not_answer(self, tmp_path):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            host = f"127.0.0.1:{listener.getsockname()[1]}"
            env = {"NO_GCE_CHECK": "false", "GCE_METADATA_HOST": host, "GCE_METADATA_IP": host}
            assert "none were found" in self.opened(tmp_path, **env)

    @pytest.mark.parametrize(
        "text", ['{"type": "SECRET", "private_key": "SECRET"}', *later(None, "SECRET")]
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

    def test_of_check(self, server, gs):
        """The probe is gone when its deletion is asked for again: the bucket is there."""
        self.lose(server, method="DELETE")
        gs.check(write=True)
        assert server.names(server.bucket) == []

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
        line(error, f"{gs.url}/a", "another process is writing")
        assert server.names(server.bucket) == ["some/run/a"]
        assert content(gs, "a") == b"1\nother\n"

    def test_what_a_killed_append_leaves_is_no_name(self, server, gs):
        gs.append("a", b"1\n")
        server.faults.append(gcs_server.fault((403, "no"), method="DELETE"))
        gs.append("a", b"2\n")
        assert len(server.names(server.bucket)) == 2
        assert gs.names() == ["a"] and content(gs, "a") == b"1\n2\n"
