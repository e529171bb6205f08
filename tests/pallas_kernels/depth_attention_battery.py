"""What the kernels of depth attention have to give, whichever they are, of vectors or matrices.

An implementation inherits the battery, with cases of its own and how near it comes to float64.
"""

import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.depth_attention.interface import (
    Merge,
    MergeCotangents,
    Partial,
    PartialCotangents,
)
from tests.closeness import float64
from tests.pallas_kernels import plain

EPSILON, NORM_EPSILON = 1e-6, 1e-5
SITES, SITE = 3, 1


class Case(NamedTuple):
    """Of `partial`: S sites, N sources of this size, `count` of them active."""

    S: int
    N: int
    tokens: tuple[int, ...]
    size: tuple[int, ...]
    count: int
    dtype: str
    prior: bool = False
    accumulate: bool = False
    blocks: Any = None

    @property
    def name(self) -> str:
        flags = ["prior"] * self.prior + ["accumulate"] * self.accumulate
        flags += ["blocks"] * (self.blocks is not None)
        sizes = "x".join(map(str, (self.S, self.N, *self.tokens, *self.size)))
        return "-".join([sizes, f"{self.count}active", self.dtype, *flags])


class MergeCase(NamedTuple):
    tokens: tuple[int, ...]
    size: tuple[int, ...]
    norm: str | None
    dtype: str
    blocks: Any = None

    @property
    def name(self) -> str:
        return "-".join(
            ["x".join(map(str, (*self.tokens, *self.size))), str(self.norm), self.dtype]
        )


def draw(seed, *shape, dtype="float32"):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def per_token(x, case):
    """Numbers [.., *tokens], with one token axis, as `plain` has them."""
    return np.reshape(x, (*np.shape(x)[: -len(case.tokens)], math.prod(case.tokens)))


