"""Checkpoints: exact round trips, every kind of damage, kills, races and retention."""

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

from rmt_tpu import checkpoint, checkpoint_arrays
from rmt_tpu.checkpoint import Checkpointer
from rmt_tpu.errors import RunError, UsageError

REPOSITORY = Path(checkpoint.__file__).parents[1]


def small_tree(step: int) -> dict:
    return {"a": {"w": np.full((4, 6), step, np.float32)}, "b": np.arange(3, dtype=np.int32) + step}


def assert_same(restored, expected):
    """Equal structure, dtypes and bytes: NaN payloads and the sign of zero count."""
    assert jax.tree.structure(restored) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        if jax.dtypes.issubdtype(ours.dtype, jax.dtypes.prng_key):
            assert jax.random.key_impl(ours) == jax.random.key_impl(theirs)
            ours, theirs = jax.random.key_data(ours), jax.random.key_data(theirs)
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def reports() -> list[str]:
    return []


@pytest.fixture
def saver(root, reports) -> Checkpointer:
    """Holds the committed steps 1, 2 and 3, all with the same structure."""
    saver = Checkpointer(str(root), report=reports.append)
    for step in (1, 2, 3):
        saver.save(step, small_tree(step), {"tokens": 10 * step})
    return saver


def only(paths) -> Path:
    (path,) = paths
    return path


def chunk_of_w(root: Path, step: int) -> Path:
    return only(root.glob(f"{step}/attempt-*/arrays/a/w/c/0/0"))


def manifest_of(root: Path, step: int) -> Path:
    return only(root.glob(f"{step}/attempt-*/manifest.json"))


def flip_bit(path: Path, position: int):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "dtype",
    "bool int4 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 "
    "float8_e4m3fn float8_e5m2 complex64".split(),
)
def test_every_dtype_and_rank_comes_back_bit_for_bit(root, dtype):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    rng = np.random.default_rng(0)

    def draw(*shape):
        if dtype.name in ("bool", "int4"):
            return rng.integers(0, 2, shape).astype(dtype)
        # Random bytes hold NaNs with payloads too.
        size = int(np.prod(shape)) * dtype.itemsize
        return np.frombuffer(rng.bytes(size), dtype).reshape(shape)

    tree = {
        "scalar": draw(),
        "empty": draw(0, 3),
        "cube": draw(2, 3, 5),
        "zeros": np.zeros(4, dtype),
    }
    saver = Checkpointer(str(root))
    saver.save(0, tree, {})
    _, restored, _ = saver.restore(tree)
    assert_same(restored, tree)
    assert all(isinstance(leaf, np.ndarray) for leaf in restored.values())


@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.int4, jnp.int32, jnp.bfloat16, jnp.float8_e4m3fn])
def test_jax_arrays_come_back_as_jax_arrays(root, dtype):
    tree = {"scalar": jnp.ones((), dtype), "empty": jnp.zeros((0, 3), dtype), "none": (None,)}
    saver = Checkpointer(str(root))
    saver.save(0, tree, {})
    _, restored, _ = saver.restore(tree)
    assert_same(restored, tree)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(restored))


def test_numpy_scalars_and_a_bare_array_come_back_as_they_were(root):
    saver = Checkpointer(str(root))
    saver.save(0, (np.int32(7), np.float64(0.1)), {})
    _, (seven, tenth), _ = saver.restore((np.int32(0), np.float64(0)))
    assert type(seven) is np.int32 and seven == 7
    assert type(tenth) is np.float64 and tenth == 0.1
    saver.save(1, np.arange(3), {})
    assert_same(saver.restore(np.zeros(3, int))[1], np.arange(3))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_typed_prng_keys_keep_their_implementation(root, impl):
    key = jax.random.key(3, impl=impl)
    tree = {"one": key, "many": jax.random.split(key, 5)}
    saver = Checkpointer(str(root))
    saver.save(0, tree, {})
    for like in (tree, jax.eval_shape(lambda: tree)):
        _, restored, _ = saver.restore(like)
        assert_same(restored, tree)
        assert jax.random.bits(restored["one"]) == jax.random.bits(key)


