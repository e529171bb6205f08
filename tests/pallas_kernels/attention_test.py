"""Causal attention: every implementation against float64 NumPy, and compiled for each TPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import attention
from pallas_kernels.attention import mosaic_tpu
from pallas_kernels.key_vector.interface import UnsupportedImplementation

# Largest error allowed relative to the largest value. bfloat16: inputs are exact, probabilities
# and results are rounded once (2^-9 each), gradients go through one rounded product more. float32:
# sums of up to 640 terms, and ALiBi's distances up to 640, at 2^-24 each.
TOLERANCE = {"float32": 5e-6, "bfloat16": 1e-2, "float64": 1e-13}


def numpy_attention(qkv, d_out, scale, slopes, segment_ids):
    """Output, log-sum-exp and the gradient of `sum(out * d_out)`, in float64."""
    qkv, d_out = np.asarray(qkv, np.float64), np.asarray(d_out, np.float64)
    q, k, v = np.split(qkv, 3, axis=2)
    distance = np.arange(qkv.shape[1])[:, None] - np.arange(qkv.shape[1])
    logits = scale * np.einsum("bihd,bjhd->bhij", q, k)
    if slopes is not None:
        logits = logits - np.asarray(slopes, np.float64)[:, None, None] * distance
    seen = np.broadcast_to(distance >= 0, logits.shape)
    if segment_ids is not None:
        seen = seen & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
    logits = np.where(seen, logits, -np.inf)
    highest = logits.max(-1, keepdims=True)
    lse = highest + np.log(np.exp(logits - highest).sum(-1, keepdims=True))
    p = np.exp(logits - lse)
    out = np.einsum("bhij,bjhd->bihd", p, v)
    d_p = np.einsum("bihd,bjhd->bhij", d_out, v)
    d_s = scale * p * (d_p - (p * d_p).sum(-1, keepdims=True))
    d_q, d_k = np.einsum("bhij,bjhd->bihd", d_s, k), np.einsum("bhij,bihd->bjhd", d_s, q)
    d_qkv = np.concatenate([d_q, d_k, np.einsum("bhij,bihd->bjhd", p, d_out)], axis=2)
    return out, lse[..., 0].transpose(0, 2, 1), d_qkv


def arguments(B, N, H, D, dtype, alibi=False, segments=False, seed=0):
    rng = np.random.default_rng(seed)
    qkv, d_out = (jnp.asarray(rng.normal(size=(B, N, V, D)), dtype) for V in (3 * H, H))
    slopes = jnp.asarray(2.0 ** -np.arange(1, H + 1), jnp.float32) if alibi else None
    segment_ids = jnp.asarray(rng.integers(0, 3, (B, N)), jnp.int32) if segments else None
    return qkv, d_out, dict(scale=D**-0.5, slopes=slopes, segment_ids=segment_ids)


def assert_close(got, expected, tolerance):
    error = np.abs(np.asarray(got, np.float64) - expected).max() / np.abs(expected).max()
    assert error <= tolerance, error


def check(function, qkv, d_out, parameters):
    """`function(qkv)` and its gradient in qkv."""

    def both(qkv, d_out):
        out, pull = jax.vjp(functools.partial(function, **parameters), qkv)
        return out, pull(d_out)[0]

    out, d_qkv = jax.jit(both)(qkv, d_out)
    expected, _, d_expected = numpy_attention(qkv, d_out, **parameters)
    assert out.dtype == d_qkv.dtype == qkv.dtype
    tolerance = TOLERANCE[qkv.dtype.name]
    assert_close(out, expected, tolerance)
    assert_close(d_qkv, d_expected, tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("alibi, segments", [(False, False), (True, True)])
@pytest.mark.parametrize("shape", [(2, 7, 3, 5), (1, 16, 2, 8)])
def test_xla_equals_numpy(shape, alibi, segments, dtype):
    with jax.enable_x64(dtype == "float64"):
        function = functools.partial(attention.causal_attention, implementation="xla")
        check(function, *arguments(*shape, dtype, alibi, segments))


@pytest.mark.parametrize(
    "shape, dtype, rows, alibi, segments",
    [
        ((2, 128, 2, 32), "bfloat16", "size_major", False, False),
        ((1, 256, 4, 64), "bfloat16", "size_major", True, True),
        ((3, 128, 3, 32), "bfloat16", "size_major", True, False),  # no pairs of heads
        ((1, 128, 3, 32), "float32", "size_major", True, True),
        ((2, 256, 2, 64), "bfloat16", "head_major", True, False),
        ((1, 128, 1, 128), "bfloat16", "head_major", False, True),
        ((1, 256, 3, 32), "float32", "head_major", True, True),
        ((1, 640, 2, 32), "float32", "size_major", True, False),
    ],
)
def test_kernel_equals_numpy(shape, dtype, rows, alibi, segments):
    function = functools.partial(
        attention.causal_attention, rows=rows, implementation="mosaic_tpu", interpret=True
    )
    check(function, *arguments(*shape, dtype, alibi, segments))


@pytest.mark.parametrize("rows", ["size_major", "head_major"])
@pytest.mark.parametrize("chunk, block", [(128, 128), (256, 128), (256, 256)])
def test_chunked_halves_equal_numpy(rows, chunk, block):
    """Rows too long to be unrolled; here short ones, in short chunks."""
    qkv, d_out, parameters = arguments(
        1, 512 if chunk == 256 else 384, 2, 32, "bfloat16", True, True
    )
    options = parameters | dict(rows=rows, interpret=True, chunk=chunk, block=block)
    out, lse = mosaic_tpu.attention_forward(qkv, **options)
    d_qkv = mosaic_tpu.attention_backward(qkv, out, lse, d_out, **options)
    expected, expected_lse, d_expected = numpy_attention(qkv, d_out, **parameters)
    assert_close(out, expected, TOLERANCE["bfloat16"])
    assert_close(lse, expected_lse, 5e-6)  # of float32 logits of exact inputs
    assert_close(d_qkv, d_expected, TOLERANCE["bfloat16"])


@pytest.mark.parametrize("implementation", ["xla", "mosaic_tpu"])
def test_halves_are_the_whole(implementation):
    qkv, d_out, parameters = arguments(2, 128, 2, 32, "float32", True, True)
    options = parameters | dict(implementation=implementation, interpret=True)
    out, lse = attention.attention_forward(qkv, **options)
    d_qkv = attention.attention_backward(qkv, out, lse, d_out, **options)
    whole, pull = jax.vjp(lambda qkv: attention.causal_attention(qkv, **options), qkv)
    assert lse.shape == (2, 128, 2)
    assert np.array_equal(out, whole) and np.array_equal(d_qkv, pull(d_out)[0])
    assert_close(lse, numpy_attention(qkv, d_out, **parameters)[1], TOLERANCE["float32"])


def test_in_a_rematerialised_scan_with_traced_scale():
    """Two layers, the second one's scale halved as in inverse layer scaling."""
    qkv, d_out, _ = arguments(1, 128, 2, 32, "float32")
    options = dict(implementation="mosaic_tpu", interpret=True)

    def loss(qkv, attend):
        layer = jax.checkpoint(lambda out, i: (attend(qkv, 0.2 / (i + 1)) + out, None))
        return jnp.sum(jax.lax.scan(layer, jnp.zeros_like(d_out), jnp.arange(2))[0] * d_out)

    kernel = lambda qkv, scale: attention.causal_attention(qkv, scale=scale, **options)
    xla = lambda qkv, scale: attention.causal_attention(qkv, scale=scale, implementation="xla")
    got, expected = (jax.jit(jax.grad(loss), static_argnums=1)(qkv, f) for f in (kernel, xla))
    assert_close(got, np.asarray(expected, np.float64), TOLERANCE["float32"])


