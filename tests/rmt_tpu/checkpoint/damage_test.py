"""Damage, races, kills and hostile files: the last good step is restored, or one line says why not.

On a local file system, and as far as the place matters also in a bucket.
"""

import json
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from rmt_tpu.checkpoint import Checkpointer
from rmt_tpu.checkpoint import checkpointer as checkpoint
from rmt_tpu.checkpoint import manifest as checkpoint_manifest
from rmt_tpu.checkpoint import save as checkpoint_save
from rmt_tpu.checkpoint.manifest import Commit
from rmt_tpu.errors import RunError, UsageError
from rmt_tpu.storage import Fault
from tests.rmt_tpu.checkpoint.checkpoints import (
    DAMAGE_NAMES,
    DAMAGES,
    assert_same,
    attempt_of,
    chunk_of_w,
    damage_commit,
    damage_flip,
    damage_missing_manifest,
    manifest_of,
    rewrite_manifest,
    small_tree,
)
from tests.tiers import later

REPOSITORY = Path(checkpoint.__file__).parents[2]


@pytest.fixture(params=["local", "gs"])
def root(request, tmp_path) -> str:
    """A folder for checkpoints."""
    if request.param == "local":
        return str(tmp_path / "checkpoints")
    return f"gs://{request.getfixturevalue('server').bucket}/checkpoints"


@pytest.fixture
def reports() -> list[str]:
    return []


@pytest.fixture
def saver(root, reports) -> Checkpointer:
    """Holds the committed steps 1, 2 and 3, all with the same structure."""
    saver = Checkpointer(root, report=reports.append)
    for step in (1, 2, 3):
        saver.save(step, small_tree(step), {"tokens": 10 * step})
    return saver


@pytest.mark.parametrize("root", ["local", *later("gs")], indirect=True)
@pytest.mark.parametrize("damage, reason", DAMAGES, ids=DAMAGE_NAMES)
def test_damage_is_named_and_the_step_before_is_used(saver, reports, damage, reason):
    damage(saver.root, 3)
    step, tree, meta = saver.restore(small_tree(0))
    assert (step, meta) == (2, {"tokens": 20})
    assert_same(tree, small_tree(2))
    (report,) = reports
    assert re.search(f"step 3: .*{reason}|step 3: {reason}", report)
    assert "\n" not in report and len(report) < 500
    with pytest.raises(RunError, match=f"step 3: .*{reason}|step 3: {reason}"):
        saver.restore(small_tree(0), step=3)

    # What was found damaged may be saved again, and then is as good as any other step.
    saver.save(3, small_tree(33), {})
    assert_same(saver.restore(small_tree(0), step=3)[1], small_tree(33))
    with pytest.raises(RunError, match="step 3 in .* already committed"):
        saver.save(3, small_tree(3), {})


def test_zeros_are_stored_so_that_a_lost_chunk_of_zeros_is_noticed(saver):
    saver.save(4, small_tree(0), {})
    saver.root.delete(chunk_of_w(saver.root, 4))
    assert saver.restore(small_tree(0))[0] == 3


@pytest.mark.parametrize("every", [29, *later(7)])
@pytest.mark.parametrize("compression", ["zstd", *later("none")])
def test_any_flipped_bit_of_a_chunk_is_noticed(tmp_path, compression, every):
    lines = []
    saver = Checkpointer(str(tmp_path), compression=compression, report=lines.append)
    saver.save(1, small_tree(1), {})
    saver.save(2, small_tree(2), {})
    name = chunk_of_w(saver.root, 2)
    whole = saver.root.read(name).data
    positions = range(0, 8 * len(whole), every)
    for bit in positions:
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        (tmp_path / name).write_bytes(content)
        assert saver.restore(small_tree(0))[0] == 1
    assert len(lines) == len(positions) > 5
    (tmp_path / name).write_bytes(whole)
    assert saver.restore(small_tree(0))[0] == 2


def test_when_every_step_is_damaged_each_reason_is_told(saver, reports):
    damage_flip(saver.root, 1)
    damage_missing_manifest(saver.root, 2)
    damage_commit(saver.root, 3)
    with pytest.raises(RunError) as failure:
        saver.restore(small_tree(0))
    told = str(failure.value)
    assert (
        told.index("step 3: COMMIT") < told.index("step 2: the file 2/") < told.index("step 1: arr")
    )
    assert "\n" not in told
    assert len(reports) == 3


