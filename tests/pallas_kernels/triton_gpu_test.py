"""The GPU kernels of the key-vector ops: interpreted numbers, and the code for each GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.key_vector import reference, triton_gpu
from pallas_kernels.key_vector.interface import (
    FRACTION_BITS,
    Statistics,
    UnsupportedImplementation,
)
from pallas_kernels.key_vector.triton_gpu import Blocks
from tests import cuda

# Newer jax says that Pallas through Triton will be taken out of jax.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)

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
    draw = lambda size, dtype, scale=1.0: jnp.asarray(scale * rng.normal(size=size), dtype)
    X = draw((B, N, K, V), "float32")
    X = jnp.round(STEPS * X).astype("int16") if residual == "int16" else X.astype(residual)
    args = (
        X,
        draw((R, K), "float32"),
        draw((B, N, R, V), data),
        1 + draw((K, V), "float32", 0.1),
        draw((P, K), "float32", K**-0.5),
    )
    cotangent = "bfloat16" if residual == "int16" else residual
    return args, (draw((B, N, K, V), cotangent), draw((B, N, P, V), data))


def wide(x):
    """In float64, of what an int16 residual stands for."""
    values = np.asarray(x, np.float64)
    return values / STEPS if x.dtype == jnp.int16 else values


def error(got, expected):
    got, expected = wide(got), wide(expected)
    assert got.shape == expected.shape
    return np.abs(got - expected).max() / np.abs(expected).max()


@functools.partial(jax.jit, static_argnames=("norm", "blocks"))
def forward(*args, norm, blocks=None):
    return triton_gpu.store_norm_retrieve(
        *args, norm=norm, epsilon=1e-6, blocks=blocks, interpret=True
    )


@functools.partial(jax.jit, static_argnames=("norm", "blocks", "rebuild"))
def backward(*args, norm, blocks=None, rebuild=True):
    return triton_gpu.backward(*args, norm=norm, rebuild=rebuild, blocks=blocks, interpret=True)


@functools.partial(jax.jit, static_argnames="norm")
def expected_of(stored, args, cotangents, norm):
    """X', z of `stored` (whose rounding is no error of the read), and the cotangents of `args`."""
    options = dict(norm=norm, epsilon=1e-6)
    op = functools.partial(reference.store_norm_retrieve, **options)
    (X, _), vjp = jax.vjp(op, *args)
    Z = reference.norm_retrieve(stored, *args[3:], **options, dtype=stored.dtype)
    return X, Z, vjp(cotangents)


CASES = [
    *((shape, blocks, "layernorm", dtypes) for shape, blocks in SHAPES for dtypes in DTYPES),
    *((shape, blocks, "rmsnorm", DTYPES[0]) for shape, blocks in SHAPES),
]


@pytest.mark.parametrize("shape, blocks, norm, dtypes", CASES)
def test_op_and_gradients_equal_reference(shape, blocks, norm, dtypes):
    args, cotangents = arguments(shape, dtypes)
    stored, retrieved, statistics = forward(*args, norm=norm, blocks=blocks)
    got = backward(stored, statistics, *args[1:], *cotangents, norm=norm, blocks=blocks)
    with jax.enable_x64(True):
        exact = jax.tree.map(wide, (stored, args, cotangents))
        X, Z, expected = expected_of(*exact, norm=norm)
    tolerance = TOLERANCE[dtypes[1]]
    assert stored.dtype == args[0].dtype and retrieved.dtype == args[2].dtype
    assert error(stored, X) <= (2e-7 if dtypes[0] == "float32" else 4e-3)
    assert error(retrieved, Z) <= tolerance
    values = wide(stored)
    mean = values.mean((2, 3)) if norm == "layernorm" else np.zeros(values.shape[:2])
    # A few units of float32 of the values added up.
    spread = np.abs(values).max((2, 3))
    assert np.all(np.abs(statistics.mean - mean) <= 2e-7 * spread)
    variance = np.mean((values - mean[..., None, None]) ** 2, (2, 3))
    np.testing.assert_allclose(statistics.rstd, (variance + 1e-6) ** -0.5, rtol=2e-6)
    for name, g, e in zip(
        ("residual", "store_keys", "data", "gain", "read_keys"),
        (got.residual, got.store_keys, got.data, got.gain, got.read_keys),
        expected,
        strict=True,
    ):
        assert error(g, e) <= tolerance, name
    assert got.store_keys.dtype == got.gain.dtype == got.read_keys.dtype == jnp.float32
    if dtypes[0] == "int16":
        np.testing.assert_array_equal(got.rebuilt, args[0])
    else:
        assert error(got.rebuilt, args[0]) <= (1e-6 if dtypes[0] == "float32" else 2e-2)


