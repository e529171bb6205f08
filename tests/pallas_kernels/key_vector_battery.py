"""What every implementation of the key-vector ops has to give: each inherits the battery."""

import functools
import math
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.key_vector.interface import (
    FRACTION_BITS,
    Gradients,
    Reread,
    SiteBackward,
    SiteOperands,
    SiteResults,
    Statistics,
)
from tests.closeness import assert_close, float64
from tests.pallas_kernels import plain
from tests.pallas_kernels.plain import numbers

EPSILON = 1e-6
# Largest error relative to the largest value, by dtype of the data: every operand of a bfloat16
# product is rounded to 2^-9, float32 sums of up to 10^5 terms are off by some units of 2^-24.
TOLERANCE = {"bfloat16": 1e-2, "float32": 3e-6}
# An int16 residual is itself known to half a step of 2^-9, at values of about 4; its float32
# gradients come from what is stored, and the cotangent of the residual is bfloat16.
INT16_TOLERANCE = 5e-3
# Of a residual of floats taken back, which was rounded when it was stored and is again.
REBUILT = {"bfloat16": 1e-2, "float32": 1e-6}
# Between a read alone and one behind a store, absolute too.
HALVES = {"bfloat16": 1e-2, "float32": 1e-5}


class Case(NamedTuple):
    """A site; `undone` are blocks of the backward pass, where these are not those of forward."""

    B: int
    N: int
    K: int
    V: int
    R: int
    P: int
    residual: str
    data: str
    norm: str
    blocks: Any = None
    undone: Any = None
    bits: int = FRACTION_BITS

    @property
    def cotangent(self) -> str:
        return "bfloat16" if self.residual == "int16" else self.residual

    @property
    def tolerance(self) -> float:
        of_int16 = INT16_TOLERANCE if self.residual == "int16" else 0
        return max(TOLERANCE[self.data], TOLERANCE[self.cotangent], of_int16)

    @property
    def size(self) -> float:
        """Of values that are held in as many steps whatever `bits` are."""
        return 2.0 ** (FRACTION_BITS - self.bits)

    @property
    def name(self) -> str:
        flags = ["blocks"] * (self.blocks is not None)
        flags += [f"{self.bits}bits"] * (self.bits != FRACTION_BITS)
        return "-".join([self.residual, self.data, self.norm, "x".join(map(str, self[:6])), *flags])


def arguments(case: Case, seed=0) -> SiteOperands:
    """Arrays that may be written to."""
    c, rng = case, np.random.default_rng(seed)
    draw = lambda dtype, *size: rng.normal(size=size).astype(dtype)
    X = np.float32(c.size) * draw("float32", c.B, c.N, c.K, c.V)
    y = np.float32(c.size) * draw("float32", c.B, c.N, c.R, c.V)
    return SiteOperands(
        held(c, X),
        draw("float32", c.R, c.K) / np.float32(2 * math.sqrt(c.R)),
        y.astype(c.data),
        draw("float32", c.K, c.V),
        draw("float32", c.P, c.K) / np.float32(math.sqrt(c.K)),
    )


def held(case: Case, X):
    """Numbers as the case's residual has them."""
    return (np.round(X * 2.0**case.bits) if case.residual == "int16" else X).astype(case.residual)


def cotangents_of(case: Case, seed=1):
    """Of the residual and of what is retrieved."""
    rng = np.random.default_rng(seed)
    draw = lambda dtype, *size: rng.normal(size=(case.B, case.N, *size)).astype(dtype)
    return draw(case.cotangent, case.K, case.V), draw(case.data, case.P, case.V)


def expected_of(case: Case, site: SiteOperands, cotangents):
    """The residual and retrieved vectors, and gradients in the order of `site`."""
    site = site._replace(residual=numbers(site.residual, case.bits))
    return plain.site(site, cotangents, norm=case.norm, epsilon=EPSILON)


def retrieved_of(case: Case, stored, site: SiteOperands):
    """From a residual as it is stored, whose rounding is no error of the read."""
    read = {"norm": case.norm, "epsilon": EPSILON}
    return plain.norm_retrieve(numbers(stored, case.bits), site.gain, site.read_keys, **read)


