"""What people are told may be lost; the run it is about is not."""

import io
import sys

import pytest

from recipes import program
from rmt_tpu import progress, streams
from rmt_tpu.errors import RunError
from rmt_tpu.training import signals


class Broken(io.StringIO):
    """A terminal, or a file, that fails."""

    def __init__(self, error, terminal=False):
        super().__init__()
        self.error, self.terminal = error, terminal

    def write(self, text):
        raise self.error

    flush = lambda self: self.write("")
    isatty = lambda self: self.terminal


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


LOST = {
    "disk full": lambda: Broken(OSError(28, "No space left on device")),
    "no reader": lambda: Broken(BrokenPipeError()),
    "terminal gone": lambda: Broken(OSError(5, "Input/output error"), terminal=True),
    "encoding": lambda: Broken(UnicodeEncodeError("ascii", "дом", 0, 1, "not there")),
    "closed file": closed,
    "closed before": lambda: None,
}
lost = pytest.mark.parametrize("stream", LOST.values(), ids=LOST)


@lost
def test_a_program_ends_as_what_it_did(stream, monkeypatch):
    monkeypatch.setattr(sys, "stdout", stream())
    monkeypatch.setattr(sys, "stderr", stream())
    streams.install()
    assert program._main(lambda: print("done: дом"), ["train"]) is None
    assert program._main(lambda: 3, ["train"]) == 3

    def main():
        raise RunError("the loss is not finite")

    assert program._main(main, ["train"]) == 1


@lost
def test_a_run_goes_on(stream, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream())
    with progress.ProgressDisplay("training", 2, first_line=True) as shown:
        shown.log("дом")
        shown.show(lambda: "step 1", completed=1)
    streams.log_line("дом")


@lost
def test_a_signal_ends_the_process_by_its_code(stream, monkeypatch):
    monkeypatch.setattr(sys, "stdout", stream())
    monkeypatch.setattr(sys, "stderr", stream())
    codes = []
    monkeypatch.setattr(signals.os, "_exit", codes.append)
    signals.end_process("stopped", 143)
    assert codes == [143]


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_the_last_line_stands_in_the_place_of_a_bar(monkeypatch, term):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress.ProgressDisplay("training", 2):
        streams.log_last_line("stopped")
    before = "" if term == "dumb" else "\r\x1b[2K\x1b[?25h"
    assert f"{before}stopped\n" in terminal.getvalue()
    assert ("\x1b[?25hstopped" in terminal.getvalue()) == (term != "dumb")
    terminal.truncate(0)
    streams.log_last_line("stopped")
    assert terminal.getvalue().strip("\0") == "stopped\n"


def test_a_program_that_only_prints_fails_where_it_cannot(monkeypatch, capsys):
    for error, code in ((OSError(28, "No space left"), 1), (BrokenPipeError(), 141)):
        monkeypatch.setattr(sys, "stdout", streams.SafeStream(Broken(error)))
        streams.need_stdout()
        assert program._main(lambda: print("text"), ["generate"]) == code
    assert capsys.readouterr().err == (
        "error: standard output cannot be written to: No space left\n"
    )


def test_what_an_encoding_lacks_is_written_as_escapes():
    written = io.BytesIO()
    told = streams.SafeStream(io.TextIOWrapper(written, encoding="ascii"))
    print("in дом", file=told, flush=True)
    assert written.getvalue() == rb"in \u0434\u043e\u043c" + b"\n"
