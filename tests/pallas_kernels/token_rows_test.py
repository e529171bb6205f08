"""Rows of tokens' choices, their sums by token, and the gradients of both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import UnsupportedImplementation, rows_of_tokens, sums_of_rows
from pallas_kernels.target import lowering_for
from pallas_kernels.token_rows import mosaic_tpu, reference, xla
from tests.closeness import assert_close
from tests.tiers import later
from tests.tpu import place_on

# More than two blocks of 128 tokens, one of them without a row, and rows that are of no choice.
TOKENS, EACH, ROWS, WIDTH = 300, 4, 260, 136
UNUSED = np.r_[100:110, 250:260]
USED = np.setdiff1d(np.arange(ROWS), UNUSED)
# Of the largest value: sums of up to four numbers, rounded at the end.
TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-2}


def given():
    """The places of 240 choices, without tokens 128 to 255, and of unused rows between them."""
    rng = np.random.default_rng(0)
    choices = np.r_[: 128 * EACH, 256 * EACH : TOKENS * EACH]
    order = rng.permutation(choices)[:ROWS].astype(np.int32)
    order[UNUSED] = TOKENS * EACH + np.arange(20)
    places = np.full(TOKENS * EACH, ROWS, np.int32)
    places[order[USED]] = USED
    return order, places


def plain(rows, order):
    sums = np.zeros((TOKENS, WIDTH))
    for row, choice in zip(np.float64(rows[USED]), order[USED], strict=True):
        sums[choice // EACH] += row
    return sums


def drawn(dtype, *shape):
    return np.random.default_rng(1).normal(size=shape).astype(dtype)


RUNS = {
    "op": lambda *x: sums_of_rows(*x, each=EACH),
    "xla": lambda *x: xla.sums(*x, each=EACH),
    "mosaic_tpu": lambda *x: mosaic_tpu.sums(*x, each=EACH, interpret=True),
    "reference": lambda rows, _, places: reference.sums_of_rows(rows, places, each=EACH),
}


@pytest.mark.parametrize(
    "run, dtype",
    [
        *((run, "float32") for run in RUNS),
        *later(*((run, "bfloat16") for run in RUNS)),
    ],
)
def test_each_token_has_the_sum_of_its_rows(run, dtype):
    """Rows of no choice are not a number, and are in no sum."""
    order, places = given()
    rows = drawn(dtype, ROWS, WIDTH)
    want = plain(rows, order)
    rows[UNUSED] = np.nan
    sums = jax.jit(RUNS[run])(jnp.asarray(rows), jnp.asarray(order), jnp.asarray(places))
    assert_close(sums, want, TOLERANCE[dtype])


def test_both_are_each_other_s_transposes():
    order, places = map(jnp.asarray, given())
    x, d_rows = (jnp.asarray(drawn("float32", size, WIDTH)) for size in (TOKENS, ROWS))
    rows, pull_back = jax.vjp(lambda x: rows_of_tokens(x, order, places), x)
    np.testing.assert_array_equal(rows[USED], x[order[USED] // EACH])
    assert jnp.all(jnp.isfinite(rows))
    (d_x,) = pull_back(d_rows)
    assert_close(d_x, plain(d_rows, order), TOLERANCE["float32"])
    _, pull_back = jax.vjp(lambda rows: sums_of_rows(rows, order, places, each=EACH), d_rows)
    np.testing.assert_array_equal(pull_back(x)[0], rows)


@pytest.mark.compile
@pytest.mark.parametrize(
    "topology", ["v5e:2x2", *later("v4:2x2x1", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")]
)
@pytest.mark.parametrize("rows, kernels", [(8192, 1), (16384, 0)])
def test_of_few_rows_a_kernel_is_taken(topology, rows, kernels):
    """Of as many as half of the 16384 choices; beyond that each choice's row is read."""
    array = place_on(topology)
    arguments = array("bfloat16", rows, 512), array("int32", rows), array("int32", 16384)
    run = jax.jit(lambda *x: sums_of_rows(*x, each=4))
    assert run.lower(*arguments).compile().as_text().count("tpu_custom_call") == kernels


@pytest.mark.parametrize("each", [0, -2, 2.0, True])
def test_choices_per_token_that_are_none_are_refused(each, unannotated):
    order = places = np.arange(4)
    with pytest.raises(ValueError, match=f"each={each} must be an integer, at least 1"):
        sums_of_rows(np.ones((4, 8), np.float32), order, places, each=each)


def test_nothing_to_add_up_and_no_choice():
    none, places = jnp.zeros(0, jnp.int32), jnp.zeros(4, jnp.int32)
    sums = sums_of_rows(jnp.zeros((0, 8)), none, places, each=2)
    np.testing.assert_array_equal(sums, np.zeros((2, 8)))
    with pytest.raises(ValueError, match="0 choices of 4 tokens; legal: the same number for each"):
        rows_of_tokens(jnp.ones((4, 8)), places[:2], none)


def test_a_kernel_that_cannot_serve_says_why(unannotated):
    order, places = map(jnp.asarray, given())
    rows = np.zeros((ROWS, WIDTH), np.float16)
    with pytest.raises(UnsupportedImplementation, match="'triton' is unknown"):
        sums_of_rows(rows, order, places, each=EACH, implementation="triton")
    with pytest.raises(UnsupportedImplementation, match="rows of float16"):
        sums_of_rows(rows, order, places, each=EACH, implementation="mosaic_tpu")


@pytest.mark.parametrize("kind, most", [("TPU v5 lite", 16), ("TPU v4", 8)])
def test_tiles_of_wide_rows_fit_vmem(kind, most):
    with lowering_for(kind):
        for dtype, item in ((jnp.bfloat16, 2), (jnp.float32, 4)):
            assert mosaic_tpu._columns(2304, dtype) == min(2304, most * 1024 // item)
            assert mosaic_tpu._columns(16384, dtype) == most * 1024 // item


@pytest.mark.compile
def test_wide_rows_in_float32_compile():
    place = place_on("v5e:2x2")
    given = place(jnp.float32, 512, 6144), place(jnp.int32, 512), place(jnp.int32, 2048)
    sums = lambda *x: sums_of_rows(*x, each=4, implementation="mosaic_tpu")
    assert "tpu_custom_call" in jax.jit(sums).lower(*given).compile().as_text()


def test_more_tiles_than_the_library_counts_are_refused():
    """JAX's kernels count tiles by a histogram, whose edges in float32 are wrong at 8192 bins."""
    choices = jax.ShapeDtypeStruct((2**22,), jnp.int32)
    shape = lambda rows: jax.ShapeDtypeStruct((rows, 128), jnp.bfloat16)
    assert mosaic_tpu.unsupported("sums", shape(2**20), choices, choices) is None
    refused = mosaic_tpu.unsupported("sums", shape(2**20 + 1), choices, choices)
    assert refused == "1048577 rows (legal: at most 1048576)"
