"""Causal attention: plain and the TPU kernels against NumPy, and where each is chosen."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

from pallas_kernels import UnsupportedImplementation, attention_forward, causal_attention
from pallas_kernels.call import round_up
from pallas_kernels.causal_attention import (
    cudnn,
    mosaic_tpu,
    mosaic_tpu_blocks,
    mosaic_tpu_whole,
    reference,
)
from pallas_kernels.causal_attention.block_sizes import Blocks, KernelWork, default_blocks
from pallas_kernels.causal_attention.interface import AttentionOperands, ResultsAndCotangent
from pallas_kernels.target import Target, lowering_for
from tests import emulator
from tests.closeness import assert_close
from tests.pallas_kernels.causal_attention_battery import (
    TOLERANCE,
    Battery,
    Case,
    arguments,
    by_kernels,
    by_tier,
    numpy_attention,
)
from tests.tiers import later


def plain(qkv, d_out, options, **static):
    """What `numpy_attention` gives, by the ops."""
    options = options | static
    out, pullback = jax.vjp(lambda qkv: causal_attention(qkv, **options), qkv)
    return out, attention_forward(qkv, **options)[1], pullback(d_out)[0]


@pytest.mark.parametrize("added", [(), ("alibi",), ("alibi", "segments", "kv_heads")], ids="-".join)
def test_plain_attention_and_its_gradient_equal_numpy(added):
    static = {"kv_heads": 2 if "kv_heads" in added else None}
    qkv, d_out, options = arguments(
        *(2, 13, 4, 3), "float64", **dict.fromkeys(added, True) | static
    )
    with jax.enable_x64(True):
        got = jax.jit(functools.partial(plain, **static))(qkv, d_out, options)
    # Slopes are float32 numbers, exact in both.
    assert_close(got, numpy_attention(qkv, d_out, **options, **static), 1e-14)


@pytest.mark.parametrize(
    "queries",  # 5 does not divide 12: blocks of 4
    [5, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))],
)
def test_blocks_of_queries_give_the_same_and_never_all_logits(queries, monkeypatch):
    qkv, d_out, options = arguments(2, 12, 3, 4, "float64", alibi=True, segments=True)
    with jax.enable_x64(True):
        # A function of its own each time: traces are cached by it.
        trace = lambda: jax.jit(lambda *args: plain(*args)).trace(qkv, d_out, options)
        assert "f64[2,3,12,12]" in str(trace().jaxpr)
        monkeypatch.setattr(reference, "QUERIES", queries)
        traced = trace()
        assert "f64[2,3,12,12]" not in str(traced.jaxpr)
        got = traced.lower().compile()(qkv, d_out, options)
    assert_close(got, numpy_attention(qkv, d_out, **options), 1e-14)


SHAPES = [  # of rows; with alibi, with segments
    ((2, 128, 2, 8), False, False),
    ((1, 256, 6, 16), True, True),
    ((1, 384, 2, 24), False, True),  # blocks that are not powers of two
    ((1, 640, 2, 8), True, False),
    ((1, 256, 6, 8), True, True),
    ((1, 256, 16, 8), False, True),  # size-major rows of bfloat16 are read in place
    ((1, 128, 16, 8), False, True),
]


class TestWhole(Battery):
    module = mosaic_tpu_whole
    # Each dtype and each order of rows once; the others at night.
    cases = by_tier(
        (
            Case(shape, dtype, alibi, segments, options=(("rows", rows),))
            for shape, alibi, segments in SHAPES
            for dtype, rows in itertools.product(
                ("float32", "bfloat16"), ("size_major", "head_major")
            )
        ),
        Case(*SHAPES[0][:1], "float32", *SHAPES[0][1:], options=(("rows", "size_major"),)),
        Case(*SHAPES[2][:1], "bfloat16", *SHAPES[2][1:], options=(("rows", "head_major"),)),
        Case(*SHAPES[6][:1], "bfloat16", *SHAPES[6][1:], options=(("rows", "size_major"),)),
    )


@pytest.mark.parametrize("queries", [128, pytest.param(256, marks=pytest.mark.slow)])
def test_any_block_of_queries_gives_the_same(queries):
    qkv, d_out, options = arguments(1, 256, 2, 8, "float32", segments=True)
    run = functools.partial(by_kernels, mosaic_tpu_whole, queries=queries, rows="head_major")
    expected = numpy_attention(qkv, d_out, **options)
    assert_close(jax.jit(run)(qkv, d_out, options), expected, TOLERANCE["float32"])


@pytest.mark.slow
def test_kernels_over_blocks_are_batched():
    """By `jax.vmap`, with masks of their own."""
    qkv, d_out, options = arguments(2, 256, 2, 8, "float32", segments=True)

    def one(qkv, d_out, ids):
        given = {"scale": options["scale"], "segment_ids": ids}
        return by_kernels(mosaic_tpu, qkv, d_out, given, blocks=Blocks(128, 128, 2))

    arrays = (x[:, None] for x in (qkv, d_out, options["segment_ids"]))
    got = jax.tree.map(lambda x: np.asarray(x)[:, 0], jax.jit(jax.vmap(one))(*arrays))
    assert_close(got, numpy_attention(qkv, d_out, **options), TOLERANCE["float32"])


def test_negative_slopes_give_padded_queries_no_weight():
    """A padded query would have logits of up to 178, and weights that are infinite."""
    qkv, d_out, options = arguments(1, 130, 1, 8, "float32")
    options["slopes"] = np.float32([-0.7])
    run = functools.partial(by_kernels, mosaic_tpu, blocks=Blocks(128, 128, 1), rows="head_major")
    got = jax.jit(run)(qkv, d_out, options)
    # Logits of up to 90 are rounded by up to 4e-6 in float32.
    assert_close(got, numpy_attention(qkv, d_out, **options), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["on_wait", "eager"])
@pytest.mark.parametrize("rows, dtype", [("head_major", "float32"), ("size_major", "bfloat16")])
def test_kernels_over_blocks_have_no_races(rows, dtype, mode):
    emulator.forget()
    qkv, d_out, options = arguments(1, 384, 2, 8, dtype, segments=True)
    interpret = emulator.parameters(mode)
    static = {"rows": rows, "blocks": Blocks(128, 128, 1), "interpret": interpret}
    arrays = jax.tree.map(jnp.asarray, (qkv, d_out, options))
    got = jax.block_until_ready(by_kernels(mosaic_tpu, *arrays, **static))
    assert not emulator.races_found()
    assert_close(got, numpy_attention(qkv, d_out, **options), TOLERANCE[dtype])


def over_blocks(shape, kv_heads, dtype, blocks, alibi=False, segments=False, rows="head_major"):
    options = ("blocks", blocks), ("rows", rows)
    return Case(shape, dtype, alibi, segments, kv_heads, options)


BY_BLOCKS = [  # batch, length, heads, size; heads of keys; blocks
    ((1, 384, 4, 8), 2, Blocks(128, 128, 1), True, False),
    ((2, 300, 3, 16), 3, Blocks(128, 256, 1), False, True),  # a length of no whole blocks
    ((1, 512, 4, 8), 1, Blocks(256, 128, 1), True, True),
    ((1, 512, 2, 24), 2, Blocks(128, 256, 1), False, False),
    ((1, 300, 2, 192), 1, Blocks(128, 128, 1), True, True),
    ((1, 256, 2, 256), 2, Blocks(128, 128, 2), False, True),
]


class TestBlocks(Battery):
    module = mosaic_tpu
    cases = by_tier(
        (
            over_blocks(shape, kv_heads, dtype, *others)
            for shape, kv_heads, *others in BY_BLOCKS
            for dtype in ("float32", "bfloat16")
        ),
        over_blocks(*BY_BLOCKS[1][:2], "bfloat16", *BY_BLOCKS[1][2:]),
        over_blocks(*BY_BLOCKS[4][:2], "float32", *BY_BLOCKS[4][2:]),
    )

    def test_equals_numpy(self, case, monkeypatch):
        # Backward in several spans of queries.
        monkeypatch.setattr(Target, "vmem_part", lambda *_: 2 * 128 * 4 * case.shape[3] * 2)
        super().test_equals_numpy(case)


@pytest.mark.slow
class TestTablesInSpans(Battery):
    """If SMEM has no room for all pairs of blocks, queries are processed in spans."""

    module = mosaic_tpu
    cases = (over_blocks((1, 500, 4, 8), 2, "float32", Blocks(128, 128, 1), True, True),)

    def test_equals_numpy(self, case, monkeypatch):
        monkeypatch.setattr(mosaic_tpu_blocks, "TABLES", 4 * 4 * 9)  # 9 or 12 pairs of 10
        super().test_equals_numpy(case)


LARGE = [  # Several tiles a block, some of which no query sees.
    over_blocks((1, 700, 2, 8), 2, "bfloat16", Blocks(512, 512, 2), segments=True),
    over_blocks((1, 1024, 2, 8), 1, "float32", Blocks(512, 512, 1)),
    over_blocks((1, 900, 1, 8), 1, "float32", Blocks(1024, 1024, 1), alibi=True, segments=True),
    over_blocks((1, 384, 2, 8), 2, "bfloat16", Blocks(128, 128, 2), rows="size_major"),
]


class TestLargeBlocks(Battery):
    module = mosaic_tpu
    cases = by_tier(LARGE, LARGE[1])


class TestLateScale(Battery):
    """Kernels for chips with matrix units of 128 rows scale logits after their maximum is known."""

    module = mosaic_tpu
    cases = by_tier(LARGE, LARGE[3])

    def test_equals_numpy(self, case):
        with lowering_for("TPU v5 lite"):
            super().test_equals_numpy(case)

    @pytest.mark.parametrize("scale", [0.0, -0.7])
    def test_any_scale_hides_what_is_not_visible(self, scale):
        case = LARGE[1]
        qkv, d_out, options = arguments(*case.shape, case.dtype, kv_heads=1)
        options |= {"scale": scale}
        with lowering_for("TPU v5 lite"):
            arrays = jax.tree.map(jnp.asarray, (qkv, d_out, options))
            got = by_kernels(mosaic_tpu, *arrays, kv_heads=1, **dict(case.options))
        want = numpy_attention(qkv, d_out, **options, kv_heads=1)
        assert_close(got, want, TOLERANCE["float32"])


SIZE_MAJOR = [  # batch, length, heads, size; heads of keys; dtype; blocks; alibi, segments
    ((1, 200, 2, 8), 2, "bfloat16", Blocks(128, 128, 1), True, True),
    ((1, 384, 8, 8), 8, "bfloat16", Blocks(128, 128, 4), True, True),
    ((1, 384, 4, 8), 2, "float32", Blocks(128, 128, 1), True, False),
    ((1, 384, 4, 16), 2, "bfloat16", Blocks(128, 128, 2), False, True),
    ((2, 256, 16, 8), 16, "float32", Blocks(128, 128, 8), False, True),
    ((1, 512, 6, 8), 6, "bfloat16", Blocks(256, 256, 3), True, False),
]


class TestSizeMajorRows(Battery):
    """Heads lie in tiles of their own, or among all rows; and their blocks stay in VMEM, or not."""

    module = mosaic_tpu
    cases = by_tier(
        (over_blocks(*case, rows="size_major") for case in SIZE_MAJOR),
        over_blocks(*SIZE_MAJOR[0], rows="size_major"),
    )

    def test_equals_numpy(self, case, monkeypatch):
        (_, length, heads, size), blocks = case.shape, dict(case.options)["blocks"]
        whole = round_up(length, blocks.queries)
        if size == 16:  # there is room for the gradients of queries alone
            monkeypatch.setattr(Target, "vmem_part", lambda *_: 4 * heads * size * whole)
        sizes = heads, case.kv_heads, size, size
        work = KernelWork("size_major", *sizes, jnp.dtype(case.dtype), blocks)
        assert work.supports_rows(whole)
        super().test_equals_numpy(case)


def by_op(given, d_out, kv_heads):
    shared = {"scale": given.scale, "segment_ids": given.segment_ids}
    op = lambda qkv, kv: causal_attention(qkv, kv=kv, **shared)
    out, pullback = jax.vjp(op, given.qkv, given.kv)
    return out, attention_forward(given.qkv, kv=given.kv, **shared)[1], *pullback(d_out)


def by_module(module, given, d_out, kv_heads, **options):
    options = {"kv_heads": kv_heads, "interpret": True} | options
    out, sums = module.attention_forward(given, **options)
    return (
        out,
        sums,
        *module.attention_backward(given, ResultsAndCotangent(out, sums, d_out), **options),
    )


@pytest.mark.parametrize(
    "run, dtype, more, tolerance",
    [
        (by_op, "float32", {}, TOLERANCE["float32"]),
        (functools.partial(by_module, mosaic_tpu), "float32", {}, TOLERANCE["float32"]),
        *later(
            (
                functools.partial(by_module, mosaic_tpu, blocks=Blocks(128, 256, 1)),
                *("bfloat16", {"alibi": True}, TOLERANCE["bfloat16"]),
            ),
            (functools.partial(by_module, cudnn), "bfloat16", {}, TOLERANCE["bfloat16"]),
        ),
    ],
    ids=["xla", "mosaic_tpu", "mosaic_tpu-blocks", "cudnn"],
)
def test_values_of_a_size_of_their_own(run, dtype, more, tolerance):
    """Keys and values apart; as with values that have zeros up to the size of keys."""
    heads, kv_heads, size, value_size = 4, 2, 24, 16
    qkv, d_out, options = arguments(
        1, 256, heads, size, dtype, segments=True, kv_heads=kv_heads, **more
    )
    first, last = heads + kv_heads, slice(value_size, None)
    qkv[:, :, first:, last] = 0
    d_out[..., last] = 0
    q, k, v = np.split(qkv, [heads, first], axis=2)
    given = AttentionOperands(q, **options, kv=(k, v[..., :value_size]))
    got = jax.jit(functools.partial(run, kv_heads=kv_heads))(given, d_out[..., :value_size])
    out, sums, d_qkv = numpy_attention(qkv, d_out, **options, kv_heads=kv_heads)
    d_q, d_k, d_v = np.split(d_qkv, [heads, first], axis=2)
    want = out[..., :value_size], d_q, (d_k, d_v[..., :value_size])
    assert_close((got[0], *got[2:]), want, tolerance)
    if got[1] is not None:
        assert_close(got[1], sums, tolerance)


@pytest.mark.slow
def test_keys_of_another_part_of_a_sequence():
    """All seen, of a query's segment or not: log sums say how much each part counts."""
    shape, blocks = (1, 256, 2, 8), Blocks(128, 128, 2)
    qkv, d_out, options = arguments(*shape, "float32", alibi=True)
    ids = jnp.repeat(jnp.array([[0, 1]]), 128, axis=1)
    heads = mosaic_tpu_blocks.HeadRows
    shared = (2, 2), options["scale"], jnp.asarray(options["slopes"])
    rows = jnp.asarray(qkv).transpose(0, 2, 3, 1)
    first, last = rows[..., :128], rows[..., 128:]

    def part(keys, segments, **where):
        given = heads(last), heads(keys, 2), heads(keys, 4)
        given = mosaic_tpu_blocks.BlockOperands(*given, *shared, segments=segments, **where)
        return mosaic_tpu_blocks.attention_forward(given, blocks=blocks, interpret=True)

    for given, seen in ((jnp.zeros((1, 256), jnp.int32), True), (ids, False)):
        own, before = (given[:, 128:], given[:, 128:]), (given[:, 128:], given[:, :128])
        parts = [part(last, own), part(first, before, offset=None, shift=128)]
        weights = jax.nn.softmax(jnp.stack([sums for _, sums in parts]), axis=0)
        got = sum(w * out for w, (out, _) in zip(weights, parts, strict=True))
        want = numpy_attention(qkv, d_out, **options, segment_ids=given)[0][:, 128:]
        assert_close(got, want.transpose(0, 2, 3, 1), TOLERANCE["float32"])
        assert bool((weights[1] == 0).all()) == (not seen)


