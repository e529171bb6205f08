"""Depth attention with D divided over a mesh axis: against the whole, and against JAX's gradients.

Tolerances: float64 sums in another order, or float32 ones (of 2^-24 each).
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_kernels
from pallas_kernels.depth_attention import UnsupportedImplementation, xla
from pallas_kernels.depth_attention.interface import Partial
from tests.closeness import assert_close, float64
from tests.pallas_kernels import plain

EPSILON = 1e-5
COUNT = 3
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}

# Of [S, D] and [N, rows, tokens, D]; and of [S, rows, tokens], where every device along `key`
# has the same, or its own part of a sum.
QUERIES, SOURCES, SAME = P(None, "key"), P(None, "data", None, "key"), P(None, "data")
PARTS = P("key", None, "data")


def mesh_of(n):
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(-1, n), ("data", "key"))


def per_device(f, n, in_specs, out_specs):
    f = jax.shard_map(f, mesh=mesh_of(n), in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(f)


def arguments(dtype, S=2, N=4):
    """Queries, gains, sources, a prior's queries and sources; the last source is empty."""
    rows, tokens, D = 8, 3, 24
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(dtype)
    sources = draw(N, rows, tokens, D)
    sources[COUNT:] = np.nan
    return draw(S, D), draw(S, D), sources, draw(S, D), draw(2, rows, tokens, D)


SPECS = (QUERIES, QUERIES, SOURCES, QUERIES, SOURCES)


def chain(queries, gains, sources, first_queries, first_sources, *, partial):
    """Two calls, the second counting the first in: mixes and logarithms of sums of both."""
    first = partial(first_queries, first_sources)
    second = partial(queries, sources, gains=gains, count=COUNT, prior=first)
    return first, second


def share_of_loss(key_axis, *args, weights):
    """Of all that a chain gives; every device has a share of its own in what they all have."""
    op = functools.partial(
        pallas_kernels.depth_attention_partial, epsilon=EPSILON, key_axis=key_axis
    )
    (mixed, _), (second, log_sums) = chain(*args, partial=op)
    index = 0 if key_axis is None else jax.lax.axis_index(key_axis)
    on_sums = jnp.sum(jnp.asarray(weights)[index] * jnp.cos(log_sums))
    return jnp.sum(jnp.sin(second)) + jnp.sum(jnp.sin(mixed) ** 2) + on_sums


@functools.cache
def of_the_whole():
    """A program that gives the loss and its gradients, in float64."""
    whole = functools.partial(share_of_loss, None, weights=np.ones(1))
    return jax.jit(jax.value_and_grad(whole, range(5)))


@pytest.mark.xdist_group("depth attention, whole")
@pytest.mark.parametrize(
    "n, dtype",
    [
        (8, "float64"),
        (4, "float32"),
        *(pytest.param(n, "float64", marks=pytest.mark.slow) for n in (2, 4)),
    ],
)
def test_every_gradient_equals_that_of_the_whole(n, dtype):
    """Through a prior too; the shares on the sums differ, and one device has none."""
    args = arguments(dtype)
    # In steps of a whole, which add up to 1.
    weights = (np.arange(n) / np.arange(n).sum()).astype(dtype)
    share = functools.partial(share_of_loss, weights=weights)

    def local(*args):
        op = functools.partial(share, "key")
        value, gradients = jax.value_and_grad(op, range(5))(*args)
        q, g, v, first_q, first_v = gradients
        return value[None, None], q[None], g[None], v, first_q[None], first_v

    of_rows = P("data", None, "key")
    out_specs = (P("data", "key"), of_rows, of_rows, SOURCES, of_rows, SOURCES)
    with jax.enable_x64(dtype == "float64"):
        got = per_device(local, n, SPECS, out_specs)(*args)
    value, q, g, v, first_q, first_v = float64(got)
    with jax.enable_x64(True):
        expected, gradients = of_the_whole()(*float64(args))
    tolerance = TOLERANCE[dtype]
    assert value.sum() == pytest.approx(float(expected), rel=tolerance)
    assert_close((q.sum(0), g.sum(0), v, first_q.sum(0), first_v), gradients, tolerance)


def test_mixes_and_sums_equal_the_whole():
    queries, gains, sources, *_ = arguments("float64")

    def local(queries, gains, sources):
        options = dict(count=COUNT, epsilon=EPSILON, key_axis="key")
        out = pallas_kernels.depth_attention_partial(queries, sources, gains=gains, **options)
        one = pallas_kernels.depth_attention(queries[0], sources, gain=gains[0], **options)
        return *out, one

    out_specs = (SOURCES, SAME, P("data", None, "key"))
    with jax.enable_x64(True):
        got = per_device(local, 4, SPECS[:3], out_specs)(queries, gains, sources)
    N, *tokens, D = sources.shape
    active = sources[:COUNT].reshape(COUNT, -1, D)
    zeros = np.zeros((2, *active.shape[1:])), np.zeros((2, active.shape[1]))
    (mixed, log_sums), _ = plain.partial(queries * gains, active, None, zeros, epsilon=EPSILON)
    mixed, log_sums = mixed.reshape(2, *tokens, D), log_sums.reshape(2, *tokens)
    assert_close(got, (mixed, log_sums, mixed[0]), TOLERANCE["float64"])


