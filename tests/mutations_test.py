"""Slips of each operator, and the outcomes of a draw from a small project."""

import ast
import json

import pytest

from tests import mutations

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
def larger(a, b):
    # é: bytes are no characters
    if a > b:
        return a
    return b


def unused():
    return not 1
"""
TOY_TEST = """
from sharding import toy

def test_that_always_fails():
    assert not toy.larger(3, 1)

def test_larger():
    assert toy.larger(3, 1) == toy.larger(1, 3) == 3
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name, text in {
        "pyproject.toml": "[tool.pytest.ini_options]\nmarkers = ['slow', 'compile']\n",
        "sharding/toy.py": TOY,
        "tests/sharding/toy_test.py": TOY_TEST,
        "tests/mutations_excused.txt": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_a_draw(project, capsys):
    """The seed draws a line that no test runs, a slip that changes nothing, and one that does."""

    def printed(*arguments):
        mutations.main(["--seed=57", *arguments], project)
        return capsys.readouterr().out.splitlines()

    first = printed("--count=2")
    assert first.pop(0).endswith("left out: tests/sharding/toy_test.py::test_that_always_fails")
    rows = [json.loads(line) for line in first[:3]]
    assert [(row["slip"].split(":", 1)[1], row["outcome"], row["by"]) for row in rows] == [
        ("10: constant: 1 -> 0", "not run", ""),
        ("4: comparison: a > b -> a >= b", "survived", ""),
        ("6: returned None: b -> None", "noticed", "tests/sharding/toy_test.py::test_larger"),
    ]
    assert first[4].split() == "sharding 1 2 50.0% 9.5% to 90.5%".split()
    assert f"\n{rows[1]['slip']}\n" in "\n".join(first[5:])
    assert (project / "sharding/toy.py").read_text("utf-8") == TOY

    assert printed("--count=2") == first[3:]  # nothing is tried again
    excuses = project / "tests/mutations_excused.txt"
    excuses.write_text(f"{rows[1]['slip']}  # the larger of two equal numbers is either\n")
    assert printed("--count=1")[1].split() == "sharding 1 1 100.0% 20.7% to 100.0%".split()
    excuses.write_text("".join(f"slip {n}  # why\n" for n in range(11)))
    with pytest.raises(AssertionError, match="more than 10"):
        printed()


def test_the_nearest_tests_come_first():
    sources = {
        "rmt_tpu/a/step.py": "",
        "rmt_tpu/a/loop.py": "from rmt_tpu.a import (\n    step,\n)",
        "rmt_tpu/b.py": "",
        "recipes/go.py": "from rmt_tpu.a.loop import x",
        "tests/rmt_tpu/a/step_test.py": "from rmt_tpu.a.loop import x",
        "tests/rmt_tpu/a/loop_test.py": "from rmt_tpu.a.loop import x",
        "tests/a_test.py": "import rmt_tpu.a.step",
        "tests/b_test.py": "import rmt_tpu.b",
        "tests/go_test.py": "cli.run('go')",
    }
    used_by = mutations.users({file: text.encode() for file, text in sources.items()})
    assert mutations.tests_of("rmt_tpu/a/step.py", used_by) == [
        "tests/rmt_tpu/a/step_test.py",
        "tests/a_test.py",
        "tests/rmt_tpu/a/loop_test.py",
        "tests/go_test.py",
    ]
