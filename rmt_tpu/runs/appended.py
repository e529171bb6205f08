"""A file in a run folder that only grows; a failure to write it does not end the run."""

import math
import threading
import time
from collections.abc import Callable

from rmt_tpu.storage import Fault, Folder

# The thread waits this number of seconds between two appends to a file in a bucket, and before it
# retries a failed append.
_APPEND_SECONDS = 30.0


class AppendedFile:
    """A file that data is appended to, and the data that is not in the file yet.

    On a local disk, data is in the file when `add` returns. In a bucket, a thread appends the new
    data every half minute, and `flush` appends it immediately.

    No method raises an error if the file cannot be written. The error is reported once, and the
    data is kept in memory until it can be written.

    Args:
      folder: the run folder.
      name: name of the file in the folder.
      report: a function that is called with one line about a file that cannot be written. It may
        be called from any thread.
    """

    def __init__(self, folder: Folder, name: str, report: Callable[[str], None]):
        self._folder, self._name, self._report = folder, name, report
        self._pending: list[bytes] = []
        self._lock, self._appending = threading.Lock(), threading.Lock()
        self._retry_at = -math.inf
        self._closed, self._thread = threading.Event(), None
        if folder.local_path is None:
            self._thread = threading.Thread(
                target=self._append_periodically, name=f"append {name}", daemon=True
            )
            self._thread.start()

    def add(self, data: bytes) -> None:
        """Append `data` to the file, immediately on a local disk and later in a bucket."""
        with self._lock:
            self._pending.append(data)
        if self._thread is None and not self._is_backing_off():
            self.flush()

    def flush(self) -> bool:
        """Append the pending data to the file if it can be written; any thread may call this.

        Returns:
          Whether all data that was added before this call is in the file.
        """
        with self._appending:
            with self._lock:
                pending = list(self._pending)
            if not pending:
                return True
            try:
                self._folder.append(self._name, b"".join(pending))
            except Fault as fault:
                if self._retry_at == -math.inf:
                    self._report(f"note: {fault}; the run continues, and retries this")
                self._retry_at = time.monotonic() + _APPEND_SECONDS
                return False
            self._retry_at = -math.inf
            with self._lock:
                del self._pending[: len(pending)]
            return True

    def close(self) -> None:
        """Write the remaining data and stop the thread."""
        self._closed.set()
        if self._thread:
            self._thread.join()
            # Skip a file whose last append has just failed: a retry may take minutes.
            if self._is_backing_off():
                return
        self.flush()

    def _is_backing_off(self) -> bool:
        """Return whether the last append failed so recently that the next append must wait."""
        return time.monotonic() < self._retry_at

    def _append_periodically(self) -> None:
        while not self._closed.wait(_APPEND_SECONDS):
            if not self._is_backing_off():
                self.flush()
