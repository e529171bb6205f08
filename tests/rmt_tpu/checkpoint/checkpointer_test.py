"""Checkpoints: exact round trips, parts, other meshes, and what cannot be stored."""

import json
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

from rmt_tpu.checkpoint import Checkpointer, checkpointer, manifest
from rmt_tpu.checkpoint import arrays as checkpoint_arrays
from rmt_tpu.errors import RunError, UsageError
from tests.rmt_tpu.checkpoint.checkpoints import (
    array_of_w,
    assert_same,
    attempt_of,
    chunk_of_w,
    mesh,
    sharded,
    small_tree,
)


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


LAYERS = np.arange(96, dtype=np.float32).reshape(24, 4)


@pytest.mark.parametrize("stored", [(24, 4), (2, 12, 4), (8, 3, 4)], ids=str)
@pytest.mark.parametrize("wanted", [(24, 4), (3, 8, 4), (12, 2, 4)], ids=str)
def test_layers_come_back_in_stacks_of_any_height(root, stored, wanted):
    """On each device exactly its rows, with any axis divided."""
    saver = Checkpointer(str(root))
    saver.save(1, {"stacks": {"w": LAYERS.reshape(stored)}}, {})
    expected = LAYERS.reshape(wanted)
    for place in [None, *(sharded(mesh(2, 2), *axes) for axes in _divided(wanted))]:
        like = jax.ShapeDtypeStruct(wanted, np.float32, sharding=place)
        found = saver.restore({"stacks": {"w": like}})[1]["stacks"]["w"]
        assert place is None or found.sharding == place
        for shard in found.addressable_shards:
            np.testing.assert_array_equal(shard.data, expected[shard.index])
    host = saver.restore({"stacks": {"w": np.zeros(wanted, np.float32)}})[1]["stacks"]["w"]
    assert_same(host, expected)


def _divided(shape: tuple[int, ...]) -> list[tuple[str | None, ...]]:
    """Each axis of two devices, and the last one of two others, where they divide it."""
    even = [axis for axis, size in enumerate(shape[:-1]) if size % 2 == 0]
    alone = tuple(None for _ in shape[:-1])
    return [(*alone[:axis], "x", *alone[axis + 1 :], "y") for axis in even] + [(*alone, "x")]


def test_only_layers_are_stacked_otherwise(root):
    saver = Checkpointer(str(root))
    saver.save(1, {"stacks": {"w": LAYERS}, "table": LAYERS}, {})
    shape = lambda *sizes: np.zeros(sizes, np.float32)
    for tree, reason in [
        ({"stacks": {"w": shape(48, 2)}}, r"stacks/w: checkpoint float32\[24,4\], model .*48,2"),
        ({"stacks": {"w": shape(2, 10, 4)}}, "stacks/w: "),
        ({"stacks": {"w": shape(2, 12, 2, 2)}}, "stacks/w: "),
        ({"stacks": {"w": shape(2, 3, 4, 4)}}, "stacks/w: "),
        ({"stacks": {"w": np.zeros((2, 12, 4), np.int32)}}, "stacks/w: "),
        ({"table": shape(2, 12, 4)}, r"table: checkpoint float32\[24,4\], model float32\[2,12,4"),
    ]:
        with pytest.raises(UsageError, match=reason):
            saver.restore(tree, partial=True)


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
    attempt = root / attempt_of(saver.root, 3)
    assert json.loads((root / "3/COMMIT").read_text()) == {"attempt": attempt.name}
    described = json.loads((attempt / "arrays/a/w/zarr.json").read_text())
    assert described["shape"] == [4, 6]
    assert [codec["name"] for codec in described["codecs"]] == ["bytes", "crc32c"]
    # 24 floats and a checksum: a plain zarr array that other programs can read.
    stored = (root / chunk_of_w(saver.root, 3)).read_bytes()
    assert stored[:-4] == np.full(24, 3, "<f4").tobytes()


def test_compressed_arrays_are_smaller_and_read_by_any_checkpointer(root, saver):
    compressing = Checkpointer(str(root), compression="zstd")
    tree = {"a": {"w": np.full((400, 600), 1.5, np.float32)}, "b": np.arange(3)}
    compressing.save(4, tree, {})
    described = json.loads(saver.root.read(f"{array_of_w(saver.root, 4)}/zarr.json").data)
    assert [codec["name"] for codec in described["codecs"]] == ["bytes", "zstd", "crc32c"]
    assert len(saver.root.read(chunk_of_w(saver.root, 4)).data) < 1000
    for reader in (saver, compressing):
        assert_same(reader.restore(tree, 4)[1], tree)
        assert_same(reader.restore(small_tree(0), 3)[1], small_tree(3))
    with pytest.raises(UsageError, match="compression 'gzip' is unknown; legal: none, zstd"):
        Checkpointer(str(root), compression="gzip")


def test_one_array_or_a_slice_of_it(root, saver):
    assert {name: str(array) for name, array in saver.arrays(2).items()} == {
        "a/w": "float32[4,6]",
        "b": "int32[3]",
    }
    found = saver.array("b", 2)[1:].read().result()
    assert_same(found, np.array([3, 4], np.int32))
    assert_same(saver.array("b").read().result(), np.array([3, 4, 5], np.int32))
    # The chunks of others are not looked at.
    saver.root.delete(chunk_of_w(saver.root, 3))
    assert saver.array("b").read().result()[0] == 3
    with pytest.raises(ValueError, match="is missing"):
        saver.array("a/w")[0].read().result()
    with pytest.raises(UsageError, match="in step 3, array 'c' is unknown; legal: a/w, b"):
        saver.array("c")
    with pytest.raises(UsageError, match="step=9 is not a checkpoint in"):
        saver.arrays(9)
    with pytest.raises(ValueError, match="does not support writing"):
        saver.array("b").write(0).result()


