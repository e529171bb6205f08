"""Mixtures of texts: exact shares, the same batches on any hosts, and changes during a run."""

import dataclasses
import json
import random
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmt_tpu.config import DataConfig, MixtureSource, overrides, parse_mixture
from rmt_tpu.config.presets import run as preset_run
from rmt_tpu.data import ByteTokenizer, MixedText, Mixture, Windows
from rmt_tpu.data.datasets import load_datasets
from rmt_tpu.data.mixture import counts, only_text, order, source_names
from rmt_tpu.errors import RunError, UsageError

SEQ_LEN, BATCH = 4, 8


def windows(number: int, size: int, batch_size: int = BATCH) -> Windows:
    """Of the tokens `1000 number + 1` and those after it, by which a text is known."""
    tokens = np.arange(size, dtype=np.int32) + 1000 * number + 1
    return Windows(tokens, seq_len=SEQ_LEN, batch_size=batch_size, bos=0, seed=3, shuffle=True)


SIZES = (101, 41, 400)  # of 25, 10 and 100 windows


def mixture(*units: int, batch_size: int = BATCH, **state) -> Mixture:
    texts = [
        MixedText(f"text{n}", share, windows(n, SIZES[n], batch_size))
        for n, share in enumerate(units)
    ]
    return Mixture(texts, **state)


def read(mixed: Mixture, begin: int, end: int) -> np.ndarray:
    """The inputs of the windows from one position to another."""
    assert (end - begin) % mixed.batch_size == 0
    batches = [mixed.batch_at(p).inputs for p in range(begin, end, mixed.batch_size)]
    return np.concatenate(batches)


def texts(inputs: np.ndarray) -> list[int]:
    return ((inputs[:, 0] - 1) // 1000).tolist()


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=7).filter(any),
    st.integers(0, 1000),
    st.integers(0, 1000),
)
def test_shares_are_exact_in_any_range_of_windows(units, begin, length):
    units, total = tuple(units), sum(units)
    positions = np.array([begin, begin + length], np.int64)
    before, after = counts(units, positions)
    assert after.sum() - before.sum() == length
    expected = np.array(units) * length / total
    assert (np.abs(after - before - expected) < 2).all()
    used = np.count_nonzero(units)
    most = 1 - 1 / (2 * used - 2) if used > 1 else 0
    assert (np.abs(before - np.array(units) * begin / total) <= most + 1e-9).all()
    chosen, _ = order(units)
    whole = length // len(chosen) * len(chosen)
    before, after = counts(units, np.array([begin, begin + whole], np.int64))
    assert ((after - before) * total == np.array(units) * whole).all()


def test_the_order_stays():
    """Runs depend on it."""
    assert order((7, 2, 1))[0].tolist() == ORDER
    assert order((5000, 5000))[0].tolist() == [0, 1]
    chosen, before = order((3333, 3333, 3334))
    assert len(chosen) == 10_000 and before[-1].tolist() == [3333, 3333, 3334]


ORDER = [0, 0, 1, 0, 0, 2, 0, 0, 1, 0]


def test_windows_come_from_texts_in_their_shares_each_in_its_own_epochs():
    mixed = mixture(7, 2, 1)
    found = read(mixed, 0, 400)
    np.testing.assert_array_equal(texts(found), ORDER * 40)
    np.testing.assert_array_equal(mixed.batch_at(2).texts, np.array([ORDER[2:]] * SEQ_LEN).T)
    for number, size in enumerate(SIZES):
        own = found[np.array(texts(found)) == number]
        alone = windows(number, size, batch_size=len(own)).batch_at(0).inputs
        np.testing.assert_array_equal(own, alone)
    assert mixed.windows_read(400) == [280, 80, 40]
    assert mixed.epochs(400) == [280 / 25, 8.0, 0.4]
    assert mixed.metrics(400) == {
        "data/text0/tokens": 1120,
        "data/text1/tokens": 320,
        "data/text2/tokens": 160,
        "data/text0/epochs": 11.2,
        "data/text1/epochs": 8.0,
        "data/text2/epochs": 0.4,
    }


def test_texts_are_read_at_the_same_time_and_an_error_of_one_is_raised(monkeypatch):
    mixed, barrier = mixture(1, 1, 1), threading.Barrier(3, timeout=60)
    usual = Windows.at

    def at(self, numbers):
        barrier.wait()
        if self is mixed.texts[2].windows:
            raise RunError("storage is away")
        return usual(self, numbers)

    monkeypatch.setattr(Windows, "at", at)
    with pytest.raises(RunError, match="storage is away"):
        mixed.batch_at(0)


