"""A wheel of this checkout, and environments that have nothing else.

Both need the package index that `make` installs from.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 1800


def build(folder: Path) -> Path:
    """Build a wheel in `folder`, and return its path."""
    succeed(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, ROOT)
    (wheel,) = folder.glob("rmt_tpu-*.whl")
    return wheel


def install(folder: Path, *requirements: str) -> Path:
    """Make an environment with `requirements`, and return its folder of commands."""
    succeed(sys.executable, "-m", "venv", folder)
    succeed(folder / "bin/python", "-m", "pip", "install", *requirements)
    return folder / "bin"


def succeed(
    *command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None
) -> str:
    """Run a command, assert that it succeeds, and return what it prints.

    Its environment has `env`, and lacks variables that set options of Python or XLA.
    """
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "XLA_"))}
    variables |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_QUIET": "1"} | (env or {})
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=variables,
        capture_output=True,
        encoding="utf-8",
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout
