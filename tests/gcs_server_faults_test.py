"""Faults of the object server of the tests, and the server itself."""

import os
import socket
import threading

import pytest
from google.api_core import exceptions
from google.cloud.storage.retry import DEFAULT_RETRY

from tests import gcs_clients, gcs_server
from tests.gcs_clients import ask, kvstore


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

    def test_an_error_of_its_own_is_not_hidden(self):
        def broken(method, url):
            raise RuntimeError("a fault that is wrong")

        with pytest.raises(AssertionError, match="a fault that is wrong"):
            with gcs_server.running("bucket") as other:
                other.faults.append(broken)
                assert ask(other, "GET", "/storage/v1/b/bucket")[0] == 500
