"""TPU kernels of depth attention: in interpret mode against float64, and compiled for TPUs.

Tolerances. Scores and sums are float32's: 2^-24 of what is added up, over sums of a few hundred
terms. A bfloat16 result is off by 2^-8 of itself for its rounding, and by 2^-15 of what was mixed
for weights of 16 bits, or by 2^-9 for weights that are bfloat16's. A float32 result has the float32
products' error only.
"""

import dataclasses
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.depth_attention import mosaic_tpu, reference
from pallas_kernels.depth_attention.interface import UnsupportedImplementation
from pallas_kernels.depth_attention.mosaic_tpu import BlockSizes

EPSILON, NORM_EPSILON = 1e-6, 1e-5
FLOAT32 = 5e-6

_OPTIONS = ("block_sizes", "epsilon", "interpret", "norm", "norm_epsilon", "seal")
# Compiled as one: op by op takes longer.
partial = jax.jit(mosaic_tpu.partial, static_argnames=_OPTIONS[:3])
partial_backward = jax.jit(mosaic_tpu.partial_backward, static_argnames=_OPTIONS[:3])
step = jax.jit(mosaic_tpu.step, static_argnames=_OPTIONS)


class Case(NamedTuple):
    S: int
    N: int
    T: int
    D: int
    count: int
    dtype: str
    prior: bool = False
    accumulate: bool = False
    tokens: int = 128


CASES = [
    Case(1, 3, 24, 200, 3, "bfloat16"),
    Case(3, 5, 130, 256, 3, "bfloat16", prior=True, accumulate=True),
    Case(8, 9, 20, 128, 9, "bfloat16", accumulate=True, tokens=16),
    # One of two chunks of sources, a last tile of 32 tokens.
    Case(1, 18, 80, 128, 9, "bfloat16", tokens=48),
    Case(1, 10, 7, 128, 10, "bfloat16", accumulate=True),
    Case(2, 17, 20, 128, 17, "float32", prior=True),
    Case(1, 2, 1, 128, 2, "float32", accumulate=True),
    Case(2, 3, 20, 128, 0, "bfloat16", prior=True, accumulate=True),
]


def draw(key, *shape, dtype="float32"):
    return jax.random.normal(jax.random.key(key), shape).astype(dtype)


def float64(tree):
    """As NumPy arrays."""
    widen = lambda x: np.asarray(x.astype("float32") if x.dtype == "bfloat16" else x, np.float64)
    return jax.tree.map(widen, tree)


def exact(function, *args):
    """`function` of JAX arrays in float64, which its results are too."""
    with jax.enable_x64(True):
        return float64(jax.jit(function)(*jax.tree.map(jnp.asarray, float64(args))))


def arguments(case: Case):
    """Queries, sources with NaN in the empty rows, the same with zeros, count, prior."""
    c = case
    queries = 2 * draw(0, c.S, c.D) / np.sqrt(c.D)
    sources = draw(1, c.N, c.T, c.D, dtype=c.dtype)
    sources *= jnp.exp(draw(2, c.N, c.T, 1)).astype(c.dtype)
    prior = None
    if c.prior:
        prior = (draw(3, c.S, c.T, c.D, dtype=c.dtype), draw(4, c.S, c.T))
    empty = lambda value: sources.at[c.count :].set(value)
    return queries, empty(jnp.nan), empty(0), jnp.int32(c.count), prior


def reference_partial(queries, sources, count, prior):
    return reference.partial(queries, sources, count, prior, epsilon=EPSILON)


