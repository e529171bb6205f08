"""Recipes as a person runs them: each in a process of its own, which `cli_server` starts."""

import atexit
import contextlib
import functools
import json
import os
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from rmt_tpu.runs.metrics import read_metrics, series
from tests import programs
from tests.cli_server import Command

ROOT = Path(__file__).parents[1]

# What the runs of one session share.
_SCRATCH = Path(tempfile.mkdtemp(prefix="rmt-cli-"))
atexit.register(shutil.rmtree, _SCRATCH, ignore_errors=True)

# Seconds for whatever ends by itself: many times what it takes on a machine that is busy.
TIMEOUT = 600

STEPS = 48
TEXT = _SCRATCH / "text.txt"
TEXT.write_text("the quick brown fox jumps over the lazy dog.\n" * 200, encoding="utf-8")

# Small enough for seconds, and the same everywhere, so that it is compiled once.
TINY = (
    "--set=model.num_layers=2",
    "--set=model.feed_forward.hidden_dim=32",
    "--set=model.attention.num_heads=2",
    "--set=model.attention.head_dim=8",
    "--set=model.attention.positions=learned",
    "--set=model.attention.positions.max_length=64",
    "--set=train.sample_tokens=8",
    "--seq_len=16",
    "--batch_size=4",
    f"--steps={STEPS}",
    f"--data={TEXT}",
)


def tiny(*flags: str) -> list[str]:
    """TINY and more flags, which take the place of those of TINY that set the same."""
    names = {flag.rpartition("=")[0] for flag in flags}
    return [*(flag for flag in TINY if flag.rpartition("=")[0] not in names), *flags]


OFTEN = ("--checkpoint_every=6", "--eval_every=24")
SELDOM = ("--checkpoint_every=20", "--eval_every=20")

# The numbers of a run that must not depend on how often it was interrupted.
CURVES = ("train/loss", "train/z_loss", "optim/grad_norm", "optim/learning_rate", "eval/loss")

# Where the server is, for processes of the tests that another one has started.
_SERVER = "RMT_TPU_TESTS_SERVER"

# Read when python starts or jax is imported: with others of these, a process begins from nothing.
_READ_EARLY = ("JAX_", "PYTHON")

# The environment of a process that `keep_whole` does not reach, such as one that a recipe starts.
# Another process could otherwise read a compiled program that is only half written.
KEEP_NONE = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9"}

# CPU seconds of the commands that have ended, which are no children of the tests' own process.
cpu_seconds = 0.0


def environment(*, devices: int = 1) -> dict[str, str]:
    """Of a recipe's process: warnings are errors, and programs are compiled once."""
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f]
    flags.append(f"--xla_force_host_platform_device_count={devices}")
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(flags),
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(_programs()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONWARNINGS": "error",
    }


def _programs() -> Path:
    """Where they are kept: for later sessions too, if these may keep any."""
    kept = os.environ.get("JAX_ENABLE_COMPILATION_CACHE", "1") != "0"
    return programs.FOLDER if kept else _SCRATCH / "programs"


class Process:
    """A command that runs, and may be sent signals; much like `subprocess.Popen`.

    Attributes:
      args: recipe and flags.
      pid: the process's number.
      returncode: as of `subprocess`; None while it runs.
    """

    def __init__(self, command: Command, stderr: int | None = None):
        """
        Args:
          stderr: a file that standard error goes to, instead of to what `errors` returns.
        """
        self.args = [command.recipe, *command.flags]
        self.returncode: int | None = None
        self._outputs = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]
        self._own, theirs = socket.socketpair()
        self._told = self._own.makefile("r", encoding="utf-8")
        with theirs, open(os.devnull, "rb") as nothing:
            files = [
                theirs,
                nothing,
                self._outputs[0],
                self._outputs[1] if stderr is None else stderr,
            ]
            numbers = [file if isinstance(file, int) else file.fileno() for file in files]
            control, self._of_server = _server()
            socket.send_fds(control, [b"+"], numbers)
        self._own.sendall(json.dumps(command).encode() + b"\n")
        self.pid = int(self._line())

    def _line(self) -> str:
        if line := self._told.readline():
            return line
        raise RuntimeError(f"the server ended: {(self._of_server / 'server.txt').read_text()}")

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float = TIMEOUT) -> int:
        global cpu_seconds
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._own, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(self.args, timeout, *self._read())
            status, seconds = self._line().split()
            self.returncode = os.waitstatus_to_exitcode(int(status))
            cpu_seconds += float(seconds)
            self._told_in_all = self._read()
            for file in (*self._outputs, self._told, self._own):
                file.close()
        return self.returncode

    def communicate(self, timeout: float = TIMEOUT) -> tuple[str, str]:
        """What was told in all, when it has ended."""
        self.wait(timeout)
        return self._told_in_all

    def output(self) -> str:
        """What it has told on standard output so far."""
        return (self._read() if self.poll() is None else self._told_in_all)[0]

    def errors(self) -> str:
        """What it has told on standard error so far."""
        return (self._read() if self.poll() is None else self._told_in_all)[1]

    def _read(self) -> tuple[str, str]:
        # Not by a position, which would be the process's too.
        contents = [os.pread(file.fileno(), 2**24, 0) for file in self._outputs]
        return contents[0].decode(), contents[1].decode()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_server() -> None:
    """One for this process and those that it starts from now on; it imports with the first command.

    It ends with this process.
    """
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as control,
        open(_SCRATCH / "server.txt", "wb") as log,
    ):
        control.bind(str(_SCRATCH / "control"))
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.cli_server", str(control.fileno())],
            cwd=ROOT,
            # NumPy's library would begin threads.
            env=environment() | {"OPENBLAS_NUM_THREADS": "1"},
            pass_fds=[control.fileno()],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,  # a Ctrl-C is for the tests, which end it
        )
    atexit.register(lambda: (server.stdin.close(), server.wait()))
    os.environ[_SERVER] = str(_SCRATCH)


