"""The Mosaic GPU kernels of depth attention: interpreted numbers, and their code for two GPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import depth_attention, depth_attention_merge_read
from pallas_kernels.depth_attention import mosaic_gpu, mosaic_gpu_kernels
from pallas_kernels.depth_attention.interface import (
    Merge,
    MergeCotangents,
    MergeRead,
    PartialCotangents,
)
from pallas_kernels.depth_attention.matrices import MatricesAsVectors
from pallas_kernels.depth_attention.merge_read_in_two import MOSAIC_GPU, XLA
from pallas_kernels.mosaic_gpu import plgpu
from pallas_kernels.platform import UnsupportedImplementation, preferring
from pallas_kernels.shapes import ALL_SITES, ONE_SITE, Depth
from pallas_kernels.target import lowering_for
from tests import cuda
from tests.closeness import assert_close
from tests.pallas_kernels import depth_attention_battery as battery
from tests.pallas_kernels.depth_attention_battery import Battery, Case, MergeCase

EPSILON = 1e-6
# Largest error allowed relative to the largest value; see depth_attention_gpu_test.py.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2.0**-8}
interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"),
    reason=f"jax {jax.__version__} has no interpreter of Mosaic GPU kernels",
)
OPTIONS = ("epsilon", EPSILON), ("interpret", True)
SHARED = pytest.mark.xdist_group("depth attention kernels in Mosaic GPU")

# With padding on chip and without. TWICE has more sites than a call takes, and sites in groups.
PRIOR = Case(2, 3, (5,), (200,), 2, "float32", prior=True)
ADDED = Case(2, 3, (5,), (200,), 2, "bfloat16", accumulate=True)
TWICE = Case(5, 2, (3,), (256,), 2, "float32", prior=True, accumulate=True)
PLAIN = Case(3, 4, (5,), (136,), 4, "bfloat16")


class Interpreted(Battery):
    """The kernels run in JAX's interpreter, which fails where two threads race.

    A program has several tokens, as on a GPU.
    """

    @pytest.fixture(autouse=True, params=["one slot", "two slots"])
    def two_programs(self, request, monkeypatch):
        stages = 1 if request.param == "one slot" else 2
        programs = lambda sizes, scratch: min(2, sizes.T)
        monkeypatch.setattr(mosaic_gpu, "merge_programs", programs)
        monkeypatch.setattr(mosaic_gpu, "launch", lambda *given: (programs(*given), stages))

    float32 = TOLERANCE["float32"]

    def near(self, got, want, case, dtype, *, of=None):
        # Two calls round the sources' gradients twice.
        calls = 2 if case == TWICE and dtype == case.dtype else 1
        assert_close(got, want, calls * TOLERANCE[dtype])


@interpreted
@pytest.mark.slow
@SHARED
class TestKernels(Interpreted):
    module = mosaic_gpu
    cases = (PRIOR, ADDED, TWICE, PLAIN)
    alone = (PRIOR._replace(prior=False), PLAIN)
    nothing = 1e-30
    merges = (
        MergeCase((7,), (200,), "layernorm", "float32"),
        MergeCase((3,), (256,), "rmsnorm", "bfloat16"),
    )

    def test_partial_and_its_gradients(self, case, monkeypatch):
        if case == TWICE:  # two calls add up the sources' gradients
            monkeypatch.setattr(mosaic_gpu, "MOST_SITES", 3)
            monkeypatch.setattr(mosaic_gpu_kernels, "REGISTERS", 4)
        super().test_partial_and_its_gradients(case)


@interpreted
@pytest.mark.slow
@SHARED
class TestMatrices(Interpreted):
    module = MatricesAsVectors(mosaic_gpu)
    cases = (Case(2, 2, (2, 3), (16, 8), 2, "bfloat16"),)
    alone = ()
    merges = (MergeCase((1, 3), (16, 8), None, "float32"),)


@interpreted
@pytest.mark.slow
@SHARED
def test_a_token_of_nan_leaves_the_others_alone(monkeypatch):
    """A slot's padding stays 0."""
    monkeypatch.setattr(mosaic_gpu, "launch", lambda sizes, scratch: (1, 1))
    monkeypatch.setattr(mosaic_gpu, "merge_programs", lambda sizes, scratch: 1)
    given = Interpreted().sources(PRIOR._replace(prior=False))
    given.sources[:, 1] = np.nan
    mixed, log_sums = battery.partial(mosaic_gpu, OPTIONS, given)
    scored = PartialCotangents(log_sums, None, np.ones_like(mixed), None)
    _, gradients = battery.partial_backward(mosaic_gpu, OPTIONS, given, scored)
    query, gain = given.queries[0], np.ones(200, "float32")
    site = np.int32(0), given.sources[0], np.bool(True), gain
    merge = Merge(query, mixed, np.nan_to_num(log_sums[0]), *site)
    norms = ("norm", "layernorm"), ("norm_epsilon", EPSILON)
    cotangents = MergeCotangents(given.sources[0], mixed, given.sources[0])
    z, got = battery.merge_both_ways(mosaic_gpu, (*OPTIONS, *norms), merge, cotangents)
    for values in (mixed, gradients[:2], z, got.current, got.mixed[0]):
        finite = np.isfinite(values).all(axis=-1)
        assert not finite[..., 1].any() and np.delete(finite, 1, axis=-1).all()


