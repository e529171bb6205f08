"""The GPU kernels of the key-vector ops: interpreted numbers, and the code for each GPU."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compiler.tuning import ptxas_usage
from pallas_kernels.key_vector import triton_gpu
from pallas_kernels.key_vector.interface import (
    FRACTION_BITS,
    Site,
    Statistics,
    UnsupportedImplementation,
)
from pallas_kernels.key_vector.triton_gpu import Blocks
from tests import cuda
from tests.closeness import assert_close
from tests.pallas_kernels import plain
from tests.pallas_kernels.halves import Halves
from tests.pallas_kernels.plain import numbers

gpu = Halves(triton_gpu)

# Many tests run the programs of a few cases.
SHARED = pytest.mark.xdist_group("key-vector kernels for GPU")

# Largest error allowed relative to the largest value, by the data's dtype. float32: some thousand
# sums' rounding, 2^-24 each. bfloat16: outputs are rounded to 2^-9, from operands rounded to 2^-9.
TOLERANCE = {"float32": 4e-6, "bfloat16": 1e-2}
STEPS = 2.0**FRACTION_BITS
DTYPES = [("float32", "float32"), ("bfloat16", "bfloat16"), ("int16", "bfloat16")]
# B, N, K, V, R, P: sides that are and are not powers of two, below and above a tile's least 16.
WHOLE = (2, 3, 12, 48, 3, 7)
# Three chunks of 16 keys, the last ragged; groups of key vectors beyond 64.
CHUNKED = (1, 3, 40, 32, 20, 70)
CHUNKS = Blocks(keys=16, warps=4, stages=1, programs=2)
SHAPES = [(WHOLE, None), (CHUNKED, CHUNKS)]


def arguments(shape, dtypes, seed=0):
    """X, w, y, gain and r, and cotangents of X' and z."""
    B, N, K, V, R, P = shape
    residual, data = dtypes
    rng = np.random.default_rng(seed)
    draw = lambda size, dtype, scale=1.0: (scale * rng.normal(size=size)).astype(dtype)
    X = draw((B, N, K, V), "float32")
    X = np.round(STEPS * X).astype("int16") if residual == "int16" else X.astype(residual)
    args = (
        X,
        draw((R, K), "float32"),
        draw((B, N, R, V), data),
        1 + draw((K, V), "float32", 0.1),
        draw((P, K), "float32", K**-0.5),
    )
    cotangent = "bfloat16" if residual == "int16" else residual
    return args, (draw((B, N, K, V), cotangent), draw((B, N, P, V), data))


@functools.partial(jax.jit, static_argnames=("norm", "blocks"))
def forward(*args, norm, blocks=None):
    return gpu.store_norm_retrieve(*args, norm=norm, epsilon=1e-6, blocks=blocks, interpret=True)


@functools.partial(jax.jit, static_argnames=("norm", "blocks", "rebuild"))
def backward(*args, norm, blocks=None, rebuild=True):
    return gpu.backward(*args, norm=norm, rebuild=rebuild, blocks=blocks, interpret=True)


# Every shape and every norm once; the others at night.
QUICK = [
    (WHOLE, None, "rmsnorm", DTYPES[0]),
    (CHUNKED, CHUNKS, "layernorm", DTYPES[2]),
]


@SHARED
@pytest.mark.parametrize(
    "shape, blocks, norm, dtypes",
    [
        pytest.param(
            *(shape, blocks, norm, dtypes),
            id=f"{'chunked' if blocks else 'whole'}-{norm}-{dtypes[0]}",
            marks=() if (shape, blocks, norm, dtypes) in QUICK else pytest.mark.slow,
        )
        for (shape, blocks), norm, dtypes in itertools.product(
            SHAPES, ("layernorm", "rmsnorm"), DTYPES
        )
    ],
)
def test_op_and_gradients_equal_numpy(shape, blocks, norm, dtypes):
    args, cotangents = arguments(shape, dtypes)
    stored, retrieved, statistics = forward(*args, norm=norm, blocks=blocks)
    got = backward(stored, statistics, *args[1:], *cotangents, norm=norm, blocks=blocks)
    options = dict(norm=norm, epsilon=1e-6)
    (X, _), expected = plain.site(args, cotangents, **options)
    # Of what is stored, whose rounding is no error of the read.
    Z = plain.norm_retrieve(stored, *args[3:], **options)
    tolerance = TOLERANCE[dtypes[1]]
    assert stored.dtype == args[0].dtype and retrieved.dtype == args[2].dtype
    values = numbers(stored)
    assert_close(values, X, 2e-7 if dtypes[0] == "float32" else 4e-3)
    assert_close(retrieved, Z, tolerance)
    mean = values.mean((2, 3)) if norm == "layernorm" else np.zeros(values.shape[:2])
    # A few units of float32 of the values added up.
    spread = np.abs(values).max((2, 3))
    assert np.all(np.abs(statistics.mean - mean) <= 2e-7 * spread)
    variance = np.mean((values - mean[..., None, None]) ** 2, (2, 3))
    np.testing.assert_allclose(statistics.rstd, (variance + 1e-6) ** -0.5, rtol=2e-6)
    gradients = (got.residual, got.store_keys, got.data, got.gain, got.read_keys)
    assert_close(gradients, expected, tolerance)
    assert got.store_keys.dtype == got.gain.dtype == got.read_keys.dtype == jnp.float32
    if dtypes[0] == "int16":
        np.testing.assert_array_equal(got.rebuilt, args[0])
    else:
        assert_close(got.rebuilt, args[0], 1e-6 if dtypes[0] == "float32" else 2e-2)


