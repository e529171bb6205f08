"""Functions that open folders and files by path or URL."""

import io
import os
import re
from types import ModuleType

from rmt_tpu.errors import UsageError, shown
from rmt_tpu.storage.folder import Folder, Object

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")


# The types of arguments that specify a folder.
Location = str | os.PathLike | Folder


def open_folder(url: Location) -> Folder:
    """Return the folder at a local path or `gs://bucket/path`, without accessing it yet.

    A Folder is returned unchanged.

    Raises:
      UsageError: the location is not text, has an unknown scheme, or is not a legal bucket or path.
        For a `gs://` URL, the error is also raised if google-cloud-storage is not installed or
        credentials are missing.
    """
    if isinstance(url, Folder):
        return url
    location, url = url, os.fspath(url) if isinstance(url, str | os.PathLike) else None
    if not isinstance(url, str):
        raise UsageError(
            f"{shown(location)} is not a string; legal: a local path, or gs://bucket/path"
        )
    if url.startswith("gs://"):
        return _gcs(url).GcsFolder.open(url)
    if _SCHEME.match(url):
        raise UsageError(f"{url!r} cannot be opened; legal: a local path, or gs://bucket/path")
    if not url:
        raise UsageError("'' is not the name of a folder; legal: a local path, or gs://bucket/path")
    from rmt_tpu.storage.local import LocalFolder

    return LocalFolder(url)


def open_parent(location: str) -> tuple[Folder, str]:
    """Split a local or gs:// path of a file into its folder and its name.

    The name is "" if the path ends with a slash.

    Raises:
      UsageError: see `open_folder`. The message has the path of the file.
    """
    parent, name = os.path.split(os.path.expanduser(location))
    try:
        return open_folder(parent or "."), name
    except UsageError as error:
        message = str(error)
        if message.startswith(repr(parent)):
            message = repr(location) + message.removeprefix(repr(parent))
        raise UsageError(message) from None


def writable_file(location: str) -> tuple[Folder, str]:
    """Split a local or gs:// path of a file, and check that files can be written to its folder.

    Raises:
      UsageError: see `open_folder`, or nothing can be written to the folder. In the second case,
        the message begins with `location`.
    """
    folder, name = open_parent(location)
    try:
        folder.check(write=True)
    except UsageError as error:
        reason = str(error).removeprefix(folder.url)
        raise UsageError(f"{location}{reason}") from None
    return folder, name


def find_objects(url: str) -> list[Object]:
    """Return the objects at a `gs://` URL, which may be a glob, sorted by name.

    The list is empty if nothing matches. In a glob, `*`, `?` and `[...]` match within one folder,
    and do not match a dot at the beginning of a name, as in a shell. `**` matches folders at any
    depth.

    Raises:
      UsageError: the bucket cannot be read, or `open_folder` raises this error for the URL.
    """
    return _gcs(url).find_objects(url)


def open_object(url: str, size: int, generation: int) -> io.RawIOBase:
    """Open an object as a stream of bytes in which each read is one range request.

    Args:
      url: `gs://bucket/name`.
      size: the object's size in bytes.
      generation: the generation of the object to read.

    Returns:
      A stream. Its methods raise Fault if the object is replaced or deleted, or if the service does
      not answer.
    """
    return _gcs(url).ObjectReader(url, size, generation)


def _gcs(url: str) -> ModuleType:
    try:
        from rmt_tpu.storage import gcs
    except ImportError as error:
        if not (error.name or "").startswith("google"):
            raise
        raise UsageError(f"{url} needs google-cloud-storage: pip install 'rmt_tpu[gcs]'") from None
    return gcs
