"""Several processes that make one store; here they are threads, which gather in memory."""

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rmt_tpu.data import part_writer, prepare
from rmt_tpu.data.token_store import MANIFEST, PLAN, open_store
from rmt_tpu.errors import RunError, UsageError


class Thread:
    """One of a group of threads."""

    def __init__(self, number: int, shared: "Shared"):
        self.number, self.count, self._shared, self._calls = number, shared.count, shared, 0

    def gather(self, value: str, what: str) -> list[str]:
        self._calls += 1
        with self._shared.changed:
            values = self._shared.values.setdefault(self._calls, {})
            values[self.number] = value
            self._shared.changed.notify_all()
            self._shared.changed.wait_for(lambda: len(values) == self.count or self._shared.failed)
            if len(values) < self.count:
                raise Lost
        return [values[number] for number in range(self.count)]


class Lost(Exception):
    """Another one has failed."""


class Shared:
    def __init__(self, count: int):
        self.count, self.failed = count, False
        self.values: dict[int, dict[int, str]] = {}
        self.changed = threading.Condition()


def together(calls: list) -> list:
    """Return what each call, run with a group, returns or raises; a failing call ends all."""
    shared = Shared(len(calls))

    def call(number: int):
        try:
            return calls[number](Thread(number, shared))
        except Exception as error:
            with shared.changed:
                shared.failed = True
                shared.changed.notify_all()
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(call, range(len(calls))))


def make(source: str, output: Path, **options) -> prepare.Totals:
    options = {"workers": 1, "part_bytes": 2000, "eval_fraction": 0.2} | options
    return prepare.prepare(source, "byte", output, **options)


def of_team(count: int, source: str, output: Path, **options) -> list:
    return together([lambda group: make(source, output, group=group, **options)] * count)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> str:
    """Of about eight parts in three files."""
    folder, draw = tmp_path_factory.mktemp("text"), random.Random(0)
    words = ["stone", "river", "über", "and"]
    for name, count in (("a", 50), ("b", 5), ("c", 20)):
        texts = (f"{name}{n} " + " ".join(draw.choices(words, k=40)) for n in range(count))
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text(lines)
    return str(folder / "*.jsonl")


@pytest.fixture(scope="module")
def alone(source, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    make(source, folder)
    return folder


@pytest.mark.parametrize("count", [2, 3, 20])
def test_a_team_makes_byte_for_byte_what_one_makes(source, alone, tmp_path, count):
    """Be there even more processes than parts; and what is complete stays as it is."""
    totals = of_team(count, source, tmp_path / "store")
    expected = make(source, alone)
    assert totals == [expected._replace(kept=0)] * count
    assert files(tmp_path / "store") == files(alone)
    assert of_team(count, source, tmp_path / "store") == [expected] * count


def test_the_tail_of_one_document_is_held_out_by_a_team_too(source, tmp_path):
    for count in 1, 2:
        totals = of_team(count, source, tmp_path / str(count), eval_fraction=1e-4, seed=1)
        assert {t.held_out.documents for t in totals} == {1}
    assert files(tmp_path / "1") == files(tmp_path / "2")


class Killed(Exception):
    pass


@pytest.mark.parametrize("number", [0, 1])
def test_what_a_team_left_is_gone_on_with(source, alone, tmp_path, monkeypatch, number):
    """By another number of processes, after any of them has died."""
    usual = part_writer.PartWriter.write_anew

    def write(self, job, attempt):
        if job.number >= 4 and job.number % 2 == number:
            raise Killed
        return usual(self, job, attempt)

    with monkeypatch.context() as patch:
        patch.setattr(part_writer.PartWriter, "write_anew", write)
        ends = of_team(2, source, tmp_path / "store")
    assert all(isinstance(end, Exception) for end in ends)
    assert any(isinstance(end, Killed) for end in ends)
    assert not (tmp_path / "store" / MANIFEST).exists()
    totals = of_team(3, source, tmp_path / "store")
    assert len(set(totals)) == 1 and 0 < totals[0].kept < totals[0].parts
    assert files(tmp_path / "store") == files(alone)


def test_a_team_that_fails_keeps_its_plan(tmp_path):
    """One may fail while the others still work; a process alone leaves nothing."""
    (tmp_path / "a.jsonl").write_text('{"text": 1}\n' * 200)
    source = str(tmp_path / "a.jsonl")
    ends = of_team(2, source, tmp_path / "store")
    assert any(isinstance(end, UsageError) and "line 1" in str(end) for end in ends)
    assert {PLAN, "tokenizer.json"} <= set(files(tmp_path / "store"))
    with pytest.raises(UsageError, match="line 1"):
        make(source, tmp_path / "alone")
    assert not files(tmp_path / "alone")


def test_shares_are_about_equal():
    sizes = [random.Random(n).randint(1, 1000) for n in range(200)]
    shares = [prepare._share(sizes, Thread(number, Shared(4))) for number in range(4)]
    assert sorted(sum(shares, [])) == list(range(200))
    loads = [sum(sizes[number] for number in share) for share in shares]
    assert max(loads) - min(loads) <= 100


def test_a_team_that_does_not_agree_says_in_what(source, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for path in Path(source).parent.iterdir():
        (other / path.name).write_text(path.read_text().replace("stone", "rock"))
    for said, options in {
        "--seed differs between process 1 and process 0": {"seed": 3},
        "--eval_fraction differs between": {"eval_fraction": 0.3},
        "--input differs between process": {"source": str(other / "*.jsonl")},
        "--input differs between": {"part_bytes": 3000},
    }.items():
        usual = {"source": source, "output": tmp_path / "store"}
        calls = [
            lambda group, usual=usual: make(**usual, group=group),
            lambda group, other=usual | options: make(**other, group=group),
        ]
        for error in together(calls):
            assert isinstance(error, UsageError) and str(error).startswith(said)
    assert not (tmp_path / "store").exists()


def test_folders_that_are_not_shared_are_told(source, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "SHARED_SECONDS", 0.05)
    outputs = tmp_path / "one", tmp_path / "two"
    calls = [lambda group, o=output: make(source, o, group=group) for output in outputs]
    errors = [e for e in together(calls) if isinstance(e, UsageError)]
    assert len(errors) == 1
    assert "two is not the same folder on process 1 as on process 0" in str(errors[0])


def test_a_part_that_is_gone_is_told(source, tmp_path, monkeypatch):
    """As by a command that deletes the output meanwhile."""
    monkeypatch.setattr(prepare, "SHARED_SECONDS", 0.05)
    monkeypatch.setattr(prepare, "read_part_manifest", lambda folder, number: None)
    ends = of_team(2, source, tmp_path / "store")
    errors = [e for e in ends if isinstance(e, RunError)]
    assert len(errors) == 1 and "which another process wrote" in str(errors[0])


def test_a_store_of_a_team_is_read(source, alone, tmp_path):
    of_team(2, source, tmp_path / "store")
    one, two = open_store(str(alone)), open_store(str(tmp_path / "store"))
    assert one.train.checksum() == two.train.checksum()