@SHARED
@pytest.mark.parametrize(
    "dtypes", [DTYPES[2], pytest.param(DTYPES[1], marks=pytest.mark.slow)], ids="-".join
)
def test_halves_are_the_whole(dtypes):
    (X, w, y, gain, r), _ = arguments(CHUNKED, dtypes)
    run = dict(blocks=CHUNKS, interpret=True)
    stored = jax.jit(functools.partial(gpu.store, **run))(X, w, y)
    read = dict(norm="layernorm", epsilon=1e-6, dtype=y.dtype)
    norm_retrieve = jax.jit(functools.partial(gpu.norm_retrieve, **read, **run))
    retrieved, statistics = norm_retrieve(stored, gain, r)
    whole = forward(X, w, y, gain, r, norm="layernorm", blocks=CHUNKS)
    # Compiled apart, XLA on the CPU may add up in another order.
    np.testing.assert_allclose(numbers(stored), numbers(whole[0]), rtol=1e-6, atol=1e-6)
    assert_close(retrieved, whole[1], TOLERANCE[dtypes[1]])
    np.testing.assert_allclose(statistics.rstd, whole[2].rstd, rtol=1e-6)


@SHARED
@pytest.mark.parametrize(
    "shape, blocks",
    [
        pytest.param(CHUNKED, CHUNKS, id="chunked"),
        pytest.param((1, 2, 48, 16, 20, 5), CHUNKS, id="chunked, even", marks=pytest.mark.slow),
        pytest.param((1, 2, 16, 32, 4, 4), None, id="whole", marks=pytest.mark.slow),
    ],
)
def test_int16_residual_is_rebuilt_through_48_sublayers(shape, blocks):
    (start, *_), cotangents = arguments(shape, ("int16", "bfloat16"))
    sublayers = [arguments(shape, ("int16", "bfloat16"), seed)[0][1:] for seed in range(1, 49)]
    sublayers = [(np.float32(0.1) * w, *rest) for w, *rest in sublayers]
    residual, after = start, []
    for parameters in sublayers:
        residual, _, statistics = forward(residual, *parameters, norm="layernorm", blocks=blocks)
        after.append(statistics)
    assert np.abs(numbers(residual) - numbers(start)).max() > 1
    for parameters, statistics in zip(reversed(sublayers), reversed(after), strict=True):
        undone = backward(
            residual, statistics, *parameters, *cotangents, norm="layernorm", blocks=blocks
        )
        residual = undone.rebuilt
    np.testing.assert_array_equal(residual, start)


@SHARED
@pytest.mark.parametrize(
    "shape, blocks",
    [
        pytest.param(CHUNKED, CHUNKS, id="chunked"),
        pytest.param((1, 3, 40, 32, 2, 3), None, id="whole"),
    ],
)
def test_a_token_beyond_int16_reads_nan(shape, blocks):
    (X, w, y, gain, r), _ = arguments(shape, ("int16", "bfloat16"))
    X[0, 1, 38, 5] = 0
    w *= np.float32(0.01)
    w[:, 38], w[0, 38] = 0, 1
    for value in (64.0, -64.1, 1e30, -1e30, np.nan):
        y[0, 1, :, 5], y[0, 1, 0, 5] = 0, value
        stored, retrieved, statistics = forward(X, w, y, gain, r, norm="layernorm", blocks=blocks)
        unread = np.isnan(numbers(retrieved)).all((2, 3))
        np.testing.assert_array_equal(np.isnan(statistics.rstd), [[False, True, False]])
        np.testing.assert_array_equal(unread, [[False, True, False]])
        assert np.isfinite(numbers(retrieved)[0, [0, 2]]).all()
        largest = -32767 if value < 0 else 32767
        assert stored[0, 1, 38, 5] == largest


