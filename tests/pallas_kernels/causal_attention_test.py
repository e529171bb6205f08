"""Causal attention: plain and the TPU kernels against NumPy, and where each is chosen."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

from pallas_kernels import UnsupportedImplementation, attention_forward, causal_attention
from pallas_kernels.causal_attention import mosaic_tpu, reference
from tests.closeness import assert_close, float64

# Largest error relative to the largest value. bfloat16 rounds weights, output and gradients: 2^-9
# each, of sums of both signs.
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2}


def arguments(batch, length, heads, size, dtype, *, alibi=False, segments=False, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(dtype)
    qkv, d_out = draw(batch, length, 3 * heads, size), draw(batch, length, heads, size)
    options = {"scale": 1.3 * size**-0.5}
    if alibi:
        options["slopes"] = rng.uniform(0.01, 0.5, heads).astype(np.float32)
    if segments:
        # Not sorted: the same number may come back after another.
        ids = np.repeat(rng.integers(0, 3, (batch, -(-length // 7))), 7, axis=1)[:, :length]
        options["segment_ids"] = ids.astype(np.int32)
    return qkv, d_out, options


def numpy_attention(qkv, d_out, scale, slopes=None, segment_ids=None):
    """Output, log sums and the cotangent of qkv in float64, one head of one row at a time."""
    qkv, d_out = float64((qkv, d_out))
    B, N, P, D = qkv.shape
    H = P // 3
    out, log_sums, d_qkv = np.empty((B, N, H, D)), np.empty((B, N, H)), np.empty(qkv.shape)
    for b, h in np.ndindex(B, H):
        q, k, v = (qkv[b, :, part * H + h] for part in range(3))
        sees = np.tri(N, dtype=bool)
        if segment_ids is not None:
            sees &= segment_ids[b, :, None] == segment_ids[b]
        logits = scale * q @ k.T
        if slopes is not None:
            logits -= float(slopes[h]) * (np.arange(N)[:, None] - np.arange(N))
        weights = np.where(sees, np.exp(logits), 0)
        sums = weights.sum(1)
        weights /= sums[:, None]
        out[b, :, h], log_sums[b, :, h] = weights @ v, np.log(sums)
        d_weights = d_out[b, :, h] @ v.T
        mean = np.sum(weights * d_weights, axis=1, keepdims=True)
        d_logits = scale * weights * (d_weights - mean)
        d_qkv[b, :, h] = d_logits @ k
        d_qkv[b, :, H + h] = d_logits.T @ q
        d_qkv[b, :, 2 * H + h] = weights.T @ d_out[b, :, h]
    return out, log_sums, d_qkv


def plain(qkv, d_out, options):
    """What `numpy_attention` gives, by the ops."""
    out, pullback = jax.vjp(lambda qkv: causal_attention(qkv, **options), qkv)
    return out, attention_forward(qkv, **options)[1], pullback(d_out)[0]


@pytest.mark.parametrize("added", [(), ("alibi",), ("alibi", "segments")], ids="-".join)
def test_plain_attention_and_its_gradient_equal_numpy(added):
    qkv, d_out, options = arguments(2, 13, 3, 4, "float64", **dict.fromkeys(added, True))
    with jax.enable_x64(True):
        got = jax.jit(plain)(qkv, d_out, options)
    # Slopes are float32 numbers, exact in both.
    assert_close(got, numpy_attention(qkv, d_out, **options), 1e-14)


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
        monkeypatch.setattr(reference, "_QUERIES", queries)
        traced = trace()
        assert "f64[2,3,12,12]" not in str(traced.jaxpr)
        got = traced.lower().compile()(qkv, d_out, options)
    assert_close(got, numpy_attention(qkv, d_out, **options), 1e-14)


def by_kernels(qkv, d_out, options, **static):
    """What `numpy_attention` gives, by the interpreted kernels."""
    kernel = dict(options, **static, interpret=True)
    out, log_sums = mosaic_tpu.attention_forward(qkv, **kernel)
    return out, log_sums, mosaic_tpu.attention_backward(qkv, out, log_sums, d_out, **kernel)


SHAPES = [  # of rows; with alibi, with segments
    ((2, 128, 2, 8), False, False),
    ((1, 256, 6, 16), True, True),
    ((1, 384, 2, 24), False, True),  # blocks that are not powers of two
    ((1, 640, 2, 8), True, False),
    ((1, 256, 6, 8), True, True),
]
# Each dtype in each order of rows, and most shapes once; the others at night.
QUICK = [
    (SHAPES[0], "float32", "size_major"),
    (SHAPES[4], "bfloat16", "size_major"),
    (SHAPES[2], "bfloat16", "head_major"),
    (SHAPES[3], "float32", "head_major"),
]


@pytest.mark.parametrize(
    "shape, dtype, rows",
    [
        pytest.param(
            *(shape, dtype, rows),
            id="x".join(map(str, shape[0])) + f"-{dtype}-{rows}",
            marks=() if (shape, dtype, rows) in QUICK else pytest.mark.slow,
        )
        for shape, dtype, rows in itertools.product(
            SHAPES, ("float32", "bfloat16"), ("size_major", "head_major")
        )
    ],
)
def test_kernels_equal_numpy(shape, dtype, rows):
    shape, alibi, segments = shape
    qkv, d_out, options = arguments(*shape, dtype, alibi=alibi, segments=segments)
    got = jax.jit(functools.partial(by_kernels, rows=rows))(qkv, d_out, options)
    out, log_sums, gradient = got
    assert out.dtype == gradient.dtype == dtype and log_sums.dtype == jnp.float32
    expected = numpy_attention(qkv, d_out, **options)
    assert_close((out, gradient), expected[::2], TOLERANCE[dtype])
    assert_close(log_sums, expected[1], TOLERANCE["float32"])


@pytest.mark.parametrize("queries", [128, pytest.param(256, marks=pytest.mark.slow)])
def test_any_block_of_queries_gives_the_same(queries):
    qkv, d_out, options = arguments(1, 256, 2, 8, "float32", segments=True)
    run = functools.partial(by_kernels, queries=queries, rows="head_major")
    expected = numpy_attention(qkv, d_out, **options)
    assert_close(jax.jit(run)(qkv, d_out, options), expected, TOLERANCE["float32"])


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


@pytest.mark.parametrize("platform, kernels", [("tpu", 2), ("cpu", 0), ("cuda", 0)])
def test_kernel_is_chosen_by_the_platform_lowered_for(platform, kernels):
    qkv, _, options = arguments(1, 128, 2, 8, "bfloat16", segments=True)
    loss = lambda qkv, options: jnp.sum(causal_attention(qkv, **options).astype(jnp.float32))
    program = jax.jit(jax.grad(loss)).trace(qkv, options).lower(lowering_platforms=(platform,))
    assert program.as_text().count("tpu_custom_call") == kernels


def test_what_no_kernel_serves_falls_back_or_is_refused():
    short = jax.ShapeDtypeStruct((1, 100, 9, 8), jnp.bfloat16)
    ask = lambda qkv, **options: jax.jit(
        lambda qkv: causal_attention(qkv, scale=0.1, **options)
    ).trace(qkv)
    with pytest.raises(UnsupportedImplementation, match="100 tokens .multiples of 128.; use 'xla'"):
        ask(short, implementation="mosaic_tpu")
    odd = jax.ShapeDtypeStruct((1, 128, 9, 8), jnp.bfloat16)
    assert "even number" in mosaic_tpu.unsupported("attention_forward", odd)
    assert mosaic_tpu.unsupported("attention_forward", odd, rows="head_major") is None
    long = jax.ShapeDtypeStruct((1, 16384, 48, 64), jnp.bfloat16)
    assert "VMEM" in mosaic_tpu.unsupported("attention_forward", long)
    traced = ask(short)
    with pytest.warns(UserWarning, match="plain XLA instead: sequences of 100 tokens"):
        traced.lower(lowering_platforms=("tpu",))
    with pytest.raises(UnsupportedImplementation, match="'cudnn' needs a GPU with cuDNN"):
        ask(odd, implementation="cudnn")


def by_scan(qkv, **options):
    rows = {k: v for k, v in options.items() if k == "segment_ids"}
    shared = {k: v for k, v in options.items() if k != "segment_ids"}
    one = lambda row: causal_attention(row[0], segment_ids=row[1]["segment_ids"], **shared)
    split = jax.tree.map(lambda x: x[:, None], (qkv, rows))
    return jax.lax.scan(lambda _, row: (None, one(row)), None, split)[1][:, 0]


def by_shard_map(qkv, segment_ids, **shared):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("data")
    return jax.shard_map(
        lambda qkv, ids: causal_attention(qkv, segment_ids=ids, **shared),
        mesh=mesh,
        in_specs=(rows, rows),
        out_specs=rows,
        check_vma=False,
    )(qkv, segment_ids)


@pytest.mark.parametrize(
    "transformed",
    [by_scan, by_shard_map, jax.checkpoint(causal_attention)],
    ids=["scan", "shard_map", "checkpoint"],
)
def test_composes_with_transformations(transformed):
    qkv, d_out, options = arguments(4, 13, 2, 4, "float32", segments=True)

    @jax.jit
    def gradient(qkv, d_out, options):
        return jax.vjp(lambda qkv: transformed(qkv, **options), qkv)[1](d_out)[0]

    got = gradient(qkv, d_out, options)
    assert_close(got, numpy_attention(qkv, d_out, **options)[2], TOLERANCE["float32"])
