"""The held-out part, the stream of tokens, and its windows."""

import itertools
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rmt_tpu.data import ByteTokenizer, Windows, pack, split
from rmt_tpu.errors import UsageError

BOS = 256
light = settings(derandomize=True, deadline=None, max_examples=60)
some_documents = st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=30)


def windows(tokens, seq_len=4, batch_size=2, *, seed=0, shuffle=True) -> Windows:
    return Windows(
        np.array(tokens, np.int32),
        seq_len=seq_len, batch_size=batch_size, bos=BOS, seed=seed, shuffle=shuffle,
    )  # fmt: skip


def rows(batch) -> list[tuple]:
    return list(zip(*(leaf.tolist() for leaf in jax.tree.leaves(batch)), strict=True))


def refusal(call, *arguments, **options) -> str:
    with pytest.raises(UsageError) as error:
        call(*arguments, **options)
    assert "\n" not in str(error.value) and "legal" in str(error.value)
    return str(error.value)


# The held-out part ---------------------------------------------------------------------------


def numbered(count: int, size: int = 100) -> list[str]:
    return [f"{number:0{size}}" for number in range(count)]


@light
@given(some_documents, st.floats(0.001, 0.5), st.integers(-5, 2**65))
def test_both_parts_hold_all_text_in_order(documents, fraction, seed):
    assume(any(len(document) > 1 for document in documents))
    train, held_out = split(documents, eval_fraction=fraction, seed=seed)
    assert train and held_out
    assert sum(map(len, held_out)) <= sum(map(len, documents)) / 2
    if len(set(documents)) > 1:
        assert not set(train) & set(held_out)
        assert train == [d for d in documents if d not in held_out]
        assert held_out == [d for d in documents if d in held_out]
    else:
        assert [a + b for a, b in zip(train, held_out, strict=True)] == documents


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.25, 0.5])
def test_share_is_near_the_fraction_with_one_document_far_too_large(fraction):
    documents = [*numbered(1000), "x" * 60_000]
    for seed in range(5):
        _, held_out = split(documents, eval_fraction=fraction, seed=seed)
        assert sum(map(len, held_out)) == pytest.approx(fraction * 160_000, rel=0.1)


def test_one_more_document_is_held_out_where_that_is_nearer():
    documents = numbered(10)
    for fraction, count in (0.04, 1), (0.14, 1), (0.16, 2), (0.5, 5):
        assert len(split(documents, eval_fraction=fraction, seed=0)[1]) == count


def test_the_smallest_is_held_out_where_all_are_too_large():
    documents = ["a" * 500, "b" * 300, "c" * 400]
    assert split(documents, eval_fraction=0.01, seed=0)[1] == ["b" * 300]


def test_choice_depends_on_text_and_seed_and_not_on_order():
    documents = numbered(40)
    held_out = [set(split(documents, eval_fraction=0.1, seed=seed)[1]) for seed in range(5)]
    assert len(set(map(frozenset, held_out))) == 5
    for seed in range(5):
        assert set(split(documents[::-1], eval_fraction=0.1, seed=seed)[1]) == held_out[seed]


def test_choice_does_not_depend_on_hash_randomisation():
    code = (
        "from rmt_tpu.data import split;"
        "print(split([f'document {i}' for i in range(50)], eval_fraction=0.1, seed=1)[1])"
    )
    said = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    documents = [f"document {i}" for i in range(50)]
    # The tests' own process has another.
    assert said == f"{split(documents, eval_fraction=0.1, seed=1)[1]}\n"


def test_copies_stay_together():
    documents = ["same"] * 20 + numbered(20, size=4)
    for seed in range(10):
        train, held_out = split(documents, eval_fraction=0.5, seed=seed)
        assert not set(train) & set(held_out)


