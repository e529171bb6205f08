"""A scan that computes its slices again, against the plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from rmt_tpu.execution.remat import scan_recomputed
from rmt_tpu.layers.kept import Kept
from tests.closeness import assert_close

SIZE = 3


def body(carry, scanned, shared, given):
    (x, count), (weights, index) = carry, scanned
    product = checkpoint_name(weights["w"] @ x, "product")
    y = jnp.tanh(checkpoint_name(product + shared["b"] * given[index], "sum"))
    return x + y, count + jnp.sum(y * weights["gain"])


@pytest.mark.parametrize("saved", [(), ("product",), ("sum", "product")])
@pytest.mark.parametrize("count", [1, 4])
def test_values_and_gradients_are_those_of_the_loop(count, saved):
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
            return scan_recomputed(body, carry, weights, shared, jnp.asarray(given), Kept(saved))

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


@pytest.mark.parametrize("saved,products", [((), 2), (("product",), 1), (("sum",), 1)])
def test_named_values_are_not_computed_again(saved, products):
    """Each step has the product itself, perhaps a second time, and two products of gradients."""
    weights = {"w": np.ones((2, SIZE, SIZE), np.float32), "gain": np.ones((2, 1), np.float32)}
    shared, given = {"b": np.ones(SIZE, np.float32)}, jnp.ones(2)

    def loss(x, weights):
        carry = (x, jnp.zeros(()))
        return jnp.sum(scan_recomputed(body, carry, weights, shared, given, Kept(saved))[0])

    program = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(jnp.ones(SIZE), weights))
    assert program.count("dot_general") == products + 2


def test_only_what_is_needed_is_kept():
    """Neither weights nor constants are copied, and of the carry only what a product reads."""
    weights = {"w": np.ones((2, SIZE, SIZE), np.float32), "gain": np.ones((2, 1), np.float32)}
    shared, given = {"b": np.ones(SIZE, np.float32)}, jnp.ones(2)

    def run(x, weights):
        return scan_recomputed(body, (x, jnp.zeros(())), weights, shared, given, Kept(("sum",)))

    _, pull_back = jax.vjp(run, jnp.ones(SIZE), weights)
    shapes = [x.shape for x in jax.tree.leaves(pull_back) if x.shape[:1] == (2,)]
    # The named sums and the carry's x; then the weights themselves, and the constants.
    assert sorted(shapes) == [(2,), (2, 1), (2, SIZE), (2, SIZE), (2, SIZE, SIZE)]