def test_one_text_is_read_as_without_a_mixture():
    mixed, alone = mixture(10_000), windows(0, SIZES[0])
    for position in (0, 3, 200):
        found, expected = mixed.batch_at(position), alone.batch_at(position)
        assert expected.texts is None and not found.texts.any()
        for one, other in zip(found[:4], expected[:4], strict=True):
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_hosts_read_their_rows_of_the_same_batch(hosts):
    """In which way the rows are divided among them, too."""
    mixed = mixture(7, 2, 1)
    for position in (0, 13, 399):
        whole = mixed.batch_at(position)
        for rows in (
            [np.arange(n, BATCH, hosts) for n in range(hosts)],
            np.split(np.arange(BATCH), hosts),
        ):
            for own in rows:
                for part, of in zip(mixed.batch_at(position, own), whole, strict=True):
                    np.testing.assert_array_equal(part, of[own])


def test_the_batch_size_does_not_change_the_order():
    np.testing.assert_array_equal(
        read(mixture(7, 2, 1), 0, 96), read(mixture(7, 2, 1, batch_size=3), 0, 96)
    )


def saved(mixed: Mixture) -> dict:
    return json.loads(json.dumps(mixed.meta()))


def test_a_resumed_run_goes_on_at_any_window():
    mixed = mixture(7, 2, 1)
    for position in (1, 8, 15, 123):
        again = mixture(7, 2, 1).resumed(position, saved(mixed))
        np.testing.assert_array_equal(
            read(again, position, position + 80), read(mixed, position, position + 80)
        )
        assert again.meta() == mixed.meta()


def test_shares_that_change_repeat_and_skip_no_window():
    """Twice, in between with a text that rests; and resumed at any place."""
    first, changes = mixture(7, 2, 1), [(24, (2, 8, 0)), (64, (1, 1, 1)), (96, None)]
    found, mixed, begin = [], first, 0
    for end, units in changes:
        found.append(read(mixed, begin, end))
        again = mixture(*mixed._units).resumed(end - 8, saved(mixed))
        np.testing.assert_array_equal(found[-1][-8:], read(again, end - 8, end))
        if units:
            mixed, begin = mixture(*units).resumed(end, saved(mixed)), end
    all_texts = [n for part in found for n in texts(part)]
    assert texts(found[0]) == (ORDER * 3)[:24]
    assert [texts(found[1]).count(n) for n in range(3)] == [8, 32, 0]
    assert all_texts.count(2) == ORDER[:].count(2) * 2 + texts(found[2]).count(2)
    inputs = np.concatenate(found)
    for number, size in enumerate(SIZES):
        own = inputs[np.array(all_texts) == number]
        alone = windows(number, size, batch_size=len(own)).batch_at(0).inputs
        np.testing.assert_array_equal(own, alone)
        assert mixed.windows_read(96)[number] == len(own)
    with pytest.raises(ValueError, match="before window 64"):
        mixed.batch_at(63)


def test_a_text_that_is_taken_out_keeps_its_place():
    mixed = mixture(5, 5)
    without = Mixture(mixed.texts[:1]).resumed(40, saved(mixed))
    again = mixture(5, 5).resumed(80, saved(without))
    assert without.windows_read(80) == [60]
    assert again.windows_read(80) == [60, 20]


def test_a_run_of_one_text_goes_on_with_a_mixture():
    alone = windows(0, SIZES[0])
    state = only_text("text0", 10_000, alone.checksum())
    same = mixture(10_000).resumed(40, state)
    np.testing.assert_array_equal(read(same, 40, 80), read(mixture(10_000), 40, 80))
    mixed = mixture(5, 5).resumed(40, state)
    assert mixed.windows_read(40) == [40, 0] and mixed.windows_read(60) == [50, 10]


def test_a_source_with_other_text_is_refused():
    state = saved(mixture(7, 2, 1))
    other = [MixedText("text0", 10, windows(2, 77))]
    with pytest.raises(UsageError, match="--mixture: the tokens of text0 are not those"):
        Mixture(other).resumed(8, state)
    moved = [text._replace(source=f"moved/{text.source}") for text in mixture(7, 2, 1).texts]
    assert Mixture(moved).resumed(8, state).windows_read(8) == mixture(7, 2, 1).windows_read(8)
    with pytest.raises(UsageError, match="text1 and moved are the same text"):
        Mixture([*mixture(7, 2).texts, MixedText("moved", 1, windows(1, SIZES[1]))])


def test_names_are_short_and_differ():
    assert source_names(["gs://a", "gs://b/", "runs/books"]) == ["a", "b", "books"]
    assert source_names(["x/train", "y/train", "z"]) == ["x/train", "y/train", "z"]
    assert source_names(["b/*.txt,c d.txt", "stdlib"]) == ["_.txt_c_d.txt", "stdlib"]
    assert source_names(["a", "a/"]) == ["a.0", "a.1"]