def again_of(case: Case, site: SiteOperands) -> Reread:
    """A read of the residual before, of 3 vectors, with a mean and a rstd that are not its own."""
    rng, X = np.random.default_rng(2), numbers(site.residual, case.bits)
    draw = lambda *size: rng.normal(size=size).astype("float32")
    mean = X.mean((2, 3)) if case.norm == "layernorm" else np.zeros(X.shape[:2])
    rstd = 2 / np.sqrt(np.mean((X - mean[..., None, None]) ** 2, (2, 3)))
    mean = mean + 0.5 * case.size * (case.norm == "layernorm")
    statistics = Statistics(np.float32(np.stack([mean, rstd], 1)))
    return Reread(draw(case.K, case.V), draw(3, case.K), statistics)


def retrieved_again(case: Case, rebuilt, again: Reread):
    both = np.float64(again.statistics.both)[..., None, None]
    mean, rstd = both[:, 0], both[:, 1]
    n = rstd * (numbers(rebuilt, case.bits) - mean)
    return np.einsum("kv,ak,bnkv->bnav", *map(np.float64, again[:2]), n, optimize=True)


def gradients_of(g):
    """In the order of a site."""
    return g.residual, g.store_keys, g.data, g.gain, g.read_keys


@functools.partial(jax.jit, static_argnums=(0, 1))
def forward(module, options, site, *others):
    return module.forward(site, *others, **dict(options))


@functools.partial(jax.jit, static_argnums=(0, 1))
def backward(module, options, given):
    return module.backward(given, **dict(options))


