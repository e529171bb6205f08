"""The object server of the tests: arrays through it, faults on demand, and the server itself."""

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorstore as ts
from google.api_core import exceptions
from google.cloud.storage.retry import DEFAULT_RETRY

from tests import gcs_clients, gcs_server
from tests.gcs_clients import ask, at_once, kvstore

CRC32C = {"name": "crc32c"}
SHARDED = {
    "name": "sharding_indexed",
    "configuration": {
        "chunk_shape": [4, 4],
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, CRC32C],
        "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, CRC32C],
    },
}


@pytest.fixture
def server(server, monkeypatch):
    gcs_clients.lead_bare_clients_to(server, monkeypatch)
    return server


@pytest.fixture
def client(server):
    with gcs_clients.client() as client:
        yield client


@pytest.fixture
def bucket(client, server):
    return client.bucket(server.bucket)


class TestArrays:
    def array(self, server, path, codecs, **options):
        return ts.open(
            {
                "driver": "zarr3",
                "kvstore": {"driver": "gcs", "bucket": server.bucket, "path": path},
                "metadata": {
                    "chunk_grid": {
                        "name": "regular",
                        "configuration": {"chunk_shape": [16, 16]},
                    },
                    "codecs": codecs,
                },
            },
            **options,
        ).result()

    @pytest.mark.parametrize(
        "codecs",
        [[SHARDED], [{"name": "bytes"}, {"name": "zstd"}, CRC32C]],
        ids=["sharded", "zstd"],
    )
    def test_zarr3(self, server, codecs):
        values = np.random.default_rng(0).standard_normal((50, 40)).astype(np.float32)
        new = self.array(server, "x/", codecs, create=True, dtype=ts.float32, shape=values.shape)
        new.write(values).result()
        # With nothing in a cache, and by ranges where it is sharded.
        old = self.array(server, "x/", codecs, open=True, context=ts.Context())
        np.testing.assert_array_equal(old.read().result(), values)
        np.testing.assert_array_equal(old[17:19, 30:].read().result(), values[17:19, 30:])

    def test_a_damaged_chunk_is_found(self, server):
        codecs = [{"name": "bytes"}, CRC32C]
        new = self.array(server, "x/", codecs, create=True, dtype=ts.float32, shape=(16, 16))
        new.write(np.ones((16, 16), np.float32)).result()
        (chunk,) = (n for n in server.names(server.bucket) if "/c/" in n)
        data = bytearray(server.read(server.bucket, chunk))
        data[100] ^= 1
        server.replace(server.bucket, chunk, bytes(data))
        old = self.array(server, "x/", codecs, open=True, context=ts.Context())
        with pytest.raises(ValueError, match="Digest mismatch"):
            old.read().result()

    def test_ocdbt_from_several_writers_at_once(self, server):
        """Each commits a new root on the condition that it is the one it has read."""
        spec = {"driver": "ocdbt", "base": f"gs://{server.bucket}/db/"}

        def write(writer):
            store = ts.KvStore.open(spec, context=ts.Context()).result()
            for index in range(10):
                store[f"{writer}/{index}"] = str(writer * 10 + index)

        at_once(write, 4)
        store = ts.KvStore.open(spec, context=ts.Context()).result()
        written = {key: int(store[key]) for key in store.list().result()}
        expected = {f"{w}/{i}".encode(): w * 10 + i for w in range(4) for i in range(10)}
        assert written == expected


