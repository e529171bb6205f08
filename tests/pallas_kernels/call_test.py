"""A kernel's call by names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import operand
from pallas_kernels.call import tpu_call


def scaled(x, scales, interpret=True):
    """Each block of 8 rows times one of two scales, which are not in blocks."""

    def kernel(inputs, outputs, scratch):
        scale = inputs["scales"][jax.lax.rem(pl.program_id(0), 2)]
        outputs["out"][...] = scale * inputs["x"][...]

    blocks = pl.BlockSpec((8, 128), lambda i: (i, 0))
    return tpu_call(
        kernel,
        "scaled",
        {"x": (x, blocks), "scales": operand.in_smem(jnp.asarray(scales))},
        {"out": (jax.ShapeDtypeStruct(x.shape, x.dtype), blocks)},
        {},
        grid=(len(x) // 8,),
        semantics=("parallel",),
        flops=x.size,
        interpret=interpret,
    )["out"]


X = np.random.default_rng(0).normal(size=(2, 3, 16, 128)).astype(np.float32)
SCALES = np.arange(12, dtype=np.float32).reshape(2, 3, 2)


def wanted(x, scales):
    return x * np.repeat(scales, 8, axis=-1)[..., None]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("jitted", [False, True])
def test_a_kernel_is_mapped_by_its_grid_or_else_by_a_loop(jitted, wide):
    one = jax.jit(scaled) if jitted else scaled
    by_grid, by_loop = jax.vmap(one, in_axes=(0, None)), jax.vmap(one)
    with jax.enable_x64(wide):
        text = str(jax.make_jaxpr(by_grid)(X[0], SCALES[0, 0]))
        assert "grid=(3, 2)" in text and "scan" not in text
        assert "scan" in str(jax.make_jaxpr(by_loop)(X[0], SCALES[0]))
        cases = (
            (by_grid, X[0], SCALES[0, 0]),
            (by_loop, X[0], SCALES[0]),
            (jax.vmap(by_loop), X, SCALES),
            (jax.vmap(by_loop, in_axes=(0, None)), X, SCALES[0]),
        )
        for run, *given in cases:
            np.testing.assert_array_equal(run(*given), wanted(*given))
        # What the grid maps goes by a loop where the scales are mapped too.
        found = jax.vmap(by_grid)(X, SCALES[:, 0])
        np.testing.assert_array_equal(found, wanted(X, SCALES[:, :1]))


@pytest.mark.parametrize("axes", [(0, 0), (0, None)])
def test_a_mapped_kernel_lowers_for_a_tpu(axes):
    run = jax.vmap(lambda x, scales: scaled(x, scales, interpret=False), in_axes=axes)
    given = X[0], SCALES[0] if axes == (0, 0) else SCALES[0, 0]
    text = jax.jit(run).trace(*given).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 1