def test_a_key_of_another_implementation_does_not_fit(root):
    saver = Checkpointer(str(root))
    saver.save(0, {"key": jax.random.key(3, impl="rbg")}, {})
    with pytest.raises(UsageError, match=r"uint32\[4\] \(rbg key\), model uint32\[4\]$"):
        saver.restore({"key": np.zeros(4, np.uint32)})


def test_training_goes_on_exactly_after_a_restore(root):
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            for block in self.blocks:
                x = self.dropout(jnp.tanh(block(x)))
            return x

    optimizer = optax.adamw(1e-2)
    graph, params, rest = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)

    def filled(state, pure):
        state = jax.tree.map(lambda leaf: leaf, state)
        nnx.replace_by_pure_dict(state, pure)
        return state

    @jax.jit
    def train(state):
        def loss(pure):
            model = nnx.merge(graph, filled(params, pure), filled(rest, state["rest"]))
            value = jnp.mean((model(jnp.ones((3, 4))) - 1) ** 2)
            return value, nnx.to_pure_dict(nnx.split(model, nnx.Param, ...)[2])

        (value, after), gradient = jax.value_and_grad(loss, has_aux=True)(state["params"])
        updates, opt = optimizer.update(gradient, state["opt"], state["params"])
        moved = optax.apply_updates(state["params"], updates)
        return {"params": moved, "rest": after, "opt": opt, "none": None}, value

    pure = nnx.to_pure_dict(params)
    state = {"params": pure, "rest": nnx.to_pure_dict(rest), "opt": optimizer.init(pure)}
    state, _ = train(state)
    saver = Checkpointer(str(root))
    saver.save(1, state, {})
    _, restored, _ = saver.restore(jax.eval_shape(lambda: state))
    assert_same(restored, state)
    next_state, next_loss = train(state)
    assert_same(train(restored), (next_state, next_loss))
    assert next_loss != train(next_state)[1]


def test_meta_comes_back_and_may_hold_what_json_holds(saver):
    meta = {"tokens": 2**70, "rate": 0.1, "who": "Zoë", "counts": {10: 1, 9: 2}, "pair": (1, None)}
    saver.save(4, small_tree(4), meta)
    expected = {**meta, "counts": {"10": 1, "9": 2}, "pair": [1, None]}
    assert saver.restore(small_tree(0))[2] == expected


def test_stacks_of_layers_for_each_stage_are_read_as_one_stack(root):
    layers = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    saver = Checkpointer(str(root))
    saver.save(1, {"w": layers}, {})
    for like in (np.zeros((6, 4), np.float32), jax.ShapeDtypeStruct((6, 4), np.float32)):
        found = saver.restore({"w": like}, partial=True)[1]["w"]
        np.testing.assert_array_equal(found, np.arange(24).reshape(6, 4))
        with pytest.raises(
            UsageError, match=r"w: checkpoint float32\[2,3,4\], model float32\[6,4\]"
        ):
            saver.restore({"w": like})
    for shape in ((4, 6), (24,), (3, 2, 4), (8, 3)):
        with pytest.raises(UsageError, match="does not fit the model"):
            saver.restore({"w": np.zeros(shape, np.float32)}, partial=True)


def test_a_part_can_be_restored_but_not_what_is_not_there(saver):
    whole = {"params": small_tree(4), "optimizer": np.arange(3)}
    saver.save(4, whole, {})
    part = {"params": small_tree(0)}
    assert_same(saver.restore(part, partial=True)[1], {"params": whole["params"]})
    with pytest.raises(UsageError, match="optimizer: checkpoint int64.* model has none"):
        saver.restore(part)
    with pytest.raises(UsageError, match="more: checkpoint has none, model int64"):
        saver.restore(part | {"more": np.arange(2)}, partial=True)


