"""TPU kernels of depth attention over residual matrices: interpreted against float64, and compiled.

Tolerances. Scores, weights and sums are float32's, so that a bfloat16 result is off by the rounding
of itself, 2^-8, and by 2^-15 of the largest for a product of queries and scores' gradients, which
lacks 2^-16; a part of the mix that is rounded between two kernels adds 2^-8 of what was mixed.
"""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import pallas_kernels
from pallas_kernels.depth_attention import mosaic_tpu_matrices, mosaic_tpu_merge_read
from pallas_kernels.depth_attention.interface import (
    Merge,
    MergeCotangents,
    MergeRead,
    Partial,
    Scored,
)
from tests.closeness import assert_close, float64
from tests.pallas_kernels import plain

EPSILON = 1e-6
FLOAT32 = 5e-6
NO_NORM = {"norm": None, "norm_epsilon": 1e-6}
options = {"epsilon": EPSILON, "interpret": True}


@jax.jit
def partial(*args):
    return mosaic_tpu_matrices.partial(Partial(*args), **options)


@jax.jit
def partial_backward(*args):
    return mosaic_tpu_matrices.partial_backward(Partial(*args[:3]), Scored(*args[3:]), **options)


class Case(NamedTuple):
    S: int
    N: int
    B: int
    T: int
    K: int
    V: int
    count: int
    dtype: str
    prior: bool = False
    accumulate: bool = False


# A last tile of 2 tokens and keys that fill no tile, then a prior and an accumulator; at night also
# no source, float32 and more sites than one kernel takes.
CASES = [
    Case(3, 4, 1, 130, 8, 48, 3, "bfloat16"),
    Case(1, 3, 2, 128, 16, 8, 2, "bfloat16", prior=True, accumulate=True),
    pytest.param(Case(2, 3, 1, 256, 16, 8, 0, "bfloat16", True, True), marks=pytest.mark.slow),
    pytest.param(Case(9, 18, 1, 200, 4, 32, 17, "bfloat16", False, True), marks=pytest.mark.slow),
    pytest.param(Case(2, 5, 3, 130, 32, 8, 5, "float32", True, True), marks=pytest.mark.slow),
]


def draw(seed, *shape, dtype="float32"):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def flat(x):
    """As vectors: the last axes two and two, as `plain` has them."""
    x = np.asarray(x)
    first = x.ndim % 2
    pairs = x.shape[first:]
    merged = (a * b for a, b in zip(pairs[::2], pairs[1::2], strict=True))
    return x.reshape(*x.shape[:first], *merged)


def assert_near(got, want, dtype, *, of=None, parts=0):
    """`of`: the largest value that was mixed; `parts`: how often the mix was rounded before."""
    got, want = float64((flat(got), want))
    of = np.max(np.abs(want), initial=0) if of is None else of
    bound = FLOAT32 * of
    if dtype == "bfloat16":
        bound = 2.0**-15 * of + 2.0**-8 * np.abs(want) + parts * 2.0**-8 * of
    np.testing.assert_array_less(np.abs(got - want), bound + 1e-30)


@pytest.mark.parametrize("case", CASES)
def test_partial_and_its_gradients(case):
    S, N, B, T, K, V, n, dtype, *_ = case
    queries = np.float32(2 / np.sqrt(K * V)) * draw(0, S, K, V)
    sources = draw(1, N, B, T, K, V, dtype=dtype)
    sources[n:] = np.nan
    prior = (draw(3, S, B, T, K, V, dtype=dtype), draw(4, S, B, T)) if case.prior else None
    count = np.int32(n)
    mixed, log_sums = partial(queries, sources, count, prior)
    d_mixed, d_log_sums = draw(5, *mixed.shape, dtype=dtype), draw(6, *log_sums.shape)
    added = None
    if case.accumulate:
        added = draw(7, *sources.shape, dtype=dtype)
        added[n:] = np.nan

    active = sources[:n]
    (want, want_sums), (want_queries, want_sources, _) = plain.partial(
        flat(queries),
        flat(active),
        prior and tuple(map(flat, prior)),
        (flat(d_mixed), flat(d_log_sums)),
        epsilon=EPSILON,
    )
    delta = -float64(d_log_sums)
    if prior is not None:
        share = np.exp(float64(prior[1]) - want_sums.reshape(S, B, T))
        delta += share * np.sum(float64(d_mixed) * float64(prior[0]), axis=(-2, -1))
    largest = np.max(np.abs(float64(active)), initial=1)
    assert_near(mixed, want, dtype, of=largest, parts=N > 16)
    np.testing.assert_allclose(flat(log_sums), want_sums, rtol=FLOAT32, atol=FLOAT32)

    args = (queries, sources, count, log_sums, np.float32(delta), d_mixed, added)
    d_queries, d_sources = partial_backward(*args)
    assert d_queries.dtype == jnp.float32 and d_sources.dtype == sources.dtype
    assert_near(d_queries, want_queries, "float32")
    empty = float64(d_sources[n:])
    if added is None:
        assert not np.any(empty)
    else:
        want_sources = want_sources + float64(flat(added[:n]))
        assert np.isnan(empty).all()
    if n:
        assert_near(d_sources[:n], want_sources, dtype, parts=S > 8)


