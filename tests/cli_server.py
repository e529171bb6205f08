"""Starts recipes for `tests.cli` without their imports: each is forked off a process that has them.

    python -m tests.cli_server CONTROL

The server begins no thread and touches no device, for these do not outlive a fork. CONTROL is a
datagram socket. With each byte on it come a command's own socket and its standard input, output and
error; the server imports when the first comes, and ends when its standard input does. On its own
socket the command finds a line of JSON, which is a `Command`; the server answers there with the
number of the process and, at its end, with its wait status and CPU seconds.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import sys
from typing import NamedTuple

from tests import lines, programs

# What recipes import, other than flags: those a recipe defines are its own.
PACKAGES = ("rmt_tpu", "pallas_kernels", "sharding")
OPTIONAL = ("rmt_tpu.evaluation.harness",)  # of an extra that tests of the night alone have
MODULES = (
    "concurrent.futures.process",
    "google.cloud.storage",
    "matplotlib.backends.backend_agg",
    "matplotlib.pyplot",
    "multiprocessing.forkserver",
    "optax",
    "orbax.checkpoint",
    "recipes.common",
    "rich.progress",
    "tensorboardX",
    "tensorstore",
    "tokenizers",
)

MISTAKE = 2  # the exit code of a `UsageError`


class Command(NamedTuple):
    """What a process is to be.

    Attributes:
      recipe: the module in `recipes`.
      flags: its command line.
      environment: all of it.
      first: Python that runs before the recipe.
      leads: whether it is the first of a process group.
    """

    recipe: str
    flags: list[str]
    environment: dict[str, str]
    first: str
    leads: bool


@functools.cache
def import_all() -> None:
    for package in PACKAGES:
        path = importlib.import_module(package).__path__
        for module in pkgutil.walk_packages(path, f"{package}."):
            if module.name not in OPTIONAL:
                importlib.import_module(module.name)
    for module in MODULES:
        importlib.import_module(module)
    tasks = "/proc/self/task"
    assert not os.path.isdir(tasks) or len(os.listdir(tasks)) == 1, "an import began a thread"
    programs.keep_whole()
    gc.freeze()  # or the first collection in each process would copy everything


def serve(control: socket.socket) -> socket.socket:
    """Forks for each command; returns in the process of a command, with its socket."""
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        for file in (control, woken, sys.stdin):
            selector.register(file, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if woken in ready:
                woken.recv(4096)
                _tell_ends(running)
            if sys.stdin in ready:  # the tests have ended
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
                sys.exit()
            if control not in ready:
                continue
            _, (own, *standard), _, _ = socket.recv_fds(control, 1, 4)
            import_all()
            pid = os.fork()
            if pid == 0:
                break
            running[pid] = socket.socket(fileno=own)
            running[pid].sendall(f"{pid}\n".encode())
            for file in standard:
                os.close(file)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for other in (control, woken, wake, *running.values()):
        other.close()
    for number, file in enumerate(standard):
        os.dup2(file, number)
        os.close(file)
    return socket.socket(fileno=own)


def _tell_ends(running: dict[int, socket.socket]) -> None:
    while running:
        pid, status, used = os.wait4(-1, os.WNOHANG)
        if pid == 0:
            return
        with running.pop(pid) as own:
            own.sendall(f"{status} {used.ru_utime + used.ru_stime}\n".encode())


def become(own: socket.socket) -> Command:
    """Makes this process what the command is to find, but for its module."""
    with own, own.makefile("r", encoding="utf-8") as lines:
        command = Command(*json.loads(lines.readline()))
    if command.leads:
        os.setsid()
    # Where the tests run in a shell's background, they were started without it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(command.environment)
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())
    sys.argv[1:] = command.flags
    return command


def run(recipe: str) -> None:
    """Runs it, and ends as it would without a server: by the interpreter, with all its cleaning up.

    But after a user's mistake the process ends when its threads and exit functions have: nothing
    has begun, and to free all that was imported takes ten times as long as the rest.
    """
    mistaken = []
    atexit.register(lambda: mistaken and _end(*mistaken))  # the first, and so the last to run
    lines.record_for_its_test()
    try:
        runpy.run_module(f"recipes.{recipe}", run_name="__main__", alter_sys=True)
    except SystemExit as error:
        if error.code == MISTAKE:
            mistaken.append(error.code)
        raise


def _end(code: int) -> None:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        return  # the interpreter finds it too, and says so
    os._exit(code)


if __name__ == "__main__":
    _command = become(serve(socket.socket(fileno=int(sys.argv[1]))))
    exec(_command.first)
    run(_command.recipe)