@pytest.mark.parametrize(
    "blocks", [Blocks(64, 4, 1, 1), Blocks(16, 4, 1, 1)], ids=["whole", "chunked"]
)
def test_statistics_of_a_small_spread_about_a_large_mean(blocks):
    rng = np.random.default_rng(0)
    X = (1000 + 0.01 * rng.normal(size=(1, 2, 40, 24))).astype(np.float32)
    ones, r = np.ones((40, 24), np.float32), np.ones((1, 40), np.float32)
    options = dict(norm="layernorm", epsilon=0, dtype=jnp.float32, blocks=blocks, interpret=True)
    _, statistics = jax.jit(functools.partial(gpu.norm_retrieve, **options))(X, ones, r)
    exact = X.astype(np.float64)
    # A float32 mean near 1000 is a multiple of 2^-14, so off by up to 2^-15.
    np.testing.assert_allclose(statistics.mean, exact.mean((2, 3)), atol=2.0**-14, rtol=0)
    np.testing.assert_allclose(statistics.rstd, exact.std((2, 3)) ** -1, rtol=1e-5)


def test_products_of_float32_are_full():
    """To float32's rounding: the products of bfloat16 or TF32 would be off by 1e-3."""
    (X, w, y, gain, r), _ = arguments((1, 1, 16, 16, 16, 16), ("float32", "float32"))
    got = jax.jit(functools.partial(gpu.store, interpret=True))(0 * X, w, y)
    assert_close(got, plain.store(0 * X, w, y), 2e-7)


@pytest.mark.parametrize(
    "programs", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 7))]
)
def test_gradients_are_the_same_bits_every_time_and_the_same_for_any_grid(programs):
    args, cotangents = arguments((1, 7, 16, 16, 2, 3), ("float32", "float32"))
    blocks = Blocks(16, 4, 1, programs)
    stored = args[0]
    rstd = (stored.var((2, 3)) + np.float32(1e-6)) ** -0.5
    statistics = Statistics(stored.mean((2, 3)), rstd)
    run = lambda blocks: backward(
        stored, statistics, *args[1:], *cotangents, norm="layernorm", blocks=blocks, rebuild=False
    )
    first, again, other = run(blocks), run(blocks), run(Blocks(16, 4, 1, 4))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    # Parameter gradients are added up in another order.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), first, other)


def test_what_is_unsupported_is_said():
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    args, cotangents = jax.tree.map(
        lambda x: array(x.dtype, *x.shape), arguments(WHOLE, ("float32", "float32"))
    )
    X, w, y, gain, r = args
    assert gpu.unsupported(*args) is None
    half = lambda x: array("float16", *x.shape)
    assert "float16" in gpu.unsupported(half(X), w, y)
    assert "float16" in gpu.unsupported(X, w, half(y))
    assert "257" in gpu.unsupported(X, None, None, gain, array("float32", 257, 12))
    empty = (array("float32", 2, 0, 12, 48), w, array("float32", 2, 0, 3, 48))
    assert "empty" in gpu.unsupported(*empty)
    wide = array("float32", 1, 1, 4, 512)
    assert "512" in gpu.unsupported(wide, array("float32", 4, 4), wide)
    large, keys = array("float32", 1, 1, 256, 256), array("float32", 256, 256)
    assert "bytes" in gpu.unsupported(large, keys, large)
    statistics = Statistics(array("float32", 2, 3), array("float32", 2, 3))
    assert triton_gpu.unsupported("backward", Site(*args), statistics, *cotangents) is None
    with pytest.raises(UnsupportedImplementation, match="float16"):
        jax.eval_shape(gpu.store, half(X), w, y)
    read = functools.partial(gpu.norm_retrieve, norm="rmsnorm", epsilon=0, dtype=jnp.int16)
    with pytest.raises(UnsupportedImplementation, match="dtype"):
        jax.eval_shape(read, X, gain, r)


# Compilation -----------------------------------------------------------------------------------

# K, V, R of the named models; what is read is R or 3 R vectors.
PRESETS = [(32, 32, 12), (32, 64, 12), (48, 64, 14), (64, 64, 16)]
QUICK = [(64, 64, 16, "sm_80"), (64, 64, 16, "sm_90")]


