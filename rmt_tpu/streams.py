"""Wrappers for standard output and error that survive a full disk or a closed pipe or file."""

import contextlib
import os
import sys
from typing import Any

from rmt_tpu.errors import RunError

# Codes of a terminal: go to the start of the line, erase the line, and show the cursor.
_END_OF_BAR = "\r\x1b[2K\x1b[?25h"


class SafeStream:
    """A text stream that drops text that cannot be written, instead of raising an error.

    Messages are printed to it, because a run must not fail when a message cannot be written.
    Characters that the stream's encoding lacks are written as escapes.

    Args:
      stream: the stream for the text. None drops all text; `sys.stderr` is None if it was closed.

    Attributes:
      needed: whether the text is the program's only result. If so, the first failure is raised, as
        a BrokenPipeError or, for any other cause, a RunError.
    """

    def __init__(self, stream: Any):
        self._stream, self.needed = stream, False
        if hasattr(stream, "reconfigure"):
            with contextlib.suppress(OSError, ValueError):
                stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> Any:
        # copy and pickle look up names like `__setstate__` before the attribute `_stream` exists.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text if possible; return its number of characters even if it cannot be written."""
        self._try("write", text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream if possible."""
        self._try("flush")

    def isatty(self) -> bool:
        """Return whether the stream is open and a terminal."""
        try:
            return self._stream is not None and self._stream.isatty()
        except (OSError, ValueError):
            return False

    def fileno(self) -> int:
        """Return the stream's file descriptor.

        Raises:
          OSError: the stream is closed or is not a file.
        """
        if self._stream is None:
            raise OSError("the stream is closed")
        return self._stream.fileno()

    @property
    def encoding(self) -> str:
        """The encoding of the stream; UTF-8 if the stream has no encoding."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def _try(self, method: str, *arguments: str) -> None:
        if self._stream is None:
            self._lost("it is closed")
            return
        try:
            getattr(self._stream, method)(*arguments)
        # A ValueError may be a UnicodeError, from text that the stream cannot encode.
        except (OSError, ValueError) as error:
            if self.needed and isinstance(error, BrokenPipeError):
                self.needed = False  # Python's flush at exit must not raise the error again.
                raise
            self._lost(getattr(error, "strerror", None) or str(error))

    def _lost(self, why: str) -> None:
        if self.needed:
            self.needed = False
            raise RunError(f"standard output cannot be written to: {why}")


def install() -> None:
    """Replace `sys.stdout` and `sys.stderr` by streams that drop text instead of raising errors."""
    # If a standard stream is closed, open /dev/null in its place. Otherwise a file that is opened
    # later would get the stream's descriptor, and the messages of libraries would go to that file.
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, SafeStream):
            setattr(sys, name, SafeStream(stream))


def need_stdout() -> None:
    """Mark standard output as the program's only result, so that a failure to write it is an error.

    See `SafeStream.needed`.
    """
    if isinstance(sys.stdout, SafeStream):
        sys.stdout.needed = True


def log_line(line: str) -> None:
    """Print one line on standard error immediately; drop the line if it cannot be written."""
    stream = sys.stderr if isinstance(sys.stderr, SafeStream) else SafeStream(sys.stderr)
    print(line, file=stream, flush=True)


def log_last_line(line: str) -> None:
    """Print the last line of a process on standard error; drop the line if it cannot be written.

    On a terminal the line replaces a progress bar, and the cursor that the bar hid appears again.
    """
    # While rich shows a bar, it puts a stream of its own in place of standard error, which prints
    # lines above the bar.
    stream = getattr(sys.stderr, "rich_proxied_file", None)
    if stream is None:
        log_line(line)
        return
    is_dumb = os.environ.get("TERM") in ("dumb", "unknown")
    print("" if is_dumb else _END_OF_BAR, line, sep="", file=SafeStream(stream), flush=True)


def flush_stdout() -> None:
    """Flush standard output, dropping text that cannot be written."""
    SafeStream(sys.stdout).flush()
