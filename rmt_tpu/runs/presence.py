"""Files that show that a process is at work: it trains in a run folder, or appends to a file.

The file of a run is `running.json`, and that of a file `a.jsonl` is `a.jsonl.running.json`.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rmt_tpu.errors import UsageError
from rmt_tpu.storage import Fault, Folder, open_parent

FILE = "running.json"
BEAT_SECONDS = 60.0
# A process that has not renewed its file for this number of seconds is regarded as dead.
_STALE_SECONDS = 3 * BEAT_SECONDS


@contextlib.contextmanager
def announce_run(folder: Folder, log: Callable[[str], None]) -> Iterator[str | None]:
    """Announce, during the `with` body, that this process trains in a run folder.

    The announcement is a file that is rewritten every minute. It does not lock the folder. If
    another process on this host has announced itself and is alive, this function raises an error.
    If another host announced a process within the last minutes, that process may have been killed
    and restarted here, so only a note is printed. The caller then decides: the same run may
    continue in the folder, but a different run must not start there. After the body, the file is
    deleted. If another process announced itself and may be alive, its announcement is restored.

    Yields:
      A description of the process on another host that recently renewed the file, or None.

    Raises:
      UsageError: another process on this host trains in `folder`.
    """
    announcement = _Announcement(folder, FILE)
    other, is_here = announcement.claim()
    if is_here:
        raise UsageError(
            f"--workdir={folder} is in use by {other}; wait for it, stop it, or give another "
            "--workdir"
        )
    if other:
        log(
            f"note: {other} also seems to train in {folder}; if it does, stop one of the two, "
            "because they delete or damage each other's checkpoints and mix their metrics"
        )
    with announcement.renewed():
        yield other


@contextlib.contextmanager
def announce_writer(location: str, log: Callable[[str], None]) -> Iterator[None]:
    """Announce, during the `with` body, that this process appends lines to a file of --output.

    Another process is treated as in `announce_run`: one on this host is an error, and one that
    another host announced within the last minutes is noted.

    Args:
      location: the path of the file, local or on gs://.
      log: a function that prints a line.

    Raises:
      UsageError: another process on this host appends to the file. The message begins with
        `location`.
    """
    folder, name = open_parent(location)
    if folder.local_path is not None:
        # Two links to a file have one announcement.
        folder, name = open_parent(str((folder.local_path / name).resolve()))
    announcement = _Announcement(folder, f"{name}.{FILE}")
    other, is_here = announcement.claim()
    if is_here:
        raise UsageError(
            f"{location} is in use by {other}; wait for it, stop it, or give another --output"
        )
    if other:
        log(
            f"note: {other} also seems to write to {location}; if it does, stop one of the two, "
            "because both add the same lines"
        )
    with announcement.renewed():
        yield


class _Announcement:
    """This process's announcement in a folder, and that of another process that it replaced.

    Args:
      folder: the folder.
      file: the name of the announcement's file.
    """

    def __init__(self, folder: Folder, file: str):
        self._folder, self._file = folder, file
        self._replaced: bytes | None = None

    def claim(self) -> tuple[str | None, bool]:
        """Write the announcement, unless another process on this host is at work here.

        If two processes write their announcements at the same time, one of them succeeds, and the
        other finds that announcement.

        Returns:
          A description of another process that is at work here, or None if there is none, and
          whether it is on this host.
        """
        with contextlib.suppress(Fault):
            for _ in range(3):
                found = self._folder.read(self._file)
                other, is_here = _parse_record(found.data) if found else (None, False)
                if is_here:
                    return other, True
                record = _own_record()
                if found is None:
                    written = self._folder.create(self._file, record)
                else:
                    generation = found.generation
                    written = self._folder.replace(self._file, record, generation=generation)
                if written:
                    self._replaced = found.data if found and other else None
                    return other, False
        return None, False

    @contextlib.contextmanager
    def renewed(self) -> Iterator[None]:
        """Renew the announcement every minute during the `with` body, and then withdraw it."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(BEAT_SECONDS):
                with contextlib.suppress(Fault):
                    self.renew()

        thread = threading.Thread(target=beat, name="presence", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            with contextlib.suppress(Fault):
                self.withdraw()

    def renew(self) -> None:
        """Write the announcement again, and remember that of another process that it replaces."""
        found = self._folder.read(self._file)
        if found and not _is_own(found.data):
            self._replaced = found.data
        self._folder.write(self._file, _own_record())

    def withdraw(self) -> None:
        """Delete the announcement, or restore the one that it replaced.

        That one is restored only if its process may be alive. If another process wrote the file
        last, the file stays.
        """
        found = self._folder.read(self._file)
        if found is None or not _is_own(found.data):
            return
        if self._replaced and _parse_record(self._replaced)[0]:
            self._folder.replace(self._file, self._replaced, generation=found.generation)
        else:
            self._folder.delete(self._file, generation=found.generation)


def _own_record() -> bytes:
    pid = os.getpid()
    record = {"host": socket.gethostname(), "pid": pid, "seen": time.time()}
    return json.dumps(record | {"started": start_ticks(pid)}).encode()


def _is_own(data: bytes) -> bool:
    """Return whether this process wrote an announcement."""
    try:
        record = json.loads(data)
        return (record["host"], record["pid"]) == (socket.gethostname(), os.getpid())
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def _parse_record(data: bytes) -> tuple[str | None, bool]:
    """Return which process wrote an announcement, and whether the process is on this host.

    The first value is None if the process has ended. If it is on another host, or its start is not
    known, the value is also None if the process has not renewed the file for several minutes, or
    names a time that is several minutes in the future.
    """
    try:
        record = json.loads(data)
        host, pid, ago = (
            str(record["host"]),
            int(record["pid"]),
            time.time() - float(record["seen"]),
        )
        started = record.get("started")
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None, False
    is_here = host == socket.gethostname()
    if is_here and not _is_alive(pid, started):
        return None, False
    # The start of a process on this host proves that it is the one that announced itself. It may
    # have been suspended. A time that is too far in the future says nothing: the other host's clock
    # is wrong.
    is_known = is_here and started is not None and started == start_ticks(pid)
    if not is_known and not abs(ago) <= _STALE_SECONDS:
        return None, False
    return f"process {pid} on {host} (seen {max(ago, 0):.0f} s ago)", is_here


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since the host's boot.

    The result is None if there is no such process, or if the host has no `/proc`.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        # The second field is the program's name in parentheses, which may have spaces and
        # parentheses too. The start is the 22nd field.
        return int(stat.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _is_alive(pid: int, started: object) -> bool:
    """Return whether a process that announced itself, other than this one, is alive on this host.

    After the restart of a container, the process id may belong to another process. That process
    has another start.

    Args:
      pid: the id of the process.
      started: its `start_ticks` in the announcement; None if they are not known.
    """
    if pid == os.getpid():
        return False
    now = start_ticks(pid)
    if None not in (started, now) and started != now:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError, ValueError):
        return False
    except PermissionError:
        pass
    return True
