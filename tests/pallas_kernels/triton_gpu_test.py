"""The GPU kernels of the key-vector ops: interpreted numbers, and the code for each GPU."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import norm_retrieve
from pallas_kernels.key_vector import triton_gpu
from pallas_kernels.key_vector.interface import SiteBackward, SiteOperands, Statistics
from pallas_kernels.key_vector.triton_gpu import Blocks
from pallas_kernels.platform import UnsupportedImplementation
from pallas_kernels.shapes import RMT_134M, RMT_305M, KeyVector
from rmt_tpu.estimator.tuning import ptxas_usage
from tests import cuda
from tests.pallas_kernels.key_vector_battery import (
    Battery,
    Case,
    arguments,
    cotangents_of,
    gradients_of,
)
from tests.tiers import later

# Many tests run the programs of a few cases.
SHARED = pytest.mark.xdist_group("key-vector kernels for GPU")

DTYPES = [("float32", "float32"), ("bfloat16", "bfloat16"), ("int16", "bfloat16")]
# Sides that are and are not powers of two, below and above a tile's least 16.
WHOLE = Case(2, 3, 12, 48, 3, 7, "float32", "float32", "rmsnorm")
# Three chunks of 16 keys, the last ragged; groups of key vectors beyond 64.
CHUNKS = Blocks(keys=16, warps=4, stages=1, programs=2)
CHUNKED = Case(1, 3, 40, 32, 20, 70, "int16", "bfloat16", "layernorm", CHUNKS, bits=17)


def others():
    """Of both shapes with every norm and every dtype."""
    for shape, norm, dtypes in itertools.product(
        (WHOLE, CHUNKED._replace(bits=9)), ("layernorm", "rmsnorm"), DTYPES
    ):
        case = shape._replace(residual=dtypes[0], data=dtypes[1], norm=norm)
        if case != WHOLE:
            yield (case,)


@SHARED
class TestKernels(Battery):
    module = triton_gpu
    # Every shape and every norm once; the others at night.
    cases = (WHOLE, CHUNKED, *later(*others()))
    halves = (CHUNKED, *later((CHUNKED._replace(residual="bfloat16", bits=9),)))
    spreads = (
        Case(1, 2, 40, 24, 1, 1, "float32", "float32", "layernorm", Blocks(64, 4, 1, 1)),
        Case(1, 2, 40, 24, 1, 1, "float32", "float32", "layernorm", Blocks(16, 4, 1, 1)),
    )
    shifted = tuple(later((WHOLE._replace(residual="bfloat16", data="bfloat16"),)))
    exact = (
        CHUNKED,
        *later(
            (Case(1, 2, 48, 16, 20, 5, "int16", "bfloat16", "layernorm", CHUNKS),),
            (Case(1, 2, 16, 32, 4, 4, "int16", "bfloat16", "layernorm"),),
        ),
    )
    held = (CHUNKED, Case(1, 3, 40, 32, 2, 3, "int16", "bfloat16", "layernorm"))
    repeated = (WHOLE,)
    # XLA on the CPU may add up in another order.
    apart = 1e-6

    def options(self, case, op):
        return {"interpret": True} | ({} if case.blocks is None else {"blocks": case.blocks})

    @pytest.mark.parametrize("programs", [4, *later(1, 2, 3)])
    def test_gradients_are_the_same_for_any_grid(self, programs):
        site, cotangents = arguments(WHOLE), cotangents_of(WHOLE)
        stored, _, statistics = self.forward(WHOLE, site)
        site = site._replace(residual=stored)
        run = lambda case: gradients_of(self.backward(case, site, statistics, *cotangents))
        # Those of parameters are added up in another order.
        for got, want in zip(
            run(WHOLE._replace(blocks=Blocks(16, 4, 1, programs))), run(WHOLE), strict=True
        ):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_what_is_unsupported_is_said():
    site = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments(WHOLE))
    cotangents = cotangents_of(WHOLE)
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    half = lambda x: array("float16", *x.shape)
    reason = lambda *arrays: triton_gpu.unsupported("forward", SiteOperands(*arrays))
    X, w, y, gain, r = site
    assert reason(*site) is None
    assert "float16" in reason(half(X), w, y)
    assert "float16" in reason(X, w, half(y))
    assert "257" in reason(X, None, None, gain, array("float32", 257, 12))
    assert "empty" in reason(array("float32", 2, 0, 12, 48), w, array("float32", 2, 0, 3, 48))
    wide = array("float32", 1, 1, 4, 512)
    assert "512" in reason(wide, array("float32", 4, 4), wide)
    large, keys = array("float32", 1, 1, 256, 256), array("float32", 256, 256)
    assert "bytes" in reason(large, keys, large)
    statistics = Statistics(array("float32", 2, 2, 3))
    given = SiteBackward(site, statistics, *cotangents)
    assert triton_gpu.unsupported("backward", given) is None
    read = functools.partial(triton_gpu.forward, dtype=jnp.int16)
    with pytest.raises(UnsupportedImplementation, match="dtype"):
        jax.eval_shape(read, SiteOperands(X, gain=gain, read_keys=r))
    op = functools.partial(norm_retrieve, dtype="float16", implementation="triton")
    with pytest.raises(UnsupportedImplementation, match="not support this call: .* of float16"):
        jax.eval_shape(op, X, gain, r)


# Compilation -----------------------------------------------------------------------------------

# Those of the models in Table 9 of the RMT paper.
SIZES = [KeyVector(32, 32, 12, 36), RMT_134M, KeyVector(48, 64, 14, 42), RMT_305M]
QUICK = [(RMT_305M, "sm_80"), (RMT_305M, "sm_90")]


def calls(size, dtypes):
    """Forward and backward pass at this size, with the shapes of their arguments."""
    residual, data = dtypes
    given = size.backward((1, 4096), data, residual)
    forward = functools.partial(triton_gpu.forward, norm="layernorm", epsilon=1e-6)
    undo = functools.partial(triton_gpu.backward, norm="layernorm", rebuild=residual == "int16")
    return [(forward, (given.site,)), (undo, (given,))]


def halves_of(site):
    """A store and a read, which share the residual."""
    read = functools.partial(triton_gpu.forward, epsilon=1e-6, dtype=jnp.bfloat16)
    return [
        (triton_gpu.forward, (SiteOperands(*site[:3]),)),
        (read, (site._replace(store_keys=None, data=None),)),
    ]


@pytest.mark.parametrize(
    "dtypes", [pytest.param(d, marks=() if d[0] == "int16" else pytest.mark.slow) for d in DTYPES]
)
def test_lowers_for_cuda_without_one(dtypes):
    both = calls(RMT_305M, dtypes)
    (site,) = both[0][1]
    names = "forward", "backward", "store", "read"
    for name, (call, args) in zip(names, both + halves_of(site), strict=True):
        program = cuda.lowered(call, *args)
        assert "triton" in program and f"key_vector_{name}" in program


@pytest.mark.compile
@pytest.mark.parametrize(
    "size, target",
    [
        pytest.param(size, target, marks=() if (size, target) in QUICK else pytest.mark.slow)
        for size in SIZES
        for target in cuda.TARGETS
        if (size, target) in QUICK or target in ("sm_80", "sm_90")
    ],
)
def test_compiles_for_each_gpu_without_spilling(size, target, tmp_path):
    for dtypes in DTYPES[1:]:
        for read in (size.before_feed_forward, size):
            for call, args in calls(read, dtypes):
                program = cuda.ptx(call, *args, target=target, folder=tmp_path)
                kernels = ptxas_usage(program)
                kernels = {k: v for k, v in kernels.items() if k.startswith("key_vector")}
                assert kernels and all(not use.spilled for use in kernels.values()), kernels


@pytest.mark.compile
def test_halves_compile_without_spilling(tmp_path):
    (_, (site,)), _ = calls(RMT_305M, DTYPES[2])
    both = lambda site: [call(*args) for call, args in halves_of(site)]
    program = cuda.ptx(both, site, target="sm_90", folder=tmp_path)
    kernels = ptxas_usage(program)
    kernels = {k: v for k, v in kernels.items() if k.startswith("key_vector")}
    assert sorted(kernels) == ["key_vector_read", "key_vector_store"]
    assert all(not use.spilled for use in kernels.values()), kernels


LARGE = [
    (RMT_305M, DTYPES[0], "sm_90"),
    (KeyVector(256, 64, 64, 192), DTYPES[2], "sm_100"),
    (KeyVector(128, 256, 32, 96), DTYPES[1], "sm_80"),
]


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("size, dtypes, target", LARGE)
def test_compiles_in_chunks_for_each_gpu(size, dtypes, target, tmp_path):
    for call, args in calls(size, dtypes):
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
    for size in SIZES:
        size = size.before_feed_forward
        (_, (site,)), (undo, undo_args) = calls(size, ("int16", "bfloat16"))
        stored = used(triton_gpu.forward, SiteOperands(*site[:3]))
        plain = calls(size, ("bfloat16", "bfloat16"))[1][0]
        with_rebuild, without = used(undo, *undo_args), used(plain, *undo_args)
        rebuilt = {kind for kind in kinds if with_rebuild[kind] > without[kind]}
        assert rebuilt == {kind for kind in kinds if stored[kind]} and len(rebuilt) == 1