@pytest.mark.parametrize(
    ("text", "fraction", "tail"),
    [
        ("one\ntwo three\nfour\n" * 10, 0.09, "two three\nfour\n"),
        ("one two " * 10, 0.1, "one two "),
        ("x" * 100, 0.25, "x" * 25),
        ("ab", 0.001, "b"),
    ],
)
def test_of_one_document_the_tail_is_held_out_from_a_boundary(text, fraction, tail):
    assert split([text], eval_fraction=fraction, seed=0) == (
        [text.removesuffix(tail)], [tail],
    )  # fmt: skip


def test_nothing_is_held_out_at_zero():
    assert split(["a", "b"], eval_fraction=0.0, seed=0) == (["a", "b"], [])


@pytest.mark.parametrize("fraction", [-0.1, 0.51, float("nan")])
def test_other_fractions_are_refused(fraction):
    assert str(fraction) in refusal(split, ["a", "b"], eval_fraction=fraction, seed=0)


def test_one_character_is_too_short_to_divide():
    message = refusal(split, ["a"], eval_fraction=0.1, seed=0, source="a.txt")
    assert "--data=a.txt is one document of 1 character, too short" in message


# The stream ----------------------------------------------------------------------------------


def test_each_document_follows_a_bos():
    tokens = pack(["ab", "", "é"], ByteTokenizer()).tokens
    assert (tokens.tolist(), tokens.dtype) == ([BOS, 97, 98, BOS, BOS, 0xC3, 0xA9], np.int32)
    assert pack([], ByteTokenizer()).tokens.shape == (0,)


# Windows -------------------------------------------------------------------------------------


def test_a_batch_by_hand():
    tokens = [BOS, 1, 2, BOS, 3, 4, 5, BOS, BOS, 6]
    first, second = windows(tokens, 4, 2, shuffle=False).batches()
    assert [leaf.dtype for leaf in jax.tree.leaves(first)] == [np.int32] * 3 + [np.float32]
    assert rows(first) == [
        ([BOS, 1, 2, BOS], [1, 2, BOS, 3], [1, 1, 1, 2], [1, 1, 1, 1]),
        ([3, 4, 5, BOS], [4, 5, BOS, BOS], [1, 1, 1, 2], [1, 1, 1, 1]),
    ]
    assert rows(second) == [
        ([BOS, 6, 0, 0], [6, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0]),
        ([0] * 4, [0] * 4, [0] * 4, [0] * 4),
    ]


def test_a_row_of_padding_does_not_hold_the_last_token():
    (batch,) = windows([1, 2, 3, 4, 5], 4, 3, shuffle=False).batches()
    assert rows(batch)[1:] == [([0] * 4, [0] * 4, [0] * 4, [0] * 4)] * 2


streams = st.tuples(st.integers(2, 120), st.integers(1, 20), st.integers(1, 9)).filter(
    lambda sizes: sizes[0] > sizes[1]
)


def targets(batches) -> list[int]:
    return [t for b in batches for t in b.targets[b.weights > 0].tolist()]


@light
@given(streams)
def test_evaluation_has_each_target_once_in_order_and_one_shape(sizes):
    length, seq_len, batch_size = sizes
    data = windows(range(1000, 1000 + length), seq_len, batch_size, shuffle=False)
    batches = list(data.batches())
    assert targets(batches) == list(range(1001, 1000 + length))
    assert len(targets(batches)) == data.tokens_per_epoch
    assert {leaf.shape for leaf in jax.tree.leaves(batches)} == {(batch_size, seq_len)}
    for batch in batches:
        assert not batch.weights[batch.segment_ids == 0].any()
        real = batch.weights > 0
        assert (batch.targets[real] == batch.inputs[real] + 1).all()


@light
@given(streams, st.integers(0, 3), st.booleans())
def test_each_epoch_has_each_target_once(sizes, epoch, shuffle):
    length, seq_len, _ = sizes
    data = windows(range(1000, 1000 + length), seq_len, 1, seed=5, shuffle=shuffle)
    start = epoch * data.num_windows
    found = targets(data.batch_at(start + i) for i in range(data.num_windows))
    assert sorted(found) == list(range(1001, 1000 + length))


