"""Compile programs for a device without one, and get back what the compiler made of them.

libtpu reads its options when it loads, so that every target gets a process of its own; it compiles
the jobs one by one. What to compile is named, not passed: `"package.module:function"`, called as
`function(device, **arguments)` with the target's first device, gives a `jax.stages.Lowered`, or a
tuple of that and of JSON values (a dict) that are handed back with what becomes of it.
"""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.compiler.hlo import Instruction, Module
from pallas_kernels.compiler.memory import Assignment, read_assignment
from pallas_kernels.compiler.schedule import Schedule, parse_schedule
from pallas_kernels.compiler.topology import Target, compiler_environment


class CompilerError(RuntimeError):
    """The compiler is missing, or ended without a result; the message is one line."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What to compile: `function(device, **arguments)`, the function by its importable name.

    With `whole_topology` it is given a list of all devices.
    """

    function: str
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    whole_topology: bool = False


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled job.

    Attributes:
      target: what it was compiled for.
      module: the compiled instructions.
      schedules: of its kernels and fusions, by the name of the instruction, as far as libtpu left
        them; equal kernels share one.
      memory: bytes by kind, as in `jax.stages.Compiled.memory_analysis()`.
      seconds: that compiling took.
      warnings: given meanwhile, as by a call that has no kernel.
      assignment: what lies in memory, if it was asked for.
      info: what the job's function gave beside the program.
    """

    target: Target
    module: Module
    schedules: dict[str, Schedule]
    memory: dict[str, int]
    seconds: float
    warnings: list[str]
    assignment: Assignment | None = None
    info: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Failure:
    """A job that could not be lowered or compiled, and why in one line.

    `error` is the name of the exception. A program that needs more memory than there is comes with
    its `assignment`, if that was asked for.
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
    """What becomes of each job, in their order.

    Args:
      target: the device to compile for.
      jobs: what to compile.
      progress: is told of each job that ends.
      buffers: whether to read how memory is assigned.

    Raises:
      CompilerError: the compiler is missing, or its process ended early.
    """
    _check_installed(target)
    with tempfile.TemporaryDirectory(prefix="tpu-compile-") as name:
        folder = Path(name)
        dump, errors = folder / "dump", folder / "stderr.txt"
        environment = os.environ | compiler_environment(target, str(dump), buffers=buffers)
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        request = {
            "topology": target.options,
            "folder": name,
            "jobs": [dataclasses.asdict(job) for job in jobs],
        }
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        worker = [sys.executable, "-m", "pallas_kernels.compiler.worker", str(folder)]
        with errors.open("w") as stderr:
            process = subprocess.Popen(
                worker, env=environment, stdout=subprocess.PIPE, stderr=stderr, encoding="utf-8"
            )
        try:
            for i, job in enumerate(jobs):
                # A line for each job; what libraries print beside them does not matter.
                ended = any(line.strip() == f"ended {i}" for line in process.stdout)
                if not ended:
                    process.wait()
                    raise CompilerError(_last_words(errors, process.returncode, target))
                outcome = _read(target, folder / str(i))
                if progress is not None:
                    progress(_told(target, job, i, len(jobs), outcome))
                yield outcome
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def lower(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    device: jax.Device,
    *,
    donate: tuple[int, ...] = (),
) -> jax.stages.Lowered:
    """`function` lowered for a device that need not exist, for arguments of these shapes.

    The compiler chooses how arguments and results lie in memory, as it does within a larger
    program: it would otherwise have to copy them at the program's edge.

    Args:
      function: of arrays.
      arguments: anything with a shape and a dtype, in trees.
      device: of a topology.
      donate: which arguments the results may overwrite.
    """
    from jax.experimental.layout import Format, Layout

    here = NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec())
    anyhow = Format(Layout.AUTO, here)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tuple(arguments))
    jitted = jax.jit(function, in_shardings=anyhow, out_shardings=anyhow, donate_argnums=donate)
    # Block sizes are looked up by the device of the mesh in use.
    with jax.sharding.use_abstract_mesh(here.mesh.abstract_mesh):
        return jitted.lower(*shapes)


@functools.cache
def versions() -> dict[str, str]:
    """Of what makes the figures: jax and, where it is installed, libtpu."""
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
    schedules = _schedules(target, folder, [ran.instruction for ran in module.run()])
    return Program(
        target=target,
        module=module,
        schedules=schedules,
        memory=result["memory"],
        seconds=result["seconds"],
        warnings=result["warnings"],
        assignment=assignment,
        info=result["info"],
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


def _schedules(
    target: Target, folder: Path, instructions: Sequence[Instruction]
) -> dict[str, Schedule]:
    """Of what has one; libtpu schedules only one of the kernels that are alike."""
    parsed = {}
    for instruction in instructions:
        bundles = folder / f"{instruction.name}.bundles.txt"
        if not bundles.exists() or instruction.name in parsed:
            continue
        use = folder / f"{instruction.name}.utilization.txt"
        try:
            parsed[instruction.name] = parse_schedule(
                bundles.read_text(encoding="utf-8", errors="replace"),
                use.read_text(encoding="utf-8"),
                target.matrix,
            )
        except ValueError:  # of what is not a kernel there are other views
            if instruction.is_kernel:
                raise
    kernels = [i for i in instructions if i.is_kernel]
    by_body = {k.kernel_body: parsed[k.name] for k in kernels if k.name in parsed}
    alike = {k.name: by_body[k.kernel_body] for k in kernels if k.kernel_body in by_body}
    return alike | parsed


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