@interpreted
@pytest.mark.slow
@SHARED
def test_an_empty_prior_has_no_weight():
    given = Interpreted().sources(PRIOR)
    mixed, log_sums = battery.partial(mosaic_gpu, OPTIONS, given._replace(prior=None))
    empty = np.full_like(mixed, np.nan), np.full_like(log_sums, -np.inf)
    again = battery.partial(mosaic_gpu, OPTIONS, given._replace(prior=empty))
    jax.tree.map(np.testing.assert_array_equal, again, (mixed, log_sums))


@interpreted
@pytest.mark.slow
@SHARED
@pytest.mark.parametrize("accumulate", [True, False])
def test_no_source_is_nothing(accumulate):
    given = Interpreted().sources(Case(2, 2, (3,), (128,), 0, "float32"))
    mixed, log_sums = battery.partial(mosaic_gpu, OPTIONS, given)
    np.testing.assert_array_equal(mixed, 0)
    np.testing.assert_array_equal(log_sums, -np.inf)
    added = np.full_like(given.sources, 3) if accumulate else None
    scored = PartialCotangents(log_sums, np.zeros_like(log_sums), np.ones_like(mixed), added)
    d_queries, d_sources = battery.partial_backward(mosaic_gpu, OPTIONS, given, scored)
    np.testing.assert_array_equal(d_queries, 0)
    np.testing.assert_array_equal(d_sources, 3 if accumulate else 0)


@interpreted
@pytest.mark.slow
@SHARED
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_a_merge_and_a_read_equal_plain_jax(norm):
    K, V, P, tokens = 64, 32, 8, (1, 3)
    draw = functools.partial(battery.draw, dtype="bfloat16")
    mixed, current = draw(0, 2, *tokens, K, V), draw(1, *tokens, K, V)
    query = battery.draw(2, K, V) / np.float32(np.sqrt(K * V))
    of_merge = Merge(query, mixed, battery.draw(3, *tokens), np.int32(1), current, np.bool(True))
    keys = battery.draw(4, P, K) / np.float32(np.sqrt(K))
    given = MergeRead(of_merge, 1 + 0.1 * battery.draw(5, K, V), keys)
    given = jax.tree.map(jnp.asarray, given)
    cotangents = MergeCotangents(draw(6, *tokens, P, V), mixed, current)
    cotangents = jax.tree.map(jnp.asarray, cotangents)
    norms = {"norm": norm, "epsilon": EPSILON}
    more = {"norm_epsilon": EPSILON, "dtype": jnp.bfloat16}
    want, statistics = XLA.merge_read(given, **norms, **more)
    got, of_kernel = MOSAIC_GPU.merge_read(given, **norms, **more, interpret=True)
    assert_close(got, want, TOLERANCE["bfloat16"])
    assert_close(of_kernel.both, statistics.both, TOLERANCE["bfloat16"])
    want = XLA.merge_read_backward(given, statistics, cotangents, **norms)
    got = MOSAIC_GPU.merge_read_backward(given, statistics, cotangents, **norms, interpret=True)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(mine, theirs, TOLERANCE["bfloat16"])


# Which calls it supports -------------------------------------------------------------------------


def test_what_is_unsupported_is_said():
    given, scored = ALL_SITES.partial((64,)), ALL_SITES.partial_cotangents((64,))
    why = lambda **other: mosaic_gpu.unsupported("partial", given._replace(**other))
    array = jax.ShapeDtypeStruct
    assert why() is None
    assert mosaic_gpu.unsupported("partial_backward", given, scored) is None
    assert "float16" in why(sources=array((9, 64, 2048), "float16"))
    assert "empty" in why(sources=array((9, 0, 2048), "bfloat16"))
    assert "no site" in why(queries=array((0, 2048), "float32"))
    assert "2044 entries" in why(sources=array((9, 64, 2044), "bfloat16"))
    assert "32768 entries" in why(sources=array((9, 64, 32768), "bfloat16"))
    assert "60 sources of 2048" in why(sources=array((60, 64, 2048), "bfloat16"))
    wide = scored._replace(d_mixed=array(scored.d_mixed.shape, "float32"))
    assert "bfloat16 and of float32" in mosaic_gpu.unsupported("partial_backward", given, wide)
    merge, cotangents = ALL_SITES.merge_backward((64,))
    assert mosaic_gpu.unsupported("merge", merge) is None
    assert mosaic_gpu.unsupported("merge_backward", merge, cotangents) is None
    wide = cotangents._replace(z=array(cotangents.z.shape, "float32"))
    assert "float32" in mosaic_gpu.unsupported("merge_backward", merge, wide)