def assert_close(got, want, dtype, *, of=None, weights=2.0**-15):
    """`of`: the largest value that was mixed, with weights that are so far off."""
    got, want = float64((got, want))
    of = np.max(np.abs(want)) if of is None else of
    bound = FLOAT32 * of
    if dtype == "bfloat16":
        bound = weights * of + 2.0**-8 * np.abs(want)
    np.testing.assert_array_less(np.abs(got - want), bound + 1e-30)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_partial_and_its_gradients(case):
    queries, sources, zeroed, count, prior = arguments(case)
    lanes = 128 if case.prior else 512  # one step of a product, or two
    pieces = 2 if case.S <= 3 else 1
    blocks = BlockSizes(case.tokens, lanes, weight_pieces=pieces)
    off = {2: 2.0**-15, 1: 2.0**-9}[pieces]
    options = {"epsilon": EPSILON, "interpret": True, "block_sizes": blocks}
    mixed, log_sums = partial(queries, sources, count, prior, **options)
    d_mixed, d_log_sums = draw(5, *mixed.shape, dtype=case.dtype), draw(6, *log_sums.shape)
    added = None
    if case.accumulate:
        added = draw(7, *sources.shape, dtype=case.dtype).at[case.count :].set(jnp.nan)

    def both(queries, sources, prior, *cotangents):
        f = lambda *args: reference_partial(*args, jnp.int32(case.count), prior)
        results, pullback = jax.vjp(f, queries, sources)
        return *results, *pullback(cotangents)

    want, want_sums, want_queries, want_sources = exact(
        both, queries, zeroed, prior, d_mixed, d_log_sums
    )
    delta = -float64(d_log_sums)
    if prior is not None:
        of_prior, sums = float64(prior)
        weight = np.exp(sums - want_sums)
        delta = delta + weight * np.sum(float64(d_mixed) * of_prior, axis=-1)
    largest = np.max(np.abs(float64(zeroed)))
    assert_close(mixed, want, case.dtype, of=largest, weights=off)
    np.testing.assert_allclose(log_sums, want_sums, rtol=FLOAT32, atol=FLOAT32)

    d_queries, d_sources = partial_backward(
        queries, sources, count, log_sums, jnp.float32(delta), d_mixed, added, **options
    )
    assert d_queries.dtype == jnp.float32 and d_sources.dtype == sources.dtype
    assert_close(d_queries, want_queries, "float32")
    active = slice(0, case.count)
    if added is not None:
        want_sources = want_sources + float64(added)
        assert np.isnan(d_sources[case.count :].astype("float32")).all()
    else:
        assert not np.any(d_sources[case.count :].astype("float32"))
    if case.count:
        assert_close(d_sources[active], want_sources[active], case.dtype, weights=off)


