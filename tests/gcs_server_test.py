"""The object server of the tests does what Google Cloud Storage documents, seen by real clients.

https://cloud.google.com/storage/docs/json_api: what is wrong here would make every other test of
`gs://` worth nothing.
"""

import io
import json
import os

import numpy as np
import pytest
import tensorstore as ts
from google.api_core import exceptions

from tests import gcs_clients
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


class TestConditions:
    def test_an_upload_for_generation_0_creates_and_never_replaces(self, bucket):
        bucket.blob("a").upload_from_string(b"1", if_generation_match=0)
        with pytest.raises(exceptions.PreconditionFailed, match="pre-conditions"):
            bucket.blob("a").upload_from_string(b"2", if_generation_match=0)
        assert bucket.blob("a").download_as_bytes() == b"1"

    def test_an_upload_for_a_generation_replaces_that_one_only(self, bucket):
        blob = bucket.blob("a")
        blob.upload_from_string(b"1")
        first = blob.generation
        blob.upload_from_string(b"2", if_generation_match=first)
        assert blob.generation > first
        for stale in (first, 1):
            with pytest.raises(exceptions.PreconditionFailed):
                bucket.blob("a").upload_from_string(b"3", if_generation_match=stale)
        with pytest.raises(exceptions.PreconditionFailed):
            bucket.blob("absent").upload_from_string(b"3", if_generation_match=first)
        with pytest.raises(exceptions.PreconditionFailed):
            bucket.blob("a").upload_from_string(b"3", if_generation_not_match=blob.generation)
        assert bucket.blob("a").download_as_bytes() == b"2"

    def test_a_resumable_upload_obeys_them_when_it_begins_and_when_it_ends(self, bucket):
        class Overtaken(io.BytesIO):
            """Before its second chunk is read, the object is written by somebody else."""

            def read(self, size=-1):
                if self.tell():
                    bucket.blob("a").upload_from_string(b"other")
                return super().read(size)

        data = Overtaken(os.urandom(300_000))
        with pytest.raises(exceptions.PreconditionFailed):
            bucket.blob("a", chunk_size=262_144).upload_from_file(data, if_generation_match=0)
        assert bucket.blob("a").download_as_bytes() == b"other"

    def test_deletes(self, bucket, server):
        blob = bucket.blob("a")
        blob.upload_from_string(b"1")
        first = blob.generation
        blob.upload_from_string(b"2")
        with pytest.raises(exceptions.PreconditionFailed):
            bucket.blob("a").delete(if_generation_match=first)
        assert server.names(server.bucket) == ["a"]
        bucket.blob("a").delete(if_generation_match=blob.generation)
        assert server.names(server.bucket) == []
        with pytest.raises(exceptions.NotFound, match="No such object"):
            bucket.blob("a").delete()

    def test_reads_of_data_and_of_metadata(self, bucket, server):
        blob = bucket.blob("a")
        blob.upload_from_string(b"1")
        now, path = blob.generation, f"/storage/v1/b/{server.bucket}/o/a"
        for media in ("", "&alt=media"):
            expected = {
                f"ifGenerationMatch={now}": 200,
                f"ifGenerationMatch={now + 1}": 412,
                "ifGenerationMatch=0": 412,
                f"ifGenerationNotMatch={now}": 304,
                f"ifGenerationNotMatch={now + 1}": 200,
                "ifMetagenerationMatch=1": 200,
                "ifMetagenerationMatch=2": 412,
                "ifMetagenerationNotMatch=1": 304,
                f"generation={now}": 200,
                f"generation={now + 1}": 404,
            }
            for query, status in expected.items():
                assert ask(server, "GET", f"{path}?{query}{media}")[0] == status, query + media

    def test_compose(self, bucket, server):
        parts = [bucket.blob(name) for name in ("a", "b")]
        for part, data in zip(parts, (b"1", b"2"), strict=True):
            part.upload_from_string(data)
        generation = parts[0].generation
        bucket.blob("a").compose(parts, if_generation_match=generation)
        assert bucket.get_blob("a").component_count == 2
        assert bucket.blob("a").download_as_bytes() == b"12"
        # The same once more, as when the answer was lost.
        with pytest.raises(exceptions.PreconditionFailed):
            bucket.blob("a").compose(parts, if_generation_match=generation)
        with pytest.raises(exceptions.PreconditionFailed):
            bucket.blob("c").compose(
                [bucket.blob("a"), bucket.blob("b")], if_source_generation_match=[generation, None]
            )
        with pytest.raises(exceptions.NotFound):
            bucket.blob("c").compose(parts)  # of generations that are gone
        with pytest.raises(exceptions.NotFound):
            bucket.blob("c").compose([bucket.blob("b"), bucket.blob("absent")])
        with pytest.raises(exceptions.BadRequest, match="32"):
            bucket.blob("c").compose([parts[1]] * 33)
        assert server.names(server.bucket) == ["a", "b"]


