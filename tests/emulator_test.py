"""A run with `--emulate` notices what plain interpretation hides."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.call import tpu_call
from tests import emulator


@pytest.fixture
def emulated(monkeypatch):
    """`emulated(mode, cores)`: kernels of this test run as with these options."""

    def begin(mode, cores=1):
        options = {"emulate": mode, "emulate_cores": cores, "emulate_seed": None}
        emulator.emulate(SimpleNamespace(getoption=options.get), monkeypatch)

    yield begin
    emulator.forget()


def rows(
    kernel, x, *, grid, block, semantics="parallel", index=lambda i: (i, 0), out=None, **options
):
    """`kernel(x, out, scratch)` by blocks of rows."""
    spec = pl.BlockSpec((block, 128), index)
    return tpu_call(
        lambda inputs, outputs, scratch: kernel(inputs["x"], outputs["out"], scratch),
        "rows",
        {"x": (x, spec)},
        {"out": (x if out is None else out, spec)},
        {"kept": pltpu.VMEM((block, 128), jnp.float32)},
        grid=(grid,),
        semantics=(semantics,),
        flops=0,
        interpret=True,
        **options,
    )["out"]


X = jnp.arange(32 * 128, dtype=jnp.float32).reshape(32, 128)


@pytest.mark.parametrize("mode, cores", [("on_wait", 1), ("eager", 2)])
def test_what_is_right_passes(emulated, mode, cores):
    """Also a last block that is not whole, of an output that is written over its input."""
    emulated(mode, cores)

    def double(x, out, scratch):
        out[...] = 2 * x[...]

    got = rows(double, X[:20], grid=3, block=8, aliased={"x": "out"})
    np.testing.assert_array_equal(got, 2 * X[:20])
    assert not emulator.races_found()


def test_a_race_is_found(emulated):
    """Two cores write the same block."""
    emulated("eager", 2)

    def copy(x, out, scratch):
        out[...] = x[...]

    rows(copy, X, grid=4, block=8, index=lambda i: (0, 0)).block_until_ready()
    assert emulator.races_found()


def test_memory_that_was_not_written_is_nan(emulated):
    """A sum over steps that does not begin with 0."""
    emulated("on_wait")

    def add(x, out, scratch):
        scratch["kept"][...] += x[...]
        out[...] = scratch["kept"][...]

    assert jnp.isnan(rows(add, X, grid=4, block=8, semantics="arbitrary")).all()


def test_a_copy_that_is_not_waited_for_has_not_happened(emulated):
    emulated("on_wait")

    def copy(x, out):
        pltpu.make_async_copy(x.at[:8], out["kept"], out["done"]).start()

    def kernel(inputs, outputs, scratch):
        copy(inputs["x"], scratch)
        outputs["out"][...] = scratch["kept"][...]
        pltpu.make_async_copy(inputs["x"].at[:8], scratch["kept"], scratch["done"]).wait()

    out = tpu_call(
        kernel,
        "unwaited",
        {"x": (X, pl.BlockSpec(memory_space=pl.ANY))},
        {"out": (X[:8], pl.BlockSpec((8, 128), lambda i: (0, 0)))},
        {"kept": pltpu.VMEM((8, 128), jnp.float32), "done": pltpu.SemaphoreType.DMA(())},
        grid=(1,),
        semantics=("arbitrary",),
        flops=0,
        interpret=True,
    )["out"]
    assert jnp.isnan(out).all()


@pytest.mark.parametrize("mode, cores", [("on_wait", 1), ("eager", 2)])
def test_words_of_rows_are_read_and_written(emulated, mode, cores):
    """A word has two rows, the first in its low bits; what is not named is not touched."""
    emulated(mode, cores)

    def halves(x, out, scratch):
        out[...] = x[...].astype(jnp.bfloat16)
        words = out.bitcast(jnp.int32).reshape(2, 4, 128)
        words[1, 1:3] = words[0, 2:] + 1
        out.at[:4].reshape(2, 2, 128)[1, 0] = out.reshape(16, 128)[15]

    out = jax.ShapeDtypeStruct((32, 128), jnp.bfloat16)
    got = rows(halves, X, grid=2, block=16, out=out)
    want = np.array(X.astype(jnp.bfloat16)).view(np.int16).reshape(2, 16, 128)
    want[:, 10:14] = want[:, 4:8]
    want[:, 10:14:2] += 1
    want[:, 2] = want[:, 15]
    np.testing.assert_array_equal(np.asarray(got).view(np.int16), want.reshape(32, 128))
    assert not emulator.races_found()


def test_words_that_were_not_written_are_nan(emulated):
    emulated("on_wait")

    def bits(x, out, scratch):
        kept = scratch["kept"].bitcast(jnp.int32)
        kept[:4] = x.bitcast(jnp.int32)[:4]
        out[...] = scratch["kept"].reshape(2, 4, 128)[...].reshape(8, 128)

    got = rows(bits, X, grid=4, block=8).reshape(4, 8, 128)
    np.testing.assert_array_equal(got[:, :4], X.reshape(4, 8, 128)[:, :4])
    assert jnp.isnan(got[:, 4:]).all()


def test_empty_memory_is_nan():
    assert jnp.isnan(jax.jit(lambda: jax.lax.empty((2, 3), jnp.bfloat16))()).all()
    assert (jax.lax.empty((2,), jnp.int16) == 2**15 - 1).all()
