"""From what a person writes to a folder."""

import os
import re

from rmt_tpu.errors import UsageError
from rmt_tpu.storage.folder import Folder

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")


Location = str | os.PathLike | Folder  # what a folder may be given as


def open_folder(url: Location) -> Folder:
    """The folder at a local path or a `gs://bucket/path`, of which nothing is touched yet.

    A Folder is returned as it is.

    Raises:
      UsageError: it is of another scheme, or no such bucket or path can be; or what `gs://` needs
        is not installed or has no credentials.
    """
    if isinstance(url, Folder):
        return url
    url = os.fspath(url)
    if url.startswith("gs://"):
        try:
            from rmt_tpu.storage.gcs import GcsFolder
        except ImportError as error:
            if not (error.name or "").startswith("google"):
                raise
            raise UsageError(
                f"{url} needs google-cloud-storage: pip install 'rmt_tpu[gcs]'"
            ) from None
        return GcsFolder.open(url)
    if _SCHEME.match(url):
        raise UsageError(f"{url!r} cannot be opened; legal: a local path, or gs://bucket/path")
    if not url:
        raise UsageError("the name of a folder is empty; legal: a local path, or gs://bucket/path")
    from rmt_tpu.storage.local import LocalFolder

    return LocalFolder(url)