COMPILED = [(16, 64), (14, 64), (12, 32), (4, 32)]  # the presets' heads


@pytest.mark.compile
@pytest.mark.parametrize("rows", ["size_major", "head_major"])
@pytest.mark.parametrize(
    "target, heads, size",
    [
        *(("v5e:2x2", *of_preset) for of_preset in COMPILED),
        *((target, *COMPILED[0]) for target in ("v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")),
    ],
)
def test_kernels_compile_for_tpu(target, heads, size, rows):
    topology = topologies.get_topology_desc(platform="tpu", topology_name=target)
    device = jax.sharding.SingleDeviceSharding(topology.devices[0])
    qkv = jax.ShapeDtypeStruct((2, 512, 3 * heads, size), jnp.bfloat16, sharding=device)
    ids = jax.ShapeDtypeStruct((2, 512), jnp.int32, sharding=device)

    def loss(qkv, ids):
        options = dict(scale=0.1, slopes=jnp.full(heads, 0.1), rows=rows)
        out = causal_attention(qkv, segment_ids=ids, **options)
        return jnp.sum(out.astype(jnp.float32))

    compiled = jax.jit(jax.grad(loss)).lower(qkv, ids).compile()
    assert compiled.as_text().count("tpu_custom_call") == 2


LONG = [  # length; heads of queries and of keys; their size; the order of rows
    ("v5e:2x2", 2048, 16, 16, 64, "size_major"),
    ("v6e:2x2", 2048, 32, 8, 64, "head_major"),
    *later(
        ("v6e:2x2", 2048, 12, 12, 32, "size_major"),
        ("v5p:2x2x1", 8192, 16, 16, 64, "size_major"),
        ("tpu7x:2x2x1", 4096, 16, 4, 64, "size_major"),
        ("v5e:2x2", 8192, 12, 12, 64, "size_major"),
        ("v5e:2x2", 2048, 16, 16, 64, "head_major"),
        ("v5p:2x2x1", 2048, 16, 4, 128, "head_major"),
        ("tpu7x:2x2x1", 4096, 8, 8, 192, "head_major"),
        ("v5e:2x2", 8192, 4, 2, 256, "head_major"),
        ("v5p:2x2x1", 131072, 16, 16, 64, "head_major"),
        ("v5e:2x2", 16384, 8, 1, 128, "head_major"),
    ),
]


