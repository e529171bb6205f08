"""Every argument in `execution` and `sharding` says what it is, and so is checked in the tests."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def unannotated(folder: Path) -> list[str]:
    """Arguments of functions of modules and classes; those within a function are free."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        classes = [module, *(node for node in ast.walk(module) if isinstance(node, ast.ClassDef))]
        for function in (node for of in classes for node in of.body):
            if isinstance(function, ast.FunctionDef):
                given = function.args
                every = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs]
                names = [
                    argument.arg
                    for argument in (*every, given.kwarg)
                    if argument and argument.annotation is None
                ]
                found += [
                    f"{path.name}: {function.name}({name})"
                    for name in names
                    if name not in ("self", "cls")
                ]
    return found


@pytest.mark.parametrize("package", ["rmt_tpu/execution", "sharding"])
def test_all_are_annotated(package):
    assert unannotated(ROOT / package) == []


def test_one_that_is_not_is_found(tmp_path):
    text = """
def f(a: int, b, *c, d=1, **e):
    def free(x): ...
class C:
    def __init__(self, a): ...
    def g(self, b: int): ...
"""
    (tmp_path / "m.py").write_text(text)
    names = ["f(b)", "f(c)", "f(d)", "f(e)", "__init__(a)"]
    assert unannotated(tmp_path) == [f"m.py: {name}" for name in names]
