"""Products with weights that decode steps read from the stack of all layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_kernels.platform import collecting_calls, interpreting
from pallas_kernels.target import Target, lowering_for
from rmt_tpu import config as cfg
from rmt_tpu.layers import choices
from rmt_tpu.layers.products import times, times_each
from tests import models
from tests.rmt_tpu.residual import checks

TPU = "TPU v5 lite"
GROUPED = cfg.Attention(num_heads=4, head_dim=6, num_kv_heads=2, bias=True)
GATED = cfg.FeedForward(hidden_dim=22, activation="swiglu", bias=True)
# A model, and the weights of a period of its layers in the order of their products: Q and KV, O,
# the gate with the up projection, and the down projection.
MODELS = {
    "vector": (
        models.model("vector", stacks=(cfg.Stack((GROUPED, GATED), 3),)),
        [(1, 20, 24), (2, 20, 12), (1, 24, 20), (2, 20, 22), (1, 22, 20)],
    ),
    "blocks": (
        models.model("vector", mixer=cfg.BlockAttention(num_blocks=2)),
        [(3, 20, 18), (1, 18, 20), (1, 20, 22), (1, 22, 20)],
    ),
    "matrix": (models.model("matrix"), [(1, 18, 22), (1, 22, 18)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vector", "blocks", "matrix"])
def test_cached_logits_by_kernels_equal_uncached(name):
    """The kernel is interpreted; the weights of each product are those of the whole stack."""
    config, weights = MODELS[name]
    with lowering_for(TPU), interpreting(), collecting_calls() as calls:
        checks.assert_cached_equals_uncached(config)
    found = [call.args[1].shape for call in calls if call.name == "stacked_product"]
    assert found[: len(weights)] == [(3, *shape) for shape in weights]


def test_steps_for_other_devices_slice_weights():
    config = models.model("vector")
    graphdef, params = nnx.split(models.abstract(config))
    step = lambda params, token: nnx.merge(graphdef, params).decode(
        token, nnx.merge(graphdef, params).empty_cache(1, 8)
    )
    token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    traced = lambda: str(jax.make_jaxpr(lambda *given: step(*given))(params, token))
    assert "stacked_product" not in traced()
    with lowering_for(TPU):
        assert "stacked_product" in traced()


def test_products_kept_apart_have_the_gradients_of_one():
    draw = np.random.default_rng(0).standard_normal
    x, w, weights = draw((3, 5, 6)), draw((2, 6, 7)), draw((2, 3, 5, 7))

    def loss(x, w, multiply):
        gate, up = multiply(x, w)
        return jnp.sum(jnp.sin(gate) * weights[0] + up * gate * weights[1])

    apart = lambda x, w: times_each(x, w, gathered=-2)
    joined = lambda x, w: jnp.split(times(x, w, gathered=-2), 2, axis=-1)
    with jax.enable_x64(True):
        (value, found), (expected_value, expected) = (
            jax.value_and_grad(lambda x, w, f=f: loss(x, w, f), (0, 1))(x, w)
            for f in (apart, joined)
        )
        np.testing.assert_allclose(value, expected_value, rtol=1e-14)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-13)


def test_weights_are_read_in_stacks_where_the_kernel_serves():
    of = lambda kind, rows, divided: choices.weights_in_stacks(Target(kind), rows, divided)
    assert of(TPU, 256, 1).value
    others = [of("cpu", 1, 1), of(TPU, 257, 1), of(TPU, 1, 2)]
    assert not any(choice.value for choice in others)
    assert len({choice.reason for choice in others}) == np.size(others, 0)
