"""A scan that computes its slices again, against the plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rmt_tpu.execution.remat import scan_recomputed
from tests.closeness import assert_close

SIZE = 3


def body(carry, scanned, shared, given):
    (x, count), (weights, index) = carry, scanned
    y = jnp.tanh(weights["w"] @ x + shared["b"] * given[index])
    return x + y, count + jnp.sum(y * weights["gain"])


@pytest.mark.parametrize("count", [1, 4])
def test_values_and_gradients_are_those_of_the_loop(count):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        weights = {"w": rng.normal(size=(count, SIZE, SIZE)), "gain": rng.normal(size=(count, 1))}
        shared, carry = {"b": rng.normal(size=SIZE)}, (rng.normal(size=SIZE), np.zeros(()))
        given = np.arange(1, count + 1)

        def plain(carry, weights, shared):
            for i in range(count):
                one = jax.tree.map(lambda w, i=i: w[i], weights)
                carry = body(carry, (one, i), shared, jnp.asarray(given))
            return carry

        def again(carry, weights, shared):
            return scan_recomputed(body, carry, weights, shared, jnp.asarray(given))

        of = lambda run: lambda *args: jnp.sum(run(*args)[0] ** 2) + run(*args)[1]
        value = lambda run: jax.jit(jax.value_and_grad(of(run), (0, 1, 2)))(carry, weights, shared)
        jax.tree.map(lambda x, y: assert_close(x, y, 1e-12), value(again), value(plain))


def test_within_a_checkpoint_of_ones_own():
    """It has to run: tracing alone does not show an array that has left its trace."""
    weights = {"w": np.ones((2, SIZE, SIZE), np.float32), "gain": np.ones((2, 1), np.float32)}
    shared, given = {"b": np.ones(SIZE, np.float32)}, jnp.ones(2)

    def loss(x):
        carry = (x, jnp.zeros(()))
        return jnp.sum(scan_recomputed(body, carry, weights, shared, given)[0])

    x = jnp.arange(1.0, 1 + SIZE)
    np.testing.assert_array_equal(jax.grad(jax.checkpoint(loss))(x), jax.grad(loss)(x))
