"""A token store as it is read: what `Windows` sees, and what of it is refused."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from rmt_tpu.data import ByteTokenizer, Windows, is_store, load_saved, open_store
from rmt_tpu.data.prefetch import Prefetcher
from rmt_tpu.data.prepare import prepare
from rmt_tpu.data.token_store import (
    MANIFEST,
    PLAN,
    TokenStream,
    read_sealed,
    seal,
)
from rmt_tpu.data.tokenizer import Tokenizer
from rmt_tpu.errors import RunError, UsageError
from rmt_tpu.storage import Fault, open_folder
from tests.tiers import later

BYTE = ByteTokenizer()
TEXTS = [f"{number} " + "word " * (number * 7 % 40) for number in range(80)]


def write_store(folder: Path, texts: list[str] = TEXTS, **options) -> Path:
    """A store of about nine parts; some of them hold nothing out."""
    folder.mkdir()
    source = folder / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = {"workers": 1, "part_bytes": 1000, "eval_fraction": 0.1} | options
    prepare(str(source), "byte", folder / "store", **options)
    return folder / "store"


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """A store that tests only read."""
    return write_store(tmp_path_factory.mktemp("shared") / "data")


@pytest.fixture
def store(tmp_path) -> Path:
    """One to damage."""
    return write_store(tmp_path / "data")


def whole(stream: TokenStream) -> np.ndarray:
    return stream.read(np.zeros(1, np.int64), len(stream))[0]


def windows(tokens, batch_size=6, seq_len=16, shuffle=True) -> Windows:
    return Windows(
        tokens, seq_len=seq_len, batch_size=batch_size, bos=BYTE.bos, seed=3, shuffle=shuffle
    )


def same(one, other) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


# Reading -------------------------------------------------------------------------------------


def test_windows_of_a_store_are_those_of_the_array(shared):
    opened = open_store(str(shared))
    for stream, shuffle in (opened.train, True), (opened.held_out, False):
        stored, held = windows(stream, shuffle=shuffle), windows(whole(stream), shuffle=shuffle)
        assert stored.num_windows == held.num_windows
        for position in (0, 5, stored.num_windows - 2, 10**9):
            assert same(stored.batch_at(position), held.batch_at(position))
        for ours, expected in zip(stored.batches(), held.batches(), strict=True):
            assert same(ours, expected)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.data())
def test_rows_are_read_across_parts_and_past_the_end(shared, data):
    stream = open_store(str(shared)).train
    tokens = whole(stream)
    starts = data.draw(st.lists(st.integers(0, len(stream) + 50), max_size=8))
    length = data.draw(st.integers(1, 3000))
    read = stream.read(np.array(starts, np.int64), length)
    assert (read.dtype, read.shape) == (np.int32, (len(starts), length))
    padded = np.concatenate([tokens, np.zeros(length + 50, np.int32)])
    for row, start in zip(read, starts, strict=True):
        np.testing.assert_array_equal(row, padded[start : start + length])


def test_documents_are_those_that_went_in(shared):
    opened = open_store(str(shared))
    found = [
        stream.document(number)
        for stream in (opened.train, opened.held_out)
        for number in range(stream.num_documents)
    ]
    assert all(document[0] == BYTE.bos for document in found)
    assert sorted(BYTE.decode(document) for document in found) == sorted(TEXTS)
    for number in -1, opened.train.num_documents:
        with pytest.raises(IndexError, match=f"document {number} does not exist"):
            opened.train.document(number)


def test_rows_of_all_hosts_make_up_the_batch(shared):
    """Each opens the store by itself, and reads only its own rows."""
    batch = windows(open_store(str(shared)).train, 8).batch_at(40)
    for hosts in 2, 4:
        own = np.split(np.arange(8), hosts)
        parts = [windows(open_store(str(shared)).train, 8).batch_at(40, rows) for rows in own]
        assert same(jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts), batch)


def test_another_batch_size_and_number_of_hosts_repeat_and_skip_no_window(shared):
    """A run that resumes five times, each time with some windows read ahead and not used."""
    seq_len, stream = 16, open_store(str(shared)).train
    count = windows(stream, 1, seq_len).num_windows
    tokens = whole(stream)[: count * seq_len]
    position, seen = 0, []

    def go_on(hosts: int, batch_size: int, steps: int) -> None:
        own = np.split(np.arange(batch_size), hosts)
        data = [windows(open_store(str(shared)).train, batch_size) for _ in own]
        ahead = [
            Prefetcher(lambda at, d=d, rows=rows: d.batch_at(at, rows), position, batch_size)
            for d, rows in zip(data, own, strict=True)
        ]
        for _ in range(steps):
            for host in ahead:
                seen.extend(host.next()[0].inputs.tolist())
        for host in ahead:
            host.close()

    for hosts, batch_size, steps in [(1, 4, 9), (2, 8, 5), (4, 8, 2), (2, 2, 7), (1, 1, count)]:
        steps = min(steps, (count - position) // batch_size)
        go_on(hosts, batch_size, steps)
        position += steps * batch_size
    assert position == count == len(seen)
    padded = np.concatenate([tokens, np.zeros(count * seq_len - len(tokens), np.int32)])
    assert sorted(seen) == sorted(padded.reshape(count, seq_len).tolist())


def test_the_checksum_is_that_of_the_tokens_and_of_nothing_else(tmp_path, shared):
    checksum = open_store(str(shared)).train.checksum()
    again = open_store(str(write_store(tmp_path / "again"))).train
    other = open_store(str(write_store(tmp_path / "other", [*TEXTS[:-1], "another"]))).train
    assert checksum == again.checksum() != other.checksum()


def test_nothing_is_read_to_open_a_store(shared, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("an array was opened")

    monkeypatch.setattr(ts, "open", refuse)
    opened = open_store(str(shared))
    assert windows(opened.train).num_windows > 0 and opened.train.checksum()


def test_a_store_brings_its_tokenizer(shared):
    assert load_saved(str(shared)).fingerprint() == BYTE.fingerprint()
    assert open_store(str(shared)).tokenizer.bos == BYTE.bos


# What is refused -----------------------------------------------------------------------------


def test_a_store_is_told_from_text(shared, tmp_path):
    assert is_store(str(shared)) and is_store("gs://bucket/store")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / PLAN).write_text("{}")
    assert is_store(str(tmp_path / "half"))
    for source in "stdlib", "", "a.txt,b.txt", str(tmp_path), f"{shared}/*.json", "http://a/b":
        assert not is_store(source)


def test_a_folder_without_a_store_is_refused(tmp_path):
    with pytest.raises(UsageError, match="has no token store"):
        open_store(str(tmp_path))
    (tmp_path / PLAN).write_bytes(seal({}))
    with pytest.raises(UsageError, match="is not complete; run recipes.prepare_data again"):
        open_store(str(tmp_path))


def test_another_tokenizer_is_known(shared):
    class Other(ByteTokenizer):
        name = "other"

        def fingerprint(self) -> str:
            return "another"

    opened = open_store(str(shared))
    assert opened.has_tokenizer(BYTE) and not opened.has_tokenizer(Other())
    assert isinstance(Other(), Tokenizer)


@pytest.mark.parametrize("flag", ["data", "text"])
def test_a_store_that_is_not_there_is_refused_by_its_flag(tmp_path, flag):
    with pytest.raises(UsageError, match=f"^--{flag}={tmp_path} has no token store: "):
        open_store(str(tmp_path), flag)
    (tmp_path / PLAN).write_bytes(seal({}))
    with pytest.raises(UsageError, match=f"^--{flag}={tmp_path} is not complete; "):
        open_store(str(tmp_path), flag)


def change(store: Path, edit) -> None:
    """Edits the manifest's content, with a checksum that is right again."""
    content = read_sealed(open_folder(store), MANIFEST)
    edit(content)
    (store / MANIFEST).write_bytes(seal(content))


