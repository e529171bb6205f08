"""The main program of a process that compiles for one target, started by `estimator.Worker`.

    python -m rmt_tpu.estimator.worker <folder with request.json>

The program reads one job per line from standard input. For each job, it writes files to a folder:
result.json, hlo.txt, and the schedules of a TPU's instructions or the PTX code for a GPU. It prints
a line when these files are complete.
"""

import importlib
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from rmt_tpu.estimator.memory import DUMPS

# Matches the names of the files into which libtpu writes schedules:
# "<time>-<instruction>-<pass number>-<suffix>.txt".
_SCHEDULE = re.compile(r"\d+-(.+)-\d+-(final_bundles|final_hlo-static-per-bundle-utilization)\.txt")
_KINDS = {"final_bundles": "bundles", "final_hlo-static-per-bundle-utilization": "utilization"}
_MEMORY = ("argument", "output", "alias", "temp", "generated_code")
# Compiler messages are shortened to this number of characters, because some of them contain a whole
# program.
_MESSAGE = 400


def main() -> None:
    """Compile each job read from standard input, with the options in request.json."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    folder = Path(sys.argv[1])
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    devices = topologies.get_topology_desc(**request["topology"]).devices
    for i, line in enumerate(sys.stdin):
        job = json.loads(line)
        results = folder / str(i)
        results.mkdir()
        result: dict[str, Any] = {"info": {}}
        try:
            device = devices if job["whole_topology"] else devices[0]
            result |= _compile(device, job, folder / "dump", results, result["info"])
        except Exception as error:  # The error becomes this job's result, and later jobs still run.
            message = " ".join(f"{type(error).__name__}: {error}".split())
            result |= {"error": message[:_MESSAGE], "error_type": type(error).__name__}
        for path in (folder / "dump").glob("*.*"):
            if path.name.endswith((*DUMPS.values(), ".ptx")):
                shutil.copyfile(path, results / path.name)
        shutil.rmtree(folder / "dump", ignore_errors=True)
        (results / "result.json").write_text(json.dumps(result), encoding="utf-8")
        print(f"ended {i}", flush=True)


def _end_with(parent: int) -> None:
    """Kill this process group when the parent exits, instead of finishing a long compilation."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)


def _compile(
    device: jax.Device | list[jax.Device],
    job: dict[str, Any],
    dump: Path,
    results: Path,
    info: dict[str, Any],
) -> dict[str, Any]:
    module, _, name = job["function"].partition(":")
    dump.mkdir(exist_ok=True)
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        build = getattr(importlib.import_module(module), name)
        lowered = build(device, **job["arguments"])
        if isinstance(lowered, tuple):
            lowered, extra_info = lowered
            info.update(extra_info)
        shutil.rmtree(dump)  # Delete dumps of other programs, which JAX compiled during lowering.
        dump.mkdir()
        compiled = lowered.compile()
    seconds = time.perf_counter() - start
    text = compiled.as_text()
    (results / "hlo.txt").write_text(text, encoding="utf-8")
    for path in sorted(dump.iterdir()):
        if (found := _SCHEDULE.fullmatch(path.name)) is not None:
            path.replace(results / f"{found.group(1)}.{_KINDS[found.group(2)]}.txt")
    memory = compiled.memory_analysis()
    sizes = {kind: getattr(memory, f"{kind}_size_in_bytes") for kind in _MEMORY}
    warned = [" ".join(str(warning.message).split())[:_MESSAGE] for warning in caught]
    return {"seconds": seconds, "memory": sizes, "warnings": warned}


if __name__ == "__main__":
    main()
