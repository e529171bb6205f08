"""Saving in the background: what a loop may do meanwhile, and how it hears of the end."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rmt_tpu.checkpoint import Checkpointer, Saved
from rmt_tpu.checkpoint import checkpointer as checkpoint
from rmt_tpu.checkpoint import save as checkpoint_save
from rmt_tpu.checkpoint.arrays import to_store
from rmt_tpu.distributed import processes
from rmt_tpu.errors import RunError, UsageError
from rmt_tpu.storage import Fault
from tests.rmt_tpu.checkpoint.checkpoints import assert_same, mesh, sharded, small_tree
from tests.tiers import later

REPOSITORY = Path(checkpoint.__file__).parents[2]
SECONDS = 600  # after which something hangs


class Gate:
    """Holds the background before it writes anything, until it is opened."""

    def __init__(self, patch):
        self._open = threading.Event()
        usual = checkpoint_save.Attempt.make_way

        def make_way(attempt):
            assert self._open.wait(SECONDS)
            usual(attempt)

        patch.setattr(checkpoint_save.Attempt, "make_way", make_way)

    def open(self):
        self._open.set()


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


@pytest.fixture
def root(tmp_path) -> str:
    return str(tmp_path / "checkpoints")


overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "pinned_host"])
def test_arrays_may_be_donated_and_overwritten_at_once(root, gate, monkeypatch, on_host):
    """Both as on a CPU and as on a device with memory of its own."""
    monkeypatch.setattr(checkpoint_save, "is_host", lambda device: on_host)
    place = sharded(mesh(2, 2), "x")
    tree = {f"w{i}": jnp.full((256, 256), i, jnp.float32) for i in range(8)}
    tree["rows"] = jax.device_put(jnp.arange(64.0).reshape(8, 8), place)
    tree["bits"] = jnp.ones((16, 16), jnp.bfloat16)
    tree["key"] = jax.random.key(3)
    numbers = {name: x for name, x in tree.items() if name != "key"}
    expected = jax.tree.map(np.array, numbers)

    saver = Checkpointer(root)
    saver.begin_save(1, tree, {"step": 1})
    for _ in range(3):  # memory that is free is used again
        numbers = overwrite(numbers)
    jax.block_until_ready(numbers)
    if not on_host:  # there XLA keeps what is looked at, and does not give it away
        assert all(leaf.is_deleted() for name, leaf in tree.items() if name != "key")
    assert saver.check() is None and saver.steps() == []
    gate.open()
    assert saver.wait().step == 1
    restored = saver.restore(numbers, partial=True)[1]
    assert_same(restored, expected)
    assert jnp.all(numbers["w3"] == -1)
    assert_same(saver.restore({"key": jax.random.key(0)}, partial=True)[1], {"key": tree["key"]})

    # Restored arrays can be donated too, and what is stored does not change with them.
    overwrite(restored)
    assert_same(saver.restore(expected, partial=True)[1], expected)


def test_numpy_arrays_may_be_overwritten_at_once(root, gate):
    tree = {"w": np.arange(6.0), "step": np.int32(7)}
    saver = Checkpointer(root)
    saver.begin_save(1, tree, {})
    tree["w"][:] = -1
    gate.open()
    saver.wait()
    assert_same(saver.restore(tree)[1], {"w": np.arange(6.0), "step": np.int32(7)})


@pytest.mark.parametrize("on_host", [True, False])
def test_of_copies_on_several_devices_one_is_held(monkeypatch, on_host):
    monkeypatch.setattr(checkpoint_save, "is_host", lambda device: on_host)
    places = {
        "all": sharded(mesh(8)),
        "some": sharded(mesh(2, 2), "x"),
        "each": sharded(mesh(8), "x"),
    }
    tree = {n: jax.device_put(jnp.arange(64.0).reshape(16, 4), p) for n, p in places.items()}
    held = checkpoint_save.snapshot(checkpoint_save.blocks_of(*to_store(tree, "none")))
    count = {name: sum(block.array.name == name for block in held) for name in tree}
    assert count == {"all": 1, "some": 2, "each": 8}
    assert sum(block.values.nbytes for block in held) == 3 * 64 * 4
    for block in held:
        assert on_host == isinstance(block.values, np.ndarray)
        if not on_host:
            assert block.values.sharding.memory_kind == "pinned_host"
        np.testing.assert_array_equal(block.values, np.arange(64.0).reshape(16, 4)[block.index])


def test_each_save_is_told_once(root, gate):
    saver = Checkpointer(root)
    assert saver.wait() is None and saver.check() is None
    saver.begin_save(1, small_tree(1), {})
    assert saver.check() is None
    gate.open()
    saved = saver.wait()
    assert isinstance(saved, Saved) and (saved.step, saved.num_bytes) == (1, 4 * 6 * 4 + 3 * 4)
    assert 0 < saved.blocked_seconds < saved.seconds
    assert saver.wait() is None and saver.check() is None
    assert saver.save(2, small_tree(2), {}).step == 2
    assert saver.check() is None
    saver.begin_save(3, small_tree(3), {})
    threads = [t for t in threading.enumerate() if t.name == "checkpoint"]
    for thread in threads:
        assert not thread.daemon
        thread.join(SECONDS)
    assert saver.check().step == 3


def failing(error: Exception):
    def fail(*args):
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (Fault("the disk says no"), "the disk says no"),
        (OSError(5, "Input/output error"), r"OSError: \[Errno 5\] Input/output error"),
        (MemoryError("two\nlines"), "MemoryError: two lines"),
    ],
)
def test_an_error_reaches_the_loop_once_and_the_next_save_is_as_ever(
    root, monkeypatch, error, told
):
    saver = Checkpointer(root)
    expected = f"^cannot save step 1 in {re.escape(root)}: {told}$"
    for hear in (
        lambda: saver._background.join() or saver.check(),
        saver.wait,
        lambda: saver.begin_save(2, small_tree(2), {}),
        lambda: saver.save(2, small_tree(2), {}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_save.Attempt, "write_stores", failing(error))
            saver.begin_save(1, small_tree(1), {})
            with pytest.raises(RunError, match=expected) as failure:
                hear()
        assert failure.value.__suppress_context__
        assert saver.check() is None and saver.wait() is None
        assert saver.steps() == [] and not any(Path(root).glob("*/*"))
    assert saver.save(1, small_tree(1), {}).step == 1
    assert_same(saver.restore(small_tree(0))[1], small_tree(1))


def test_what_cannot_be_stored_is_told_at_once_and_nothing_is_under_way(root):
    saver = Checkpointer(root)
    with pytest.raises(UsageError, match="only arrays can be stored"):
        saver.begin_save(1, {"a": "text"}, {})
    with pytest.raises(UsageError, match="meta must be JSON"):
        saver.begin_save(1, small_tree(1), {"x": {1, 2}})
    assert saver.wait() is None and saver.steps() == []


def test_saves_come_one_after_the_other(root, monkeypatch):
    order, usual = [], checkpoint_save.Attempt.run

    def run(attempt):
        order.append(("begin", attempt.step))
        usual(attempt)
        order.append(("end", attempt.step))

    monkeypatch.setattr(checkpoint_save.Attempt, "run", run)
    saver = Checkpointer(root)
    for step in (1, 2, 3):
        saver.begin_save(step, small_tree(step), {})
    saver.wait()
    assert order == [(what, step) for step in (1, 2, 3) for what in ("begin", "end")]
    assert saver.steps() == [1, 2, 3]


def test_restore_sees_the_save_under_way(root, gate):
    saver = Checkpointer(root)
    saver.begin_save(1, small_tree(1), {})
    threading.Timer(0.2, gate.open).start()
    assert saver.restore(small_tree(0))[0] == 1
    assert saver.check().step == 1


def test_before_commit_is_when_all_else_is_stored(root):
    saver, seen = Checkpointer(root), []

    def look():
        seen.append((sorted(p.name for p in Path(root).glob("1/*/*")), saver.steps()))
        assert threading.current_thread() is not threading.main_thread()

    saver.begin_save(1, small_tree(1), {}, before_commit=look)
    saver.wait()
    assert seen == [(["arrays", "manifest.json"], [])] and saver.steps() == [1]


# The end of the program ----------------------------------------------------------------------

ENDS = """
import sys, time
import numpy as np
from rmt_tpu.checkpoint import Checkpointer
from rmt_tpu.checkpoint import save as checkpoint_save