def vectors(x, case):
    """Sources [.., *tokens, *size], with one token axis and as vectors."""
    lead = np.shape(x)[: -len(case.tokens) - len(case.size)]
    return np.reshape(x, (*lead, math.prod(case.tokens), math.prod(case.size)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def partial(module, options, given):
    return module.partial(given, **dict(options))


@functools.partial(jax.jit, static_argnums=(0, 1))
def partial_backward(module, options, given, scored):
    return module.partial_backward(given, scored, **dict(options))


@functools.partial(jax.jit, static_argnums=(0, 1))
def merge_both_ways(module, options, given, cotangents):
    z = module.merge(given, **dict(options))
    return z, module.merge_backward(given, cotangents, **dict(options))


class Battery:
    """Tests over cases, which may be `pytest.param`s; of those `alone` but one source counts."""

    module: ClassVar[ModuleType]
    cases: ClassVar[tuple]
    alone: ClassVar[tuple]
    merges: ClassVar[tuple]
    # Of numbers that are float32's, relative to the largest; of a gradient that should be 0.
    float32: ClassVar[float]
    nothing: ClassVar[float] = 1e-4
    # The dtype of the gradients that are added to; None for the sources'.
    accumulator: ClassVar[str | None] = None
    # Of (got, want, case, dtype), and `of`: the largest value that was mixed, where that is not the
    # largest that is wanted.
    near: Callable[..., None]

    def pytest_generate_tests(self, metafunc):
        for name, cases in (
            ("case", self.cases),
            ("alone", self.alone),
            ("merge", self.merges),
        ):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, cases, ids=lambda case: case.name)

    def options(self, case, op: str) -> tuple:
        blocks = () if case.blocks is None else (("block_sizes", case.blocks),)
        return ("epsilon", EPSILON), ("interpret", True), *blocks

    def sources(self, case) -> Partial:
        """With NaN in the rows that are not active."""
        c, entries = case, math.prod(case.size)
        queries = np.float32(2 / np.sqrt(entries)) * draw(0, c.S, *c.size)
        sources = draw(1, c.N, *c.tokens, *c.size, dtype=c.dtype)
        sources *= np.exp(draw(2, c.N, *c.tokens, *(1 for _ in c.size))).astype(c.dtype)
        sources[c.count :] = np.nan
        prior = None
        if c.prior:
            prior = draw(3, c.S, *c.tokens, *c.size, dtype=c.dtype), draw(4, c.S, *c.tokens)
        return Partial(queries, sources, np.int32(c.count), prior)

    def test_partial_and_its_gradients(self, case):
        given = self.sources(case)
        mixed, log_sums = partial(self.module, self.options(case, "partial"), given)
        assert mixed.dtype == case.dtype and log_sums.dtype == jnp.float32
        d_mixed, d_log_sums = draw(5, *mixed.shape, dtype=case.dtype), draw(6, *log_sums.shape)
        added = None
        if case.accumulate:
            added = draw(7, *given.sources.shape, dtype=case.dtype)
            added[case.count :] = np.nan
            added = added.astype(self.accumulator or case.dtype)

        as_vectors = functools.partial(vectors, case=case)
        sums = lambda x: per_token(x, case)
        active, prior = given.sources[: case.count], given.prior
        (want, want_sums), (want_queries, want_sources, _) = plain.partial(
            given.queries.reshape(case.S, -1),
            as_vectors(active),
            prior and (as_vectors(prior[0]), sums(prior[1])),
            (as_vectors(d_mixed), sums(d_log_sums)),
            epsilon=EPSILON,
        )
        delta = -float64(d_log_sums)
        if prior is not None:
            entries = tuple(range(-len(case.size), 0))
            share = np.exp(float64(prior[1]) - want_sums.reshape(log_sums.shape))
            delta += share * np.sum(float64(d_mixed) * float64(prior[0]), axis=entries)
        largest = np.max(np.abs(float64(active)), initial=0)
        self.near(as_vectors(mixed), want, case, case.dtype, of=largest)
        near_sums = {"rtol": self.float32, "atol": self.float32}
        np.testing.assert_allclose(sums(log_sums), want_sums, **near_sums)

        scored = PartialCotangents(log_sums, np.float32(delta), d_mixed, added)
        given = given._replace(prior=None)
        options = self.options(case, "partial_backward")
        d_queries, d_sources = partial_backward(self.module, options, given, scored)
        assert d_queries.dtype == jnp.float32 and d_sources.dtype == case.dtype
        self.near(d_queries.reshape(case.S, -1), want_queries, case, "float32")
        # Rows that are not active: as they were, or 0.
        kept = 0 if added is None else float64(added[case.count :])
        np.testing.assert_array_equal(float64(d_sources[case.count :]), kept)
        if added is not None:
            want_sources = want_sources + float64(as_vectors(added[: case.count]))
        if case.count:
            self.near(as_vectors(d_sources[: case.count]), want_sources, case, case.dtype)

    def test_one_source_comes_back_bit_for_bit(self, alone):
        case = alone
        given = self.sources(case._replace(count=1))
        mixed, log_sums = partial(self.module, self.options(case, "partial"), given)
        np.testing.assert_array_equal(mixed, np.broadcast_to(given.sources[0], mixed.shape))
        d_mixed = draw(2, *mixed.shape, dtype=case.dtype)
        scored = PartialCotangents(log_sums, np.zeros_like(log_sums), d_mixed, None)
        options = self.options(case, "partial_backward")
        gradients = partial_backward(self.module, options, given, scored)
        # Of one source the score does not matter: the gradient is that of a copy.
        assert np.max(np.abs(gradients[0])) < self.nothing
        self.near(gradients[1][0], np.sum(float64(d_mixed), axis=0), case, case.dtype)

    def test_merge_and_its_gradients(self, merge):
        tokens, size, norm, dtype, _ = merge
        entries, as_vectors = math.prod(size), functools.partial(vectors, case=merge)
        query = np.float32(2 / np.sqrt(entries)) * draw(0, *size)
        gain = 1 + np.float32(0.1) * draw(1, *size)
        # A mean far from 0, which layernorm takes off.
        shifted = lambda seed, *shape: (draw(seed, *shape, dtype=dtype) + 3).astype(dtype)
        mixed, current = shifted(2, SITES, *tokens, *size), shifted(3, *tokens, *size)
        log_sums, d_mixed = draw(4, *tokens), np.full_like(mixed, 7)
        log_sums.reshape(-1)[0] = -np.inf  # a token without any sealed source
        d_z, d_current = (draw(seed, *tokens, *size, dtype=dtype) for seed in (5, 6))
        norms = {"norm": norm, "norm_epsilon": NORM_EPSILON}
        for active in (True, False):
            of_norm = None if norm is None else gain
            site = np.int32(SITE), current, np.bool(active), of_norm
            z, got = merge_both_ways(
                self.module,
                (*self.options(merge, "merge"), *norms.items()),
                Merge(query, mixed, log_sums, *site),
                MergeCotangents(d_z, d_mixed, d_current),
            )
            want_z, want = plain.merge(
                query.reshape(-1),
                as_vectors(mixed[SITE]),
                log_sums.reshape(-1),
                as_vectors(current),
                np.ones(entries) if norm is None else gain,
                as_vectors(d_z),
                active=active,
                epsilon=EPSILON,
                **norms,
            )
            assert z.dtype == got.mixed.dtype == got.current.dtype == dtype
            assert got.query.dtype == got.log_sums.dtype == jnp.float32
            self.near(as_vectors(z), want_z, merge, dtype)
            self.near(as_vectors(got.mixed[SITE]), want[1], merge, dtype)
            assert np.all(float64(got.mixed[::2]) == 7)
            self.near(
                as_vectors(got.current), want[3] + float64(as_vectors(d_current)), merge, dtype
            )
            of_logits = (got.query.reshape(-1), want[0]), (got.log_sums.reshape(-1), want[2])
            for mine, theirs in of_logits:
                self.near(mine, theirs, merge, "float32", of=max(1, np.max(np.abs(theirs))))
            assert (got.norm_gain is None) == (norm is None)
            if norm is not None:
                self.near(got.norm_gain, want[4], merge, "float32")
