"""The files of a source, and their bytes, on a file system or in a bucket."""

import contextlib
import glob
import gzip
import hashlib
import io
import os
import stat
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rmt_tpu.errors import RunError, UsageError
from rmt_tpu.storage import find_objects, open_object

STDLIB = "stdlib"
SUFFIXES = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz", ".txt.zst", ".jsonl.zst")
COMPRESSED = (".gz", ".zst")

_BUCKETS = "gs://"
_BLOCK = 2**20  # bytes that are hashed at a time
# Bytes requested from a bucket at a time: many where an object is read as a whole, so that requests
# are few, and few where only the end of a line is searched for.
_AHEAD, _LOOK = 8 * 2**20, 2**18
# Bytes that are unpacked at a time. A block of zstandard may need only 4 bytes for its 128 KiB, so
# this unpacks to at most 32 MiB, where the library would unpack gigabytes of a hostile file.
_PACKED = 2**10
_NOT_STDLIB = frozenset(
    ["site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "_bundled"]
)

Seen = Callable[[bytes], None]


class Problem(Exception):
    """An error in a part of the source; `problems` adds the source itself to the message."""


class _NoFile(Problem):
    """A name or glob matches no file."""


@contextlib.contextmanager
def problems(flag: str, source: str) -> Iterator[None]:
    """Turn a Problem in the body into a UsageError that names the flag and its source."""
    try:
        yield
    except Problem as problem:
        raise UsageError(f"--{flag}={source!r}: {problem}") from None


class Span(NamedTuple):
    """Bytes `start` to `stop` of a file; a compressed file or a module is always whole.

    Attributes:
      path: path of the file, or its `gs://` URL.
      start, stop: positions in bytes in the stored, possibly compressed, file.
      version: a value that changes with any edit of the file: size, mtime and ctime in nanoseconds;
        or for an object in a bucket size, crc32c and generation.
    """

    path: str
    start: int
    stop: int
    version: tuple[int | str, ...]

    @property
    def in_bucket(self) -> bool:
        return self.path.startswith(_BUCKETS)


def files(source: str, *, buckets: bool = False) -> list[Span]:
    """Return the files of a source, in order, each once and whole.

    Args:
      source: see `documents`; with `buckets` also `gs://` URLs and globs.
      buckets: whether `gs://` is allowed.

    Raises:
      Problem: a path has no file, or one of an unknown kind.
    """
    if source == STDLIB:
        return [whole(path) for path in _stdlib()]
    found: dict[str, Span] = {}
    pieces = source.split(",")
    while pieces:
        spans, count = _first(pieces, buckets)
        pieces = pieces[count:]
        for span in spans:
            if not span.path.lower().endswith(SUFFIXES):
                raise Problem(f"{span.path!r} is of an unknown kind; legal: {', '.join(SUFFIXES)}")
            found.setdefault(span.path if span.in_bucket else os.path.realpath(span.path), span)
    return list(found.values())


def whole(path: str) -> Span:
    """Return a span of all bytes of a file on a file system.

    Raises:
      Problem: it is not there, or is not a regular file.
    """
    with readable(path):
        status = os.stat(path)
    # A pipe that nobody writes to would be waited for forever.
    if not stat.S_ISREG(status.st_mode):
        raise Problem(f"{path!r} is no regular file; legal: files")
    return Span(path, 0, status.st_size, _version(status))


@contextlib.contextmanager
def readable(path: str) -> Iterator[None]:
    """Turn errors of reading in the body into a Problem."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise Problem(f"{path!r} cannot be read: {reason}; legal: whole, readable files") from None


@contextlib.contextmanager
def opened(span: Span, *, look: bool = False) -> Iterator[io.BufferedIOBase]:
    """Open a file to read its stored bytes from the first on.

    Args:
      span: any span of the file.
      look: whether only a little is read, here and there.

    Raises:
      RunError: the file does not have the span's version, or was edited before the body ended.
    """
    if span.in_bucket:
        raw = open_object(span.path, span.version[0], span.version[2])
        with io.BufferedReader(raw, _LOOK if look else _AHEAD) as file:
            yield file
        return
    with open(span.path, "rb") as file:
        yield file
        if _version(os.fstat(file.fileno())) != span.version:
            raise _changed(span)


@contextlib.contextmanager
def unpacked(span: Span, seen: Seen = lambda block: None) -> Iterator[io.BufferedIOBase]:
    """Open a file to read its content, unpacked if it is compressed.

    Args:
      span: any span of the file.
      seen: called, for a compressed file, with each piece of its stored bytes, in order.
    """
    with opened(span) as file:
        if span.path.lower().endswith(".gz"):
            with gzip.GzipFile(fileobj=_Told(file, seen)) as content:
                yield content
        elif span.path.lower().endswith(".zst"):
            with io.BufferedReader(_Zstandard(_Told(file, seen), span.path), _BLOCK) as content:
                yield content
        else:
            yield file


def new_digest() -> Any:
    """Return a new hash for the bytes of a span: blake2b with 16 bytes."""
    return hashlib.blake2b(digest_size=16)


def digest_of(span: Span, seen: Seen = lambda block: None) -> str:
    """Return the hexadecimal digest of the stored bytes of a span.

    Raises:
      Problem: it cannot be read.
    """
    digest, left = new_digest(), span.stop - span.start
    with readable(span.path), opened(span) as file:
        file.seek(span.start)
        while left and (block := file.read(min(_BLOCK, left))):
            digest.update(block)
            seen(block)
            left -= len(block)
    return digest.hexdigest()


def check_unchanged(span: Span) -> None:
    """Check that a span's file on a file system was not edited.

    Raises:
      RunError: it was edited or is not there.
    """
    if span.in_bucket:
        return  # only this generation of an object is ever read
    try:
        version = _version(os.stat(span.path))
    except OSError:
        version = ()
    if version != span.version:
        raise _changed(span)


def _changed(span: Span) -> RunError:
    return RunError(
        f"{span.path!r} was edited while it was read; make it again what it was and run the same "
        "command, or give another --output"
    )


def _version(status: os.stat_result) -> tuple[int, ...]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _stdlib() -> list[str]:
    root = Path(sysconfig.get_path("stdlib"))
    modules = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_STDLIB]
        modules += [Path(folder, name) for name in names if name.endswith(".py")]
    modules.sort(key=lambda path: path.relative_to(root).as_posix())
    return [str(path) for path in modules if path.is_file() and os.access(path, os.R_OK)]


def _first(pieces: list[str], buckets: bool) -> tuple[list[Span], int]:
    """Return the files of the first piece, and 1; or of more pieces if a name has commas.

    Returns:
      The files, and the number of pieces that make their name.
    """
    none = None
    for count in range(1, len(pieces) + 1):
        try:
            return _matches(",".join(pieces[:count]).strip(), buckets), count
        except _NoFile as problem:
            none = none or problem
    raise none


def _matches(pattern: str, buckets: bool) -> list[Span]:
    """Return the files of one path or glob, sorted."""
    if pattern.startswith(_BUCKETS):
        return _in_bucket(pattern, buckets)
    path = os.path.expanduser(pattern)
    if os.path.isdir(path):
        globs = " or ".join(repr(os.path.join(pattern, "**", f"*{s}")) for s in SUFFIXES[:2])
        raise Problem(f"{pattern!r} is a folder; write which files in it, such as {globs}")
    if os.path.exists(path):  # check this before globbing, because a name may have brackets in it
        return [whole(path)]
    paths = sorted(p for p in glob.glob(path, recursive=True) if os.path.isfile(p))
    if not paths:
        raise _no_file(pattern)
    return [whole(path) for path in paths]


def _in_bucket(pattern: str, buckets: bool) -> list[Span]:
    if not buckets:
        raise Problem(
            f"{pattern!r} is text in a bucket, which a run does not read; make a token store of it "
            f"with recipes.prepare_data --input={pattern!r} --output=gs://..., and give that store"
        )
    try:
        found = find_objects(pattern)
    except UsageError as error:
        raise Problem(str(error)) from None
    if not found:
        raise _no_file(pattern)
    for url, _, _, _, encoding in found:
        if encoding:
            raise Problem(
                f"{url!r} is stored with the Content-Encoding {encoding!r}; legal: objects without "
                "one, such as .gz files"
            )
    return [Span(url, 0, size, (size, crc32c, number)) for url, size, crc32c, number, _ in found]


def _no_file(pattern: str) -> _NoFile:
    named = repr(pattern) if pattern.strip() else "an empty part beside a comma"
    return _NoFile(
        f"{named} matches no file; legal: {STDLIB!r} alone, or existing paths and globs of "
        f"{', '.join(SUFFIXES)} with commas between"
    )


class _Told:
    """A file that passes on to `seen` what is read from it."""

    def __init__(self, file: io.BufferedIOBase, seen: Seen):
        self._file, self._seen = file, seen

    def read(self, size: int = -1) -> bytes:
        block = self._file.read(size)
        self._seen(block)
        return block


class _Zstandard(io.RawIOBase):
    """The content of a .zst file, which has one frame or more.

    The library's own reader does not notice if a file is cut off.
    """

    def __init__(self, raw: _Told, path: str):
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
            packed = self._packed or self._raw.read(_PACKED)
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
