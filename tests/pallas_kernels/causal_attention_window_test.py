"""Attention within a sliding window: every implementation against NumPy, parts, caches, devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels import attention_after, attention_forward, causal_attention
from pallas_kernels.causal_attention import (
    cudnn,
    mosaic_tpu,
    mosaic_tpu_blocks,
    mosaic_tpu_pairs,
    mosaic_tpu_whole,
    online,
    reference,
)
from pallas_kernels.causal_attention.block_sizes import Blocks
from pallas_kernels.causal_attention.interface import (
    AttentionOperands,
    PartOperands,
    ResultsAndCotangent,
    Window,
)
from pallas_kernels.target import Target, lowering_for
from tests import cuda
from tests.closeness import assert_close
from tests.pallas_kernels.causal_attention_battery import (
    TOLERANCE,
    Battery,
    Case,
    arguments,
    by_tier,
    numpy_attention,
)
from tests.tiers import later

ALL = dict.fromkeys(("alibi", "segments"), True)


def gradients(op, qkv, d_out):
    out, pullback = jax.vjp(op, qkv)
    return out, pullback(d_out)[0]


@pytest.mark.parametrize("window", [1, 4, 12, 13, 40])
def test_plain_attention_and_its_gradient_equal_numpy(window):
    qkv, d_out, options = arguments(2, 13, 4, 3, "float64", **ALL, kv_heads=2)
    with jax.enable_x64(True):
        op = functools.partial(causal_attention, kv_heads=2, window=window)
        run = lambda qkv, d_out, options: gradients(lambda x: op(x, **options), qkv, d_out)
        got = jax.jit(run)(qkv, d_out, options)
    want = numpy_attention(qkv, d_out, **options, kv_heads=2, window=window)
    assert_close(got, want[::2], 1e-14)


class TestOnline(Battery):
    module = online
    cases = by_tier(
        (
            Case((2, 131, 4, 12), "float32", True, True, 2, window=40),
            Case((2, 131, 4, 12), "float32", False, False, 2, window=1),
            Case((1, 97, 3, 20), "bfloat16", False, True, window=60),
        ),
        Case((2, 131, 4, 12), "float32", True, True, 2, window=40),
    )

    def test_equals_numpy(self, case, monkeypatch):
        monkeypatch.setattr(online, "SIZES", (48, 16))
        super().test_equals_numpy(case)


def whole(rows, *others, **more):
    return Case(*others, options=(("rows", rows), ("queries", 128)), **more)


class TestWhole(Battery):
    module = mosaic_tpu_whole
    cases = by_tier(
        (
            whole("head_major", (1, 384, 2, 8), "float32", True, True, window=100),
            whole("size_major", (1, 512, 2, 8), "bfloat16", False, True, window=200),
            whole("head_major", (1, 256, 2, 8), "float32", window=1),
        ),
        whole("head_major", (1, 384, 2, 8), "float32", True, True, window=100),
    )


def over_blocks(shape, kv_heads, dtype, blocks, window, *flags, rows="head_major"):
    return Case(shape, dtype, *flags, kv_heads, (("blocks", blocks), ("rows", rows)), window)


class TestBlocks(Battery):
    """The backward pass runs in spans of queries, and leaves out keys before their windows."""

    module = mosaic_tpu
    cases = by_tier(
        (
            over_blocks((1, 640, 2, 8), 1, "float32", Blocks(128, 128, 1), 150, True, True),
            over_blocks((2, 700, 2, 8), 2, "bfloat16", Blocks(128, 256, 1), 200, True, False),
            over_blocks((1, 640, 2, 8), 2, "float32", Blocks(256, 128, 2), 1, False, False),
            over_blocks((1, 640, 2, 8), 2, "float32", Blocks(128, 128, 1), 129, False, True),
        ),
        over_blocks((1, 640, 2, 8), 1, "float32", Blocks(128, 128, 1), 150, True, True),
    )

    def test_equals_numpy(self, case, monkeypatch):
        monkeypatch.setattr(Target, "vmem_part", lambda *_: 2 * 128 * 4 * case.shape[3] * 2)
        super().test_equals_numpy(case)


class TestSizeMajorRows(Battery):
    module = mosaic_tpu
    cases = by_tier(
        (
            over_blocks(*shape, *others, rows="size_major")
            for shape, *others in (
                (((1, 400, 2, 8), 2, "bfloat16"), Blocks(128, 128, 1), 130, True, True),
                (((1, 512, 8, 8), 8, "float32"), Blocks(128, 128, 4), 100, False, False),
            )
        ),
        over_blocks(
            *((1, 400, 2, 8), 2, "bfloat16"),
            *(Blocks(128, 128, 1), 130, True, True),
            rows="size_major",
        ),
    )


class TestEntries(Battery):
    """ALiBi and segments are further entries, and the window is one of cuDNN's options."""

    module = cudnn
    sums = "bfloat16"
    cases = (Case((2, 300, 4, 12), "bfloat16", True, True, 2, window=70),)


