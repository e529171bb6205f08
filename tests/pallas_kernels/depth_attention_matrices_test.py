"""TPU kernels of depth attention over residual matrices: interpreted against float64, and compiled.

Tolerances. Scores, weights and sums are float32's, so that a bfloat16 result is off by the rounding
of itself, 2^-8, and by 2^-15 of the largest for a product of queries and scores' gradients, which
lacks 2^-16; a part of the mix that is rounded between two kernels adds 2^-8 of what was mixed.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.depth_attention import mosaic_tpu_matrices, mosaic_tpu_merge_read
from pallas_kernels.depth_attention.interface import (
    Merge,
    MergeCotangents,
    MergeRead,
    Partial,
    PartialCotangents,
)
from pallas_kernels.depth_attention.mosaic_tpu_matrices_kernels import MatricesCall
from pallas_kernels.key_vector.interface import Statistics
from pallas_kernels.target import lowering_for, target
from tests.closeness import assert_close, float64
from tests.pallas_kernels import plain
from tests.pallas_kernels.depth_attention_battery import (
    EPSILON,
    Battery,
    Case,
    MergeCase,
    draw,
    per_token,
    vectors,
)
from tests.tiers import later
from tests.tpu import place_on

FLOAT32 = 5e-6
NO_NORM = {"norm": None, "norm_epsilon": 1e-6}


def case_of(S, N, B, T, K, V, count, dtype, prior=False, accumulate=False):
    return Case(S, N, (B, T), (K, V), count, dtype, prior, accumulate)


# A last tile of 2 tokens and keys that fill no tile.
RAGGED = case_of(3, 4, 1, 130, 8, 48, 3, "bfloat16")
FLOAT = case_of(1, 3, 2, 128, 16, 8, 2, "float32", True, True)


# Sizes of a merge and a read, whose forward pass fits, and why the backward pass is refused.
REFUSED = [
    (4096, 4, 1024, "a tile of tokens does not fit in VMEM"),
    (1, 128, 8, "keys of one entry with bfloat16 data"),
]


@pytest.mark.xdist_group("kernels of depth attention over matrices")
class TestKernels(Battery):
    module = mosaic_tpu_matrices
    float32 = FLOAT32
    accumulator = "float32"
    nothing = 1e-3
    # Then a prior and an accumulator in float32, with some sources and, by the same program, with
    # none; at night also bfloat16 and more sites than one kernel takes.
    cases = (
        RAGGED,
        FLOAT,
        FLOAT._replace(count=0),
        *later(
            (FLOAT._replace(dtype="bfloat16"),),
            (case_of(2, 3, 1, 256, 16, 8, 0, "bfloat16", True, True),),
            (case_of(9, 18, 1, 200, 4, 32, 17, "bfloat16", False, True),),
            (case_of(2, 5, 3, 130, 32, 8, 5, "float32", True, True),),
        ),
    )
    alone = (RAGGED,)
    merges = (
        MergeCase((1, 130), (8, 48), None, "bfloat16"),
        *later((MergeCase((1, 130), (8, 48), None, "float32"),)),
    )

    def near(self, got, want, case, dtype, *, of=None):
        """A mix, or its gradient, of several kernels is rounded between two of them."""
        parts = isinstance(case, Case) and (case.S > 8 if of is None else case.N > 16)
        got, want = float64((got, want))
        of = np.max(np.abs(want), initial=0) if of is None else of
        bound = FLOAT32 * of
        if dtype == "bfloat16":
            bound = 2.0**-15 * of + 2.0**-8 * np.abs(want) + parts * 2.0**-8 * of
        np.testing.assert_array_less(np.abs(got - want), bound + 1e-30)


@pytest.mark.parametrize(
    "T, K, norm, dtype, chip",
    [
        (130, 16, "layernorm", "bfloat16", "TPU v5 lite"),
        pytest.param(130, 16, "layernorm", "bfloat16", "TPU v5p", marks=pytest.mark.slow),
        pytest.param(300, 16, "rmsnorm", "float32", "TPU v5p", marks=pytest.mark.slow),
        pytest.param(300, 16, "rmsnorm", "float32", "TPU v6 lite", marks=pytest.mark.slow),
        # Rows of keys that fill no tile: two kernels each way.
        pytest.param(128, 24, "layernorm", "bfloat16", "TPU v5p", marks=pytest.mark.slow),
        pytest.param(130, 24, "rmsnorm", "float32", "TPU v5 lite", marks=pytest.mark.slow),
    ],
)
def test_merge_and_read_and_their_gradients(T, K, norm, dtype, chip):
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
    with lowering_for(chip):
        z, (got, got_keys) = run(*args, d_z, d_mixed, d_current)
    case = MergeCase((B, T), (K, V), norm, dtype)
    of_site = vectors(mixed[1], case), per_token(log_sums, case), vectors(current, case)
    merged = functools.partial(
        plain.merge, query.reshape(-1), *of_site, np.ones(K * V), active=True, **NO_NORM
    )
    h, _ = merged(np.zeros((B * T, K * V)), epsilon=EPSILON)
    h = h.astype(dtype).reshape(B, T, K, V)
    nothing = np.zeros((1, K)), np.zeros((B, T, 1, V))
    given = (h, *nothing, gain, read_keys), (np.zeros(h.shape), d_z)
    (_, want_z), (d_h, _, _, d_gain, d_keys) = plain.site(*given, **norms)
    _, want = merged(vectors(d_h, case), epsilon=EPSILON)

    assert z.dtype == dtype and got.current.dtype == dtype
    tolerance = {"bfloat16": 1e-2, "float32": 1e-5}[dtype]
    d_query, d_own, d_log_sums, d_sum, _ = want
    shaped = lambda x: x.reshape(B, T, K, V)
    assert_close(
        (z, *got._replace(mixed=got.mixed[1]), got_keys),
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


def test_a_read_that_does_not_fit_in_its_dtype_is_plain_jax():
    """No blocks fit a read of 192 float32 vectors into the VMEM of v4, but some fit in bfloat16."""
    K, V, P = 64, 64, 192
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    rows = array("bfloat16", 1, 2, 256, K, V), array("float32", 2, 256)
    of_site = array("bfloat16", 2, 256, K, V), array("float32", K, V)
    keys = array("float32", K, V), array("float32", P, K)

    def read(mixed, log_sums, *site):
        return pallas_kernels.depth_attention_merge_read(mixed, log_sums, 0, *site, dtype="float32")

    with lowering_for("TPU v4"):
        *_, z = jax.eval_shape(read, *rows, *of_site, *keys)
    assert (z.shape, z.dtype) == ((2, 256, P, V), jnp.float32)


def merge_of(K, V, mixed="bfloat16", tokens=(1, 256)) -> Merge:
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    rows, sums = array(mixed, 2, *tokens, K, V), array("float32", *tokens)
    current = array("bfloat16", *tokens, K, V)
    return Merge(array("float32", K, V), rows, sums, array("int32"), current, array("bool"))


def test_mixes_in_float32_take_more_vmem():
    def fits(K, V, mixed):
        return mosaic_tpu_matrices.unsupported("merge", merge_of(K, V, mixed)) is None

    def as_one(K, V, mixed):
        """The tokens of a tile, if the backward pass of merge and read is one kernel."""
        given, keys = merge_of(K, V, mixed), jax.ShapeDtypeStruct((8, K), jnp.float32)
        call = MatricesCall(0, 1, 1, 256, K * V, "bfloat16", EPSILON, False)
        options = jnp.bfloat16, "layernorm", 0.0
        read = mosaic_tpu_merge_read._read("backward", call, given, keys, *options)
        return read and read.blocks.tokens

    with lowering_for("TPU v5 lite"):
        assert fits(128, 128, "bfloat16") and not fits(128, 128, "float32")
        assert as_one(192, 64, "bfloat16") == 128 and as_one(192, 64, "float32") is None
        assert fits(192, 64, "float32")
        # A float32 prior counts as two sources.
        blocks = target().vmem_part(mosaic_tpu_matrices._BUDGET) // (2 * 4096 * 128 * 2)
        N, S = mosaic_tpu_matrices._parts(14, 4, 4096, jnp.bfloat16)
        assert N + 2 * S <= blocks < N + 3 * S
        N, S = mosaic_tpu_matrices._parts(14, 4, 4096, jnp.bfloat16, jnp.float32)
        assert N + 3 * S <= blocks


@pytest.mark.parametrize("K, V, P, why", REFUSED)
def test_what_is_refused_backward_is_known_before_it_is_traced(K, V, P, why):
    of_merge, like = merge_of(K, V), jax.ShapeDtypeStruct
    keys = like((K, V), jnp.float32), like((P, K), jnp.float32)
    given, statistics = MergeRead(of_merge, *keys), Statistics(like((1, 2, 256), jnp.float32))
    d_z = like((1, 256, P, V), jnp.bfloat16)
    cotangents = MergeCotangents(d_z, of_merge.mixed, of_merge.current)
    ask = mosaic_tpu_merge_read.unsupported
    with lowering_for("TPU v5 lite"):
        assert ask("merge_read", given, dtype=jnp.bfloat16) is None
        assert re.search(why, ask("merge_read_backward", given, statistics, cotangents))


def test_gradients_are_added_to_float32():
    """The sources are bfloat16. The battery compares the values of these gradients at night."""
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    S, N, rows, size = 1, 2, (1, 128), (16, 8)
    sources, sums = array("bfloat16", N, *rows, *size), array("float32", S, *rows)
    given = Partial(array("float32", S, *size), sources, array("int32"))
    d_mixed, added = array("bfloat16", S, *rows, *size), array("float32", N, *rows, *size)
    scored = PartialCotangents(sums, None, d_mixed, added)
    run = functools.partial(mosaic_tpu_matrices.partial_backward, epsilon=EPSILON, interpret=True)
    _, d_sources = jax.eval_shape(run, given, scored)
    assert d_sources.dtype == jnp.bfloat16


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

    def of_vectors(queries, sources, prior, current):
        prior = (prior[0].reshape(S, B, T, -1), prior[1])
        args = queries.reshape(S, -1), sources.reshape(N, B, T, -1), prior
        return run(*args, current.reshape(B, T, -1))

    args = (queries, sources, prior, current)
    grad = lambda f: jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2, 3), has_aux=True))
    (got, z), gradients = grad(run)(*args)
    (want, want_z), wanted = grad(of_vectors)(*args)
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
    assert "do not fit in VMEM" in ask(array("bfloat16", 9, 1, 128, 1024, 128))
    current = array("bfloat16", 1, 128, 16, 8)
    merge = Merge(query, array("bfloat16", 1, *current.shape), count, count, current, count, query)
    assert "norm_gain for matrices" in mosaic_tpu_matrices.unsupported("merge", merge)


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
    array = place_on(topology)

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