class TestFaults:
    SOON = DEFAULT_RETRY.with_delay(initial=0.01, maximum=0.05)

    def test_a_status_for_some_requests(self, server, bucket):
        server.faults.append(gcs_server.fault((503, "busy"), method="POST", times=2))
        bucket.blob("a").upload_from_string(b"1", retry=self.SOON)
        assert server.read(server.bucket, "a") == b"1"
        assert sum(method == "POST" for method, _ in server.requests) == 3

    def test_a_refusal_is_told_with_its_message(self, server, bucket):
        server.faults.append(gcs_server.fault((403, "bot does not have access"), url="/o/secret"))
        bucket.blob("open").upload_from_string(b"1")
        assert bucket.blob("open").exists()
        with pytest.raises(exceptions.Forbidden, match="bot does not have access"):
            bucket.blob("secret").reload()

    def test_an_upload_is_known_by_its_objects_name(self, server, bucket):
        server.faults.append(gcs_server.fault((403, "no"), url=r"/upload/.*name=run/COMMIT\b"))
        bucket.blob("run/other").upload_from_string(b"1")
        for data in (b"1", os.urandom(9 * 2**20)):
            with pytest.raises(exceptions.Forbidden):
                bucket.blob("run/COMMIT").upload_from_string(data)
        with pytest.raises(ValueError, match="PERMISSION_DENIED"):
            kvstore(server)["run/COMMIT"] = b"1"

    def test_a_lost_answer_leaves_the_write_and_the_condition_fails_when_repeated(
        self, server, bucket
    ):
        server.faults.append(gcs_server.fault(gcs_server.LOST_ANSWER, method="POST", times=1))
        with pytest.raises(exceptions.PreconditionFailed):
            bucket.blob("a").upload_from_string(b"1", if_generation_match=0, retry=self.SOON)
        assert server.read(server.bucket, "a") == b"1"

    def test_a_lost_request_does_nothing_until_it_is_repeated(self, server, bucket):
        server.faults.append(gcs_server.fault(gcs_server.LOST_REQUEST, method="POST", times=1))
        bucket.blob("a").upload_from_string(b"1", if_generation_match=0, retry=self.SOON)
        assert server.read(server.bucket, "a") == b"1"
        assert sum(method == "POST" for method, _ in server.requests) == 2

    def test_a_lost_answer_to_the_end_of_a_resumable_upload(self, server, bucket):
        data = os.urandom(9 * 2**20)
        server.faults.append(gcs_server.fault(gcs_server.LOST_ANSWER, method="PUT", times=1))
        blob = bucket.blob("a")
        blob.upload_from_string(data, if_generation_match=0, retry=self.SOON)
        assert blob.download_as_bytes() == data
        assert sum(method == "PUT" for method, _ in server.requests) == 2

    def test_tensorstore_tries_again(self, server):
        store = kvstore(server)
        for outcome in ((503, "busy"), (429, "slow down"), gcs_server.LOST_ANSWER):
            server.faults[:] = [gcs_server.fault(outcome, times=2)]
            store["a"] = b"1"
            server.faults[:] = [gcs_server.fault(outcome, times=2)]
            assert store["a"] == b"1"
            assert len(server.requests) == 6
            server.requests.clear()

    def test_a_delay_holds_up_what_it_matches_only(self, monkeypatch):
        naps = []
        monkeypatch.setattr(gcs_server, "time", SimpleNamespace(sleep=naps.append))
        fault = gcs_server.delay(0.5, method="GET", url="/o/slow")
        for method, url in (("GET", "/o/slow"), ("GET", "/o/a"), ("POST", "/o/slow")):
            assert fault(method, url) is None
        assert naps == [0.5]

    def test_a_request_that_is_held_up_holds_up_no_other(self, server, bucket):
        bucket.blob("a").upload_from_string(b"1")
        go_on = threading.Event()

        def hold(method, url):
            if "/o/slow" in url:
                go_on.wait()

        server.faults.append(hold)
        slow = threading.Thread(target=lambda: bucket.blob("slow").exists())
        slow.start()
        for _ in range(3):
            assert bucket.blob("a").exists()
        assert slow.is_alive()
        go_on.set()
        slow.join()


class TestServer:
    def test_of_a_client_that_dies_nothing_is_kept(self, server):
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            path = f"/upload/storage/v1/b/{server.bucket}/o?uploadType=media&name=a"
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
            client.sendall(head.encode() + b"x" * 999)
            client.shutdown(socket.SHUT_WR)
            assert client.recv(1) == b""  # it has noticed
        assert server.names(server.bucket) == [] and server.errors == []

    def test_connections_are_kept_and_serve_at_once(self, server):
        server.replace(server.bucket, "a", b"1")
        path = f"/storage/v1/b/{server.bucket}/o/a?alt=media"
        all_there = threading.Barrier(16)

        def meet(method, url):
            all_there.wait()

        server.faults.append(meet)
        assert at_once(lambda _: ask(server, "GET", path)[2], 16) == [b"1"] * 16
        server.faults.clear()
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
        for _ in range(2):
            connection.request("GET", path)
            kept = connection.sock
            assert connection.getresponse().read() == b"1"
        assert connection.sock is kept
        connection.close()

    def test_the_cost_of_a_write_does_not_grow_with_what_is_there(self, server, bucket):
        """Unpatched, each writes all metadata: 5000 objects would take minutes."""

        def seconds():
            begin = time.process_time()
            for index in range(20):
                bucket.blob(f"new/{index}").upload_from_string(b"")
            return time.process_time() - begin

        seconds()
        few = min(seconds() for _ in range(3))
        for index in range(5000):
            server.replace(server.bucket, f"old/{index}", b"")
        many = min(seconds() for _ in range(3))
        assert many < 3 * few + 0.1

    def test_an_error_of_its_own_is_not_hidden(self):
        def broken(method, url):
            raise RuntimeError("a fault that is wrong")

        with pytest.raises(AssertionError, match="a fault that is wrong"):
            with gcs_server.running("bucket") as other:
                other.faults.append(broken)
                assert ask(other, "GET", "/storage/v1/b/bucket")[0] == 500

    def test_when_it_stops_its_connections_end(self):
        with gcs_server.running("bucket") as other:
            connection = http.client.HTTPConnection(other.url.removeprefix("http://"), timeout=600)
            connection.request("GET", "/storage/v1/b/bucket")
            connection.getresponse().read()
        with pytest.raises(OSError):
            connection.request("GET", "/storage/v1/b/bucket")
            connection.getresponse()
        connection.close()

    def test_as_a_program(self):
        program = subprocess.Popen(
            [sys.executable, "-m", "tests.gcs_server", "--bucket=one", "--bucket=two"],
            cwd=Path(__file__).parents[1],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
        try:
            name, _, url = program.stdout.readline().removeprefix("export ").strip().partition("=")
            assert name == "STORAGE_EMULATOR_HOST"
            with urllib.request.urlopen(f"{url}/storage/v1/b/two") as answer:
                assert json.load(answer)["name"] == "two"
            with pytest.raises(urllib.error.HTTPError, match="404") as missing:
                urllib.request.urlopen(f"{url}/storage/v1/b/three")
            missing.value.close()
        finally:
            program.terminate()
            out, err = program.communicate(timeout=600)
        assert (out, err) == ("", "")