class Battery:
    """Tests over cases, which may be `pytest.param`s."""

    module: ClassVar[ModuleType]
    cases: ClassVar[tuple]
    halves: ClassVar[tuple]
    # Of float32 and of bfloat16 residuals, with a mean that is large beside the spread.
    spreads: ClassVar[tuple]
    shifted: ClassVar[tuple]
    # Of int16 residuals: taken back through 48 sublayers, and what they cannot hold.
    exact: ClassVar[tuple]
    held: ClassVar[tuple]
    repeated: ClassVar[tuple]
    # What is stored where the store is compiled alone, relative to the largest.
    apart: ClassVar[float] = 0.0
    # A mean, relative to its token's largest value: units of float32 of the values added up.
    mean: ClassVar[float] = 2e-7
    # What is read of a float32 spread of 0.01 about 1000, if that mean is rounded: by up to 2^-15.
    spread: ClassVar[float] = 6e-3

    def pytest_generate_tests(self, metafunc):
        for name, cases in (
            ("case", self.cases),
            ("half", self.halves),
            ("spread", self.spreads),
            ("shift", self.shifted),
            ("undone", self.exact),
            ("holds", self.held),
            ("again", self.repeated),
        ):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, cases, ids=lambda case: case.name)

    def options(self, case: Case, op: str) -> dict[str, Any]:
        """Of the implementation alone, by name, if it has any; `op` is "forward" or "backward"."""
        return {}

    def forward(self, case: Case, site: SiteOperands, *others, **changes) -> SiteResults:
        options = {"fraction_bits": case.bits, **self.options(case, "forward"), **changes}
        options |= {"norm": case.norm, "epsilon": EPSILON} if site.reads else {}
        return forward(self.module, tuple(options.items()), site, *others)

    def backward(
        self, case: Case, site: SiteOperands, statistics, *cotangents, **changes
    ) -> Gradients:
        options = {"fraction_bits": case.bits, **self.options(case, "backward"), **changes}
        options |= {"norm": case.norm} if site.reads else {}
        options |= {"rebuild": True} if site.reads and site.stores else {}
        given = SiteBackward(site, statistics, *cotangents)
        return backward(self.module, tuple(options.items()), given)

    def test_values_and_every_gradient_equal_numpy(self, case):
        site, cotangents = arguments(case), cotangents_of(case)
        stored, retrieved, statistics = self.forward(case, site)
        assert stored.dtype == case.residual and retrieved.dtype == case.data
        (X, _), gradients = expected_of(case, site, cotangents)
        values = numbers(stored, case.bits)
        assert_close(values, X, 2e-7 if case.residual == case.data == "float32" else 4e-3)
        if case.residual == "int16":
            keys, data = float64((site.store_keys.astype(case.data), site.data))
            steps = np.round(2.0**case.bits * np.einsum("rk,bnrv->bnkv", keys, data))
            off = np.abs(np.asarray(stored) - (site.residual + steps))
            # Sums in float32 may fall on the other side of a half.
            assert off.max() <= 1 and np.mean(off) < 0.01
        assert_close(retrieved, retrieved_of(case, stored, site), TOLERANCE[case.data])
        mean = values.mean((2, 3)) if case.norm == "layernorm" else np.zeros(values.shape[:2])
        assert np.all(np.abs(statistics.mean - mean) <= self.mean * np.abs(values).max((2, 3)))
        variance = np.mean((values - mean[..., None, None]) ** 2, (2, 3))
        np.testing.assert_allclose(statistics.rstd, (variance + EPSILON) ** -0.5, rtol=2e-6)

        again = again_of(case, site)
        given = site._replace(residual=stored), statistics, *cotangents, None, again
        g = self.backward(case, *given)
        assert g.retrieved.dtype == case.data
        assert_close(g.retrieved, retrieved_again(case, g.rebuilt, again), TOLERANCE[case.data])
        assert g.residual.dtype == case.cotangent and g.data.dtype == case.data
        assert g.store_keys.dtype == g.gain.dtype == g.read_keys.dtype == jnp.float32
        assert_close(gradients_of(g), gradients, case.tolerance)
        if case.residual == "int16":
            np.testing.assert_array_equal(g.rebuilt, site.residual)
        else:
            assert_close(g.rebuilt, site.residual, REBUILT[case.residual])

    def test_halves_are_the_whole(self, half):
        """Forward, and of a residual of floats the gradients too."""
        case, site, cotangents = half, arguments(half), cotangents_of(half)
        whole = self.forward(case, site)
        written = SiteOperands(*site[:3])
        stored = self.forward(case, written).residual
        assert_close(numbers(stored), numbers(whole.residual), self.apart)
        read = SiteOperands(whole.residual, gain=site.gain, read_keys=site.read_keys)
        nothing, retrieved, statistics = self.forward(case, read, dtype=jnp.dtype(case.data))
        assert nothing is None and retrieved.dtype == case.data
        near = HALVES[case.data]
        np.testing.assert_allclose(*float64((retrieved, whole.retrieved)), rtol=near, atol=near)
        np.testing.assert_allclose(statistics.rstd, whole.statistics.rstd, rtol=1e-6)
        if case.residual == "int16":
            return
        anything = np.full_like(site.residual, np.nan)
        first = self.forward(case, written._replace(residual=anything), empty=True).residual
        added = np.einsum("rk,bnrv->bnkv", *float64((site.store_keys, site.data)))
        assert_close(first, added, 2e-7 if case.residual == case.data == "float32" else 4e-3)
        d_stored, d_retrieved = cotangents
        of_read = self.backward(case, read, statistics, None, d_retrieved)
        d_X = d_stored + np.asarray(of_read.residual)
        of_store = self.backward(case, written._replace(residual=None), None, d_X, None)
        assert of_read.data is of_read.store_keys is of_store.gain is of_store.read_keys is None
        assert d_X.dtype == case.cotangent and of_store.data.dtype == case.data
        got = d_X, of_store.store_keys, of_store.data, of_read.gain, of_read.read_keys
        assert_close(got, expected_of(case, site, cotangents)[1], case.tolerance)

    def test_small_spread_on_a_large_mean(self, spread):
        """mean(x^2) - mean(x)^2 would lose every digit here, and so would a bfloat16 operand."""
        case, site = spread, arguments(spread)
        X = 1000 + np.float32(0.01) * site.residual
        site = site._replace(residual=X, store_keys=0 * site.store_keys)
        _, Z, statistics = self.forward(case, site)
        # The op is given the very X that NumPy is: float32 is only what it computes in.
        tolerance = 1e-2 if case.data == "bfloat16" else self.spread
        assert_close(Z, retrieved_of(case, X, site), tolerance)
        # A float32 mean near 1000 is a multiple of 2^-14, so off by up to 2^-15.
        exact = numbers(X)
        np.testing.assert_allclose(statistics.mean, exact.mean((2, 3)), atol=2.0**-14, rtol=0)
        rstd = (exact.var((2, 3)) + EPSILON) ** -0.5
        np.testing.assert_allclose(statistics.rstd, rstd, rtol=1e-5)

    def test_gradient_with_a_mean_that_is_large_beside_the_spread(self, shift):
        case, site = shift, arguments(shift)
        X = (site.residual + 64).astype(case.residual)
        site = site._replace(residual=X, store_keys=0 * site.store_keys)
        cotangents = np.zeros_like(X), cotangents_of(case)[1]
        _, expected = expected_of(case, site, cotangents)
        stored, _, statistics = self.forward(case, site)
        g = self.backward(case, site._replace(residual=stored), statistics, *cotangents)
        got = g.residual, g.gain, g.read_keys
        assert_close(got, (expected[0], *expected[3:]), TOLERANCE["bfloat16"])

    def test_int16_comes_back_exactly_through_48_sublayers(self, undone):
        case, cotangents = undone, cotangents_of(undone)
        start, *_ = arguments(case)
        sublayers = [arguments(case, seed) for seed in range(1, 49)]
        residual, after = start, []
        for site in sublayers:
            residual, _, statistics = self.forward(case, site._replace(residual=residual))
            after.append(statistics)
        assert np.abs(np.asarray(residual, np.int32) - start).max() > 2**FRACTION_BITS
        assert all(np.isfinite(statistics.rstd).all() for statistics in after)
        for site, statistics in zip(reversed(sublayers), reversed(after), strict=True):
            site = site._replace(residual=residual)
            residual = self.backward(case, site, statistics, *cotangents).rebuilt
        np.testing.assert_array_equal(residual, start)

    def test_a_token_beyond_int16_reads_nan(self, holds):
        case, (X, w, y, gain, r) = holds, arguments(holds)
        k, v, most = case.K - 2, case.V - 3, 2.0**15 / 2**case.bits
        X[0, 1, k, v] = 0
        w[:, k], w[0, k] = 0, 1
        bad = np.arange(case.B * case.N).reshape(case.B, case.N) == 1
        for value in (most, -1.02 * most, 16 * most, -16 * most, 1e30, -1e30, np.inf, np.nan):
            y[0, 1, :, v], y[0, 1, 0, v] = 0, value
            site = SiteOperands(X, w, y, gain, r)
            _, retrieved, statistics = self.forward(case, site)
            np.testing.assert_array_equal(np.isnan(statistics.rstd), bad)
            unread = np.isnan(numbers(retrieved))
            np.testing.assert_array_equal(unread.all((2, 3)), bad)
            np.testing.assert_array_equal(unread.any((2, 3)), bad)

    def test_a_token_of_less_than_two_steps_reads_nan(self, holds):
        case, (X, w, y, gain, r) = holds, arguments(holds)
        # All of the first token rounds to 0, most of the second does.
        small = np.ones((case.B, case.N, 1, 1), np.float32)
        small[0, :2] = [[[1e-5]], [[1e-3]]]
        X = held(case, numbers(X, case.bits) * small)
        site = SiteOperands(X, w, (y.astype(np.float32) * small).astype(y.dtype), gain, r)
        _, retrieved, statistics = self.forward(case, site)
        lost = small[:, :, 0, 0] < 1
        np.testing.assert_array_equal(np.isnan(statistics.rstd), lost)
        np.testing.assert_array_equal(np.isnan(numbers(retrieved)).all((2, 3)), lost)
        np.testing.assert_array_equal(np.isnan(numbers(retrieved)).any((2, 3)), lost)

    def test_gradients_are_the_same_bits_every_time(self, again):
        case, site, cotangents = again, arguments(again), cotangents_of(again)
        stored, _, statistics = self.forward(case, site)
        site = site._replace(residual=stored)
        run = lambda: self.backward(case, site, statistics, *cotangents)
        for a, b in zip(run(), run(), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
