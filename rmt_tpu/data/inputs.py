"""The input files of a text source, on any file system, and functions that read their bytes."""

import contextlib
import errno
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

from rmt_tpu.data import remote
from rmt_tpu.errors import RunError, UsageError
from rmt_tpu.storage import find_objects, open_object

STDLIB = "stdlib"
SUFFIXES = (
    ".txt",
    ".jsonl",
    ".txt.gz",
    ".jsonl.gz",
    ".txt.zst",
    ".jsonl.zst",
    ".parquet",
    ".arrow",
)
COMPRESSED = (".gz", ".zst")

_BUCKETS = "gs://"
# Bytes to read and hash at a time.
_BLOCK = 2**20
# Sizes of a request to a bucket, in bytes: `AHEAD` is for reading a whole object in few requests,
# and `_LOOK` is for finding the end of a line.
AHEAD, _LOOK = 8 * 2**20, 2**18
# Compressed bytes to decompress at a time. Four bytes can encode a zstandard block of 128 KiB, so
# this number of bytes decompresses to at most 32 MiB. Without the limit, a malicious file could
# decompress to gigabytes at once.
_PACKED = 2**10
_NOT_STDLIB = frozenset(
    ["site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "_bundled"]
)

# A function that is called with each block of bytes that is read from a span (a range of bytes in a
# file). For a Parquet or Arrow file, it has two arguments. The first is the encoded text. The
# second is the number of bytes in the file that this text accounts for.
BlockCallback = Callable[..., None]


def no_callback(block: bytes, stored: int = 0) -> None:
    """Do nothing; this is the default of parameters of the type `BlockCallback`."""


class Problem(Exception):
    """An error in an input file, which `usage_errors` turns into a UsageError about a flag."""


class NoFile(Problem):
    """The error for a name or glob that matches no file or cannot be the name of one."""


@contextlib.contextmanager
def usage_errors(flag: str, source: str) -> Iterator[None]:
    """Turn a Problem in the `with` body into a UsageError that names the flag and its value."""
    try:
        yield
    except Problem as problem:
        raise UsageError(f"--{flag}={source!r}: {problem}") from None


class Span(NamedTuple):
    """A range of bytes in a file; compressed files and modules are always covered as a whole.

    Attributes:
      path: path of the file, or its `gs://` URL or fsspec URL.
      start, stop: byte positions in the file as stored. For a table see `rmt_tpu.data.tables`.
      version: a value that changes whenever the file is edited. For a local file, it consists of
        the size, and of the mtime and ctime in nanoseconds. For an object in a bucket, it consists
        of the size, the crc32c and the generation. For an fsspec URL, it consists of the size and
        of the values by which the file system identifies a version.
    """

    path: str
    start: int
    stop: int
    version: tuple[int | str, ...]

    @property
    def in_bucket(self) -> bool:
        """Whether the path is the `gs://` URL of an object in a bucket."""
        return self.path.startswith(_BUCKETS)

    @property
    def is_local(self) -> bool:
        """Whether the path belongs to a file on a local file system."""
        return not (self.in_bucket or remote.is_address(self.path))


def files(source: str) -> list[Span]:
    """Return a span of each whole file in a source, in order and without duplicates.

    Args:
      source: the source, as for `documents`.

    Raises:
      Problem: a path matches no file, or a file has an unknown suffix.
    """
    if source == STDLIB:
        return [whole_span(path) for path in _stdlib()]
    found: dict[str, Span] = {}
    pieces = source.split(",")
    while pieces:
        spans, count = _first(pieces)
        pieces = pieces[count:]
        for span in spans:
            if not span.path.lower().endswith(SUFFIXES):
                raise Problem(f"{span.path!r} has an unknown suffix; legal: {', '.join(SUFFIXES)}")
            found.setdefault(os.path.realpath(span.path) if span.is_local else span.path, span)
    return list(found.values())


def may_have_fields(source: str) -> bool:
    """Return whether a source may have files whose documents have fields, like .jsonl files.

    Files are not looked up. A glob may match such files, unless it ends with .txt, .txt.gz or
    .txt.zst.
    """
    plain = tuple(suffix for suffix in SUFFIXES if suffix.startswith(".txt"))
    names = [] if source == STDLIB else source.split(",")
    return not all(name.strip().lower().endswith(plain) for name in names)


def whole_span(path: str) -> Span:
    """Return the span that covers a whole file on a file system.

    Raises:
      Problem: the file does not exist, or is not a regular file.
    """
    with read_errors(path):
        status = os.stat(path)
    # Refuse other kinds of files: reading a pipe that nobody writes to would block forever.
    if not stat.S_ISREG(status.st_mode):
        raise Problem(
            f"{path!r} is not a regular file; legal: files, not folders, pipes or devices"
        )
    return Span(path, 0, status.st_size, _version(status))


@contextlib.contextmanager
def read_errors(path: str) -> Iterator[None]:
    """Turn an error from reading a file in the `with` body into a Problem."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise Problem(
            f"{path!r} cannot be read: {reason}; legal: complete, readable files"
        ) from None


@contextlib.contextmanager
def open_stored(span: Span, *, look: bool = False) -> Iterator[io.BufferedIOBase]:
    """Open a file to read its stored bytes, which may be compressed, from the start.

    Args:
      span: any span of the file.
      look: True if only a few bytes will be read, at various positions.

    Raises:
      RunError: the file is local, and its version at the end of the `with` body differs from the
        span's version.
    """
    if span.in_bucket:
        raw = open_object(span.path, span.version[0], span.version[2])
        with io.BufferedReader(raw, _LOOK if look else AHEAD) as file:
            yield file
        return
    if not span.is_local:
        raw = remote.open_stored(span.path)
        with io.BufferedReader(raw, _LOOK if look else AHEAD) as file:
            yield file
        return
    with open(span.path, "rb") as file:
        yield file
        if _version(os.fstat(file.fileno())) != span.version:
            raise _changed(span)


@contextlib.contextmanager
def open_unpacked(span: Span, on_block: BlockCallback = no_callback) -> Iterator[io.BufferedIOBase]:
    """Open a file to read its content, which is decompressed if the file is compressed.

    Args:
      span: any span of the file.
      on_block: a function that, for a compressed file, is called with consecutive blocks of its
        stored bytes.
    """
    with open_stored(span) as file:
        if span.path.lower().endswith(".gz"):
            with gzip.GzipFile(fileobj=_TappedFile(file, on_block)) as content:
                yield content
        elif span.path.lower().endswith(".zst"):
            with io.BufferedReader(
                _Zstandard(_TappedFile(file, on_block), span.path), _BLOCK
            ) as content:
                yield content
        else:
            yield file


def new_digest() -> Any:
    """Return a new hash object for the bytes of a span: blake2b with a digest of 16 bytes."""
    return hashlib.blake2b(digest_size=16)


def digest_of(span: Span, on_block: BlockCallback = no_callback) -> str:
    """Return the hexadecimal digest of a span's stored bytes.

    Args:
      span: the span.
      on_block: a function that is called with each block of bytes that was read.

    Raises:
      Problem: the file cannot be read.
    """
    digest, left = new_digest(), span.stop - span.start
    with read_errors(span.path), open_stored(span) as file:
        file.seek(span.start)
        while left and (block := file.read(min(_BLOCK, left))):
            digest.update(block)
            on_block(block)
            left -= len(block)
    return digest.hexdigest()


def check_unchanged(span: Span) -> None:
    """Check that a span's file has not been edited, if it is on a local file system.

    Raises:
      RunError: the file was edited or deleted.
    """
    if not span.is_local:
        return  # An object on gs:// is always read at the generation that its span records.
    try:
        version = _version(os.stat(span.path))
    except OSError:
        version = ()
    if version != span.version:
        raise _changed(span)


def _changed(span: Span) -> RunError:
    return RunError(
        f"{span.path!r} was edited while it was read; restore its content and repeat the command, "
        "or give another --output"
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


def _first(pieces: list[str]) -> tuple[list[Span], int]:
    """Return the files that match the first of the comma-separated pieces of a source.

    If the first piece matches no file, it is joined with the following pieces, because a file name
    may contain commas.

    Returns:
      The files, and the number of pieces that form their name.
    """
    none = None
    for count in range(1, len(pieces) + 1):
        try:
            return _matches(",".join(pieces[:count]).strip()), count
        except NoFile as problem:
            none = none or problem
    raise none


def _matches(pattern: str) -> list[Span]:
    """Return the files that match a path or glob, sorted by name."""
    if pattern.startswith(_BUCKETS):
        return _in_bucket(pattern)
    if remote.is_address(pattern):
        return _at_address(pattern)
    path = os.path.expanduser(pattern)
    if os.path.isdir(path):
        globs = " or ".join(repr(os.path.join(pattern, "**", f"*{s}")) for s in SUFFIXES[:2])
        raise Problem(f"{pattern!r} is a folder; legal: the files in it, such as {globs}")
    # Check the exact name before globbing, because a file name may contain brackets.
    if _is_there(path):
        return [whole_span(path)]
    paths = sorted(p for p in glob.glob(path, recursive=True) if os.path.isfile(p))
    if not paths:
        raise _no_file(pattern)
    return [whole_span(path) for path in paths]


def _is_there(path: str) -> bool:
    """Return whether there is anything at a path on a file system.

    Raises:
      Problem: that is unknown, for example because one may not enter the folder.
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        problem = f"{path!r} cannot be read: {error.strerror}; legal: complete, readable files"
        # Names that have been joined by commas may be too long, though each of them is not.
        raise (NoFile if error.errno == errno.ENAMETOOLONG else Problem)(problem) from None
    return True


def _in_bucket(pattern: str) -> list[Span]:
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
                "a Content-Encoding, including compressed files such as .gz files"
            )
    return [Span(url, 0, size, (size, crc32c, number)) for url, size, crc32c, number, _ in found]


def _at_address(pattern: str) -> list[Span]:
    with read_errors(pattern):
        found = remote.find(pattern)
    if not found:
        raise _no_file(pattern)
    return [Span(address, 0, size, (size, version)) for address, size, version in found]


def _no_file(pattern: str) -> NoFile:
    named = repr(pattern) if pattern.strip() else "an empty item next to a comma"
    return NoFile(
        f"{named} matches no file; legal: {STDLIB!r} alone, or existing paths and globs of "
        f"{', '.join(SUFFIXES)}, separated by commas"
    )


class _TappedFile:
    """A file object that passes each block of bytes that is read from it to `on_block`."""

    def __init__(self, file: io.BufferedIOBase, on_block: BlockCallback):
        self._file, self._on_block = file, on_block

    def read(self, size: int = -1) -> bytes:
        block = self._file.read(size)
        self._on_block(block)
        return block


class _Zstandard(io.RawIOBase):
    """A stream of the decompressed content of a .zst file, which has one or more frames.

    The reader of the zstandard library is not used because it does not detect a truncated file.
    """

    def __init__(self, raw: _TappedFile, path: str):
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
                    raise EOFError("the file ends within a compressed frame")
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