def test_one_source_comes_back_bit_for_bit():
    case = CASES[0]
    queries = draw(0, case.S, case.K, case.V)
    sources = draw(1, case.N, case.B, case.T, case.K, case.V, dtype=case.dtype)
    sources[1:] = np.nan
    mixed, log_sums = partial(queries, sources, np.int32(1), None)
    np.testing.assert_array_equal(mixed, np.broadcast_to(sources[0], mixed.shape))
    d_mixed, zeros = draw(2, *mixed.shape, dtype=case.dtype), np.zeros_like(log_sums)
    d_queries, _ = partial_backward(queries, sources, np.int32(1), log_sums, zeros, d_mixed, None)
    # Of one source the score does not matter.
    assert np.max(np.abs(d_queries)) < 1e-3


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_merge_and_its_gradients(dtype):
    S, B, T, K, V = 3, 1, 130, 8, 48
    query = np.float32(2 / np.sqrt(K * V)) * draw(0, K, V)
    mixed, current = draw(2, S, B, T, K, V, dtype=dtype), draw(3, B, T, K, V, dtype=dtype)
    log_sums, d_z, d_current = draw(4, B, T), *(draw(i, B, T, K, V, dtype=dtype) for i in (5, 6))
    d_mixed = np.full_like(mixed, 7)

    @jax.jit
    def run(query, mixed, log_sums, site, current, active, *cotangents):
        given = Merge(query, mixed, log_sums, site, current, active), MergeCotangents(*cotangents)
        z = mosaic_tpu_matrices.merge(given[0], **options, **NO_NORM)
        return z, mosaic_tpu_matrices.merge_backward(*given, **options, **NO_NORM)

    for active in (True, False):
        args = (query, mixed, log_sums, np.int32(1), current, np.bool(active))
        z, got = run(*args, d_z, d_mixed, d_current)
        want_z, want = plain.merge(
            *map(flat, (query, mixed[1], log_sums, current)),
            np.ones(K * V),
            flat(d_z),
            active=active,
            epsilon=EPSILON,
            **NO_NORM,
        )
        assert_near(z, want_z, dtype)
        assert_near(got.mixed[1], want[1], dtype)
        assert np.all(float64(got.mixed[::2]) == 7)
        assert_near(got.current, want[3] + float64(flat(d_current)), dtype)
        for mine, theirs in ((got.query, want[0]), (got.log_sums, want[2])):
            assert_near(mine, theirs, "float32", of=max(1, np.max(np.abs(theirs))))
        assert got.norm_gain is None


