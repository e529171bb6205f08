"""Whether another process trains in the same run folder: a note, never a lock."""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

from rmt_tpu.storage import Fault, Folder

FILE = "running.json"
_BEAT_SECONDS = 60.0
_STALE_SECONDS = 3 * _BEAT_SECONDS  # what was not renewed for so long has ended


@contextlib.contextmanager
def held(folder: Folder, say: Callable[[str], None]) -> Iterator[None]:
    """Says so if another process seems to train in `folder`; leaves word that this one does.

    The word is renewed each minute. It is of no consequence but the note: two runs in one folder
    lose nothing, because of two that save the same step one fails.
    """
    with contextlib.suppress(Fault):
        if other := _other(folder):
            say(
                f"note: {other} seems to train in {folder} too; the one that comes later to a "
                "checkpoint will fail, and metrics are mixed"
            )
    ended = threading.Event()
    own = {"host": socket.gethostname(), "pid": os.getpid(), "started": time.time()}

    def beat() -> None:
        while True:
            with contextlib.suppress(Fault):
                folder.write(FILE, json.dumps(own | {"seen": time.time()}).encode())
            if ended.wait(_BEAT_SECONDS):
                return

    thread = threading.Thread(target=beat, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(Fault):
            folder.delete(FILE)


def _other(folder: Folder) -> str | None:
    """Which process has left word lately, if it may still live."""
    found = folder.read(FILE)
    try:
        said = json.loads(found.data) if found else {}
        host, pid, ago = str(said["host"]), int(said["pid"]), time.time() - float(said["seen"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    if ago > _STALE_SECONDS or (host == socket.gethostname() and not _lives(pid)):
        return None
    return f"process {pid} on {host} (seen {max(ago, 0):.0f} s ago)"


def _lives(pid: int) -> bool:
    """Whether another process of this host has this number."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError, ValueError):
        return False
    except PermissionError:
        pass
    return True
