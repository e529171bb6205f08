"""The Mosaic GPU kernels of the key-vector ops: interpreted numbers, and code for two GPUs."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import norm_retrieve, store_norm_retrieve
from pallas_kernels.key_vector import calls, mosaic_gpu, xla
from pallas_kernels.key_vector.interface import (
    Means,
    Reread,
    SiteBackward,
    SiteOperands,
    Statistics,
)
from pallas_kernels.key_vector.mosaic_gpu import Blocks
from pallas_kernels.key_vector.mosaic_gpu_kernels import Sizes, backward_scratch, forward_scratch
from pallas_kernels.mosaic_gpu import plgpu, resident_programs
from pallas_kernels.platform import UnsupportedImplementation, preferring
from pallas_kernels.shapes import RMT_305M
from pallas_kernels.target import lowering_for
from tests import cuda
from tests.closeness import assert_close
from tests.pallas_kernels.key_vector_battery import (
    TOLERANCE,
    Battery,
    Case,
    arguments,
    cotangents_of,
)
from tests.tiers import later

H100, A100, B200 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB", "NVIDIA B200"
interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"),
    reason=f"jax {jax.__version__} has no interpreter of Mosaic GPU kernels",
)

# WHOLE has two programs, of three tokens and of two. The residuals of the others are padded.
WHOLE = Case(1, 5, 64, 64, 16, 48, "int16", "bfloat16", "layernorm", Blocks(2, 3), Blocks(2, 2))
PADDED = Case(2, 2, 24, 32, 8, 40, "bfloat16", "bfloat16", "rmsnorm", Blocks(3, 2), Blocks(3, 3))
SMALL = Case(1, 2, 16, 32, 8, 8, "int16", "bfloat16", "layernorm", Blocks(1, 2), Blocks(1, 2))


on_device = functools.partial(jax.tree.map, jnp.asarray)


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
@pytest.mark.slow
@pytest.mark.xdist_group("key-vector kernels in Mosaic GPU")
class TestKernels(Battery):
    """The kernels run in JAX's interpreter, which fails where two threads race."""

    module = mosaic_gpu
    cases = (
        WHOLE,
        PADDED,
        WHOLE._replace(residual="bfloat16", norm="rmsnorm", R=64),
        PADDED._replace(residual="int16", norm="layernorm", bits=17),
    )
    halves = (WHOLE, PADDED)
    shifted = (PADDED._replace(norm="layernorm"),)
    exact = (SMALL,)
    held = (SMALL._replace(N=3),)
    repeated = (WHOLE,)
    # These are tests of float32 residuals, which have no kernel.
    spreads = ()
    test_small_spread_on_a_large_mean = None

    @pytest.fixture(autouse=True)
    def multiply_by_way_of_shared_memory(self, monkeypatch):
        """JAX's interpreter has no `wgmma` product of registers with shared memory."""
        multiply = plgpu.wgmma

        def wgmma(sums, a, b):
            if not isinstance(a, jax.Array):
                return multiply(sums, a, b)

            def run(copy):
                copy[...] = a
                plgpu.commit_smem()
                multiply(sums, copy, b)
                plgpu.wgmma_wait(0)

            pl.run_scoped(run, plgpu.SMEM(a.shape, a.dtype))

        monkeypatch.setattr(plgpu, "wgmma", wgmma)

    def options(self, case, op):
        blocks = case.blocks if op == "forward" else case.undone
        return {"interpret": True, "blocks": blocks}

    @pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
    def test_reads_again_in_the_kernel(self, norm):
        case = WHOLE._replace(norm=norm)
        site, cotangents = arguments(case), cotangents_of(case)
        rng = np.random.default_rng(3)
        draw = lambda *size: rng.normal(size=size).astype("float32")
        stored, _, statistics = self.forward(case, site)
        mean = 0.3 * (norm == "layernorm") + np.zeros((1, 5))
        both = np.float32(np.stack([mean, 0 * mean + 2], 1))
        again = Reread(draw(64, 64), draw(8, 64) / np.float32(8), Statistics(both))
        given = SiteBackward(site._replace(residual=stored), statistics, *cotangents, None, again)
        got = self.backward(case, *given).retrieved
        want = xla.backward(on_device(given), norm=norm, rebuild=True).retrieved
        assert_close(got, want, TOLERANCE["bfloat16"])

    @pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
    def test_takes_means_over_all_slices_of_the_keys(self, norm):
        case = PADDED._replace(norm=norm)
        site, cotangents = arguments(case), cotangents_of(case)
        stored, _, statistics = self.forward(case, site)
        a, an = np.random.default_rng(4).normal(size=(2, 2, 2)).astype("float32")
        means = Means(a if norm == "layernorm" else None, an)
        given = SiteBackward(site._replace(residual=stored), statistics, *cotangents, means)
        got = self.backward(case, *given)
        want = xla.backward(on_device(given), norm=norm)
        assert_close(got.residual, want.residual, TOLERANCE["bfloat16"])

    @pytest.mark.parametrize("programs", [1, 3, 5])
    def test_gradients_are_the_same_for_any_grid(self, programs):
        site, cotangents = arguments(WHOLE), cotangents_of(WHOLE)
        stored, _, statistics = self.forward(WHOLE, site)
        site = site._replace(residual=stored)
        run = lambda case: self.backward(case, site, statistics, *cotangents)
        got, want = run(WHOLE._replace(undone=Blocks(programs, 3))), run(WHOLE)
        for name in ("residual", "data", "rebuilt"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
        # The gradients of parameters are summed in another order.
        for name in ("store_keys", "gain", "read_keys"):
            assert_close(getattr(got, name), getattr(want, name), 1e-5)

    @pytest.mark.parametrize("residual, value", [("bfloat16", math.inf), ("int16", math.nan)])
    def test_a_bad_token_leaves_later_tokens_alone(self, residual, value):
        """Tokens 0, 2 and 4 share a slot, and the residual's matrices have padding rows."""
        case = SMALL._replace(N=5, residual=residual, norm="rmsnorm")
        site, cotangents = arguments(case), cotangents_of(case)
        bad = site._replace(data=site.data.copy())
        bad.data[:, 0] = value

        def results(site):
            stored, retrieved, statistics = self.forward(case, site)
            given = self.backward(case, site._replace(residual=stored), statistics, *cotangents)
            return statistics.rstd, stored, retrieved, given.residual, given.data, given.rebuilt

        want, got = results(site), results(bad)
        assert not np.isfinite(got[0][0, 0]) or got[0][0, 0] == 0
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a[:, 1:], b[:, 1:])

    def test_vmap_is_a_loop(self):
        site = on_device(arguments(SMALL))
        other = jax.tree.map(lambda x: -x, site)
        run = lambda site: mosaic_gpu.forward(site, blocks=Blocks(1, 2), interpret=True)
        both = jax.vmap(run)(jax.tree.map(lambda *x: jnp.stack(x), site, other))
        one_by_one = jax.tree.map(lambda *x: jnp.stack(x), run(site), run(other))
        jax.tree.map(np.testing.assert_array_equal, both, one_by_one)


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
@pytest.mark.slow
@pytest.mark.xdist_group("key-vector kernels in Mosaic GPU for B200")
class TestKernelsForBlackwell(Battery):
    """The kernels run with `tcgen05` products in JAX's interpreter."""

    module = mosaic_gpu
    cases = (WHOLE, PADDED)
    halves = (WHOLE,)
    shifted = (PADDED._replace(norm="layernorm"),)
    exact = (SMALL,)
    held = (SMALL._replace(N=3),)
    repeated = (WHOLE,)
    # These are tests of float32 residuals, which have no kernel.
    spreads = ()
    test_small_spread_on_a_large_mean = None

    @pytest.fixture(autouse=True)
    def on_blackwell(self):
        with lowering_for(B200):
            yield

    options = TestKernels.options


