"""Signals, each in a process of its own, for they end it."""

import signal
import subprocess
import sys

import pytest

from rmt_tpu.training import signals

BUSY = """
import os, signal, sys, time
from rmt_tpu.training import signals

def end(line, code):
    signals.end_process(line, code)

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may have used nohup
signal.signal(signal.SIGINT, signal.default_int_handler)  # or the background of a shell
with signals.exit_on_signal(end) as notice:
    {inside}
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""
# As in a compiler: the main thread does not come back to Python, where handlers are called.
DEAF = """
    import ctypes
    os.kill(os.getpid(), signal.{name})
    ctypes.CDLL(None).sleep(600) and ctypes.CDLL(None).sleep(600)
"""
AFTER_THE_LAST_SAVE = (
    """
    notice.on_saved(400)
"""
    + DEAF
)
IN_A_STEP = """
    with signals.stop_after_step(print) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)
        assert signals.STOPS[stop.wanted] == signal.SIGTERM
"""
TWICE_IN_A_STEP = """
    with signals.stop_after_step(print) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)
        assert signals.STOPS[stop.wanted] == signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(600)
"""


def run(inside):
    return subprocess.run(
        [sys.executable, "-c", BUSY.format(inside=inside)],
        capture_output=True,
        encoding="utf-8",
        timeout=600,
    )


def test_sigterm_while_no_step_is_under_way_is_one_line():
    done = run(DEAF.format(name="SIGTERM"))
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert done.stderr.count("\n") == 1 and "stopped by SIGTERM at once" in done.stderr


def test_ctrl_c_while_no_step_is_under_way_is_one_line():
    done = run(DEAF.format(name="SIGINT"))
    assert done.returncode == 128 + signal.SIGINT, done.stderr
    line = "error: interrupted at once, without a checkpoint; repeat the command to resume"
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(line)


def test_ctrl_c_after_the_last_save_is_not_the_end_of_a_complete_run():
    done = run(AFTER_THE_LAST_SAVE.format(name="SIGINT"))
    assert done.returncode == 128 + signal.SIGINT, done.stderr
    line = "error: interrupted; step 400 is saved; repeat the command to finish what is left\n"
    assert done.stderr == line


def test_a_second_ctrl_c_in_a_step_ends_the_run_at_once():
    done = run(TWICE_IN_A_STEP)
    assert done.returncode == 128 + signal.SIGINT, done.stderr
    assert done.stdout.startswith("stopping after this step") and done.stdout.count("\n") == 1
    assert done.stderr.startswith("error: interrupted at once") and done.stderr.count("\n") == 1


def test_a_handler_of_ctrl_c_is_given_back():
    before = signal.getsignal(signal.SIGINT)
    try:
        for handler in (signal.default_int_handler, signal.SIG_IGN):
            signal.signal(signal.SIGINT, handler)
            with signals.exit_on_signal(pytest.fail):
                is_replaced = signal.getsignal(signal.SIGINT) is not handler
                assert is_replaced == (handler is signal.default_int_handler)
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("name", ["SIGHUP", "SIGUSR2"])
def test_a_warning_while_no_step_is_under_way_is_one_line(name):
    done = run(DEAF.format(name=name))
    assert done.returncode == 128 + signal.Signals[name], done.stderr
    assert done.stderr.count("\n") == 1 and f"stopped by {name} at once" in done.stderr


def test_sigterm_after_the_last_save_says_what_is_saved():
    done = run(AFTER_THE_LAST_SAVE.format(name="SIGTERM"))
    assert done.returncode == 0, done.stderr
    line = "stopped by SIGTERM; step 400 is saved; repeat the command to finish what is left\n"
    assert done.stderr == line


def test_ctrl_c_between_steps_says_what_is_saved():
    with pytest.raises(KeyboardInterrupt, match="interrupted at once, without a checkpoint"):
        with signals.exit_on_signal(signals.end_process):
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt, match="interrupted; step 400 is saved"):
        with signals.exit_on_signal(signals.end_process) as notice:
            notice.on_saved(400)
            raise KeyboardInterrupt


def test_sigterm_in_a_step_waits_for_its_end():
    done = run(IN_A_STEP)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("stopping after this step") and not done.stderr


@pytest.mark.parametrize("name", ["SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_a_warning_in_a_step_waits_for_its_end_however_often_it_comes(name):
    number, said = signal.Signals[name], []
    before = signal.signal(number, signal.SIG_DFL)  # whoever runs the tests may have used nohup
    try:
        with signals.exit_on_signal(lambda *ended: said.append(ended)):
            with signals.stop_after_step(said.append) as stop:
                for _ in range(3):
                    signal.raise_signal(number)
                assert signals.STOPS[stop.wanted] == number
        assert [line[:24] for line in said] == ["stopping after this step"]
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_what_nohup_ignores_is_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.exit_on_signal(pytest.fail), signals.stop_after_step(pytest.fail) as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.wanted == signals.GO_ON
    finally:
        signal.signal(signal.SIGHUP, before)
