"""Tests of docstrings, in addition to ruff's rules."""

import ast
import functools
import re
from pathlib import Path

import pallas_kernels
import recipes
import rmt_tpu
import sharding

NODES = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def documented() -> list[tuple[str, NODES, str]]:
    """Return the place, the node and the docstring of every documented object of the packages."""
    found = []
    for package in (pallas_kernels, recipes, rmt_tpu, sharding):
        root = Path(package.__file__).parent
        for path in sorted(root.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, NODES) and (text := ast.get_docstring(node)):
                    place = f"{path.relative_to(root.parent)}:{getattr(node, 'lineno', 1)}"
                    found.append((place, node, text))
    return found


def test_args_name_every_parameter():
    """Every parameter has an entry in "Args:", alone or with others, as in `q, k: ...`."""
    wrong = []
    for place, node, text in documented():
        if isinstance(node, ast.ClassDef):
            node = next((n for n in node.body if getattr(n, "name", "") == "__init__"), None)
        section = re.search(r"^Args:\n((?:  .*\n?|\n)+)", text, re.MULTILINE)
        if section is None or node is None:
            continue
        entries = re.findall(r"^  (\S[^:]*):", section[1], re.MULTILINE)
        names = [name.lstrip("*") for entry in entries for name in entry.split(", ")]
        found = [n.arg for n in ast.iter_child_nodes(node.args) if isinstance(n, ast.arg)]
        expected = [name for name in found if name not in ("self", "cls")]
        if sorted(names) != sorted(expected):
            wrong.append(f"{place}: {', '.join(names)}; legal: {', '.join(expected)}")
    assert not wrong, "\n".join(wrong)


def test_few_docstrings_begin_within_a_sentence():
    """Few docstrings begin with a preposition, a relative, "And" or "But": at most 2.5%."""
    words = "Of By As In To For From On At With That Those What Whose Which Who How Where And But"
    opening = re.compile(rf"(?:{'|'.join(words.split())}|The same)\b")
    texts = [(place, text.splitlines()[0]) for place, _, text in documented()]
    found = [f"{place}: {line}" for place, line in texts if opening.match(line)]
    assert len(found) <= 0.025 * len(texts), "\n".join(found)
