"""cuDNN's attention: entries for ALiBi and segments against NumPy, and calls against those of jax.

No GPU is here: what the library computes is done by plain JAX, from the same arrays.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import UnsupportedImplementation, causal_attention
from pallas_kernels.causal_attention import cudnn, plain
from pallas_kernels.causal_attention.interface import AttentionOperands, PartOperands
from pallas_kernels.target import lowering_for
from tests import cuda
from tests.closeness import assert_close
from tests.pallas_kernels.causal_attention_battery import Battery, Case, arguments, by_tier
from tests.tiers import later


class TestEntries(Battery):
    """Further entries are ALiBi and segments; queries are scaled in their dtype."""

    module = cudnn
    sums = "bfloat16"
    cases = by_tier(
        (
            Case((2, 300, 4, 12), "bfloat16", True, True, 2),
            Case((2, 300, 4, 12), "bfloat16"),
            Case((2, 300, 4, 12), "float16", True),
            Case((2, 300, 4, 12), "float16", False, True, 1),
        ),
        Case((2, 300, 4, 12), "bfloat16", True, True, 2),
    )


def test_no_weight_goes_to_another_segment():
    qkv, d_out, options = arguments(1, 64, 1, 8, "bfloat16", segments=True)
    ids = options.pop("segment_ids")
    first = (ids == ids[0, 0])[0]
    hidden = np.where(first[None, :, None, None], qkv, (qkv * 20).astype(qkv.dtype))
    attend = functools.partial(cudnn.attention_forward, kv_heads=1, interpret=True)
    run = jax.jit(lambda x, ids: attend(AttentionOperands(x, **options, segment_ids=ids))[0])
    one, two = np.asarray(run(qkv, ids)), np.asarray(run(hidden, ids))
    assert 0 < first.sum() < 64
    np.testing.assert_array_equal(one[0, first], two[0, first])


def test_positions_are_multiplied_by_narrow_slopes_in_float32():
    """Beyond 256, they are not exact in the slopes' dtype."""
    qkv, _, _ = arguments(1, 300, 2, 8, "bfloat16")
    slopes = jnp.asarray([0.3, 0.011], jnp.bfloat16)

    @jax.jit
    def run(*slopes):
        attend = functools.partial(cudnn.attention_forward, kv_heads=2, interpret=True)
        return [attend(AttentionOperands(qkv, jnp.float32(0.3), x)) for x in slopes]

    narrow, wide = run(slopes, slopes.astype(jnp.float32))
    assert_close(narrow, wide, 1e-6)