@pytest.mark.parametrize("meta", [{"loss": float("nan")}, {"x": np.float32(1)}])
def test_meta_that_is_not_json_is_refused_before_anything_is_written(root, meta):
    with pytest.raises(UsageError, match="meta must be"):
        Checkpointer(str(root)).save(1, small_tree(1), meta)
    assert not root.exists()


def test_every_array_has_the_documented_layout(root, saver):
    attempt = manifest_of(root, 3).parent
    assert json.loads((root / "3/COMMIT").read_text()) == {"attempt": attempt.name}
    described = json.loads((attempt / "arrays/a/w/zarr.json").read_text())
    assert described["shape"] == [4, 6]
    assert [codec["name"] for codec in described["codecs"]] == ["bytes", "crc32c"]
    # 24 floats and a checksum: a plain zarr array that other programs can read.
    assert chunk_of_w(root, 3).read_bytes()[:-4] == np.full(24, 3, "<f4").tobytes()


def damage_flip(root, step):
    flip_bit(chunk_of_w(root, step), 5)


def damage_truncate(root, step):
    os.truncate(chunk_of_w(root, step), 20)


def damage_missing_chunk(root, step):
    chunk_of_w(root, step).unlink()


def damage_array_metadata(root, step):
    path = chunk_of_w(root, step).parents[2] / "zarr.json"
    path.write_text(path.read_text().replace("[4,6]", "[6,4]"))


def damage_missing_manifest(root, step):
    manifest_of(root, step).unlink()


def damage_manifest(root, step):
    path = manifest_of(root, step)
    flip_bit(path, path.read_bytes().index(b"tokens"))


def damage_cut_manifest(root, step):
    os.truncate(manifest_of(root, step), 50)


def damage_commit(root, step):
    (root / f"{step}/COMMIT").write_text("}garbage")


def damage_commit_elsewhere(root, step):
    (root / f"{step}/COMMIT").write_text('{"attempt": "../../1/attempt-0123456789abcdef"}')


def damage_missing_attempt(root, step):
    (root / f"{step}/COMMIT").write_text('{"attempt": "attempt-0123456789abcdef"}')


DAMAGES = [
    (damage_flip, "array a/w: .*Digest mismatch"),
    (damage_truncate, "array a/w: .*Not enough data"),
    (damage_missing_chunk, "array a/w: .*is missing"),
    (damage_array_metadata, 'array a/w: .*Expected "shape"'),
    (damage_missing_manifest, "manifest.json is missing"),
    (damage_manifest, "manifest.json is damaged: its checksum"),
    (damage_cut_manifest, "manifest.json is damaged: it is not a manifest"),
    (damage_commit, "COMMIT is damaged"),
    (damage_commit_elsewhere, "COMMIT is damaged"),
    (damage_missing_attempt, "attempt-0123456789abcdef/manifest.json is missing"),
]


@pytest.mark.parametrize(
    "damage, reason", DAMAGES, ids=lambda value: getattr(value, "__name__", "")
)
def test_damage_is_named_and_the_step_before_is_used(root, saver, reports, damage, reason):
    damage(root, 3)
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


def test_zeros_are_stored_so_that_a_lost_chunk_of_zeros_is_noticed(root, saver):
    saver.save(4, small_tree(0), {})
    chunk_of_w(root, 4).unlink()
    assert saver.restore(small_tree(0))[0] == 3


def test_when_every_step_is_damaged_each_reason_is_told(root, saver, reports):
    damage_flip(root, 1)
    damage_missing_manifest(root, 2)
    damage_commit(root, 3)
    with pytest.raises(RunError) as failure:
        saver.restore(small_tree(0))
    told = str(failure.value)
    assert (
        told.index("step 3: COMMIT") < told.index("step 2: 2/attempt") < told.index("step 1: arr")
    )
    assert "\n" not in told
    assert len(reports) == 3


