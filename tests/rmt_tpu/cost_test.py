"""The papers' tables and figure, from the formulas; and the formulas against the compiler."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import rmt_tpu
from pallas_kernels.compiler.topology import DEVICES
from rmt_tpu import config as cfg
from rmt_tpu import cost as resources
from tests import models


@pytest.mark.parametrize("name, printed", [("gpt2-405m", 1.18e19), ("rmt-305m", 8.45e18)])
def test_training_flops_of_table_4(name, printed):
    forward = resources.non_embedding_flops(rmt_tpu.preset(name), seq_len=512)
    assert resources.train_flops(forward, 6.04e9) == pytest.approx(printed, rel=0.015)


@pytest.mark.parametrize("store", ["vector", "matrix"])
def test_flops_are_near_the_compilers(store):
    """Beside element-wise work and the embedding's look-up, which only one of them counts."""
    # One layer: the compiler counts the body of a scan once. Wide, so that products dominate.
    sizes = dict(num_layers=1, vocab_size=512, num_heads=8, head_dim=32)
    wide = {"matrix": cfg.MatrixStore(16), "vector": cfg.VectorStore(256)}[store]
    config = models.model(store, store=wide, feed_forward=cfg.FeedForward(512), **sizes)
    batch, seq = 2, 32
    graphdef, params = nnx.split(models.abstract(config))
    forward = jax.jit(lambda p, t: nnx.merge(graphdef, p)(t))
    counted = forward.lower(params, jax.ShapeDtypeStruct((batch, seq), jnp.int32)).compile()
    expected = batch * seq * resources.flops_per_token(config, seq)
    assert counted.cost_analysis()["flops"] == pytest.approx(expected, rel=0.15)


def test_peak_flops_of_a_device_kind():
    assert resources.peak_flops("TPU v5 lite") == 197e12
    assert resources.peak_flops("TPU v5p") == 459e12
    assert resources.peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert resources.peak_flops("NVIDIA H100 PCIe") == 756e12
    assert resources.peak_flops("NVIDIA H100 NVL") == 835e12
    assert resources.peak_flops("cpu") is None


def test_peak_flops_are_those_of_the_model_of_time():
    """Both are for one device, of which a TPU7x chip is two."""
    modelled = [device for device in DEVICES.values() if device.matrix is not None]
    assert {device.name for device in modelled} >= {"v5e", "v5p", "v6e", "tpu7x"}
    for device in modelled:
        assert resources.peak_flops(device.kind) == pytest.approx(device.peak_flops, rel=3e-3)
