"""What a backward pass that rebuilds the residual uses: slots of stacks, statistics of before."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import StackSlice, read_slices
from pallas_kernels.key_vector import mosaic_tpu, xla
from pallas_kernels.key_vector.block_sizes import BlockSizes
from pallas_kernels.key_vector.interface import Reread, SiteBackward, SiteOperands, Statistics
from tests.tiers import later

# Of these, 8 rows of keys are whole tiles, which lie in their stacks as kernels take them.
B, N, K, V, R, P = 2, 200, 16, 8, 8, 12
SLABS = BlockSizes(128, slab=4)


def arguments(residual: str, data: str):
    draw = lambda *size: np.random.default_rng(sum(size)).normal(size=size)
    X = draw(B, N, K, V) + 3.0  # a mean that counts
    X = np.round(X * 2**9) if residual == "int16" else X
    slot = lambda x, at: StackSlice(x, jnp.int32(at))
    return SiteOperands(
        X.astype(residual),
        slot(draw(3, R, K).astype("float32") / 4, 2),
        slot(draw(3, B, N, R, V).astype(data), 1),
        slot(draw(2, K, V).astype("float32"), 1),
        slot(draw(4, P, K).astype("float32"), 2),
    )


def forward(module, *args, **options):
    return jax.jit(functools.partial(module, epsilon=1e-6, **options))(*args)


@pytest.mark.parametrize(
    "residual, data, norm, blocks",
    [
        ("int16", "float32", "layernorm", None),
        *later(
            ("int16", "bfloat16", "rmsnorm", None),
            ("bfloat16", "bfloat16", "layernorm", SLABS),
            ("int16", "float32", "layernorm", SLABS),
        ),
    ],
)
def test_kernels_take_slots_and_read_again_what_they_have_read(residual, data, norm, blocks):
    site = arguments(residual, data)
    kernel = functools.partial(mosaic_tpu.forward, interpret=True, block_sizes=blocks)
    out = forward(kernel, site, norm=norm)
    for got, want in zip(out, forward(kernel, read_slices(site), norm=norm), strict=True):
        jax.tree.map(np.testing.assert_array_equal, got, want)
    read = SiteOperands(out.residual, gain=site.gain, read_keys=site.read_keys)
    again = forward(kernel, read, out.statistics, norm=norm, dtype=jnp.dtype(data))
    tolerance = 2e-5 if data == "float32" else 2**-7
    scale = np.abs(np.asarray(out.retrieved, "float32")).max()
    difference = np.asarray(again.retrieved, "float32") - np.asarray(out.retrieved, "float32")
    assert np.abs(difference).max() <= tolerance * scale
    # It is with those that are given, and not with its own.
    twice = Statistics.of(out.statistics.mean, 2 * out.statistics.rstd)
    double = forward(kernel, read, twice, norm=norm, dtype=jnp.dtype(data)).retrieved
    np.testing.assert_allclose(
        np.asarray(double, "float32"), 2 * np.asarray(again.retrieved, "float32"), rtol=2**-7
    )


@pytest.mark.parametrize("norm", ["layernorm", *later("rmsnorm")])
def test_plain_jax_reads_again_what_it_has_read(norm):
    site = arguments("int16", "float32")
    out = forward(xla.forward, site, norm=norm)
    read = SiteOperands(out.residual, gain=site.gain, read_keys=site.read_keys)
    again = forward(xla.forward, read, out.statistics, norm=norm, dtype=jnp.dtype("float32"))
    np.testing.assert_array_equal(again.retrieved, out.retrieved)


@pytest.mark.slow
def test_a_backward_pass_takes_slots():
    site = arguments("int16", "bfloat16")
    statistics = forward(xla.forward, site, norm="layernorm").statistics
    draw = lambda *size: np.random.default_rng(sum(size)).normal(size=size).astype(jnp.bfloat16)
    cotangents = draw(B, N, K, V), draw(B, N, P, V)
    slot = lambda x, at: StackSlice(jnp.stack([0 * x, x], 0)[:: 2 * at - 1], at)
    statistics = Statistics(slot(statistics.both, 1))
    keys = (slot(np.float32(draw(*x)), 0) for x in ((K, V), (R, K)))
    again = Reread(*keys, Statistics(slot(2 * statistics.both.stack[1], 0)))
    backward = functools.partial(
        mosaic_tpu.backward, norm="layernorm", rebuild=True, interpret=True
    )
    given = SiteBackward(site, statistics, *cotangents, None, again)
    got, want = jax.jit(backward)(given), jax.jit(backward)(read_slices(given))
    jax.tree.map(np.testing.assert_array_equal, got, want)