@pytest.mark.parametrize("kind", ["NVIDIA H100 80GB HBM3", "NVIDIA B200", "NVIDIA A100-SXM4-40GB"])
def test_gpus_without_the_copy_engine_are_refused(kind):
    with lowering_for(kind):
        why = mosaic_gpu.unsupported("partial", ALL_SITES.partial((64,)))
    assert (why is None) == ("A100" not in kind)
    assert why is None or (kind in why and "9.0 or 10.0" in why)


# Which implementation runs -----------------------------------------------------------------------


def lowered(implementation, D=64):
    """Return whether a program for a GPU has kernels of Mosaic GPU, and whether of Triton."""
    f = functools.partial(depth_attention, implementation=implementation)
    array = jax.ShapeDtypeStruct
    program = cuda.lowered(f, array((D,), "float32"), array((3, 4, D), "bfloat16"))
    return "mosaic_gpu" in program, "triton" in program


def test_runs_only_on_request():
    assert lowered(None) == (False, False)
    assert lowered("pallas") == (False, True)
    assert lowered("mosaic_gpu") == (True, False)
    with preferring("mosaic_gpu"):
        assert lowered(None) == (True, False)
        assert lowered(None, D=12) == (False, True)
    with pytest.raises(UnsupportedImplementation, match="'mosaic_gpu' does not support.*12"):
        lowered("mosaic_gpu", D=12)


def test_a_merge_and_a_read_are_two_kernels():
    """The op that computes both takes the kernels of the two if they support the call."""
    array = jax.ShapeDtypeStruct
    vector, matrix = array((2, 4, 64, 32), "bfloat16"), array((64, 32), "float32")
    keys = array((8, 64), "float32")

    def run(mixed, log_sums, current, query, gain, keys):
        read = functools.partial(depth_attention_merge_read, implementation="mosaic_gpu")
        return read(mixed, log_sums, 0, current, query, gain, keys)[2]

    sums = array((2, 4), "float32")
    mixed = array((3, 2, 4, 64, 32), "bfloat16")
    program = cuda.lowered(run, mixed, sums, vector, matrix, matrix, keys)
    assert "depth_attention_merge" in program and "key_vector_read" in program
    with pytest.raises(UnsupportedImplementation, match="key vectors is 9"):
        keys = array((9, 64), "float32")
        cuda.lowered(run, mixed, sums, vector, matrix, matrix, keys)


# Compilation -------------------------------------------------------------------------------------

# A width that is padded on chip, and residual matrices of 64 x 64, whose sites take several calls.
PADDED, MATRICES = Depth(6, 9, 1264), Depth(6, 9, 4096)


def calls(size):
    """Every op at this size, with the shapes of its arguments."""
    tokens, epsilon = (8192,), {"epsilon": EPSILON}
    given, scored = size.partial(tokens), size.partial_cotangents(tokens)
    yield functools.partial(mosaic_gpu.partial, **epsilon), (size.partial(tokens, prior=True),)
    backward = functools.partial(mosaic_gpu.partial_backward, **epsilon)
    yield backward, (given, scored)
    yield backward, (given, scored._replace(delta=None, accumulate=None))
    options = {"norm": "layernorm", "norm_epsilon": EPSILON, **epsilon}
    merge = size.merge_backward(tokens)
    yield functools.partial(mosaic_gpu.merge, **options), merge[:1]
    yield functools.partial(mosaic_gpu.merge_backward, **options), merge


SIZES = {"one": ONE_SITE[0], "all": ALL_SITES, "padded": PADDED, "matrices": MATRICES}
QUICK = [("matrices", "sm_90"), ("padded", "sm_100")]


def compile_calls(size, target):
    """Compile every op."""
    for call, args in calls(SIZES[size]):
        cuda.compiled(call, *args, target=target)


@pytest.mark.compile
def test_calls_at_the_limit_of_shared_memory_compile():
    """The largest number of sources that is supported lowers, and one more is not supported."""
    of = lambda N: Depth(16, N, 2048).partial((64,))
    supports = lambda N: mosaic_gpu.unsupported("partial", of(N)) is None
    most = max(N for N in range(20, 60) if supports(N))
    assert 20 < most < 59 and not supports(most + 1)
    assert "mosaic_gpu" in cuda.lowered(
        functools.partial(mosaic_gpu.partial, epsilon=EPSILON), of(most)
    )


@pytest.mark.compile
@pytest.mark.parametrize(
    "size, target",
    [
        pytest.param(size, target, marks=() if (size, target) in QUICK else pytest.mark.slow)
        for size in SIZES
        for target in ("sm_90", "sm_100")
    ],
)
def test_compiles_without_spilling(size, target):
    found = cuda.usage(f"{__name__}:compile_calls({size!r}, {target!r})", target)
    names = "partial", "backward", "merge", "merge_backward"
    assert {*found} == {f"depth_attention_{name}" for name in names}
