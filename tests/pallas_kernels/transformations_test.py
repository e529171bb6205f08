"""Every public op under transformations of JAX's."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import pallas_kernels
from tests.closeness import assert_close
from tests.pallas_kernels.public_ops import CALLS


def test_every_public_op_is_tested():
    ops = {x for x in pallas_kernels.__all__ if inspect.isfunction(getattr(pallas_kernels, x))}
    assert ops - {"placed", "taken"} == CALLS.keys()


@pytest.mark.parametrize("op", CALLS)
def test_kernels_where_64_bits_are_the_default(op):
    call = CALLS[op]
    wide = lambda x: x.astype(np.int64) if x.dtype == np.int32 else x
    with jax.enable_x64(True):
        traced = jax.jit(lambda given: call.run("pallas", given)).trace(
            {name: wide(x) for name, x in call.given.items()}
        )
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
        assert text.count("tpu_custom_call") == call.kernels


@pytest.mark.parametrize("op", CALLS)
def test_where_a_shard_map_checks_what_varies(op):
    call = CALLS[op]
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    divided, whole = PartitionSpec("data"), PartitionSpec()
    specs = {name: divided if name in call.data else whole for name in call.given}
    floats = [n for n, x in call.given.items() if jnp.issubdtype(x.dtype, jnp.floating)]

    def of_a_device(given):
        if not call.gradients:
            return call.op(None, **given)
        of_all = lambda own: jax.lax.psum(call.loss(None, given | own), "data")
        return jax.grad(of_all)({name: given[name] for name in floats})

    results = {name: specs[name] for name in floats} if call.gradients else divided
    run = jax.shard_map(of_a_device, mesh=mesh, in_specs=(specs,), out_specs=results)
    given = jax.tree.map(jnp.asarray, call.given)
    wanted = jax.jit(lambda given: call.run(None, given))(given)
    jax.tree.map(lambda x, y: assert_close(x, y, 1e-5), jax.jit(run)(given), wanted)
