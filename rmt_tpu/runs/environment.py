"""A description of how a run was started: command, versions, git commit, host and devices."""

import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

_PACKAGES = ("rmt_tpu", "jax", "jaxlib", "flax", "optax", "numpy", "tensorstore")


def describe() -> dict[str, Any]:
    """Return a description of this process as JSON values.

    The value of `git_commit` is None if the code does not run from a git checkout.
    """
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(sys.orig_argv),
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
        "versions": {"python": platform.python_version()} | _versions(),
        "git_commit": _commit(Path(__file__).parents[2]),
    }


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _commit(root: Path) -> str | None:
    """Return the commit of the git checkout at `root`, or None if there is none.

    The commit ends with "-dirty" if files differ from it.
    """
    # Without .git in `root` this code is an installed package. A git repository in a parent folder
    # would then be the user's and not this project's.
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", root, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=10, encoding="utf-8")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
