"""Recompile the calls listed in calibration.json and update the compiler's figures in that file.

    pip install tokamax==0.0.12
    python -m rmt_tpu.estimator.calibrate v5p v6e

The published times and block sizes in the file are not changed. tokamax is needed only because it
contains the kernels that were timed; no device is needed. At the end, the program prints the tables
that belong in docs/benchmarks/estimates.md.
"""

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence

from rmt_tpu.estimator import calibration, published
from rmt_tpu.estimator.cost import Work, work_of
from rmt_tpu.estimator.programs import Failure, Job, Program, compile_jobs, versions
from rmt_tpu.estimator.topology import DEVICES


def main() -> int:
    """Recompile the calls of the targets in `sys.argv`, or of all targets, and save the results.

    Returns:
      The exit code: 0; 1 if tokamax is not installed; 2 if a target has no calls in the file.
    """
    if importlib.util.find_spec("tokamax") is None:
        print(
            "tokamax is not installed; pip install tokamax==0.0.12 installs the kernels",
            file=sys.stderr,
        )
        return 1
    values = json.loads(calibration.PATH.read_text(encoding="utf-8"))
    rows = list(calibration.parse(values))
    legal = list(dict.fromkeys(row.target for row in rows))
    for target in sys.argv[1:] or legal:
        if target not in legal:
            print(f"{target!r} has no calibration rows; legal: {', '.join(legal)}", file=sys.stderr)
            return 2
        mine = [i for i, row in enumerate(rows) if row.target == target]
        for i, row in zip(mine, compiled([rows[i] for i in mine]), strict=True):
            what = calibration.described(row)
            print(f"{target} {what}: {rows[i].ratio():.3f}, now {row.ratio():.3f}", flush=True)
            rows[i] = row
        values["versions"] |= versions()
        calibration.PATH.write_text(calibration.text(values, rows), encoding="utf-8")
    print(calibration.table())
    return 0


def compiled(rows: Sequence[calibration.PublishedCall]) -> Iterator[calibration.PublishedCall]:
    """Recompile published calls for one target, and yield them with new work and memory use.

    The installed compiler reports the work and the memory use.

    Raises:
      RuntimeError: a call does not compile.
    """
    jobs = [Job(f"{published.__name__}:{row.op}", row.arguments) for row in rows]
    for row, outcome in zip(rows, compile_jobs(DEVICES[rows[0].target], jobs), strict=True):
        if isinstance(outcome, Failure):
            raise RuntimeError(f"{row.op} does not compile for {row.target}: {outcome.message}")
        memory = sum(outcome.memory[kind] for kind in ("argument", "output", "temp"))
        yield dataclasses.replace(row, work=tuple(works(outcome)), bytes=memory)


def works(program: Program) -> Iterator[tuple[Work, int]]:
    """Yield the work of each instruction that costs time, and the number of times that it runs."""
    for ran in program.module.run():
        work = work_of(program, ran)
        if work.kind not in ("asynchronous", "collective") and (work.hbm or work.estimate):
            rounded = {k: round(getattr(work, k), 1) for k in ("matrix", "hbm", "parked")}
            yield dataclasses.replace(work, **rounded), ran.times


if __name__ == "__main__":
    # Worker processes import this module by its name, so the functions must come from the module of
    # that name rather than from __main__.
    from rmt_tpu.estimator import calibrate

    sys.exit(calibrate.main())
