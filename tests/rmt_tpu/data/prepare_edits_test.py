"""Inputs that are edited before, between and while they are tokenised: no mixture of versions."""

import gzip
import json
import os
import random
from pathlib import Path

import pytest

from rmt_tpu.data import part_writer, prepare
from rmt_tpu.data.token_store import MANIFEST, PLAN
from rmt_tpu.errors import RunError, UsageError
from tests.tiers import later

PART = 2000


def some_lines(seed: int) -> str:
    draw = random.Random(seed)
    words = ["stone", "river", "über", "and"]
    texts = (f"{n} " + " ".join(draw.choices(words, k=draw.randint(4, 60))) for n in range(60))
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


@pytest.fixture
def path(tmp_path) -> Path:
    """Of about seven parts."""
    path = tmp_path / "a.jsonl"
    path.write_text(some_lines(0))
    return path


def make(path: Path, output: Path, **options) -> prepare.Totals:
    options = {"workers": 1, "part_bytes": PART, "eval_fraction": 0.2} | options
    return prepare.prepare(str(path), "byte", output, **options)


def edit(path: Path, at: int, *, quietly: bool = False) -> None:
    """Another letter where there is one, at byte `at` or the next that will do."""
    status, content = path.stat(), bytearray(path.read_bytes())
    at = next(n for n in range(at, len(content)) if content[n : n + 1] in (b"e", b"o"))
    content[at] ^= ord("e") ^ ord("o")
    with open(path, "r+b") as file:
        file.write(content)
    if quietly:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def refusal(kind, *arguments, **options) -> str:
    with pytest.raises(kind) as error:
        make(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def stop_after(monkeypatch, parts: int, then=lambda: None):
    """Before the part with this number is begun `then` is called; ends the work if that raises."""
    usual = part_writer.PartWriter.write_anew

    def write(self, job, attempt):
        if job.number == parts:
            then()
        return usual(self, job, attempt)

    monkeypatch.setattr(part_writer.PartWriter, "write_anew", write)


class Killed(Exception):
    pass


def die() -> None:
    raise Killed


def half(monkeypatch, path: Path, output: Path) -> None:
    """Three parts of a store."""
    with monkeypatch.context() as patch, pytest.raises(Killed):
        stop_after(patch, 3, die)
        make(path, output)


def test_the_same_input_gives_the_same_files(path, tmp_path):
    make(path, tmp_path / "one")
    copy = tmp_path / "other" / "a.jsonl"
    copy.parent.mkdir()
    copy.write_bytes(path.read_bytes())
    os.utime(copy, (1, 1))
    make(copy, tmp_path / "two", workers=2)
    assert files(tmp_path / "one") == files(tmp_path / "two")


@pytest.mark.parametrize("at", [10, 5 * PART])
@pytest.mark.parametrize("packed", [False, True])
def test_an_edit_of_a_few_bytes_is_noticed_in_a_complete_store(path, tmp_path, at, packed):
    """Of the same size, far from the beginning, and with the time of before."""
    if packed:
        path = tmp_path / "a.jsonl.gz"
        path.write_bytes(gzip.compress(some_lines(0).encode(), compresslevel=0, mtime=0))
    totals = make(path, tmp_path / "store")
    assert make(path, tmp_path / "store").kept == totals.parts
    edit(path, at, quietly=True)
    message = refusal(UsageError, path, tmp_path / "store")
    assert f"the content of {path.name!r} has changed" in message
    assert message.endswith("to resume, give another --output, or delete this folder")


def test_a_line_is_mended_before_any_part_is_finished(path, tmp_path):
    """Once the line is mended, the same command makes the store, and so does a new seed."""
    output, good = tmp_path / "store", path.read_text()
    for options in {}, {"seed": 1}:
        path.write_text('{"text": "good"}\n{"text": 1}\n' + good)
        assert "line 2" in refusal(UsageError, path, output, **options)
        assert not files(output)
    path.write_text(good)
    assert make(path, output, seed=1).kept == 0
    make(path, tmp_path / "other", seed=1)
    assert files(output) == files(tmp_path / "other")


def test_a_line_that_is_mended_after_a_finished_part_is_an_edit(path, tmp_path):
    good = path.read_text()
    path.write_text(good + '{"text": 1}\n')
    assert "line 61" in refusal(UsageError, path, tmp_path / "store")
    assert (tmp_path / "store" / PLAN).exists()
    path.write_text(good + '{"text": "mended"}\n')
    message = refusal(UsageError, path, tmp_path / "store")
    assert "is now 'a.jsonl' of" in message and message.endswith("or delete this folder")


def test_an_edit_of_what_is_in_the_store_is_noticed_in_half_of_one(path, tmp_path, monkeypatch):
    half(monkeypatch, path, tmp_path / "store")
    edit(path, PART, quietly=True)
    assert "the content of 'a.jsonl' has changed" in refusal(UsageError, path, tmp_path / "store")


def test_an_edit_of_what_is_not_yet_in_it_gives_the_store_of_the_edited(
    path, tmp_path, monkeypatch
):
    half(monkeypatch, path, tmp_path / "store")
    edit(path, 5 * PART)
    assert make(path, tmp_path / "store").kept == 3
    make(path, tmp_path / "fresh")
    assert files(tmp_path / "store") == files(tmp_path / "fresh")


def test_an_edit_that_moves_the_ends_of_lines_is_noticed(path, tmp_path):
    """Parts have other lines then, be there as many or not."""
    path.write_text("")
    make_lines = lambda n: json.dumps({"text": "x" * n}) + "\n"
    path.write_text(make_lines(2500) + make_lines(1500) + make_lines(3000))
    make(path, tmp_path / "store", eval_fraction=0.5, seed=3)
    path.write_text(make_lines(1900) + make_lines(2100) + make_lines(3000))
    message = refusal(UsageError, path, tmp_path / "store", eval_fraction=0.5, seed=3)
    assert "made from other input" in message and "content of" in message


EDITS = {"read": 0, "reading": 3 * PART, "to be read": 6 * PART}


@pytest.mark.parametrize(
    "workers, at",
    [
        *[pytest.param(1, at, id=f"1-{name}") for name, at in EDITS.items()],
        pytest.param(2, EDITS["reading"], id="2-reading"),
        *later((2, EDITS["read"]), (2, EDITS["to be read"])),
    ],
)
def test_an_edit_meanwhile_is_an_error(path, tmp_path, monkeypatch, at, workers):
    if workers == 1:
        stop_after(monkeypatch, 3, lambda: edit(path, at, quietly=True))
        options = {}
    else:
        edited = []

        def once(*_) -> None:
            if not edited:
                edited.append(edit(path, at, quietly=True))

        options = {"progress": once}
    message = refusal(RunError, path, tmp_path / "store", workers=workers, **options)
    assert "a.jsonl' was edited " in message
    assert not (tmp_path / "store" / MANIFEST).exists()


def test_a_file_that_comes_to_a_glob_meanwhile_is_an_error(path, tmp_path, monkeypatch):
    stop_after(monkeypatch, 3, lambda: (tmp_path / "b.jsonl").write_text(some_lines(1)))
    message = refusal(RunError, tmp_path / "*.jsonl", tmp_path / "store")
    assert "*.jsonl' was edited during the command" in message


def test_what_another_version_left_unfinished_is_written_over(path, tmp_path, monkeypatch):
    """An attempt has the same name then."""
    finish = part_writer._SplitWriter.finish

    def killed(self):
        finish(self)
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(part_writer._SplitWriter, "finish", killed)
        make(path, tmp_path / "store")
    assert list(tmp_path.glob("store/parts/00000/*/train/tokens/c/0"))
    edit(path, 10)
    make(path, tmp_path / "store")
    make(path, tmp_path / "fresh")
    assert files(tmp_path / "store") == files(tmp_path / "fresh")