usual = checkpoint_save.Attempt.write_stores
def _write(attempt, stores):
    time.sleep(1)  # until long after the main thread has come to its end
    print("writing")
    if "{end}" == "failed":
        raise OSError("the disk says no")
    usual(attempt, stores)
checkpoint_save.Attempt.write_stores = _write

saver = Checkpointer(sys.argv[1], report=lambda line: print(line, file=sys.stderr))
saver.begin_save(1, {{"w": np.arange(2**20)}}, {{}})
print("at the end")
if "{end}" == "raised":
    raise SystemExit(3)
"""


@pytest.mark.parametrize(
    ("end", "code", "errors"),
    [
        ("raised", 3, ""),
        *later(
            ("good", 0, ""), ("failed", 0, "cannot save step 1 in {}: OSError: the disk says no\n")
        ),
    ],
)
def test_a_program_that_ends_finishes_its_save(root, end, code, errors):
    done = subprocess.run(
        [sys.executable, "-c", ENDS.format(end=end), root],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert (done.returncode, done.stderr) == (code, errors.format(root))
    assert done.stdout.split("\n") == ["at the end", "writing", ""]
    reader = Checkpointer(root)
    assert reader.steps() == [1] * (end != "failed")
    if end != "failed":
        tree = {"w": np.zeros(2**20, int)}
        np.testing.assert_array_equal(reader.restore(tree)[1]["w"], np.arange(2**20))


# Several processes ---------------------------------------------------------------------------

MEMBER = """
import sys, time
from pathlib import Path
import jax, numpy as np
from rmt_tpu.checkpoint import arrays as checkpoint_arrays
from rmt_tpu.checkpoint import save as checkpoint_save
from rmt_tpu.distributed import processes
from rmt_tpu.checkpoint import Checkpointer
from rmt_tpu.errors import RunError
from rmt_tpu.distributed.rendezvous import Member

