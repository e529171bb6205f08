"""Text to train on, as documents: files, or the source of Python's standard library."""

import contextlib
import glob
import gzip
import io
import json
import os
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from rmt_tpu.errors import UsageError

STDLIB = "stdlib"
SUFFIXES = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz", ".txt.zst", ".jsonl.zst")

_COMPRESSED = (".gz", ".zst")
_BOM = b"\xef\xbb\xbf"
_SEPARATOR = b"<|endoftext|>"
_BLOCK = 2**16  # bytes, compressed, that are unpacked at a time
_NOT_STDLIB = frozenset(
    ["site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "_bundled"]
)


def documents(source: str) -> list[str]:
    """All documents of a corpus, in order; documents of nothing but white space are left out.

    Args:
      source: `stdlib` (the modules of the running Python's standard library, one document each),
        or paths and globs (`**` is any depth) with commas between. A `.txt` file is one document,
        or several with lines `<|endoftext|>` between; a `.jsonl` file has one on each line, in
        the field "text". Both may end in `.gz` or `.zst`. A file given twice is read once.

    Returns:
      At least one document.

    Raises:
      UsageError: a path has no file, or a file cannot be read as text, or there is no text.
    """
    with problems("data", source):
        found = [document for path in files(source) for document, _ in read_span(whole(path))]
    if not found:
        raise UsageError(f"--data={source!r} has no text: legal is at least one non-empty document")
    return found


class Problem(Exception):
    """What is wrong with a part of the source; `problems` adds the source itself."""


@contextlib.contextmanager
def problems(flag: str, source: str) -> Iterator[None]:
    """Turns a Problem with the source that `flag` names into a UsageError."""
    try:
        yield
    except Problem as problem:
        raise UsageError(f"--{flag}={source!r}: {problem}") from None


def files(source: str) -> list[str]:
    """The files of a source, in order, each once.

    Raises:
      Problem: a path has no file, or one of an unknown kind.
    """
    if source == STDLIB:
        return _stdlib()
    found: dict[str, str] = {}
    for pattern in source.split(","):
        for path in _matches(pattern.strip()):
            if not path.lower().endswith(SUFFIXES):
                raise Problem(f"{path!r} is of an unknown kind; legal: {', '.join(SUFFIXES)}")
            found.setdefault(os.path.realpath(path), path)
    return list(found.values())


class Span(NamedTuple):
    """Bytes `start` to `stop` of a file; of a compressed one, or one of a single document, all."""

    path: str
    start: int
    stop: int


def whole(path: str) -> Span:
    """All of a file.

    Raises:
      Problem: it is not there.
    """
    with _readable(path):
        return Span(path, 0, os.path.getsize(path))


def spans(path: str, num_bytes: int) -> Iterator[Span]:
    """A file in spans of about `num_bytes` or more, cut where a document ends.

    Raises:
      Problem: it cannot be read.
    """
    size, start = whole(path).stop, 0
    if size <= num_bytes or path.lower().endswith((*_COMPRESSED, ".py")):
        yield Span(path, 0, size)
        return
    with _readable(path), open(path, "rb") as file:
        while start < size:
            file.seek(start + num_bytes)
            file.readline()  # most likely half of one
            if _kind(path) != ".jsonl":
                next((line for line in iter(file.readline, b"") if _is_separator(line)), None)
            stop = min(file.tell(), size)
            yield Span(path, start, stop)
            start = stop


def read_span(span: Span) -> Iterator[tuple[str, int]]:
    """Documents that are not only white space, each with the bytes of the file read so far.

    One document at a time is in memory.

    Raises:
      Problem: the file cannot be read, or is not what its name says.
    """
    kind = _kind(span.path)
    if kind == ".py":
        texts = _module(span)
    elif kind == ".jsonl":
        texts = _json_lines(span)
    else:
        texts = _separated(span)
    return ((text, position) for text, position in texts if text.strip())


def _kind(path: str) -> str:
    """The ending of a name, without that of its compression."""
    stem, ending = os.path.splitext(path.lower())
    return os.path.splitext(stem)[1] if ending in _COMPRESSED else ending


def _stdlib() -> list[str]:
    root = Path(sysconfig.get_path("stdlib"))
    modules = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_STDLIB]
        modules += [Path(folder, name) for name in names if name.endswith(".py")]
    modules.sort(key=lambda path: path.relative_to(root).as_posix())
    return [str(path) for path in modules if path.exists()]


def _matches(pattern: str) -> list[str]:
    """The files of one path or glob, sorted."""
    path = os.path.expanduser(pattern)
    if os.path.isdir(path):
        globs = " or ".join(repr(os.path.join(pattern, "**", f"*{s}")) for s in SUFFIXES[:2])
        raise Problem(f"{pattern!r} is a folder; write which files in it, such as {globs}")
    if os.path.exists(path):  # before globbing: a name may have brackets in it
        return [path]
    paths = sorted(p for p in glob.glob(path, recursive=True) if os.path.isfile(p))
    if not paths:
        raise Problem(
            f"{pattern!r} matches no file; legal: {STDLIB!r} alone, or existing paths and globs of "
            f"{', '.join(SUFFIXES)} with commas between"
        )
    return paths


