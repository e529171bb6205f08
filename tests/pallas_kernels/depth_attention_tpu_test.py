"""TPU kernels of depth attention: in interpret mode against float64, and compiled for TPUs.

Tolerances. Scores and sums are float32's: 2^-24 of what is added up, over sums of a few hundred
terms. A bfloat16 result is off by 2^-8 of itself for its rounding, and by 2^-15 of what was mixed
for weights of 16 bits, or by 2^-9 for weights that are bfloat16's. A float32 result has the float32
products' error only.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels import shapes
from pallas_kernels.depth_attention import mosaic_tpu, mosaic_tpu_matrices
from pallas_kernels.depth_attention.interface import MergeCotangents, Partial, PartialCotangents
from pallas_kernels.depth_attention.mosaic_tpu import BlockSizes
from pallas_kernels.platform import UnsupportedImplementation
from pallas_kernels.shapes import Depth
from pallas_kernels.target import lowering_for, target
from tests.closeness import float64
from tests.pallas_kernels import depth_attention_battery as battery
from tests.pallas_kernels import plain
from tests.pallas_kernels.depth_attention_battery import (
    EPSILON,
    NORM_EPSILON,
    Battery,
    Case,
    MergeCase,
    draw,
)
from tests.tiers import later
from tests.tpu import placed_on

FLOAT32 = 5e-6
# Their mixes take more VMEM than their sources.
MANY_SITES = Depth(24, 2, 2048)


# Compiled as one: op by op takes longer.
def partial(*args, **options):
    return battery.partial(mosaic_tpu, tuple(options.items()), Partial(*args))


def partial_backward(*args, **options):
    given = Partial(*args[:3]), PartialCotangents(*args[3:])
    return battery.partial_backward(mosaic_tpu, tuple(options.items()), *given)


# Tests that run the programs of TWO.
TWO_CHUNKS = pytest.mark.xdist_group("depth attention, two chunks")


def case_of(S, N, T, D, count, dtype, tokens=128, **flags):
    lanes = 128 if flags.get("prior") else 512  # one step of a product, or two
    blocks = BlockSizes(tokens, lanes, weight_pieces=2 if S <= 3 else 1)
    return Case(S, N, (T,), (D,), count, dtype, **flags, blocks=blocks)


# One of two chunks of sources, a last tile of 32 tokens.
TWO = case_of(1, 18, 80, 128, 9, "bfloat16", tokens=48)


def assert_near(got, want, dtype, *, of=None, weights=2.0**-15):
    """`of`: the largest value that was mixed, with weights that are so far off."""
    got, want = float64((got, want))
    of = np.max(np.abs(want), initial=0) if of is None else of
    bound = FLOAT32 * of
    if dtype == "bfloat16":
        bound = weights * of + 2.0**-8 * np.abs(want)
    np.testing.assert_array_less(np.abs(got - want), bound + 1e-30)


class TestKernels(Battery):
    module = mosaic_tpu
    float32 = FLOAT32
    accumulator = "float32"
    # With a prior or without, added to or not, one chunk of sources or two; at night also float32,
    # weights of one piece, no active source, and a single token.
    cases = (
        case_of(3, 5, 130, 256, 3, "bfloat16", prior=True, accumulate=True),
        pytest.param(TWO, marks=TWO_CHUNKS),
        *later(
            (case_of(2, 17, 20, 128, 17, "float32", prior=True),),
            (case_of(8, 9, 20, 128, 9, "bfloat16", accumulate=True, tokens=16),),
            (case_of(2, 3, 20, 128, 0, "bfloat16", prior=True, accumulate=True),),
            (case_of(1, 3, 24, 200, 3, "bfloat16"),),
            (case_of(1, 10, 7, 128, 10, "bfloat16", accumulate=True),),
            (case_of(1, 2, 1, 128, 2, "float32", accumulate=True),),
        ),
    )
    alone = (
        pytest.param(TWO, marks=TWO_CHUNKS),
        *later(
            (case_of(3, 4, 20, 128, 4, "bfloat16"),),
            (case_of(3, 4, 20, 128, 4, "float32"),),
        ),
    )
    merges = (
        MergeCase((130,), (200,), "layernorm", "bfloat16", BlockSizes(48)),
        MergeCase((40,), (128,), "rmsnorm", "float32", BlockSizes(48)),
        MergeCase((70,), (200,), None, "bfloat16", BlockSizes(48)),
        *later((MergeCase((1,), (256,), "rmsnorm", "bfloat16", BlockSizes(48)),)),
    )

    def near(self, got, want, case, dtype, *, of=None):
        weights = {2: 2.0**-15, 1: 2.0**-9}[case.blocks.weight_pieces]
        assert_near(got, want, dtype, of=of, weights=weights)


@TWO_CHUNKS
def test_large_scores_are_as_exact_as_float32():
    # Scores near 60, none of which cancels to little, and the negatives of such: of one chunk, and
    # of the other in every second token, so that their largest is needed.
    case = TWO
    query = 0.5 * draw(27, 1, case.size[0])
    sign = np.where(
        (np.arange(case.N)[:, None] < 16) == (np.arange(case.tokens[0]) % 2 == 0), 1, -1
    )
    sources = sign[..., None] * (query[0] + 0.05 * draw(1, case.N, case.tokens[0], case.size[0]))
    sources = sources.astype(case.dtype)
    options = {"epsilon": EPSILON, "interpret": True, "block_sizes": case.blocks}
    mixed, log_sums = partial(query, sources, np.int32(case.N), None, **options)
    zeros = np.zeros(mixed.shape), np.zeros(log_sums.shape)
    (want, want_sums), _ = plain.partial(query, sources, None, zeros, epsilon=EPSILON)
    assert np.min(want_sums) > 50
    np.testing.assert_allclose(log_sums, want_sums, rtol=1e-6)
    assert_near(mixed, want, case.dtype, of=np.max(np.abs(float64(sources))))


def run_with_count(case, count):
    """By the programs of `case`: sources, mixes, log sums, their cotangents, and gradients."""
    queries, sources, *_ = TestKernels().sources(case)
    sources[count:] = np.nan
    args = queries, sources, np.int32(count)
    options = {"epsilon": EPSILON, "interpret": True, "block_sizes": case.blocks}
    mixed, log_sums = partial(*args, None, **options)
    d_mixed, zeros = draw(2, *mixed.shape, dtype=case.dtype), np.zeros_like(log_sums)
    gradients = partial_backward(*args, log_sums, zeros, d_mixed, None, **options)
    return sources, mixed, log_sums, d_mixed, gradients


@TWO_CHUNKS
def test_no_source():
    _, mixed, log_sums, _, gradients = run_with_count(TWO, 0)
    assert not np.any(float64(mixed)) and np.all(log_sums == -np.inf)
    assert not any(np.any(g) for g in float64(gradients))


@TWO_CHUNKS
def test_backward_twice_is_the_same_bits():
    case = TWO
    queries, sources, count, _ = TestKernels().sources(case)
    d_mixed, d_log_sums = draw(1, 1, 80, 128, dtype="bfloat16"), draw(2, 1, 80)
    active = sources[: case.count]
    cotangents = d_mixed, d_log_sums
    (_, log_sums), _ = plain.partial(queries, active, None, cotangents, epsilon=EPSILON)
    args = (queries, sources, count, log_sums.astype(np.float32), d_log_sums, d_mixed, None)
    options = {"epsilon": EPSILON, "interpret": True, "block_sizes": case.blocks}
    first, second = (partial_backward(*args, **options) for _ in range(2))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(*float64((a, b))), first, second)


def mix(queries, sources, count):
    given = Partial(queries, sources, count)
    return mosaic_tpu.partial(given, epsilon=EPSILON, interpret=True)[0]


def plain_mix(queries, sources):
    S, (_, T, D) = len(queries), sources.shape
    zeros = np.zeros((S, T, D)), np.zeros((S, T))
    return plain.partial(queries, sources, None, zeros, epsilon=EPSILON)[0][0]


def test_shard_map_over_tokens():
    queries, sources = draw(0, 2, 128) / np.float32(np.sqrt(128)), draw(1, 3, 64, 128)
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    specs = (P(), P(None, "x"), P())
    sharded = jax.shard_map(mix, mesh=mesh, in_specs=specs, out_specs=P(None, "x"), check_vma=False)
    got = jax.jit(sharded)(queries, sources, np.int32(2))
    np.testing.assert_allclose(got, plain_mix(queries, sources[:2]), rtol=1e-5, atol=1e-6)


def test_what_is_not_served():
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    query, count = array("float32", 1, 128), array("int32")
    ask = lambda sources: mosaic_tpu.unsupported("partial", Partial(query, sources, count))
    large = array("bfloat16", 20000, 64, 128)
    assert ask(array("bfloat16", 9, 64, 128)) is None
    assert "neither bfloat16 nor float32" in ask(array("float16", 9, 64, 128))
    assert "do not fit in VMEM" in ask(large)
    with pytest.raises(UnsupportedImplementation, match="do not fit in VMEM; use 'xla'"):
        jax.eval_shape(mix, query, large, count)


def test_a_prior_in_float32_takes_more_vmem():
    size, given = MANY_SITES, MANY_SITES.partial((512,), prior=True)
    mixed, log_sums = given.prior
    as_wide = given._replace(prior=(jax.ShapeDtypeStruct(mixed.shape, "float32"), log_sums))

    def tokens(given):
        return mosaic_tpu._call_of("partial", given, EPSILON, None, False).blocks.tokens

    with lowering_for("TPU v5 lite"):
        narrow, wide = map(tokens, (given, as_wide))
        limit = target().vmem_limit
    bytes_of = lambda of_prior: 2 * size.D * ((size.N + size.S) * 2 + size.S * of_prior)
    assert wide < narrow and wide * bytes_of(4) < limit < narrow * bytes_of(4)


def flops_of(function, *given):
    """The FLOPs that the calls of kernels state."""

    text = str(jax.make_jaxpr(function)(*given))
    return sum(map(int, re.findall(r"CostEstimate\(flops=(\d+)", text)))


@pytest.mark.parametrize("module, size", [(mosaic_tpu, (256,)), (mosaic_tpu_matrices, (16, 16))])
def test_the_backward_pass_has_five_products(module, size):
    """Each site and source has five: the logits, <d_mixed, v>, two of d_v, one of d_queries."""
    S, N, T, D = 2, 3, 256, 256
    tokens = (T,) if len(size) == 1 else (1, T)
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    sources, mixed = (array("bfloat16", n, *tokens, *size) for n in (N, S))
    given = Partial(array("float32", S, *size), sources, array("int32"))
    scored = PartialCotangents(array("float32", S, *tokens), None, mixed, None)
    for op, args, products in ("partial", (), 2), ("partial_backward", (scored,), 5):
        found = flops_of(functools.partial(getattr(module, op), epsilon=EPSILON), given, *args)
        assert found == 2 * products * S * N * T * D


@pytest.mark.parametrize("op", ["partial", "partial_backward"])
def test_a_tile_of_few_sources_is_larger(op):
    """If it has as many tokens, and fits."""
    rule = lambda S, N, T, D: mosaic_tpu.default_block_sizes(op, N, S, T, D, "bfloat16")
    few, many = rule(1, 4, 8192, 896), rule(1, 5, 8192, 896)
    assert (few.tokens, few.unroll, many.tokens, many.unroll) == (256, 16, 128, 8)
    assert rule(3, 4, 8192, 896).tokens == rule(1, 4, 256, 896).tokens == 128
    assert rule(1, 4, 8192, 9216).tokens < 256
    with lowering_for("TPU v5"):
        assert rule(3, 9, 8192, 896).unroll == (4 if op == "partial" else 8)
    with lowering_for("TPU v6 lite"):
        assert rule(8, 9, 8192, 896).unroll == rule(2, 9, 8192, 896).unroll == 8
        assert rule(9, 9, 8192, 896).unroll == (4 if op == "partial" else 8)


# Compilation for TPUs that are not there -------------------------------------------------------


def compile_both(topology, size, T, dtype):
    S, N, D = size

    def options(op):
        # As chosen, but unrolled, which takes long to compile.
        blocks = mosaic_tpu.choose_block_sizes(op, N, S, T, D, dtype)
        return {"epsilon": EPSILON, "block_sizes": dataclasses.replace(blocks, unroll=1)}

    def both(given, scored, added):
        out = mosaic_tpu.partial(given, **options("partial"))
        scored = scored._replace(accumulate=added)
        return out, mosaic_tpu.partial_backward(given, scored, **options("partial_backward"))

    shapes_of = size.partial((T,), dtype), size.partial_cotangents((T,), dtype)
    given, scored = placed_on(topology, shapes_of)
    args = given, scored._replace(accumulate=None), scored.accumulate
    return jax.jit(both, donate_argnums=2).lower(*args).compile()


@pytest.mark.compile
@pytest.mark.parametrize(
    "topology, size, T, dtype",
    [
        ("v5e:2x2", shapes.OVER_BLOCKS, 8192, "bfloat16"),
        ("v5p:2x2x1", shapes.OVER_WIDE, 8192, "bfloat16"),
        ("v6e:2x2", shapes.OVER_SUBLAYERS, 8192, "bfloat16"),
        ("v5p:2x2x1", shapes.ALL_SITES, 8192, "bfloat16"),
        ("v5e:2x2", Depth(3, 18, 200), 1000, "bfloat16"),
        ("v6e:2x2", Depth(16, 5, 256), 130, "float32"),
        ("tpu7x:2x2x1", shapes.OVER_BLOCKS, 1024, "bfloat16"),
        pytest.param("tpu7x:2x2x1", Depth(1, 4, 7168), 512, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_partial_compiles(topology, size, T, dtype):
    compiled, D = compile_both(topology, size, T, dtype), size.D
    text = compiled.as_text()
    for name in ("depth_attention_partial", "depth_attention_partial_backward"):
        assert re.search(rf"custom-call.*{name}", text), name
    if T % 16 == 0 and D % 128 == 0:
        # No copy of the sources, nor of a row of them.
        row = T * D * jnp.dtype(dtype).itemsize
        assert compiled.memory_analysis().temp_size_in_bytes < row


@pytest.mark.compile
def test_a_prior_leaves_room_for_temporaries_on_v4():
    size, options = Depth(8, 9, 2048), {"epsilon": EPSILON}
    given = placed_on("v4:2x2x1", size.partial((8192,), prior=True))
    with lowering_for("TPU v4"):
        compiled = jax.jit(lambda x: mosaic_tpu.partial(x, **options)).lower(given).compile()
    assert re.search("custom-call.*depth_attention_partial", compiled.as_text())


@pytest.mark.compile
def test_partial_with_a_prior_in_float32_compiles():
    given = placed_on("v5e:2x2", MANY_SITES.partial((512,), prior=True))
    mixed, log_sums = given.prior
    prior = jax.ShapeDtypeStruct(mixed.shape, "float32", sharding=mixed.sharding), log_sums
    text = compile_partial(given._replace(prior=prior)).as_text()
    assert re.search("custom-call.*depth_attention_partial", text)


def compile_partial(given):
    S, (N, T, D) = len(given.queries), given.sources.shape
    sizes = N, S, T, D, given.sources.dtype.name, "float32"
    with lowering_for("TPU v5 lite"):
        # As chosen, but unrolled, which takes long to compile.
        blocks = mosaic_tpu.default_block_sizes("partial", *sizes)
        blocks = dataclasses.replace(blocks, unroll=1)
        options = {"epsilon": EPSILON, "block_sizes": blocks}
        return jax.jit(lambda x: mosaic_tpu.partial(x, **options)).lower(given).compile()


@pytest.mark.compile
@pytest.mark.parametrize(
    "topology, T, D, norm",
    [
        ("v5e:2x2", 8192, 2048, "layernorm"),
        ("v5e:2x2", 8192, 768, None),
        ("v5p:2x2x1", 7, 7168, "layernorm"),
        ("v6e:2x2", 1, 1024, "layernorm"),
        ("v6e:2x2", 1000, 200, "layernorm"),
        ("tpu7x:2x2x1", 1024, 2048, "layernorm"),
        ("tpu7x:2x2x1", 1000, 2048, None),
    ],
)
def test_merge_compiles(topology, T, D, norm):
    options = {"norm": norm, "epsilon": EPSILON, "norm_epsilon": NORM_EPSILON}

    def both(given, d_mixed):
        z = mosaic_tpu.merge(given, **options)
        return z, mosaic_tpu.merge_backward(given, MergeCotangents(z, d_mixed, z), **options)

    given = placed_on(topology, Depth(4, 1, D).merge((T,)))
    given = given if norm else given._replace(norm_gain=None)
    compiled = jax.jit(both, donate_argnums=1).lower(given, given.mixed).compile()
    text = compiled.as_text()
    for name in ("merge", "merge_backward"):
        assert re.search(rf"custom-call.*depth_attention_{name}", text), name
    if D % 128 == 0 and T % 16 == 0:
        # A site's row is put in its place.
        assert compiled.memory_analysis().temp_size_in_bytes < 2 * T * D * 2
