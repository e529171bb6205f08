"""Attention whose logits have a soft cap: every form against NumPy, parts, caches, devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels import UnsupportedImplementation, attention_after, causal_attention
from pallas_kernels.causal_attention import mosaic_tpu, mosaic_tpu_whole, online, reference
from pallas_kernels.causal_attention.block_sizes import Blocks
from pallas_kernels.causal_attention.interface import Cap, PartOperands, ResultsAndCotangent
from pallas_kernels.platform import interpreting
from pallas_kernels.target import Target, lowering_for
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
CAP = 0.8  # logits without a cap are up to 4


@pytest.mark.parametrize("held", [2**25, 1])
@pytest.mark.parametrize("window", [None, 30])
def test_plain_attention_and_its_gradient_equal_numpy(window, held, monkeypatch):
    """Both plain forms are compared: all logits at once, and an online softmax over blocks."""
    monkeypatch.setattr(online, "LOGITS", held)
    qkv, d_out, options = arguments(2, 150, 4, 3, "float64", **ALL, kv_heads=2)
    shared = {"kv_heads": 2, "window": window, "cap": CAP}
    with jax.enable_x64(True):

        @jax.jit
        def run(qkv, d_out, options):
            out, pullback = jax.vjp(lambda x: causal_attention(x, **options, **shared), qkv)
            return out, pullback(d_out)[0]

        got = run(qkv, d_out, options)
    want = numpy_attention(qkv, d_out, **options, **shared)[::2]
    assert_close(got, want, 1e-13)
    without = numpy_attention(qkv, d_out, **options, **(shared | {"cap": None}))[0]
    assert np.abs(want[0] - without).max() > 0.1


def whole(rows, *others, **more):
    return Case(*others, options=(("rows", rows), ("queries", 128)), **more, cap=CAP)


class TestWhole(Battery):
    module = mosaic_tpu_whole
    cases = by_tier(
        (
            whole("head_major", (1, 256, 2, 8), "float32", True, True, window=100),
            whole("size_major", (1, 256, 2, 8), "bfloat16"),
        ),
        whole("head_major", (1, 256, 2, 8), "float32", True, True, window=100),
    )


def over_blocks(shape, kv_heads, dtype, blocks, *flags, rows="head_major", window=None):
    return Case(shape, dtype, *flags, kv_heads, (("blocks", blocks), ("rows", rows)), window, CAP)


class TestBlocks(Battery):
    """Lengths are of no whole blocks, and the backward pass runs in spans of queries."""

    module = mosaic_tpu
    cases = by_tier(
        (
            over_blocks((1, 300, 2, 8), 1, "float32", Blocks(128, 128, 1), False, False),
            over_blocks(
                *((1, 400, 4, 8), 2, "float32"),
                *(Blocks(128, 128, 1), True, True),
                window=150,
            ),
            over_blocks((2, 300, 2, 256), 1, "bfloat16", Blocks(128, 256, 1), True, True),
            over_blocks(
                *((1, 300, 2, 8), 2, "bfloat16"),
                *(Blocks(128, 128, 1), False, True),
                rows="size_major",
            ),
        ),
        over_blocks((1, 300, 2, 8), 1, "float32", Blocks(128, 128, 1), False, False),
        over_blocks(
            *((1, 400, 4, 8), 2, "float32"), *(Blocks(128, 128, 1), True, True), window=150
        ),
    )

    def test_equals_numpy(self, case, monkeypatch):
        if dict(case.options)["rows"] == "head_major":
            monkeypatch.setattr(Target, "vmem_part", lambda *_: 2 * 128 * 4 * case.shape[3] * 2)
        super().test_equals_numpy(case)


def test_a_part_of_a_sequence():
    """Attention from one part to another, with the gradients that a ring of devices adds up."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype("float32")
    q, kv, d_out = draw(1, 128, 2, 8), draw(1, 256, 2, 8), draw(1, 128, 2, 8)
    ids = tuple(np.int32(rng.integers(0, 2, (1, n))) for n in (128, 256))
    shared = np.float32(0.8), np.int32(300), np.float32([0.01, 0.02]), ids

    @functools.partial(jax.jit, static_argnums=0)
    def run(module, q, kv, d_out, shared):
        options = {"interpret": True} if module is mosaic_tpu else {}
        given = PartOperands(q, kv, *shared, cap=Cap(CAP))
        results = module.part_forward(given, **options)
        return results, module.part_backward(given, ResultsAndCotangent(*results, d_out), **options)

    got, want = (run(module, q, kv, d_out, shared) for module in (mosaic_tpu, reference))
    assert_close(got, want, TOLERANCE["float32"])


@pytest.mark.parametrize("window", later(None, 200))
def test_new_tokens_after_cached_ones_by_kernels(window):
    """A prompt in two parts: the second also sees the first, in a cache."""
    qkv, d_out, options = arguments(1, 384, 4, 8, "float32", kv_heads=2)
    options = options | {"kv_heads": 2, "window": window, "cap": CAP}
    with lowering_for("TPU v5 lite"), interpreting():
        before, filled = jnp.asarray(qkv[:, :256, 4:]), jnp.full(1, 256)
        run = jax.jit(lambda *given: attention_after(*given, **options))
        assert str(jax.make_jaxpr(run)(qkv[:, 256:], before, filled)).count("pallas_call[") == 2
        got = run(qkv[:, 256:], before, filled)
    want = numpy_attention(qkv, d_out, **options)[0]
    assert_close(got, want[:, 256:], TOLERANCE["float32"])