@pytest.mark.parametrize("dtypes", DTYPES[1:])
def test_halves_are_the_whole(dtypes):
    (X, w, y, gain, r), _ = arguments(CHUNKED, dtypes)
    run = dict(blocks=CHUNKS, interpret=True)
    stored = triton_gpu.store(X, w, y, **run)
    read = dict(norm="layernorm", epsilon=1e-6, dtype=y.dtype)
    retrieved, statistics = triton_gpu.norm_retrieve(stored, gain, r, **read, **run)
    whole = forward(X, w, y, gain, r, norm="layernorm", blocks=CHUNKS)
    # Compiled apart, XLA on the CPU may add up in another order.
    np.testing.assert_allclose(wide(stored), wide(whole[0]), rtol=1e-6, atol=1e-6)
    assert error(retrieved, whole[1]) <= TOLERANCE[dtypes[1]]
    np.testing.assert_allclose(statistics.rstd, whole[2].rstd, rtol=1e-6)


@pytest.mark.parametrize(
    "shape, blocks", [((1, 2, 16, 32, 4, 4), None), ((1, 2, 48, 16, 20, 5), CHUNKS)]
)
def test_int16_residual_is_rebuilt_through_48_sublayers(shape, blocks):
    (start, *_), cotangents = arguments(shape, ("int16", "bfloat16"))
    sublayers = [arguments(shape, ("int16", "bfloat16"), seed)[0][1:] for seed in range(1, 49)]
    sublayers = [(0.1 * w, *rest) for w, *rest in sublayers]
    residual, after = start, []
    for parameters in sublayers:
        residual, _, statistics = forward(residual, *parameters, norm="layernorm", blocks=blocks)
        after.append(statistics)
    assert np.abs(wide(residual) - wide(start)).max() > 1
    for parameters, statistics in zip(reversed(sublayers), reversed(after), strict=True):
        undone = backward(
            residual, statistics, *parameters, *cotangents, norm="layernorm", blocks=blocks
        )
        residual = undone.rebuilt
    np.testing.assert_array_equal(residual, start)


@pytest.mark.parametrize("blocks", [None, CHUNKS])
@pytest.mark.parametrize("value", [64.0, -64.1, 1e30, -1e30, np.nan])
def test_a_token_beyond_int16_reads_nan(value, blocks):
    (X, w, y, gain, r), _ = arguments((1, 3, 40, 32, 2, 3), ("int16", "bfloat16"))
    X = X.at[0, 1, 38, 5].set(0)
    y = y.at[0, 1, :, 5].set(jnp.asarray([value, 0.0], y.dtype))
    w = w.at[:, 38].set(jnp.asarray([1.0, 0.0])) * jnp.where(jnp.arange(40) == 38, 1.0, 0.01)
    stored, retrieved, statistics = forward(X, w, y, gain, r, norm="layernorm", blocks=blocks)
    np.testing.assert_array_equal(np.isnan(statistics.rstd), [[False, True, False]])
    np.testing.assert_array_equal(np.isnan(wide(retrieved)).all((2, 3)), [[False, True, False]])
    assert np.isfinite(wide(retrieved)[0, [0, 2]]).all()
    largest = -32767 if value < 0 else 32767
    assert stored[0, 1, 38, 5] == largest


@pytest.mark.parametrize("blocks", [Blocks(64, 4, 1, 1), Blocks(16, 4, 1, 1)])
def test_statistics_of_a_small_spread_about_a_large_mean(blocks):
    rng = np.random.default_rng(0)
    X = jnp.asarray(1000 + 0.01 * rng.normal(size=(1, 2, 40, 24)), jnp.float32)
    ones, r = jnp.ones((40, 24)), jnp.ones((1, 40))
    _, statistics = triton_gpu.norm_retrieve(
        X, ones, r, norm="layernorm", epsilon=0, dtype=jnp.float32, blocks=blocks, interpret=True
    )
    exact = np.asarray(X, np.float64)
    # A float32 mean near 1000 is a multiple of 2^-14, so off by up to 2^-15.
    np.testing.assert_allclose(statistics.mean, exact.mean((2, 3)), atol=2.0**-14, rtol=0)
    np.testing.assert_allclose(statistics.rstd, exact.std((2, 3)) ** -1, rtol=1e-5)


def test_products_of_float32_are_full():
    """To float32's rounding: the products of bfloat16 or TF32 would be off by 1e-3."""
    (X, w, y, gain, r), _ = arguments((1, 1, 16, 16, 16, 16), ("float32", "float32"))
    got = triton_gpu.store(jnp.zeros_like(X), w, y, interpret=True)
    expected = np.einsum("rk,bnrv->bnkv", np.asarray(w, np.float64), np.asarray(y, np.float64))
    assert error(got, expected) <= 2e-7


