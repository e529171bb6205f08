"""Ctrl-C in a recipe, before it can raise an error, while it works, and when it ends."""

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
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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
    ("how", "said"),
    [("raise KeyboardInterrupt", "error: interrupted\n"), ("return program.INTERRUPTED", "")],
)
def test_after_ctrl_c_the_interpreter_is_left_as_it_is(how, said):
    done = run("-c", LEAVE.format(how=how))
    assert (done.returncode, done.stderr) == (130, said)
    assert done.stdout == "threads end, \nexit handlers run"