@pytest.mark.compile
@pytest.mark.parametrize("target, length, heads, kv_heads, size, rows", LONG)
def test_kernels_over_blocks_compile_for_tpu(target, length, heads, kv_heads, size, rows):
    topology = topologies.get_topology_desc(platform="tpu", topology_name=target)
    device = jax.sharding.SingleDeviceSharding(topology.devices[0])
    shape = (2, 1, length, heads + 2 * kv_heads, size)
    qkv = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=device)
    ids = jax.ShapeDtypeStruct(shape[:3], jnp.int32, sharding=device)

    def loss(qkv, ids):
        options = {"scale": 0.1, "slopes": jnp.full(heads, 0.1), "rows": rows}
        one = lambda qkv, ids: causal_attention(qkv, segment_ids=ids, kv_heads=kv_heads, **options)
        return jnp.sum(jax.vmap(one)(qkv, ids).astype(jnp.float32))

    compiled = jax.jit(jax.grad(loss)).lower(qkv, ids).compile()
    kernels = compiled.as_text().count("tpu_custom_call")
    assert kernels == (3 if (length, size) == (16384, 128) else 2)  # in spans of queries
    # Nothing grows with the square of the length.
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * np.prod(shape) * 2


@pytest.mark.compile
def test_many_pairs_of_small_blocks_compile_for_tpu():
    """Thirty-two query heads per key head make blocks small, and their table of pairs large."""
    (device, *_) = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    place = jax.sharding.SingleDeviceSharding(device)
    qkv = jax.ShapeDtypeStruct((1, 131072, 34, 64), jnp.bfloat16, sharding=place)
    attend = lambda qkv: causal_attention(qkv, scale=0.1, kv_heads=1, rows="head_major")
    compiled = jax.jit(attend).lower(qkv).compile()
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 4


