"""Ctrl-C and SIGTERM in a recipe: before it can raise an error, while it works, when it ends."""

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes import interrupts

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def handler():
    """Handle signals as a process in the foreground does, because tests may run under nohup."""
    defaults = {signal.SIGINT: signal.default_int_handler}
    defaults |= dict.fromkeys((signal.SIGTERM, signal.SIGHUP), signal.SIG_DFL)
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        encoding="utf-8",
        timeout=600,
    )


def test_ctrl_c_while_a_recipe_imports_is_one_line(tmp_path):
    """A library that the recipe imports presses it."""
    code = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nfor _ in range(9): pass\n"
    (tmp_path / "absl.py").write_text(code)
    done = run("-B", "-m", "recipes.train", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


def test_other_programs_that_import_recipes_are_left_alone(monkeypatch):
    for arguments in ([], ["-c"], ["pytest"], ["/bin/train"]):
        interrupts.while_importing(arguments)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    interrupts.while_importing(["/venv/bin/rmt-train", "--steps=3"])
    assert signal.getsignal(signal.SIGINT) is interrupts.end_at_once
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background of a shell
    interrupts.while_importing(["-m"])
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_recipe_that_has_begun_gets_an_error():
    signal.signal(signal.SIGINT, interrupts.end_at_once)
    with pytest.raises(KeyboardInterrupt), interrupts.raised():
        signal.raise_signal(signal.SIGINT)


def test_what_python_ignores_is_sent_again(monkeypatch):
    ignored = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)

    def press(phase, info):
        gc.callbacks.remove(press)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), interrupts.raised():
        gc.callbacks.append(press)
        gc.collect()
        time.sleep(60)
    assert not ignored


def test_a_signal_that_ends_a_process_is_an_error_with_its_exit_code():
    for number, code in ((signal.SIGTERM, 143), (signal.SIGHUP, 129)):
        with pytest.raises(interrupts.Terminated) as error, interrupts.terminated():
            signal.raise_signal(number)
        assert str(error.value) == f"stopped by {number.name}"
        assert interrupts.exit_code(error.value) == code
        assert signal.getsignal(number) is signal.SIG_DFL
    assert interrupts.exit_code(KeyboardInterrupt()) == 130


@pytest.mark.parametrize("first, code", [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_terminal_that_closes_does_not_cut_off_the_end(first, code):
    cleaned = []
    with pytest.raises(interrupts.Terminated) as error, interrupts.terminated():
        try:
            signal.raise_signal(first)
        finally:
            signal.raise_signal(signal.SIGHUP)
            cleaned.append(signal.getsignal(signal.SIGTERM))
    assert cleaned == [signal.SIG_DFL] and interrupts.exit_code(error.value) == code


def test_a_signal_that_a_process_ignores_stays_ignored():
    """The process is under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interrupts.terminated():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_termination_that_python_ignores_is_sent_again():
    def terminate(phase, info):
        gc.callbacks.remove(terminate)
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(interrupts.Terminated), interrupts.raised(), interrupts.terminated():
        gc.callbacks.append(terminate)
        gc.collect()
        time.sleep(60)


def test_other_errors_that_python_ignores_are_reported(monkeypatch):
    ignored = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: ignored.append(found.exc_type))

    def fail(phase, info):
        gc.callbacks.remove(fail)
        raise ValueError

    with interrupts.raised():
        gc.callbacks.append(fail)
        gc.collect()
    assert ignored == [ValueError]


LEAVE = """
import atexit, os, threading, time
from recipes import program

class Threads:  # of a compiler, which crash when the interpreter ends
    def __del__(self):
        os.abort()

kept = Threads()
threads = kept

def main():
    atexit.register(print, "exit handlers run", end="")
    threading.Thread(target=lambda: (time.sleep(0.2), print("threads end, "))).start()
    {how}

program.start_unparsed(main)
"""


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("raise KeyboardInterrupt", 130, "error: interrupted\n"),
        ("return program.INTERRUPTED", 130, ""),
        ("raise program.interrupts.Terminated(15)", 143, "error: stopped by SIGTERM\n"),
    ],
)
def test_after_an_interrupt_the_interpreter_is_left_as_it_is(how, code, said):
    done = run("-c", LEAVE.format(how=how))
    assert (done.returncode, done.stderr) == (code, said)
    assert done.stdout == "threads end, \nexit handlers run"
