"""Each kind of fault of a grid is found, planted in a kernel that copies blocks."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels.call import tpu_call
from tests.grids import faults, kernels_of

BLOCKS, LANES = 6, 128
X = jax.ShapeDtypeStruct((BLOCKS * LANES, LANES), jnp.float32)
# A core for each of two, and three steps of it.
APART, IN_ORDER = {"semantics": ("parallel", "arbitrary")}, {"semantics": ("arbitrary",) * 2}
IN_PLACE = {"aliased": {"x": "out"}}


def own(i, j, *_):
    return 3 * i + j


def copied(x, read, write, **options):
    """The array, of which a step reads this block and writes that one."""

    def kernel(inputs, outputs, scratch):
        outputs["out"][...] = inputs["x"][...]

    def blocks(at):
        return pl.BlockSpec((LANES, LANES), lambda *step: (at(*step), 0))

    inputs, outputs = {"x": (x, blocks(read))}, {"out": (X, blocks(write))}
    options = IN_ORDER | options
    return tpu_call(kernel, "copies", inputs, outputs, {}, grid=(2, 3), flops=0, **options)["out"]


def found(read, write, **options):
    (kernel,) = kernels_of(lambda x: copied(x, read, write, **options), X)
    return faults(kernel)


@pytest.mark.parametrize("options", [{}, APART, IN_PLACE, APART | IN_PLACE])
def test_a_block_a_step_is_right(options):
    assert found(own, own, **options) == []


@pytest.mark.parametrize(
    "fault, read, write, options",
    [
        (r"'x'.* has a block at \[768, 0\]", lambda i, j: own(i, j) + 1, own, {}),
        (r"'out'.* has a block at \[-128, 0\]", own, lambda i, j: own(i, j) - 1, {}),
        (r"'out'.* has 5 of 6 blocks", own, lambda i, j: jnp.minimum(own(i, j), 4), {}),
        # A sum over i, whose block is left in between.
        (r"'out'.* is left and visited again", own, lambda i, j: j, {}),
        (r"'out'.* at \[0, 0\] of several programs", own, lambda i, j: 0, APART),
        # Of the step before, then of another core.
        (
            r"'x'.* is read at \[128, 0\] when",
            lambda i, j: jnp.maximum(own(i, j) - 1, 0),
            own,
            IN_PLACE,
        ),
        (
            r"'x'.* is read at \[384, 0\] when",
            lambda i, j: jnp.minimum(own(i, j) + 1, 5),
            own,
            IN_PLACE | APART,
        ),
    ],
)
def test_a_fault_is_told(fault, read, write, options):
    lines = found(read, write, **options)
    assert any(re.search(fault, line) for line in lines), lines


def test_blocks_that_a_table_chooses():
    table = np.arange(BLOCKS, dtype=np.int32)[::-1]
    by_table = lambda i, j, table: table[own(i, j)]

    def run(x, table):
        return copied(x, own, by_table, prefetch={"table": table[::-1] + 0})

    (kernel,) = kernels_of(jax.jit(run), X, table)
    assert faults(kernel) == []
    assert kernel.outputs[0].at[:, 0].tolist() == [LANES * n for n in range(BLOCKS)]
    with pytest.raises(ValueError, match="copies: what its blocks are chosen by is not known"):
        kernels_of(run, X, jax.ShapeDtypeStruct(table.shape, table.dtype))
    (kernel,) = kernels_of(run, X, table // 2)
    assert any("has 3 of 6 blocks written" in line for line in faults(kernel))