def test_large_scores_are_as_exact_as_float32():
    queries, sources = 4 * draw(0, 2, 256), draw(1, 4, 16, 256, dtype="bfloat16")
    args = (queries, sources, jnp.int32(4), None)
    _, log_sums = partial(*args, epsilon=EPSILON, interpret=True)
    _, want = exact(lambda *args: reference_partial(*args, jnp.int32(4), None), *args[:2])
    assert np.max(np.abs(want)) > 50
    np.testing.assert_allclose(log_sums, want, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_one_source_comes_back_bit_for_bit(dtype):
    queries = draw(0, 3, 128) / np.sqrt(128)
    sources = draw(1, 4, 20, 128, dtype=dtype).at[1:].set(jnp.nan)
    args = (queries, sources, jnp.int32(1))
    mixed, log_sums = partial(*args, None, epsilon=EPSILON, interpret=True)
    np.testing.assert_array_equal(mixed, jnp.broadcast_to(sources[0], mixed.shape))
    d_mixed = draw(2, *mixed.shape, dtype=dtype)
    d_queries, d_sources = partial_backward(
        *args, log_sums, None, d_mixed, None, epsilon=EPSILON, interpret=True
    )
    # Of one source the score does not matter: the gradient is that of a copy.
    assert np.max(np.abs(d_queries)) < 1e-4
    wide = np.sum(d_mixed.astype("float32"), axis=0)
    assert_close(d_sources[0], wide, dtype)


def test_no_source():
    queries, sources = draw(0, 2, 128), jnp.full((3, 16, 128), jnp.nan, jnp.bfloat16)
    args = (queries, sources, jnp.int32(0))
    mixed, log_sums = partial(*args, None, epsilon=EPSILON, interpret=True)
    assert not np.any(mixed.astype("float32")) and np.all(log_sums == -np.inf)
    d_queries, d_sources = partial_backward(
        *args, log_sums, None, mixed + 1, None, epsilon=EPSILON, interpret=True
    )
    assert not np.any(d_queries) and not np.any(d_sources.astype("float32"))


@pytest.mark.parametrize(
    "T, D, dtype, norm",
    [
        (130, 200, "bfloat16", "layernorm"),
        (40, 128, "float32", "rmsnorm"),
        (1, 256, "bfloat16", "rmsnorm"),
    ],
)
def test_merge_and_its_gradients(T, D, dtype, norm):
    query, gain = 2 * draw(0, D) / np.sqrt(D), 1 + 0.1 * draw(1, D)
    # A mean far from 0, which layernorm takes off.
    mixed, current = draw(2, 3, T, D, dtype=dtype) + 3, draw(3, T, D, dtype=dtype) + 3
    d_mixed = jnp.full_like(mixed, 7)
    log_sums, d_z, d_current = draw(4, T), draw(5, T, D, dtype=dtype), draw(6, T, D, dtype=dtype)
    options = {"norm": norm, "epsilon": EPSILON, "norm_epsilon": NORM_EPSILON}
    kernel = options | {"interpret": True, "block_sizes": BlockSizes(48)}

    @jax.jit
    def run(active):
        args = (query, mixed, log_sums, jnp.int32(1), current, active, gain)
        z = mosaic_tpu.merge(*args, **kernel)
        return z, mosaic_tpu.merge_backward(*args, d_z, d_mixed, d_current, **kernel)

    for active in (True, False):
        z, got = run(jnp.bool(active))

        def both(d_z, *args, active=active):
            site, active = jnp.int32(1), jnp.bool(active)
            f = lambda *args: reference.merge(*args[:3], site, args[3], active, args[4], **options)
            z, pullback = jax.vjp(f, *args)
            return z, pullback(d_z)

        want_z, want = exact(both, d_z, query, mixed, log_sums, current, gain)
        assert_close(z, want_z, dtype)
        assert_close(got.mixed[1], want[1][1], dtype)
        assert np.all(got.mixed[::2].astype("float32") == 7)
        assert_close(got.current, want[3] + float64(d_current), dtype)
        for mine, theirs in ((got.query, want[0]), (got.log_sums, want[2])):
            assert_close(mine, theirs, "float32", of=max(1, np.max(np.abs(theirs))))
        assert_close(got.norm_gain, want[4], "float32")


@pytest.mark.parametrize(
    "N, T, D, count, dtype, norm, seal",
    [
        (4, 130, 200, 2, "bfloat16", "layernorm", True),
        (17, 40, 128, 16, "float32", "rmsnorm", False),
        (5, 7, 128, 3, "bfloat16", "rmsnorm", True),
        (3, 1, 256, 0, "bfloat16", "layernorm", True),
    ],
)
def test_step(N, T, D, count, dtype, norm, seal):
    query, gain = 2 * draw(0, D) / np.sqrt(D), 1 + 0.1 * draw(1, D)
    bank = draw(2, N, T, D, dtype=dtype).at[count:].set(jnp.nan)
    current, y = draw(3, T, D, dtype=dtype), draw(4, T, D, dtype=dtype)
    options = {"norm": norm, "epsilon": EPSILON, "norm_epsilon": NORM_EPSILON}
    args = (query, bank, jnp.int32(count), current, y, gain)
    kernel = options | {"seal": seal, "interpret": True, "block_sizes": BlockSizes(48)}
    new_bank, new, z = step(*args, **kernel)
    want_bank, want_new, _ = reference.step(*args, seal=seal, **options)
    np.testing.assert_array_equal(new, want_new)
    if seal:
        np.testing.assert_array_equal(*float64((new_bank, want_bank)))
    else:
        assert new_bank is None

    def site(query, bank, current, gain):
        args = (jnp.int32(count), current, jnp.zeros_like(current), gain)
        return reference.step(query, bank, *args, seal=False, **options)[2]

    want = exact(site, query, bank.at[count:].set(0), new, gain)
    assert_close(z, want, dtype, of=np.max(np.abs(want)))


def test_backward_twice_is_the_same_bits():
    case = Case(2, 5, 72, 128, 4, "bfloat16", tokens=16)
    queries, sources, _, count, _ = arguments(case)
    options = {"epsilon": EPSILON, "interpret": True, "block_sizes": BlockSizes(16, 128)}
    mixed, log_sums = mosaic_tpu.partial(queries, sources, count, None, **options)
    backward = jax.jit(
        lambda g: mosaic_tpu.partial_backward(
            queries, sources, count, log_sums, None, g, None, **options
        )
    )
    first, second = (backward(mixed) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


def mix(queries, sources, count):
    return mosaic_tpu.partial(queries, sources, count, None, epsilon=EPSILON, interpret=True)[0]


def test_vmap():
    queries = draw(0, 2, 128)
    sources = draw(1, 3, 4, 20, 128)
    got = jax.vmap(mix, (None, 0, None))(queries, sources, jnp.int32(3))
    want = jnp.stack([mix(queries, s, jnp.int32(3)) for s in sources])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_scan_over_sites_that_seal():
    N, T, D = 3, 20, 128
    queries, ys = draw(0, N, D), draw(1, N, T, D, dtype="bfloat16")
    options = {"seal": True, "norm": "rmsnorm", "epsilon": EPSILON, "norm_epsilon": NORM_EPSILON}
    zero = jnp.zeros((T, D), jnp.bfloat16)
    bank = jnp.full((N, T, D), jnp.nan, jnp.bfloat16)

    def run(step):
        def body(bank, site):
            i, query, y = site
            bank, _, z = step(query, bank, i, zero, y, jnp.ones(D), **options)
            return bank, z

        return jax.lax.scan(body, bank, (jnp.arange(N, dtype=jnp.int32), queries, ys))

    got_bank, got = run(lambda *args, **o: mosaic_tpu.step(*args, interpret=True, **o))
    want_bank, want = run(reference.step)
    np.testing.assert_array_equal(got_bank, want_bank)
    # Both are rounded.
    want = want.astype("float32")
    np.testing.assert_allclose(got.astype("float32"), want, rtol=2**-7, atol=1e-4)


def test_shard_map_over_tokens():
    queries, sources, count = draw(0, 2, 128), draw(1, 3, 64, 128), jnp.int32(2)
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    specs = (P(), P(None, "x"), P())
    sharded = jax.shard_map(mix, mesh=mesh, in_specs=specs, out_specs=P(None, "x"), check_vma=False)
    got = jax.jit(sharded)(queries, sources, count)
    want = mix(queries, sources, count)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_what_is_not_served():
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    query, count = array("float32", 1, 128), array("int32")
    ask = lambda sources: mosaic_tpu.unsupported("partial", query, sources, count, None)
    large = array("bfloat16", 20000, 64, 128)
    assert ask(array("bfloat16", 9, 64, 128)) is None
    assert "neither bfloat16 nor float32" in ask(array("float16", 9, 64, 128))
    assert "do not fit VMEM" in ask(large)
    step = (query, array("bfloat16", 3, 8, 128), count, *[array("float32", 8, 128)] * 3)
    assert "beside a bank" in mosaic_tpu.unsupported("step", *step)
    with pytest.raises(UnsupportedImplementation, match="do not fit VMEM; use 'xla'"):
        jax.eval_shape(mix, query, large, count)


def test_tuned_sizes_come_first(monkeypatch):
    tuned = BlockSizes(32, 128, 1)
    assert mosaic_tpu.choose_block_sizes("partial", 9, 1, 8192, 2048, "bfloat16") != tuned
    key = ("partial", None, 9, 1, 2048, "bfloat16")
    monkeypatch.setitem(mosaic_tpu.TUNED, key, tuned)
    assert mosaic_tpu.choose_block_sizes("partial", 9, 1, 8192, 2048, "bfloat16") == tuned
    assert mosaic_tpu.choose_block_sizes("partial", 8, 1, 8192, 2048, "bfloat16") != tuned


# Compilation for TPUs that are not there -------------------------------------------------------


def place_on(topology: str):
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    sharding = SingleDeviceSharding(device)
    return lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def compile_both(topology, S, N, T, D, dtype):
    array = place_on(topology)
    sources, row = array(dtype, N, T, D), array("float32", S, T)

    def options(op):
        # As chosen, but unrolled, which takes long to compile.
        blocks = mosaic_tpu.choose_block_sizes(op, N, S, T, D, dtype)
        return {"epsilon": EPSILON, "block_sizes": dataclasses.replace(blocks, unroll=1)}

    def both(queries, sources, count, log_sums, delta, d_mixed, added):
        out = mosaic_tpu.partial(queries, sources, count, None, **options("partial"))
        args = (queries, sources, count, log_sums, delta, d_mixed, added)
        return out, mosaic_tpu.partial_backward(*args, **options("partial_backward"))

    args = (array("float32", S, D), sources, array("int32"), row, row, array(dtype, S, T, D))
    return jax.jit(both, donate_argnums=6).lower(*args, sources).compile()


@pytest.mark.compile
@pytest.mark.parametrize(
    "topology, S, N, T, D, dtype",
    [
        ("v5e:2x2", 1, 9, 8192, 2048, "bfloat16"),
        ("v5p:2x2x1", 1, 9, 8192, 7168, "bfloat16"),
        ("v6e:2x2", 1, 33, 8192, 1024, "bfloat16"),
        ("v5p:2x2x1", 8, 9, 8192, 2048, "bfloat16"),
        ("v5e:2x2", 3, 18, 1000, 200, "bfloat16"),
        ("v6e:2x2", 16, 5, 130, 256, "float32"),
    ],
)
def test_partial_compiles(topology, S, N, T, D, dtype):
    compiled = compile_both(topology, S, N, T, D, dtype)
    text = compiled.as_text()
    for name in ("depth_attention_partial", "depth_attention_partial_backward"):
        assert re.search(rf"custom-call.*{name}", text), name
    if T % 16 == 0 and D % 128 == 0:
        # No copy of the sources, nor of a row of them.
        row = T * D * jnp.dtype(dtype).itemsize
        assert compiled.memory_analysis().temp_size_in_bytes < row


@pytest.mark.compile
@pytest.mark.parametrize(
    "topology, N, T, D",
    [
        ("v5e:2x2", 9, 8192, 2048),
        ("v5p:2x2x1", 33, 7, 7168),
        ("v6e:2x2", 8, 1, 1024),
        ("v6e:2x2", 5, 1000, 200),
    ],
)
def test_merge_and_step_compile(topology, N, T, D):
    array = place_on(topology)
    token, parameter = array("bfloat16", T, D), array("float32", D)
    options = {"norm": "layernorm", "epsilon": EPSILON, "norm_epsilon": NORM_EPSILON}

    def all_three(query, bank, count, current, y, gain, mixed, d_mixed, log_sums, active):
        bank, current, z = mosaic_tpu.step(
            query, bank, count, current, y, gain, seal=True, **options
        )
        args = (query, mixed, log_sums, count, y, active, gain)
        z = mosaic_tpu.merge(*args, **options)
        return bank, current, z, mosaic_tpu.merge_backward(*args, z, d_mixed, z, **options)

    sites = array("bfloat16", 4, T, D)
    bank = array("bfloat16", N, T, D)
    args = (parameter, bank, array("int32"), token, token, parameter, sites, sites)
    compiled = (
        jax.jit(all_three, donate_argnums=(1, 3, 7))
        .lower(*args, array("float32", T), array("bool"))
        .compile()
    )
    text = compiled.as_text()
    for name in ("step", "merge", "merge_backward"):
        assert re.search(rf"custom-call.*depth_attention_{name}", text), name
    if D % 128 == 0 and T % 16 == 0:
        # The bank is sealed in place.
        assert compiled.memory_analysis().temp_size_in_bytes < 2 * T * D * 2
