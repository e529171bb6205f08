"""Signals that ask for the end: a checkpoint while steps go on, one line before and after."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

from rmt_tpu.streams import flush_stdout, say

# What processes have to agree on after a step, the most urgent last.
GO_ON, SAVE = 0, 1
STOPS = {
    2: signal.SIGUSR1,
    3: signal.SIGUSR2,
    4: signal.SIGHUP,
    5: signal.SIGINT,
    6: signal.SIGTERM,
}
# A closed terminal, and the warning of a scheduler like SLURM, come before the end or more than
# once: a second one is no wish to lose the checkpoint. Who ignores one, as nohup does, goes on.
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class Stop:
    """Whether a signal asks for the end; `wanted` is a key of `STOPS`, or `GO_ON`."""

    def __init__(self):
        self.wanted = GO_ON


@contextlib.contextmanager
def after_the_step(say: Callable[[str], None]) -> Iterator[Stop]:
    """What the first signal of STOPS asks for; a second one ends the process as usual.

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
        # Refused in the midst of another write to the same stream.
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
    """How a signal between steps ends the process.

    Attributes:
      after: what is left of the run, as the rest of a line.
      saved: whether nothing is lost, so that the exit code is 0 and not that of the signal.
    """

    def __init__(self):
        self.after = (
            " at once, without a checkpoint: what was saved is there, and the same command goes on"
        )
        self.saved = False

    def all_is_saved(self, step: int) -> None:
        """From now on nothing that was trained would be lost: the process ends well."""
        self.after = f"; step {step} is saved, and the same command does what is left"
        self.saved = True


@contextlib.contextmanager
def between_steps(end: Callable[[str, int], None]) -> Iterator[AtOnce]:
    """A signal ends the process at once, with a line; all but SIGINT also while XLA compiles.

    Python would call a handler when the compiler returns, which may be minutes later, so a thread
    looks at what the signal writes into a pipe.

    Args:
      end: given a line and the exit code, ends the process; called by that thread.

    Raises:
      KeyboardInterrupt: Ctrl-C, with that line.
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
                code = 0 if at_once.saved else 128 + number[0]  # as a shell gives it
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
    """Ends a process that is alone, from any thread."""
    flush_stdout()
    say(line)
    os._exit(code)
