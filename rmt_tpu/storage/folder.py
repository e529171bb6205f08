"""What every folder can do."""

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tensorstore as ts

from rmt_tpu.errors import RunError, UsageError

# Names come from manifests too, which anybody may have written.
_SAFE_PART = re.compile(r"(?!\.{1,2}$)[^\x00-\x1f\x7f\\:\ud800-\udfff]+")

SMALL = 64 * 2**20  # bytes, more than any of the small files has


# Of tensorstore's errors, which begin with their kind.
_NO_ANSWER = (
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED",
    "UNAVAILABLE",
)


class Fault(RunError):
    """Something in a folder could not be read or written; the message says what and why."""


class Unavailable(Fault):
    """The store did not answer or gives no access: what is in it is not known, and may be whole."""


class Found(NamedTuple):
    """A file's bytes, and which of the files that ever had its name it is."""

    data: bytes
    generation: Any


class Object(NamedTuple):
    """A file in a bucket.

    Attributes:
      url: `gs://bucket/name`.
      size: in bytes, as it is stored.
      crc32c: of these, in base64.
      generation: which of the objects that ever had its name it is.
      encoding: its Content-Encoding, or "".
    """

    url: str
    size: int
    crc32c: str
    generation: int
    encoding: str


class Folder(ABC):
    """A folder, which need not exist before something is written into it.

    Every method but `check` raises `Fault`, in one line, if the store does not answer or refuses.
    A name is relative, with `/` between its parts; `..` and other ways out are a UsageError.

    Attributes:
      url: as it was given, for messages.
      local_path: where it is on the local file system, or None.
    """

    url: str
    local_path: Path | None = None

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of its name, as a label."""
        return self.url.rstrip("/").rpartition("/")[2] or self.url

    @abstractmethod
    def child(self, name: str) -> "Folder":
        """A folder in this one."""

    @abstractmethod
    def check(self, *, write: bool = False) -> None:
        """Looks within ten seconds whether it can be read, and written to if `write`.

        Raises:
          UsageError: it cannot be; for its bucket is not there, say, or credentials are missing.
        """

    @abstractmethod
    def kvstore(self) -> dict[str, Any]:
        """The folder as tensorstore writes it; `path` ends with a slash."""

    @abstractmethod
    def context(self) -> ts.Context:
        """How tensorstore is to use it."""

    @abstractmethod
    def read(self, name: str, *, limit: int = SMALL) -> Found | None:
        """A whole file, or None if there is none. One of more than `limit` bytes is a Fault."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """A whole file, in place of the one before: readers see the old one or the new one."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """A whole file, if there is none yet; of several writers exactly one succeeds.

        Returns:
          Whether the file is there with this very content. So it is right also when a write is
          repeated because its answer was lost.
        """

    @abstractmethod
    def replace(self, name: str, data: bytes, *, generation: Any) -> bool:
        """A whole file in place of the one of this generation, which was read before.

        Returns:
          Whether the file is there with this very content: False if another writer was quicker.
        """

    @abstractmethod
    def append(self, name: str, data: bytes) -> None:
        """More bytes at the end of a file, all or none of them. One writer at a time."""

    @abstractmethod
    def delete(self, name: str, *, generation: Any = None) -> bool:
        """Deletes a file, with `generation` only if it is still that one.

        Returns:
          Whether it is gone.
        """

    @abstractmethod
    def names(self, name: str = "") -> list[str]:
        """What lies directly in the folder `name` of this one, sorted; folders end with a slash."""

    @abstractmethod
    def delete_folder(self, name: str) -> None:
        """Deletes all that is below the folder `name` of this one."""


def join(*names: str) -> str:
    """One name of several parts.

    Raises:
      UsageError: it would lead out of the folder, or cannot be a name everywhere.
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
    """Turns tensorstore's errors, which are all ValueErrors, into errors of one line."""
    try:
        yield
    except ValueError as error:
        # What follows is the whole spec of the array, or the whole answer of the service.
        reason = re.split(r" \[(?:tensorstore_spec|http_response_body)=", str(error))[0]
        if kind is Fault and reason.startswith(_NO_ANSWER):
            kind = Unavailable
        raise kind(where + " ".join(reason.split())) from None