def test_like_may_depend_on_what_a_step_has(saver):
    saver.save(4, {"b": np.arange(5)}, {})
    like = lambda arrays: {n: np.zeros(a.shape, a.dtype) for n, a in arrays.items()}
    assert_same(saver.restore(like)[1], {"b": np.arange(5)})
    assert saver.restore(like, 2)[1].keys() == {"a/w", "b"}


def test_absent_steps_and_an_empty_root(root, saver, tmp_path):
    with pytest.raises(UsageError, match=r"^step=7 is not a checkpoint in .*; available: 1, 2, 3$"):
        saver.restore(small_tree(0), step=7)
    empty = Checkpointer(str(tmp_path / "empty"))
    assert empty.steps() == []
    with pytest.raises(RunError, match="^no checkpoint in .*empty$"):
        empty.restore(small_tree(0))


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
    for dtype in (np.float32, np.int64):  # a number of 25 bits would be another one
        with pytest.raises(UsageError, match=rf"b: checkpoint int32\[3\], model {dtype.__name__}"):
            saver.restore({**small_tree(0), "b": np.zeros(3, dtype)})
    with pytest.raises(UsageError, match=r"a/w: checkpoint float32\[4,6\], model bfloat16\[4,6\]$"):
        saver.restore({**small_tree(0), "a": {"w": jnp.zeros((4, 6), jnp.bfloat16)}})
    with pytest.raises(RunError, match="already committed"):
        saver.save(3, small_tree(3), {})


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
        ({"a": 3}, "a has the type int, but only arrays can be stored"),
        ({"a": "text"}, "a has the type str, but only arrays can be stored"),
    ],
)
def test_trees_that_cannot_be_stored_are_refused(root, tree, reason):
    with pytest.raises(UsageError, match=reason):
        Checkpointer(str(root)).save(1, tree, {})
    assert not root.exists()


def test_wrong_arguments_are_told(root):
    with pytest.raises(UsageError, match="'ftp://host/x' cannot be opened; legal: a local path"):
        Checkpointer("ftp://host/x")
    with pytest.raises(UsageError, match="must not be negative"):
        Checkpointer(str(root)).save(-1, small_tree(1), {})
    saver = Checkpointer(str(root))
    saver.save(1, {"a": np.zeros(2)}, {})
    with pytest.raises(UsageError, match="a: float64 needs jax_enable_x64"):
        saver.restore({"a": jax.ShapeDtypeStruct((2,), np.float64)})


def test_an_unwritable_root_is_told_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    saver = Checkpointer(str(tmp_path / "file" / "checkpoints"))
    with pytest.raises(UsageError, match="file/checkpoints cannot be written to: .+"):
        saver.root.check(write=True)
    with pytest.raises(RunError, match="^cannot save step 1 in .*file/checkpoints: .+") as failure:
        saver.save(1, small_tree(1), {})
    assert "\n" not in str(failure.value) and failure.value.__suppress_context__


def test_a_writable_root_is_left_as_it_was(root):
    Checkpointer(str(root)).root.check(write=True)
    assert list(root.iterdir()) == []


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


def test_a_save_that_takes_long_is_told_and_so_is_the_one_before(root, reports, monkeypatch):
    monkeypatch.setattr(checkpointer, "SLOW_SECONDS", 0.0)
    saver = Checkpointer(str(root), report=reports.append)
    told = threading.Event()
    monkeypatch.setattr(saver, "report", lambda line: (reports.append(line), told.set()))
    waits = lambda: told.wait(60)
    assert saver.begin_save(1, small_tree(1), {}, before_commit=waits) is None
    assert saver.begin_save(2, small_tree(2), {}).step == 1
    assert saver.wait().step == 2
    assert reports[0].startswith("note: step 1 is not saved yet after 0 s; ")


def test_scalars_of_layers_fit_another_number_of_virtual_stages(root):
    """Another array of the same layers tells that their two axes are those of layers."""
    saver, numbers = Checkpointer(str(root)), np.arange(8, dtype=np.float32)
    matrices = np.arange(24, dtype=np.float32)
    saver.save(1, {"stacks": {"scale": numbers.reshape(2, 4), "w": matrices.reshape(2, 4, 3)}}, {})
    like = {"scale": jnp.zeros((4, 2)), "w": jnp.zeros((4, 2, 3))}
    _, found, _ = saver.restore({"stacks": like})
    assert_same(found["stacks"], {"scale": numbers.reshape(4, 2), "w": matrices.reshape(4, 2, 3)})
    for wrong in (like | {"scale": jnp.zeros((8, 1))}, like | {"scale": jnp.zeros((4, 3))}):
        with pytest.raises(UsageError, match="does not fit the model: stacks/scale: checkpoint"):
            saver.restore({"stacks": wrong})


def test_a_meta_that_could_not_be_read_again_is_refused(root, monkeypatch):
    monkeypatch.setattr(manifest, "MANIFEST_LIMIT", 1000)
    with pytest.raises(
        UsageError, match="manifest has .* bytes; legal: at most 1000, with a small"
    ):
        Checkpointer(str(root)).save(1, {"w": np.zeros(2)}, {"x": "a" * 1000})
    assert Checkpointer(str(root)).steps() == []