def calls(K, V, R, P, dtypes, T=4096):
    """Forward and backward pass at these sizes, with the shapes of their arguments."""
    residual, data = dtypes
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    X, y, z = array(residual, 1, T, K, V), array(data, 1, T, R, V), array(data, 1, T, P, V)
    w, gain, r = (array("float32", *shape) for shape in ((R, K), (K, V), (P, K)))
    args = (X, w, y, gain, r)
    cotangents = (array("bfloat16" if residual == "int16" else residual, *X.shape), z)
    statistic = jax.ShapeDtypeStruct((1, T), jnp.float32)
    read = dict(norm="layernorm", epsilon=1e-6)

    def undo(X, mean, rstd, *others):
        return gpu.backward(
            X, Statistics(mean, rstd), *others, norm="layernorm", rebuild=dtypes[0] == "int16"
        )

    return [
        (lambda *args: gpu.store_norm_retrieve(*args, **read), args),
        (undo, (args[0], statistic, statistic, *args[1:], *cotangents)),
    ]


@pytest.mark.parametrize(
    "dtypes", [pytest.param(d, marks=() if d[0] == "int16" else pytest.mark.slow) for d in DTYPES]
)
def test_lowers_for_cuda_without_one(dtypes):
    (forward, args), (undo, undo_args) = calls(64, 64, 16, 48, dtypes)
    program = cuda.lowered(forward, *args)
    assert "triton" in program and "key_vector_forward" in program
    assert "key_vector_backward" in cuda.lowered(undo, *undo_args)
    read = functools.partial(gpu.norm_retrieve, norm="rmsnorm", epsilon=1e-6, dtype=jnp.bfloat16)
    assert "key_vector_read" in cuda.lowered(read, args[0], *args[3:])
    assert "key_vector_store" in cuda.lowered(gpu.store, *args[:3])


@pytest.mark.compile
@pytest.mark.parametrize(
    "K, V, R, target",
    [
        pytest.param(*sizes, target, marks=() if (*sizes, target) in QUICK else pytest.mark.slow)
        for sizes in PRESETS
        for target in cuda.TARGETS
    ],
)
def test_compiles_for_each_gpu_without_spilling(K, V, R, target, tmp_path):
    for dtypes in DTYPES[1:]:
        for P in (R, 3 * R):  # What feed-forward and attention read.
            for call, args in calls(K, V, R, P, dtypes):
                program = cuda.ptx(call, *args, target=target, folder=tmp_path)
                kernels = ptxas_usage(program)
                kernels = {k: v for k, v in kernels.items() if k.startswith("key_vector")}
                assert kernels and all(not use.spilled for use in kernels.values()), kernels


@pytest.mark.compile
def test_halves_compile_without_spilling(tmp_path):
    (_, args), _ = calls(64, 64, 16, 48, DTYPES[2])
    read = functools.partial(gpu.norm_retrieve, norm="rmsnorm", epsilon=1e-6, dtype=jnp.bfloat16)
    both = lambda X, w, y, gain, r: (gpu.store(X, w, y), read(X, gain, r))
    program = cuda.ptx(both, *args, target="sm_90", folder=tmp_path)
    kernels = ptxas_usage(program)
    kernels = {k: v for k, v in kernels.items() if k.startswith("key_vector")}
    assert sorted(kernels) == ["key_vector_read", "key_vector_store"]
    assert all(not use.spilled for use in kernels.values()), kernels


LARGE = [
    ((64, 64, 16, 48), DTYPES[0]),
    ((256, 64, 64, 192), DTYPES[2]),
    ((128, 256, 32, 96), DTYPES[1]),
]


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("target", cuda.TARGETS)
@pytest.mark.parametrize("sizes, dtypes", LARGE)
def test_compiles_in_chunks_for_each_gpu(sizes, dtypes, target, tmp_path):
    for call, args in calls(*sizes, dtypes):
        program = cuda.ptx(call, *args, target=target, folder=tmp_path)
        # A few registers may be spilled for the sake of more programs at a time.
        kernels = ptxas_usage(program)
        kernels = {k: v for k, v in kernels.items() if k.startswith("key_vector")}
        assert kernels and all(use.spilled <= 32 for use in kernels.values()), kernels


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("target", cuda.TARGETS)
def test_store_and_rebuild_multiply_with_the_same_instruction(target, tmp_path):
    """Tensor cores of one kind may add up differently from those of another."""
    kinds = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")
    used = lambda f, *args: {
        kind: cuda.ptx(f, *args, target=target, folder=tmp_path).count(kind) for kind in kinds
    }
    for K, V, R in PRESETS:
        (_, args), (undo, undo_args) = calls(K, V, R, R, ("int16", "bfloat16"))
        stored = used(gpu.store, *args[:3])
        plain = calls(K, V, R, R, ("bfloat16", "bfloat16"))[1][0]
        with_rebuild, without = used(undo, *undo_args), used(plain, *undo_args)
        rebuilt = {kind for kind in kinds if with_rebuild[kind] > without[kind]}
        assert rebuilt == {kind for kind in kinds if stored[kind]} and len(rebuilt) == 1