@settings(light, max_examples=15)
@given(streams, st.lists(st.integers(1, 7), min_size=1, max_size=12))
def test_another_batch_size_repeats_and_skips_no_window(sizes, batch_sizes):
    length, seq_len, _ = sizes
    stream = range(length)
    one = windows(stream, seq_len, 1)
    position = 0
    for batch_size in batch_sizes:
        batch = windows(stream, seq_len, batch_size).batch_at(position)
        expected = [rows(one.batch_at(position + i))[0] for i in range(batch_size)]
        assert rows(batch) == expected
        position += batch_size


def test_epochs_and_seeds_have_orders_of_their_own():
    data = windows(range(401), 4, 100)
    orders = [windows(range(401), 4, 100, seed=1).batch_at(0), data.batch_at(0), data.batch_at(100)]
    firsts = [batch.inputs[:, 0].tolist() for batch in orders]
    assert all(a != b for a, b in itertools.combinations([*firsts, sorted(firsts[0])], 2))
    assert data.batch_at(0).inputs.tolist() == orders[1].inputs.tolist()


def test_without_shuffling_epochs_are_in_the_order_of_the_stream():
    batch = windows(range(9), 4, 5, shuffle=False).batch_at(1)
    assert batch.inputs[:, 0].tolist() == [4, 0, 4, 0, 4]


def test_a_far_position_is_as_good_as_any():
    data = windows(range(401), 4, 3)
    assert data.batch_at(10**12).inputs.shape == (3, 4)


def test_counts():
    data = windows(range(14), 4)
    assert (data.num_windows, data.tokens_per_epoch) == (4, 13)


def test_the_stream_is_not_copied():
    tokens = np.arange(50, dtype=np.int32)
    data = Windows(tokens, seq_len=4, batch_size=1, bos=BOS, seed=0, shuffle=False)
    assert data.stream.tokens is tokens


def test_too_short_a_stream_names_what_would_do():
    message = refusal(windows, range(8), 8, shuffle=True)
    assert "--data has 8 tokens" in message and "--seq_len=8" in message
    assert "--seq_len of at most 7" in message
    windows(range(8), 7, shuffle=True)
    named = {"batch_size": 1, "bos": BOS, "seed": 0, "source": "a.txt"}
    for shuffle, said in (True, "--data=a.txt has 1 tokens"), (False, "held-out part of --data=a."):
        tokens = np.zeros(1, np.int32)
        assert said in refusal(Windows, tokens, seq_len=8, shuffle=shuffle, **named)


def test_held_out_text_may_be_shorter_than_a_window():
    (batch,) = windows(range(3), 8, shuffle=False).batches()
    np.testing.assert_array_equal(batch.inputs[0, :3], [0, 1, 2])
    np.testing.assert_array_equal(batch.weights[0], [1, 1, 0, 0, 0, 0, 0, 0])
    assert "held-out part of --data has 1 tokens" in refusal(windows, range(1), 8, shuffle=False)


@pytest.mark.parametrize("length", [0, 1])
def test_no_window_fits_a_stream_of_one_token(length):
    assert "at most" not in refusal(windows, range(length), 1)


@pytest.mark.parametrize("sizes", [{"seq_len": 0}, {"seq_len": -1}, {"batch_size": 0}])
def test_sizes_below_one_are_refused(sizes):
    ((name, value),) = sizes.items()
    assert f"--{name}={value}" in refusal(windows, range(9), **sizes)


def test_rows_of_a_batch_are_those_of_the_whole():
    data = windows(range(41), 4, 6)
    for pick in (slice(2, 5), slice(None), np.array([0, 3, 5])):
        picked = [rows(data.batch_at(9))[row] for row in np.arange(6)[pick]]
        assert rows(data.batch_at(9, pick)) == picked
    data = windows(range(41), 4, 6, shuffle=False)
    whole = list(data.batches())
    assert len(whole) == data.num_batches == 2
    for number, batch in enumerate(whole):
        assert rows(data.in_order(number, slice(1, 4))) == rows(batch)[1:4]
