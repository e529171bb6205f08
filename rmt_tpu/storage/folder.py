"""The abstract class `Folder`, which every kind of storage implements, and its errors."""

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tensorstore as ts

from rmt_tpu.errors import RunError, UsageError

# Names are checked because some come from manifests, which may have been written by anybody.
_SAFE_PART = re.compile(r"(?!\.{1,2}$)[^\x00-\x1f\x7f\\:\ud800-\udfff]+")

# By default, a file that is read as a whole may have at most this number of bytes.
SMALL = 64 * 2**20


# Kinds of tensorstore errors after which it is unknown whether a file is damaged. A message of
# tensorstore begins with the kind.
_NO_ANSWER = (
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED",
    "UNAVAILABLE",
)


class Fault(RunError):
    """A failure to read or write a file or folder. The message contains the name and the reason."""


class Unavailable(Fault):
    """The storage did not answer or refused access, so it is unknown if a file is damaged."""


class Found(NamedTuple):
    """The bytes of a file, and its generation: a value that changes when the file is replaced."""

    data: bytes
    generation: Any


class Object(NamedTuple):
    """Metadata of a file in a bucket.

    Attributes:
      url: `gs://bucket/name`.
      size: the size of the file in bytes, as stored.
      crc32c: the CRC32C checksum of the stored bytes, in base64.
      generation: a number that changes whenever the file is replaced.
      encoding: the file's Content-Encoding, or "" if the file has no encoding.
    """

    url: str
    size: int
    crc32c: str
    generation: int
    encoding: str


class Folder(ABC):
    """A folder in some storage, which need not exist before something is written into it.

    Every method except `check` raises `Fault` with a one-line message if the storage does not
    answer or refuses access. Names of files are relative, with `/` between their parts. A name that
    would lead out of the folder, such as one with `..`, raises UsageError.

    Attributes:
      url: the folder's location as it was given, for messages.
      local_path: the path on the local file system, or None.
    """

    url: str
    local_path: Path | None = None

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of the folder's path, as a label."""
        return self.url.rstrip("/").rpartition("/")[2] or self.url

    @abstractmethod
    def child(self, name: str) -> "Folder":
        """Return the subfolder `name` of this folder."""

    @abstractmethod
    def check(self, *, write: bool = False) -> None:
        """Check within ten seconds that the folder can be read and, if `write` is true, written to.

        Raises:
          UsageError: the folder cannot be read or written to, for example because its bucket does
            not exist or credentials are missing.
        """

    @abstractmethod
    def kvstore(self) -> dict[str, Any]:
        """Return the tensorstore spec of the folder as a kvstore; its `path` ends with a slash."""

    @abstractmethod
    def context(self) -> ts.Context:
        """Return the context in which tensorstore accesses the folder."""

    @abstractmethod
    def read(self, name: str, *, limit: int = SMALL) -> Found | None:
        """Return the content of a whole file, or None if there is no such file.

        Raises:
          Fault: the file has more than `limit` bytes.
        """

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write a whole file; a reader sees either the whole old file or the whole new file."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Write a whole file if it does not exist yet; exactly one of several writers succeeds.

        Returns:
          Whether the file now exists with exactly this content. The result is correct even if a
          write was retried because its response was lost.
        """

    @abstractmethod
    def replace(self, name: str, data: bytes, *, generation: Any) -> bool:
        """Replace a whole file, provided that it still has the generation that was read before.

        Returns:
          Whether the file now exists with exactly this content. It is False if another process has
          changed the file in the meantime.
        """

    @abstractmethod
    def append(self, name: str, data: bytes) -> None:
        """Append bytes to a file, either all or none; only one writer may append at a time."""

    @abstractmethod
    def delete(self, name: str, *, generation: Any = None) -> bool:
        """Delete a file; if `generation` is given, keep a file that has a different generation.

        Returns:
          Whether the file no longer exists.
        """

    @abstractmethod
    def names(self, name: str = "") -> list[str]:
        """Return the sorted names in the folder `name`; names of subfolders end with a slash."""

    @abstractmethod
    def delete_folder(self, name: str) -> None:
        """Delete the subfolder `name` with everything in it."""


def join(*names: str) -> str:
    """Join several parts of a name with slashes.

    Raises:
      UsageError: the name would lead out of the folder, or is illegal in some kind of storage.
    """
    name = "/".join(names)
    if not all(_SAFE_PART.fullmatch(part) for part in name.split("/")):
        raise UsageError(
            f"{name!r} cannot be the name of a file in a folder; legal: relative names without "
            "'..', backslash, colon or control characters"
        )
    return name


@contextlib.contextmanager
def faults(where: str) -> Iterator[None]:
    """Turn tensorstore's errors in the `with` body, all of them ValueErrors, into one-line errors.

    Args:
      where: text in front of each message.

    Raises:
      Unavailable: the error leaves a file's content unknown.
      Fault: any other error.
    """
    try:
        yield
    except ValueError as error:
        # Leave out the end of the message, a long dump of the array's spec or of a response.
        reason = re.split(r" \[(?:tensorstore_spec|http_response_body)=", str(error))[0]
        kind = Unavailable if reason.startswith(_NO_ANSWER) else Fault
        raise kind(where + " ".join(reason.split())) from None