@pytest.mark.parametrize(
    "edit",
    [
        lambda c: c["parts"][0].update(attempt="../../../etc"),
        lambda c: c["parts"][0]["train"].update(tokens=-1),
        lambda c: c["parts"].pop(),
        lambda c: c["plan"]["tokenizer"].update(bos=257),
        *later(
            lambda c: c["parts"][0].update(attempt="/etc"),
            lambda c: c["parts"][0]["train"].update(tokens=2**60),
            lambda c: c["parts"][0]["train"].update(tokens="many"),
            lambda c: c["parts"][0]["train"].update(more=1),
            lambda c: c.update(parts=None),
            lambda c: c.pop("plan"),
            lambda c: c["plan"]["tokenizer"].update(vocab_size=2**40),
        ),
    ],
)
def test_a_manifest_of_impossible_values_is_refused(store, edit):
    change(store, edit)
    with pytest.raises(RunError, match=f"{MANIFEST} is damaged") as error:
        open_store(str(store))
    assert "\n" not in str(error.value)


def test_a_damaged_manifest_is_refused(store):
    content = (store / MANIFEST).read_bytes()
    for damaged in content[:-20], content.replace(b'"tokens": ', b'"tokens": 1', 1), b"[]", b"\xff":
        (store / MANIFEST).write_bytes(damaged)
        with pytest.raises(RunError, match="is damaged: its checksum does not match"):
            open_store(str(store))
    (store / MANIFEST).write_bytes(content.replace(b'"version": 1', b'"version": 7'))
    with pytest.raises(UsageError, match="version 7 cannot be read; legal: 1"):
        open_store(str(store))
    (store / MANIFEST).write_text('{"step": 3}')
    with pytest.raises(UsageError, match="was written by another program"):
        open_store(str(store))