# Which calls it supports -------------------------------------------------------------------------


def array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def shapes(case=WHOLE):
    return jax.tree.map(lambda x: array(x.dtype, *x.shape), arguments(case))


def test_what_is_unsupported_is_said():
    X, w, y, gain, r = shapes()
    reason = lambda *arrays: mosaic_gpu.unsupported("forward", SiteOperands(*arrays))
    assert reason(X, w, y, gain, r) is None
    assert "float32" in reason(array("float32", *X.shape), w, y)
    assert "float32" in reason(X, w, array("float32", *y.shape))
    assert "12" in reason(X, array("float32", 12, 64), array("bfloat16", 1, 5, 12, 64))
    assert "72" in reason(X, None, None, gain, array("float32", 72, 64))
    assert "48 entries" in reason(array("int16", 1, 5, 64, 48), w, array("bfloat16", 1, 5, 16, 48))
    assert "128 entries" in reason(array("int16", 1, 5, 128, 64), w, y)
    assert "empty" in reason(array("int16", 0, 5, 64, 64), w, array("bfloat16", 0, 5, 16, 64))
    given = RMT_305M.backward((16, 512), "bfloat16", "int16")
    assert mosaic_gpu.unsupported("backward", given) is None
    wide = given._replace(d_retrieved=array("float32", *given.d_retrieved.shape))
    assert "float32" in mosaic_gpu.unsupported("backward", wide)
    with pytest.raises(UnsupportedImplementation, match="dtype"):
        read = functools.partial(mosaic_gpu.forward, dtype=jnp.float32)
        jax.eval_shape(read, SiteOperands(X, gain=gain, read_keys=r))


