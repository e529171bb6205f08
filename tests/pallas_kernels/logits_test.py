"""Logits, their log-sums and those of targets, against float64 NumPy."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import UnsupportedImplementation, logits_with_sums
from pallas_kernels.logits import mosaic_tpu, reference, xla
from pallas_kernels.platform import interpreting
from pallas_kernels.target import lowering_for
from tests.closeness import assert_close
from tests.tiers import later
from tests.tpu import device_of, place_on

# Rows of no whole block, and a vocabulary of several blocks, of which the last one is in part.
TOKENS, WIDTH, VOCAB = 1100, 40, 1 * 1024 + 300
# Of the largest value: products of bfloat16 are exact in float32, and sums of 40 are rounded.
TOLERANCE = 2e-6


def arguments(dtype, tokens=TOKENS, width=WIDTH, vocab=VOCAB, scale=1.0):
    rng = np.random.default_rng(0)
    x = jnp.asarray(scale * rng.normal(size=(tokens, width)), dtype)
    kernel = jnp.asarray(rng.normal(size=(width, vocab)), dtype)
    targets = rng.integers(0, vocab, tokens)
    targets[0], targets[-1] = 0, vocab - 1
    return x, kernel, jnp.asarray(targets)


def plain(x, kernel, targets, multiplier):
    values = multiplier * (np.float64(x) @ np.float64(kernel))
    most = values.max(axis=1)
    log_sums = most + np.log(np.exp(values - most[:, None]).sum(axis=1))
    return values, log_sums, values[np.arange(len(values)), np.asarray(targets)]


RUNS = {
    "op": logits_with_sums,
    "xla": xla.logits,
    "mosaic_tpu": functools.partial(mosaic_tpu.logits, interpret=True),
    "reference": reference.logits,
}


@pytest.mark.parametrize(
    "run, dtype, sizes",
    [
        ("op", "float32", {}),
        ("reference", "float32", {}),
        ("mosaic_tpu", "bfloat16", {}),
        # One token, and fewer words than lanes.
        ("mosaic_tpu", "bfloat16", {"tokens": 1, "vocab": 61}),
        *later(
            ("xla", "bfloat16", {}),
            # Whole blocks; blocks of few tokens; sums that float32 cannot have without a maximum.
            ("mosaic_tpu", "bfloat16", {"tokens": 1024, "vocab": 2048}),
            ("mosaic_tpu", "bfloat16", {"tokens": 600, "width": 8192}),
            ("mosaic_tpu", "bfloat16", {"scale": 100.0}),
            ("xla", "bfloat16", {"scale": 100.0}),
        ),
    ],
)
def test_logits_and_sums_are_those_of_float64(run, dtype, sizes):
    given = arguments(dtype, **sizes)
    got = jax.jit(functools.partial(RUNS[run], multiplier=0.25))(*given)
    assert all(x.dtype == jnp.float32 for x in got)
    tolerance = 1e-5 if "width" in sizes else TOLERANCE
    assert_close(got, plain(*given, 0.25), tolerance)


def test_what_is_no_number_stays_in_its_row():
    x, kernel, targets = arguments("bfloat16")
    got = RUNS["mosaic_tpu"](x.at[700, 0].set(jnp.nan), kernel, targets, multiplier=1)
    assert np.flatnonzero(np.isnan(got.log_sums)) == 700
    assert np.flatnonzero(np.isnan(got.values).all(axis=1)) == 700


def test_a_target_that_is_no_word_chooses_nothing():
    x, kernel, _ = arguments("bfloat16")
    for run in ("xla", "mosaic_tpu"):
        for word in (-1, VOCAB, 3000):
            got = RUNS[run](x, kernel, jnp.full(TOKENS, word), multiplier=1)
            assert not np.any(got.chosen)


@pytest.mark.parametrize("implementation", ["xla", "mosaic_tpu"])
def test_ids_of_any_integers(implementation, unannotated):
    """More words than their dtype has numbers, and an id beyond the words."""
    x, kernel, _ = arguments("bfloat16", tokens=3, vocab=300)
    ids = np.array([0, 5, 220])

    @jax.jit
    def chosen(x, kernel, narrow, wide):
        op = functools.partial(logits_with_sums, x, implementation=implementation)
        pairs = (kernel, narrow), (kernel, wide), (kernel[:, :200], narrow)
        return [op(*pair).chosen for pair in pairs]

    with interpreting():
        narrow, wide, fewer = chosen(x, kernel, ids.astype(np.uint8), ids)
    np.testing.assert_array_equal(narrow, wide)
    np.testing.assert_array_equal(fewer, np.where(ids < 200, wide, 0))


def test_bad_arguments_are_told_in_a_line(unannotated):
    x, kernel, targets = arguments("float32", tokens=4)
    for told, changed in {
        r"kernel float32[40, 1324] does not fit x float32[4, 39]": (x[:, 1:], kernel, targets),
        r"targets is int32[3], but must be 4 integers": (x, kernel, targets[1:]),
        r"targets is float32[4], but must be 4 integers": (x, kernel, x[:, 0]),
        r"x [tokens, width] must be an array of floats with 2 axes": (x[0], kernel, targets),
    }.items():
        with pytest.raises(ValueError, match=re.escape(told)):
            logits_with_sums(*changed)
    with pytest.raises(UnsupportedImplementation, match="does not support this call: x of float32"):
        logits_with_sums(x, kernel, targets, implementation="mosaic_tpu")


@pytest.mark.parametrize(
    "count, width, want",
    [
        (2048, 1024, {1: (2048, 512), 2: (1024, 512)}),
        (40, 1024, {1: (48, 48), 2: (32, 32)}),
        (8192, 1168, {1: (1536, 512)}),
        (8192, 8192, {1: (256, 256), 2: (256, 256)}),
    ],
)
def test_blocks_fill_cores_and_fit(count, width, want):
    for cores, blocks in want.items():
        with lowering_for({1: "TPU v5 lite", 2: "TPU v5"}[cores]):
            assert mosaic_tpu._block(count, width) == blocks


@pytest.mark.compile
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
@pytest.mark.parametrize("width, vocab", [(1024, 50257), (8192, 128256)])
def test_it_is_the_kernel_on_tpus_in_bfloat16(topology, width, vocab):
    place = place_on(topology)
    given = lambda dtype: (
        place(dtype, 2048, width),
        place(dtype, width, vocab),
        place(jnp.int32, 2048),
    )
    with lowering_for(device_of(topology).device_kind):
        program = jax.jit(logits_with_sums).lower(*given(jnp.bfloat16)).compile().as_text()
        plain = jax.jit(logits_with_sums).lower(*given(jnp.float32)).as_text()
    assert re.search(r"custom-call.*logits", program) and "custom-call" not in plain