@pytest.mark.parametrize(
    "kind, op, heads, size, tokens, blocks",
    [
        ("TPU v5 lite", "backward", (16, 4), 64, 512, (512, 512, 2)),
        ("TPU v5 lite", "backward", (16, 4), 64, 768, (256, 256, 4)),
        ("TPU v5 lite", "forward", (16, 4), 64, 512, (512, 512, 4)),
        ("TPU v5", "forward", (17, 17), 192, 512, (256, 256, 17)),
        ("TPU v5", "forward", (16, 16), 192, 1536, (512, 512, 8)),
        ("TPU v5", "forward", (16, 16), 192, 2048, (1024, 1024, 4)),
        ("TPU v6 lite", "backward", (16, 16), 192, 512, (512, 512, 8)),
        ("TPU7x", "backward", (17, 17), 192, 512, (256, 256, 17)),
        ("TPU7x", "forward", (17, 17), 192, 512, (512, 512, 1)),
        ("TPU v5", "forward", (16, 16), 64, 32768, (1024, 1024, 4)),
    ],
)
def test_blocks_are_small_where_a_short_sequence_wastes_less(kind, op, heads, size, tokens, blocks):
    sizes = dict(zip(("heads", "kv_heads"), heads, strict=True), size=size, value_size=size)
    with lowering_for(kind):
        chosen = default_blocks(
            f"attention_blocks_{op}", tokens, **sizes, rows="head_major", dtype="bfloat16"
        )
    assert tuple(chosen) == blocks


