"""Paths of files that a recipe writes on this machine, and the errors in writing them.

This module does not import jax, because the import is slow.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from rmt_tpu.errors import RunError, UsageError


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
    with _errors(flag, value, UsageError):
        made.mkdir(parents=True, exist_ok=True)
    return made


def file(flag: str, value: str) -> Path:
    """Return the file in a flag, after a check that it can be written.

    A missing folder is created, and so is an empty file. The contents of a file are kept.

    Raises:
      UsageError: the value is a URL, or the file cannot be written.
    """
    found = path(flag, value)
    with _errors(flag, value, UsageError):
        found.parent.mkdir(parents=True, exist_ok=True)
        with found.open("a", encoding="utf-8"):
            return found


@contextlib.contextmanager
def writing(flag: str, value: object) -> Iterator[None]:
    """Turn an OSError into a RunError about the flag whose file or folder is written.

    `folder` or `file` has found before that it can be written. Since then, the disk may have become
    full.
    """
    with _errors(flag, value, RunError):
        yield


@contextlib.contextmanager
def _errors(flag: str, value: object, kind: type[Exception]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # `mkdir` says "File exists" about a file in the place of a folder.
        why = "Not a directory" if isinstance(error, FileExistsError) else error.strerror
        raise kind(f"--{flag}={value} cannot be written: {why}") from None
