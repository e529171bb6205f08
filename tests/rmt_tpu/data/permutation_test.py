"""The order of an epoch: a permutation, shuffled, and the same for ever."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmt_tpu.data.permutation import permute

SIZES = [1, 2, 3, 4, 5, 15, 16, 17, 64, 65, 1000, 4097]


def order(size: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    index = np.arange(size)
    return permute(index, size=size, seed=seed, epoch=np.full(size, epoch))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("epoch", range(3))
def test_every_index_is_there_once(size, epoch):
    assert sorted(order(size, epoch=epoch)) == list(range(size))


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.integers(1, 3000), st.integers(-(2**70), 2**70), st.integers(0, 2**40))
def test_any_size_seed_and_epoch_give_a_permutation(size, seed, epoch):
    assert np.array_equal(np.sort(order(size, seed, epoch)), np.arange(size))


def test_small_sizes_take_every_order():
    assert len({tuple(order(3, epoch=epoch)) for epoch in range(100)}) == 6
    assert len({tuple(order(4, epoch=epoch)) for epoch in range(400)}) == 24


def test_an_index_goes_to_each_place_equally_often():
    """Chi-squared of 16 places over 3,200 epochs; 40 is its 99.95th percentile."""
    size, epochs = 16, 3200
    for index in 0, 7, 15:
        places = permute(np.full(epochs, index), size=size, seed=3, epoch=np.arange(epochs))
        counts = np.bincount(places, minlength=size)
        assert ((counts - epochs / size) ** 2 / (epochs / size)).sum() < 40


def test_neighbours_are_scattered():
    size = 4096
    places = order(size)
    assert abs(np.corrcoef(np.arange(size), places)[0, 1]) < 0.05
    assert abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < 0.05
    assert (places == np.arange(size)).sum() < 8


def test_seeds_and_epochs_have_orders_of_their_own():
    orders = {tuple(order(50, seed, epoch)) for seed in range(-3, 10) for epoch in range(10)}
    assert len(orders) == 130


def test_a_lookup_is_of_its_own_epoch():
    mixed = permute(np.array([5, 5, 9]), size=20, seed=1, epoch=np.array([0, 1, 1]))
    assert mixed.tolist() == [order(20, 1, 0)[5], order(20, 1, 1)[5], order(20, 1, 1)[9]]


def test_a_large_range_costs_nothing():
    index = np.arange(1000) * 10**14
    places = permute(index, size=10**17, seed=0, epoch=np.zeros(1000, np.int64))
    assert len(np.unique(places)) == 1000 and places.min() >= 0 and places.max() < 10**17


def test_the_order_never_changes():
    """A run resumed under another version of numpy or of this code must read the same windows."""
    assert order(10, seed=0, epoch=0).tolist() == [3, 0, 4, 1, 2, 6, 7, 5, 8, 9]
    assert order(10, seed=-7, epoch=123456).tolist() == [1, 9, 3, 7, 5, 4, 2, 6, 8, 0]