@pytest.mark.parametrize("has_prior", [True, False])
def test_explicit_backward_is_what_jax_gives_on_each_device(has_prior):
    """Cotangents of the sums differ by device, in and out; those of sources are added up."""
    n = 4
    with jax.enable_x64(True):
        queries, gains, sources, _, there = arguments("float64")
        there = np.concatenate([there, there])
        rng = np.random.default_rng(1)
        shape = (2, *sources.shape[1:])
        mixed_prior, d_mixed = (rng.normal(size=shape) for _ in range(2))
        log_prior = rng.normal(size=shape[:-1])
        d_log_sums = rng.normal(size=(n, *shape[:-1]))

        def local(queries, gains, sources, there, mixed_prior, log_prior, d_mixed, d_log_sums):
            prior = (mixed_prior, log_prior) if has_prior else None

            def plain(queries, sources, prior):
                flat = lambda x: x.reshape(x.shape[0], -1, x.shape[-1])
                if prior is not None:
                    prior = flat(prior[0]), prior[1].reshape(2, -1)
                given = Partial(queries * gains, flat(sources), jnp.int32(COUNT), prior)
                out = xla.partial(given, epsilon=EPSILON, key_axis="key")
                return out[0].reshape(d_mixed.shape), out[1].reshape(log_prior.shape)

            # No rows of NaN: JAX's derivative of the mean squares would see them.
            finite = jnp.nan_to_num(sources)
            (mixed, log_sums), pullback = jax.vjp(plain, queries, finite, prior)
            d_queries, d_sources, d_prior = pullback((d_mixed, d_log_sums[0]))
            g = pallas_kernels.depth_attention_partial_backward(
                queries, sources, mixed, log_sums, d_mixed, d_log_sums[0],
                gains=gains, count=COUNT, prior=prior, accumulate=there,
                epsilon=EPSILON, key_axis="key",
            )  # fmt: skip
            expected = d_queries, there + d_sources, d_prior
            got = g.queries * gains, g.sources, g.prior
            first = lambda x: x[None, None]
            return jax.tree.map(first, got), jax.tree.map(first, expected)

        in_specs = (QUERIES, QUERIES, SOURCES, SOURCES, SOURCES, SAME, SOURCES, PARTS)
        args = queries, gains, sources, there, mixed_prior, log_prior, d_mixed, d_log_sums
        got, expected = per_device(local, n, in_specs, P("data", "key"))(*args)
    assert (got[2] is not None) == has_prior
    got, expected = float64((got, expected))
    for device in np.ndindex(2, n):
        on_device = lambda tree, device=device: jax.tree.map(lambda x: x[device], tree)
        assert_close(on_device(got), on_device(expected), TOLERANCE["float64"])


def all_reduces(f, n, in_specs, out_specs, *args):
    mesh = mesh_of(n)
    place = lambda x, spec: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
    )
    args = map(place, args, in_specs)
    text = per_device(f, n, in_specs, out_specs).lower(*args).compile().as_text()
    assert not re.search(r" (all-gather|reduce-scatter|all-to-all|collective-permute)\(", text)
    return len(re.findall(r" all-reduce\(", text))


@pytest.mark.parametrize("n", [1, 4])
def test_one_all_reduce_each_way(n):
    queries, _, sources, *_ = arguments("float32")
    forward = lambda queries, sources: pallas_kernels.depth_attention_partial(
        queries, sources, key_axis="key"
    )
    in_specs, out_specs = (QUERIES, SOURCES), (SOURCES, SAME)
    divided = int(n > 1)
    assert all_reduces(forward, n, in_specs, out_specs, queries, sources) == divided

    def backward(queries, sources, mixed, log_sums):
        g = pallas_kernels.depth_attention_partial_backward(
            queries, sources, mixed, log_sums, mixed, log_sums, key_axis="key"
        )
        return g.queries[None], g.sources

    mixed = sources[:2]
    args = queries, sources, mixed, mixed[..., 0]
    in_specs, out_specs = (*in_specs, SOURCES, SAME), (P("data", None, "key"), SOURCES)
    assert all_reduces(backward, n, in_specs, out_specs, *args) == divided


@pytest.mark.parametrize("implementation", ["mosaic_tpu", "triton"])
def test_a_kernel_is_refused(implementation):
    queries, _, sources, *_ = arguments("float32")
    op = functools.partial(
        pallas_kernels.depth_attention_partial, key_axis="key", implementation=implementation
    )
    with pytest.raises(UnsupportedImplementation, match="over the mesh axis 'key'; use 'xla'"):
        per_device(op, 4, (QUERIES, SOURCES), (SOURCES, SAME))(queries, sources)


def test_the_platforms_kernels_make_way_for_plain_jax():
    queries, _, sources, *_ = arguments("float32")
    run = lambda implementation: per_device(
        lambda q, v: pallas_kernels.depth_attention_partial(
            q, v, count=COUNT, key_axis="key", implementation=implementation
        ),
        *(4, (QUERIES, SOURCES), (SOURCES, SAME)),
    )(queries, sources)
    for a, b in zip(run("pallas"), run("xla"), strict=True):
        np.testing.assert_array_equal(a, b)
