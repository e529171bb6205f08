"""The main program of every Bazel test: pytest on the files given, below the current folder.

Bazel starts a test at the root of a tree of links to the files that it depends on.
"""

import os
import sys
from pathlib import Path

root, scratch = Path.cwd(), Path(os.environ["TEST_TMPDIR"])

# Not the folder of this file, which Python put there; programs that tests start need the others.
here = Path(__file__).resolve().parent
sys.path = [str(root), *(path for path in sys.path if Path(path).resolve() != here)]
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)

# All that is written goes to the scratch folder.
os.environ["HOME"] = str(scratch)
os.environ["MPLCONFIGDIR"] = str(scratch / "matplotlib")
os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(scratch / "hypothesis")
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
sys.dont_write_bytecode = True
options = ["-p", "no:cacheprovider", f"--basetemp={scratch / 'pytest'}"]

options += ["-c", str(root / "pyproject.toml"), "--durations=5"]
if report := os.environ.get("XML_OUTPUT_FILE"):
    options.append(f"--junitxml={report}")
if chosen := os.environ.get("TESTBRIDGE_TEST_ONLY"):  # bazel test --test_filter
    options += ["-k", chosen]

if __name__ == "__main__":
    import pytest

    sys.exit(pytest.main([*options, *sys.argv[1:]]))
