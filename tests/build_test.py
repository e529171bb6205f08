"""The BUILD files: a library a package, whose third-party names are what it imports, locked.

Read in the source tree itself: under Bazel, this file is a link to there.
"""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("pallas_kernels", "recipes", "rmt_tpu", "sharding", "tests")
PYPI_NAMES = {  # where it is not the name that is imported
    "absl": "absl-py",
    "gcp_storage_emulator": "gcp-storage-emulator",
    "google.api_core": "google-api-core",
    "google.auth": "google-auth",
    "google.cloud": "google-cloud-storage",
    "jinja2": "Jinja2",
    "orbax": "orbax-checkpoint",
    "xdist": "pytest-xdist",
}
UNSEEN = {"tests": {"beartype", "jaxtyping", "libtpu"}}  # loaded by name
# Needed only by two commands for developers, by an extra of some hundred megabytes, and by a
# tracker. Each says so if its package is missing. The last two are for tests of the night.
OPTIONAL = {
    "tokamax", "maxtext", "datasets", "lm_eval", "wandb", "torch", "transformers", "tiktoken",
}  # fmt: skip


def third_party(package: str) -> list[str]:
    text = (ROOT / package / "BUILD").read_text(encoding="utf-8")
    (names,) = re.findall(r"third_party\(\[(.*?)\]\)", text, re.DOTALL)
    return re.findall(r'"([^"]+)"', names)


def imported(package: str) -> set[str]:
    """The names on PyPI of what a package imports."""
    names = set()
    for file in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    theirs = {n for n in names if n.split(".")[0] not in {*PACKAGES, *sys.stdlib_module_names}}
    return {pypi_name(name) for name in theirs} - OPTIONAL


def pypi_name(module: str) -> str:
    found = (PYPI_NAMES[top] for top in PYPI_NAMES if f"{module}.".startswith(f"{top}."))
    return next(found, module.split(".")[0])


@pytest.mark.parametrize("package", PACKAGES)
def test_third_party_names_are_what_is_imported(package):
    assert set(third_party(package)) == imported(package) | UNSEEN.get(package, set())


def test_no_test_imports_another():
    """Each is a target of its own, which has what is shared, and not the other tests."""
    found = re.compile(
        r"^ *(?:from tests.*import .*_test\b|from tests\S*_test import|import tests\S*_test)"
    )
    for file in (ROOT / "tests").rglob("*.py"):
        lines = file.read_text(encoding="utf-8").splitlines()
        assert not [line for line in lines if found.match(line)], file


def test_packages_do_not_import_torch():
    """Only the code in `rmt_tpu/hub/torch` does, which is copied into exported folders."""
    found = re.compile(r"^ *(?:import|from) (?:torch|transformers)\b", re.MULTILINE)
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    importing = {file for file in files if found.search(file.read_text(encoding="utf-8"))}
    code = {*(ROOT / "rmt_tpu/hub/torch").glob("*.py")}
    assert importing == code | {ROOT / "tests/rmt_tpu/hub/torch_test.py"}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_one_build_file(package):
    assert list((ROOT / package).rglob("BUILD")) == [ROOT / package / "BUILD"]


SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")


def programs() -> list[str]:
    return [
        file.stem
        for file in (ROOT / "recipes").glob("*.py")
        if '__name__ == "__main__"' in file.read_text(encoding="utf-8")
    ]


def test_every_program_has_a_name_at_the_root():
    text = (ROOT / "BUILD").read_text(encoding="utf-8")
    (names,) = re.findall(r"for recipe in \[(.*?)\]", text, re.DOTALL)
    assert re.findall(r'"([^"]+)"', names) == sorted(programs())


def test_every_program_is_a_command():
    """`setup.py` has the entry point of each, and the function is there."""
    names = re.findall(r'"([^"]+)"', re.findall(r"PROGRAMS = \[(.*?)\]", SETUP, re.DOTALL)[0])
    assert names == sorted(programs())
    for name in names:
        assert "\ndef run() -> None:\n" in (ROOT / "recipes" / f"{name}.py").read_text("utf-8")


def test_extras_have_the_names_that_metadata_has():
    """Any other way to write one, and an older pip warns and installs nothing of it."""
    extras = re.findall(
        r'"([^"]+)":', re.findall(r"extras_require=\{(.*?)\n    \}", SETUP, re.DOTALL)[0]
    )
    assert "lm-eval" in extras
    assert extras == [re.sub(r"[-_.]+", "-", extra).lower() for extra in extras]


@pytest.mark.parametrize("version", ["3_11", "3_12"])
def test_requirements_are_locked(version):
    lines = (ROOT / f"requirements_{version}.txt").read_text(encoding="utf-8").splitlines()
    locked = {line.partition("==")[0] for line in lines}
    assert {name for package in PACKAGES for name in third_party(package)} <= locked


def test_a_file_that_targets_lack_is_noticed(undeclared_files):
    for path in ("LICENSE", ".ci/run", "README.md", "docs/benchmarks/systems.md", "setup.py"):
        (ROOT / path).read_text(encoding="utf-8")
    assert undeclared_files == {"LICENSE", ".ci/run"}
    undeclared_files.clear()
