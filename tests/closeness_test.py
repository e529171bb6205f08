"""The measure of other tests: it finds what is off, wherever it is."""

import math

import ml_dtypes
import numpy as np
import pytest

from tests.closeness import assert_close, errors, float64, largest_error

WANT = {"a": np.array([1.0, -4.0]), "b": (np.zeros(2), np.zeros((0, 3)))}


def test_each_leaf_is_measured_by_its_own_largest_value():
    got = {"a": np.array([1.0, -3.0]), "b": [np.zeros(2), np.zeros((0, 3))]}
    assert errors(got, WANT) == {"['a']": 0.25, "['b'][0]": 0, "['b'][1]": 0}
    assert largest_error(got, WANT) == 0.25
    assert_close(got, WANT, 0.25)
    with pytest.raises(AssertionError, match=r"more than 0.2: \{\"\['a'\]\": 0.25\}"):
        assert_close(got, WANT, 0.2)


@pytest.mark.parametrize("wrong, error", [(1e-9, math.inf), (math.nan, math.nan)])
def test_nothing_is_close_to_zeros_but_zeros_and_to_nan_nothing(wrong, error):
    got = WANT | {"b": (np.array([0, wrong]), np.zeros((0, 3)))}
    np.testing.assert_equal(largest_error(got, WANT), error)
    with pytest.raises(AssertionError):
        assert_close(got, WANT, 0.5)
    with pytest.raises(AssertionError):
        assert_close(WANT, got, 0.5)


def test_shapes_and_leaves_must_be_the_same():
    with pytest.raises(AssertionError, match=r"shape \(1,\) and not \(2,\)"):
        largest_error(np.ones(1), np.ones(2))
    with pytest.raises(AssertionError, match="1 leaves and not 2"):
        largest_error([np.ones(1)], [np.ones(1), np.ones(1)])


def test_bfloat16_is_held_exactly():
    value = float64({"x": np.asarray([1 + 2**-7], ml_dtypes.bfloat16)})["x"]
    assert value.dtype == np.float64 and value == 1 + 2**-7
