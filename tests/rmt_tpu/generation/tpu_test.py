"""A new token for each row, compiled by the real TPU compiler: cache and weights stay in place."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import rmt_tpu
from tests import models
from tests.tiers import later

# Kernels are for more tokens than one.
pytestmark = [pytest.mark.compile, pytest.mark.filterwarnings("ignore:no tpu kernel")]
CASES = [("rmt-305m", "v5e:2x2"), *later(("gpt2-405m", "v5p:2x2x1"), ("llama-374m", "v6e:2x2"))]


def copied(program: str) -> int:
    """Bytes of the largest array that an instruction only moves within HBM."""
    bytes_of = {"bf16": 2, "f32": 4, "s32": 4}
    pattern = r"= (\w+)\[([\d,]+)\]\S* (?:copy|transpose)\("
    sizes = [
        bytes_of[kind] * np.prod([int(n) for n in shape.split(",")])
        for kind, shape in re.findall(pattern, program)
        if kind in bytes_of
    ]
    return max(sizes, default=0)


@pytest.mark.parametrize("preset, topology", CASES)
def test_a_step_copies_no_part_of_the_cache_and_no_layers_weights(preset, topology):
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    whole = NamedSharding(Mesh(np.array(devices[:1]), ("all",)), PartitionSpec())
    config = rmt_tpu.preset(preset).replace(compute_dtype="bfloat16")
    graphdef, params = nnx.split(models.abstract(config), nnx.Param)
    shaped = lambda dtype: lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=whole)
    cache = jax.eval_shape(lambda p: nnx.merge(graphdef, p).empty_cache(32, 1024), params)
    args = (
        jax.tree.map(shaped(jnp.bfloat16), params),
        jax.ShapeDtypeStruct((32, 1), jnp.int32, sharding=whole),
        jax.tree.map(shaped(None), cache),
    )
    decode = lambda p, tokens, cache: nnx.merge(graphdef, p).decode(tokens, cache)
    with jax.sharding.use_abstract_mesh(whole.mesh.abstract_mesh):
        compiled = jax.jit(decode, donate_argnums=2).lower(*args).compile()
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert compiled.memory_analysis().temp_size_in_bytes < size / 100
    of_layer = size / 2 / config.num_layers  # keys, or values
    of_weights = max(2 * x.size // x.shape[0] for x in jax.tree.leaves(params["stacks"]))
    assert copied(compiled.as_text()) < min(of_layer / 2, of_weights)
