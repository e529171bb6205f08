"""A folder on a local file system, or on a mounted network file system."""

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorstore as ts

from rmt_tpu.errors import UsageError
from rmt_tpu.storage.folder import SMALL, Fault, Folder, Found, Unavailable, faults, join


class LocalFolder(Folder):
    """A local folder whose files are written by tensorstore's `file` driver.

    The driver writes each file under a temporary name in the same folder, fsyncs it, and renames
    it. It uses a lock file to make `create`, `replace` and a conditional `delete` exclusive.
    """

    def __init__(self, url: str, path: Path | None = None):
        """Create a `Folder` for a local path, without accessing the path.

        Args:
          url: the path, which messages show.
          path: the absolute path; None means that `url` is relative to the current directory.

        Raises:
          UsageError: Python and tensorstore would interpret the path differently.
        """
        self.url = url
        self.local_path = path or Path(os.path.abspath(os.path.expanduser(url)))
        _check_path(url, str(self.local_path))
        self._kv = ts.KvStore.open(self.kvstore()).result()

    @property
    def name(self) -> str:
        """The last part of the absolute local path."""
        return self.local_path.name

    def child(self, name: str) -> "LocalFolder":
        """Return the subfolder `name`."""
        # The current directory may have changed since this folder was opened.
        name = join(name)
        return LocalFolder(os.path.join(self.url, name), self.local_path / name)

    def check(self, *, write: bool = False) -> None:
        """Check that the folder can be listed; if `write` is true, create it and write a file.

        A folder that does not exist counts as empty, and can be read.

        Raises:
          UsageError: the folder cannot be listed or written to; the message has the reason.
        """
        try:
            if write:
                self.local_path.mkdir(parents=True, exist_ok=True)
                probe = self.local_path / f".write_probe-{uuid.uuid4().hex[:8]}"
                probe.write_bytes(b"")
                probe.unlink()
            else:
                self._list_if_there()
        except OSError as error:
            what = "written to" if write else "read"
            # `mkdir` says "File exists" about a file in the place of the folder.
            why = "Not a directory" if isinstance(error, FileExistsError) else error.strerror
            # In the message, name the existing folder in which nothing can be created, such as
            # /proc.
            if write and isinstance(error, FileNotFoundError):
                there = next(path for path in self.local_path.parents if os.path.exists(path))
                why = f"{there} does not allow new folders or files"
            for path in (self.local_path, *self.local_path.parents):
                # For a path that cannot be accessed, functions of `os.path` return False, and
                # methods of `Path` raise an error.
                if os.path.islink(path) and not os.path.exists(path):
                    why = f"{path} is a broken link"
            raise UsageError(f"{self.url} cannot be {what}: {why}") from None

    def _list_if_there(self) -> None:
        """List the folder, unless it does not exist.

        Raises:
          OSError: the folder cannot be listed, or it is unknown whether it exists.
        """
        try:
            os.stat(self.local_path)
        except (FileNotFoundError, NotADirectoryError):
            return
        os.listdir(self.local_path)

    def kvstore(self) -> dict[str, Any]:
        """Return the spec of tensorstore's `file` driver."""
        return {"driver": "file", "path": os.path.join(self.local_path, "")}

    def context(self) -> ts.Context:
        """Return a context in which tensorstore keeps no cache."""
        # Each chunk of an array is read only once, so a cache would waste memory.
        return ts.Context({"cache_pool": {"total_bytes_limit": 0}})

    def read(self, name: str, *, limit: int = SMALL) -> Found | None:
        """Return a file's bytes and generation, or None if there is no such file.

        Raises:
          Fault: the file has more than `limit` bytes.
        """
        with self._one_line_errors(name):
            # Check the size before the read allocates memory.
            path = self.local_path / join(name)
            if path.is_file() and (size := path.stat().st_size) > limit:
                raise Fault(f"{self._url_of(name)} has {size} bytes; legal: at most {limit}")
            found = self._kv.read(name).result()
        if found.state == "missing":
            return None
        return Found(bytes(found.value), found.stamp.generation)

    def write(self, name: str, data: bytes) -> None:
        """Write a file under a temporary name, and rename it."""
        with self._one_line_errors(name):
            self._kv.write(join(name), data).result()

    def create(self, name: str, data: bytes) -> bool:
        """Write a file, under a lock, unless it exists; see `Folder.create`."""
        with self._one_line_errors(name):
            before = self._kv.read(join(name)).result()
            if before.state == "missing":
                written = self._kv.write(name, data, if_equal=before.stamp.generation).result()
                # A write whose condition fails raises no error, and its result has no generation.
                if written.generation:
                    return True
            return bytes(self._kv.read(name).result().value) == data

    def replace(self, name: str, data: bytes, *, generation: Any) -> bool:
        """Write a file, under a lock, if it has the given generation; see `Folder.replace`."""
        with self._one_line_errors(name):
            # A write whose condition fails raises no error, and its result has no generation.
            if self._kv.write(join(name), data, if_equal=generation).result().generation:
                return True
            return bytes(self._kv.read(name).result().value) == data

    def append(self, name: str, data: bytes) -> None:
        """Append bytes to a file; if the append fails, truncate the file to its earlier size."""
        path = self.local_path / join(name)
        with self._one_line_errors(name):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "ab", buffering=0) as file:
                before = os.fstat(file.fileno()).st_size
                try:
                    left = memoryview(data)
                    while left:
                        left = left[file.write(left) :]
                # The write may fail, for example because the disk is full.
                except OSError:
                    file.truncate(before)
                    raise

    def delete(self, name: str, *, generation: Any = None) -> bool:
        """Delete a file; return whether the file no longer exists."""
        with self._one_line_errors(name):
            # Return early, because tensorstore would create the folder of a file that is absent.
            if not os.path.lexists(self.local_path / join(name)):
                return True
            if generation is None:
                self._kv.write(join(name), None).result()
                return True
            self._kv.write(join(name), None, if_equal=generation).result()
            return self._kv.read(name).result().state == "missing"

    def names(self, name: str = "") -> list[str]:
        """Return the sorted names of files and subfolders; [] if the folder does not exist."""
        folder = self.local_path / join(name) if name else self.local_path
        with self._one_line_errors(name):
            try:
                with os.scandir(folder) as entries:
                    found = [e.name + "/" * e.is_dir() for e in entries]
            except (FileNotFoundError, NotADirectoryError):
                return []
        # Leave out tensorstore's lock files, which a bucket does not have.
        return sorted(n for n in found if not n.endswith(".__lock"))

    def delete_folder(self, name: str) -> None:
        """Delete a subfolder with its content, even if another process deletes it concurrently."""
        folder = self.local_path / join(name)
        with self._one_line_errors(name):
            while os.path.lexists(folder):
                # Another process may delete the same folder, so a file may be gone already.
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(folder)

    def _url_of(self, name: str) -> str:
        return os.path.join(self.url, name)

    @contextlib.contextmanager
    def _one_line_errors(self, name: str) -> Iterator[None]:
        try:
            with faults(f"{self._url_of(name)}: "):
                yield
        except OSError as error:
            kind = Unavailable if isinstance(error, PermissionError) else Fault
            raise kind(f"{self._url_of(name)}: {error.strerror or error}") from None


def _check_path(url: str, path: str) -> None:
    try:
        os.fsencode(path)
        path.encode("utf-8")  # Tensorstore encodes paths as UTF-8.
    except UnicodeEncodeError:
        raise UsageError(
            f"{url!r} cannot be opened: Python does not read file names as UTF-8 here; set "
            "LC_ALL=C.UTF-8 or PYTHONUTF8=1, or give another path"
        ) from None
    # Refuse a backslash, which tensorstore treats as a slash and Python does not.
    for character, name in (("\\", "backslash"), ("\0", "NUL")):
        if character in path and character != os.sep:
            within = "" if character in url else f", in {path!r}"
            raise UsageError(
                f"{url!r} cannot be opened: it has a {name}{within}; legal: a path without it"
            )