@pytest.mark.parametrize(
    "kind, runs",
    [(H100, True), ("NVIDIA H200", True), ("NVIDIA GH200 480GB", True), ("cpu", True)]
    + [("NVIDIA H20-3e", True), (B200, True), ("NVIDIA B100", True)]
    + [(A100, False), ("NVIDIA H1000", False)],
)
def test_gpus_without_the_instructions_are_refused(kind, runs):
    with lowering_for(kind):
        why = mosaic_gpu.unsupported("forward", shapes())
    assert why is None if runs else kind in why and "9.0" in why


# Which implementation runs -----------------------------------------------------------------------


def lowered(implementation, case):
    """Return whether a program for a GPU has kernels of Mosaic GPU, and whether of Triton."""
    f = functools.partial(store_norm_retrieve, implementation=implementation)
    program = cuda.lowered(f, *shapes(case))
    return "mosaic_gpu" in program, "triton" in program


OTHER = PADDED._replace(R=12)  # Triton has kernels for these sizes, and Mosaic GPU has not


def test_runs_only_on_request():
    assert lowered(None, PADDED) == (False, False)
    assert lowered("pallas", PADDED) == (False, True)
    assert lowered("mosaic_gpu", PADDED) == (True, False)
    with pytest.raises(UnsupportedImplementation, match="'mosaic_gpu' does not support.*12"):
        lowered("mosaic_gpu", OTHER)
    with pytest.raises(UnsupportedImplementation, match="runs on cuda only"):
        jax.jit(functools.partial(store_norm_retrieve, implementation="mosaic_gpu")).lower(
            *arguments(PADDED)
        )


def test_is_preferred_where_it_supports_a_call():
    with preferring("mosaic_gpu"):
        assert lowered(None, PADDED) == (True, False)
        assert lowered(None, OTHER) == (False, True)
        assert lowered("xla", PADDED) == (False, False)
        stored, _ = jax.jit(store_norm_retrieve)(*arguments(PADDED))  # on this CPU
        X, _, _, gain, r = shapes(PADDED)
        read = jax.eval_shape(functools.partial(norm_retrieve, dtype="float32"), X, gain, r)
    assert stored.shape == (2, 2, 24, 32)
    assert read.dtype == jnp.float32  # which it does not support


