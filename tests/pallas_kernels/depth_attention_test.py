"""Depth attention in plain JAX: values, gradients, and how its two schedules agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.depth_attention import UnsupportedImplementation
from tests.closeness import assert_close
from tests.pallas_kernels import plain

EPSILON = 1e-5


def normal(*shape, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def numpy_site(query, gain, sources):
    """Equations 2 to 4 of Attention Residuals, a site at a time."""
    rstd = 1 / np.sqrt(np.mean(sources**2, axis=-1) + EPSILON)
    logits = (sources @ (query * gain)) * rstd
    weights = np.exp(logits - logits.max(axis=0))
    weights /= weights.sum(axis=0)
    return np.sum(weights[..., None] * sources, axis=0)


# float32 sums of up to 48 terms beside float64 ones; float64 beside another order of sums.
TOLERANCE = {"float32": 1e-5, "float64": 1e-13}
SIZES = [(5, (2, 3), 7, 3), (1, (4,), 16, 1), (9, (), 33, 8)]


def all_schedules(queries, gains, sources, current, norm_gain):
    """Of every site: in one phase, with a prior, as the second phase, and of sealed sources."""
    shared = dict(epsilon=EPSILON)
    mixed, log_sums = pallas_kernels.depth_attention_partial(
        queries, sources, gains=gains, **shared
    )

    def site(s):
        q, g = queries[s], gains[s]
        every = jnp.concatenate([sources, current[None]])
        one_phase = pallas_kernels.depth_attention(q, every, gain=g, **shared)
        prior = mixed[s], log_sums[s]
        by_prior = pallas_kernels.depth_attention(q, current[None], gain=g, prior=prior, **shared)
        _, _, z = pallas_kernels.depth_attention_merge(
            *(mixed, log_sums[s], s, current, q, norm_gain),
            gain=g, norm="rmsnorm", norm_epsilon=0.0, **shared,
        )  # fmt: skip
        return one_phase, by_prior, z

    return *jax.lax.map(site, jnp.arange(len(queries), dtype=jnp.int32)), mixed


@pytest.mark.parametrize(
    "sizes, dtype",
    [
        (SIZES[0], "float64"),
        (SIZES[1], "float32"),
        (SIZES[2], "float64"),
        pytest.param(SIZES[0], "float32", marks=pytest.mark.slow),
        pytest.param(SIZES[1], "float64", marks=pytest.mark.slow),
        pytest.param(SIZES[2], "float32", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_two_phases_equal_one_and_numpy(sizes, dtype):
    N, tokens, D, S = sizes
    sources, current = normal(N, *tokens, D), normal(*tokens, D, seed=1)
    queries, gains, norm_gain = normal(S, D, seed=2), normal(S, D, seed=3), normal(D, seed=4)
    args = [x.astype(dtype) for x in (queries, gains, sources, current, norm_gain)]
    with jax.enable_x64(dtype == "float64"):
        got = jax.jit(all_schedules)(*args)
    every = np.concatenate([sources, current[None]])
    expected = np.stack([numpy_site(q, g, every) for q, g in zip(queries, gains, strict=True)])
    normed = norm_gain * expected / np.sqrt(np.mean(expected**2, -1, keepdims=True))
    sealed = np.stack([numpy_site(q, g, sources) for q, g in zip(queries, gains, strict=True)])
    assert_close(got, (expected, expected, normed, sealed), TOLERANCE[dtype])


def test_zero_queries_give_the_mean_and_one_source_itself():
    sources, query = normal(6, 3, 8, dtype=np.float32), normal(8, seed=1, dtype=np.float32)

    @jax.jit
    def run(query, sources):
        mean = pallas_kernels.depth_attention(jnp.zeros_like(query), sources)
        alone = lambda *args: pallas_kernels.depth_attention(*args, count=1)
        h, pullback = jax.vjp(alone, query, sources)
        return mean, h, *pullback(h)

    mean, h, d_query, d_sources = run(query, sources)
    assert_close(mean, np.mean(sources, axis=0), 1e-6)
    np.testing.assert_array_equal(h, sources[0])
    np.testing.assert_array_equal(d_query, 0)
    np.testing.assert_array_equal(d_sources[0], h)
    np.testing.assert_array_equal(d_sources[1:], 0)


def test_rows_beyond_count_are_not_looked_at():
    sources, queries = normal(6, 3, 8, dtype=np.float32), normal(2, 8, seed=1, dtype=np.float32)
    sources[4:] = np.nan
    d_mixed, zeros = normal(2, 3, 8, seed=2, dtype=np.float32), np.zeros((2, 3))

    @jax.jit
    def run(queries, sources, count, d_mixed):
        mix = lambda *args: pallas_kernels.depth_attention_partial(*args, count=count)[0]
        got, pullback = jax.vjp(mix, queries, sources)
        return got, *pullback(d_mixed)

    got, d_queries, d_sources = run(queries, sources, np.int32(4), d_mixed)
    (expected, _), (expected_queries, expected_sources, _) = plain.partial(
        queries, sources[:4], None, (d_mixed, zeros), epsilon=1e-6
    )
    got = got, d_queries, d_sources[:4]
    assert_close(got, (expected, expected_queries, expected_sources), 2e-6)
    np.testing.assert_array_equal(d_sources[4:], 0)


def test_no_source_leaves_the_prior():
    sources, query = np.full((3, 2, 8), np.nan, np.float32), np.ones(8, np.float32)
    prior = normal(2, 8, dtype=np.float32), np.zeros(2, np.float32)

    @jax.jit
    def run(query, sources, prior):
        mixed, log_sums = pallas_kernels.depth_attention_partial(query[None], sources, count=0)
        h = pallas_kernels.depth_attention(query, sources, count=0, prior=prior)
        return mixed, log_sums, h

    mixed, log_sums, h = run(query, sources, prior)
    np.testing.assert_array_equal(mixed, 0)
    np.testing.assert_array_equal(log_sums, -np.inf)
    np.testing.assert_array_equal(h, prior[0])


def by_parts(query, gain, norm_gain, sources, current, prior, log_sums, active):
    """All that is differentiable in `partial` and `merge`, in one number."""
    mixed, sums = pallas_kernels.depth_attention_partial(
        query, sources, gains=gain, count=3, prior=(prior, log_sums), epsilon=EPSILON
    )
    total = jnp.sum(jnp.cos(sums))
    for s in range(query.shape[0]):
        mixed, current, z = pallas_kernels.depth_attention_merge(
            mixed, sums[s], s, current, query[s], norm_gain, gain=gain[s], active=active,
            epsilon=EPSILON, norm_epsilon=EPSILON,
        )  # fmt: skip
        total = total + jnp.sum(jnp.sin(z)) + jnp.sum(jnp.cos(current))
    return total


def test_gradients_are_the_slopes():
    shapes = [(2, 7), (2, 7), (7,), (4, 2, 3, 7), (2, 3, 7), (2, 2, 3, 7), (2, 2, 3)]
    args = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    run = jax.jit(jax.value_and_grad(by_parts, argnums=range(len(args))))
    with jax.enable_x64(True):
        for active in (np.bool(True), np.bool(False)):
            for i, gradient in enumerate(run(*args, active)[1]):
                direction = normal(*args[i].shape, seed=20 + i)
                moved = lambda h, i=i, d=direction: [*args[:i], args[i] + h * d, *args[i + 1 :]]
                ends = (run(*moved(h), active)[0] for h in (1e-5, -1e-5))
                slope = float(np.subtract(*ends)) / 2e-5
                assert abs(slope - np.vdot(gradient, direction)) < 1e-8 * (1 + abs(slope))


def test_backward_of_a_block_adds_to_what_is_there():
    sources, queries = normal(4, 5, 8, dtype=np.float32), normal(3, 8, seed=1, dtype=np.float32)
    there = normal(4, 5, 8, seed=3, dtype=np.float32)

    @jax.jit
    def run(queries, sources, there):
        op = lambda q, v: pallas_kernels.depth_attention_partial(q, v, count=3)
        (mixed, log_sums), pullback = jax.vjp(op, queries, sources)
        d_mixed, d_log_sums = jnp.cos(mixed), jnp.sin(log_sums)
        g = pallas_kernels.depth_attention_partial_backward(
            queries, sources, mixed, log_sums, d_mixed, d_log_sums, count=3, accumulate=there
        )
        return g, pullback((d_mixed, d_log_sums))

    g, (d_queries, d_sources) = run(queries, sources, there)
    np.testing.assert_array_equal(g.queries, d_queries)
    assert_close(g.sources, there + d_sources, 1e-6)
    np.testing.assert_array_equal(g.sources[3:], there[3:])


@pytest.mark.parametrize("implementation", ["xla", "mosaic_tpu"])
def test_narrow_log_sums_count_as_float32(implementation):
    sources = jnp.asarray(normal(2, 8, 128), jnp.bfloat16)
    query, gain = jnp.asarray(normal(128, seed=1), jnp.float32), jnp.ones(128)
    options = {"implementation": implementation}

    def total(log_sums):
        prior = sources[1], log_sums
        mixed = pallas_kernels.depth_attention(query, sources, prior=prior, **options)
        merged = pallas_kernels.depth_attention_merge(
            sources, log_sums, 0, sources[1], query, gain, **options
        )
        return jnp.sum(mixed.astype(jnp.float32)) + jnp.sum(merged[2].astype(jnp.float32) ** 3)

    log_sums = jnp.asarray(normal(8, seed=2), jnp.bfloat16)
    both = log_sums, log_sums.astype(jnp.float32)
    if implementation == "xla":
        narrow, wide = (jax.jit(jax.value_and_grad(total))(x) for x in both)
        assert_close(narrow[0], wide[0], 1e-6)
        assert narrow[1].dtype == jnp.bfloat16
        # The cotangents of two uses are rounded to bfloat16 each, and so is their sum.
        assert_close(narrow[1].astype(jnp.float32), wide[1], 2**-7)
    else:
        shapes = [jax.eval_shape(jax.grad(total), x) for x in both]
        assert [x.dtype for x in shapes] == [jnp.bfloat16, jnp.float32]


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match="count=5 must be from 0 to"):
        pallas_kernels.depth_attention(jnp.ones(8), jnp.ones((4, 2, 8)), count=5)


@pytest.mark.parametrize("implementation", ["mosaic_tpu", "triton"])
def test_a_named_implementation_that_cannot_serve_is_refused(implementation):
    with jax.enable_x64(True):
        sources = jnp.ones((4, 8), jnp.float64)
        with pytest.raises(
            UnsupportedImplementation, match="does not support this call: .*; use 'xla'"
        ):
            pallas_kernels.depth_attention(sources[0], sources, implementation=implementation)
