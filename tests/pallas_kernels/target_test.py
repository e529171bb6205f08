"""Kernels of a TPU with little VMEM, compiled without one."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import causal_attention, store_norm_retrieve
from pallas_kernels.logits import logits_with_sums
from pallas_kernels.target import lowering_for
from tests.tpu import place_on

V4, KIND = "v4:2x2x1", "TPU v4"


def kernels_of(function, *arrays) -> int:
    """Kernels of the function's program for TPU v4."""
    with lowering_for(KIND):
        return jax.jit(function).lower(*arrays).compile().as_text().count("tpu_custom_call")


@pytest.mark.compile
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=str)
def test_key_vectors_compile_for_v4(dtype):
    place = place_on(V4)
    of_data = place(dtype, 2, 512, 4, 256)
    keys = lambda rows: place(jnp.float32, rows, 64)
    given = place(dtype, 2, 512, 64, 256), keys(4), of_data, place(jnp.float32, 64, 256), keys(12)

    def loss(*given):
        return sum(jnp.sum(x.astype(jnp.float32)) for x in store_norm_retrieve(*given))

    assert kernels_of(jax.grad(loss, argnums=tuple(range(5))), *given) >= 2


@pytest.mark.compile
def test_whole_attention_compiles_for_v4():
    loss = lambda qkv: jnp.sum(causal_attention(qkv, scale=0.1, kv_heads=16).astype(jnp.float32))
    assert kernels_of(jax.grad(loss), place_on(V4)(jnp.bfloat16, 2, 512, 48, 64)) == 2


@pytest.mark.compile
def test_logits_compile_for_v4():
    place = place_on(V4)
    given = place(jnp.bfloat16, 2048, 1024), place(jnp.bfloat16, 1024, 50257)
    assert kernels_of(logits_with_sums, *given, place(jnp.int32, 2048)) == 1


@pytest.mark.compile
def test_attention_over_blocks_compiles_for_v4():
    loss = lambda qkv: jnp.sum(causal_attention(qkv, scale=0.1, kv_heads=8).astype(jnp.float32))
    assert kernels_of(jax.grad(loss), place_on(V4)(jnp.float32, 1, 8192, 24, 128)) == 2
