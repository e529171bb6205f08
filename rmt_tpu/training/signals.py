"""SIGINT and SIGTERM: a checkpoint while steps go on, one line before and after."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

from rmt_tpu.streams import flush_stdout, say

# What processes have to agree on after a step, the most urgent last.
GO_ON, SAVE = 0, 1
STOPS = {2: signal.SIGINT, 3: signal.SIGTERM}

TERMINATED = 128 + signal.SIGTERM  # the exit code that a shell would give


class Stop:
    """Whether a signal asks for the end; `wanted` is a key of `STOPS`, or `GO_ON`."""

    def __init__(self):
        self.wanted = GO_ON


@contextlib.contextmanager
def after_the_step(say: Callable[[str], None]) -> Iterator[Stop]:
    """What the first SIGINT or SIGTERM asks for; the second ends the process as usual."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    usual = {number: signal.getsignal(number) for number in STOPS.values()}
    wakeup = signal.set_wakeup_fd(-1)

    def put_back() -> None:
        for number, handler in usual.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)

    def on_signal(number: int, frame) -> None:
        stop.wanted = next(key for key, value in STOPS.items() if value == number)
        put_back()
        # Refused in the midst of another write to the same stream.
        with contextlib.suppress(RuntimeError):
            say("stopping after this step; once more to stop at once, without checkpoint")

    for number in usual:
        signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        put_back()


class AtOnce:
    """How a signal between steps ends the process.

    Attributes:
      after: what is left of the run, as the rest of a line.
      terminated: the exit code after SIGTERM.
    """

    def __init__(self):
        self.after = (
            " at once, without a checkpoint: what was saved is there, and the same command goes on"
        )
        self.terminated = TERMINATED

    def all_is_saved(self, step: int) -> None:
        """From now on nothing that was trained would be lost: the process ends well."""
        self.after = f"; step {step} is saved, and the same command does what is left"
        self.terminated = 0


@contextlib.contextmanager
def between_steps(end: Callable[[str, int], None]) -> Iterator[AtOnce]:
    """A signal ends the process at once, with a line; SIGTERM also while XLA compiles.

    Python would call a handler when the compiler returns, which may be minutes later, so a thread
    looks at what the signal writes into a pipe.

    Args:
      end: given a line and the exit code, ends the process; called by that thread.

    Raises:
      KeyboardInterrupt: Ctrl-C, with that line.
    """
    at_once = AtOnce()
    main = threading.current_thread() is threading.main_thread()
    with _interrupted(at_once):
        if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            yield at_once
            return
        with _terminated(at_once, end):
            yield at_once


@contextlib.contextmanager
def _interrupted(at_once: AtOnce) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted{at_once.after}") from None


@contextlib.contextmanager
def _terminated(at_once: AtOnce, end: Callable[[str, int], None]) -> Iterator[None]:
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)

    def wait() -> None:
        while number := os.read(ours, 1):
            if number[0] == signal.SIGTERM:
                end(f"stopped by SIGTERM{at_once.after}", at_once.terminated)

    thread = threading.Thread(target=wait, name="signals", daemon=True)
    thread.start()
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    wakeup = signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(theirs)
        thread.join()
        os.close(ours)


def end_process(line: str, code: int) -> None:
    """Ends a process that is alone, from any thread."""
    flush_stdout()
    say(line)
    os._exit(code)
