"""Tests of the sizes of functions."""

import ast
from pathlib import Path

import pytest

import pallas_kernels
import rmt_tpu
import sharding


@pytest.mark.parametrize(
    "package, most_lines, most_parameters",
    [(rmt_tpu, 60, 8), (sharding, 60, 8), (pallas_kernels, 80, 10)],
    ids=["rmt_tpu", "sharding", "pallas_kernels"],
)
def test_functions_are_short(package, most_lines, most_parameters):
    """Docstrings, keyword-only options and `self` do not count."""
    root = Path(package.__file__).parent
    long = []
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            lines, parameters = size(node)
            if lines > most_lines or parameters > most_parameters:
                where = f"{path.relative_to(root)}:{node.lineno} {node.name}"
                long.append(f"{where}: {lines} lines, {parameters} parameters")
    assert not long, "\n".join(long)


def size(node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[int, int]:
    """Return a function's number of lines and of positional parameters."""
    lines = node.end_lineno - node.lineno + 1
    if ast.get_docstring(node) is not None:
        lines -= node.body[0].end_lineno - node.body[0].lineno + 1
    names = [parameter.arg for parameter in (*node.args.posonlyargs, *node.args.args)]
    return lines, len([name for name in names if name not in ("self", "cls")])


def test_sizes_of_a_function():
    text = 'def f(self, x, y=1, *, option=2):\n    """Two\n    lines."""\n    return x\n'
    assert size(ast.parse(text).body[0]) == (2, 2)