def test_a_good_step_is_not_replaced_even_by_another_checkpointer(root, saver):
    for writer in (saver, Checkpointer(str(root))):
        with pytest.raises(RunError, match="cannot save step 2 .*already committed"):
            writer.save(2, small_tree(9), {})
    assert_same(saver.restore(small_tree(0), step=2)[1], small_tree(2))


def test_a_damaged_step_that_someone_else_replaced_is_not_replaced_again(root, saver):
    damage_flip(root, 3)
    other = Checkpointer(str(root), report=lambda line: None)
    for reader in (saver, other):
        reader.restore(small_tree(0))
    other.save(3, small_tree(33), {})
    with pytest.raises(RunError, match="already committed"):
        saver.save(3, small_tree(3), {})
    assert_same(saver.restore(small_tree(0), step=3)[1], small_tree(33))


def test_absent_steps_and_an_empty_root(root, saver, tmp_path):
    with pytest.raises(UsageError, match=r"no checkpoint of step 7 in .*; available: 1, 2, 3$"):
        saver.restore(small_tree(0), step=7)
    empty = Checkpointer(str(tmp_path / "empty"))
    assert empty.steps() == []
    with pytest.raises(RunError, match="^no checkpoint in .*empty$"):
        empty.restore(small_tree(0))


def test_only_the_last_steps_are_kept_and_nothing_of_the_others_remains(root):
    saver = Checkpointer(str(root), keep=2)
    for step in (1, 5, 10, 11):
        saver.save(step, small_tree(step), {})
    assert saver.steps() == [10, 11]
    assert sorted(path.name for path in root.iterdir()) == ["10", "11"]
    assert_same(saver.restore(small_tree(0), step=10)[1], small_tree(10))


def test_what_is_not_ours_is_neither_counted_nor_deleted(root):
    saver = Checkpointer(str(root), keep=1)
    saver.save(1, small_tree(1), {})
    foreign = ["notes.txt", "007/COMMIT", "1.bak/x", "-5/COMMIT", "latest/COMMIT", "1/notes.txt"]
    foreign += ["1/attempt-mine/x", "4/log.txt"]
    for name in foreign:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("mine")
    saver.save(2, small_tree(2), {})
    assert saver.steps() == [2]
    assert not list(root.glob("1/attempt-????????????????"))
    assert all((root / name).read_text() == "mine" for name in foreign)


def test_damaged_steps_do_not_push_out_good_ones(root, reports):
    saver = Checkpointer(str(root), keep=2, report=reports.append)
    for step in (1, 3):
        saver.save(step, small_tree(step), {})
    damage_flip(root, 3)
    assert saver.restore(small_tree(0))[0] == 1
    saver.save(2, small_tree(2), {})
    assert saver.steps() == [1, 2, 3]
    saver.save(4, small_tree(4), {})
    assert saver.steps() == [2, 4]


def test_a_replaced_step_counts_as_a_good_one_again(root, reports):
    saver = Checkpointer(str(root), keep=2, report=reports.append)
    for step in (1, 3):
        saver.save(step, small_tree(step), {})
    damage_flip(root, 3)
    saver.restore(small_tree(0))
    saver.save(3, small_tree(3), {})
    saver.save(4, small_tree(4), {})
    assert saver.steps() == [3, 4]


def test_a_run_that_goes_back_in_time_keeps_what_it_saves(root):
    saver = Checkpointer(str(root), keep=2)
    for step in (10, 20, 5):
        saver.save(step, small_tree(step), {})
    assert saver.steps() == [5, 10, 20]
    saver.save(6, small_tree(6), {})
    assert saver.steps() == [6, 10, 20]