@pytest.mark.parametrize("platform", ["tpu", "cpu", "cuda"])
def test_kernel_is_chosen_by_the_platform_lowered_for(platform):
    qkv, _, options = arguments(1, 128, 2, 8, "bfloat16", segments=True)
    loss = lambda qkv, options: jnp.sum(causal_attention(qkv, **options).astype(jnp.float32))
    program = jax.jit(jax.grad(loss)).trace(qkv, options).lower(lowering_platforms=(platform,))
    text = program.as_text()
    kernels = {"tpu": text.count("tpu_custom_call"), "cuda": text.count("__cudnn$fmhaSoftmax")}
    assert kernels == {"tpu": 0, "cuda": 0} | ({platform: 2} if platform != "cpu" else {})


def test_what_no_kernel_serves_falls_back_or_is_refused():
    short = jax.ShapeDtypeStruct((1, 100, 9, 9), jnp.bfloat16)
    ask = lambda qkv, **options: jax.jit(
        lambda qkv: causal_attention(qkv, scale=0.1, **options)
    ).trace(qkv)
    with pytest.raises(
        UnsupportedImplementation, match="size 9 .legal: multiples of 8.; use 'xla'"
    ):
        ask(short, implementation="mosaic_tpu")
    traced = ask(short)
    with pytest.warns(UserWarning, match="plain XLA is used: heads of size 9"):
        traced.lower(lowering_platforms=("tpu",))
    odd = jax.ShapeDtypeStruct((1, 128, 9, 8), jnp.bfloat16)
    with pytest.raises(UnsupportedImplementation, match="'cudnn' runs on cuda only, .* cpu"):
        ask(odd, implementation="cudnn").lower(lowering_platforms=("cpu",))
    with pytest.warns(UserWarning, match="no cuda kernel .* plain XLA is used: .* of float32"):
        wide = jax.ShapeDtypeStruct(odd.shape, jnp.float32)
        ask(wide).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(
    "shape, rows, kv_heads, whole",
    [
        ((2, 512, 48, 64), "size_major", 16, True),
        pytest.param(  # rows of bfloat16 come in pairs
            *((2, 128, 9, 8), "size_major", None, False), marks=pytest.mark.slow
        ),
        pytest.param((2, 128, 9, 8), "head_major", None, True, marks=pytest.mark.slow),
        pytest.param((2, 100, 48, 64), "size_major", None, False, marks=pytest.mark.slow),
        pytest.param((2, 2048, 48, 64), "size_major", None, False, marks=pytest.mark.slow),
        ((2, 512, 24, 64), "head_major", 4, False),
        ((2, 128, 4, 32), "head_major", 1, False),  # a third of the rows, and yet not alike
    ],
)
def test_whole_sequences_are_attended_with_at_once_where_that_is_faster(
    shape, rows, kv_heads, whole
):
    qkv = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    ask = lambda qkv: causal_attention(qkv, scale=0.1, rows=rows, kv_heads=kv_heads)
    program = jax.jit(ask).trace(qkv).lower(lowering_platforms=("tpu",)).as_text()
    assert ("attention_blocks_forward" not in program) == whole
    assert program.count("tpu_custom_call") == 1