class _Line(NamedTuple):
    content: bytes  # with its end
    offset: int  # in the unpacked file
    position: int  # bytes of the file, as it is, that have been read of the span


def _lines(span: Span) -> Iterator[_Line]:
    """The lines of a span, without a byte order mark."""
    packed = span.path.lower().endswith(_COMPRESSED)
    with _readable(span.path), _open(span.path) as (file, raw):
        offset = span.start
        if offset:
            file.seek(offset)
        while (packed or offset < span.stop) and (content := file.readline()):
            begin, offset = offset, offset + len(content)
            if begin == 0 and content.startswith(_BOM):
                content, begin = content[len(_BOM) :], len(_BOM)
            yield _Line(content, begin, raw.tell() if packed else offset - span.start)


def _separated(span: Span) -> Iterator[tuple[str, int]]:
    """The documents of a .txt file."""
    parts: list[bytes] = []
    begin = position = 0
    for line in _lines(span):
        position = line.position
        if _is_separator(line.content):
            yield _decode(b"".join(parts), span.path, begin), position
            parts = []
        else:
            begin = begin if parts else line.offset
            parts.append(line.content)
    yield _decode(b"".join(parts), span.path, begin), position


def _is_separator(line: bytes) -> bool:
    return line.startswith(_SEPARATOR) and line[len(_SEPARATOR) :] in (b"\n", b"\r\n", b"", b"\r")


def _json_lines(span: Span) -> Iterator[tuple[str, int]]:
    # By bytes: JSON strings may hold U+2028 and others that str.splitlines takes for an end.
    for line in _lines(span):
        text = _decode(line.content, span.path, line.offset)
        if text.strip():
            try:
                yield _json_text(text), line.position
            except Problem as problem:
                number = _line_number(span.path, line.offset)
                raise Problem(f"{span.path!r} line {number} {problem}") from None


def _module(span: Span) -> Iterator[tuple[str, int]]:
    """A module of the standard library: of the installation, so nothing for a person to correct."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        yield Path(span.path).read_bytes().decode("utf-8"), span.stop


def _decode(content: bytes, path: str, offset: int) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = offset + error.start
        raise Problem(
            f"{path!r} is not UTF-8 at byte {byte}, in line {_line_number(path, byte)} "
            f"({error.reason}); legal: UTF-8 text"
        ) from None


def _line_number(path: str, offset: int) -> int:
    """From 1, of the line that the byte at `offset` is in."""
    number = 1
    with _open(path) as (file, _):
        while offset > 0 and (block := file.read(min(offset, 2**20))):
            number += block.count(b"\n")
            offset -= len(block)
    return number


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise Problem(f"{path!r} cannot be read: {reason}; legal: whole, readable files") from None


@contextlib.contextmanager
def _open(path: str) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The content of a file, and the file itself."""
    with open(path, "rb") as raw:
        if path.lower().endswith(".gz"):
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield unpacked, raw
        elif path.lower().endswith(".zst"):
            with io.BufferedReader(_Zstandard(raw, path), 2**20) as unpacked:
                yield unpacked, raw
        else:
            yield raw, raw


class _Zstandard(io.RawIOBase):
    """The content of a .zst file, of one frame or more.

    The library's own reader takes a file that is cut off for one that ends.
    """

    def __init__(self, raw: IO[bytes], path: str):
        try:
            import zstandard
        except ImportError:
            raise Problem(
                f"{path!r} needs the zstandard library: pip install 'rmt_tpu[data]'"
            ) from None
        self._raw, self._library = raw, zstandard
        self._frame: Any = None
        self._packed = b""
        self._unpacked = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._unpacked:
            packed = self._packed or self._raw.read(_BLOCK)
            if not packed:
                if self._frame is not None:
                    raise EOFError("it ends within a compressed frame")
                return 0
            self._frame = self._frame or self._library.ZstdDecompressor().decompressobj()
            try:
                self._unpacked = memoryview(self._frame.decompress(packed))
            except self._library.ZstdError as error:
                raise OSError(str(error)) from None
            self._packed = b""
            if self._frame.eof:
                self._packed, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._unpacked))
        buffer[:count], self._unpacked = self._unpacked[:count], self._unpacked[count:]
        return count


def _json_text(line: str) -> str:
    """The "text" of one line of a .jsonl file."""
    legal = 'legal: an object like {"text": "..."}'
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Problem(f"is not JSON ({error}); {legal}") from None
    if not isinstance(value, dict):
        raise Problem(f"is a JSON {type(value).__name__}, not an object; {legal}")
    if not isinstance(value.get("text"), str):
        fields = ", ".join(f"{name!r} ({type(v).__name__})" for name, v in value.items()) or "none"
        raise Problem(f'has no field "text" that is a string; fields: {fields}; {legal}')
    try:
        value["text"].encode("utf-8")
    except UnicodeEncodeError as error:
        raise Problem(
            f'has half a surrogate pair at character {error.start} of "text"; legal: Unicode text'
        ) from None
    return value["text"]
