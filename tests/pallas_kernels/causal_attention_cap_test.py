"""Attention whose logits have a soft cap: plain JAX against NumPy, parts, caches, devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels import UnsupportedImplementation, attention_after, causal_attention
from pallas_kernels.causal_attention import online
from pallas_kernels.target import lowering_for
from tests.closeness import assert_close
from tests.pallas_kernels.causal_attention_battery import arguments, numpy_attention

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
    without = numpy_attention(qkv, d_out, **options, **(shared | {"cap": np.inf}))[0]
    assert np.abs(want[0] - without).max() > 0.1


@pytest.mark.parametrize("window", [None, 9])
def test_new_tokens_after_cached_ones(window):
    qkv, _, options = arguments(2, 20, 4, 3, "float64", kv_heads=2)
    options = options | {"kv_heads": 2, "window": window, "cap": CAP}
    with jax.enable_x64(True):
        qkv = jnp.asarray(qkv)
        want = causal_attention(qkv, **options)
        filled = jnp.full(2, 12)
        got = attention_after(qkv[:, 12:], qkv[:, :12, 4:], filled, **options)
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


@pytest.mark.parametrize("name, device", [("mosaic_tpu", "TPU v5e"), ("cudnn", "NVIDIA H100")])
def test_no_kernel_has_a_cap(name, device):
    """A named kernel is refused; without a name, plain JAX computes the attention."""
    qkv, _, options = arguments(1, 256, 2, 64, "float32")
    options = options | {"cap": CAP}
    given = jnp.asarray(qkv, jnp.bfloat16)
    with lowering_for(device):
        with pytest.raises(UnsupportedImplementation, match="a soft cap of logits, 0.8"):
            causal_attention(given, **options, implementation=name)
        program = str(jax.make_jaxpr(functools.partial(causal_attention, **options))(given))
    assert "pallas_call" not in program and "cudnn" not in program and "tanh" in program


@pytest.mark.parametrize("cap", [0.0, -1.0, np.inf, np.nan])
def test_caps_that_are_none_are_refused(cap):
    with pytest.raises(ValueError, match="cap=.* must be a finite number above 0, or None"):
        causal_attention(jnp.zeros((1, 2, 3, 4)), scale=1.0, cap=cap)