port, process, root, timeout = sys.argv[1:]
process = int(process)
processes.initialize(Member(f"127.0.0.1:{port}", 2, process), timeout=float(timeout))
mesh = jax.make_mesh((8,), ("x",))
place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
make = jax.jit(lambda k: jax.numpy.arange(64.0).reshape(16, 4) + k, out_shardings=place)
overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0, out_shardings=place)

def tell(action):
    try:
        print(action())
    except RunError as error:
        print("error:", error)

def patch(name, change):
    usual = getattr(checkpoint_save.Attempt, name)
    setattr(checkpoint_save.Attempt, name, lambda *args: change(usual, *args))
"""

GO_ON = """
saver = Checkpointer(root)
for step in range(1, 5):
    x = make(step)
    saver.begin_save(step, {"x": x, "n": np.int32(step)}, {"step": step})
    # The main threads agree on something else meanwhile, each as often as it likes.
    answers = processes.exchange(str(process), "the main thread")
    assert answers == ["0", "1"], answers
    overwrite(x)
    saver.check()
print(saver.wait().step)
step, tree, meta = saver.restore({"x": make(0), "n": np.int32(0)})
assert (step, tree["n"], meta) == (4, 4, {"step": 4})
for shard in tree["x"].addressable_shards:
    expected = (np.arange(64.0).reshape(16, 4) + 4)[shard.index]
    np.testing.assert_array_equal(shard.data, expected)

def fail(usual, attempt, stores):
    if attempt.step == 5 and process == 1:
        raise OSError("disk of process 1")
    usual(attempt, stores)
patch("write_stores", fail)
saver.begin_save(5, {"x": make(5)}, {})
tell(saver.wait)
saver.begin_save(6, {"x": make(6)}, {})
print(saver.wait().step)
processes.finish()
"""

ONE_IS_LATE = """
given_up = Path(root + ".given_up")
def late(usual, attempt, part, *said):
    if part == "write":
        processes.join_timeout = 2
        while process == 1 and not given_up.exists():
            time.sleep(0.01)
    return usual(attempt, part, *said)
