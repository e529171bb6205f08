"""Ratings of a kernel's candidate block sizes, each compiled within a time limit."""

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

# The version of the rating method; increase it when ratings are computed in a different way.
RATING = 3
# Matches error messages for programs that need more on-chip memory than the chip has.
_NO_ROOM = re.compile(r"vmem|smem|shared memory|scoped|out of memory|RESOURCE_EXHAUSTED", re.I)
# _REGISTERS: the number of registers of a GPU multiprocessor. _WARPS: the number of concurrent
# warps that suffices to hide the latency of memory. _SPILLED: if a kernel spills this many bytes
# per thread, its estimated time is doubled.
_REGISTERS, _WARPS, _SPILLED = 65536, 8, 128


class Compiler:
    """A compiler that rates candidate block sizes for one target; call `close` when done.

    Args:
      target: the target to compile for.
      limit: the time limit per candidate, in seconds.

    Raises:
      CompilerError: the compiler is missing.
    """

    def __init__(self, target: Target, limit: float):
        self._target, self._limit = target, limit
        self._worker = Worker(target)

    def close(self) -> None:
        """Stop the compiler's process."""
        self._worker.close()

    def rate(self, problem: Problem, blocks: tuned.Blocks) -> Rating | Refusal:
        """Compile and rate a candidate, or return a refusal if it does not compile in time."""
        problem_fields = dataclasses.asdict(problem) | {"key": dict(problem.key)}
        arguments = {"problem": problem_fields, "blocks": tuned.fields(blocks)}
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
            # Another kernel of the same program may have a name that begins with this one.
            use = found.get(problem.kernel)
            moved = outcome.memory["argument"] + outcome.memory["output"]
            return gpu_rating(use, moved, self._target.bandwidth)
        return tpu_rating(outcome, problem.bytes())


def _refusal(failure: Failure) -> Refusal:
    if failure.error == "TimeLimit":
        return Refusal("time limit", failure.message)
    no_room = failure.error != "RuntimeError" and _NO_ROOM.search(failure.message)
    return Refusal("no room" if no_room else "failed", failure.message)


def tpu_rating(program: Program, needed: int) -> Rating:
    """Rate a TPU program by the time of its kernels.

    The time of a kernel is the time of its schedule or of its HBM traffic, whichever is longer.
    `needed` is the number of bytes that every choice of block sizes must move.
    """
    kernels = program_cost(program).kernels
    if not kernels or any(kernel.cycles is None for kernel in kernels):
        return Rating(None, words="the compiler wrote no schedule of a kernel")
    # A program cannot be rated if the length of an outermost loop is unknown. An inner loop of
    # unknown length counts as one iteration; an example is a loop over a variable number of
    # sources.
    if any(kernel.trips[:1] == (None,) for kernel in kernels):
        return Rating(None, words="the length of a grid is unknown")
    bandwidth = program.target.bandwidth
    moved = sum(k.calls * k.bytes.total for k in kernels)
    cycles, bundles = (
        sum(k.calls * n for k, n in zip(kernels, numbers, strict=True))
        for numbers in ([k.cycles for k in kernels], [k.bundles for k in kernels])
    )
    words = (
        f"{cycles:,} cycles, {bundles:,} bundles, memory traffic {moved / bandwidth * 1e6:.1f} us"
    )
    seconds = sum(kernel.calls * kernel.seconds for kernel in kernels)
    return Rating(
        seconds, max(kernel.vmem_bytes for kernel in kernels), words, min(moved, needed) / bandwidth
    )


def gpu_rating(use: "Usage | None", moved: int, bandwidth: float) -> Rating:
    """Rate a GPU kernel by its memory traffic, concurrent warps and spilled registers.

    The estimated time is the time to move the bytes, times a penalty for few concurrent warps and a
    penalty for spills. The estimate is used only to rank candidates.

    Args:
      use: the resources that the kernel uses, or None if unknown.
      moved: the bytes that the kernel moves.
      bandwidth: the memory bandwidth in bytes/s.
    """
    if use is None:
        return Rating(None, words="ptxas reports nothing about the kernel")
    floor = moved / bandwidth
    occupancy_penalty = max(1.0, _WARPS / max(use.warps_at_a_time, 1))
    seconds = floor * occupancy_penalty * (1 + use.spilled / _SPILLED)
    words = (
        f"{use.registers} registers, {use.spilled} bytes spilled, {use.warps_at_a_time} concurrent "
        "warps"
    )
    return Rating(seconds, use.registers * use.threads * 4, words, floor)


@dataclasses.dataclass(frozen=True)
class Usage:
    """The resources of a GPU multiprocessor that a kernel uses.

    `spilled` is in bytes per thread.
    """

    registers: int
    spilled: int
    threads: int

    @property
    def warps_at_a_time(self) -> int:
        """The number of warps for which a multiprocessor has enough registers at the same time."""
        blocks = _REGISTERS // max(1, math.ceil(self.registers / 8) * 8 * self.threads)
        return blocks * self.threads // 32


def ptxas_usage(ptx: str) -> dict[str, Usage]:
    """Run `ptxas`, and return a dict from kernel name to the resources assigned to the kernel.

    Raises:
      CompilerError: `ptxas` rejects the code, for example because `ptxas` is older than jax
        expects.
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
                raise CompilerError(f"ptxas failed: {' '.join(done.stderr.split())[:200]}")
            found |= parse_usage(module, done.stderr)
    return found


def _ptxas() -> str:
    """Return the path of `ptxas`.

    The wheel nvidia-cuda-nvcc has a `ptxas` that matches jax's CUDA plugin. If the wheel is not
    installed, return the `ptxas` found on PATH.
    """
    places = (Path(path) / "nvidia" / "cu13" / "bin" / "ptxas" for path in sys.path)
    return next((str(p) for p in places if p.exists()), shutil.which("ptxas") or "ptxas")


def parse_usage(ptx: str, log: str) -> dict[str, Usage]:
    """Parse the resources of each kernel from a module's PTX and the output of `ptxas -v`."""
    threads = dict(re.findall(r"\.entry (\w+)\([^{]*?\.(?:req|max)ntid (\d+)", ptx, re.DOTALL))
    pattern = r"entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers"
    return {
        name: Usage(int(registers), int(spilled), int(threads.get(name, 128)))
        for name, spilled, registers in re.findall(pattern, log, re.DOTALL)
    }


def target_of(device_kind: str, targets: Mapping[str, Target]) -> Target | None:
    """Return the target that describes a device kind, or None if no target does."""
    name = slug(device_kind)
    return next((t for t in targets.values() if slug(t.kind) == name), None)