class TestDownloads:
    @pytest.mark.parametrize(
        ("wanted", "status", "part"),
        [
            ("bytes=0-", 206, (0, 10)),
            ("bytes=2-4", 206, (2, 5)),
            ("bytes=9-99", 206, (9, 10)),
            ("bytes=-3", 206, (7, 10)),
            ("bytes=-99", 206, (0, 10)),
            ("bytes=10-", 416, None),
            ("bytes=10-20", 416, None),
            ("bytes=-0", 416, None),
            ("lines=1-2", 200, (0, 10)),
            (None, 200, (0, 10)),
        ],
    )
    def test_ranges(self, server, wanted, status, part):
        data = b"0123456789"
        server.replace(server.bucket, "a", data)
        path = f"/storage/v1/b/{server.bucket}/o/a?alt=media"
        got, headers, body = ask(server, "GET", path, **({"Range": wanted} if wanted else {}))
        assert got == status
        if part is None:
            assert headers["Content-Range"] == "bytes */10"
            assert json.loads(body)["error"]["code"] == 416
            return
        start, stop = part
        assert body == data[start:stop]
        span = f"bytes {start}-{stop - 1}/10" if status == 206 else None
        assert headers["Content-Range"] == span

    def test_tensorstore_reads_ranges_and_generations(self, server, bucket):
        bucket.blob("a").upload_from_string(b"0123456789")
        store = kvstore(server)
        whole = store.read("a").result()
        assert whole.value == b"0123456789"
        assert str(bucket.get_blob("a").generation).encode() != b"0"
        again = store.read("a", if_not_equal=whole.stamp.generation).result()
        assert again.state == "unspecified"
        assert store["a"] == b"0123456789"

    def test_any_bytes_and_names_come_back(self, server, bucket):
        store = kvstore(server)
        data = np.random.default_rng(0).bytes(100_000) + b"\r\n--\r\n\x00"
        names = ["a", "a b", "a%2Fb", "a/b", "a//b", "/a", "a/", "ä/ö", "a+b&c=d?#", "o/x/compose"]
        for name in names:
            bucket.blob(name).upload_from_string(data + name.encode())
        for name in names:
            assert store[name] == data + name.encode()
            store[name] = b"2" + name.encode()
        for name in names:
            assert bucket.blob(name).download_as_bytes() == b"2" + name.encode()
        assert server.names(server.bucket) == sorted(names)
        bucket.blob("empty").upload_from_string(b"")
        assert store["empty"] == bucket.blob("empty").download_as_bytes() == b""


class TestLists:
    def names(self, blobs):
        return [blob.name for blob in blobs]

    def test_folders(self, client, server, bucket):
        for name in ("a", "b/1", "b/c/1", "b/c/2", "b/c0", "b/d/1", "e/1"):
            server.replace(server.bucket, name, b"")
        listed = client.list_blobs(bucket, delimiter="/")
        assert self.names(listed) == ["a"]
        assert listed.prefixes == {"b/", "e/"}
        listed = client.list_blobs(bucket, prefix="b/", delimiter="/")
        assert self.names(listed) == ["b/1", "b/c0"]
        assert listed.prefixes == {"b/c/", "b/d/"}

    def test_pages_count_objects_and_folders(self, client, server, bucket):
        for name in ("a/1", "a/2", "b", "c/1", "d", "e/1", "e/2"):
            server.replace(server.bucket, name, b"")
        listed = client.list_blobs(bucket, delimiter="/", page_size=2)
        pages = [(self.names(page), set(page.prefixes)) for page in listed.pages]
        assert pages == [(["b"], {"a/"}), (["d"], {"c/"}), ([], {"e/"})]
        assert len(server.requests) == 3

    def test_a_page_has_a_thousand_at_most(self, client, server, bucket):
        names = sorted(f"{i:04d}" for i in range(2345))
        for name in names:
            server.replace(server.bucket, name, b"")
        listed = client.list_blobs(bucket, page_size=5000)
        assert [len(self.names(page)) for page in listed.pages] == [1000, 1000, 345]
        assert self.names(client.list_blobs(bucket)) == names
        assert self.names(client.list_blobs(bucket, max_results=1200)) == names[:1200]

    def test_tensorstore_lists_and_deletes_what_is_in_a_folder_only(self, server):
        for name in ("a", "b/1", "b/2", "b0", "bb/1", "c"):
            server.replace(server.bucket, name, b"")
        store = kvstore(server, "b/")
        assert sorted(store.list().result()) == [b"1", b"2"]
        store.delete_range(ts.KvStore.KeyRange()).result()
        assert server.names(server.bucket) == ["a", "b0", "bb/1", "c"]


class TestErrors:
    def test_every_request_to_a_missing_bucket_is_told_so(self, client, server):
        missing = client.bucket("no-such-bucket")
        for request in (
            lambda: list(client.list_blobs(missing)),
            lambda: missing.blob("a").download_as_bytes(),
            lambda: missing.blob("a").upload_from_string(b"1"),
            lambda: missing.blob("a").upload_from_string(os.urandom(9 * 2**20)),
            lambda: missing.blob("a").delete(),
            lambda: missing.reload(),
        ):
            with pytest.raises(exceptions.NotFound):
                request()
        status, headers, body = ask(server, "GET", "/storage/v1/b/no-such-bucket/o/a?alt=media")
        assert status == 404 and headers["Content-Type"].startswith("application/json")
        assert json.loads(body)["error"]["message"] == "The specified bucket does not exist."

    def test_a_wrong_checksum_is_refused(self, server, bucket):
        blob = bucket.blob("a")
        blob.crc32c = "AAAAAA=="
        with pytest.raises(exceptions.BadRequest, match="CRC32C"):
            blob.upload_from_string(b"data", checksum=None)
        assert server.names(server.bucket) == []
