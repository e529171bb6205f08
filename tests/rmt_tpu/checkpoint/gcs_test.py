"""Checkpoints in a bucket: what is asked of the service, and what it may answer."""

import gc
import os
import re
import uuid

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rmt_tpu.checkpoint import Checkpointer, Retention
from rmt_tpu.errors import RunError, UsageError
from tests.gcs_server import LOST_ANSWER, LOST_REQUEST, fault
from tests.rmt_tpu.checkpoint.checkpoints import assert_same, attempt_of, mesh, sharded, small_tree

# Of a connection that the server breaks off the client's library leaves pieces that refer to each
# other, among them the open socket.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

BUSY = (503, "busy")
FORBIDDEN = (403, "bot@project does not have storage access")


@pytest.fixture(autouse=True, scope="module")
def no_socket_is_left_to_other_modules():
    yield
    gc.collect()


@pytest.fixture
def prefix(server) -> str:
    return f"run-{uuid.uuid4().hex[:8]}/checkpoints"


@pytest.fixture
def reports() -> list[str]:
    return []


@pytest.fixture
def saver(prefix, server, reports) -> Checkpointer:
    """Holds the committed steps 1 and 2."""
    saver = Checkpointer(f"gs://bucket/{prefix}", report=reports.append)
    for step in (1, 2):
        saver.save(step, small_tree(step), {"tokens": step})
    server.requests.clear()
    return saver


def requests(server, method: str, part: str = "") -> list[str]:
    return [url for verb, url in server.requests if verb == method and part in url]


def test_a_state_on_a_mesh_comes_back_on_another(prefix, server):
    host = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    place = sharded(mesh(8), "x")
    tree = {"rows": jax.device_put(host, place), "key": jax.random.key(0), "step": jnp.int32(3)}
    overwrite = jax.jit(lambda x: x * 0, donate_argnums=0)
    for compression in ("none", "zstd"):
        saver = Checkpointer(f"gs://bucket/{prefix}/{compression}", compression=compression)
        rows = jax.device_put(host, place)
        saver.begin_save(1, {**tree, "rows": rows}, {"windows": 7})
        overwrite(rows)
        assert saver.wait().num_bytes == 40 * 4 * 4 + 2 * 4 + 4
        target = jax.ShapeDtypeStruct((40, 4), np.float32, sharding=sharded(mesh(2, 2), "y", "x"))
        step, restored, meta = saver.restore({**tree, "rows": target})
        assert (step, meta) == (1, {"windows": 7})
        assert_same(restored, tree)
        assert restored["rows"].sharding == target.sharding
        np.testing.assert_array_equal(saver.array("rows")[5:7].read().result(), host[5:7])


def test_commit_is_written_last_and_only_if_absent(saver, server):
    saver.save(3, small_tree(3), {})
    written = requests(server, "POST", "name=")
    assert "/3/COMMIT" in written[-1] and "ifGenerationMatch=0" in written[-1]
    assert "manifest.json" in written[-2]
    for part in ("a/w/zarr.json", "a/w/c/0/0", "b/zarr.json", "b/c/0"):
        assert sum(f"/arrays/{part}" in url for url in written[:-2]) == 1


def test_no_list_walks_through_arrays(saver, server):
    saver.steps()
    listed = [url for url in requests(server, "GET") if "/o?" in url]
    assert len(listed) == 3 == len(server.requests)  # of the steps, and of each step
    assert all("delimiter=/" in url for url in listed)
    server.requests.clear()
    saver.restore(small_tree(0))
    for url in requests(server, "GET"):
        assert "/o?" not in url or "delimiter=/" in url


def test_retention_deletes_commit_first_and_nothing_of_others(prefix, server, reports):
    neighbours = [f"{prefix}x/1/COMMIT", f"{prefix[:-1]}/1/COMMIT", f"{prefix}/notes.txt"]
    neighbours += [f"{prefix}/1x/COMMIT", f"{prefix}/1/notes.txt", f"{prefix}/01/COMMIT"]
    for name in neighbours:
        server.replace("bucket", name, b"mine")
    saver = Checkpointer(
        f"gs://bucket/{prefix}", retention=Retention(last=1), report=reports.append
    )
    saver.save(1, small_tree(1), {})
    server.requests.clear()
    saver.save(2, small_tree(2), {})
    deleted = requests(server, "DELETE")
    assert "/1/COMMIT" in deleted[0] and all("/1/attempt-" in url for url in deleted[1:])
    assert [name for name in server.names("bucket", f"{prefix}/1/")] == [f"{prefix}/1/notes.txt"]
    assert all(server.read("bucket", name) == b"mine" for name in neighbours)
    assert saver.steps() == [2] and reports == []


@pytest.mark.parametrize("outcome", [BUSY, (429, "slow down"), LOST_REQUEST, LOST_ANSWER], ids=str)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_each_request_may_fail_once(prefix, server, reports, outcome, method):
    """Of all there are: the first for each object and each list fails."""
    seen = set()

    def once(verb, url):
        path, _, query = url.partition("?")
        what = path, *(part for part in query.split("&") if part.startswith(("name=", "prefix=")))
        if verb != method or what in seen:
            return None
        seen.add(what)
        return outcome

    server.faults.append(once)
    retention = Retention(last=1)
    saver = Checkpointer(f"gs://bucket/{prefix}", retention=retention, report=reports.append)
    for step in (1, 2):
        saver.save(step, small_tree(step), {})
    assert saver.steps() == [2] and reports == []
    assert_same(saver.restore(small_tree(0))[1], small_tree(2))
    assert len(seen) > 3
    assert not server.names("bucket", f"{prefix}/1/")


