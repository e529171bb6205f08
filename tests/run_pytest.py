"""The main program of every Bazel test: pytest on the files given, below the current folder.

Bazel starts a test at the root of a tree of links to the files that it depends on.
"""

import os
import sys
import tempfile
from pathlib import Path


def main(scratch: str) -> int:
    # Not the folder of this file, which Python put first. Programs that tests start need the rest.
    here, root = Path(__file__).resolve().parent, Path.cwd()
    sys.path = [str(root), *(path for path in sys.path if Path(path).resolve() != here)]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    # The tree is for reading.
    os.environ["HOME"] = os.environ["MPLCONFIGDIR"] = scratch
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = f"{scratch}/hypothesis"
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"
    sys.dont_write_bytecode = True

    options = ["-c", f"{root}/pyproject.toml", "-p", "no:cacheprovider", "--durations=5"]
    options.append(f"--basetemp={scratch}/pytest")
    if report := os.environ.get("XML_OUTPUT_FILE"):
        options.append(f"--junitxml={report}")
    marks = {"fast": "not slow and not compile", "compile": "compile and not slow", "all": ""}
    options += ["-m", marks[os.environ.get("TIER", "fast")]]
    if chosen := os.environ.get("TESTBRIDGE_TEST_ONLY"):  # bazel test --test_filter
        options += ["-k", chosen]

    import pytest

    code = pytest.main([*options, *sys.argv[1:]])
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code  # all of another tier


if __name__ == "__main__":
    # Not TEST_TMPDIR: so long a path makes messages that name files too long.
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(main(folder))
