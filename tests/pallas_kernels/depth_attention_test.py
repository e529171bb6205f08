"""Depth attention in plain JAX: values, gradients, and how its two schedules agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pallas_kernels
from pallas_kernels.depth_attention import UnsupportedImplementation

EPSILON = 1e-5


def normal(*shape, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def numpy_logits(query, gain, sources):
    rstd = 1 / np.sqrt(np.mean(sources**2, axis=-1) + EPSILON)
    return (sources @ (query * gain)) * rstd


def numpy_site(query, gain, sources):
    """Equations 2 to 4 of Attention Residuals, a site at a time."""
    logits = numpy_logits(query, gain, sources)
    weights = np.exp(logits - logits.max(axis=0))
    weights /= weights.sum(axis=0)
    return np.sum(weights[..., None] * sources, axis=0)


def largest_error(got, expected):
    expected = np.asarray(expected, np.float64)
    return np.max(np.abs(np.asarray(got, np.float64) - expected)) / (1 + np.max(np.abs(expected)))


# float32 sums of up to 48 terms beside float64 ones; float64 beside another order of sums.
TOLERANCE = {"float32": 1e-5, "float64": 1e-13}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("N", "tokens", "D", "S"), [(5, (2, 3), 7, 3), (1, (4,), 16, 1), (9, (), 33, 8)]
)
def test_two_phases_equal_one_and_numpy(dtype, N, tokens, D, S):
    sources, current = normal(N, *tokens, D), normal(*tokens, D, seed=1)
    queries, gains, norm_gain = normal(S, D, seed=2), normal(S, D, seed=3), normal(D, seed=4)
    with jax.enable_x64(True):
        cast = lambda *arrays: [jnp.asarray(a, dtype) for a in arrays]
        v, c, q, g, n = cast(sources, current, queries, gains, norm_gain)
        mixed, log_sums = pallas_kernels.depth_attention_partial(q, v, gains=g, epsilon=EPSILON)
        for s in range(S):
            all_sources = jnp.concatenate([v, c[None]])
            one_phase = pallas_kernels.depth_attention(
                q[s], all_sources, gain=g[s], epsilon=EPSILON
            )
            _, _, z = pallas_kernels.depth_attention_merge(
                mixed, log_sums[s], s, c, q[s], n, gain=g[s], norm="rmsnorm",
                epsilon=EPSILON, norm_epsilon=0.0,
            )  # fmt: skip
            by_prior = pallas_kernels.depth_attention(
                q[s], c[None], gain=g[s], prior=(mixed[s], log_sums[s]), epsilon=EPSILON
            )
            expected = numpy_site(queries[s], gains[s], np.concatenate([sources, current[None]]))
            normed = norm_gain * expected / np.sqrt(np.mean(expected**2, -1, keepdims=True))
            assert largest_error(one_phase, expected) < TOLERANCE[dtype]
            assert largest_error(by_prior, expected) < TOLERANCE[dtype]
            assert largest_error(z, normed) < TOLERANCE[dtype]
            sealed = numpy_site(queries[s], gains[s], sources)
            assert largest_error(mixed[s], sealed) < TOLERANCE[dtype]


def test_zero_queries_give_the_mean_and_one_source_itself():
    sources = jnp.asarray(normal(6, 3, 8, dtype=np.float32))
    query = jnp.zeros(8)
    mean = pallas_kernels.depth_attention(query, sources)
    assert largest_error(mean, jnp.mean(sources, axis=0)) < 1e-6
    query = jnp.asarray(normal(8, seed=1, dtype=np.float32))

    def alone(query, sources):
        return pallas_kernels.depth_attention(query, sources, count=1)

    h, pullback = jax.vjp(alone, query, sources)
    assert (h == sources[0]).all()
    d_query, d_sources = pullback(h)
    assert (d_query == 0).all()
    assert (d_sources[0] == h).all()
    assert (d_sources[1:] == 0).all()


def test_rows_beyond_count_are_not_looked_at():
    sources = normal(6, 3, 8, dtype=np.float32)
    sources[4:] = np.nan
    queries = jnp.asarray(normal(2, 8, seed=1, dtype=np.float32))

    def mix(queries, sources, count=None):
        return pallas_kernels.depth_attention_partial(queries, sources, count=count)[0]

    got, pullback = jax.vjp(lambda *a: mix(*a, count=jnp.int32(4)), queries, jnp.asarray(sources))
    expected, expected_pullback = jax.vjp(mix, queries, jnp.asarray(sources[:4]))
    assert largest_error(got, expected) < 1e-6
    (d_queries, d_sources), expected = pullback(got), expected_pullback(got)
    assert largest_error(d_queries, expected[0]) < 1e-6
    assert largest_error(d_sources[:4], expected[1]) < 1e-6
    assert (d_sources[4:] == 0).all()


def test_no_source_leaves_the_prior():
    sources, query = jnp.full((3, 2, 8), jnp.nan), jnp.ones(8)
    prior = jnp.asarray(normal(2, 8, dtype=np.float32)), jnp.zeros(2)
    mixed, log_sums = pallas_kernels.depth_attention_partial(query[None], sources, count=0)
    assert (mixed == 0).all()
    assert (log_sums == -jnp.inf).all()
    h = pallas_kernels.depth_attention(query, sources, count=0, prior=prior)
    assert (h == prior[0]).all()


def site(query, gain, norm_gain, bank, current, y, *, seal, count):
    """`depth_attention_step` from its parts, differentiated by JAX."""
    current = current + y
    sources = jnp.concatenate([bank[:count], current[None]])
    rstd = jax.lax.rsqrt(jnp.mean(sources**2, axis=-1) + EPSILON)
    weights = jax.nn.softmax(jnp.sum(sources * query * gain, axis=-1) * rstd, axis=0)
    h = jnp.sum(weights[..., None] * sources, axis=0)
    h = h - jnp.mean(h, axis=-1, keepdims=True)
    z = norm_gain * h * jax.lax.rsqrt(jnp.mean(h**2, axis=-1, keepdims=True) + EPSILON)
    return (bank.at[count].set(current) if seal else bank), current, z


@pytest.mark.parametrize("seal", [False, True])
def test_step_and_all_its_gradients(seal):
    with jax.enable_x64(True):
        shapes = [(7,), (7,), (7,), (5, 2, 3, 7), (2, 3, 7), (2, 3, 7)]
        args = [jnp.asarray(normal(*shape, seed=i)) for i, shape in enumerate(shapes)]

        def step(query, gain, norm_gain, bank, current, y):
            return pallas_kernels.depth_attention_step(
                bank, jnp.int32(3), current, y, query, norm_gain, gain=gain, seal=seal,
                epsilon=EPSILON, norm_epsilon=EPSILON,
            )  # fmt: skip

        got, pullback = jax.vjp(step, *args)
        expected, expected_pullback = jax.vjp(lambda *a: site(*a, seal=seal, count=3), *args)
        cotangents = tuple(jnp.asarray(normal(*x.shape, seed=9)) for x in expected)
        for a, b in zip(got, expected, strict=True):
            assert largest_error(a, b) < 1e-13
        for a, b in zip(pullback(cotangents), expected_pullback(cotangents), strict=True):
            assert largest_error(a, b) < 1e-12


def by_parts(query, gain, norm_gain, sources, current, prior, log_sums, active=True):
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


def part_arguments(dtype=np.float64):
    shapes = [(2, 7), (2, 7), (7,), (4, 2, 3, 7), (2, 3, 7), (2, 2, 3, 7), (2, 2, 3)]
    return [jnp.asarray(normal(*shape, seed=i, dtype=dtype)) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("active", [True, False])
def test_gradients_are_the_slopes(active):
    with jax.enable_x64(True):
        args = part_arguments()
        f = lambda *args: by_parts(*args, active=jnp.bool(active))
        for i, gradient in enumerate(jax.grad(f, argnums=range(len(args)))(*args)):
            direction = jnp.asarray(normal(*args[i].shape, seed=20 + i))
            along = lambda h, i=i, d=direction: f(*args[:i], args[i] + h * d, *args[i + 1 :])
            slope = (along(1e-5) - along(-1e-5)) / 2e-5
            assert abs(slope - jnp.vdot(gradient, direction)) < 1e-8 * (1 + abs(slope))


def test_backward_of_a_block_adds_to_what_is_there():
    sources, queries = jnp.asarray(normal(4, 5, 8)), jnp.asarray(normal(3, 8, seed=1))
    run = lambda q, v: pallas_kernels.depth_attention_partial(q, v, count=3)
    (mixed, log_sums), pullback = jax.vjp(run, queries, sources)
    d_mixed, d_log_sums = jnp.cos(mixed), jnp.sin(log_sums)
    d_queries, d_sources = pullback((d_mixed, d_log_sums))
    there = jnp.asarray(normal(*sources.shape, seed=3))
    g = pallas_kernels.depth_attention_partial_backward(
        queries, sources, mixed, log_sums, d_mixed, d_log_sums, count=3, accumulate=there
    )
    assert (g.queries == d_queries).all()
    assert largest_error(g.sources, there + d_sources) < 1e-6
    assert (g.sources[3:] == there[3:]).all()


def by_scan(f, query, sources):
    def body(total, query):
        return total + f(query, sources), None

    return jax.lax.scan(body, 0.0, query[None])[0]


def by_shard_map(f, query, sources):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    local = lambda q, v: f(q, v)[None]
    specs = (P(), P(None, "data"))
    parts = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=False)
    return jnp.sum(parts(query, sources))


@pytest.mark.parametrize(
    "transformed",
    [jax.checkpoint, lambda f: jax.jit(f), lambda f: lambda q, v: by_scan(f, q, v),
     lambda f: lambda q, v: by_shard_map(f, q, v),
     lambda f: lambda q, v: jnp.sum(jax.vmap(f, (None, 1))(q, v[:, :, None]))],
)  # fmt: skip
def test_composes_with_transformations(transformed):
    query = jnp.asarray(normal(8, dtype=np.float32))
    sources = jnp.asarray(normal(3, 4, 5, 8, seed=1, dtype=np.float32))
    objective = lambda q, v: jnp.sum(jnp.sin(pallas_kernels.depth_attention(q, v)))
    expected = jax.grad(objective, (0, 1))(query, sources)
    got = jax.grad(transformed(objective), (0, 1))(query, sources)
    for a, b in zip(got, expected, strict=True):
        assert largest_error(a, b) < 1e-6


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda q, v: pallas_kernels.depth_attention(q, v, count=5), "count=5 must be from 0 to"),
        (lambda q, v: pallas_kernels.depth_attention_step(v, 4, v[0], v[0], q, q, seal=True),
         "less one for the row that is sealed"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong(jnp.ones(8), jnp.ones((4, 2, 8)))


@pytest.mark.parametrize("implementation", ["mosaic_tpu", "triton"])
def test_a_named_implementation_that_cannot_serve_is_refused(implementation):
    with jax.enable_x64(True):
        sources = jnp.ones((4, 8), jnp.float64)
        with pytest.raises(
            UnsupportedImplementation, match="cannot serve this call: .*; use 'xla'"
        ):
            pallas_kernels.depth_attention(sources[0], sources, implementation=implementation)
