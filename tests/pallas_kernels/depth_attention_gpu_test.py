"""The GPU kernels of depth attention: interpreted numbers, and the code for each GPU."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.depth_attention import triton_gpu
from pallas_kernels.depth_attention.interface import (
    Merge,
    MergeCotangents,
    Partial,
    PartialCotangents,
)
from pallas_kernels.depth_attention.triton_gpu import Blocks
from pallas_kernels.shapes import ALL_SITES, ONE_SITE, OVER_BLOCKS
from rmt_tpu.estimator.tuning import ptxas_usage
from tests import cuda
from tests.closeness import assert_close, float64
from tests.pallas_kernels import depth_attention_battery as battery
from tests.pallas_kernels import plain
from tests.pallas_kernels.depth_attention_battery import Battery, Case, MergeCase
from tests.tiers import later

# Many tests run the programs of a few cases.
SHARED = pytest.mark.xdist_group("depth attention kernels for GPU")

# Largest error allowed relative to the largest value. float32: sums of some hundred terms, each
# rounded by 2^-24, that partly cancel. bfloat16: the result is rounded, which is off by 2^-9 at
# most; it comes of a float32 sum over the very bfloat16 that the exact result is made of.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2.0**-8}
EPSILON = 1e-6
# N, T, S, D, active rows: sides that are and are not powers of two, and no multiples of tiles.
SHAPES = [
    (3, 7, 1, 200, 3),
    (5, 40, 3, 256, 3),
    (33, 2, 8, 128, 20),
    (4, 130, 1, 64, 2),
    (3, 1, 2, 300, 2),
    (2, 3, 3, 40, 2),
]
ADDED = (5, 7, 2, 200, 3)
# In parts of 128 entries, in which D is ragged; groups of 3 tokens.
PARTS = Blocks(rows=4, sites=1, tokens=3, columns=128, warps=4)


def draw(rng, shape, dtype="float32", scale=1.0):
    return (scale * rng.normal(size=shape)).astype(dtype)


def arguments(shape, dtype, seed=0):
    """Queries, sources, count, prior, and cotangents of mixed and of log_sums."""
    N, T, S, D, count = shape
    rng = np.random.default_rng(seed)
    queries = draw(rng, (S, D), scale=D**-0.5)
    sources = draw(rng, (N, T, D), dtype)
    sources[count:] = np.nan
    prior = draw(rng, (S, T, D), dtype), draw(rng, (S, T))
    cotangents = draw(rng, (S, T, D), dtype), draw(rng, (S, T))
    return queries, sources, np.int32(count), prior, cotangents


def options(blocks):
    return (
        ("epsilon", EPSILON),
        ("interpret", True),
        *((("block_sizes", blocks),) if blocks else ()),
    )


def partial(*args, blocks=None):
    return battery.partial(triton_gpu, options(blocks), Partial(*args))


def partial_backward(*args, blocks=None):
    given = Partial(*args[:3]), PartialCotangents(*args[3:])
    return battery.partial_backward(triton_gpu, options(blocks), *given)


def expected_of(queries, sources, count, prior, cotangents):
    """Mixed and log_sums, and the cotangents of queries, active sources and prior."""
    return plain.partial(queries, sources[:count], prior, cotangents, epsilon=EPSILON)


def case_of(shape, dtype, prior=False, blocks=None, accumulate=False):
    N, T, S, D, count = shape
    return Case(S, N, (T,), (D,), count, dtype, prior, accumulate, blocks)


# Of more sites than a call takes.
SEVERAL = case_of(SHAPES[5], "float32")


@SHARED
class TestKernels(Battery):
    module = triton_gpu
    float32 = TOLERANCE["float32"]
    # With a prior, in several calls and added to; the others at night.
    cases = (
        case_of(SHAPES[0], "float32", prior=True),
        SEVERAL,
        case_of(ADDED, "bfloat16", blocks=PARTS, accumulate=True),
        *later(
            (case_of(ADDED, "float32", blocks=PARTS, accumulate=True),),
            (case_of(ADDED, "bfloat16", accumulate=True),),
            (case_of(SHAPES[1], "float32", blocks=PARTS),),
            (case_of(SHAPES[1], "bfloat16", prior=True),),
            (case_of(SHAPES[0], "bfloat16", blocks=PARTS),),
            (case_of(SHAPES[2], "float32"),),
            (case_of(SHAPES[3], "bfloat16"),),
            (case_of(SHAPES[4], "float32", prior=True, blocks=PARTS),),
        ),
    )
    alone = (case_of(SHAPES[0], "float32"),)
    merges = (
        MergeCase((7,), (200,), "layernorm", "float32"),
        MergeCase((40,), (300,), "rmsnorm", "bfloat16", PARTS._replace(columns=512)),
        *later(
            (MergeCase((1,), (64,), "layernorm", "float32"),),
            (MergeCase((7,), (200,), "rmsnorm", "float32"),),
            (MergeCase((7,), (200,), "layernorm", "bfloat16", PARTS._replace(columns=256)),),
        ),
    )

    def options(self, case, op):
        # All of D is in a tile but in the backward pass of `partial`.
        return super().options(case._replace(blocks=None) if op == "partial" else case, op)

    def near(self, got, want, case, dtype, *, of=None):
        calls = 1 + (case == SEVERAL and dtype == case.dtype)
        assert_close(got, want, calls * TOLERANCE[dtype])

    def test_partial_and_its_gradients(self, case, monkeypatch):
        if case == SEVERAL:
            monkeypatch.setattr(triton_gpu, "MOST_SITES", 2)
        super().test_partial_and_its_gradients(case)


@SHARED
@pytest.mark.slow
@pytest.mark.parametrize("S, dtype", [(3, "bfloat16"), (1, "bfloat16"), (2, "float32")])
def test_one_source_is_given_back_bit_for_bit(S, dtype):
    shape = (*SHAPES[1][:2], 3, 256, 1) if S == 3 else (4, 5, S, 200, 1)
    queries, sources, count, _, cotangents = arguments(shape, dtype)
    mixed, log_sums = partial(queries, sources, count, None)
    for s in range(S):
        np.testing.assert_array_equal(mixed[s], sources[0])
    # So is a prior to no source, and to an empty prior there is no weight, whatever it holds.
    again, same = partial(queries, sources, np.int32(0), (mixed, log_sums))
    np.testing.assert_array_equal(again, mixed)
    np.testing.assert_array_equal(same, log_sums)
    empty = np.full_like(mixed, np.nan), np.full_like(log_sums, -np.inf)
    np.testing.assert_array_equal(partial(queries, sources, count, empty)[0], mixed)
    # Without a delta, weights are known to sum to 1.
    d_queries, d_sources = partial_backward(
        queries, sources, count, log_sums, None, cotangents[0], None
    )
    # Its weight does not depend on the query.
    np.testing.assert_array_equal(d_queries, 0)
    assert_close(d_sources[0], float64(cotangents[0]).sum(0), TOLERANCE[dtype])


@SHARED
def test_no_source_is_nothing():
    queries, sources, count, _, (d_mixed, _) = arguments((*SHAPES[1][:4], 0), "float32")
    mixed, log_sums = partial(queries, sources, count, None)
    np.testing.assert_array_equal(mixed, 0)
    np.testing.assert_array_equal(log_sums, -np.inf)
    zero = np.zeros(log_sums.shape, np.float32)
    args = (queries, sources, count, log_sums, zero, d_mixed, None)
    grads = partial_backward(*args, blocks=PARTS)
    jax.tree.map(lambda g: np.testing.assert_array_equal(g, 0), grads)

    queries, sources, count, _, (d_mixed, d_log_sums) = arguments((*ADDED[:4], 0), "bfloat16")
    nothing, kept = np.full_like(d_log_sums, -np.inf), np.ones_like(sources)
    args = (queries, sources, count, nothing, None, d_mixed, kept)
    np.testing.assert_array_equal(partial_backward(*args, blocks=PARTS)[1], kept)


@SHARED
def test_logits_far_apart_and_sources_of_any_size():
    queries, sources, count, _, cotangents = arguments((*SHAPES[1][:4], 5), "float32")
    for size in (1e3, 1e-3):
        args = 250 * queries, np.float32(size) * sources, count, None
        out, log_sums = partial(*args)
        (expected, expected_log_sums), _ = expected_of(*args, cotangents)
        # Weights are off by the error of logits, which are up to 1000.
        assert 300 < np.abs(expected_log_sums).max() < 1000
        assert_close(log_sums, expected_log_sums, TOLERANCE["float32"])
        assert_close(out, expected, 1e3 * 2.0**-22)


@SHARED
@pytest.mark.parametrize(
    "blocks",
    [pytest.param(PARTS, id="parts"), pytest.param(None, id="whole", marks=pytest.mark.slow)],
)
def test_gradients_are_the_same_bits_every_time_and_the_same_for_any_group(blocks):
    args = arguments(SHAPES[1] if blocks else (5, 13, 2, 200, 4), "float32")
    queries, sources, count, _, (d_mixed, d_log) = args
    (_, log_sums), _ = expected_of(*args[:3], None, args[4])
    args = (queries, sources, count, log_sums.astype(np.float32), -d_log, d_mixed, None)
    first, again = (partial_backward(*args, blocks=blocks) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    blocks = PARTS if blocks else Blocks(rows=2, sites=2, tokens=1, columns=256, warps=4)
    other = partial_backward(*args, blocks=blocks._replace(tokens=5))
    # Those of the queries are added up in another order.
    np.testing.assert_allclose(first[0], other[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(first[1], other[1])


# The second phase ------------------------------------------------------------------------------


SITES, SITE = 3, 1


def merge_arguments(T, D, dtype):
    """Query, mixed, log_sums, site, current and norm_gain; cotangents of z, mixed and current."""
    rng = np.random.default_rng(0)
    query = draw(rng, (D,), scale=2 * D**-0.5)
    mixed, current = draw(rng, (SITES, T, D), dtype), draw(rng, (T, D), dtype)
    gain = 1 + draw(rng, (D,), scale=0.1)
    cotangents = (draw(rng, size, dtype) for size in ((T, D), (SITES, T, D), (T, D)))
    return (query, mixed, draw(rng, (T,)), np.int32(SITE), current, gain), tuple(cotangents)


@functools.partial(jax.jit, static_argnames=("norm", "blocks"))
def merge(args, active, gain, cotangents, *, norm, blocks=None):
    """z, and all gradients."""
    options = {"norm": norm, "epsilon": EPSILON, "norm_epsilon": 1e-5}
    options |= {"interpret": True, "block_sizes": blocks}
    given = Merge(*args, active, gain)
    z = triton_gpu.merge(given, **options)
    return z, triton_gpu.merge_backward(given, MergeCotangents(*cotangents), **options)


@SHARED
def test_merge_with_nothing_or_almost_nothing_on_one_side():
    (*args, gain), cotangents = merge_arguments(7, 200, "float32")
    _, mixed, log_sums, _, current = args
    for log_sum in (-np.inf, -1e4, 1e4):
        args[2] = np.full_like(log_sums, log_sum)
        z, grads = merge(args, np.bool(True), gain, cotangents, norm="layernorm")
        alone = current if log_sum < 0 else mixed[SITE]
        expected = gain * plain.normed(float64(alone), -1, "layernorm", 1e-5)[0]
        assert_close(z, expected, TOLERANCE["float32"])
        np.testing.assert_array_equal(grads.log_sums, 0)
        if log_sum < 0:
            np.testing.assert_array_equal(grads.mixed[SITE], 0)
        else:
            np.testing.assert_array_equal(grads.current, cotangents[2])


# What is asked for -----------------------------------------------------------------------------


def test_what_is_unsupported_is_said():
    queries, sources, count, prior, (d_mixed, d_log) = arguments(SHAPES[0], "float32")
    why = lambda *others: triton_gpu.unsupported("partial", Partial(queries, *others))
    assert why(sources, count, prior) is None
    assert "float16" in why(sources.astype("float16"), count, None)
    assert "empty" in why(sources[:, :0], count, None)
    assert "16385" in why(jax.ShapeDtypeStruct((1, 1, 16385), jnp.float32), count, None)
    given, scored = Partial(queries, sources, count), PartialCotangents(d_log, None, d_mixed, None)
    assert triton_gpu.unsupported("partial_backward", given, scored) is None
    half = sources.astype("float16")
    added = scored._replace(accumulate=half)
    assert "float16" in triton_gpu.unsupported("partial_backward", given, added)
    x, gain = sources[0], queries[0]
    merge = Merge(gain, d_mixed, d_log[0], np.int32(0), x, np.bool(True), gain)
    assert triton_gpu.unsupported("merge", merge) is None
    cotangents = MergeCotangents(x, d_mixed, x)
    assert triton_gpu.unsupported("merge_backward", merge, cotangents) is None
    why = triton_gpu.unsupported("merge_backward", merge, cotangents._replace(z=half[0]))
    assert "float16" in why
    assert "float16" in triton_gpu.unsupported("partial", Partial(queries, half, count))


# Compilation -----------------------------------------------------------------------------------

SIZES = [*ONE_SITE, ALL_SITES]
QUICK = [(OVER_BLOCKS, "sm_80"), (ALL_SITES, "sm_90")]


def calls(size, dtype):
    """Every op at this size, with the shapes of its arguments, and its kernels' names."""
    tokens, epsilon = (8192,), {"epsilon": EPSILON}
    whole = functools.partial(triton_gpu.partial, **epsilon)
    backward = functools.partial(triton_gpu.partial_backward, **epsilon)
    split = not triton_gpu.fits(size.S, size.D)
    names = ["scores", "gradients"] if split else ["backward"]
    given, scored = size.partial(tokens, dtype), size.partial_cotangents(tokens, dtype)
    yield whole, (given,), ["partial"]
    yield whole, (size.partial(tokens, dtype, prior=True),), ["partial"]
    yield backward, (given, scored._replace(delta=None, accumulate=None)), names
    yield backward, (given, scored), names
    if size.S > 1:
        return
    options = {"norm": "layernorm", "norm_epsilon": EPSILON, **epsilon}
    merge = size._replace(S=8).merge_backward(tokens, dtype)
    yield functools.partial(triton_gpu.merge, **options), merge[:1], ["merge"]
    yield functools.partial(triton_gpu.merge_backward, **options), merge, ["merge_backward"]


@pytest.mark.parametrize("dtype, size", [("bfloat16", OVER_BLOCKS), *later(("float32", ALL_SITES))])
def test_lowers_for_cuda_without_one(dtype, size):
    for call, args, names in calls(size, dtype):
        program = cuda.lowered(call, *args)
        assert "triton" in program
        for name in names:
            assert f"depth_attention_{name}" in program


@pytest.mark.compile
@pytest.mark.parametrize(
    "size, target",
    [
        pytest.param(size, target, marks=() if (size, target) in QUICK else pytest.mark.slow)
        for size in SIZES
        for target in cuda.TARGETS
    ],
)
def test_compiles_for_each_gpu_without_spilling(size, target, tmp_path):
    for call, args, names in calls(size, "bfloat16"):
        program = cuda.ptx(call, *args, target=target, folder=tmp_path)
        kernels = ptxas_usage(program)
        kernels = {k: v for k, v in kernels.items() if k.startswith("depth_attention")}
        assert sorted(kernels) == sorted(f"depth_attention_{name}" for name in names)
        assert not any(use.spilled for use in kernels.values()), kernels
        assert re.search(r"ld\.global\S*\.v4\.", program), "sources come 16 bytes at a time"