@pytest.mark.parametrize("programs", [1, 2, 3, 7])
def test_gradients_are_the_same_bits_every_time_and_the_same_for_any_grid(programs):
    args, cotangents = arguments((1, 7, 16, 16, 2, 3), ("float32", "float32"))
    blocks = Blocks(16, 4, 1, programs)
    stored, _, statistics = forward(*args, norm="layernorm", blocks=blocks)
    run = lambda blocks: backward(
        stored, statistics, *args[1:], *cotangents, norm="layernorm", blocks=blocks, rebuild=False
    )
    first, again, other = run(blocks), run(blocks), run(Blocks(16, 4, 1, 4))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    # Parameter gradients are added up in another order.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), first, other)


def test_what_is_unsupported_is_said():
    args, cotangents = arguments(WHOLE, ("float32", "float32"))
    X, w, y, gain, r = args
    assert triton_gpu.unsupported("store_norm_retrieve", *args) is None
    assert "float16" in triton_gpu.unsupported("store", X.astype("float16"), w, y)
    assert "float16" in triton_gpu.unsupported("store", X, w, y.astype("float16"))
    assert "257" in triton_gpu.unsupported("norm_retrieve", X, gain, jnp.ones((257, 12)))
    assert "empty" in triton_gpu.unsupported("store", X[:, :0], w, y[:, :0])
    assert "512" in triton_gpu.unsupported("store", jnp.ones((1, 1, 4, 512)), w, y)
    large = jax.ShapeDtypeStruct((1, 1, 256, 256), jnp.float32)
    keys = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    assert "bytes" in triton_gpu.unsupported("store", large, keys, large)
    statistics = Statistics(jnp.ones((2, 3)), jnp.ones((2, 3)))
    assert triton_gpu.unsupported("backward", X, statistics, *args[1:], *cotangents) is None
    with pytest.raises(UnsupportedImplementation, match="float16"):
        triton_gpu.store(X.astype("float16"), w, y)
    with pytest.raises(UnsupportedImplementation, match="dtype"):
        triton_gpu.norm_retrieve(X, gain, r, norm="rmsnorm", epsilon=0, dtype=jnp.int16)


def test_tuned_blocks_come_first(monkeypatch):
    tuned = Blocks(32, 2, 3, 5)
    monkeypatch.setitem(triton_gpu.TUNED, ("key_vector_forward", 64, 64, 16, 48, "bfloat16"), tuned)
    rule = functools.partial(
        triton_gpu.default_blocks, "key_vector_forward", K=64, V=64, R=16, dtype=jnp.bfloat16
    )
    assert rule(P=48, tokens=100) == tuned
    assert rule(P=16, tokens=100) == Blocks(64, 4, 2, 100)


# Compilation -----------------------------------------------------------------------------------

# K, V, R of the named models; what is read is R or 3 R vectors.
PRESETS = [(32, 32, 12), (32, 64, 12), (48, 64, 14), (64, 64, 16)]
QUICK = [(64, 64, 16, "sm_80"), (64, 64, 16, "sm_90")]


def calls(K, V, R, P, dtypes, T=4096):
    """Forward and backward pass at these sizes, with the shapes of their arguments."""
    args, cotangents = jax.eval_shape(lambda: arguments((1, T, K, V, R, P), dtypes))
    statistic = jax.ShapeDtypeStruct((1, T), jnp.float32)
    read = dict(norm="layernorm", epsilon=1e-6)

    def undo(X, mean, rstd, *others):
        return triton_gpu.backward(
            X, Statistics(mean, rstd), *others, norm="layernorm", rebuild=dtypes[0] == "int16"
        )

    return [
        (lambda *args: triton_gpu.store_norm_retrieve(*args, **read), args),
        (undo, (args[0], statistic, statistic, *args[1:], *cotangents)),
    ]


@pytest.mark.parametrize("dtypes", DTYPES)
def test_lowers_for_cuda_without_one(dtypes):
    (forward, args), (undo, undo_args) = calls(64, 64, 16, 48, dtypes)
    program = cuda.lowered(forward, *args)
    assert "triton" in program and "key_vector_forward" in program
    assert "key_vector_backward" in cuda.lowered(undo, *undo_args)
    read = functools.partial(
        triton_gpu.norm_retrieve, norm="rmsnorm", epsilon=1e-6, dtype=jnp.bfloat16
    )
    assert "key_vector_read" in cuda.lowered(read, args[0], *args[3:])
    assert "key_vector_store" in cuda.lowered(triton_gpu.store, *args[:3])


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
                kernels = cuda.usage(program, tmp_path)
                kernels = {k: v for k, v in kernels.items() if k.startswith("key_vector")}
                assert kernels and all(not use.spilled for use in kernels.values()), kernels


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
        kernels = cuda.usage(program, tmp_path)
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
        stored = used(triton_gpu.store, *args[:3])
        plain = calls(K, V, R, R, ("bfloat16", "bfloat16"))[1][0]
        with_rebuild, without = used(undo, *undo_args), used(plain, *undo_args)
        rebuilt = {kind for kind in kinds if with_rebuild[kind] > without[kind]}
        assert rebuilt == {kind for kind in kinds if stored[kind]} and len(rebuilt) == 1