@functools.cache
def _server() -> tuple[socket.socket, Path]:
    """The socket by which the server takes commands, and the folder with what it says."""
    if _SERVER not in os.environ:
        start_server()
    folder = Path(os.environ[_SERVER])
    control = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    control.connect(str(folder / "control"))
    atexit.register(control.close)
    return control, folder


def start(
    recipe: str,
    *flags: str,
    first: str = "",
    devices: int = 1,
    env: dict[str, str] | None = None,
    stderr: int | None = None,
    leads: bool = False,
) -> Process:
    """A recipe that a test interrupts, or does not wait for.

    Args:
      first: Python that its process runs before it.
      devices: how many there are.
      env: is set beside what `environment` sets.
      stderr: a file for its standard error.
      leads: whether it is the first of a process group of its own.
    """
    return Process(_command(recipe, flags, env, devices, first, leads), stderr)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(count: int, *flags: str, devices: int = 8, first: tuple[str, ...] = ()):
    """Trains with `count` processes, of so many devices in all: return codes, outputs, errors."""
    coordinator = f"127.0.0.1:{free_port()}"
    processes = [
        start(
            "train",
            *flags,
            f"--coordinator={coordinator}",
            f"--num_processes={count}",
            f"--process_id={number}",
            f"--distributed_timeout={TIMEOUT // 2}",
            first=dict(enumerate(first)).get(number, ""),
            devices=devices // count,
        )
        for number in range(count)
    ]
    try:
        ends = [process.communicate() for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, *end) for p, end in zip(processes, ends, strict=True)]


def run(
    recipe: str,
    *flags: str,
    env: dict[str, str] | None = None,
    devices: int = 1,
    anew: bool = False,
) -> subprocess.CompletedProcess[str]:
    """The outcome of a recipe.

    Args:
      env: is set beside what `environment` sets.
      devices: how many there are.
      anew: by an interpreter that begins with nothing, as at a person's command line; so is a
        process whose `env` has what is read when jax is imported.
    """
    if anew or any(name.startswith(_READ_EARLY) for name in env or {}):
        return run_line(f"{sys.executable} -m recipes.{recipe} {shlex.join(flags)}", env, devices)
    process = Process(_command(recipe, flags, env, devices))
    try:
        outputs = process.communicate()
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, *outputs)


def run_line(
    line: str, env: dict[str, str] | None = None, devices: int = 1
) -> subprocess.CompletedProcess[str]:
    """The outcome of a line that a person gives to a shell."""
    return subprocess.run(
        line,
        shell=True,
        cwd=ROOT,
        env=environment(devices=devices) | KEEP_NONE | (env or {}),
        capture_output=True,
        encoding="utf-8",
        timeout=TIMEOUT,
    )


def _command(recipe, flags, env, devices, first="", leads=False) -> Command:
    return Command(recipe, list(flags), environment(devices=devices) | (env or {}), first, leads)


def succeed(recipe: str, *flags: str, **options) -> subprocess.CompletedProcess[str]:
    """A run that must end well."""
    done = run(recipe, *flags, **options)
    assert done.returncode == 0, done.stderr
    return done


def train(workdir: Path, *flags: str, preset: str = "rmt-tiny", **options) -> Path:
    """Trains the tiny model; returns its run folder."""
    succeed("train", f"--preset={preset}", *TINY, *flags, f"--workdir={workdir}", **options)
    return workdir


def fail(recipe: str, *flags: str, code: int = 2, **options) -> str:
    """The line that a run which must fail ends with; there is nothing else but progress."""
    done = run(recipe, *flags, **options)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr, done.stderr
    lines = done.stderr.splitlines()
    errors = [line for line in lines if line.startswith("error:")]
    assert len(errors) == 1 and errors[0] == lines[-1], done.stderr
    return errors[0]


def curves(workdir: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Steps and values of each of CURVES."""
    rows = read_metrics(workdir)
    return {name: series(rows, name) for name in CURVES}


def damage(workdir: Path, step: int) -> None:
    """Flips a bit of the unembedding in a checkpoint."""
    (chunk,) = workdir.glob(f"checkpoints/{step}/*/arrays/params/unembedding/kernel/c/0/0")
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 1
    chunk.write_bytes(content)
