"""A note in the run folder that a process trains there, by which another process notices it."""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

from rmt_tpu.errors import UsageError
from rmt_tpu.storage import Fault, Folder

FILE = "running.json"
_BEAT_SECONDS = 60.0
# A note that was not renewed for this long is from a process that has ended.
_STALE_SECONDS = 3 * _BEAT_SECONDS


@contextlib.contextmanager
def held(folder: Folder, say: Callable[[str], None]) -> Iterator[str | None]:
    """Refuse a folder in which another process trains; leave a note that this process does.

    The note is renewed each minute. It does not lock the folder. If a process of this host left it,
    this function finds out whether that process is alive. A process of another host may have been
    killed a minute ago and begin again here, so its note only causes a message. The caller decides
    what follows: the same run may go on, but the folder must not become another run's.

    Yields:
      A description of the process of another host that left a note lately, or None.

    Raises:
      UsageError: a process of this host trains in `folder`.
    """
    other = _claimed(folder)
    if other:
        say(
            f"note: {other} seems to train in {folder} too; the one that comes later to a "
            "checkpoint will fail, and metrics are mixed"
        )
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(_BEAT_SECONDS):
            with contextlib.suppress(Fault):
                folder.write(FILE, _word())

    thread = threading.Thread(target=beat, name="lease", daemon=True)
    thread.start()
    try:
        yield other
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(Fault):
            folder.delete(FILE)


def _word() -> bytes:
    return json.dumps(
        {"host": socket.gethostname(), "pid": os.getpid(), "seen": time.time()}
    ).encode()


def _claimed(folder: Folder) -> str | None:
    """Leave the first note; of two processes that do so at once only one succeeds. See `held`."""
    with contextlib.suppress(Fault):
        for _ in range(3):
            found = folder.read(FILE)
            other, is_here = _other(found.data) if found else (None, False)
            if is_here:
                raise UsageError(
                    f"--workdir={folder} is that of a run that {other} trains; wait for it, stop "
                    "it, or give another --workdir"
                )
            if found is None:
                left = folder.create(FILE, _word())
            else:
                left = folder.replace(FILE, _word(), generation=found.generation)
            if left:
                return other
    return None


def _other(data: bytes) -> tuple[str | None, bool]:
    """Return the process that left a note lately, and whether it is on this host.

    The process is None if it is known or likely to have ended.
    """
    try:
        said = json.loads(data)
        host, pid, ago = str(said["host"]), int(said["pid"]), time.time() - float(said["seen"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None, False
    is_here = host == socket.gethostname()
    if ago > _STALE_SECONDS or (is_here and not _lives(pid)):
        return None, False
    return f"process {pid} on {host} (seen {max(ago, 0):.0f} s ago)", is_here


def _lives(pid: int) -> bool:
    """Return whether another process of this host has this number."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError, ValueError):
        return False
    except PermissionError:
        pass
    return True
