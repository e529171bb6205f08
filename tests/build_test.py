"""The BUILD files list every source file, and the dependencies of each target are what it imports.

A BUILD file is read as the Python that its syntax is, in the source tree itself: under Bazel, this
file is a link to there.
"""

import ast
import re
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("pallas_kernels", "recipes", "rmt_tpu", "sharding", "tests")
PYPI_NAMES = {  # where it is not the name that is imported
    "absl": "absl-py",
    "gcp_storage_emulator": "gcp-storage-emulator",
    "google.api_core": "google-api-core",
    "google.auth": "google-auth",
    "google.cloud": "google-cloud-storage",
    "orbax": "orbax-checkpoint",
}
CONFTEST = "//tests:conftest"
LABEL = re.compile(r"(?://(?P<folder>[^:]+))?(?::(?P<name>.+))?")


class Target(NamedTuple):
    rule: str
    label: str
    files: set[str]
    deps: set[str]
    third_party: set[str]


def strings(node: ast.AST | None) -> set[str]:
    nodes = ast.walk(node) if node else ()
    return {n.value for n in nodes if isinstance(n, ast.Constant)}


def target(call: ast.Call, folder: str) -> Target:
    """One rule of the BUILD file in `folder`."""
    given = {argument.arg: argument.value for argument in call.keywords}
    rule, (name,) = call.func.id, strings(given["name"])
    pypi, files = set(), strings(given.get("srcs"))
    for node in ast.walk(call):
        if isinstance(node, ast.Call) and node.func.id == "third_party":
            pypi |= strings(node)
    deps = strings(given.get("deps")) - pypi
    if rule == "pytest_test":
        files = {f"{name}.py"}
        deps |= {f"//recipes:{recipe}" for recipe in strings(given.get("recipes"))}
        deps.add(CONFTEST)
    return Target(
        rule,
        f"//{folder}:{name}",
        {f"{folder}/{file}" for file in files},
        {absolute(dep, folder) for dep in deps},
        pypi,
    )


def absolute(label: str, folder: str) -> str:
    """Bazel's long form: ":b" in a/ is "//a:b", and "//a/b" is "//a/b:b"."""
    parts = LABEL.fullmatch(label)
    folder = parts["folder"] or folder
    return f"//{folder}:{parts['name'] or folder.rpartition('/')[2]}"


@cache
def targets() -> dict[str, Target]:
    found = [
        target(node.value, build.parent.relative_to(ROOT).as_posix())
        for package in PACKAGES
        for build in (ROOT / package).rglob("BUILD")
        for node in ast.parse(build.read_text(encoding="utf-8")).body
        if isinstance(node.value, ast.Call) and "name" in {k.arg for k in node.value.keywords}
    ]
    return {t.label: t for t in found}


def sources() -> set[str]:
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {p.relative_to(ROOT).as_posix() for p in paths if "__pycache__" not in p.parts}


def imported(file: str) -> tuple[set[str], set[str]]:
    """What a file imports: files of this repository, and packages of PyPI."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    paths = {name.replace(".", "/") for name in names if name.split(".")[0] in PACKAGES}
    ours = {f"{path}{end}" for path in paths for end in (".py", "/__init__.py")} & sources()
    theirs = {n for n in names if n.split(".")[0] not in {*PACKAGES, *sys.stdlib_module_names}}
    return ours, {pypi_name(name) for name in theirs}


def pypi_name(module: str) -> str:
    found = (PYPI_NAMES[top] for top in PYPI_NAMES if f"{module}.".startswith(f"{top}."))
    return next(found, module.split(".")[0])


def reachable(label: str) -> set[str]:
    """The files of a target and of all that it depends on."""
    seen, todo = set(), {label}
    while todo:
        seen.add(label := todo.pop())
        todo |= targets()[label].deps - seen
    return set().union(*(targets()[label].files for label in seen))


def test_every_source_file_is_in_a_target():
    listed = set().union(*(t.files for t in targets().values()))
    assert sources() - listed - {"tests/run_pytest.py"} == set(), "to add to BUILD beside them"
    assert listed - sources() == set(), "to remove from BUILD"


def test_every_recipe_is_a_program_and_every_test_file_a_test():
    rules = {(file, t.rule) for t in targets().values() for file in t.files}
    tests = {(file, "pytest_test") for file in sources() if file.endswith("_test.py")}
    programs = {
        (file, "py_binary")
        for file in sources()
        if file.startswith("recipes/") and "__main__" in (ROOT / file).read_text(encoding="utf-8")
    }
    assert tests | programs == {(file, rule) for file, rule in rules if rule != "py_library"}


@pytest.mark.parametrize("label", sorted(targets()))
def test_dependencies_are_what_is_imported(label):
    _, _, files, deps, third_party = targets()[label]
    assert deps - set(targets()) == set(), "no such targets"
    ours, pypi = set(), set()
    for file in files:
        imports = imported(file)
        ours, pypi = ours | imports[0], pypi | imports[1]
    assert ours - reachable(label) == set(), "imported, and in no target of deps"
    if label != CONFTEST:  # that gives pytest to all
        assert third_party == pypi - {"pytest"}, "the names in third_party"


@pytest.mark.parametrize("version", ["3_11", "3_12"])
def test_requirements_are_locked(version):
    lines = (ROOT / f"requirements_{version}.txt").read_text(encoding="utf-8").splitlines()
    locked = {line.partition("==")[0] for line in lines}
    assert set().union(*(t.third_party for t in targets().values())) <= locked
