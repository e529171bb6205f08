"""Text into a token store: the same whoever does it, and however often it was interrupted."""

import gzip
import json
import multiprocessing
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from rmt_tpu.data import ByteTokenizer, documents, pack, part_writer, plan, prepare, token_store
from rmt_tpu.data.batches import split
from rmt_tpu.data.token_store import MANIFEST, PLAN, open_store, read_sealed
from rmt_tpu.errors import RmtError, RunError, UsageError
from rmt_tpu.storage import open_folder
from tests.tiers import later

BYTE = ByteTokenizer()


def some_texts(count: int, seed: int = 0) -> list[str]:
    """Documents of 20 to 400 characters that are not alike."""
    draw = random.Random(seed)
    words = ["stone", "river", "über", "and", "lines\n", "x" * 9]
    return [
        f"{number} " + " ".join(draw.choices(words, k=draw.randint(4, 60)))
        for number in range(count)
    ]


def write_lines(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return str(path)


@pytest.fixture
def source(tmp_path):
    """Inputs of three kinds, in 12 parts or so of 2000 bytes."""
    texts = some_texts(90)
    (tmp_path / "b.txt").write_text("\n<|endoftext|>\n".join(texts[:20]), "utf-8")
    (tmp_path / "c.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in texts[20:30]).encode())
    )
    name = write_lines(tmp_path / "a.jsonl", texts[30:])
    return f"{name},{tmp_path / 'b.txt'},{tmp_path / 'c.jsonl.gz'}"


def make(source: str, output: Path | str, **options) -> prepare.Totals:
    options = {"workers": 1, "part_bytes": 2000, "eval_fraction": 0.2} | options
    return prepare.prepare(source, "byte", output, **options)


def stored(stream) -> list[int]:
    return stream.read(np.zeros(1, np.int64), len(stream))[0].tolist()


def both(output) -> tuple[list[int], list[int]]:
    store = open_store(str(output))
    return stored(store.train), stored(store.held_out)


def expected(source: str, *, fraction: float = 0.2, seed: int = 0) -> tuple[list[int], list[int]]:
    """By the rule as it is written down, of all documents at once."""
    import hashlib

    def below(text: str) -> bool:
        digest = hashlib.blake2b(f"{seed} {text}".encode(), digest_size=16).digest()
        return int.from_bytes(digest, "big") / 2**128 < fraction

    texts = documents(source)
    return (
        pack([text for text in texts if not below(text)], BYTE).tokens.tolist(),
        pack([text for text in texts if below(text)], BYTE).tokens.tolist(),
    )


def refusal(source: str, output, *, kind=UsageError, **options) -> str:
    with pytest.raises(kind) as error:
        make(source, output, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


# What is written -----------------------------------------------------------------------------


def test_the_stream_is_that_of_pack_and_the_counts_are_right(source, tmp_path):
    totals = make(source, tmp_path / "store")
    train, held_out = expected(source)
    assert both(tmp_path / "store") == (train, held_out)
    assert totals.parts > 8 and totals.kept == 0
    assert (totals.train.tokens, totals.held_out.tokens) == (len(train), len(held_out))
    assert totals.train.documents == train.count(BYTE.bos)
    assert totals.held_out.documents == held_out.count(BYTE.bos) > 5


def test_arrays_grow_over_several_shards(source, tmp_path, monkeypatch):
    for module in part_writer, token_store:
        monkeypatch.setattr(module, "SHARD", 512)
    monkeypatch.setattr(token_store, "CHUNK", 128)
    make(source, tmp_path / "store", part_bytes=10**6)
    assert both(tmp_path / "store") == expected(source)
    assert len(list(tmp_path.glob("store/parts/00000/*/train/tokens/c/*"))) > 20
    # A long document alone is of several shards.
    (tmp_path / "long.txt").write_text("word " * 1000 + "\n<|endoftext|>\nshort")
    make(str(tmp_path / "long.txt"), tmp_path / "long")
    train, held_out = both(tmp_path / "long")
    assert len(train) + len(held_out) == 5001 + 5 + 3


@settings(derandomize=True, deadline=None, max_examples=8)
@given(st.integers(1000, 40_000), st.integers(0, 5))
def test_parts_of_any_size_make_the_same_stream(tmp_path_factory, part_bytes, seed):
    folder = tmp_path_factory.mktemp("parts")
    source = write_lines(folder / "a.jsonl", some_texts(60, seed))
    make(source, folder / "store", part_bytes=part_bytes, seed=seed)
    assert both(folder / "store") == expected(source, seed=seed)


def test_processes_make_what_one_makes(source, tmp_path):
    seen = []
    totals = make(source, tmp_path / "two", workers=2, progress=lambda *args: seen.append(args))
    assert make(source, tmp_path / "one") == totals
    one, two = open_store(str(tmp_path / "one")), open_store(str(tmp_path / "two"))
    assert one.train.checksum() == two.train.checksum()
    assert both(tmp_path / "two") == expected(source)
    done, total, what = seen[-1]
    assert what == prepare.TOKENISING and done == total == sum(
        Path(path).stat().st_size for path in source.split(",")
    )


def test_progress_ends_at_the_size_of_the_input(source, tmp_path):
    seen = []
    make(source, tmp_path / "store", progress=lambda *args: seen.append(args))
    total = sum(Path(path).stat().st_size for path in source.split(","))
    assert seen == sorted(seen) and len(seen) > 8
    assert seen[-1] == (total, total, prepare.TOKENISING)


def test_the_manifest_names_no_folder_of_the_input(source, tmp_path):
    make(source, tmp_path / "store")
    for name in MANIFEST, PLAN:
        content = (tmp_path / "store" / name).read_text()
        assert '"a.jsonl"' in content and str(tmp_path) not in content


def test_parts_are_neither_small_nor_many():
    sizes = [plan.usual_part_bytes(total) for total in (0, 10**6, 10**9, 10**11, 10**13)]
    assert sizes[:2] == [2**20] * 2
    assert sizes[2] == 10**9 // 64 and sizes[3] == 64 * 2**20
    assert 10**13 / sizes[4] <= 4096


def test_many_small_files_are_one_part(tmp_path):
    for number, text in enumerate(some_texts(50)):
        (tmp_path / f"{number:02}.txt").write_text(text, "utf-8")
    assert make(str(tmp_path / "*.txt"), tmp_path / "store", part_bytes=10**6).parts == 1
    assert both(tmp_path / "store") == expected(str(tmp_path / "*.txt"))


# What is held out ----------------------------------------------------------------------------


def test_the_share_held_out_is_near_the_fraction_and_depends_on_the_seed(tmp_path):
    source = write_lines(tmp_path / "a.jsonl", some_texts(2000))
    found = []
    for seed in range(2):
        totals = make(source, tmp_path / str(seed), eval_fraction=0.1, seed=seed, part_bytes=10**6)
        # Five standard deviations of the binomial.
        assert totals.held_out.documents == pytest.approx(200, abs=5 * (2000 * 0.09) ** 0.5)
        found.append(both(tmp_path / str(seed))[1])
    assert found[0] != found[1]


def test_equal_documents_stay_together_over_parts(tmp_path):
    texts = some_texts(40)
    source = write_lines(tmp_path / "a.jsonl", texts * 3)
    make(source, tmp_path / "store")
    train, held_out = both(tmp_path / "store")
    assert len(set(documents_of(train))) == len(documents_of(train)) / 3
    assert not set(documents_of(train)) & set(documents_of(held_out))


def documents_of(tokens: list[int]) -> list[bytes]:
    parts, current = [], []
    for token in [*tokens[1:], BYTE.bos]:
        if token == BYTE.bos:
            parts.append(bytes(current))
            current = []
        else:
            current.append(token)
    return parts


@pytest.mark.parametrize("copies", [1, 2])
def test_of_few_documents_one_loses_its_tail(tmp_path, copies):
    """With the share that is wanted of all text; copies of it lose the same."""
    texts = ["".join(f"{name} line {n}\n" for n in range(300)) for name in ("one", "two", "three")]
    source = write_lines(tmp_path / "a.jsonl", texts * copies)
    seen = []
    totals = make(
        source, tmp_path / "store", eval_fraction=0.01, progress=lambda *args: seen.append(args)
    )
    # What is done again for the tail is not counted with what was done at first.
    size = Path(source).stat().st_size
    for what in prepare.TOKENISING, prepare.HOLDING_OUT:
        of_pass = [step[:2] for step in seen if step[2] == what]
        assert of_pass == sorted(of_pass) and of_pass[-1][0] == of_pass[-1][1] <= size
    train, held_out = map(documents_of, both(tmp_path / "store"))
    assert (len(train), len(held_out)) == (3 * copies, copies)
    assert totals.held_out.documents == copies
    tails = {tail.decode() for tail in held_out}
    (tail,) = tails
    (whole,) = (text for text in texts if text.endswith(tail))
    assert sorted(train) == sorted(
        (text.removesuffix(tail) if text == whole else text).encode() for text in texts * copies
    )
    assert 0.005 < copies * len(tail) / sum(map(len, texts * copies)) <= 0.01
    # Done again, it changes nothing.
    (tmp_path / "store" / MANIFEST).unlink()
    assert make(source, tmp_path / "store", eval_fraction=0.01)._replace(kept=0) == totals
    assert tuple(map(documents_of, both(tmp_path / "store"))) == (train, held_out)


def test_one_document_is_divided_as_split_does(tmp_path):
    text = "".join(f"line {n}\n" for n in range(500))
    (tmp_path / "a.txt").write_text(text)
    make(str(tmp_path / "a.txt"), tmp_path / "store", eval_fraction=0.05)
    train, held_out = split([text], eval_fraction=0.05, seed=0)
    assert both(tmp_path / "store") == tuple(
        pack(part, BYTE).tokens.tolist() for part in (train, held_out)
    )


def test_too_little_text_is_told(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    assert "has no text" in refusal(str(tmp_path / "empty.txt"), tmp_path / "a")
    (tmp_path / "one.txt").write_text("x")
    assert "nothing can be held out" in refusal(str(tmp_path / "one.txt"), tmp_path / "b")
    # Both of these are below a half with this seed.
    source = write_lines(tmp_path / "two.jsonl", ["same", "same"])
    seed = next(s for s in range(50) if not expected(source, fraction=0.5, seed=s)[0])
    message = refusal(source, tmp_path / "c", eval_fraction=0.5, seed=seed)
    assert message.startswith("all 2 documents of --input=") and f"--seed={seed}" in message


# Interruptions -------------------------------------------------------------------------------


class Interrupted(Exception):
    pass


def interrupt(monkeypatch, source, output, *, after: int) -> None:
    """Ends the work in the midst of the part after so many."""
    parts = 0
    usual = part_writer.PartWriter.write_anew

    def write(self, job, attempt):
        nonlocal parts
        done = usual(self, job, attempt)
        if parts == after:  # all is written but the manifest
            raise Interrupted
        parts += 1
        return done

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(part_writer.PartWriter, "write_anew", write)
        make(source, output)


def test_the_same_command_goes_on_and_leaves_nothing_behind(source, tmp_path, monkeypatch):
    output = tmp_path / "store"
    for after in 3, 2:
        interrupt(monkeypatch, source, output, after=after)
    message = "is not complete; run recipes.prepare_data again"
    with pytest.raises(UsageError, match=message):
        open_store(str(output))
    totals = make(source, output)
    assert totals.kept == 5 and totals.parts > 8
    assert both(output) == expected(source)
    for part in output.glob("parts/*"):
        assert len([entry for entry in part.iterdir() if entry.is_dir()]) == 1


def test_what_a_dead_attempt_left_beside_a_finished_part_is_deleted(source, tmp_path):
    """It ended after another one's manifest, or its own, and before it could clean up."""
    totals = make(source, tmp_path / "store")
    part = tmp_path / "store/parts/00001"
    (attempt,) = (entry for entry in part.iterdir() if entry.is_dir())
    shutil.copytree(attempt, part / "0123456789ab")
    (tmp_path / "store" / MANIFEST).unlink()
    assert make(source, tmp_path / "store").kept == totals.parts
    assert sorted(part.iterdir()) == sorted([attempt, part / MANIFEST])
    assert both(tmp_path / "store") == expected(source)


def test_a_complete_store_is_left_as_it_is(source, tmp_path):
    totals = make(source, tmp_path / "store")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    again = make(source, tmp_path / "store")
    assert again == totals._replace(kept=totals.parts)
    assert before == {
        path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("content", [None, "damaged", "another"])
def test_a_complete_store_gets_its_tokenizer_again(source, tmp_path, content):
    """It may be lost, or that of another program."""
    output = tmp_path / "store"
    make(source, output)
    path = output / "tokenizer.json"
    before = path.read_bytes()
    path.unlink()
    if content == "another":
        shutil.copy(Path(word_tokenizer(tmp_path / "words"), "tokenizer.json"), path)
    elif content is not None:
        path.write_text(content)
    make(source, output)
    assert path.read_bytes() == before


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda part: flip(next(part.glob("*/train/tokens/c/0"))),
        lambda part: next(part.glob("*/train/offsets/c/0")).unlink(),
        *later(
            lambda part: next(part.glob("*/eval/tokens/zarr.json")).unlink(),
            lambda part: flip(part / MANIFEST),
            lambda part: (part / MANIFEST).write_text("{}"),
        ),
    ],
    ids=["bit", "missing chunk", "missing array", "manifest", "another manifest"],
)
def test_a_damaged_part_is_done_again_and_the_others_are_kept(source, tmp_path, damage):
    output = tmp_path / "store"
    totals = make(source, output)
    (output / MANIFEST).unlink()
    part = next(p for p in sorted(output.glob("parts/*")) if list(p.glob("*/eval/tokens")))
    damage(part)
    assert make(source, output) == totals._replace(kept=totals.parts - 1)
    assert both(output) == expected(source)


def test_tokens_that_were_exchanged_are_noticed(source, tmp_path):
    """Written anew with checksums of their own, as by another program: the part's tells."""
    output = tmp_path / "store"
    totals = make(source, output)
    (output / MANIFEST).unlink()
    (array,) = output.glob("parts/00002/*/train/tokens")
    opened = ts.open({"driver": "zarr3", "kvstore": f"file://{array}/"}).result()
    opened[3].write(opened[3].read().result() ^ 1).result()
    assert make(source, output).kept == totals.parts - 1
    assert both(output) == expected(source)


def test_another_command_on_half_a_store_is_refused(source, tmp_path, monkeypatch):
    output = tmp_path / "store"
    interrupt(monkeypatch, source, output, after=3)
    assert "seed 0 is now 1" in refusal(source, output, seed=1)
    assert "eval_fraction 0.2 is now 0.3" in refusal(source, output, eval_fraction=0.3)
    assert "had 3 files and now has 2" in refusal(source.rpartition(",")[0], output)
    make(source, output)
    assert "seed 0 is now 1" in refusal(source, output, seed=1)


def test_other_content_of_an_input_is_refused(source, tmp_path):
    output = tmp_path / "store"
    make(source, output)
    path = tmp_path / "a.jsonl"
    content = path.read_text("utf-8")
    path.write_text(content.replace("stone", "stein"), "utf-8")
    assert "the content of 'a.jsonl' has changed" in refusal(source, output)
    path.write_text(content + '{"text": "more"}\n', "utf-8")
    size = len(content.encode())
    assert f"'a.jsonl' of {size} bytes is now 'a.jsonl' of {size + 17}" in refusal(source, output)


def test_another_tokenizer_is_refused(source, tmp_path):
    make(source, tmp_path / "store")
    name = word_tokenizer(tmp_path / "words")
    with pytest.raises(UsageError, match="tokenizer byte is now words"):
        prepare.prepare(
            source, name, tmp_path / "store", part_bytes=2000, eval_fraction=0.2, workers=1
        )


def word_tokenizer(folder: Path, size: int = 20) -> str:
    """A vocabulary of `size` words and the token that starts a document."""
    import tokenizers

    vocabulary = {"<s>": 0, "<unk>": 1} | {f"w{n}": n for n in range(2, size)}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.mark.parametrize(("size", "dtype"), [*later((65_536, "uint16")), (65_537, "uint32")])
def test_tokens_are_as_wide_as_the_vocabulary_needs(tmp_path, size, dtype):
    texts = [f"w{size - 1} w{n} w{2 * n}" for n in range(2, 30)]
    source = write_lines(tmp_path / "a.jsonl", texts)
    prepare.prepare(source, word_tokenizer(tmp_path / "words", size), tmp_path / "store", workers=1)
    store = open_store(str(tmp_path / "store"))
    both = stored(store.train) + stored(store.held_out)
    assert max(both) == size - 1 and both.count(size - 1) == 28
    (metadata,) = tmp_path.glob("store/parts/00000/*/train/tokens/zarr.json")
    assert json.loads(metadata.read_text())["data_type"] == dtype


# Errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"eval_fraction": 0.0}, {"eval_fraction": 0.6}, {"workers": 0}]
)
def test_values_out_of_range_are_refused(source, tmp_path, options):
    ((name, value),) = options.items()
    assert f"--{name}={value} is out of range" in refusal(source, tmp_path / "store", **options)


@pytest.mark.parametrize("workers", [*later(1), 2])
def test_bad_input_names_file_and_line_in_whichever_process(source, tmp_path, workers):
    path = tmp_path / "a.jsonl"
    content = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*content[:40], b'{"text": 1}\n', *content[40:]]))
    message = refusal(source, tmp_path / "store", workers=workers)
    assert message.startswith("--input=") and "a.jsonl' line 41: the object has no field" in message
    assert not multiprocessing.active_children()


