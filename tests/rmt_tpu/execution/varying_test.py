"""A decoder's gradient in a `jax.shard_map` that checks what varies: data divided by the user."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import rmt_tpu
from tests import models
from tests.closeness import assert_close
from tests.tiers import later

PRESETS = ["rmt-tiny", *later("gpt2-tiny", "attnres-tiny", "llama-tiny")]


@pytest.mark.parametrize("name", PRESETS)
def test_the_gradient_is_that_of_all_data(name):
    config = rmt_tpu.preset(name)
    graph = models.graph(config)
    as_float32 = lambda x: jnp.asarray(x, jnp.float32)
    params = jax.tree.map(as_float32, models.random_parameters(config))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, (2, 8)), jnp.int32)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def loss(params, tokens):
        return jnp.sum(jax.nn.logsumexp(nnx.merge(graph, params)(tokens), axis=-1))

    def of_a_device(params, tokens):
        return jax.grad(lambda params: jax.lax.psum(loss(params, tokens), "data"))(params)

    whole, divided = PartitionSpec(), PartitionSpec("data")
    run = jax.shard_map(of_a_device, mesh=mesh, in_specs=(whole, divided), out_specs=whole)
    assert_close(jax.jit(run)(params, tokens), jax.jit(jax.grad(loss))(params, tokens), 1e-5)
