"""Slips of each operator, and the outcomes of a draw from a small project."""

import ast
import json
from pathlib import Path

import pytest

from tests import lines, mutations

SLIPS = {
    "a < b": {"a <= b"},
    "a is not None": {"a is None"},
    "x = a - b * 2": {"a + b * 2", "b + 2", "1", "3"},
    "x = 'a' + b": set(),
    "if a and (not b): pass": {"a or not b", "b", "not (a and (not b))"},
    "f(*a, b)": {"pass"},
    "x = f(a, b, c=True, d=0.5)": {"f(b, a, c=True, d=0.5)", "False", "1.0"},
    "x = max(a, b)": set(),
    "x += a": {"pass"},
    "def f(a: T[2], b=1) -> T[3]: return a": {"0", "2", "None"},
    "def f():\n    'Returns 1.'\n    return None": set(),
    "raise E(f(a, b))": set(),
    "assert a, f'{b + 1}'": {"not a"},
    "__all__ = [*f(a, b)]": set(),
    "logging.info(a, 1)": set(),
    "if TYPE_CHECKING:\n    x = 1": set(),
    "import a\nx: T[1] = f'{b + 1}'": set(),
}


@pytest.mark.parametrize("source", SLIPS)
def test_slips(source):
    texts = [text for _, _, _, text, _ in mutations.slips(source.encode())]
    plain = {ast.unparse(ast.parse(text)) for text in texts}
    assert plain == {ast.unparse(ast.parse(text)) for text in SLIPS[source]}


TOY = """
LARGE = 5


def larger(a, b):
    # é: bytes are no characters
    if a > b:
        return a
    return b


def unused():
    return not 1
"""
TOY_TEST = """
import pytest
from sharding.runs import toy

def test_that_always_fails():
    assert not toy.larger(3, 1)

@pytest.mark.slow
def test_a_slow_one_that_always_fails():
    assert toy.LARGE == 4

@pytest.mark.slow
def test_large():
    assert toy.LARGE == 5

def test_larger():
    assert toy.larger(3, 1) == toy.larger(1, 3) == 3
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name, text in {
        "pyproject.toml": "[tool.pytest.ini_options]\nmarkers = ['slow', 'compile']\n",
        "sharding/runs/toy.py": TOY,
        "tests/lines.py": Path(lines.__file__).read_text("utf-8"),
        "tests/sharding/runs/toy_test.py": TOY_TEST,
        "tests/mutations_excused.txt": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_a_draw(project, capsys):
    """The seed draws slips that fast tests notice, that a slow one does, and that none does."""

    def printed(*arguments):
        mutations.main(["--seed=57", "--jobs=1", *arguments], project)
        return capsys.readouterr().out.splitlines()

    first = printed("--count=9")
    assert first[1].endswith("left out: tests/sharding/runs/toy_test.py::test_that_always_fails")
    rows = [json.loads(line) for line in first if line.startswith("{")]
    assert sorted((row["slip"].split(":", 1)[1], row["outcome"], row["by"]) for row in rows) == [
        ("2: constant: 5 -> 6", "slow", "tests/sharding/runs/toy_test.py::test_large"),
        ("2: constant: 5 -> 6", "survived", ""),
        ("7: comparison: a > b -> a >= b", "survived", ""),
        ("7: comparison: a > b -> a >= b", "survived", ""),
        ("8: returned None: a -> None", "fast", "tests/sharding/runs/toy_test.py::test_larger"),
        ("9: returned None: b -> None", "fast", "tests/sharding/runs/toy_test.py::test_larger"),
    ]
    table = first[-10:]
    assert "sharding 2 1 4 75.0% 30.1% to 95.4%".split() in [line.split() for line in table]
    assert table[-4:-2] == ["not run: 1", "sharding/runs/toy.py:13: constant: 1 -> 2"]
    assert (project / "sharding/runs/toy.py").read_text("utf-8") == TOY

    assert printed("--count=9")[-10:] == table  # nothing is tried again
    excused = next(row["slip"] for row in rows if ">=" in row["slip"])
    excuses = project / "tests/mutations_excused.txt"
    excuses.write_text(f"{excused}  # the larger of two equal numbers is either\n")
    assert "sharding 2 1 3 100.0% 43.8% to 100.0%".split() in [
        line.split() for line in printed("--count=9")
    ]
    excuses.write_text("".join(f"slip {n}  # why\n" for n in range(11)))
    with pytest.raises(AssertionError, match="more than 10"):
        printed()


SOURCE = b"""
def step(a, b=1):
    if a > b and (
        a > 2
    ):
        return a
    return [
        b
    ]
"""


@pytest.mark.parametrize("told", ["", " PASSED [ 8%]", " FAILED [ 8%]", " Timeout (0:02:00)!"])
def test_the_test_that_began_last(told):
    """One that hangs is told beside its name when its time is over, and is found as well."""
    names = ["tests/a_test.py::test_a", "tests/b_test.py::test_b[a b]"]
    found = mutations.TEST.findall(f"\n{names[0]} PASSED [ 1%]\n{names[1]}{told}\nThread 0x1:\n")
    assert found == names


def test_tests_that_run_the_slip():
    """A default runs with the import, and a statement when any of its lines does.

    Slow tests of other files that run the code's file come last.
    """
    ran = {2: {""}, 3: {"tests/b_test.py"}, 7: {"tests/rmt_tpu/a_test.py"}}
    seconds = {"tests/b_test.py": 1, "tests/rmt_tpu/a_test.py": 9}

    def tests_of(line, tier="fast"):
        given = {"rmt_tpu/a.py": ran}, seconds, tier
        return mutations.tests_of(("rmt_tpu/a.py", line), SOURCE, *given)

    assert tests_of(2) == ["tests/rmt_tpu/a_test.py", "tests/b_test.py"]
    assert tests_of(4) == ["tests/b_test.py"]
    assert tests_of(4, "slow") == ["tests/b_test.py", "tests/rmt_tpu/a_test.py"]
    assert tests_of(6) == tests_of(6, "slow") == []
    assert tests_of(8) == ["tests/rmt_tpu/a_test.py"]
