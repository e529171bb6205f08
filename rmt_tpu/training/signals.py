"""Handlers of the signals that stop a run.

During training a signal stops the run after the current step, with a checkpoint. At other times it
ends the process immediately. One line is printed when a signal arrives.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from rmt_tpu.streams import flush_stdout, log_last_line

# After each step the processes agree on one of these codes, the highest that any process requests:
# to go on, to save a checkpoint, or to stop. STOPS maps each code for stopping to its signal.
GO_ON, SAVE = 0, 1
STOPS = {
    2: signal.SIGUSR1,
    3: signal.SIGUSR2,
    4: signal.SIGHUP,
    5: signal.SIGINT,
    6: signal.SIGTERM,
}
# Signals that announce the end of the process, such as SIGHUP from a closed terminal, or SIGUSR1
# from a scheduler like SLURM. Such a signal may arrive twice, and the second one must not prevent
# the checkpoint. If the process already ignores a signal, as under nohup, it continues to do so.
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class Stop:
    """A record of the signal that arrived.

    Attributes:
      wanted: the code of the signal that arrived, which is its key in `STOPS`; `GO_ON` if none did.
    """

    def __init__(self):
        self.wanted = GO_ON


@contextlib.contextmanager
def stop_after_step(log: Callable[[str], None]) -> Iterator[Stop]:
    """Record the first signal in `STOPS` that arrives during the `with` body.

    A second signal ends the process. After the first signal, further signals that only announce the
    end of the process are ignored.

    Yields:
      The `Stop` in which the signal is recorded.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    previous = {
        number: signal.getsignal(number) for number in STOPS.values() if _is_handled(number)
    }
    wakeup = -1

    def restore_handlers() -> None:
        # A handler of `exit_on_signal` has no effect before its thread is told of signals.
        signal.set_wakeup_fd(wakeup)
        for number, handler in previous.items():
            signal.signal(number, handler)

    def on_signal(number: int, frame) -> None:
        stop.wanted = next(key for key, value in STOPS.items() if value == number)
        restore_handlers()
        for warning in previous.keys() & set(_WARNINGS):
            signal.signal(warning, signal.SIG_IGN)
        # Python raises RuntimeError if the signal interrupted another write to the same stream.
        with contextlib.suppress(RuntimeError):
            log("stopping after this step; another signal stops at once, without a checkpoint")

    for number in previous:
        signal.signal(number, on_signal)
    # Until here a signal still ends the process, so none is lost.
    wakeup = signal.set_wakeup_fd(-1)
    try:
        yield stop
    finally:
        restore_handlers()


def _is_handled(number: int) -> bool:
    return number not in _WARNINGS or signal.getsignal(number) is not signal.SIG_IGN


class ExitNotice:
    """The message and exit code of a process if a signal ends it outside of the training loop.

    Attributes:
      ending: the end of the printed line, which states what the run has saved.
      saved: whether all progress is saved.
    """

    def __init__(self):
        self.ending = (
            " at once, without a checkpoint; repeat the command to resume from the last checkpoint"
        )
        self.saved = False

    def on_saved(self, step: int) -> None:
        """Record that a checkpoint of `step` has all progress, so that the exit code becomes 0."""
        self.ending = f"; step {step} is saved; repeat the command to finish what is left"
        self.saved = True

    def of(self, number: signal.Signals) -> tuple[str, int]:
        """Return the line and the exit code of a process that a signal ends.

        Shells report such a process with the code 128 + the signal's number. If all progress is
        saved, the code is 0, except after Ctrl-C.
        """
        if number == signal.SIGINT:
            return f"error: interrupted{self.ending}", 128 + number
        return f"stopped by {number.name}{self.ending}", 0 if self.saved else 128 + number


@contextlib.contextmanager
def exit_on_signal(end: Callable[[str, int], None]) -> Iterator[ExitNotice]:
    """End the process with a one-line message when a signal arrives in the `with` body.

    A signal acts even while XLA compiles. Python would call a handler only after the compiler
    returns, which may take minutes, and it ignores an exception in some callbacks. Instead a thread
    reads the pipe to which Python's C handler writes the number of each signal.

    Args:
      end: a function of a message and an exit code that ends the process. The thread calls it.

    Yields:
      The message and exit code, which the body may change.

    Raises:
      KeyboardInterrupt: the body raised it; the exception has the message.
    """
    notice = ExitNotice()
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in STOPS.values()}
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    previous = {number: handler for number, handler in handlers.items() if handler in defaults}
    with _interrupted(notice):
        if not main or not previous:
            yield notice
            return
        with _terminated(notice, end, previous):
            yield notice


@contextlib.contextmanager
def _interrupted(notice: ExitNotice) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted{notice.ending}") from None


@contextlib.contextmanager
def _terminated(
    notice: ExitNotice, end: Callable[[str, int], None], previous: dict[signal.Signals, Any]
) -> Iterator[None]:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def wait() -> None:
        while number := os.read(read_end, 1):
            if number[0] in previous:
                end(*notice.of(signal.Signals(number[0])))

    thread = threading.Thread(target=wait, name="signals", daemon=True)
    thread.start()
    # At no time may a signal arrive that neither the thread nor a handler would act on.
    wakeup = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in previous:
        signal.signal(number, lambda number, frame: None)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        os.close(write_end)
        thread.join()
        os.close(read_end)


def end_process(line: str, code: int) -> None:
    """Print a line and exit immediately.

    This is only for runs with one process, because other processes are not notified. Any thread
    may call it.
    """
    flush_stdout()
    log_last_line(line)
    os._exit(code)
