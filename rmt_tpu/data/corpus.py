"""Text to train on, as a list of documents: files, or the source of Python's standard library."""

import glob
import gzip
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

from rmt_tpu.errors import UsageError

STDLIB = "stdlib"
SUFFIXES = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz")

_SEPARATOR = re.compile(r"^<\|endoftext\|>\r?(?:\n|\Z)", re.MULTILINE)
_NOT_STDLIB = frozenset(
    ["site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "_bundled"]
)


def documents(source: str) -> list[str]:
    """All documents of a corpus, in order; documents of nothing but white space are left out.

    Args:
      source: `stdlib` (the modules of the running Python's standard library, one document each),
        or paths and globs (`**` is any depth) with commas between. A `.txt` file is one document,
        or several with lines `<|endoftext|>` between; a `.jsonl` file has one on each line, in
        the field "text". Both may end in `.gz`. A file given twice is read once.

    Returns:
      At least one document.

    Raises:
      UsageError: a path has no file, or a file cannot be read as text, or there is no text.
    """
    try:
        read = _stdlib() if source == STDLIB else _files(source)
        found = [document for document in read if document.strip()]
    except _Problem as problem:
        raise UsageError(f"--data={source!r}: {problem}") from None
    if not found:
        raise UsageError(f"--data={source!r} has no text: legal is at least one non-empty document")
    return found


class _Problem(Exception):
    """What is wrong with a part of the source; `documents` adds the source itself."""


def _stdlib() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    modules = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_STDLIB]
        modules += [Path(folder, name) for name in names if name.endswith(".py")]
    for module in sorted(modules, key=lambda path: path.relative_to(root).as_posix()):
        try:
            yield module.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # a file of the installation, not of the user: nothing to correct


def _files(source: str) -> Iterator[str]:
    seen = set()
    for pattern in source.split(","):
        for path in _matches(pattern.strip()):
            if (real := os.path.realpath(path)) not in seen:
                seen.add(real)
                yield from _read(path)


def _matches(pattern: str) -> list[str]:
    """The files of one path or glob, sorted."""
    path = os.path.expanduser(pattern)
    if os.path.isdir(path):
        globs = " or ".join(repr(os.path.join(pattern, "**", f"*{s}")) for s in SUFFIXES[:2])
        raise _Problem(f"{pattern!r} is a folder; write which files in it, such as {globs}")
    if os.path.exists(path):  # before globbing: a name may have brackets in it
        return [path]
    paths = sorted(p for p in glob.glob(path, recursive=True) if os.path.isfile(p))
    if not paths:
        raise _Problem(
            f"{pattern!r} matches no file; legal: {STDLIB!r} alone, or existing paths and globs of "
            f"{', '.join(SUFFIXES)} with commas between"
        )
    return paths


def _read(path: str) -> Iterator[str]:
    """The documents of one file."""
    name = path.lower()
    if not name.endswith(SUFFIXES):
        raise _Problem(f"{path!r} is of an unknown kind; legal: {', '.join(SUFFIXES)}")
    text = _text(path)
    if name.removesuffix(".gz").endswith(".txt"):
        yield from _SEPARATOR.split(text)
        return
    # Not splitlines: JSON strings may hold U+2028 and other characters that it takes for an end.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _json_text(line, f"{path!r} line {number}")


def _text(path: str) -> str:
    try:
        content = Path(path).read_bytes()
        if path.lower().endswith(".gz"):
            content = gzip.decompress(content)
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise _Problem(
            f"{path!r} is not UTF-8 at byte {error.start} ({error.reason}); legal: UTF-8 text"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise _Problem(f"{path!r} cannot be read: {reason}; legal: whole, readable files") from None


def _json_text(line: str, where: str) -> str:
    """The "text" of one line of a .jsonl file."""
    legal = 'legal: an object like {"text": "..."}'
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _Problem(f"{where} is not JSON ({error}); {legal}") from None
    if not isinstance(value, dict):
        raise _Problem(f"{where} is a JSON {type(value).__name__}, not an object; {legal}")
    if not isinstance(value.get("text"), str):
        fields = ", ".join(f"{name!r} ({type(v).__name__})" for name, v in value.items()) or "none"
        raise _Problem(f'{where} has no field "text" that is a string; fields: {fields}; {legal}')
    try:
        value["text"].encode("utf-8")
    except UnicodeEncodeError as error:
        raise _Problem(
            f'{where} has half a surrogate pair at character {error.start} of "text"; '
            "legal: Unicode text"
        ) from None
    return value["text"]
