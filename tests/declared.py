"""Which files of the project a test may open: those that its Bazel target has.

A target has the packages' sources and data, and the files of `//:read_by_tests`. In a plain
checkout every file is there, so a test that reads another one would fail under Bazel alone.
"""

import os
import re
import sys
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("pallas_kernels", "recipes", "rmt_tpu", "sharding", "tests")
# Folders that are no part of a checkout: environments, caches, builds, runs.
_NOT_TRACKED = re.compile(r"\.(?!ci/)|build/|dist/|runs/|reports/|bazel-|\w+\.egg-info/")


def patterns(build: str) -> list[str]:
    """Returns the patterns of the files that the root's BUILD file gives to every test."""
    (listed,) = re.findall(
        r'name = "read_by_tests",\s*srcs = glob\(\[(.*?)\]\)', build, flags=re.DOTALL
    )
    return re.findall(r'"([^"]+)"', listed)


def is_declared(path: str, allowed: list[str]) -> bool:
    """Says whether every test's target has a file, by its path from the project's root."""
    if path.split("/")[0] in _PACKAGES or _NOT_TRACKED.match(path):
        return True
    return any(fnmatch(path, one) and path.count("/") == one.count("/") for one in allowed) or any(
        path.startswith(one.removesuffix("**")) for one in allowed if one.endswith("/**")
    )


def record() -> set[str]:
    """Starts to record which files are opened that not every target has; returns the record."""
    allowed = patterns((ROOT / "BUILD").read_text(encoding="utf-8"))
    prefix, seen = f"{ROOT}/", set()

    def opened(event: str, arguments: tuple) -> None:
        if event != "open" or not isinstance(arguments[0], str):
            return
        path = arguments[0]
        name = path.removeprefix(prefix)
        if name != path and not is_declared(name, allowed) and os.path.isfile(path):
            seen.add(name)

    sys.addaudithook(opened)
    return seen
