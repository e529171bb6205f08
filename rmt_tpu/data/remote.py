"""Files at fsspec URLs, such as `s3://bucket/a.parquet` or `hf://datasets/user/name/**`.

fsspec is an optional dependency with one interface for many file systems. Files on `gs://` are read
by `rmt_tpu.storage` instead.
"""

import contextlib
import io
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from rmt_tpu.errors import one_line

EXTRA = "pip install 'rmt_tpu[parquet]'"

_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*(::[a-z][a-z0-9+.-]*)*://")
# Names of the fields in which file systems report the version of a file, which is a value that
# changes with every edit.
_VERSION_KEYS = (
    "ETag",
    "etag",
    "generation",
    "md5Hash",
    "md5",
    "crc32c",
    "sha256",
    "blob_id",
    "mtime",
    "LastModified",
    "last_modified",
    "created",
)


class RemoteError(OSError):
    """An error of fsspec or of one of its file systems, with a message of one line."""


class RemoteFile(NamedTuple):
    """A file that fsspec has found.

    Attributes:
      address: the file's URL.
      size: size in bytes.
      version: a value that changes whenever the file is edited, if the file system states one.
    """

    address: str
    size: int
    version: str


def is_address(path: str) -> bool:
    """Return whether a path is an fsspec URL; `gs://` URLs are excluded."""
    return bool(_ADDRESS.match(path)) and not path.startswith("gs://")


def find(pattern: str) -> list[RemoteFile]:
    """Return the files at a URL, which may be a glob, sorted by URL.

    The list is empty if nothing matches.

    Raises:
      RemoteError: fsspec or the library of this file system is not installed, the file system
        cannot be read, the URL is that of a folder, or the size of a file is unknown.
    """
    with _errors():
        system, path = _open_system(pattern)
        system.invalidate_cache()
        is_glob = any(sign in path for sign in "*?[")
        found = system.glob(path, detail=True) if is_glob else {}
        if not found and system.exists(path):
            found = {path: system.info(path)}
            if found[path].get("type") == "directory":
                raise RemoteError(
                    "the URL is that of a folder; legal: the files in it, such as **/*.parquet"
                )
        files = {name: info for name, info in found.items() if info.get("type") != "directory"}
        if files and is_glob and "::" in pattern:
            raise RemoteError(
                "a chained URL, with '::', cannot be a glob; legal: the URL of one file"
            )
        address = lambda name: system.unstrip_protocol(name) if is_glob else pattern
        return [_file(address(name), files[name]) for name in sorted(files)]


def open_stored(address: str) -> io.RawIOBase:
    """Open a file as a stream of bytes, whose methods raise RemoteError on failure."""
    with _errors():
        system, path = _open_system(address)
        return _Reader(system.open(path, "rb"))


def _file(address: str, info: dict[str, Any]) -> RemoteFile:
    if not isinstance(info.get("size"), int):
        raise RemoteError(f"the size of {address!r} is unknown; legal: files of known size")
    found = [f"{key} {info[key]}" for key in _VERSION_KEYS if info.get(key) is not None]
    return RemoteFile(address, info["size"], ", ".join(found))


def _open_system(address: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError:
        raise RemoteError(f"fsspec is needed: {EXTRA}") from None
    return fsspec.core.url_to_fs(address)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Turn any error in the `with` body into a RemoteError.

    Each file system raises errors of the library that it uses.
    """
    try:
        yield
    except RemoteError:
        raise
    except Exception as error:
        raise RemoteError(one_line(error)[:300]) from None


class _Reader(io.RawIOBase):
    """A stream that reads a file object of fsspec."""

    def __init__(self, file: Any):
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with _errors():
            return self._file.seek(offset, whence)

    def tell(self) -> int:
        with _errors():
            return self._file.tell()

    def readinto(self, buffer: Any) -> int:
        with _errors():
            block = self._file.read(len(buffer))
        buffer[: len(block)] = block
        return len(block)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
