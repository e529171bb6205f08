"""Compilation of programs for devices that need not be present.

Each target has its own process, because libtpu reads its options only when it loads. The process
compiles jobs one by one. A job names a function as `"package.module:function"`. The process calls
`function(device, **arguments)` with the first device of the target's topology. The function returns
a `jax.stages.Lowered`. It may also return a dict of JSON values, as the second item of a tuple; the
dict becomes a part of the job's outcome.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# The schedule of these kernels contains a branch with a mask and a branch without one. A step of
# the kernel executes only one of them, so only the longer branch counts.
from pallas_kernels.causal_attention.block_sizes import KERNELS as MASKED_KERNELS
from rmt_tpu.estimator.hlo import Module
from rmt_tpu.estimator.memory import Assignment, read_assignment
from rmt_tpu.estimator.schedule import Schedule, parse_schedule
from rmt_tpu.estimator.topology import Target, compiler_environment


class CompilerError(RuntimeError):
    """Raised if the compiler is missing or stops without a result; the message is one line."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A function to compile, given as "package.module:function", with its keyword arguments.

    The function is called with one device, or with a list of all devices if `whole_topology` is
    set.
    """

    function: str
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    whole_topology: bool = False


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled job.

    Attributes:
      target: the target that it was compiled for.
      module: the compiled instructions.
      schedules: maps the names of kernels and fusions to the schedules that libtpu dumped.
        Identical kernels share one schedule.
      memory: maps each field of `jax.stages.Compiled.memory_analysis()` to its value in bytes.
      seconds: the duration of the compilation in seconds.
      warnings: warnings issued during compilation, for example that a call has no kernel.
      assignment: the buffer assignment if it was requested, or None.
      info: what the job's function returned in addition to the program.
      ptx: the PTX code of the kernels, for a GPU.
    """

    target: Target
    module: Module
    schedules: dict[str, Schedule]
    memory: dict[str, int]
    seconds: float
    warnings: list[str]
    assignment: Assignment | None = None
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    ptx: str = ""


@dataclasses.dataclass(frozen=True)
class Failure:
    """A job that could not be lowered or compiled, and the reason in one line.

    `error` is the name of the exception. If the program needs too much memory and buffer
    assignments were requested, `assignment` is the program's buffer assignment.
    """

    message: str
    error: str = ""
    assignment: Assignment | None = None
    info: dict[str, Any] = dataclasses.field(default_factory=dict)


def compile_jobs(
    target: Target,
    jobs: Sequence[Job],
    progress: Callable[[str], None] | None = None,
    *,
    buffers: bool = False,
) -> Generator[Program | Failure, None, None]:
    """Compile jobs one by one, and yield the outcome of each job in order.

    Args:
      target: the device to compile for.
      jobs: the jobs to compile.
      progress: a function that is called with a line of text when a job has been compiled.
      buffers: whether to read the buffer assignment of each program.

    Raises:
      CompilerError: the compiler is missing, or its process exited early.
    """
    with contextlib.closing(Worker(target, buffers=buffers)) as worker:
        for i, job in enumerate(jobs):
            outcome = worker.compile(job)
            if progress is not None:
                progress(_progress_line(target, job, i, len(jobs), outcome))
            yield outcome


class Worker:
    """A compiler process that runs jobs for one target, one at a time; call `close` when done.

    Args:
      target: the device to compile for.
      buffers: whether to read the buffer assignment of each program.
      schedules: whether to read the schedules of TPU instructions, which takes longer than the
        compilation itself.

    Raises:
      CompilerError: the compiler is missing.
    """

    def __init__(self, target: Target, *, buffers: bool = False, schedules: bool = True):
        _check_installed(target)
        self._target, self._buffers, self._schedules = target, buffers, schedules
        self._process: subprocess.Popen | None = None

    def compile(self, job: Job, limit: float | None = None) -> Program | Failure:
        """Compile a job and return its outcome.

        Args:
          job: the job to compile.
          limit: a time limit in seconds. After this time, the process and its children are killed,
            and the outcome is a Failure with the error "TimeLimit". The next job starts a new
            process.

        Raises:
          CompilerError: the process exited early; the next job starts a new process.
        """
        if self._process is None:
            self._start()
        number, self._number = self._number, self._number + 1
        try:
            self._process.stdin.write(json.dumps(dataclasses.asdict(job)) + "\n")
            self._process.stdin.flush()
        # If the process has exited, the loop below raises an error with the process's own message.
        except BrokenPipeError:
            pass
        until = None if limit is None else time.monotonic() + limit
        # The process prints one line per job; other lines come from libraries and are ignored.
        while True:
            try:
                line = self._lines.get(timeout=until and max(0.0, until - time.monotonic()))
            except queue.Empty:
                self.close()
                return Failure(f"no result within {limit:g} s", "TimeLimit")
            if line is None:
                self._lines.put(None)  # `close` reads the queue until it finds None.
                code = self._process.wait()
                words = _last_words(self._folder / "stderr.txt", code, self._target)
                self.close()
                raise CompilerError(words)
            if line.strip() == f"ended {number}":
                results = self._folder / str(number)
                outcome = read_outcome(self._target, results)
                shutil.rmtree(results)
                return outcome

    def _start(self) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="tpu-compile-")
        self._folder, self._number = Path(self._scratch.name), 0
        options = compiler_environment(
            self._target,
            str(self._folder / "dump"),
            buffers=self._buffers,
            schedules=self._schedules,
        )
        environment = os.environ | options
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        request = json.dumps({"topology": self._target.options})
        (self._folder / "request.json").write_text(request, encoding="utf-8")
        with (self._folder / "stderr.txt").open("w") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rmt_tpu.estimator.worker", str(self._folder)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                encoding="utf-8",
                errors="replace",
                # Start the process in its own process group, so that it can be killed together with
                # its children.
                start_new_session=True,
            )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        reading = (self._process.stdout, self._lines)
        threading.Thread(target=_read_lines, args=reading, daemon=True).start()

    def close(self) -> None:
        """Kill the process and all of its children."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        # The reader thread puts None into the queue after it has closed the stream.
        while self._lines.get() is not None:
            pass
        self._process = None
        self._scratch.cleanup()


def _read_lines(stream, lines) -> None:
    """Put every line of a stream into a queue, followed by None at the end of the stream."""
    try:
        with stream:
            for line in stream:
                lines.put(line)
    finally:
        lines.put(None)


def lower(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    device: jax.Device,
    *,
    donate: tuple[int, ...] = (),
) -> jax.stages.Lowered:
    """Lower a function to the compiler's input, for a device that need not be present.

    The compiler chooses the layouts of arguments and results, as it would within a larger program.
    With fixed layouts, it might have to add copies at the start and end of the program.

    Args:
      function: a function of trees of arrays.
      arguments: the arguments, as trees of objects with a shape and a dtype.
      device: a device of a topology description.
      donate: the indices of the arguments whose memory the results may reuse.
    """
    from jax.experimental.layout import Format, Layout

    here = NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec())
    anyhow = Format(Layout.AUTO, here)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tuple(arguments))
    jitted = jax.jit(function, in_shardings=anyhow, out_shardings=anyhow, donate_argnums=donate)
    # Set the mesh, because kernels look up their block sizes by the device kind of the mesh.
    with jax.sharding.use_abstract_mesh(here.mesh.abstract_mesh):
        return jitted.lower(*shapes)


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of jax and, if installed, libtpu."""
    found = {"jax": jax.__version__}
    try:
        found["libtpu"] = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        pass
    return found


