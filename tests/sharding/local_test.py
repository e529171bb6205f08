"""Functions on each device's part of a batch: the same sums and gradients as on the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding


def squares(batched, weight):
    """Rows, and this device's part of a sum over rows."""
    rows = jnp.tanh(batched["x"] @ weight)
    return rows, jnp.sum(rows**2, keepdims=True)[0]


def objective(mesh):
    def traced(x, weight):
        with sharding.on_mesh(mesh):
            rows, parts = sharding.over_batch(squares, {"x": x, "absent": None}, weight)
            return jnp.sum(rows[:, 0]) + sharding.add_up(parts).sum()

    return jax.jit(jax.value_and_grad(traced, argnums=(0, 1)))


@pytest.mark.parametrize("spec", ["data=8", "data=2,fsdp=4", "fsdp=8"])
def test_values_and_gradients_are_those_of_one_device(spec):
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((16, 5), (5, 3)))
    alone = objective(sharding.make_mesh("data=1", jax.devices()[:1]))(x, weight)
    mesh = sharding.make_mesh(spec)
    spread = jax.device_put(x, sharding.batch_sharding(mesh))
    together = objective(mesh)(spread, jax.device_put(weight, sharding.replicated(mesh)))
    for got, expected in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_each_device_sees_only_its_rows():
    seen = []

    def look(x, _):
        seen.append(x.shape)
        return x

    mesh = sharding.make_mesh("data=4,fsdp=2")

    def traced(x):
        with sharding.on_mesh(mesh):
            return sharding.over_batch(look, x)

    jax.jit(traced).lower(jnp.zeros((16, 3)))
    assert seen == [(2, 3)]
    sharding.over_batch(look, jnp.zeros((5, 3)))  # no mesh: all of it
    assert seen[1:] == [(5, 3)]