def test_a_good_step_is_not_replaced_even_by_another_checkpointer(root, saver):
    for writer in (saver, Checkpointer(root)):
        with pytest.raises(RunError, match="cannot save step 2 .*already committed"):
            writer.save(2, small_tree(9), {})
    assert_same(saver.restore(small_tree(0), step=2)[1], small_tree(2))


def test_a_damaged_step_that_someone_else_replaced_is_not_replaced_again(root, saver):
    damage_flip(saver.root, 3)
    other = Checkpointer(root, report=lambda line: None)
    for reader in (saver, other):
        reader.restore(small_tree(0))
    other.save(3, small_tree(33), {})
    with pytest.raises(RunError, match="already committed"):
        saver.save(3, small_tree(3), {})
    assert_same(saver.restore(small_tree(0), step=3)[1], small_tree(33))


def test_a_look_at_the_arrays_changes_no_mind_about_damage(saver):
    damage_flip(saver.root, 3)
    assert saver.restore(small_tree(0))[0] == 2
    assert str(saver.arrays()["a/w"]) == "float32[4,6]"
    saver.save(3, small_tree(33), {})
    assert saver.restore(small_tree(0))[0] == 3


def test_of_two_writers_at_one_step_exactly_one_commits(root, monkeypatch):
    barrier, winners, refusals = threading.Barrier(2), [], []
    usual = checkpoint_save.commit

    def commit_together(*args):
        barrier.wait(600)
        usual(*args)

    monkeypatch.setattr(checkpoint_save, "commit", commit_together)

    def write(value):
        try:
            Checkpointer(root).save(1, small_tree(value), {})
            winners.append(value)
        except RunError as error:
            refusals.append(str(error))

    threads = [threading.Thread(target=write, args=(value,)) for value in (10, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    (winner,), (refusal,) = winners, refusals
    assert "another writer committed the step first" in refusal
    reader = Checkpointer(root)
    assert_same(reader.restore(small_tree(0))[1], small_tree(winner))
    # The loser takes its own data away.
    assert attempt_of(reader.root, 1)


def test_a_write_that_fails_midway_is_told_and_leaves_nothing(tmp_path):
    saver = Checkpointer(str(tmp_path))
    saver.save(3, small_tree(3), {})
    tree = {**small_tree(4), "n" * 300: np.zeros(3)}
    with pytest.raises(RunError, match="cannot save step 4 in .*: array n+: .*too long") as failure:
        saver.save(4, tree, {})
    assert "\n" not in str(failure.value) and failure.value.__suppress_context__
    assert not (tmp_path / "4").exists()
    assert saver.steps() == [3]


FULL_DISK = """
import resource, sys
import numpy as np
from rmt_tpu.checkpoint import Checkpointer
from rmt_tpu.errors import RunError

saver = Checkpointer(sys.argv[1])
tree = {"small": np.zeros(9), "large": np.zeros(2**20)}
saver.save(1, tree, {})
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
try:
    saver.save(2, tree, {})
except RunError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert saver.restore(tree)[0] == 1
saver.save(2, tree, {})
"""


def test_a_full_disk_is_told_and_leaves_room_again(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert re.fullmatch(
        f"cannot save step 2 in {tmp_path}: array large: .*File too large.*", line
    ), line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
    assert len(list((tmp_path / "2").glob("attempt-*"))) == 1


SAVE_FOREVER = """
import numpy as np, sys
from rmt_tpu.checkpoint import Checkpointer, Retention
from tests.tiers import later

saver = Checkpointer(sys.argv[1], retention=Retention(last=2))
step = max(saver.steps(), default=0)
while True:
    step += 1
    tree = {f"w{i}": np.full((64, 64), step * 1000 + i, np.int32) for i in range(20)}
    saver.save(step, tree, {"step": step})
    print(step, flush=True)
"""


@pytest.mark.parametrize("kills", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_leaves_complete_steps_only(tmp_path, kills):
    root = tmp_path / "checkpoints"
    like = {f"w{i}": np.zeros((64, 64), np.int32) for i in range(20)}
    rng, count, partial = random.Random(0), 0, 0
    # Until one of them hit a save: else this would have shown nothing.
    while count < kills or not partial:
        count += 1
        assert count < 50
        child = subprocess.Popen(
            [sys.executable, "-c", SAVE_FOREVER, str(root)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        )
        with child:
            first = child.stdout.readline()
            time.sleep(rng.uniform(0, 0.3))
            child.kill()
            told = [int(line) for line in (first + child.stdout.read()).split()]
        committed = {path.parent.name for path in root.glob("*/COMMIT")}
        partial += any(path.name not in committed for path in root.iterdir() if path.is_dir())

        damage: list[str] = []
        reader = Checkpointer(str(root), report=damage.append)
        for step in reader.steps():
            _, tree, meta = reader.restore(like, step=step)
            assert meta == {"step": step}
            assert all(np.all(tree[f"w{i}"] == step * 1000 + i) for i in range(20))
        assert reader.restore(like)[0] >= told[-1]
        assert damage == []


# Files that anybody may have written --------------------------------------------------------


def test_other_format_versions(saver, reports, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_manifest, "FORMAT_VERSION", 4)
        saver.save(4, small_tree(4), {})
    with pytest.raises(UsageError, match="format 4 cannot be read; legal: 3"):
        saver.restore(small_tree(0))
    assert reports == []


def first_array(**changes):
    return lambda content: content["arrays"][0].update(changes)


HOSTILE = {
    "leaves": (first_array(name="../../../2/w"), "an array with the illegal name '../../../2/w'"),
    "absolute": (first_array(name="/etc/w"), "an array with the illegal name '/etc/w'"),
    "scheme": (first_array(name="gs://other/w"), "an array with the illegal name 'gs://other/w'"),
    "driver": (first_array(name="a|zip:x"), "an array with the illegal name 'a|zip:x'"),
    "no_name": (first_array(name=3), "it is not a manifest"),
    "twice": (first_array(name="b"), "names an array twice"),
    "object": (first_array(dtype="object"), "a/w has the unknown dtype 'object'"),
    "string": (first_array(dtype="string"), "a/w has the unknown dtype 'string'"),
    "codec": (first_array(compression="pickle"), "a/w has the unknown compression 'pickle'"),
    "key": (first_array(prng=["x"]), "a/w has an unknown kind of PRNG key"),
    "negative": (first_array(shape=[-4, 6]), "a/w has an impossible shape or chunk"),
    "fraction": (first_array(shape=[4.0, 6]), "a/w has an impossible shape or chunk"),
    "bool": (first_array(shape=[True, 6]), "a/w has an impossible shape or chunk"),
    "text": (first_array(shape="46"), "a/w has an impossible shape or chunk"),
    "huge": (first_array(shape=[2**40, 2**40]), "a/w has an impossible shape or chunk"),
    "axes": (first_array(shape=[1] * 40, chunk=[1] * 40), "a/w has an impossible shape or chunk"),
    "rank": (first_array(chunk=[4]), "a/w has an impossible shape or chunk"),
    "no_chunk": (first_array(chunk=[0, 6]), "a/w has an impossible shape or chunk"),
    "huge_chunk": (first_array(chunk=[2**40, 6]), "a/w has an impossible shape or chunk"),
    "more": (first_array(run="x"), "it is not a manifest"),
    "no_arrays": (lambda content: content.update(arrays=3), "it is not a manifest"),
    "no_entry": (lambda content: content.update(arrays=[3]), "it is not a manifest"),
    "no_version": (lambda content: content.pop("version"), "it is not a manifest"),
    "no_meta": (lambda content: content.update(meta=[]), "or has no meta"),
}


@pytest.mark.parametrize("change, reason", HOSTILE.values(), ids=list(HOSTILE))
def test_a_manifest_that_no_save_writes_is_refused(tmp_path, monkeypatch, change, reason):
    lines = []
    saver = Checkpointer(str(tmp_path), report=lines.append)
    for step in (2, 3):
        saver.save(step, small_tree(step), {})
    rewrite_manifest(saver.root, 3, change)
    opened = []
    usual = checkpoint.open_arrays
    monkeypatch.setattr(
        checkpoint,
        "open_arrays",
        lambda parent, *rest: opened.append(parent) or usual(parent, *rest),
    )
    # Nothing of it is opened: not by the names that are asked for either.
    for _ in range(2):
        assert saver.restore(small_tree(0), partial=True)[0] == 2
        assert saver.arrays()["b"] and len(lines) == 2 and "\n" not in lines[0]
        assert reason in lines.pop() and reason in lines.pop()
    assert all("/2/attempt-" in parent["path"] for parent in opened) and len(opened) == 2


def test_a_shape_that_does_not_fit_costs_no_memory(tmp_path):
    saver = Checkpointer(str(tmp_path))
    saver.save(1, small_tree(1), {})
    rewrite_manifest(saver.root, 1, first_array(shape=[2**30, 2**20]))
    with pytest.raises(UsageError, match=r"a/w: checkpoint float32\[1073741824,1048576\], model"):
        saver.restore(small_tree(0))


def test_a_manifest_and_arrays_that_disagree_are_damage(tmp_path):
    lines = []
    saver = Checkpointer(str(tmp_path), report=lines.append)
    saver.save(1, small_tree(1), {})
    saver.save(2, small_tree(2), {})
    rewrite_manifest(saver.root, 2, first_array(dtype="int32", shape=[4, 6]))
    like = {"a": {"w": np.zeros((4, 6), np.int32)}, "b": np.zeros(3, np.int32)}
    with pytest.raises(RunError, match="step 2: array a/w: .*data_type"):
        saver.restore(like, 2)
    rewrite_manifest(saver.root, 2, first_array(dtype="float32", compression="zstd"))
    assert saver.restore(small_tree(0))[0] == 1
    assert "array a/w: " in lines[0] and "codec" in lines[0]


def test_a_chunk_that_unpacks_to_more_than_the_array_is_not_unpacked(tmp_path):
    """16 MB of zeros in a few kilobytes, with the right checksum."""
    saver = Checkpointer(str(tmp_path), compression="zstd")
    small, large = {"w": np.zeros(4, np.float32)}, {"w": np.zeros(2**22, np.float32)}
    saver.save(1, small, {})
    saver.save(2, large, {})
    name = "{}/arrays/w/c/0".format
    bomb = saver.root.read(name(attempt_of(saver.root, 2))).data
    assert len(bomb) < 2**14
    saver.root.write(name(attempt_of(saver.root, 1)), bomb)
    left = 2**24 - 16
    with pytest.raises(RunError, match=f"array w: .*End of data expected; .* {left};"):
        saver.restore(small, 1)


def test_files_that_are_too_large_are_not_read(saver, reports, monkeypatch):
    monkeypatch.setattr(checkpoint, "MANIFEST_LIMIT", 100)
    message = r"step 3: \S+/manifest.json has \d+ bytes; legal: at most 100"
    with pytest.raises(RunError, match=message):
        saver.restore(small_tree(0), 3)
    monkeypatch.undo()
    saver.root.write("3/COMMIT", saver.root.read("3/COMMIT").data + b" " * 2**20)
    assert saver.restore(small_tree(0))[0] == 2
    assert "3/COMMIT has 10486" in reports[0] and reports[0].endswith("at most 4096")


@pytest.mark.parametrize(
    "data",
    [b"", b"null", b"[1]", b'"text"', b"\xff\xfe", b"{}", b'{"attempt": 3}', b"[" * 4000],
    ids=["empty", "null", "list", "text", "bytes", "nothing", "number", "deep"],
)
def test_a_commit_that_names_no_attempt(data):
    with pytest.raises(Fault, match="^COMMIT is damaged: it names no attempt to save the step$"):
        Commit.from_bytes(data)


def test_a_commit_keeps_its_attempt_whatever_its_loss():
    attempt = "attempt-0123456789abcdef"
    for loss, expected in [(0.5, 0.5), (2, 2.0), (None, None), (float("nan"), None)]:
        assert Commit.from_bytes(Commit(attempt, loss).to_bytes()) == Commit(attempt, expected)
    for loss in ('"low"', "[1]", "true", "1e999", "NaN"):
        data = f'{{"attempt": "{attempt}", "loss": {loss}}}'.encode()
        assert Commit.from_bytes(data) == Commit(attempt, None)
    for name in (
        "../attempt-0123456789abcdef",
        attempt + "/..",
        attempt[:-1] + "G",
        attempt + "\n",
    ):
        with pytest.raises(Fault):
            Commit.from_bytes(json.dumps({"attempt": name}).encode())


def test_no_manifest_is_nested_too_deep_for_a_line(tmp_path):
    saver = Checkpointer(str(tmp_path))
    saver.save(1, small_tree(1), {})
    saver.root.write(manifest_of(saver.root, 1), b"[" * 10**6)
    with pytest.raises(RunError, match="manifest.json is damaged: it is not a manifest"):
        saver.restore(small_tree(0))
