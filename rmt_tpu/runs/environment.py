"""A description of how a run was started: command, code, versions, host and devices."""

import hashlib
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

import rmt_tpu

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "tensorstore")


def describe() -> dict[str, Any]:
    """Return a description of this process as JSON values.

    The function `code` supplies the entries about this package's code.
    """
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(sys.orig_argv),
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
        "versions": {"python": platform.python_version(), "rmt_tpu": rmt_tpu.__version__}
        | _versions(),
        **code(Path(__file__).parents[2]),
    }


def code(root: Path) -> dict[str, Any]:
    """Return where this package's code comes from, as JSON values.

    `code` is "checkout" for a git checkout, "wheel" for an installed wheel, and "files" for a copy
    of the sources. `git_commit` is the commit of the checkout, or the commit that the wheel was
    built from. The value ends with "-dirty" if files differed from the commit, and is None if the
    commit is not known. `wheel` has the URL and the SHA-256 digest of the wheel, if pip has
    recorded them.

    Args:
      root: the folder that has the package `rmt_tpu`.
    """
    # Without .git in `root`, this code is an installed package. A git repository in a parent folder
    # belongs to the user.
    if (root / ".git").exists():
        return {"code": "checkout", "git_commit": _commit(root)}
    try:
        built = json.loads((root / "rmt_tpu/build.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {"code": "files", "git_commit": None}
    found = {"code": "wheel", "git_commit": built.get("git_commit")}
    return found | ({"wheel": wheel} if (wheel := _wheel(root)) else {})


def source_hash(*modules: ModuleType) -> str:
    """Return a hash of the names and contents of modules, and of all Python files of packages."""
    digest = hashlib.sha256()
    for module in modules:
        file = Path(module.__file__)
        paths = sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]
        for path in paths:
            digest.update(path.relative_to(file.parent).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _wheel(root: Path) -> dict[str, str]:
    """Return what pip has recorded about the wheel in `root`: see PEP 610."""
    for distribution in metadata.distributions(name="rmt_tpu", path=[str(root)]):
        try:
            record = json.loads(distribution.read_text("direct_url.json") or "{}")
            hashes = record.get("archive_info", {}).get("hashes", {})
            known = {"url": record.get("url"), "sha256": hashes.get("sha256")}
        except (ValueError, AttributeError):
            return {}
        return {name: value for name, value in known.items() if value}
    return {}


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
    command = ["git", "-C", root, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=10, encoding="utf-8")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
