"""How errors are measured: by their rows, against bounds of the dtype and of a sum."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from rmt_tpu.analysis import device_compare
from rmt_tpu.analysis.device_case import DeviceCase
from rmt_tpu.analysis.device_compare import bound, compare, error


def draw(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def small_rows():
    """Every other row of 64 numbers is a tenth of those between."""
    want = draw(32, 64)
    want[::2] /= 10
    return want


def test_rounding_is_legal():
    want = draw(64, 256)
    most = bound({"x": jnp.zeros(1, "bfloat16")})
    found = error(jnp.asarray(want, "bfloat16"), want)
    # A factor of 2 and more is left for what is rounded on the way.
    assert 0 < 2 * found.largest < most.largest and 2 * found.mean < most.mean


@pytest.mark.parametrize("what", ["all", "one row", "one entry"])
def test_errors_among_small_values_are_seen(what):
    most = bound({"x": jnp.zeros(1, "bfloat16")})
    want = small_rows()
    got = want.copy()
    if what == "all":
        got *= 1.01  # each entry is off by less than rounding might be
        assert error(got, want).largest < most.largest
        assert error(got, want).mean > most.mean
        return
    if what == "one row":
        got[4] *= 1.05
    else:
        got[4, np.argmin(np.abs(want[4]))] = 0.03 * np.max(np.abs(want[4]))
    # Over the largest value of all it would be less than is legal of a row.
    assert np.max(np.abs(got - want)) < most.largest * np.max(np.abs(want))
    assert error(got, want).largest > most.largest


def test_rows_that_cancel_have_a_floor():
    want = draw(32, 64)
    got = want.copy()
    want[0] = 0
    got[0] = 1e-3
    largest = np.max(np.abs(want))
    assert error(got, want).largest == pytest.approx(16e-3 / largest)
    assert error(got, want, cancels=True).largest == pytest.approx(4e-3 / largest)


def test_a_row_has_at_least_16_entries():
    want = draw(2, 9, 2, 1)
    got = want.copy()
    got[0, 0, 0] += 0.5
    assert error(got, want).largest == pytest.approx(0.5 / np.max(np.abs(want[0])))


def test_blocks_change_nothing(monkeypatch):
    want = draw(37, 24)
    got = want + 1e-3 * draw(37, 24)[::-1]
    at_once = error(got, want)
    monkeypatch.setattr(device_compare, "BLOCK", 100)
    assert error(got, want) == pytest.approx(at_once, rel=1e-12)


def test_what_is_no_number_and_other_shapes():
    want = draw(8, 16)
    got = want.copy()
    got[-1, -1] = np.nan
    assert math.isnan(error(got, want).largest) and math.isnan(error(got, want).mean)
    assert math.isnan(error(want, got).largest)
    assert math.isnan(error(want[:1], want).largest)
    assert error(np.zeros((0, 3)), np.zeros((0, 3))) == (0, 0)
    assert error(np.full(3, 2.0), np.zeros(3)).largest == 32  # the floor of a sixteenth of 1
    assert error(np.float32(1), np.float32(2)) == (0.5, 0.5)


def test_bounds_are_those_of_the_dtype_and_of_the_sum():
    narrow = {"x": jnp.zeros((8, 4), "bfloat16"), "k": jnp.zeros((4, 4), "float32")}
    wide = {"x": jnp.zeros((400, 16), "float32")}
    assert bound(narrow) == (6 * 2.0**-8, 2.0**-7)
    assert bound(narrow, wide=True).largest < 2.0**-12
    assert bound(wide, narrow=True) == bound(narrow)
    assert bound(wide).largest == 32 * 20 * 2.0**-24 == 2 * bound(wide).mean


def test_what_has_to_be_the_same_to_the_bit():
    case = DeviceCase("undo", "", lambda: {}, dict, 0, exact={"rebuilt": "residual"})
    inputs = {"residual": jnp.arange(4, dtype=jnp.int16)}
    got = {"rebuilt": np.array([0, 1, 2, 5], np.int16)}
    assert compare(case, inputs, got, {}) == ({"rebuilt": 2.0}, {"rebuilt": 0.0})