@pytest.mark.parametrize(
    "T, K, norm, dtype",
    [
        (130, 16, "layernorm", "bfloat16"),
        pytest.param(300, 16, "rmsnorm", "float32", marks=pytest.mark.slow),
        # Rows of keys that fill no tile: two kernels each way.
        pytest.param(128, 24, "layernorm", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_merge_and_read_and_their_gradients(T, K, norm, dtype):
    S, B, V, P, site = 3, 2, 16, 5, np.int32(1)
    query = np.float32(2 / np.sqrt(K * V)) * draw(0, K, V)
    # A mean that layernorm takes off.
    mixed, current = draw(2, S, B, T, K, V) + 1, draw(3, B, T, K, V) + 1
    mixed, current = mixed.astype(dtype), current.astype(dtype)
    log_sums, d_current = draw(4, B, T), draw(6, B, T, K, V, dtype=dtype)
    gain, read_keys = draw(7, K, V), draw(8, P, K)
    d_z, d_mixed = draw(5, B, T, P, V, dtype=dtype), np.full_like(mixed, 7)
    norms = {"norm": norm, "epsilon": EPSILON}

    @jax.jit
    def run(query, mixed, log_sums, site, current, active, gain, read_keys, *cotangents):
        of_merge = Merge(query, mixed, log_sums, site, current, active)
        given = MergeRead(of_merge, gain, read_keys)
        more = {"norm_epsilon": EPSILON, "dtype": dtype, "interpret": True}
        z, statistics = mosaic_tpu_merge_read.merge_read(given, **norms, **more)
        backward = functools.partial(mosaic_tpu_merge_read.merge_read_backward, interpret=True)
        return z, backward(given, statistics, MergeCotangents(*cotangents), **norms)

    args = (query, mixed, log_sums, site, current, np.bool(True), gain, read_keys)
    z, got = run(*args, d_z, d_mixed, d_current)
    vectors = [flat(x) for x in (query, mixed[1], log_sums, current)]
    merged = functools.partial(plain.merge, *vectors, np.ones(K * V), active=True, **NO_NORM)
    h, _ = merged(np.zeros((B * T, K * V)), epsilon=EPSILON)
    h = h.astype(dtype).reshape(B, T, K, V)
    nothing = np.zeros((1, K)), np.zeros((B, T, 1, V))
    given = (h, *nothing, gain, read_keys), (np.zeros(h.shape), d_z)
    (_, want_z), (d_h, _, _, d_gain, d_keys) = plain.site(*given, **norms)
    _, want = merged(flat(d_h), epsilon=EPSILON)

    assert z.dtype == dtype and got.current.dtype == dtype
    tolerance = {"bfloat16": 1e-2, "float32": 1e-5}[dtype]
    d_query, d_own, d_log_sums, d_sum, _ = want
    shaped = lambda x: x.reshape(B, T, K, V)
    assert_close(
        (z, *got._replace(mixed=got.mixed[1])),
        (
            want_z,
            d_query.reshape(K, V),
            shaped(d_own),
            d_log_sums.reshape(B, T),
            shaped(d_sum) + float64(d_current),
            d_gain,
            d_keys,
        ),
        tolerance,
    )
    assert np.all(float64(got.mixed[::2]) == 7)


def test_ops_take_matrices_as_they_take_vectors():
    """In plain JAX: values and gradients of queries, sources, prior and running sum."""
    S, N, B, T, K, V = 2, 3, 2, 4, 3, 5
    queries, sources = draw(0, S, K, V), draw(1, N, B, T, K, V)
    prior = draw(2, S, B, T, K, V), draw(3, S, B, T)
    current = draw(4, B, T, K, V)

    def run(queries, sources, prior, current):
        mixed, log_sums = pallas_kernels.depth_attention_partial(queries, sources, prior=prior)
        ops = pallas_kernels.depth_attention_merge
        _, _, z = ops(mixed, log_sums[1], 1, current, queries[1], None, norm=None)
        return jnp.sum(jnp.sin(z)) + jnp.sum(jnp.cos(mixed)) + jnp.sum(log_sums), z

    def vectors(queries, sources, prior, current):
        prior = (prior[0].reshape(S, B, T, -1), prior[1])
        args = queries.reshape(S, -1), sources.reshape(N, B, T, -1), prior
        return run(*args, current.reshape(B, T, -1))

    args = (queries, sources, prior, current)
    grad = lambda f: jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2, 3), has_aux=True))
    (got, z), gradients = grad(run)(*args)
    (want, want_z), wanted = grad(vectors)(*args)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(z.reshape(want_z.shape), want_z, rtol=1e-5, atol=1e-6)
    compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    jax.tree.map(compare, gradients, wanted)


