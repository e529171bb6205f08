"""A token store in a bucket: written and read through the real clients, on a loopback server."""

import json
import time

import numpy as np
import pytest

from rmt_tpu.data import ByteTokenizer, Windows, load_saved, open_store, part_writer, token_store
from rmt_tpu.data.prepare import prepare
from rmt_tpu.data.token_store import MANIFEST
from rmt_tpu.errors import RmtError, RunError, UsageError
from rmt_tpu.storage import Fault
from tests import gcs_server
from tests.tiers import later

URL = "gs://bucket/stores/words"
BYTE = ByteTokenizer()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """In about 9 parts."""
    path = tmp_path_factory.mktemp("text") / "a.jsonl"
    texts = [f"{number} " + "word " * (number * 7 % 40) for number in range(80)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.fixture(scope="module")
def local(source, tmp_path_factory):
    """The same store on the local file system."""
    folder = tmp_path_factory.mktemp("store")
    make(source, folder)
    return open_store(str(folder))


def make(source, output=URL, **options):
    options = {"workers": 1, "part_bytes": 1000, "eval_fraction": 0.1} | options
    return prepare(source, "byte", output, **options)


def whole(stream) -> np.ndarray:
    return stream.read(np.zeros(1, np.int64), len(stream))[0]


def same(one, other) -> bool:
    return all(
        a.checksum() == b.checksum() and np.array_equal(whole(a), whole(b))
        for a, b in ((one.train, other.train), (one.held_out, other.held_out))
    )


@pytest.mark.parametrize("workers", [1, *later(2)])
def test_a_bucket_holds_what_a_folder_does(server, source, local, workers):
    totals = make(source, workers=workers)
    assert totals.parts > 5 and totals.kept == 0
    store = open_store(URL)
    assert same(store, local)
    assert load_saved(URL).fingerprint() == BYTE.fingerprint()
    assert all(name.startswith("stores/words/") for name in server.names("bucket"))
    assert make(source).kept == totals.parts


def test_a_command_that_ends_in_the_midst_goes_on(server, source, local):
    server.faults.append(gcs_server.fault((403, "no more"), method="POST", url="parts/00004/"))
    with pytest.raises(RunError, match="no more") as error:
        make(source)
    assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match="is not complete; run recipes.prepare_data again"):
        open_store(URL)
    server.faults.clear()
    assert make(source).kept == 4
    assert same(open_store(URL), local)
    attempts = {name.split("/")[4] for name in server.names("bucket", "stores/words/parts/00004/")}
    assert len(attempts) == 2, "the manifest, and one attempt"


def test_a_service_that_is_busy_or_loses_answers_changes_nothing(server, source, local):
    server.faults += [
        gcs_server.fault((503, "busy"), method="POST", url="parts", times=3),
        gcs_server.fault(gcs_server.LOST_ANSWER, method="POST", url=MANIFEST, times=2),
        gcs_server.fault(gcs_server.LOST_ANSWER, method="POST", url="zarr.json", times=2),
        gcs_server.fault(gcs_server.LOST_ANSWER, method="POST", url="/c/0", times=2),
        gcs_server.fault((503, "busy"), method="GET", url="tokens", times=3),
    ]
    make(source)
    store = open_store(URL)
    server.faults.append(gcs_server.fault((503, "busy"), method="GET", times=3))
    assert same(store, local)


def test_a_window_costs_its_chunks_and_not_its_shard(server, source, monkeypatch):
    for module in part_writer, token_store:
        monkeypatch.setattr(module, "SHARD", 2**14)
    monkeypatch.setattr(token_store, "CHUNK", 2**6)
    make(source, part_bytes=10**6)
    stream = open_store(URL).train
    windows = Windows(stream, batch_size=8, seq_len=32, bos=BYTE.bos, seed=0, shuffle=True)
    windows.batch_at(0)
    server.requests.clear()
    batch = windows.batch_at(8)
    # The array's metadata and its shard's index are known by now; 33 tokens are of two chunks.
    assert 1 <= len(server.requests) <= 16
    expected = Windows(whole(stream), batch_size=8, seq_len=32, bos=BYTE.bos, seed=0, shuffle=True)
    np.testing.assert_array_equal(batch.inputs, expected.batch_at(8).inputs)


def test_damage_in_a_bucket_names_the_array(server, source):
    make(source)
    (name,) = (n for n in server.names("bucket") if "/00002/" in n and "train/tokens/c/0" in n)
    content = bytearray(server.read("bucket", name))
    content[7] ^= 4
    server.replace("bucket", name, bytes(content))
    with pytest.raises(Fault, match="train tokens of part 2 of gs://bucket/stores/words: "):
        whole(open_store(URL).train)
    server.remove("bucket", name)
    with pytest.raises(Fault, match="train tokens of part 2 of gs://bucket/stores/words: "):
        whole(open_store(URL).train)


@pytest.mark.parametrize(
    ("url", "status", "said"),
    [
        ("gs://no-such-bucket/store", None, "no bucket gs://no-such-bucket"),
        (URL, (403, "not yours"), "no permission: .*not yours"),
        ("gs://Bucket/store", None, "has an illegal bucket name"),
        ("s3://bucket/store", None, "legal: a local path, or gs://"),
    ],
)
def test_what_is_wrong_with_a_bucket_is_one_line_and_soon_told(server, source, url, status, said):
    if status:
        server.faults.append(gcs_server.fault(status))
    for call in (lambda: make(source, url)), (lambda: open_store(url)):
        started = time.monotonic()
        with pytest.raises(UsageError, match=said) as error:
            call()
        assert time.monotonic() - started < 110 and "\n" not in str(error.value)


def test_a_store_that_is_not_there(server):
    with pytest.raises(RmtError, match="gs://bucket/nowhere has no token store"):
        open_store("gs://bucket/nowhere")