def test_pairs_before_the_window_are_not_computed():
    """A block of queries, of 64 blocks, sees its own block of keys and the two before it."""
    found = []
    for window in (None, 2 * 128):
        given = mosaic_tpu_blocks.BlockOperands(
            *3 * [mosaic_tpu_blocks.HeadRows(jax.ShapeDtypeStruct((1, 2, 8, 64 * 128), "float32"))],
            (2, 2), 1.0, window=window,
        )  # fmt: skip
        call = mosaic_tpu_blocks._call_of(given, Blocks(128, 128, 1), by_keys=True)
        found.append(mosaic_tpu_pairs.count(call))
    assert found == [64 * 65 // 2, 64 * 3 - 1 - 2]
    q = jnp.zeros((1, 480, 2, 8))
    for window, pairs in (
        (None, 10 * 11 // 2),
        (Window(49), 10 * 2 - 1),
        (Window(50), 10 * 3 - 1 - 2),
    ):
        given = PartOperands(q, (q, q), 1.0, 0, None, None, window)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(online, "SIZES", (48,))
            assert len(online._OnlineBlocks(True, given).pairs[0]) == pairs


def test_cudnn_is_called_as_jax_calls_it(monkeypatch):
    from jax._src.cudnn import fused_attention_stablehlo as of_jax

    monkeypatch.setattr(of_jax, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(of_jax, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(of_jax, "is_cuda_compute_capability_equal", lambda capability: False)

    def by_jax(qkv):
        q, k, v = jnp.split(qkv, 3, axis=2)
        shared = {"scale": 1.0, "is_causal": True, "implementation": "cudnn"}
        return jax.nn.dot_product_attention(q, k, v, local_window_size=(69, 0), **shared)

    ours = functools.partial(causal_attention, scale=1.0, window=70)
    args = [jax.ShapeDtypeStruct((3, 250, rows, 64), jnp.bfloat16) for rows in (6, 2)]
    found, wanted = (
        cuda.cudnn_calls(functools.partial(gradients, op), *args) for op in (ours, by_jax)
    )
    assert found == wanted and all(r"\22sliding_window_length\22: 70" in x for _, x in found)


# Parts of a sequence -----------------------------------------------------------------------------

B, HEADS, KV_HEADS, SIZE = 2, 4, 2, 8
SLOPES = np.array([0.5, 0.25, 0.1, 0.05])


def draw(seed, *shape, dtype="float32"):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@pytest.mark.parametrize(
    "module, queries, keys, window",
    [
        (mosaic_tpu, 256, 384, -150),
        (online, 60, 101, 13),
        *later(
            (mosaic_tpu, 256, 256, 30),
            (mosaic_tpu, 384, 256, -256),
            (mosaic_tpu, 384, 128, 200),
            (online, 101, 60, -20),
            (online, 60, 60, -59),
            (online, 60, 60, -60),
        ),
    ],
)
def test_a_part_within_a_window(module, queries, keys, window, monkeypatch):
    """Compare with the reference, which applies a mask to all pairs of tokens."""
    monkeypatch.setattr(online, "SIZES", (48, 16))
    q, d_out = draw(0, B, queries, HEADS, SIZE), draw(2, B, queries, HEADS, SIZE)
    kv = draw(1, B, keys, 2 * KV_HEADS, SIZE)
    ids = [np.sort(np.random.default_rng(n).integers(0, 3, (B, n))) for n in (queries, keys)]
    slopes, segments = jnp.asarray(SLOPES / 32, jnp.float32), tuple(x.astype("int32") for x in ids)
    shared = np.float32(0.3), np.int32(512), slopes, segments, Window(window)

    @functools.partial(jax.jit, static_argnums=0)
    def run(module, q, kv, d_out, shared):
        options = {"interpret": True} if module is mosaic_tpu else {}
        given = PartOperands(q, kv, *shared)
        out, sums = module.part_forward(given, **options)
        seen = sums > -500
        attended = ResultsAndCotangent(out, jnp.where(seen, sums + 0.5, 0), d_out)
        pulled = module.part_backward(given, attended, **options)
        return jnp.where(seen[..., None], out, 0), jnp.where(seen, sums, 0), seen, pulled

    got, want = (run(x, q, kv, d_out, shared) for x in (module, reference))
    distance = np.arange(queries)[:, None] - np.arange(keys)
    same = segments[0][:, :, None] == segments[1][:, None]
    np.testing.assert_array_equal(want[2][..., 0], np.any(same & (distance < window), axis=2))
    np.testing.assert_array_equal(got[2], want[2])
    assert_close((got[:2], got[3]), (want[:2], want[3]), 2.0**-18)


@pytest.mark.parametrize("window, capacity", [(5, 20), *later((1, 20), (30, 20), (18, 40))])
def test_new_tokens_after_those_of_a_cache(window, capacity):
    """Compare rows with caches of several lengths with the last tokens of whole rows."""
    new, filled = 7, np.array([0, 3, 17, 20])
    length = filled.max() + new
    rows = HEADS + 2 * KV_HEADS
    whole, d_out = draw(0, 4, length, rows, SIZE), draw(1, 4, length, HEADS, SIZE)
    places = filled[:, None] + np.arange(new)
    at = lambda x: np.take_along_axis(x, places[..., None, None], 1)
    before = whole[:, :capacity, HEADS:]
    before = np.pad(before, [(0, 0), (0, capacity - before.shape[1]), (0, 0), (0, 0)])
    before = np.where(np.arange(capacity)[:, None, None] < filled[:, None, None, None], before, 9)
    options = {"scale": 0.3, "slopes": jnp.asarray(SLOPES, jnp.float32), "kv_heads": KV_HEADS}

    @jax.jit
    def run(qkv, before, d_out):
        given = jnp.asarray(filled)
        op = lambda qkv, before: attention_after(qkv, before, given, window=window, **options)
        out, pullback = jax.vjp(op, qkv, before)
        return out, pullback(d_out)

    out, (d_qkv, d_before) = run(at(whole), np.float32(before), at(d_out))
    for row, count in enumerate(filled):
        own = slice(row, row + 1), slice(0, count + new)
        asked = np.where(np.arange(count + new)[:, None, None] >= count, d_out[own], 0)
        want = numpy_attention(whole[own], asked, **options, window=window)
        assert_close(out[row], want[0][0, count:], TOLERANCE["float32"])
        d_new, d_old = want[2][0, count:], want[2][0, :count, HEADS:]
        assert_close((d_qkv[row], d_before[row, :count]), (d_new, d_old), TOLERANCE["float32"])
        assert not np.any(d_before[row, count:])


def test_slopes_of_a_narrow_dtype_are_multiplied_in_a_wide_one():
    """The distance to the first new token differs by up to 589 between the rows."""
    qkv, before = draw(0, 2, 3, HEADS + 2 * KV_HEADS, SIZE), draw(1, 2, 600, 2 * KV_HEADS, SIZE)
    filled, slopes = np.array([11, 600]), jnp.asarray(SLOPES, jnp.bfloat16)

    @jax.jit
    def run(qkv, before, filled, *slopes):
        op = functools.partial(attention_after, qkv, before, filled, kv_heads=KV_HEADS, scale=0.3)
        return [op(slopes=x) for x in slopes]

    assert_close(*run(qkv, before, filled, slopes, slopes.astype(jnp.float32)), 1e-6)


# Devices -----------------------------------------------------------------------------------------


def divided(devices, **options):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("sequence",))
    tokens, whole = PartitionSpec(None, "sequence"), PartitionSpec()

    def op(qkv, segment_ids):
        return causal_attention(qkv, segment_ids=segment_ids, over="sequence", **options)

    return jax.shard_map(op, mesh=mesh, in_specs=(tokens, whole), out_specs=tokens, check_vma=False)


@pytest.mark.parametrize(
    "devices, window", [(4, 6), *later((2, 1), (2, 3), (4, 5), (4, 12), (4, 15), (4, 16), (8, 9))]
)
def test_devices_with_a_part_each_give_the_whole(devices, window):
    """Devices send keys only as far as a window reaches."""
    length = 4 * devices
    options = {"scale": 0.3, "slopes": jnp.asarray(SLOPES), "kv_heads": KV_HEADS, "window": window}
    with jax.enable_x64(True):
        qkv = draw(0, B, length, HEADS + 2 * KV_HEADS, SIZE, dtype="float64")
        d_out = draw(1, B, length, HEADS, SIZE, dtype="float64")
        ids = np.sort(np.random.default_rng(2).integers(0, 3, (B, length)).astype("int32"))
        op = divided(devices, **options)
        traced = jax.jit(lambda *x: gradients(lambda qkv: op(qkv, x[1]), x[0], x[2])).trace(
            qkv, ids, d_out
        )
        got = traced.lower().compile()(qkv, ids, d_out)
    want = numpy_attention(qkv, d_out, **options, segment_ids=ids)
    assert_close(got, want[::2], 1e-13)
    hops = min(-(-(window - 1) // 4), devices - 1)
    if window < length:  # keys and values forward; backward these again, and their gradients
        assert str(traced.jaxpr).count("ppermute[") == 3 * hops


def test_keys_and_values_apart_and_documents_of_one_row():
    mesh = Mesh(np.array(jax.devices()[:2]), ("sequence",))
    tokens = PartitionSpec(None, "sequence")
    arrays = draw(0, B, 8, HEADS, SIZE), draw(1, B, 8, KV_HEADS, SIZE), draw(2, B, 8, KV_HEADS, 5)
    d_out = draw(3, B, 8, HEADS, 5)
    op = lambda q, k, v, **more: causal_attention(q, kv=(k, v), scale=0.3, window=3, **more)
    over = functools.partial(op, over="sequence")
    ring = jax.shard_map(over, mesh=mesh, in_specs=3 * (tokens,), out_specs=tokens, check_vma=False)

    def both(op, *arrays):
        out, pullback = jax.vjp(op, *arrays)
        return out, pullback(d_out)

    got, wanted = (jax.jit(functools.partial(both, f))(*arrays) for f in (ring, op))
    assert_close(got, wanted, 2.0**-18)


# What is chosen and refused ----------------------------------------------------------------------


def test_a_window_of_the_whole_sequence_is_none():
    given = jax.ShapeDtypeStruct((1, 128, 6, 8), jnp.float32)
    text = lambda window: str(
        jax.make_jaxpr(lambda x: attention_forward(x, scale=1.0, window=window))(given)
    )
    assert text(128) == text(None) != text(127)


def test_what_is_no_window_is_refused():
    qkv = jnp.ones((1, 4, 3, 8))
    with pytest.raises(ValueError, match="window=0 must be an integer, at least 1, or None"):
        causal_attention(qkv, scale=1.0, window=0)
    with pytest.raises(ValueError, match="window=-1 must be an integer, at least 1, or None"):
        attention_after(qkv, jnp.ones((1, 4, 2, 8)), jnp.zeros(1, int), scale=1.0, window=-1)


def test_cudnn_has_no_window_over_another_part():
    q = jnp.zeros((1, 128, 2, 64), jnp.bfloat16)
    part = PartOperands(q, (q, q), 0.1, 0, None, None)
    whole = AttentionOperands(q, 0.1, window=Window(3))
    with lowering_for("NVIDIA H100 80GB HBM3"):
        assert cudnn.unsupported("part_forward", part) is None
        why = cudnn.unsupported("part_forward", part._replace(window=Window(3)))
        assert cudnn.unsupported("attention_forward", whole) is None
    assert why == "a window over another part of the sequence (legal: over the whole sequence)"


@pytest.mark.compile
@pytest.mark.parametrize(
    "target, length, heads, rows",
    [("v5e:2x2", 512, (4, 4), "size_major"), ("v6e:2x2", 4096, (8, 2), "head_major")],
)
def test_windows_compile_for_tpu(target, length, heads, rows):
    topology = topologies.get_topology_desc(platform="tpu", topology_name=target)
    device = jax.sharding.SingleDeviceSharding(topology.devices[0])
    shape = (1, length, heads[0] + 2 * heads[1], 64)
    qkv = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=device)
    ids = jax.ShapeDtypeStruct(shape[:2], jnp.int32, sharding=device)

    def loss(qkv, ids):
        options = {"scale": 0.1, "rows": rows, "window": 200, "kv_heads": heads[1]}
        return jnp.sum(causal_attention(qkv, segment_ids=ids, **options).astype(jnp.float32))

    compiled = jax.jit(jax.grad(loss)).lower(qkv, ids).compile()
    assert compiled.as_text().count("tpu_custom_call") == 2