def read_outcome(target: Target, folder: Path) -> Program | Failure:
    """Read the outcome of a job from the files that a worker wrote to `folder`."""
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assignment = read_assignment(folder)
    if "error" in result:
        return Failure(result["error"], result["error_type"], assignment, result["info"])
    module = Module((folder / "hlo.txt").read_text(encoding="utf-8"))
    schedules = _schedules(target, folder, module)
    return Program(
        target=target,
        module=module,
        schedules=schedules,
        memory=result["memory"],
        seconds=result["seconds"],
        warnings=result["warnings"],
        assignment=assignment,
        info=result["info"],
        ptx="\n".join(path.read_text() for path in sorted(folder.glob("*.ptx"))),
    )


def _check_installed(target: Target) -> None:
    if target.platform == "tpu" and importlib.util.find_spec("libtpu") is None:
        raise CompilerError(
            "libtpu is not installed; pip install 'jax[tpu]' installs the TPU compiler"
        )
    if target.platform != "cuda":
        return
    plugins = ("jax_cuda13_plugin", "jax_cuda12_plugin")
    if not any(importlib.util.find_spec(name) for name in plugins):
        raise CompilerError(
            "jax's CUDA plugin is not installed; pip install --no-deps "
            f"jax-cuda13-plugin=={jax.__version__} jax-cuda13-pjrt=={jax.__version__} installs "
            "the GPU compiler"
        )
    if shutil.which("ptxas") is None:
        raise CompilerError("ptxas is not on the PATH; pip install nvidia-cuda-nvcc installs it")


def _schedules(target: Target, folder: Path, module: Module) -> dict[str, Schedule]:
    """Return a dict from instruction name to the schedule that libtpu dumped for it.

    libtpu dumps only one schedule for several identical instructions, which all of them share.
    """
    parsed, keys = {}, {}
    for ran in module.taking("all").run():
        instruction = ran.instruction
        keys[instruction.name] = module.equality_key(ran.computation, instruction)
        bundles = folder / f"{instruction.name}.bundles.txt"
        if not bundles.exists() or instruction.name in parsed:
            continue
        use = folder / f"{instruction.name}.utilization.txt"
        try:
            parsed[instruction.name] = parse_schedule(
                bundles.read_text(encoding="utf-8", errors="replace"),
                use.read_text(encoding="utf-8"),
                target.matrix,
                longest_branch_only=any(name in instruction.name for name in MASKED_KERNELS),
            )
        # A fusion's dump may be unreadable, but a kernel's dump must be readable.
        except ValueError:
            if module.kernel(instruction) is not None:
                raise
    done = {keys[name]: schedule for name, schedule in parsed.items()}
    return {name: done[key] for name, key in keys.items() if key in done} | parsed


def _progress_line(target: Target, job: Job, i: int, jobs: int, outcome: Program | Failure) -> str:
    what = " ".join(str(value) for value in job.arguments.values() if not isinstance(value, dict))
    end, warned = "failed", ""
    if isinstance(outcome, Program):
        end = f"{outcome.seconds:.0f} s"
        warned = "".join(f"\n  warning: {text}" for text in outcome.warnings)
    return f"{target.name}: {i + 1}/{jobs} {what or job.function}: {end}{warned}"


def _last_words(errors: Path, code: int, target: Target) -> str:
    lines = [line for line in errors.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1].strip() if lines else "no output"
    return f"compiling for {target.name} exited with code {code}: {last}"
