"""Compilation of programs for a device that is not there, and what the compiler makes of them.

libtpu reads its options when it loads, so every target gets a process of its own, which compiles
jobs one by one. A job names its function as `"package.module:function"`. The function is called as
`function(device, **arguments)` with the target's first device. It returns a `jax.stages.Lowered`,
or a tuple of that and a dict of JSON values, which are returned with the outcome.
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

# Kernels that attend with masks or without them.
from pallas_kernels.causal_attention.block_sizes import KERNELS as EITHER
from rmt_tpu.estimator.hlo import Module
from rmt_tpu.estimator.memory import Assignment, read_assignment
from rmt_tpu.estimator.schedule import Schedule, parse_schedule
from rmt_tpu.estimator.topology import Target, compiler_environment


class CompilerError(RuntimeError):
    """The compiler is missing, or ended without a result; the message is one line."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A function to compile, `function(device, **arguments)`, by its importable name.

    With `whole_topology` the function gets a list of all devices.
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
      schedules: the schedules of its kernels and fusions by instruction, as far as libtpu left
        them; equal kernels share one.
      memory: bytes by kind, as in `jax.stages.Compiled.memory_analysis()`.
      seconds: the seconds of compilation.
      warnings: warnings during compilation, for example for a call that has no kernel.
      assignment: the buffer assignment, if it was asked for.
      info: what the job's function returned in addition to the program.
      ptx: the PTX of a GPU's kernels.
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

    `error` is the name of the exception. If a program needs too much memory, `assignment` is there
    if it was asked for.
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
    """Yield the outcome of each job, in their order.

    Args:
      target: the device to compile for.
      jobs: the jobs to compile.
      progress: is called with a line for each job that ends.
      buffers: whether to read the buffer assignment.

    Raises:
      CompilerError: the compiler is missing, or its process ended early.
    """
    with contextlib.closing(Worker(target, buffers=buffers)) as worker:
        for i, job in enumerate(jobs):
            outcome = worker.compile(job)
            if progress is not None:
                progress(_told(target, job, i, len(jobs), outcome))
            yield outcome


class Worker:
    """A process that compiles for one target, one job at a time; call `close` at the end.

    Args:
      target: the device to compile for.
      buffers: whether to read the buffer assignment.
      schedules: whether to get the schedules of TPU instructions, which takes longer than
        compilation.

    Raises:
      CompilerError: the compiler is missing.
    """

    def __init__(self, target: Target, *, buffers: bool = False, schedules: bool = True):
        _check_installed(target)
        self._target, self._buffers, self._schedules = target, buffers, schedules
        self._process: subprocess.Popen | None = None

    def compile(self, job: Job, limit: float | None = None) -> Program | Failure:
        """Compile a job, and return its outcome.

        Args:
          job: the job to compile.
          limit: seconds after which the process and all that it has started are killed; the job is
            then a Failure with the error "TimeLimit", and the next job gets a new process.

        Raises:
          CompilerError: the process ended early; the next job gets a new one.
        """
        if self._process is None:
            self._start()
        number, self._number = self._number, self._number + 1
        try:
            self._process.stdin.write(json.dumps(dataclasses.asdict(job)) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:  # the reason is read below
            pass
        until = None if limit is None else time.monotonic() + limit
        # The process prints a line for each job; other lines, printed by libraries, do not matter.
        while True:
            try:
                line = self._lines.get(timeout=until and max(0.0, until - time.monotonic()))
            except queue.Empty:
                self.close()
                return Failure(f"no result within {limit:g} s", "TimeLimit")
            if line is None:
                self._lines.put(None)  # `close` waits for it
                code = self._process.wait()
                words = _last_words(self._folder / "stderr.txt", code, self._target)
                self.close()
                raise CompilerError(words)
            if line.strip() == f"ended {number}":
                results = self._folder / str(number)
                outcome = _read(self._target, results)
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
                start_new_session=True,  # a process group of its own, which is killed as a whole
            )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        reading = (self._process.stdout, self._lines)
        threading.Thread(target=_read_lines, args=reading, daemon=True).start()

    def close(self) -> None:
        """End the process and all that it has started."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        while self._lines.get() is not None:  # wait until the thread has closed its stream
            pass
        self._process = None
        self._scratch.cleanup()


def _read_lines(stream, lines) -> None:
    """Put every line into the queue, and None at the end."""
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
    """Lower `function` for a device that need not exist, with arguments of these shapes.

    The compiler chooses the layouts of arguments and results, as it does within a larger program.
    Otherwise it would have to copy them at the program's edge.

    Args:
      function: a function of arrays.
      arguments: trees of anything with a shape and a dtype.
      device: a device of a topology.
      donate: which arguments the results may overwrite.
    """
    from jax.experimental.layout import Format, Layout

    here = NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec())
    anyhow = Format(Layout.AUTO, here)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tuple(arguments))
    jitted = jax.jit(function, in_shardings=anyhow, out_shardings=anyhow, donate_argnums=donate)
    # Block sizes are looked up by the device of the mesh that is active.
    with jax.sharding.use_abstract_mesh(here.mesh.abstract_mesh):
        return jitted.lower(*shapes)


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of jax and, where it is installed, libtpu."""
    found = {"jax": jax.__version__}
    try:
        found["libtpu"] = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        pass
    return found