def flip(path: Path, at: int = 3) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda array: flip(array / "c/0"), "[Cc]hecksum|[Dd]igest"),
        (lambda array: flip(array / "c/0", -10), "[Cc]hecksum|[Dd]igest"),
        (lambda array: (array / "c/0").write_bytes((array / "c/0").read_bytes()[:99]), "."),
        (lambda array: (array / "c/0").unlink(), "missing"),
        (lambda array: (array / "zarr.json").unlink(), "not exist|not found|NOT_FOUND"),
        (lambda array: (array / "zarr.json").write_text("{"), "."),
    ],
    ids=["bit", "bit of the index", "cut off", "missing shard", "missing array", "metadata"],
)
def test_damage_names_the_array(store, damage, said):
    stream = open_store(str(store)).train
    (array,) = store.glob("parts/00002/*/train/tokens")
    damage(array)
    with pytest.raises(Fault, match=f"train tokens of part 2 of .*: .*({said})") as error:
        whole(stream)
    assert "\n" not in str(error.value)
    # What lies elsewhere is read as ever.
    assert stream.read(np.zeros(1, np.int64), 100)[0, 0] == BYTE.bos


@pytest.mark.parametrize("tokens", [10, 10**9])
def test_an_array_of_another_size_than_the_manifest_says_is_refused(store, tokens):
    change(store, lambda c: c["parts"][2]["train"].update(tokens=tokens))
    stream = open_store(str(store)).train
    begin = int(stream._begins[2])
    with pytest.raises(Fault, match="train tokens of part 2 of .*shape"):
        stream.read(np.array([begin], np.int64), 5)


def test_tokens_beyond_the_vocabulary_are_refused(store):
    """Checksums that are right do not make them right: a model would read past its embedding."""
    (array,) = store.glob("parts/00002/*/train/tokens")
    opened = ts.open({"driver": "zarr3", "kvstore": f"file://{array}/"}).result()
    opened[5].write(257).result()
    with pytest.raises(Fault, match="tokens that are not in its vocabulary"):
        whole(open_store(str(store)).train)


def test_offsets_outside_of_the_tokens_are_refused(store):
    (array,) = store.glob("parts/00000/*/train/offsets")
    opened = ts.open({"driver": "zarr3", "kvstore": f"file://{array}/"}).result()
    opened[1].write(10**15).result()
    with pytest.raises(Fault, match="document 0 has impossible bounds, 0 to 1000000000000000"):
        open_store(str(store)).train.document(0)


def test_what_a_thread_could_not_read_is_raised_by_the_step_that_needs_it(store):
    stream = open_store(str(store)).train
    (array,) = store.glob("parts/00002/*/train/tokens")
    (array / "c/0").unlink()
    data, reached = windows(stream, batch_size=1), 0
    with Prefetcher(data.batch_at, 0, 1) as ahead, pytest.raises(Fault, match="part 2"):
        while True:
            ahead.next()
            reached += 1
    for position in range(reached):
        data.batch_at(position)
    with pytest.raises(Fault, match="part 2"):
        data.batch_at(reached)