def test_a_folder_of_something_else_is_refused(source, tmp_path):
    for name in MANIFEST, PLAN:
        (tmp_path / name).write_text('{"crc32": 1}')
        assert f"{name} was written by another program" in refusal(source, tmp_path)
        (tmp_path / name).unlink()


@pytest.mark.parametrize(
    ("there", "output", "said"),
    [
        ("config.json", "", "has a config.json or checkpoints, like a run or a model"),
        ("checkpoints/4/COMMIT", "", "has a config.json or checkpoints, like a run or a model"),
        ("config.json", "checkpoints", "is in the folder of a run"),
        ("config.json", "checkpoints/4", "is in the folder of a run"),
        ("tokenizer.json", "", "holds a tokenizer"),
        ("tokenizer_config.json", "", "holds a tokenizer"),
    ],
)
def test_a_run_a_model_or_a_tokenizer_is_kept(source, tmp_path, there, output, said):
    """Otherwise its tokenizer would be replaced by that of the store."""
    folder = tmp_path / "mine"
    for name in there, "weights":
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"mine {name}")
    files = lambda: {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    before = files()
    message = refusal(source, folder / output)
    assert message.startswith(f"--output={folder / output} {said}; legal: a new folder, or the ")
    assert files() == before


def test_a_store_beside_a_run_keeps_the_tokenizer_of_both(source, tmp_path):
    folder = tmp_path / "store"
    made = make(source, folder)
    (folder / "config.json").write_text("{}")
    assert make(source, folder).train == made.train
    (folder / "tokenizer.json").write_text("of another kind")
    assert "also holds a run, whose tokenizer" in refusal(source, folder)
    assert (folder / "tokenizer.json").read_text() == "of another kind"


def test_a_file_in_the_way_of_the_output_is_told(source, tmp_path):
    (tmp_path / "file").write_text("")
    message = refusal(source, tmp_path / "file" / "store", kind=RmtError)
    assert "cannot be written to" in message


def test_a_process_that_is_killed_ends_the_command_in_one_line(source, tmp_path):
    killed = []

    def kill(*_) -> None:
        if not killed and (children := multiprocessing.active_children()):
            killed.append(children[0])
            children[0].kill()

    message = refusal(source, tmp_path / "store", workers=2, kind=RunError, progress=kill)
    assert killed and "fewer --workers" in message
    assert make(source, tmp_path / "store", workers=1).parts > 8


def test_two_commands_at_once_make_one_store(source, tmp_path, monkeypatch):
    """The second one does all there is to do while the first is in the midst of a part."""
    usual, others = part_writer.PartWriter.write_anew, []

    def write(self, job, attempt):
        done = usual(self, job, attempt)
        if job.number == 3 and not others:
            others.append(None)
            others.append(make(source, tmp_path / "store"))
        return done

    monkeypatch.setattr(part_writer.PartWriter, "write_anew", write)
    totals = make(source, tmp_path / "store")
    assert totals._replace(kept=0) == others[1]._replace(kept=0)
    assert both(tmp_path / "store") == expected(source)
    assert read_sealed(open_folder(tmp_path / "store"), MANIFEST) is not None
