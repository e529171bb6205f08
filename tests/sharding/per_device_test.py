"""What devices exchange: each helper against the whole arrays, and the gradients through it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import sharding

BOTH = ("sequence", "tensor")
ROWS = PartitionSpec(BOTH)


def on_devices(function, spec, out=ROWS):
    mesh = sharding.make_mesh(spec)
    return jax.jit(sharding.per_device(function, mesh, ROWS, out))


def numbers(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("spec", ["sequence=2,tensor=4", "sequence=8", "tensor=2,data=4"])
def test_what_is_exchanged(spec):
    x = numbers(16, 24)
    devices = 8 // (4 if "data" in spec else 1)
    there = on_devices(lambda x: sharding.gather(x, BOTH, axis=0), spec, out=PartitionSpec())
    np.testing.assert_array_equal(there(x), x)
    own = on_devices(lambda x: sharding.own_part(sharding.gather(x, BOTH, axis=0), BOTH, 0), spec)
    np.testing.assert_array_equal(own(x), x)
    added = on_devices(lambda x: sharding.scatter_sum(x, BOTH, axis=1), spec)
    parts = np.asarray(x).reshape(devices, 16 // devices, 24).sum(0)
    expected = np.concatenate(np.split(parts, devices, axis=1))
    np.testing.assert_allclose(added(x), expected, atol=1e-5)
    columns = PartitionSpec(None, BOTH)
    for first in (False, True):
        swap = functools.partial(sharding.swap, split=1, join=0, parts_first=first)
        swapped = on_devices(lambda x, swap=swap: swap(x, BOTH), spec, out=columns)
        np.testing.assert_array_equal(swapped(x), x)
    back = lambda x: sharding.swap(x, BOTH, split=0, join=1, parts_first=True)
    there_and_back = on_devices(lambda x: back(swap(x, BOTH)), spec)
    np.testing.assert_array_equal(there_and_back(x), x)
    total = on_devices(lambda x: sharding.total(jnp.sum(x), BOTH), spec, out=PartitionSpec())
    np.testing.assert_allclose(total(x), x.sum(), rtol=1e-5)


def test_which_device_this_is():
    index = on_devices(lambda x: x + sharding.axis_index(BOTH), "sequence=2,tensor=4")
    np.testing.assert_array_equal(index(jnp.zeros(8)), np.arange(8))
    sizes = on_devices(lambda x: x + sharding.axis_size(("data", *BOTH)), "sequence=2,tensor=4")
    np.testing.assert_array_equal(sizes(jnp.zeros(8)), 8)


def test_alone_nothing_is_exchanged():
    x = numbers(4, 6)
    for same in (
        sharding.gather(x, BOTH, axis=0),
        sharding.scatter_sum(x, BOTH, axis=0),
        sharding.swap(x, BOTH, split=0, join=1),
        sharding.own_part(x, BOTH, axis=0),
        sharding.total(x, BOTH),
        sharding.add_up(x),
    ):
        assert same is x
    assert sharding.axis_size(BOTH) == 1 and sharding.axis_index(BOTH) == 0


def test_gradients_are_those_of_one_device():
    """A layer with its weight divided over fsdp and tensor and its tokens over all axes."""
    specs = {"w": PartitionSpec("fsdp", "tensor"), "gain": PartitionSpec()}

    def objective(params, x):
        w = sharding.gather(params["w"], "fsdp", axis=0)
        hidden = jnp.tanh(sharding.gather(x * params["gain"], "tensor", axis=1) @ w)
        y = sharding.scatter_sum(hidden @ w.T, "tensor", axis=1)
        return jnp.sum(y**3)

    def gradients(params, x):
        value, grads = jax.value_and_grad(objective)(params, x)
        return sharding.add_up(value), sharding.add_up(grads, specs)

    params, x = {"w": numbers(6, 8), "gain": numbers(6)}, numbers(8, 4, 6)
    mesh = sharding.make_mesh("data=2,fsdp=2,tensor=2")
    tokens = PartitionSpec(("data", "fsdp"), "tensor")
    out = (PartitionSpec(), specs)
    together = jax.jit(sharding.per_device(gradients, mesh, (specs, tokens), out))(params, x)
    alone = jax.value_and_grad(objective)(params, x)
    for got, expected in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