def test_alibi_gives_no_weight_to_the_unused_entries_of_a_cache():
    """They lie after the keys that are seen, where ALiBi's entries would be largest."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype("bfloat16")
    filled = np.array([64, 3, 0])
    segments = np.ones((3, 2), np.int32), np.int32(np.arange(256) < filled[:, None])
    # A slope of 12 over 256 keys is as far as one of 0.75 over a cache of 4096.
    slopes = np.float32([12, 0.01])
    given = PartOperands(draw(3, 2, 2, 8), draw(3, 256, 4, 8), 0.3, 64, slopes, segments)
    out, sums = jax.jit(functools.partial(cudnn.part_forward, interpret=True))(given)
    want, want_sums = jax.jit(plain.part_forward)(given)
    wide = lambda x: np.float32(x[:2])
    np.testing.assert_allclose(wide(out), wide(want), atol=0.02)
    np.testing.assert_allclose(wide(sums), wide(want_sums), atol=0.02)
    # The last row has no key, so `merged` must give its result no weight.
    assert (sums[2] + 64 * slopes < -900).all()


def gradients(op, qkv, d_out):
    out, pullback = jax.vjp(op, qkv)
    return out, pullback(d_out)


@pytest.mark.parametrize("dtype", ["bfloat16", *later("float16")])
def test_calls_are_those_that_jax_makes(dtype, monkeypatch):
    from jax._src.cudnn import fused_attention_stablehlo as of_jax

    monkeypatch.setattr(of_jax, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(of_jax, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(of_jax, "is_cuda_compute_capability_equal", lambda capability: False)

    def by_jax(qkv):
        q, k, v = jnp.split(qkv, [4, 6], axis=2)
        shared = {"scale": 1.0, "is_causal": True, "implementation": "cudnn"}
        return jax.nn.dot_product_attention(q, k, v, **shared)

    ours = functools.partial(causal_attention, scale=1.0, kv_heads=2)
    args = (
        jax.ShapeDtypeStruct((3, 250, 8, 64), dtype),
        jax.ShapeDtypeStruct((3, 250, 4, 64), dtype),
    )
    wanted = cuda.cudnn_calls(functools.partial(gradients, by_jax), *args)
    assert [name for name, _ in wanted] == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    assert cuda.cudnn_calls(functools.partial(gradients, ours), *args) == wanted


def test_rows_under_vmap_are_rows_of_one_call():
    qkv = jax.ShapeDtypeStruct((2, 3, 128, 6, 16), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((3, 128), jnp.int32)

    def op(qkv, ids):
        one = lambda qkv: causal_attention(qkv, scale=0.1, segment_ids=ids)
        return gradients(jax.vmap(one), qkv, jnp.ones((2, 3, 128, 2, 16), qkv.dtype))

    forward, backward = cuda.cudnn_calls(op, qkv, ids)
    # 16 entries of a head, 8 of a code, and one; a multiple of 8.
    assert "tensor<6x128x2x32xbf16>" in forward[1] and "tensor<6x128x2x32xbf16>" in backward[1]


@pytest.mark.parametrize(
    "kind, dtype, size, length, added, why",
    [
        ("NVIDIA A100-SXM4-40GB", "bfloat16", 64, 512, ("alibi", "segments"), None),
        ("NVIDIA A100-SXM4-40GB", "bfloat16", 128, 512, (), None),
        ("NVIDIA A100-SXM4-40GB", "bfloat16", 128, 2048, ("segments",), "128 plus 13 .*up to 128"),
        ("NVIDIA A100-SXM4-40GB", "float16", 128, 512, ("alibi",), "128 plus 4 .*up to 128"),
        ("NVIDIA H200", "bfloat16", 128, 512, ("alibi", "segments"), None),
        ("NVIDIA B200", "bfloat16", 128, 512, (), None),
        ("NVIDIA B200", "bfloat16", 128, 512, ("segments",), "128 plus 11 .*up to 128"),
        ("NVIDIA B300 SXM6 AC", "bfloat16", 192, 512, (), "heads of size 192 .legal: up to 128"),
        ("NVIDIA H200", "bfloat16", 264, 512, (), "heads of size 264 .legal: up to 256"),
        ("NVIDIA H200", "float32", 64, 512, (), "float32 .legal: bfloat16 or float16."),
        ("NVIDIA H200", "bfloat16", 64, 2**17, ("alibi",), "ALiBi over 131072 tokens"),
        ("Tesla T4", "bfloat16", 64, 512, (), "on Tesla T4 .legal: sm_80, Ampere, or later"),
    ],
)  # fmt: skip
def test_what_cudnn_has_not_is_known_before_it_is_traced(kind, dtype, size, length, added, why):
    qkv = jax.ShapeDtypeStruct((1, length, 6, size), dtype)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32) if "segments" in added else None
    slopes = jnp.ones(2) if "alibi" in added else None
    with lowering_for(kind):
        ask = functools.partial(causal_attention, scale=0.1, slopes=slopes, implementation="cudnn")
        trace = lambda: jax.eval_shape(lambda qkv, ids: ask(qkv, segment_ids=ids), qkv, ids)
        if why is None:
            assert trace().shape == (1, length, 2, size)
            return
        with pytest.raises(UnsupportedImplementation, match=f"'cudnn' does not .*{why}"):
            trace()
