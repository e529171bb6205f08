"""recipes.prepare_data on two hosts, from a bucket into a bucket: the store that one makes."""

import json
import random
import signal
import socket
import time

import pytest

from tests import cli

pytestmark = pytest.mark.xdist_group("recipes")


@pytest.fixture(scope="module")
def server(object_server):
    """With about 3 MB of text in a bucket, in four parts."""
    draw, words = random.Random(0), ["stone ", "river ", "über ", "and ", "lines\n"]
    for number in range(3):
        texts = ("".join(draw.choices(words, k=3000)) + f"{number} {n}" for n in range(60))
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        object_server.replace("bucket", f"in/{number}.jsonl", lines.encode())
    return object_server


def start(output: str, *flags: str, first: str = "") -> cli.Process:
    return cli.start(
        "prepare_data",
        "--input=gs://bucket/in/*.jsonl",
        f"--output=gs://bucket/{output}",
        "--eval_fraction=0.05",
        "--workers=1",
        *flags,
        first=first,
    )


def start_two(output: str, *first: str) -> list[cli.Process]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = f"--coordinator=127.0.0.1:{port}", "--num_processes=2"
    return [
        start(
            output,
            *where,
            f"--process_id={number}",
            f"--distributed_timeout={cli.TIMEOUT // 2}",
            first=dict(enumerate(first)).get(number, ""),
        )
        for number in range(2)
    ]


def ends(processes: list[cli.Process]) -> list[tuple[int, str, str]]:
    try:
        told = [process.communicate() for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, *each) for p, each in zip(processes, told, strict=True)]


def content(server, store: str) -> dict[str, bytes]:
    names = server.names("bucket", f"{store}/")
    return {name.removeprefix(store): server.read("bucket", name) for name in names}


@pytest.fixture(scope="module")
def alone(server):
    """The files of the store that one process makes."""
    _, errors = (process := start("one")).communicate()
    assert process.returncode == 0, errors
    return content(server, "one")


def test_two_hosts_make_byte_for_byte_the_store_of_one(server, alone):
    (first, output, errors), (second, other, other_errors) = ends(start_two("two"))
    assert first == second == 0, errors + other_errors
    assert content(server, "two") == alone
    assert "gs://bucket/two is complete: 4 parts" in output and other == ""
    assert "process 1 of 2 has connected" in other_errors and "MB" not in other_errors


# Before it writes its last part.
DIE = """
import os, signal
from rmt_tpu.data import part_writer
usual, done = part_writer.PartWriter.write_anew, []
def write(self, job, attempt):
    done.append(job)
    if len(done) == 2:
        {how}
    return usual(self, job, attempt)
part_writer.PartWriter.write_anew = write
"""


def test_an_error_on_one_host_is_told_on_both_and_the_same_command_goes_on(server, alone):
    fail = "from rmt_tpu.errors import RunError; raise RunError('the disk is full')"
    (first, _, errors), (second, _, other) = ends(start_two("failed", "", DIE.format(how=fail)))
    assert first == second == 1, errors + other
    assert other.splitlines()[-1] == "error: the disk is full"
    assert errors.splitlines()[-1] == "error: process 1: the disk is full"
    assert "/manifest.json" not in content(server, "failed")
    _, errors = (process := start("failed")).communicate()
    assert process.returncode == 0, errors
    assert content(server, "failed") == alone


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_after_a_kill_of_any_host_the_same_command_ends_with_the_same_store(server, alone, number):
    """The other one is ended by JAX, or here, as by whoever runs both."""
    store = f"killed-{number}"
    kill = DIE.format(how="os.kill(os.getpid(), signal.SIGKILL)")
    processes = start_two(store, *(kill if n == number else "" for n in range(2)))
    processes[number].wait()
    assert processes[number].returncode == -signal.SIGKILL
    time.sleep(0.5)
    processes[1 - number].kill()
    processes[1 - number].wait()
    assert "/manifest.json" not in content(server, store)
    (first, output, errors), (second, _, other) = ends(start_two(store))
    assert first == second == 0, errors + other
    assert "from an earlier start" in output
    assert content(server, store) == alone