@pytest.mark.parametrize("outcome", [LOST_ANSWER, LOST_REQUEST, BUSY], ids=str)
def test_a_commit_refused_because_of_its_own_success_counts(saver, server, outcome):
    server.faults.append(fault(outcome, method="POST", url="/3/COMMIT", times=1))
    saver.save(3, small_tree(3), {}, loss=1.5)
    assert len(requests(server, "POST", "/3/COMMIT")) == 2
    assert_same(saver.restore(small_tree(0), 3)[1], small_tree(3))


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("a/w/zarr.json", "array a/w: .*storage access"),
        ("a/w/c/0/0", "array a/w: .*storage access"),
        ("manifest.json", "manifest.json: no permission: .*storage access"),
        ("COMMIT", "3/COMMIT: no permission: .*storage access"),
    ],
)
def test_a_save_that_is_forbidden_midway_reaches_the_loop_in_one_line(
    saver, server, prefix, url, reason
):
    server.faults.append(fault(FORBIDDEN, method="POST", url=f"name={prefix}/3/.*{url}|/{url}"))
    saver.begin_save(3, small_tree(3), {})
    with pytest.raises(
        RunError, match=f"^cannot save step 3 in gs://bucket/{prefix}: .*{reason}"
    ) as e:
        saver.wait()
    assert "\n" not in str(e.value)
    assert not server.names("bucket", f"{prefix}/3/")
    assert saver.restore(small_tree(0))[0] == 2
    server.faults.clear()
    saver.save(3, small_tree(3), {})
    assert saver.restore(small_tree(0))[0] == 3


def test_a_forbidden_tidying_is_reported_and_the_save_counts(saver, server, reports):
    saver.save(3, small_tree(3), {})
    server.faults.append(fault(FORBIDDEN, method="DELETE"))
    saver.save(4, small_tree(4), {})
    (line,) = reports
    assert line.startswith(f"cannot delete old checkpoints in {saver.root}: ")
    assert "storage access" in line and "\n" not in line
    assert saver.steps() == [1, 2, 3, 4]


of_each_file = pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("a/w/zarr.json", "array a/w: "),
        ("a/w/c/0/0", "array a/w: "),
        ("manifest.json", "manifest.json"),
        ("COMMIT", "2/COMMIT"),
    ],
)


@of_each_file
def test_what_is_gone_is_named_and_passed_over(saver, server, reports, url, reason):
    server.faults.append(fault((404, "No such object"), method="GET", url=f"/2/.*{url}"))
    step, tree, meta = saver.restore(small_tree(0))
    assert (step, meta) == (1, {"tokens": 1})
    assert_same(tree, small_tree(1))
    (line,) = reports
    assert "skipped: step 2: " in line and reason in line and "\n" not in line


@of_each_file
def test_what_cannot_be_read_is_named_and_not_taken_for_damaged(
    saver, server, reports, url, reason
):
    server.faults.append(fault(FORBIDDEN, method="GET", url=f"/2/.*{url}"))
    with pytest.raises(RunError) as failure:
        saver.restore(small_tree(0))
    line = str(failure.value)
    assert line.startswith(f"cannot read step 2 in {saver.root}: ") and "\n" not in line
    assert reason in line and "storage access" in line
    # An older step in its place would lose what is there, and the next save would delete it.
    server.faults.clear()
    saver.save(3, small_tree(3), {})
    assert saver.steps() == [1, 2, 3]
    assert saver.restore(small_tree(0), 2)[0] == 2
    assert reports == []


def test_a_list_that_is_forbidden(saver, server):
    server.faults.append(fault(FORBIDDEN, method="GET", url=r"/o\?"))
    for look in (saver.steps, lambda: saver.restore(small_tree(0)), saver.arrays):
        with pytest.raises(RunError, match="no permission: .*storage access") as failure:
            look()
        assert "\n" not in str(failure.value)


def test_a_bucket_that_is_not_there(server):
    saver = Checkpointer("gs://no-such-bucket/run")
    with pytest.raises(UsageError, match="there is no bucket gs://no-such-bucket"):
        saver.root.check(write=True)
    for work in (lambda: saver.save(1, small_tree(1), {}), saver.steps):
        with pytest.raises(RunError, match="gs://no-such-bucket.*bucket") as failure:
            work()
        assert "\n" not in str(failure.value)


def test_arrays_with_names_that_urls_have_no_room_for(prefix):
    names = ["a b", "a%2Fb", "a#b", "a?b", "a+b&c=d", "ä/ö", "[0]", "'q'", "0"]
    saver = Checkpointer(f"gs://bucket/{prefix}")
    tree = {name: np.full(3, i) for i, name in enumerate(names)}
    saver.save(1, tree, {})
    assert_same(saver.restore(tree)[1], tree)
    assert attempt_of(saver.root, 1)
    for i, name in enumerate(names):
        assert saver.array(name)[0].read().result() == i


def test_credentials_are_in_no_error(saver, server, reports):
    assert os.environ["GOOGLE_AUTH_TOKEN_FOR_TESTING"] == "emulator"
    server.faults.append(fault((401, "Invalid Credentials"), url="/2/.*/arrays/"))
    with pytest.raises(RunError, match="Invalid Credentials") as failure:
        saver.restore(small_tree(0))
    assert not re.search("Bearer|emulator", str(failure.value))
