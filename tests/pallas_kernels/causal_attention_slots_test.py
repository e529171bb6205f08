"""Attention that writes its output where it is to stay, and takes it from there going back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import StackSlice
from pallas_kernels.causal_attention import mosaic_tpu
from pallas_kernels.causal_attention.interface import AttentionOperands, ResultsAndCotangent
from tests.tiers import later

B, N, H, D = 2, 128, 16, 8


def arrays():
    draw = lambda *size: np.random.default_rng(sum(size)).normal(size=size).astype(jnp.bfloat16)
    shapes = (B, N, 3 * H, D), (3, B, N, H, D), (B, N, H, D)
    return tuple(jnp.asarray(draw(*shape)) for shape in shapes)


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["size_major", *later("head_major")])
def test_a_slot_holds_what_is_given_without_one(rows):
    qkv, stack, d_out = arrays()
    options = {"kv_heads": H, "rows": rows, "interpret": True}
    given = AttentionOperands(qkv, 0.3)
    forward = jax.jit(functools.partial(mosaic_tpu.attention_forward, **options))
    backward = jax.jit(functools.partial(mosaic_tpu.attention_backward, **options))
    out, log_sums = forward(given)
    filled, log_sums_again = forward(given._replace(to=StackSlice(stack, jnp.int32(1))))
    np.testing.assert_array_equal(log_sums_again, log_sums)
    np.testing.assert_array_equal(filled, _put(stack, out))
    d_qkv, _ = backward(given, ResultsAndCotangent(out, log_sums, d_out))
    again, _ = backward(
        given, ResultsAndCotangent(StackSlice(filled, jnp.int32(1)), log_sums, d_out)
    )
    np.testing.assert_array_equal(again, d_qkv)


@pytest.mark.parametrize(
    "rows, dtype",
    [("head_major", "float32"), *later(("size_major", "float32"), ("size_major", "bfloat16"))],
)
def test_a_slot_may_have_a_dtype_of_its_own(rows, dtype):
    """The kernel of whole sequences writes in the dtype of queries, and is given the same back."""
    draw = lambda *size: jnp.asarray(np.random.default_rng(sum(size)).normal(size=size))
    qkv, d_out = draw(1, N, 6, D), draw(1, N, 2, D)
    other = jnp.bfloat16 if dtype == "float32" else jnp.float32
    given = AttentionOperands(qkv.astype(other), 0.3)
    slot = StackSlice(jnp.zeros((2, 1, N, 2, D), dtype), jnp.int32(1))

    @jax.jit
    def run(given, slot, d_out):
        options = {"kv_heads": 2, "rows": rows, "interpret": True}
        out, log_sums = mosaic_tpu.attention_forward(given, **options)
        filled, _ = mosaic_tpu.attention_forward(given._replace(to=slot), **options)
        # Both have what fits in either dtype.
        out = out.astype(jnp.bfloat16).astype(other)
        back = [
            mosaic_tpu.attention_backward(given, ResultsAndCotangent(x, log_sums, d_out), **options)
            for x in (out, slot._replace(stack=filled))
        ]
        return out, filled, *(d_qkv for d_qkv, _ in back)

    out, filled, want, got = run(given, slot, d_out)
    assert filled.dtype == dtype and got.dtype == other
    np.testing.assert_array_equal(filled[1].astype(other), out)
    np.testing.assert_array_equal(got, want)


def _put(stack, out):
    stack = np.array(stack)
    stack[1] = out
    return stack


def test_plain_jax_does_the_same():
    qkv, stack, d_out = arrays()
    slot = StackSlice(stack, 1)
    forward = functools.partial(pallas_kernels.attention_forward, scale=0.3)
    out, log_sums = jax.jit(forward)(qkv)
    filled, _ = jax.jit(lambda qkv: forward(qkv, to=slot))(qkv)
    np.testing.assert_array_equal(filled, _put(stack, out))
    backward = jax.jit(functools.partial(pallas_kernels.attention_backward, scale=0.3))
    want = backward(qkv, out, log_sums, d_out)
    np.testing.assert_array_equal(backward(qkv, StackSlice(filled, 1), log_sums, d_out), want)
