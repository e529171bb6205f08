"""Signals that stop a run: after a step with a checkpoint, or at once between steps.

One line is printed when a signal arrives.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

from rmt_tpu.streams import flush_stdout, say

# What processes agree on after a step, with the most urgent last.
GO_ON, SAVE = 0, 1
STOPS = {
    2: signal.SIGUSR1,
    3: signal.SIGUSR2,
    4: signal.SIGHUP,
    5: signal.SIGINT,
    6: signal.SIGTERM,
}
# SIGHUP of a closed terminal and the warnings of schedulers like SLURM come before the end, or more
# than once, so a second one must not cost the checkpoint. If the process ignores one of these
# signals, as under nohup, it continues to.
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class Stop:
    """The request of a signal; `wanted` is a key of `STOPS`, or `GO_ON`."""

    def __init__(self):
        self.wanted = GO_ON


@contextlib.contextmanager
def after_the_step(say: Callable[[str], None]) -> Iterator[Stop]:
    """Record in a `Stop` what the first signal of STOPS asks for; a second one ends the process.

    A signal that only warns is ignored from the first signal on.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    usual = {number: signal.getsignal(number) for number in STOPS.values() if _is_ours(number)}
    wakeup = signal.set_wakeup_fd(-1)

    def put_back() -> None:
        for number, handler in usual.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)

    def on_signal(number: int, frame) -> None:
        stop.wanted = next(key for key, value in STOPS.items() if value == number)
        put_back()
        for warning in usual.keys() & set(_WARNINGS):
            signal.signal(warning, signal.SIG_IGN)
        # Python refuses this within another write to the same stream.
        with contextlib.suppress(RuntimeError):
            say("stopping after this step; once more to stop at once, without checkpoint")

    for number in usual:
        signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        put_back()


def _is_ours(number: int) -> bool:
    return number not in _WARNINGS or signal.getsignal(number) is not signal.SIG_IGN


class AtOnce:
    """The line and exit code with which a signal between steps ends the process.

    Attributes:
      after: the end of the printed line, which says what is left of the run.
      saved: whether nothing would be lost; the exit code is then 0 instead of that of the signal.
    """

    def __init__(self):
        self.after = (
            " at once, without a checkpoint: what was saved is there, and the same command goes on"
        )
        self.saved = False

    def all_is_saved(self, step: int) -> None:
        """Note that nothing trained would be lost from now on, so that the exit code is 0."""
        self.after = f"; step {step} is saved, and the same command does what is left"
        self.saved = True


@contextlib.contextmanager
def between_steps(end: Callable[[str, int], None]) -> Iterator[AtOnce]:
    """End the process with a line when a signal comes; all but SIGINT also act while XLA compiles.

    Python calls a handler only when the compiler returns, which may be minutes later. Therefore a
    thread reads the pipe into which Python's C handler writes the signal's number.

    Args:
      end: ends the process, given a line and the exit code; that thread calls it.

    Raises:
      KeyboardInterrupt: Ctrl-C was pressed; the exception has that line.
    """
    at_once = AtOnce()
    main = threading.current_thread() is threading.main_thread()
    numbers = set(STOPS.values()) - {signal.SIGINT}
    usual = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    with _interrupted(at_once):
        if not main or not usual:
            yield at_once
            return
        with _terminated(at_once, end, usual):
            yield at_once


@contextlib.contextmanager
def _interrupted(at_once: AtOnce) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted{at_once.after}") from None


@contextlib.contextmanager
def _terminated(
    at_once: AtOnce, end: Callable[[str, int], None], numbers: list[signal.Signals]
) -> Iterator[None]:
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)

    def wait() -> None:
        while number := os.read(ours, 1):
            if number[0] in numbers:
                name = signal.Signals(number[0]).name
                code = 0 if at_once.saved else 128 + number[0]  # the code that a shell reports
                end(f"stopped by {name}{at_once.after}", code)

    thread = threading.Thread(target=wait, name="signals", daemon=True)
    thread.start()
    for number in numbers:
        signal.signal(number, lambda number, frame: None)
    wakeup = signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        os.close(theirs)
        thread.join()
        os.close(ours)


def end_process(line: str, code: int) -> None:
    """Print a line and end the process, from any thread; for a run of one process."""
    flush_stdout()
    say(line)
    os._exit(code)