def _read(target: Target, folder: Path) -> Program | Failure:
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
            "libtpu is not installed; pip install 'jax[tpu]' brings the TPU compiler"
        )
    if target.platform != "cuda":
        return
    plugins = ("jax_cuda13_plugin", "jax_cuda12_plugin")
    if not any(importlib.util.find_spec(name) for name in plugins):
        raise CompilerError(
            "no CUDA plugin of jax is installed; pip install --no-deps "
            f"jax-cuda13-plugin=={jax.__version__} jax-cuda13-pjrt=={jax.__version__} brings the "
            "GPU compiler"
        )
    if shutil.which("ptxas") is None:
        raise CompilerError("no ptxas on the PATH; pip install nvidia-cuda-nvcc brings it")


def _schedules(target: Target, folder: Path, module: Module) -> dict[str, Schedule]:
    """Return the schedules of all instructions that have one.

    libtpu schedules only one of several instructions that are alike; the others share its schedule.
    """
    parsed, keys = {}, {}
    for ran in module.run():
        instruction = ran.instruction
        keys[instruction.name] = module.alike(ran.computation, instruction)
        bundles = folder / f"{instruction.name}.bundles.txt"
        if not bundles.exists() or instruction.name in parsed:
            continue
        use = folder / f"{instruction.name}.utilization.txt"
        try:
            parsed[instruction.name] = parse_schedule(
                bundles.read_text(encoding="utf-8", errors="replace"),
                use.read_text(encoding="utf-8"),
                target.matrix,
                either=any(name in instruction.name for name in EITHER),
            )
        except ValueError:  # dumps of what is not a kernel may have another form
            if module.kernel(instruction) is not None:
                raise
    done = {keys[name]: schedule for name, schedule in parsed.items()}
    return {name: done[key] for name, key in keys.items() if key in done} | parsed


def _told(target: Target, job: Job, i: int, jobs: int, outcome: Program | Failure) -> str:
    what = " ".join(str(value) for value in job.arguments.values() if not isinstance(value, dict))
    end, warned = "failed", ""
    if isinstance(outcome, Program):
        end = f"{outcome.seconds:.0f} s"
        warned = "".join(f"\n  warning: {text}" for text in outcome.warnings)
    return f"{target.name}: {i + 1}/{jobs} {what or job.function}: {end}{warned}"


def _last_words(errors: Path, code: int, target: Target) -> str:
    lines = [line for line in errors.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1].strip() if lines else "it said nothing"
    return f"compiling for {target.name} ended with code {code}: {last}"