def test_what_is_not_served():
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    query, count = array("float32", 1, 16, 8), array("int32")
    ask = lambda x: mosaic_tpu_matrices.unsupported("partial", Partial(query, x, count))
    assert ask(array("bfloat16", 9, 1, 128, 16, 8)) is None
    assert "neither bfloat16 nor float32" in ask(array("float16", 9, 1, 128, 16, 8))
    assert "a sequence of 64 tokens" in ask(array("bfloat16", 9, 1, 64, 16, 8))
    assert "a multiple of 128" in ask(array("bfloat16", 9, 1, 128, 10, 8))
    assert "do not fit VMEM" in ask(array("bfloat16", 9, 1, 128, 1024, 128))
    current = array("bfloat16", 1, 128, 16, 8)
    merge = Merge(query, array("bfloat16", 1, *current.shape), count, count, current, count, query)
    assert "a norm of matrices" in mosaic_tpu_matrices.unsupported("merge", merge)


# Compilation for TPUs that are not there -------------------------------------------------------


@pytest.mark.compile
@pytest.mark.parametrize(
    "topology, S, N, B, T, K, V, dtype, forward, backward",
    [
        ("v5e:2x2", 6, 9, 16, 512, 64, 64, "bfloat16", True, True),
        ("v5p:2x2x1", 12, 5, 4, 1000, 24, 64, "bfloat16", False, False),
        ("v6e:2x2", 2, 3, 2, 512, 256, 64, "bfloat16", True, False),
        ("v6e:2x2", 2, 3, 3, 300, 32, 32, "bfloat16", True, True),
        ("tpu7x:2x2x1", 2, 49, 2, 512, 24, 64, "float32", True, True),
    ],
)
def test_kernels_compile(topology, S, N, B, T, K, V, dtype, forward, backward):
    """`forward`, `backward`: whether merge and read are one kernel."""
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    sharding = SingleDeviceSharding(device)

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def site(queries, bank, count, current, d_bank, gain, read_keys):
        """A bank as it lies on a TPU: v-major, tokens last."""
        bank, current, d_bank = map(tokens_first, (bank, current, d_bank))

        def read(queries, current, mixed, log_sums, gain, read_keys):
            return pallas_kernels.depth_attention_merge_read(
                mixed, log_sums[0], count, current, queries[0], gain, read_keys
            )

        mixed, log_sums = pallas_kernels.depth_attention_partial(queries, bank, count=count)
        args = (queries, current, mixed, log_sums, gain, read_keys)
        (mixed, _, z), pullback = jax.vjp(read, *args)
        zeros = jnp.zeros_like(mixed), jnp.zeros_like(current)
        _, d_current, d_mixed, d_log_sums, d_gain, d_keys = pullback((*zeros, z))
        g = pallas_kernels.depth_attention_partial_backward(
            queries, bank, mixed, log_sums, d_mixed, d_log_sums, count=count, accumulate=d_bank
        )
        return g.queries, tokens_last(g.sources), tokens_last(d_current), d_gain, d_keys

    def tokens_last(x):
        return jnp.swapaxes(x, -1, -3)

    tokens_first = tokens_last
    bank, row = array(dtype, N, B, V, K, T), array(dtype, B, V, K, T)
    keys = array("float32", K, V), array("float32", 12, K)
    args = (array("float32", S, K, V), bank, array("int32"), row, bank, *keys)
    compiled = jax.jit(site, donate_argnums=4).lower(*args).compile()
    text = compiled.as_text()
    matrices = "depth_attention_matrices_"
    names = {matrices + name for name in ("partial", "measure", "partial_backward")}
    names |= {matrices + "merge_read"} if forward else {matrices + "merge", "key_vector_read"}
    if backward:
        names |= {matrices + "merge_read_backward"}
    else:
        names |= {matrices + "merge_backward", "key_vector_read_backward"}
    for name in sorted(names):
        assert re.search(rf"custom-call.*/{name}/", text), name
    if K % 16 == 0 and T % 128 == 0 and S <= 8 and N <= 16:
        # What is made are the mixes, their gradients and rows: no array is moved.
        size = jnp.dtype(dtype).itemsize * row.size
        assert compiled.memory_analysis().temp_size_in_bytes < (2 * S + 4) * size