def test_the_default_names_no_kernel_on_request():
    group = calls.IMPLEMENTATIONS
    assert group.names["mosaic_gpu"] == ("cuda",)
    with lowering_for(H100):
        assert group.chosen("forward", shapes())["cuda"][0] == "xla"


@pytest.mark.parametrize(
    "size, stages", [(RMT_305M, 3), (RMT_305M.before_feed_forward, 3), (RMT_305M._replace(R=8), 2)]
)
def test_two_backward_programs_share_a_multiprocessor(size, stages):
    site = size.site((16, 512), "bfloat16", "int16")
    sizes = Sizes.of(site, "layernorm", 9)
    assert mosaic_gpu.default_blocks(sizes, "key_vector_backward") == (264, stages)
    scratch = backward_scratch(sizes, stages)
    for barrier in ("ready", "once"):
        del scratch[barrier]
    held = sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in scratch.values())
    # A program has 1 KiB of its own, half of one for sums, and barriers.
    assert 2 * (held + 1024 + 512 + 128) <= 228 * 1024
    with lowering_for(B200):
        blocks = mosaic_gpu.default_blocks(Sizes.of(site, "layernorm", 9), "key_vector_backward")
    assert blocks == (148, 3)  # padded vectors take more memory there, so one program fits


@pytest.mark.parametrize(
    "kind, R, blocks", [(H100, 16, (396, 3)), (H100, 64, (396, 2)), (B200, 16, (444, 2))]
)
def test_all_forward_programs_run_at_once(kind, R, blocks):
    """Three share a multiprocessor, with fewer tokens ahead where the vectors take more memory."""
    with lowering_for(kind):
        site = RMT_305M._replace(R=R, P=64).site((16, 512), "bfloat16", "int16")
        sizes = Sizes.of(site, "layernorm", 9)
        assert mosaic_gpu.default_blocks(sizes, "key_vector_forward") == blocks
    assert resident_programs(forward_scratch(sizes, blocks[1])) >= 3


# Compilation -------------------------------------------------------------------------------------

SIZES = {"attention": RMT_305M, "feed-forward": RMT_305M.before_feed_forward}
KINDS = {"sm_90": H100, "sm_100": B200}


def compile_calls(size, residual, target):
    """Compile the forward and the backward pass."""
    given = SIZES[size].backward((16, 512), "bfloat16", residual)
    forward = functools.partial(mosaic_gpu.forward, norm="layernorm", epsilon=1e-6)
    undo = functools.partial(mosaic_gpu.backward, norm="layernorm", rebuild=residual == "int16")
    with lowering_for(KINDS[target]):
        cuda.compiled(forward, given.site, target=target)
        cuda.compiled(undo, given, target=target)


def compile_halves(target):
    """Compile a write alone and a read alone."""
    site = RMT_305M.site((1, 4096), "bfloat16", "bfloat16")
    read = functools.partial(mosaic_gpu.forward, epsilon=1e-6, dtype=jnp.bfloat16)
    with lowering_for(KINDS[target]):
        cuda.compiled(mosaic_gpu.forward, SiteOperands(*site[:3]), target=target)
        cuda.compiled(read, site._replace(store_keys=None, data=None), target=target)


@pytest.mark.compile
@pytest.mark.parametrize("target", [*KINDS])
@pytest.mark.parametrize(
    "size, residual",
    [("attention", "int16"), *later(("attention", "bfloat16"), ("feed-forward", "int16"))],
)
def test_compiles_without_spilling(size, residual, target):
    found = cuda.usage(f"{__name__}:compile_calls({size!r}, {residual!r}, {target!r})", target)
    assert sorted(found) == ["key_vector_backward", "key_vector_forward"]


@pytest.mark.compile
@pytest.mark.parametrize("target", ["sm_90", *later("sm_100")])
def test_halves_compile_without_spilling(target):
    found = cuda.usage(f"{__name__}:compile_halves({target!r})", target)
    assert sorted(found) == ["key_vector_read", "key_vector_store"]