@pytest.mark.parametrize("implementation", ["xla", "mosaic_tpu"])
def test_shard_map_over_the_batch(implementation):
    qkv, d_out, parameters = arguments(8, 128, 2, 32, "bfloat16", True, True)
    slopes, segment_ids = parameters["slopes"], parameters["segment_ids"]
    mesh = Mesh(np.array(jax.devices()), ("data",))
    by_batch = PartitionSpec("data")

    def local(qkv, slopes, segment_ids):
        return attention.causal_attention(
            qkv,
            scale=parameters["scale"],
            slopes=slopes,
            segment_ids=segment_ids,
            implementation=implementation,
            interpret=True,
        )

    # The interpreter's own loops do not track which values vary over the mesh.
    sharded = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(by_batch, PartitionSpec(), by_batch),
        out_specs=by_batch,
        check_vma=implementation == "xla",
    )
    function = lambda qkv, **_: sharded(qkv, slopes, segment_ids)
    check(function, qkv, d_out, parameters)


def lowered_for(platform):
    qkv, _, parameters = arguments(1, 128, 2, 32, "bfloat16", True)
    gradient = jax.grad(lambda x: attention.causal_attention(x, **parameters).sum())
    return jax.jit(gradient).trace(qkv).lower(lowering_platforms=(platform,)).as_text()


