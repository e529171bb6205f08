"""The interface of every folder."""

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tensorstore as ts

from rmt_tpu.errors import RunError, UsageError

# Names are checked because manifests contain names too, and anybody may have written those.
_SAFE_PART = re.compile(r"(?!\.{1,2}$)[^\x00-\x1f\x7f\\:\ud800-\udfff]+")

SMALL = 64 * 2**20  # bytes; none of the small files has as many


# The kinds of tensorstore's errors, with which its messages begin, that leave the content unknown.
_NO_ANSWER = (
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED",
    "UNAVAILABLE",
)


class Fault(RunError):
    """A file or folder could not be read or written; the message says what and why."""


class Unavailable(Fault):
    """The store did not answer or gives no access, so the content is unknown and may be whole."""


class Found(NamedTuple):
    """A file's bytes, and its generation, which tells it from other files that had its name."""

    data: bytes
    generation: Any


class Object(NamedTuple):
    """A file in a bucket.

    Attributes:
      url: `gs://bucket/name`.
      size: the bytes of the file as it is stored.
      crc32c: the checksum of these bytes, in base64.
      generation: the number that tells the file from others that had its name.
      encoding: its Content-Encoding, or "".
    """

    url: str
    size: int
    crc32c: str
    generation: int
    encoding: str


class Folder(ABC):
    """A folder, which need not exist before something is written into it.

    Every method but `check` raises `Fault`, in one line, if the store does not answer or refuses. A
    name is relative, with `/` between its parts; `..` and other ways out are a UsageError.

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
        """Return a folder in this one."""

    @abstractmethod
    def check(self, *, write: bool = False) -> None:
        """Check within ten seconds that the folder can be read, and if `write` written to.

        Raises:
          UsageError: it cannot be, for example because its bucket does not exist or credentials are
            missing.
        """

    @abstractmethod
    def kvstore(self) -> dict[str, Any]:
        """Return the folder as a kvstore spec of tensorstore; `path` ends with a slash."""

    @abstractmethod
    def context(self) -> ts.Context:
        """Return the context in which tensorstore accesses the folder."""

    @abstractmethod
    def read(self, name: str, *, limit: int = SMALL) -> Found | None:
        """Return a whole file, or None if there is none.

        Raises:
          Fault: the file has more than `limit` bytes.
        """

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write a whole file in place of the one before; readers see the old or the new one."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Write a whole file if there is none yet; exactly one of several writers succeeds.

        Returns:
          Whether the file is there with exactly this content. The answer is therefore right also
          when a write is repeated because its response was lost.
        """

    @abstractmethod
    def replace(self, name: str, data: bytes, *, generation: Any) -> bool:
        """Write a whole file in place of the one of this generation, which was read before.

        Returns:
          Whether the file is there with exactly this content: False if another writer was quicker.
        """

    @abstractmethod
    def append(self, name: str, data: bytes) -> None:
        """Append bytes to a file, all or none of them, with one writer at a time."""

    @abstractmethod
    def delete(self, name: str, *, generation: Any = None) -> bool:
        """Delete a file; given `generation`, only if the file still has that generation.

        Returns:
          Whether the file is gone.
        """

    @abstractmethod
    def names(self, name: str = "") -> list[str]:
        """Return the direct contents of the folder `name`, sorted; folders end with a slash."""

    @abstractmethod
    def delete_folder(self, name: str) -> None:
        """Delete everything below the folder `name` of this one."""


def join(*names: str) -> str:
    """Join several parts to one name.

    Raises:
      UsageError: the name would lead out of the folder, or is not legal everywhere.
    """
    name = "/".join(names)
    if not all(_SAFE_PART.fullmatch(part) for part in name.split("/")):
        raise UsageError(
            f"{name!r} cannot be the name of a file in a folder; legal: relative names without "
            "'..', backslash, colon or control characters"
        )
    return name


@contextlib.contextmanager
def faults(where: str = "", kind: type[Exception] = Fault) -> Iterator[None]:
    """Turn tensorstore's errors, which are all ValueErrors, into errors of one line."""
    try:
        yield
    except ValueError as error:
        # The rest of the message is the whole spec of the array, or the whole answer of the
        # service.
        reason = re.split(r" \[(?:tensorstore_spec|http_response_body)=", str(error))[0]
        if kind is Fault and reason.startswith(_NO_ANSWER):
            kind = Unavailable
        raise kind(where + " ".join(reason.split())) from None
