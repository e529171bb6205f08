"""Gradients derived by hand are the slopes; the plain JAX references are what NumPy gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.depth_attention import reference as depth_attention
from pallas_kernels.depth_attention.interface import Merge, Partial
from pallas_kernels.key_vector import reference as key_vector
from tests.closeness import assert_close
from tests.pallas_kernels import plain

NORMS = ["layernorm", "rmsnorm"]


def draw(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape) for shape in shapes]


def assert_slopes(f, args, cotangents, gradients):
    """Of `f` of a list, along one direction in all arguments at once and in each alone."""
    directions = draw(*(x.shape for x in args), seed=9)
    along = lambda h, moved: sum(
        np.vdot(c, y)
        for c, y in zip(
            cotangents,
            f([x + h * m * d for x, m, d in zip(args, moved, directions, strict=True)]),
            strict=True,
        )
    )
    for i in range(len(args)):
        moved = np.arange(len(args)) == i
        slope = (along(1e-5, moved) - along(-1e-5, moved)) / 2e-5
        assert np.vdot(gradients[i], directions[i]) == pytest.approx(slope, rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("norm", NORMS)
def test_site(norm):
    args = draw((3, 5, 4), (2, 5), (3, 2, 4), (5, 4), (6, 5))
    cotangents = draw((3, 5, 4), (3, 6, 4), seed=1)
    options = dict(norm=norm, epsilon=1e-2)
    out, gradients = plain.site(args, cotangents, **options)
    assert_slopes(lambda a: plain.site(a, cotangents, **options)[0], args, cotangents, gradients)

    @jax.jit
    def reference(args, cotangents):
        op = functools.partial(key_vector.store_norm_retrieve, **options)
        out, pullback = jax.vjp(op, *args)
        return out, pullback(cotangents)

    with jax.enable_x64(True):
        got = reference(args, tuple(cotangents))
    assert_close(got, (out, gradients), 1e-13)


@pytest.mark.parametrize("with_prior", [True, False])
def test_partial(with_prior):
    S, N, T, D = 2, 3, 4, 6
    args = draw((S, D), (N, T, D), (S, T, D), (S, T))[: 4 if with_prior else 2]
    cotangents = draw((S, T, D), (S, T), seed=1)
    prior_of = lambda args: tuple(args[2:]) or None

    def run(args):
        return plain.partial(*args[:2], prior_of(args), cotangents, epsilon=1e-2)

    out, (d_queries, d_sources, d_prior) = run(args)
    flat = (d_queries, d_sources, *(d_prior or ()))
    assert_slopes(lambda args: run(args)[0], args, cotangents, flat)

    @jax.jit
    def reference(args, cotangents):
        given = lambda q, v, *prior: Partial(q, v, jnp.int32(N), prior or None)
        op = lambda *args: depth_attention.partial(given(*args), epsilon=1e-2)
        out, pullback = jax.vjp(op, *args)
        return out, pullback(cotangents)

    with jax.enable_x64(True):
        # A row that is not looked at.
        padded = [args[0], np.concatenate([args[1], draw((1, T, D))[0]]), *args[2:]]
        got, gradients = reference(padded, tuple(cotangents))
    assert_close(got, out, 1e-13)
    gradients = [*gradients]
    assert not np.any(gradients[1][N:])
    gradients[1] = gradients[1][:N]
    assert_close(gradients, flat, 1e-13)


@pytest.mark.parametrize("norm", NORMS)
def test_merge(norm):
    args = draw((6,), (4, 6), (4,), (4, 6), (6,))
    (d_z,) = draw((4, 6), seed=1)
    options = dict(norm=norm, epsilon=1e-2, norm_epsilon=1e-2)

    @jax.jit
    def reference(args, active, d_z):
        def op(query, mixed, log_sums, current, gain):
            rows = jnp.stack([current, mixed])
            given = Merge(query, rows, log_sums, jnp.int32(1), current, active, gain)
            return depth_attention.merge(given, **options)

        z, pullback = jax.vjp(op, *args)
        return z, pullback(d_z)

    for active in (True, False):
        run = functools.partial(plain.merge, d_z=d_z, active=active, **options)
        z, gradients = run(*args)
        assert_slopes(lambda args, run=run: [run(*args)[0]], args, [d_z], gradients)
        with jax.enable_x64(True):
            got = reference(args, active, d_z)
        assert_close(got, (z, gradients), 1e-13)
