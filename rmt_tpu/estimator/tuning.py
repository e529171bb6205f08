"""Rate a kernel's candidates by the compiler of a target, in processes with a time limit."""

import dataclasses
import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pallas_kernels import tuned
from pallas_kernels.target import slug
from rmt_tpu.estimator.cost import program_cost
from rmt_tpu.estimator.programs import (
    CompilerError,
    Failure,
    Job,
    Program,
    Worker,
)
from rmt_tpu.estimator.search import Rating, Refusal
from rmt_tpu.estimator.spaces import Problem
from rmt_tpu.estimator.topology import Target

# Of the ways below to rate a program: another number where an estimate is made otherwise.
RATING = 3
# Words of errors of programs that take more memory on chip than there is.
_NO_ROOM = re.compile(r"vmem|smem|shared memory|scoped|out of memory|RESOURCE_EXHAUSTED", re.I)
# Of a GPU's multiprocessor: registers, warps that hide the latency of memory, bytes of a spill that
# cost as much as all the rest.
_REGISTERS, _WARPS, _SPILLED = 65536, 8, 128


class Compiler:
    """Rates candidates for one target; to be closed.

    Args:
      target: to compile for.
      limit: seconds for a candidate.

    Raises:
      CompilerError: the compiler is missing.
    """

    def __init__(self, target: Target, limit: float):
        self._target, self._limit = target, limit
        self._worker = Worker(target)

    def close(self) -> None:
        self._worker.close()

    def rate(self, problem: Problem, blocks: tuned.Blocks) -> Rating | Refusal:
        """What becomes of a candidate; a process that crashes or hangs ends with it alone."""
        given = dataclasses.asdict(problem) | {"key": dict(problem.key)}
        arguments = {"problem": given, "blocks": tuned.fields(blocks)}
        job = Job("rmt_tpu.estimator.spaces:lower_candidate", arguments)
        try:
            outcome = self._worker.compile(job, self._limit)
        except CompilerError as error:
            return Refusal("failed", str(error))
        if isinstance(outcome, Failure):
            return _refusal(outcome)
        if self._target.platform == "cuda":
            try:
                found = ptxas_usage(outcome.ptx)
            except CompilerError as error:
                return Rating(None, words=str(error))
            use = next((u for name, u in found.items() if name.startswith(problem.kernel)), None)
            moved = outcome.memory["argument"] + outcome.memory["output"]
            return gpu_rating(use, moved, self._target.bandwidth)
        return tpu_rating(outcome, problem.bytes())


def _refusal(failure: Failure) -> Refusal:
    if failure.error == "TimeLimit":
        return Refusal("time limit", failure.message)
    no_room = failure.error != "RuntimeError" and _NO_ROOM.search(failure.message)
    return Refusal("no room" if no_room else "failed", failure.message)


def tpu_rating(program: Program, needed: int) -> Rating:
    """The longer of schedule and bytes of all its kernels; `needed` are those of any blocks."""
    kernels = program_cost(program).kernels
    if not kernels or any(kernel.cycles is None for kernel in kernels):
        return Rating(None, words="a kernel has no schedule")
    # Loops inside it, of copies of as many sources as there are, count once.
    if any(kernel.trips[:1] == (None,) for kernel in kernels):
        return Rating(None, words="a grid of unknown length")
    bandwidth = program.target.bandwidth
    moved = sum(k.calls * k.bytes.total for k in kernels)
    cycles, bundles = (
        sum(k.calls * n for k, n in zip(kernels, numbers, strict=True))
        for numbers in ([k.cycles for k in kernels], [k.bundles for k in kernels])
    )
    words = f"{cycles:,} cycles, {bundles:,} bundles, bytes {moved / bandwidth * 1e6:.1f} us"
    seconds = sum(kernel.calls * kernel.seconds for kernel in kernels)
    return Rating(
        seconds, max(kernel.vmem_bytes for kernel in kernels), words, min(moved, needed) / bandwidth
    )


def gpu_rating(use: "Usage | None", moved: int, bandwidth: float) -> Rating:
    """The time of its bytes, longer where few warps run at a time or registers are spilled.

    Fit to rank candidates, and for nothing else.
    """
    if use is None:
        return Rating(None, words="ptxas says nothing of the kernel")
    floor = moved / bandwidth
    few = max(1.0, _WARPS / max(use.warps_at_a_time, 1))
    seconds = floor * few * (1 + use.spilled / _SPILLED)
    words = (
        f"{use.registers} registers, {use.spilled} bytes spilled, {use.warps_at_a_time} warps "
        "at a time"
    )
    return Rating(seconds, use.registers * use.threads * 4, words, floor)


@dataclasses.dataclass(frozen=True)
class Usage:
    """What a kernel takes of a multiprocessor; `spilled` in bytes a thread."""

    registers: int
    spilled: int
    threads: int

    @property
    def warps_at_a_time(self) -> int:
        """By registers alone."""
        blocks = _REGISTERS // max(1, math.ceil(self.registers / 8) * 8 * self.threads)
        return blocks * self.threads // 32


def ptxas_usage(ptx: str) -> dict[str, Usage]:
    """What `ptxas` assigns, by the kernel's name.

    Raises:
      CompilerError: it refuses, as an older one does what a newer jax gives it.
    """
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for module in re.split(r"(?m)^(?=\.version)", ptx)[1:]:
            path = Path(folder) / "kernel.ptx"
            path.write_text(module)
            target = re.search(r"\.target (\w+)", module)[1]
            command = [_ptxas(), "-v", f"-arch={target}", "-o", "/dev/null", str(path)]
            done = subprocess.run(command, capture_output=True, encoding="utf-8")
            if done.returncode:
                raise CompilerError(f"ptxas refuses: {' '.join(done.stderr.split())[:200]}")
            found |= parse_usage(module, done.stderr)
    return found


def _ptxas() -> str:
    """That of the wheel nvidia-cuda-nvcc, which fits jax's plugin; else the one on the PATH."""
    places = (Path(path) / "nvidia" / "cu13" / "bin" / "ptxas" for path in sys.path)
    return next((str(p) for p in places if p.exists()), shutil.which("ptxas") or "ptxas")


def parse_usage(ptx: str, log: str) -> dict[str, Usage]:
    """The same, from a module and from what `ptxas -v` says of it."""
    threads = dict(re.findall(r"\.entry (\w+)\([^{]*?\.(?:req|max)ntid (\d+)", ptx, re.DOTALL))
    pattern = r"entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers"
    return {
        name: Usage(int(registers), int(spilled), int(threads.get(name, 128)))
        for name, spilled, registers in re.findall(pattern, log, re.DOTALL)
    }


def target_of(device_kind: str, targets: Mapping[str, Target]) -> Target | None:
    """The target that describes a device that is there; None if there is none."""
    name = slug(device_kind)
    return next((t for t in targets.values() if slug(t.kind) == name), None)
