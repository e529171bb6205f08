"""The train step compiled by the real TPU compiler, on a machine without a TPU."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

import sharding
from rmt_tpu.data import Batch
from rmt_tpu.presets import run
from rmt_tpu.training.run import prepare


@pytest.mark.parametrize("preset", ["rmt-tiny", "gpt2-tiny"])
def test_train_step_compiles_for_a_slice_of_v5e(preset):
    config = run(preset)
    model = dataclasses.replace(config.model, compute_dtype="bfloat16", vocab_size=512)
    train = dataclasses.replace(config.train, mesh="data=2,fsdp=2")
    config = dataclasses.replace(config, model=model, train=train)
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    prepared = prepare(config, sharding.make_mesh(train.mesh, topology.devices))

    placed = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    state = jax.tree.map(placed, jax.eval_shape(prepared.init), prepared.state_shardings)
    shape = (train.batch_size, config.data.seq_len)
    ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=prepared.batch_sharding)
    weights = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=prepared.batch_sharding)
    step = jax.jit(prepared.step, donate_argnums=0)
    compiled = step.lower(state, Batch(ids, ids, ids, weights)).compile()

    memory = compiled.memory_analysis()
    parameters = sum(p.size * 4 for p in jax.tree.leaves(state.params))
    # Parameters and two moments, half of nearly all of them on each device; all are donated.
    assert memory.argument_size_in_bytes < 0.6 * 3 * parameters
    assert memory.alias_size_in_bytes > 0.4 * 3 * parameters
    text = compiled.as_text()
    assert "all-gather" in text and ("all-reduce" in text or "reduce-scatter" in text)