def test_partial_steps_are_invisible_and_collected_later(root, saver):
    # Step 4 dies before its COMMIT, and step 3 has a dead attempt beside the committed one.
    saver.save(4, small_tree(4), {})
    (root / "4/COMMIT").unlink()
    dead = root / "3/attempt-00000000000000aa/arrays/a/w/c/0/0"
    dead.parent.mkdir(parents=True)
    dead.write_text("half")
    assert saver.steps() == [2, 3]
    assert saver.restore(small_tree(0))[0] == 3

    saver.save(4, small_tree(44), {})
    assert_same(saver.restore(small_tree(0), step=4)[1], small_tree(44))
    assert not dead.exists() and not list(root.glob("3/attempt-00000000000000aa"))
    assert_same(saver.restore(small_tree(0), step=3)[1], small_tree(3))
    assert len(list(root.glob("4/attempt-*"))) == 2
    saver.save(5, small_tree(5), {})
    assert len(list(root.glob("4/attempt-*"))) == 1
    assert_same(saver.restore(small_tree(0), step=4)[1], small_tree(44))


def test_of_two_writers_at_one_step_exactly_one_commits(root):
    barrier, winners, refusals = threading.Barrier(2), [], []

    def write(value):
        writer = Checkpointer(str(root))
        commit = writer._commit

        def commit_together(*args):
            barrier.wait(30)
            commit(*args)

        writer._commit = commit_together
        try:
            writer.save(1, small_tree(value), {})
            winners.append(value)
        except RunError as error:
            refusals.append(str(error))

    threads = [threading.Thread(target=write, args=(value,)) for value in (10, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (winner,), (refusal,) = winners, refusals
    assert "another writer committed it first" in refusal
    assert_same(Checkpointer(str(root)).restore(small_tree(0))[1], small_tree(winner))
    # The loser takes its own data away.
    assert len(list(root.glob("1/attempt-*"))) == 1


class AnswerLost:
    """A store whose conditional writes are done twice, as after an answer lost on the way."""

    def __init__(self, store):
        self.store = store

    def __getattr__(self, name):
        return getattr(self.store, name)

    def write(self, key, value, **condition):
        if condition:
            assert self.store.write(key, value, **condition).result().generation
        return self.store.write(key, value, **condition)


def test_a_commit_refused_because_of_its_own_success_counts(root, saver):
    saver._kv = AnswerLost(saver._kv)
    saver.save(4, small_tree(4), {})
    assert_same(saver.restore(small_tree(0), step=4)[1], small_tree(4))


def test_a_write_that_fails_midway_is_told_and_leaves_nothing(root, saver):
    tree = {**small_tree(4), "n" * 300: np.zeros(3)}
    with pytest.raises(RunError, match="cannot save step 4 in .*: array n+: .*too long") as failure:
        saver.save(4, tree, {})
    assert "\n" not in str(failure.value) and failure.value.__suppress_context__
    assert not (root / "4").exists()
    assert saver.steps() == [1, 2, 3]


SAVE_FOREVER = """
import numpy as np, sys
from rmt_tpu.checkpoint import Checkpointer

saver = Checkpointer(sys.argv[1], keep=2)
step = max(saver.steps(), default=0)
while True:
    step += 1
    tree = {f"w{i}": np.full((64, 64), step * 1000 + i, np.int32) for i in range(20)}
    saver.save(step, tree, {"step": step})
    print(step, flush=True)
"""


def test_a_kill_at_any_moment_leaves_complete_steps_only(root):
    like = {f"w{i}": np.zeros((64, 64), np.int32) for i in range(20)}
    rng, partial = random.Random(0), 0
    for _ in range(8):
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
    assert partial, "no kill hit a save, so this test has shown nothing"


def test_a_different_model_is_told_every_difference_and_no_older_step_is_used(saver, reports):
    like = {"a": {"w": np.zeros((12, 6), np.float32)}, "c": jnp.zeros(2, jnp.bfloat16)}
    with pytest.raises(UsageError) as failure:
        saver.restore(like)
    told = str(failure.value)
    assert "a/w: checkpoint float32[4,6], model float32[12,6]" in told
    assert "b: checkpoint int32[3], model has none" in told
    assert "c: checkpoint has none, model bfloat16[2]" in told
    assert "\n" not in told and reports == []
    with pytest.raises(UsageError, match=r"b: checkpoint int32\[3\], model uint32\[3\]$"):
        saver.restore({**small_tree(0), "b": np.zeros(3, np.uint32)})
    with pytest.raises(RunError, match="already committed"):
        saver.save(3, small_tree(3), {})


def test_another_format_version_is_told_and_not_taken_for_damage(root, saver, reports, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT_VERSION", 3)
        saver.save(4, small_tree(4), {})
    with pytest.raises(UsageError, match="format 3 is not 2"):
        saver.restore(small_tree(0))
    assert reports == []


@pytest.mark.parametrize(
    "tree, reason",
    [
        ({"..": np.zeros(2)}, "cannot be stored under the name '..'"),
        ({"a": {"../../x": np.zeros(2)}}, "cannot be stored under the name"),
        ({"/etc/x": np.zeros(2)}, "cannot be stored under the name '/etc/x'"),
        ({"": np.zeros(2)}, "cannot be stored under the name ''"),
        ({"a\nb": np.zeros(2)}, "cannot be stored under the name"),
        ({"a/b": np.zeros(2), "a": {"b": np.zeros(2)}}, "two arrays have the same name 'a/b'"),
        ({"a": np.zeros(2), "a/c": np.zeros(2)}, "'a/c' would be stored inside array 'a'"),
        ({"a": 3}, "a: only arrays can be stored, not int"),
        ({"a": "text"}, "a: only arrays can be stored, not str"),
    ],
)
def test_trees_that_cannot_be_stored_are_refused(root, tree, reason):
    with pytest.raises(UsageError, match=reason):
        Checkpointer(str(root)).save(1, tree, {})
    assert not root.exists()


def test_wrong_arguments_are_told(root):
    with pytest.raises(UsageError, match="keep must be at least 1, not 0"):
        Checkpointer(str(root), keep=0)
    with pytest.raises(UsageError, match="'gs://bucket/x': only local paths"):
        Checkpointer("gs://bucket/x")
    with pytest.raises(UsageError, match="must not be negative"):
        Checkpointer(str(root)).save(-1, small_tree(1), {})
    saver = Checkpointer(str(root))
    saver.save(1, {"a": np.zeros(2)}, {})
    with pytest.raises(UsageError, match="a: float64 needs jax_enable_x64"):
        saver.restore({"a": jax.ShapeDtypeStruct((2,), np.float64)})


def test_an_unwritable_root_is_told_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    saver = Checkpointer(str(tmp_path / "file" / "checkpoints"))
    for attempt in (saver.check_writable, lambda: saver.save(1, small_tree(1), {})):
        with pytest.raises(UsageError, match="^cannot write to .*file/checkpoints: .+") as failure:
            attempt()
        assert "\n" not in str(failure.value) and failure.value.__suppress_context__
    with pytest.raises(UsageError, match="^cannot read .*file/checkpoints: .+"):
        saver.steps()


def test_a_writable_root_is_left_as_it_was(root):
    Checkpointer(str(root)).check_writable()
    assert list(root.iterdir()) == []


def test_old_steps_that_cannot_be_deleted_are_reported_and_the_save_counts(saver, reports):
    def refuse(*args):
        raise checkpoint_arrays.Fault("disk says no")

    saver._delete_attempts = refuse
    saver.save(4, small_tree(4), {})
    assert reports == [f"cannot delete old checkpoints in {saver.root}: disk says no"]
    assert saver.steps() == [2, 3, 4]


def mesh(*shape):
    names = ("x", "y")[: len(shape)]
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return jax.sharding.Mesh(devices, names)


def sharded(mesh, *axes):
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))


def test_arrays_saved_on_one_mesh_are_restored_to_another(root, monkeypatch):
    # Chunks of at most 50 bytes: a shard of 5 rows by 4 is split into two of 5 by 2.
    monkeypatch.setattr(checkpoint_arrays, "CHUNK_BYTES", 50)
    wide, square = mesh(8), mesh(2, 2)
    host = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    tree = {
        "rows": jax.device_put(host, sharded(wide, "x")),
        "replicated": jax.device_put(host, sharded(wide)),
        "partly": jax.device_put(host, sharded(square, "x")),
        "keys": jax.device_put(jax.random.split(jax.random.key(0), 8), sharded(wide, "x")),
    }
    saver = Checkpointer(str(root))
    saver.save(1, tree, {})
    assert len(list(root.glob("1/attempt-*/arrays/rows/c/*/*"))) == 16

    targets = {
        "rows": sharded(square, "y"),
        "replicated": sharded(square, "x"),
        "partly": sharded(wide),
        "keys": sharded(square, ("y", "x")),
    }
    like = {
        name: jax.ShapeDtypeStruct(tree[name].shape, tree[name].dtype, sharding=targets[name])
        for name in tree
    }
    _, restored, _ = saver.restore(like)
    assert_same(restored, tree)
    for name, target in targets.items():
        assert restored[name].sharding.is_equivalent_to(target, restored[name].ndim)


def test_uncommitted_arrays_stay_uncommitted_and_committed_ones_stay_where_they_were(root):
    device = jax.devices()[1]
    tree = {"free": jnp.ones(2), "bound": jax.device_put(jnp.ones(2), device)}
    saver = Checkpointer(str(root))
    saver.save(1, tree, {})
    _, restored, _ = saver.restore(tree)
    assert not restored["free"].committed
    assert restored["bound"].devices() == {device}


def test_chunks_are_the_shards_and_no_larger_than_the_limit(monkeypatch):
    rows = jax.device_put(jnp.zeros((16, 6)), sharded(mesh(8), "x"))
    assert checkpoint_arrays.chunk_shape(rows) == (2, 6)
    assert checkpoint_arrays.chunk_shape(np.zeros((0, 3), np.float32)) == (1, 3)
    monkeypatch.setattr(checkpoint_arrays, "CHUNK_BYTES", 1000)
    assert checkpoint_arrays.chunk_shape(np.zeros((100, 5), np.float32)) == (50, 5)
    assert checkpoint_arrays.chunk_shape(np.zeros((101, 5), np.float32)) == (101, 1)
    # Shards of 2 x 9 in chunks of 1 x 3: none has numbers of two shards.
    monkeypatch.setattr(checkpoint_arrays, "CHUNK_BYTES", 30)
    rows = jax.device_put(jnp.zeros((16, 9)), sharded(mesh(8), "x"))
    assert checkpoint_arrays.chunk_shape(rows) == (1, 3)


def test_no_more_bytes_are_under_way_than_allowed(monkeypatch):
    under_way, most = 0, 0

    class Job:
        def __init__(self, size):
            nonlocal under_way, most
            self.size = size
            under_way += size
            most = max(most, under_way)

        def result(self):
            nonlocal under_way
            under_way -= self.size
            return self.size

    monkeypatch.setattr(checkpoint_arrays, "BYTES_IN_FLIGHT", 100)
    array = checkpoint_arrays.StoredArray("a", (), "int8", (), None)
    sizes = [60, 30, 20, 500, 10, 10]
    jobs = ((array, size, lambda size=size: Job(size)) for size in sizes)
    assert [result for _, result in checkpoint_arrays.in_flight(jobs)] == sizes
    assert most == 500 and under_way == 0


def test_arrays_may_be_donated_right_after_save(root):
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    tree = {f"w{i}": jnp.full((256, 256), i, jnp.float32) for i in range(8)}
    expected = jax.tree.map(np.array, tree)
    saver = Checkpointer(str(root))
    saver.save(1, tree, {})
    overwritten = overwrite(tree)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(tree))
    _, restored, _ = saver.restore(jax.eval_shape(lambda: overwritten))
    assert_same(restored, expected)

    # Restored arrays can be donated too, and what is on disk does not change with them.
    overwrite(restored)
    assert_same(saver.restore(expected)[1], expected)
