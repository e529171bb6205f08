"""recipes.several: how runs in processes of their own are stopped, and what their end says."""

import os
import signal
import subprocess
from collections.abc import Callable

import pytest

from recipes import several
from rmt_tpu.config.presets import run as preset_run
from rmt_tpu.errors import RunError
from rmt_tpu.storage import open_folder


class Child:
    """A stand-in for a process, which ends by itself, or some polls after it was told to stop.

    Attributes:
      told: the signals sent to it.
      polls: how often its end was asked for.
    """

    def __init__(self, code: int | None = None, act: Callable[[int], None] = lambda poll: None):
        self.code, self.act, self.told, self.polls = code, act, [], 0

    def send_signal(self, number: int) -> None:
        self.told.append(number)

    def wait(self, timeout: float) -> int:
        self.polls += 1
        self.act(self.polls)
        if self.code is not None:
            return self.code
        if self.polls < 8:
            raise subprocess.TimeoutExpired("child", timeout)
        return 0 if len(self.told) == 1 else -signal.SIGTERM


@pytest.fixture
def train(monkeypatch, tmp_path):
    """Train as many runs as there are children, all at the same time.

    A shell's background ignores Ctrl-C, which some of these tests send.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def run(*children: Child, settled: Callable[[several.Trial], bool] = bool) -> int | None:
        monkeypatch.delattr(os, "sched_getaffinity", raising=False)
        waiting = list(children)
        monkeypatch.setattr(subprocess, "Popen", lambda *args, **options: waiting.pop(0))
        config, folder = preset_run("rmt-tiny"), open_folder(tmp_path)
        trials = [several.Trial(f"arm/seed-{n}", folder, config) for n in range(len(children))]
        return several.train_in_processes(trials, len(children), settled)

    yield run
    signal.signal(signal.SIGINT, before)


def send(*numbers: int) -> Callable[[int], None]:
    """Return a function that sends this process a signal at each of the first polls."""
    return lambda poll: os.kill(os.getpid(), numbers[poll - 1]) if poll <= len(numbers) else None


@pytest.mark.parametrize(
    "code, exit_code, line",
    [(3, 3, "failed with exit code 3"), (-signal.SIGKILL, 137, "was killed by SIGKILL")],
)
def test_after_a_failure_the_others_are_saved(train, capsys, code, exit_code, line):
    other = Child()
    assert train(Child(code), other) == exit_code
    assert other.told == [signal.SIGTERM] and other.polls == 8
    said = capsys.readouterr()
    assert said.err.splitlines()[2:] == [f"error: run arm/seed-0 {line}"]
    assert said.out.startswith("stopped; to resume:")


@pytest.mark.parametrize(
    "numbers, told, exit_code",
    [
        ((signal.SIGTERM,), 1, 0),
        ((signal.SIGUSR1, signal.SIGTERM), 1, 0),
        ((signal.SIGINT,), 1, 130),
        ((signal.SIGINT, signal.SIGINT), 2, 130),
    ],
)
def test_a_signal_saves_all_and_a_second_ctrl_c_kills(train, numbers, told, exit_code):
    children = Child(act=send(*numbers)), Child()
    assert train(*children) == exit_code
    assert [child.told for child in children] == [[signal.SIGTERM] * told] * 2


def unreadable(trial: several.Trial) -> bool:
    raise RunError("no answer")


@pytest.mark.parametrize(
    "settled, line",
    [
        (lambda trial: False, "was stopped by a signal before its last step"),
        (unreadable, "cannot be read: no answer"),
    ],
)
def test_a_run_that_somebody_else_stopped_is_not_done(train, capsys, settled, line):
    """The process of a stopped run ends with 0, because it has saved a checkpoint."""
    other = Child()
    assert train(Child(0), other, settled=settled) == 1
    assert other.told == [signal.SIGTERM]
    said = capsys.readouterr()
    assert said.err.splitlines()[2:] == [f"error: run arm/seed-0 {line}"]
    assert said.out.startswith("stopped; to resume:")


def test_nothing_is_told_to_runs_that_end_well(train):
    children = Child(0), Child(0)
    assert train(*children) is None
    assert [child.told for child in children] == [[], []]
