"""Paths of files that a recipe writes on this machine, and the errors in writing them.

This module does not import jax, because the import is slow.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from rmt_tpu.errors import UsageError


def path(flag: str, value: str) -> Path:
    """Return the path in a flag whose files can only be written on this machine.

    A `~` at the start stands for the home folder.

    Args:
      flag: the name of the flag.
      value: the value of the flag.

    Raises:
      UsageError: the value is a URL, for which `Path` would make a folder like `gs:` here.
    """
    if "://" in value:
        raise UsageError(f"--{flag}={value} must be a path on this machine")
    return Path(value).expanduser()


def folder(flag: str, value: str) -> Path:
    """Return the folder in a flag, which is created if it is missing.

    Raises:
      UsageError: the value is a URL, or the folder cannot be created.
    """
    made = path(flag, value)
    with writing(flag, value):
        made.mkdir(parents=True, exist_ok=True)
    return made


def file(flag: str, value: str) -> Path:
    """Return the file in a flag, after a check that it can be written.

    A missing folder is created, and so is an empty file. The contents of a file are kept.

    Raises:
      UsageError: the value is a URL, or the file cannot be written.
    """
    found = path(flag, value)
    with writing(flag, value):
        found.parent.mkdir(parents=True, exist_ok=True)
        with found.open("a", encoding="utf-8"):
            return found


@contextlib.contextmanager
def writing(flag: str, value: object) -> Iterator[None]:
    """Turn an OSError into a UsageError about the flag whose file or folder is written."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"--{flag}={value} cannot be written: {error.strerror}") from None
