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

B, N, K, V = 4, 4, 5, 8


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def delta(data, beta):
    beta = jnp.broadcast_to(beta, data.shape[:3])
    return pallas_kernels.delta_attention(data, data, data, -abs(data), beta, scale=0.5)


def rows_of_tokens(x, weights):
    own = jnp.arange(len(x), dtype=jnp.int32)
    return pallas_kernels.rows_of_tokens(x * weights, own, own)


RESIDUAL, KEYS, GAIN = normal(B, N, K, V), normal(2, K), normal(K, V)
# By op: data that devices divide, weights that each has, and what is computed of both.
OPS = {
    "store_norm_retrieve": (
        (RESIDUAL, normal(B, N, 2, V)),
        (KEYS, GAIN, KEYS),
        lambda X, y, w, g, r: pallas_kernels.store_norm_retrieve(X, w, y, g, r),
    ),
    "store": (
        (RESIDUAL, normal(B, N, 2, V)),
        (KEYS,),
        lambda X, y, w: pallas_kernels.store(X, w, y),
    ),
    "norm_retrieve": ((RESIDUAL,), (GAIN, KEYS), pallas_kernels.norm_retrieve),
    "depth_attention": (
        (normal(B, 3, N, V),),
        (normal(V),),
        lambda x, q: pallas_kernels.depth_attention(q, jnp.moveaxis(x, 0, 1)),
    ),
    "causal_attention": (
        (normal(B, N, 6, V),),
        (normal(V),),
        lambda x, w: pallas_kernels.causal_attention(x * w, scale=0.3),
    ),
    "rows_of_tokens": (
        (normal(2 * B, V),),
        (normal(V),),
        rows_of_tokens,
    ),
    "delta_attention": ((normal(B, N, 2, V),), (normal(2),), delta),
}


@pytest.mark.parametrize("op", OPS)
def test_gradients_where_a_shard_map_checks_what_varies(op):
    data, weights, run = OPS[op]
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def loss(data, weights):
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(run(*data, *weights)))

    def of_both(data, weights):
        return jax.lax.psum(loss(data, weights), "data")

    divided, whole = PartitionSpec("data"), PartitionSpec()
    gradients = jax.grad(of_both, (0, 1))
    specs = divided, whole
    gradients = jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=specs)
    given = jax.tree.map(jnp.asarray, (data, weights))
    got, expected = jax.jit(gradients)(*given), jax.jit(jax.grad(loss, (0, 1)))(*given)
    jax.tree.map(lambda x, y: assert_close(x, y, 1e-5), got, expected)


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
