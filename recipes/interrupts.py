"""Ctrl-C and SIGTERM in a recipe, which end it with one line and the code that a shell reports.

This module imports only small modules, because it is the first that a recipe imports.
"""

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

# The exit code that a shell reports for SIGINT.
INTERRUPTED = 130

# Signals that `terminated` handles: SIGTERM is sent by schedulers and `timeout`, and SIGHUP by a
# terminal that closes.
_TERMINATING = (signal.SIGTERM, signal.SIGHUP)

# Seconds after which an interrupt that Python has ignored is sent again.
_AGAIN_SECONDS = 0.05


class Terminated(KeyboardInterrupt):
    """The error that `terminated` raises; it is handled like Ctrl-C, but has another exit code.

    Args:
      number: the number of the signal.
    """

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """Return the exit code that a shell reports for the signal that caused an interrupt."""
    return 128 + interrupt.number if isinstance(interrupt, Terminated) else INTERRUPTED


@contextlib.contextmanager
def terminated() -> Iterator[None]:
    """Raise a `Terminated` in the `with` body for SIGTERM and SIGHUP, so that it can clean up.

    By default such a signal ends a process without a line, and what the process has not written yet
    is lost. A signal that the process ignores or handles in another way is left alone, for example
    SIGHUP under nohup. After the first signal, SIGTERM ends the process, and SIGHUP does nothing,
    because a terminal that closes may send it twice.
    """
    handled = [n for n in _TERMINATING if signal.getsignal(n) is signal.SIG_DFL]
    # Only the main thread may set a handler.
    if threading.current_thread() is not threading.main_thread():
        handled = []
    for number in handled:
        signal.signal(number, _terminate)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    for other in _TERMINATING:
        if signal.getsignal(other) is _terminate:
            next_time = signal.SIG_IGN if other == signal.SIGHUP else signal.SIG_DFL
            signal.signal(other, next_time)
    raise Terminated(number)


def end_at_once(number: int = signal.SIGINT, frame: FrameType | None = None) -> NoReturn:
    """Print one line and exit; this is a signal handler that does not use Python's streams."""
    try:
        os.write(2, b"error: interrupted\n")
    finally:
        os._exit(INTERRUPTED)


def while_importing(arguments: list[str]) -> None:
    """Let Ctrl-C end a recipe at once, until `raised` is entered.

    A recipe imports other modules for up to a second before it can handle a KeyboardInterrupt.
    Other programs that import a recipe, and programs that handle SIGINT in a way of their own or
    ignore it, are left alone.

    Args:
      arguments: `sys.argv` while the package `recipes` is imported. Python sets its first element
        to "-m" while it looks for the module of `python -m recipes.NAME`.
    """
    program = arguments[0] if arguments else ""
    is_recipe = program == "-m" or os.path.basename(program).startswith("rmt-")
    if not is_recipe or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    # Only the main thread may set a handler.
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGINT, end_at_once)


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Raise a KeyboardInterrupt in the `with` body for each Ctrl-C, as Python does by default.

    Python ignores an exception in a callback of the garbage collector or in `__del__`. If it has
    ignored a KeyboardInterrupt, the signal is sent again.
    """
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    before = sys.unraisablehook
    sys.unraisablehook = _sends_again(before)
    try:
        yield
    finally:
        sys.unraisablehook = before


def _sends_again(report: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Return a hook for ignored exceptions, which calls `report` for those of other types."""

    def hook(ignored: Any) -> None:
        if not issubclass(ignored.exc_type, KeyboardInterrupt):
            report(ignored)
            return
        # Python would ignore it here, too, so a thread waits until the callback has returned.
        main, number = threading.main_thread().ident, signal.SIGINT
        if isinstance(ignored.exc_value, Terminated):
            number = ignored.exc_value.number
            signal.signal(number, _terminate)
        again = threading.Timer(_AGAIN_SECONDS, signal.pthread_kill, (main, number))
        again.daemon = True
        again.start()

    return hook


def leave(code: int | None) -> NoReturn:
    """Exit with `code`; after Ctrl-C or `terminated`, without the end of the interpreter.

    Threads of a compiler may still run after an interrupt. They crash when the interpreter ends, so
    the process ends without it, after everything that the interpreter calls before: threads are
    waited for, exit handlers run, and the standard streams are flushed. Another Ctrl-C ends the
    process at once.
    """
    if code not in (INTERRUPTED, *(128 + number for number in _TERMINATING)):
        sys.exit(code)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # A standard stream may be closed, or None.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
