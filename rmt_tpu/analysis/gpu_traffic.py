"""The memory traffic and launches of ops in programs that are compiled for a GPU.

    python -m rmt_tpu.analysis.gpu_traffic h100

The command prints JSON: a list with one dict per call of an op, forward and backward. It compares
the least bytes, which move each array once, with those of plain JAX, where XLA's fusions read and
write arrays several times, and with those of each kind of kernels. No GPU is needed.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Collection

from rmt_tpu.estimator import ops
from rmt_tpu.estimator.hlo import Module
from rmt_tpu.estimator.programs import Failure, Job, Worker
from rmt_tpu.estimator.topology import DEVICES

_OPS = "key_vector", "depth_attention"
IMPLEMENTATIONS = "xla", "triton", "mosaic_gpu"
GPUS = tuple(name for name, target in DEVICES.items() if target.platform == "cuda")


def rows(gpu: str, sizes: Collection[str] = ()) -> list[dict]:
    """Compile calls of the key-vector ops and of depth attention, and return a dict for each.

    The keys are the "op", its "size", the "least" bytes, and the names of implementations. The
    value for an implementation is a dict with the "bytes" that its program moves and its
    "launches", or None if the implementation does not support the call.

    Args:
      gpu: the name of a GPU, one of GPUS.
      sizes: the names of the calls, as in `rmt_tpu.estimator.ops.cases`; () means all.

    Raises:
      CompilerError: the GPU compiler is not installed.
    """
    found = []
    with contextlib.closing(Worker(DEVICES[gpu])) as worker:
        for op in _OPS:
            for name, case in ops.cases(op).items():
                if case in ops.TABLE_1 or (sizes and name not in sizes):
                    continue
                row = {"op": op, "size": name, "least": case.work("training").bytes}
                for implementation in IMPLEMENTATIONS:
                    arguments = {"op": op, "case": name, "direction": "training"}
                    arguments["implementation"] = implementation
                    program = worker.compile(Job("rmt_tpu.estimator.ops:lower_case", arguments))
                    failed = isinstance(program, Failure)
                    if failed and program.error != "UnsupportedImplementation":
                        raise RuntimeError(f"{op} {name} {implementation}: {program.message}")
                    row[implementation] = None if failed else _moved(program.module)
                found.append(row)
                print(f"{gpu}: {op} {name}", file=sys.stderr, flush=True)
    return found


def _moved(module: Module) -> dict[str, int]:
    traffic = (
        ran.times * module.traffic(ran.computation, ran.instruction).total for ran in module.run()
    )
    return {"bytes": sum(traffic), "launches": module.launches()}


def main() -> int:
    """Print the rows for the GPU that the command line names, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("gpu", choices=GPUS, help="the GPU to compile for")
    print(json.dumps(rows(parser.parse_args().gpu), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
