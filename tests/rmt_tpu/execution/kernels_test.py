"""How exact the products of a model's programs are, as they are lowered for devices."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import sharding
from pallas_kernels.target import only_platform
from rmt_tpu.data import Batch
from rmt_tpu.evaluation.scores import token_scores
from rmt_tpu.execution import kernels
from rmt_tpu.training.optimizer import near_orthogonal
from rmt_tpu.training.step import batch_loss
from tests import models

_PRODUCT = re.compile(r"stablehlo\.dot_general.*")
_EXACT = "precision = [HIGHEST, HIGHEST]"


def _products(function, *args, platform):
    text = jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    found = _PRODUCT.findall(text)
    assert found
    return found


def _config(dtype, **changes):
    return models.model(compute_dtype=dtype, kernels="xla", **changes)


def _loss(config):
    """The objective, and what it is given."""
    graphdef, params = models.split(config)
    tokens = jnp.zeros((2, 8), jnp.int32)
    batch = Batch(tokens, tokens, tokens, jnp.ones((2, 8), jnp.float32))
    return lambda params: batch_loss(graphdef, params, batch).objective, params


# Outside, the backward pass looks for kernels: these sizes have none.
@pytest.mark.filterwarnings("ignore:no .* kernel for this call")
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("changes", [{}, {"remat": "reversible"}], ids=str)
def test_products_of_a_float32_model_are_not_rounded(changes, platform):
    loss, params = _loss(_config("float32", **changes))
    # The gradient is taken outside of all that the model itself sets.
    for line in _products(jax.grad(loss), params, platform=platform):
        assert _EXACT in line, line


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no .* kernel for this call")
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_products_of_a_bfloat16_model_are_as_they_come(platform):
    loss, params = _loss(_config("bfloat16"))
    for line in _products(jax.grad(loss), params, platform=platform):
        if "bf16" in line:
            assert "HIGHEST" not in line, line


@pytest.mark.parametrize("dtype, exact", [("float32", True), ("bfloat16", False)])
def test_logits_scores_steps_and_updates(dtype, exact):
    config = _config(dtype)
    graphdef, params = models.split(config)
    tokens = jnp.zeros((2, 8), jnp.int32)
    decoder = lambda params: nnx.merge(graphdef, params)

    def decode(params):
        one = decoder(params)
        return one.decode(tokens[:, :1], one.empty_cache(2, 8))[0]

    def update(_):
        with kernels.preferred(config):
            return near_orthogonal(jnp.ones((4, 6)), 2)

    run = functools.partial(_products, platform="tpu")
    programs = {
        "logits": lambda params: decoder(params)(tokens),
        "scores": lambda params: token_scores(decoder(params), tokens, tokens).log_probability,
        "decode": decode,
        "update": update,
    }
    for name, program in programs.items():
        # In bfloat16 some are exact of themselves: those of float32 operands within an op.
        lines = [x for x in run(program, params) if exact or name == "update" or "bf16" in x]
        assert lines, name
        assert all((_EXACT in line) == exact for line in lines), name


def test_a_precision_that_is_set_stays():
    model = _config("float32")
    with jax.default_matmul_precision("tensorfloat32"), kernels.preferred(model):
        assert jax.config.jax_default_matmul_precision == "tensorfloat32"


@pytest.mark.parametrize(
    "platform, kind, known",
    [
        ("cpu", "cpu", True),
        ("tpu", "TPU v5 lite", True),
        ("gpu", "NVIDIA H100 80GB HBM3", True),
        ("gpu", "Tesla T4", False),
        ("gpu", "AMD Instinct MI300X", False),
    ],
)
def test_devices_of_an_unclear_kind_leave_the_choice_to_lowering(platform, kind, known):
    assert kernels._runs_known_kernels(platform, kind) == known


def test_a_mesh_decides_the_implementation():
    found = []
    step = lambda x: found.append(only_platform()) or x
    mesh, spec = sharding.make_mesh("data=-1"), jax.sharding.PartitionSpec()
    kernels.per_device(step, mesh, spec, spec)(jnp.zeros(()))
    assert found == ["other"] and only_platform() is None