def test_the_platform_lowered_for_chooses():
    assert lowered_for("tpu").count("tpu_custom_call") == 2  # forward and backward
    assert "tpu_custom_call" not in lowered_for("cpu")


def test_unsupported_shapes_take_xla_unless_named():
    qkv, d_out, parameters = arguments(1, 100, 2, 32, "float32")
    check(attention.causal_attention, qkv, d_out, parameters)
    with pytest.raises(UnsupportedImplementation, match="sequence length 100.*'xla'"):
        attention.causal_attention(qkv, **parameters, implementation="mosaic_tpu")
    lowered = jax.jit(functools.partial(attention.causal_attention, **parameters)).trace(qkv)
    assert "tpu_custom_call" not in lowered.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize(
    "shape, dtype, reason",
    [
        ((1, 128, 6, 48), "bfloat16", "vector size 48"),
        ((0, 128, 6, 64), "bfloat16", "empty"),
        ((1, 128, 6, 64), "float16", "dtype float16"),
        ((1, 16384, 48, 128), "bfloat16", "VMEM"),
        ((16, 512, 48, 64), "bfloat16", None),
        ((16, 2048, 48, 64), "bfloat16", None),
        ((16, 512, 42, 64), "float32", None),
    ],
)
def test_unsupported_says_why(shape, dtype, reason):
    said = attention.unsupported(shape, jnp.dtype(dtype))
    assert said is None if reason is None else reason in said


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(slopes=jnp.ones(3)), "slopes"),
        (dict(segment_ids=jnp.ones((1, 5), jnp.int32)), "segment_ids"),
        (dict(implementation="cudnn"), "cudnn|implementation"),
        (dict(rows="tokens"), "rows"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    qkv, _, parameters = arguments(1, 8, 2, 4, "float32")
    with pytest.raises(Exception, match=message):
        attention.causal_attention(qkv, **parameters | change)


TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}


@pytest.mark.parametrize(
    "generation, shape, rows, extras",
    [
        ("v5e", (2, 512, 16, 64), "size_major", False),
        ("v5p", (2, 512, 14, 64), "size_major", True),
        ("v6e", (2, 512, 12, 32), "size_major", False),
        ("v6e", (1, 512, 12, 64), "head_major", True),
    ],
)
def test_compiles_for_tpu(generation, shape, rows, extras):
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[generation])
    mesh = Mesh(np.array(topology.devices[:1]), ("data",))
    qkv, _, parameters = arguments(*shape, "bfloat16", extras, extras)
    given = jax.ShapeDtypeStruct(
        qkv.shape, qkv.dtype, sharding=NamedSharding(mesh, PartitionSpec())
    )

    def loss(qkv):
        return attention.causal_attention(qkv, **parameters, rows=rows).astype(jnp.float32).sum()

    compiled = jax.jit(jax.grad(loss)).lower(given).compile()
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 2
