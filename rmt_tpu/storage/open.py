"""Functions that open a folder or a file at a location given as text."""

import io
import os
import re
from types import ModuleType

from rmt_tpu.errors import UsageError, shown
from rmt_tpu.storage.folder import Folder, Object

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")


Location = str | os.PathLike | Folder  # the types that a folder may be given as


def open_folder(url: Location) -> Folder:
    """Return the folder at a local path or a `gs://bucket/path`, without touching it yet.

    A Folder is returned as it is.

    Raises:
      UsageError: the location is not text, has another scheme, or is no legal bucket or path; or
        what `gs://` needs is not installed or has no credentials.
    """
    if isinstance(url, Folder):
        return url
    given, url = url, os.fspath(url) if isinstance(url, str | os.PathLike) else None
    if not isinstance(url, str):
        raise UsageError(
            f"{shown(given)} is no text; legal: a local path, or gs://bucket/path, as text"
        )
    if url.startswith("gs://"):
        return _gcs(url).GcsFolder.open(url)
    if _SCHEME.match(url):
        raise UsageError(f"{url!r} cannot be opened; legal: a local path, or gs://bucket/path")
    if not url:
        raise UsageError("'' names no folder; legal: a local path, or gs://bucket/path")
    from rmt_tpu.storage.local import LocalFolder

    return LocalFolder(url)


def open_parent(location: str) -> tuple[Folder, str]:
    """Return the folder of a file, local or gs://, and the file's name in it, "" if none.

    Raises:
      UsageError: see `open_folder`.
    """
    parent, name = os.path.split(os.path.expanduser(location))
    return open_folder(parent or "."), name


def find_objects(url: str) -> list[Object]:
    """Return the object of a `gs://` name, or those that match it as a glob, sorted.

    The list may be empty. In a glob `*`, `?` and `[...]` stay within a folder and match no dot at
    the beginning of a name, as in a shell, and `**` matches any depth.

    Raises:
      UsageError: the bucket cannot be read, or see `open_folder`.
    """
    return _gcs(url).find_objects(url)


def open_object(url: str, size: int, generation: int) -> io.RawIOBase:
    """Open the bytes of an object, to be read by ranges with one request each.

    Args:
      url: `gs://bucket/name`.
      size: the object's size in bytes.
      generation: the generation of the object that is read.

    Returns:
      A stream, which raises Fault if the object is replaced or deleted, or the service does not
      answer.
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