patch("_on_all_processes", late)
saver = Checkpointer(root)
saver.begin_save(1, {"x": make(1)}, {})
tell(saver.wait)
given_up.touch()
processes.join_timeout = float(timeout)
processes.exchange("", "the end")
print(saver.steps())
"""

EVEN = """
checkpoint_arrays.CHUNK_BYTES = 2**16
copies = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
rows, columns = np.ogrid[:1024, :256]
numbers = {"embedding": rows + columns / 512, "head": columns - rows / 2048, "bias": rows * 1.0}
tree = {
    name: jax.make_array_from_callback(x.shape, copies, lambda i, x=x: x[i].astype(np.float32))
    for name, x in numbers.items()
}
def written():
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])
def count(usual, attempt, stores):
    before = written()
    usual(attempt, stores)
    print(written() - before)
patch("write_stores", count)
saver = Checkpointer(root)
saver.save(1, tree, {})
saver.begin_save(2, tree, {})
saver.wait()
for step in (1, 2):
    restored = saver.restore(tree, step)[1]
    for name, x in numbers.items():
        for shard in restored[name].addressable_shards:
            np.testing.assert_array_equal(shard.data, x.astype(np.float32))
processes.finish()
"""


def run_two(code: str, root: str) -> list[str]:
    """What each of two processes with four devices prints."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    command = [sys.executable, "-c", MEMBER + code, str(port)]
    processes = [
        subprocess.Popen(
            [*command, str(number), root, str(SECONDS // 2)],
            cwd=REPOSITORY,
            env=os.environ | devices,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        ends = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
    for process, (_, errors) in zip(processes, ends, strict=True):
        assert process.returncode == 0, errors
    return [output for output, _ in ends]


def told(output: str) -> list[str]:
    """Without what the library of collectives says."""
    return [line for line in output.splitlines() if "peer ranks" not in line]


@pytest.mark.slow
def test_processes_save_while_their_main_threads_agree_on_other_things(root):
    outputs = run_two(GO_ON, root)
    failed = f"error: cannot save step 5 in {root}: process 1: OSError: disk of process 1"
    assert [told(output) for output in outputs] == [["4", failed, "6"]] * 2
    assert Checkpointer(root).steps() == [3, 4, 6]
    assert not list(Path(root).glob("5/*"))


@pytest.mark.slow
def test_of_copies_that_all_hold_each_process_writes_its_half(root):
    total = 2 * 1024 * 256 * 4 + 1024 * 4
    for sizes in zip(*(map(int, told(output)) for output in run_two(EVEN, root)), strict=True):
        assert total <= sum(sizes) < 1.1 * total
        assert max(sizes) < 1.1 * min(sizes)


@pytest.mark.slow
def test_a_process_that_does_not_come_is_named_and_nothing_is_committed(root):
    first, second = map(told, run_two(ONE_IS_LATE, root))
    where = f"error: cannot save step 1 in {root}: "
    missing = "did not reach 'checkpoint 1: write' within 2 s; see their logs"
    assert first == [f"{where}process 1 of 2 {missing}", "[]"]
    late = (
        "the 2 processes did not meet at 'checkpoint 1: write': one arrived later than 2 s, or "
        "died while it waited; see their logs"
    )
    assert second == [where + late, "[]"]


def test_process_0_that_is_gone_is_told_in_one_line(root, monkeypatch):
    class Client:
        def key_value_set(self, key, value):
            raise jax.errors.JaxRuntimeError(
                "UNAVAILABLE: recvmsg: Connection reset\nAdditional GRPC"
            )

    for name, value in {"num_processes": 2, "process_id": 1, "client": Client()}.items():
        monkeypatch.setattr(processes.global_state, name, value)
    saver = Checkpointer(root)
    saver.begin_save(1, small_tree(1), {})
    with pytest.raises(RunError) as failure:
        saver.wait()
    assert str(failure.value) == (
        f"cannot save step 1 in {root}: process 0 cannot be reached at 'checkpoint 1: begin': "
        "UNAVAILABLE: recvmsg: Connection reset"
    )