@pytest.mark.parametrize("window", [None, 9])
def test_new_tokens_after_cached_ones(window):
    qkv, _, options = arguments(2, 20, 4, 3, "float64", kv_heads=2)
    options = options | {"kv_heads": 2, "window": window, "cap": CAP}
    with jax.enable_x64(True):
        qkv = jnp.asarray(qkv)
        want = jax.jit(lambda qkv: causal_attention(qkv, **options))(qkv)
        run = jax.jit(lambda *given: attention_after(*given, **options))
        got = run(qkv[:, 12:], qkv[:, :12, 4:], jnp.full(2, 12))
    assert_close(got, want[:, 12:], 1e-13)


@pytest.mark.parametrize("window", [None, 11])
def test_tokens_on_several_devices(window):
    """A ring of devices without a window, and neighbours with one."""
    qkv, d_out, options = arguments(1, 16, 4, 3, "float64", kv_heads=2)
    options = options | {"kv_heads": 2, "window": window, "cap": CAP}
    mesh, spec = Mesh(jax.devices()[:4], ("x",)), PartitionSpec(None, "x")
    with jax.enable_x64(True):
        op = functools.partial(causal_attention, **options, over="x")
        shard = functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
        out, pullback = jax.vjp(jax.jit(shard(op, check_vma=False)), jnp.asarray(qkv))
        got = out, pullback(jnp.asarray(d_out))[0]
    want = numpy_attention(qkv, d_out, **options)[::2]
    assert_close(got, want, 1e-13)


def program(device, **options):
    """The default program of attention over 256 tokens, lowered for a device."""
    given = jax.ShapeDtypeStruct((1, 256, 6, 64), jnp.bfloat16)
    with lowering_for(device):
        # A function of its own each time: traces are cached by it.
        return str(jax.make_jaxpr(lambda x: causal_attention(x, scale=0.1, **options))(given))


def test_cudnn_has_no_cap():
    """Named, it is refused; without a name, plain JAX computes the attention."""
    given = jnp.zeros((1, 256, 6, 64), jnp.bfloat16)
    with (
        lowering_for("NVIDIA H100"),
        pytest.raises(UnsupportedImplementation, match="a soft cap on logits, 0.8 .legal: None"),
    ):
        causal_attention(given, scale=0.1, cap=CAP, implementation="cudnn")
    text = program("NVIDIA H100", cap=CAP)
    assert "cudnn" not in text and "tanh" in text and "cudnn" in program("NVIDIA H100")


def test_a_kernel_has_a_tanh_only_with_a_cap():
    of = functools.partial(program, "TPU v5 lite", implementation="mosaic_tpu")
    texts = of(), of(cap=CAP)
    assert all(text.count("pallas_call[") == 1 for text in texts)
    assert ["tanh" in text for text in texts] == [False, True]


GEMMA2 = [  # of 2B, 9B and 27B: query heads, key heads, their size; tokens and window
    ("v5e:2x2", 8, 4, 256, 8192, 4096),
    *later(
        ("v6e:2x2", 16, 8, 256, 8192, 4096),
        ("v6e:2x2", 8, 4, 256, 2048, None),
        ("v5e:2x2", 32, 16, 128, 8192, None),
        ("v4:2x2x1", 8, 4, 256, 8192, 4096),
        ("v5p:2x2x1", 16, 8, 256, 1024, None),
    ),
]


@pytest.mark.compile
@pytest.mark.parametrize("target, heads, kv_heads, size, tokens, window", GEMMA2)
def test_attention_of_gemma2_compiles_for_tpu(target, heads, kv_heads, size, tokens, window):
    topology = topologies.get_topology_desc(platform="tpu", topology_name=target)
    device = jax.sharding.SingleDeviceSharding(topology.devices[0])
    shape = (1, tokens, heads + 2 * kv_heads, size)
    qkv = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=device)
    ids = jax.ShapeDtypeStruct(shape[:2], jnp.int32, sharding=device)
    options = {"scale": size**-0.5, "kv_heads": kv_heads, "rows": "head_major", "cap": 50.0}

    def loss(qkv, ids):
        out = causal_attention(qkv, segment_ids=ids, window=window, **options)
        return jnp.sum(out.astype(jnp.float32))

    with lowering_for(topology.devices[0].device_kind):
        compiled = jax.jit(jax.grad(loss)).lower(qkv, ids).compile()
    names = ("attention_blocks_forward", "attention_blocks_backward")
    assert all(f"%{name}" in compiled.as_text() for name in names)
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * np.prod(shape) * 2


@pytest.mark.parametrize("cap", [0.0, -1.0, np.inf, np.nan, True, "50"])
def test_caps_that_are_none_are_refused(cap, unannotated):
    with pytest.raises(ValueError, match="cap=.* must be a finite number above 0, or None"):
        causal_attention(jnp.zeros((1, 2, 3, 4)), scale=1.0, cap=cap)