# The config ------------------------------------------------------------------------------------


def test_a_mixture_is_parsed_from_the_command_line():
    parse = lambda text: [(each["source"], each["share"]) for each in parse_mixture(text)]
    assert parse("gs://a=0.7,gs://b=0.2, runs/books=.1") == [
        ("gs://a", 0.7),
        ("gs://b", 0.2),
        ("runs/books", 0.1),
    ]
    assert parse("a.txt,b.txt=1,x=y=0") == [("a.txt,b.txt", 1.0), ("x=y", 0.0)]
    assert parse("") == []
    for text in "a", "a=0.5,b", "a=0.5,b=much":
        with pytest.raises(UsageError, match="has no share; legal: a list like"):
            parse_mixture(text)


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ({"a": 0.5, "b": 0.4}, "the shares add up to 0.9; legal: shares whose sum is 1"),
        ({"a": 0.33333, "b": 0.66667}, "the share 0.33333 of a is not exact"),
        ({"": 1.0}, "a source without a name"),
        ({"a": 1.5}, "share=1.5 must be at least 0, at most 1"),
        ({"a": float("nan")}, "must be at least 0"),
    ],
)
def test_a_mixture_that_is_not_exact_is_refused(shares, said):
    with pytest.raises(UsageError) as error:
        DataConfig(mixture=tuple(MixtureSource(*item) for item in shares.items()))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_source_twice_is_refused():
    with pytest.raises(UsageError, match="names a 2 times"):
        DataConfig(mixture=(MixtureSource("a", 0.5), MixtureSource("a", 0.5)))


def test_texts_are_loaded_with_what_each_holds_out(tmp_path):
    draw = random.Random(0)
    words = "stone river over and".split()
    for name in "ab":
        content = "\n<|endoftext|>\n".join(
            f"{name} {n} " + " ".join(draw.choices(words, k=20)) for n in range(40)
        )
        (tmp_path / f"{name}.txt").write_text(content)
    sources = [
        {"source": f"{tmp_path}/{name}.txt", "share": s} for name, s in (("a", 0.25), ("b", 0.75))
    ]
    base = overrides.apply(preset_run("rmt-tiny"), {"model.vocab_size": 257, "data.seq_len": 16})
    config = overrides.apply(base, {"data.mixture": sources})
    datasets = load_datasets(config, ByteTokenizer())
    assert [(m.name, m.share) for m in datasets.mixed] == [("a.txt", 0.25), ("b.txt", 0.75)]
    assert datasets.held_out is datasets.mixed[1].windows
    for each, text, own in zip(sources, datasets.train.texts, datasets.mixed, strict=True):
        alone = load_datasets(
            overrides.apply(base, {"data.source": each["source"]}), ByteTokenizer()
        )
        assert text.windows.checksum() == alone.train.checksum()
        assert own.windows.checksum() == alone.held_out.checksum()
    wrong = dataclasses.replace(config.data.mixture[0], source=f"{tmp_path}/x.txt")
    data = dataclasses.replace(config.data, mixture=(wrong, config.data.mixture[1]))
    with pytest.raises(UsageError, match="^--mixture: '.*x.txt': '.*x.txt' matches no file"):
        load_datasets(dataclasses.replace(config, data=data), ByteTokenizer())


class WithMore(ByteTokenizer):
    """A tokenizer with one token more than the byte tokenizer, whose text is `more`."""

    vocab_size = 258
    more = b""

    def decode_bytes(self, tokens):
        return b"".join(
            self.more if t == 257 else super(WithMore, self).decode_bytes([t]) for t in tokens
        )


def test_only_tokens_with_a_text_need_an_embedding(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("stone river over and " * 200)
    sizes = {"model.vocab_size": 257, "data.seq_len": 16, "train.batch_size": 2}
    source = {"data.source": f"{tmp_path}/a.txt", "data.eval_fraction": 0.1}
    config = overrides.apply(preset_run("rmt-tiny"), sizes | source)
    datasets = load_datasets(config, WithMore())
    assert datasets.train.checksum() == load_datasets(config, ByteTokenizer()).train.checksum()
    refused = "^model.vocab_size=257 is smaller than the 258 tokens of --tokenizer=byte; legal: 258"
    messages = overrides.apply(config, {"data.format": "messages"})
    with pytest.raises(UsageError, match=refused):
        load_datasets(messages, WithMore())
    monkeypatch.setattr(WithMore, "more", b"x")
    with pytest.raises(UsageError, match=refused):
        load_datasets(config, WithMore())
    monkeypatch.setattr(WithMore, "more", b"")
    monkeypatch.setattr(WithMore, "bos", 257)
    with pytest.raises(UsageError, match=refused):
        load_datasets(config, WithMore())
