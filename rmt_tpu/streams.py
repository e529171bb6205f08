"""Standard output and error, which may be lost: a full disk, a pipe without a reader, no file."""

import contextlib
import os
import sys
from typing import Any

from rmt_tpu.errors import RunError


class Told:
    """A stream of text for people. What it cannot take is dropped, and nothing is raised.

    A line about a run is worth less than the run. Characters that the stream's encoding lacks are
    written as escapes.

    Args:
      stream: where the text goes; None drops all of it, as `sys.stderr` is where it was closed.

    Attributes:
      needed: the text is all that the program makes, so that the first failure is raised: a
        BrokenPipeError, or a RunError of anything else.
    """

    def __init__(self, stream: Any):
        self._stream, self.needed = stream, False
        if hasattr(stream, "reconfigure"):
            with contextlib.suppress(OSError, ValueError):
                stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling ask before there is a stream
            raise AttributeError(name)
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try("write", text)
        return len(text)

    def flush(self) -> None:
        self._try("flush")

    def isatty(self) -> bool:
        try:
            return self._stream is not None and self._stream.isatty()
        except (OSError, ValueError):
            return False

    def fileno(self) -> int:
        """
        Raises:
          OSError: the stream is no file.
        """
        if self._stream is None:
            raise OSError("the stream is closed")
        return self._stream.fileno()

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def _try(self, method: str, *arguments: str) -> None:
        if self._stream is None:
            self._lost("it is closed")
            return
        try:
            getattr(self._stream, method)(*arguments)
        except (OSError, ValueError) as error:  # a UnicodeError is a ValueError
            if self.needed and isinstance(error, BrokenPipeError):
                self.needed = False  # what is flushed at the end is dropped
                raise
            self._lost(getattr(error, "strerror", None) or str(error))

    def _lost(self, why: str) -> None:
        if self.needed:
            self.needed = False
            raise RunError(f"standard output cannot be written to: {why}")


def install() -> None:
    """Makes `sys.stdout` and `sys.stderr` streams that lose text instead of raising."""
    # A file opened later would get the number of a closed one, and what libraries say there.
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, Told):
            setattr(sys, name, Told(stream))


def need_stdout() -> None:
    """What is printed from now on is what the program is for: see `Told.needed`."""
    if isinstance(sys.stdout, Told):
        sys.stdout.needed = True


def say(line: str) -> None:
    """One line on standard error at once, or nothing where it cannot be written."""
    stream = sys.stderr if isinstance(sys.stderr, Told) else Told(sys.stderr)
    print(line, file=stream, flush=True)


def flush_stdout() -> None:
    """What was printed is written, or dropped where it cannot be."""
    Told(sys.stdout).flush()
