"""Two processes in one folder: a refusal or a note, and none where the other one has ended."""

import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time

import pytest

from rmt_tpu.errors import UsageError
from rmt_tpu.runs import presence
from rmt_tpu.storage import open_folder
from rmt_tpu.storage.local import LocalFolder

HERE = socket.gethostname()


def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize(
    "host, pid, seen_ago, noted",
    [
        ("elsewhere", 7, 10, True),
        ("elsewhere", 7, 10_000, False),
        ("elsewhere", 7, -10_000, False),  # whose clock is wrong
        ("elsewhere", 7, math.nan, False),
        (HERE, os.getpid(), 10, False),  # an earlier run of this very process
    ],
    ids=["elsewhere", "elsewhere, long ago", "in the future", "at no time", "itself"],
)
def test_another_process_is_noted(tmp_path, host, pid, seen_ago, noted):
    word = {"host": host, "pid": pid, "seen": time.time() - seen_ago}
    (tmp_path / presence.FILE).write_text(json.dumps(word))
    told = []
    with presence.announce_run(open_folder(tmp_path), told.append):
        assert json.loads((tmp_path / presence.FILE).read_text())["pid"] == os.getpid()
    assert len(told) == noted
    assert not noted or f"process {pid} on {host} (seen 10 s ago)" in told[0]
    # The announcement of a process that may be alive outlives this one.
    assert (tmp_path / presence.FILE).exists() == noted
    assert not noted or json.loads((tmp_path / presence.FILE).read_text()) == word


def test_one_that_comes_later_keeps_its_announcement(tmp_path, monkeypatch):
    """A process that ends restores the announcement that it replaced while it was running."""
    monkeypatch.setattr(presence, "BEAT_SECONDS", 0.01)
    path, later = tmp_path / presence.FILE, {"host": "elsewhere", "pid": 7, "seen": time.time()}
    with presence.announce_run(open_folder(tmp_path), pytest.fail):
        path.write_text(json.dumps(later))
        until = time.monotonic() + 60
        while json.loads(path.read_text())["pid"] == 7 and time.monotonic() < until:
            time.sleep(0.01)
    assert json.loads(path.read_text()) == later


def test_one_that_lives_here_keeps_its_folder(tmp_path):
    word = json.dumps({"host": HERE, "pid": os.getppid(), "seen": time.time()})
    (tmp_path / presence.FILE).write_text(word)
    with (
        pytest.raises(UsageError, match=f"--workdir={tmp_path} is .*process {os.getppid()} on "),
        presence.announce_run(open_folder(tmp_path), pytest.fail),
    ):
        pass
    assert (tmp_path / presence.FILE).read_text() == word


needs_proc = pytest.mark.skipif(
    presence.start_ticks(os.getpid()) is None, reason="the host has no /proc"
)


@needs_proc
def test_one_that_was_killed_is_not_confused_with_another_of_its_number(tmp_path):
    """A container that is started again reuses process ids, so the start time decides."""
    pid = os.getppid()
    word = {"host": HERE, "pid": pid, "seen": time.time(), "started": presence.start_ticks(pid)}
    (tmp_path / presence.FILE).write_text(json.dumps(word))
    with (
        pytest.raises(UsageError, match=f"process {pid} on "),
        presence.announce_run(open_folder(tmp_path), pytest.fail),
    ):
        pass
    # It may have been suspended for an hour.
    (tmp_path / presence.FILE).write_text(json.dumps(word | {"seen": time.time() - 3600}))
    with (
        pytest.raises(UsageError, match=f"process {pid} on "),
        presence.announce_run(open_folder(tmp_path), pytest.fail),
    ):
        pass
    (tmp_path / presence.FILE).write_text(json.dumps(word | {"started": word["started"] - 1}))
    with presence.announce_run(open_folder(tmp_path), pytest.fail):
        pass


def test_a_link_to_a_file_has_its_announcement(tmp_path):
    word = {"host": HERE, "pid": os.getppid(), "seen": time.time()}
    (tmp_path / f"a.jsonl.{presence.FILE}").write_text(json.dumps(word))
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")
    with (
        pytest.raises(UsageError, match=r"link.jsonl is in use by process"),
        presence.announce_writer(str(tmp_path / "link.jsonl"), pytest.fail),
    ):
        pass


@needs_proc
def test_a_start_is_read_whatever_the_name_of_the_program(tmp_path):
    ticks = []
    for name in ("plain", "a ) 1 2 (b"):
        program = tmp_path / name
        program.symlink_to(shutil.which("sleep"))
        process = subprocess.Popen([program, "600"])
        try:
            ticks.append(presence.start_ticks(process.pid))
        finally:
            process.kill()
            process.wait()
    own = presence.start_ticks(os.getpid())
    assert own < ticks[0] <= ticks[1] < own + 10**6  # within hours


def test_of_two_that_begin_at_a_time_one_is_refused(tmp_path, monkeypatch):
    folder, create = open_folder(tmp_path), LocalFolder.create
    word = {"host": HERE, "pid": os.getppid(), "seen": time.time()}

    def later(self, name, data):
        (tmp_path / name).write_text(json.dumps(word))  # of one that looked when this one did
        return create(self, name, data)

    monkeypatch.setattr(LocalFolder, "create", later)
    with (
        pytest.raises(UsageError, match="is in use by"),
        presence.announce_run(folder, pytest.fail),
    ):
        pass


def test_one_that_was_killed_is_not(tmp_path):
    word = {"host": HERE, "pid": ended_pid(), "seen": time.time()}
    (tmp_path / presence.FILE).write_text(json.dumps(word))
    with presence.announce_run(open_folder(tmp_path), pytest.fail):
        pass


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"host": "h", "pid": "x", "seen": 1}'])
def test_what_is_not_understood_is_passed_over(tmp_path, content):
    (tmp_path / presence.FILE).write_text(content)
    with presence.announce_run(open_folder(tmp_path), pytest.fail):
        pass


def test_word_is_left_while_it_lasts(tmp_path):
    path = tmp_path / presence.FILE
    with presence.announce_run(open_folder(tmp_path), pytest.fail):
        until = time.monotonic() + 60
        while not path.exists() and time.monotonic() < until:
            time.sleep(0.01)
        said = json.loads(path.read_text())
        assert (said["host"], said["pid"]) == (HERE, os.getpid())
        assert said["started"] == presence.start_ticks(os.getpid())
    assert not path.exists()


def test_a_folder_that_cannot_be_written_is_no_matter(tmp_path):
    (tmp_path / presence.FILE).mkdir()
    with presence.announce_run(open_folder(tmp_path), pytest.fail):
        pass
