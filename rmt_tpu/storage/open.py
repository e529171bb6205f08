"""From what a person writes to a folder."""

import io
import os
import re
from types import ModuleType

from rmt_tpu.errors import UsageError, shown
from rmt_tpu.storage.folder import Folder, Object

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")


Location = str | os.PathLike | Folder  # what a folder may be given as


def open_folder(url: Location) -> Folder:
    """The folder at a local path or a `gs://bucket/path`, of which nothing is touched yet.

    A Folder is returned as it is.

    Raises:
      UsageError: it is no text, is of another scheme, or no such bucket or path can be; or what
        `gs://` needs is not installed or has no credentials.
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
    """The folder of a file, local or gs://, and the file's name in it, "" if it names none.

    Raises:
      UsageError: see `open_folder`.
    """
    parent, name = os.path.split(os.path.expanduser(location))
    return open_folder(parent or "."), name


def find_objects(url: str) -> list[Object]:
    """The object of a `gs://` name, or those that it matches as a glob, sorted; maybe none.

    In a glob `*`, `?` and `[...]` stay within a folder and match no dot at the beginning of a name,
    as in a shell, and `**` is any depth.

    Raises:
      UsageError: the bucket cannot be read, or see `open_folder`.
    """
    return _gcs(url).find_objects(url)


def open_object(url: str, size: int, generation: int) -> io.RawIOBase:
    """The bytes of an object, by ranges, each of which is a request.

    Args:
      url: `gs://bucket/name`.
      size: in bytes.
      generation: what is read is of this one.

    Returns:
      What raises Fault if the object is replaced or deleted, or the service does not answer.
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
