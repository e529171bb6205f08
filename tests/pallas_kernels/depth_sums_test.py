"""Weighted sums over depth: plain JAX and interpreted TPU kernels against float64, and compiled.

Tolerances. All arithmetic is float32's: 5e-6 of the largest result. A bfloat16 result is off by its
own rounding, 2^-8 of itself, too.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.depth_sums import mosaic_tpu, reference
from pallas_kernels.platform import UnsupportedImplementation, interpreting
from pallas_kernels.target import lowering_for
from tests.closeness import float64
from tests.tiers import later
from tests.tpu import device_of, place_on


def draw(seed, *shape, dtype="float32"):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


# S, N, T, D, count, dtype. The last tile has 16 tokens, a source has a last step of 128 entries,
# and there are no sources.
CASES = (
    (4, 5, 144, 384, 3, "bfloat16"),
    (1, 3, 272, 128, 3, "float32"),
    (2, 3, 16, 128, 0, "float32"),
    *later(
        (4, 40, 160, 256, 39, "bfloat16"),
        (3, 2, 256, 640, 1, "float32"),
    ),
)


@pytest.mark.parametrize("implementation", ["xla", "mosaic_tpu"])
@pytest.mark.parametrize("S, N, T, D, count, dtype", CASES)
def test_sums_and_gradients(S, N, T, D, count, dtype, implementation):
    """Empty rows have NaN; gradients of later uses of the sources are added to."""
    weights, sources = draw(0, S, N, T), draw(1, N, T, D, dtype=dtype)
    d_sums, later_uses = draw(2, S, T, D, dtype=dtype), draw(3, N, T, D, dtype=dtype)
    empty = np.array(sources)
    empty[count:] = np.nan

    @jax.jit
    def run(weights, sources, d_sums, later_uses, count):
        op = lambda *args: pallas_kernels.depth_sums(
            *args, count=count, implementation=implementation
        )
        (rows, sums), pull_back = jax.vjp(op, weights, sources)
        return rows, sums, *pull_back((later_uses, d_sums))

    args = weights, empty, d_sums, later_uses, np.int32(count)
    if implementation == "xla":
        rows, *got = run(*args)
    else:
        with interpreting():
            rows, *got = run(*args)
    with jax.enable_x64(True):
        wide = [float64(x) for x in (weights, sources, d_sums, later_uses)]
        plain = lambda *args: reference.sums(*args, count)
        want, pull_back = jax.vjp(plain, *wide[:2])
        d_weights, d_sources = pull_back(wide[2])
        want = want, d_weights, d_sources + wide[3]

    np.testing.assert_array_equal(float64(rows), float64(empty))
    assert [x.dtype for x in got] == [dtype, "float32", dtype]
    for name, a, b in zip(("sums", "d_weights", "d_sources"), got, want, strict=True):
        a, b = float64(a), float64(b)
        bound = 5e-6 * np.max(np.abs(b), initial=1e-30)
        if name != "d_weights" and dtype == "bfloat16":
            bound = bound + 2.0**-8 * np.abs(b)
        np.testing.assert_array_less(np.abs(a - b) - bound, 1e-30, err_msg=name)


def test_sums_of_matrices_in_another_dtype():
    weights, sources = draw(0, 2, 3, 4, 5), draw(1, 3, 4, 5, 2, 3, dtype=jnp.bfloat16)
    weights, sources = map(jnp.asarray, (weights, sources))
    _, sums = pallas_kernels.depth_sums(weights, sources, dtype="float32")
    want = np.einsum("snbt,nbtkv->sbtkv", float64(weights), float64(sources))
    assert sums.dtype == "float32"
    np.testing.assert_allclose(float64(sums), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "shapes, count, message",
    [
        (((3, 5), (3, 5, 8)), None, "weights"),
        (((2, 3, 5), (4, 5, 8)), None, "shapes do not fit"),
        (((2, 3, 5), (3, 6, 8)), None, "shapes do not fit"),
        (((2, 3, 5), (3, 5, 8)), 1.5, "must be an integer"),
        (((2, 3, 5), (3, 5, 8)), 4, "count=4 must be from 0 to the number of sources, 3"),
        (((2, 3, 5), (3, 5, 8)), -1, "count=-1 must be from 0"),
        (((0, 3, 5), (3, 5, 8)), None, "legal: S and N of at least 1"),
        (((2, 0, 5), (0, 5, 8)), None, "legal: S and N of at least 1"),
    ],
)
def test_wrong_arguments(shapes, count, message, unannotated):
    weights, sources = (jnp.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=re.escape(message)):
        pallas_kernels.depth_sums(weights, sources, count=count)


def test_dtypes_that_are_refused(unannotated):
    with pytest.raises(ValueError, match="dtype=int32 of retrieved vectors is not legal"):
        pallas_kernels.depth_sums(jnp.zeros((1, 2, 3)), jnp.zeros((2, 3, 4)), dtype="int32")
    with pytest.raises(ValueError, match="must be an array of floats, but is int32"):
        pallas_kernels.depth_sums(jnp.zeros((1, 2, 3)), jnp.zeros((2, 3, 4), jnp.int32))


def test_what_is_not_served():
    def ask(dtype, N, T, *size):
        weights = jax.ShapeDtypeStruct((4, N, T), jnp.float32)
        sources = jax.ShapeDtypeStruct((N, T, *size), jnp.dtype(dtype))
        with lowering_for("TPU v5 lite"):
            return mosaic_tpu.unsupported("sums_backward", weights, sources)

    assert ask("bfloat16", 25, 8192, 1024) is None
    assert "neither bfloat16 nor float32" in ask("float16", 25, 8192, 1024)
    assert "sources of 2 axes" in ask("bfloat16", 25, 8192, 64, 64)
    assert "multiples of 128 and of 16" in ask("bfloat16", 25, 8192, 1000)
    assert "multiples of 128 and of 16" in ask("bfloat16", 25, 8184, 1024)
    assert "16 tokens do not fit in VMEM" in ask("bfloat16", 97, 8192, 8192)
    with pytest.raises(UnsupportedImplementation, match="sources of 2 axes"):
        weights, sources = jnp.zeros((1, 2, 128)), jnp.zeros((2, 128, 8, 16))
        jax.eval_shape(
            lambda *args: pallas_kernels.depth_sums(*args, implementation="mosaic_tpu"),
            weights,
            sources,
        )


# Compilation for TPUs that are not there -------------------------------------------------------


@pytest.mark.compile
@pytest.mark.parametrize(
    "topology, S, N, T, D, dtype",
    [
        ("v4:2x2x1", 4, 13, 1024, 768, "bfloat16"),
        ("v5e:2x2", 4, 25, 8192, 1024, "bfloat16"),
        ("v5p:2x2x1", 1, 3, 1040, 384, "float32"),
        ("v6e:2x2", 4, 49, 4096, 2048, "bfloat16"),
        ("tpu7x:2x2x1", 4, 25, 2048, 1024, "float32"),
    ],
)
def test_kernels_compile(topology, S, N, T, D, dtype):
    """The gradient of the sources overwrites that of their later uses."""
    array = place_on(topology)

    def run(weights, sources, count, d_sums, later_uses):
        op = lambda *args: pallas_kernels.depth_sums(*args, count=count)
        (_, sums), pull_back = jax.vjp(op, weights, sources)
        return sums, *pull_back((later_uses, d_sums))

    bank, of_sums = array(dtype, N, T, D), array(dtype, S, T, D)
    args = array("float32", S, N, T), bank, array("int32"), of_sums, bank
    with lowering_for(device_of(topology).device_kind):
        compiled = jax.jit(run, donate_argnums=4).lower(*args).compile()
    for name in ("depth_sums", "depth_sums_backward"):
        assert re.search(rf"custom-call.*/{name}/", compiled.as_text()), name
    row = T * D * jnp.dtype(dtype).itemsize
    assert compiled.memory_analysis().temp_size_in_bytes < N * row
