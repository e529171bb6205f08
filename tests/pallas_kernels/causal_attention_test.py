"""Causal attention: plain against NumPy, the TPU kernel against plain, and where each is chosen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

from pallas_kernels import UnsupportedImplementation, attention_forward, causal_attention
from pallas_kernels.causal_attention import mosaic_tpu, reference

# Largest error relative to the largest value. bfloat16 rounds weights, output and gradients: 2^-9
# each, of sums of both signs.
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2}


def arguments(batch, length, heads, size, dtype, *, alibi=False, segments=False, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    qkv, d_out = draw(batch, length, 3 * heads, size), draw(batch, length, heads, size)
    options = {"scale": 1.3 * size**-0.5}
    if alibi:
        options["slopes"] = jnp.asarray(rng.uniform(0.01, 0.5, heads), jnp.float32)
    if segments:
        # Not sorted: the same number may come back after another.
        ids = np.repeat(rng.integers(0, 3, (batch, -(-length // 7))), 7, axis=1)[:, :length]
        options["segment_ids"] = jnp.asarray(ids, jnp.int32)
    return qkv, d_out, options


def numpy_attention(qkv, scale, slopes=None, segment_ids=None):
    """One query of one head at a time, in float64."""
    qkv = np.asarray(qkv, np.float64)
    B, N, P, D = qkv.shape
    H = P // 3
    out, log_sums = np.empty((B, N, H, D)), np.empty((B, N, H))
    for b, i, h in np.ndindex(B, N, H):
        sees = np.arange(i + 1)
        if segment_ids is not None:
            sees = sees[np.asarray(segment_ids)[b, : i + 1] == segment_ids[b, i]]
        logits = scale * qkv[b, sees, H + h] @ qkv[b, i, h]
        if slopes is not None:
            logits = logits - float(slopes[h]) * (i - sees)
        weights = np.exp(logits - logits.max())
        out[b, i, h] = weights @ qkv[b, sees, 2 * H + h] / weights.sum()
        log_sums[b, i, h] = logits.max() + np.log(weights.sum())
    return out, log_sums


def largest_error(got, expected):
    expected = np.asarray(expected, np.float64)
    return np.abs(np.asarray(got, np.float64) - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("alibi, segments", [(False, False), (True, False), (True, True)])
def test_plain_attention_equals_numpy(alibi, segments):
    with jax.enable_x64(True):
        args = (2, 13, 3, 4, "float64")
        qkv, _, options = arguments(*args, alibi=alibi, segments=segments)
        out, log_sums = attention_forward(qkv, **options)
        expected = numpy_attention(qkv, **options)
    # Slopes are float32 numbers, exact in both.
    assert largest_error(out, expected[0]) < 1e-14
    assert largest_error(log_sums, expected[1]) < 1e-14


def test_plain_gradient_is_that_of_differentiating_forward():
    with jax.enable_x64(True):
        qkv, d_out, options = arguments(2, 13, 3, 4, "float64", alibi=True, segments=True)
        op = lambda qkv: causal_attention(qkv, **options)
        plain = lambda qkv: reference.attention_forward(qkv, **options)[0]
        got, expected = (jax.vjp(f, qkv)[1](d_out)[0] for f in (op, plain))
        assert largest_error(got, expected) < 1e-14


@pytest.mark.parametrize("queries", [1, 4, 5])  # 5 does not divide 12: blocks of 4
def test_blocks_of_queries_give_the_same_and_never_all_logits(queries, monkeypatch):
    with jax.enable_x64(True):
        qkv, d_out, options = arguments(2, 12, 3, 4, "float64", alibi=True, segments=True)

        def gradient():  # a function of its own each time: traces are cached by it
            return lambda qkv: jax.vjp(lambda z: causal_attention(z, **options), qkv)[1](d_out)[0]

        whole_out, whole = causal_attention(qkv, **options), gradient()(qkv)
        assert "f64[2,3,12,12]" in str(jax.make_jaxpr(gradient())(qkv))
        monkeypatch.setattr(reference, "_QUERIES", queries)
        assert largest_error(causal_attention(qkv, **options), whole_out) < 1e-14
        assert largest_error(gradient()(qkv), whole) < 1e-14
        assert "f64[2,3,12,12]" not in str(jax.make_jaxpr(gradient())(qkv))


@pytest.mark.parametrize("rows", ["size_major", "head_major"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "shape, alibi, segments",
    [
        ((2, 128, 2, 8), False, False),
        ((1, 256, 6, 16), True, True),
        ((1, 384, 2, 24), False, True),  # blocks that are not powers of two
        ((1, 640, 2, 8), True, False),
    ],
)
def test_kernels_equal_plain(shape, alibi, segments, dtype, rows):
    qkv, d_out, options = arguments(*shape, dtype, alibi=alibi, segments=segments)
    kernel = dict(options, rows=rows, interpret=True)
    out, log_sums = mosaic_tpu.attention_forward(qkv, **kernel)
    gradient = mosaic_tpu.attention_backward(qkv, out, log_sums, d_out, **kernel)
    assert out.dtype == gradient.dtype == dtype and log_sums.dtype == jnp.float32

    exact, d_exact = qkv.astype(jnp.float32), d_out.astype(jnp.float32)
    plain = functools.partial(reference.attention_forward, **options)
    (expected, expected_sums), pullback = jax.vjp(plain, exact)
    (expected_gradient,) = pullback((d_exact, jnp.zeros_like(expected_sums)))
    assert largest_error(out, expected) < TOLERANCE[dtype]
    assert largest_error(log_sums, expected_sums) < TOLERANCE["float32"]
    assert largest_error(gradient, expected_gradient) < TOLERANCE[dtype]


@pytest.mark.parametrize("queries", [128, 256])
def test_any_block_of_queries_gives_the_same(queries):
    qkv, d_out, options = arguments(1, 256, 2, 8, "float32", segments=True)
    run = functools.partial(mosaic_tpu.attention_forward, qkv, interpret=True, **options)
    out, log_sums = run(queries=queries)
    whole, _ = run()
    np.testing.assert_allclose(out, whole, atol=1e-5)
    back = functools.partial(
        mosaic_tpu.attention_backward, qkv, out, log_sums, d_out, interpret=True, **options
    )
    np.testing.assert_allclose(back(queries=queries), back(), atol=1e-5)


COMPILED = [(16, 64), (14, 64), (12, 32), (4, 32)]  # the presets' heads


@pytest.mark.compile
@pytest.mark.parametrize("rows", ["size_major", "head_major"])
@pytest.mark.parametrize("target", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_kernels_compile_for_tpu(target, rows):
    topology = topologies.get_topology_desc(platform="tpu", topology_name=target)
    device = jax.sharding.SingleDeviceSharding(topology.devices[0])
    for heads, size in COMPILED if target == "v5e:2x2" else COMPILED[:1]:
        qkv = jax.ShapeDtypeStruct((2, 512, 3 * heads, size), jnp.bfloat16, sharding=device)
        ids = jax.ShapeDtypeStruct((2, 512), jnp.int32, sharding=device)
        options = dict(scale=0.1, slopes=jnp.full(heads, 0.1), rows=rows)
        loss = lambda qkv, ids, options=options: jnp.sum(
            causal_attention(qkv, segment_ids=ids, **options).astype(jnp.float32)
        )
        compiled = jax.jit(jax.grad(loss)).lower(qkv, ids).compile()
        assert compiled.as_text().count("tpu_custom_call") == 2


@pytest.mark.parametrize("platform, kernels", [("tpu", 2), ("cpu", 0), ("cuda", 0)])
def test_kernel_is_chosen_by_the_platform_lowered_for(platform, kernels):
    qkv, _, options = arguments(1, 128, 2, 8, "bfloat16", segments=True)
    loss = lambda qkv: jnp.sum(causal_attention(qkv, **options).astype(jnp.float32))
    program = jax.jit(jax.grad(loss)).trace(qkv).lower(lowering_platforms=(platform,))
    assert program.as_text().count("tpu_custom_call") == kernels


def test_what_no_kernel_serves_falls_back_or_is_refused():
    qkv, _, options = arguments(1, 100, 3, 8, "bfloat16")
    with pytest.raises(UnsupportedImplementation, match="100 tokens .multiples of 128.; use 'xla'"):
        causal_attention(qkv, implementation="mosaic_tpu", **options)
    odd, _, _ = arguments(1, 128, 3, 8, "bfloat16")
    assert "even number" in mosaic_tpu.unsupported("attention_forward", odd)
    assert mosaic_tpu.unsupported("attention_forward", odd, rows="head_major") is None
    long = jax.ShapeDtypeStruct((1, 16384, 48, 64), jnp.bfloat16)
    assert "VMEM" in mosaic_tpu.unsupported("attention_forward", long)
    traced = jax.jit(lambda qkv: causal_attention(qkv, **options)).trace(qkv)
    with pytest.warns(UserWarning, match="plain XLA instead: sequences of 100 tokens"):
        traced.lower(lowering_platforms=("tpu",))
    with pytest.raises(UnsupportedImplementation, match="'cudnn' needs a GPU with cuDNN"):
        causal_attention(odd, implementation="cudnn", **options)


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


@pytest.mark.parametrize("transformed", [by_scan, by_shard_map, jax.checkpoint(causal_attention)])
def test_composes_with_transformations(transformed):
    qkv, d_out, options = arguments(4, 13, 2, 4, "float32", segments=True)
    run = lambda f: jax.jit(lambda qkv: jax.vjp(lambda z: f(z, **options), qkv)[1](d_out)[0])(qkv)
    np.testing.assert_allclose(run(transformed), run(causal_attention), atol=1e-6)
